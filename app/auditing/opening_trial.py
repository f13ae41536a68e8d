"""Whether a run's helpers open what would break its guarantee: tried out on them, once, with real masks.

What a helper opens depends on headers, seals and signatures alone, never on data or noise, so one trial is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...clients import Cohort
from ...privacy import ConfigurationError, MemoryLedger, RefusedError
from ...privacy.sums.masking import Sealed
from ...privacy.sums.opening_rule import MemoryOpeningRecord, Opener, OpeningRefusedError
from ...privacy.sums.roster import HelperKey
from ..runs.experiment import Experiment

_VICTIM = "0"


def opens_without_acks(experiment: Experiment) -> bool:
    """Whether all helpers open a second sum in which a machine was told that its first, opened release never arrived.

    Parameters
    ----------
    experiment : Experiment
        Under secure aggregation.

    Raises
    ------
    ConfigurationError
        If not even an honest server's sum is opened.

    Notes
    -----
    If it is so, every later sum has the machine's old samples in it again, and mu does not hold.
    """
    names = [str(machine) for machine in range(experiment.config.cohort_floor)]
    cohort = Cohort(names, lambda name: experiment.client(int(name), MemoryLedger()))
    config = experiment.config
    openers = [
        Opener(name, HelperKey.simulated(config.seed, name), experiment.roster, MemoryOpeningRecord())
        for name in experiment.roster.helper_names
    ]
    first = _sealed(experiment, cohort, 1, dict.fromkeys(names, 0))
    if not _all_open(openers, experiment.session, 1, first):
        raise ConfigurationError("Expected helpers that open an honest server's sum, got a refusal of the first one.")
    second = _sealed(experiment, cohort, 2, {name: 0 if name == _VICTIM else 1 for name in names})
    with _in_silence():
        return _all_open(openers, experiment.session, 2, second)


@contextmanager
def _in_silence() -> Iterator[None]:
    """A refusal is what is hoped for here: no helper's log need warn of it."""
    logger = logging.getLogger(Opener.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _sealed(experiment: Experiment, cohort: Cohort, server_round: int, acks: Mapping[str, int]) -> list[Sealed]:
    """What helpers get to see of a round's releases."""
    points = [experiment.model.initial_parameters(experiment.config.seed)] * cohort.client(_VICTIM).query_points
    sealed = []
    for name, release in cohort.releases(server_round, experiment.session, acks, points):
        if isinstance(release, RefusedError):
            raise ConfigurationError(f"Expected releases of all machines, got a refusal of {name!r}: {release}.")
        masked = experiment.masking(int(name)).mask(release, experiment.session, experiment.policy(int(name)))
        sealed.append(masked.sealed)
    return sealed


def _all_open(openers: list[Opener], session: str, server_round: int, sealed: list[Sealed]) -> bool:
    try:
        for opener in openers:
            opener.open(session, str(server_round), sealed)
    except OpeningRefusedError:
        return False
    return True
