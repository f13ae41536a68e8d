"""The same run without noise, made in this process on the simulated run's data: what a private run is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..engines.start import ENGINES, run_cohort
from ..nodes.flower_internals import without_log
from ..settings.layers import names_own, search_here
from ..settings.run_config import NO_NOISE, RunConfig, run_keys, without_unread
from .alone import NOTE, alone
from .experiment import prepare
from .outcome import Outcome, Twin
from .run_files import PICTURE_NAME, write_outcome
from .run_summary import is_better, plot_accuracy

_FIGURES = ("accuracy", "auc", "loss", "rounds", "seconds")
_FINAL_ONLY = 1_000_000
"""``evaluate-every``: the last round alone."""
_OF_FILES = ("track", "out-dir", "run-name", "checkpoint", "gradient-norm")
"""Keys that say what a run leaves, and where: this one leaves nothing."""
_STEPS = 2
"""Configurations that differ in their steps alone: the preset's for no noise, and the run's own. The better counts."""
_OF_NOISE = ("epsilon", "noise-quality", "schedule", "secret-order")


def configs_without_noise(outcome: Outcome) -> list[RunConfig]:
    """The configurations that a recorded run's twin without noise may have.

    In the first the preset chooses anew what it chose for the noise, in the second everything is the run's own, and in
    the third the rounds are the preset's as well: few rounds may be too few for steps that are not afraid of noise.

    Raises
    ------
    ConfigurationError
        If the run cannot be made again here, or not without noise.
    """
    if outcome.engine not in (*ENGINES, None):
        raise ConfigurationError(
            "Expected a simulated run, got one of real machines: their data are in no one place, so there is no run "
            "without noise to compare with."
        )
    if "mechanism" not in outcome.config:
        raise ConfigurationError(
            "Expected a run of murmurfl's own app, got one of another program, which alone can make it without noise."
        )
    asked = _asked(outcome)
    worked_out = {name: outcome.config[name] for name in outcome.asked}  # null: without bound, as an unset diameter is
    chosen = without_unread({**asked, **{name: value for name, value in worked_out.items() if value is not None}})
    made: list[RunConfig] = []
    refused: ConfigurationError | None = None
    for settings in (asked, chosen, {**asked, "num-rounds": 0, "max-participations": 0}):
        try:
            config = RunConfig.from_mapping(_noiseless(settings))
            prepare(config).check_rounds()
        except ConfigurationError as error:
            refused = refused or error
        else:
            made += [] if config in made else [config]
    if refused is not None and not made:
        raise refused
    return made


def _noiseless(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Settings of a run without noise that leaves nothing, and without what belongs to the noise."""
    of_noise = [one.name for one in run_keys().values() if one.read_by == "mechanism"]
    plain = {name: run_keys()[name].default for name in (*of_noise, *_OF_NOISE, *_OF_FILES)}
    return {**settings, **plain, "mechanism": NO_NOISE, "evaluate-every": _FINAL_ONLY}


def without_noise(outcome: Outcome) -> Twin:
    """The twin of a recorded run without noise: of simulated data, and not private."""
    if names_own(outcome.config):
        search_here()
    best: Outcome | None = None
    tried: list[object] = []
    with without_log():  # that nothing is private is what these runs are for
        for number, config in enumerate(configs_without_noise(outcome)):
            if number == _STEPS and best is not None and is_better(best, outcome):
                break  # noise cost something, and that is what there was to see
            steps = prepare(config).num_rounds, prepare(config).values
            if steps in tried:
                continue
            tried.append(steps)
            made = run_cohort(config).outcome
            best = made if best is None or is_better(made, best) else best
    return Twin(note=NOTE, **{name: getattr(best, name) for name in _FIGURES})


def add_alone(folder: Path) -> Outcome:
    """Put what one machine reaches alone into a simulated run's files; any other run stays as it is."""
    outcome = Outcome.read(folder)
    if outcome.engine not in ENGINES or outcome.alone is not None:
        return outcome
    if names_own(outcome.config):
        search_here()
    outcome = outcome.model_copy(update={"alone": alone(RunConfig.from_mapping(_asked(outcome)))})
    write_outcome(outcome, folder)
    return outcome


def _asked(outcome: Outcome) -> dict[str, Value]:
    """The run configuration as it was asked for."""
    return {**{name: value for name, value in outcome.config.items() if name in run_keys()}, **outcome.asked}


def add_without_noise(folder: Path) -> Outcome:
    """Make a run's twin without noise, and put it into the run's files.

    A run that has one already, or that had no noise itself, stays as it is.
    """
    outcome = Outcome.read(folder)
    if outcome.config.get("mechanism") == NO_NOISE or outcome.without_noise is not None:
        return outcome
    outcome = outcome.model_copy(update={"without_noise": without_noise(outcome)})
    plot_accuracy(outcome, folder / PICTURE_NAME)
    write_outcome(outcome, folder)
    return outcome
