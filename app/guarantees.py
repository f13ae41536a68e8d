"""What the epsilons of runs are true of: their :class:`~murmurfl.privacy.Guarantee`.

The words come from the policy that was used and from nowhere else; the method hands it over
(:meth:`~murmurfl.app.methods.Method.guarantee`). This file adds what only a run knows: what the figure rests on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..privacy import SIMULATED, Guarantee, caption, stated_words
from .config import RunConfig, without_unread
from .experiment import Experiment, prepare
from .methods import METHODS, Problem
from .models.softmax import SoftmaxRegression
from .tasks.base import Dataset, Shard

_NOMINAL = 10
"""Batches of a machine where only words are wanted of a policy."""

EXPECTED = "Real machines: what the run configuration expects of them; their own figure comes at the end."

Statements = Mapping[str, Mapping[str, Any]]


def run_guarantee(
    experiment: Experiment, mu: float, *, deployed: bool = False, statements: Statements | None = None
) -> Guarantee:
    """What a run guarantees.

    Parameters
    ----------
    experiment : Experiment
    mu : float
        Of everything the run may release; infinite without noise, 0 if nobody is asked.
    deployed : bool
        Whether the machines are real ones.
    statements : mapping, optional
        What real machines say of themselves, once they were asked.

    Notes
    -----
    **Formal guarantees.** Those of :meth:`~murmurfl.app.experiment.Experiment.guaranteed_mu`. For real machines it is
    what they say or, before they were asked, what the run configuration expects; the notes say which.
    """
    words = stated_words(str(one.get("mechanism", "")) for one in (statements or {}).values()) if deployed else ""
    notes = (_basis(experiment, deployed, statements),)
    return experiment.method.guarantee(experiment, mu, notes=notes, words=words, stated=deployed)


def caption_guarantee(config: RunConfig) -> Guarantee:
    """What a simulated run guarantees, without its data and what differs between the runs of a table; for captions.

    The words are those of the policy that the method makes for a problem of some size. The size does not show in them.
    """
    method = METHODS[config.strategy]
    rounds, model = config.passes * _NOMINAL, SoftmaxRegression(1, 2)
    values = method.preset(config, rounds, model).overridden(config)
    nothing = np.zeros((config.batch_size * _NOMINAL, 1), np.float32), np.zeros(config.batch_size * _NOMINAL, np.int64)
    data = Dataset(*nothing, *nothing, num_classes=2)
    shards = [Shard(data, np.arange(len(data.train_labels)))]
    problem = Problem(replace(config, max_participations=0), data, shards, model, rounds, values)
    return method.guarantee(problem, config.mu if config.private else math.inf, notes=(SIMULATED,), brief=True)


def table_caption(document: Mapping[str, Any]) -> str:
    """What the epsilons in the table of a reproduction are true of.

    Parameters
    ----------
    document : mapping
        Of a reproduction, with its ``cells``.

    Raises
    ------
    ConfigurationError
        If it does not say which strategy an algorithm is.
    """
    guarantees, noiseless = [], dict[str, None]()
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            # Documents of the first version name the strategy in the label alone.
            given = entry.get("settings") or {"strategy": label.partition(",")[0]}
            # Those before version 0.2 may hold settings that some of a cell's algorithms do not read.
            config = RunConfig.from_mapping(without_unread({**cell["settings"], **given}))
            if not config.private:
                noiseless[label] = None
            elif entry["epsilon"]["mean"] != 0:
                guarantees.append((label, caption_guarantee(config)))
    sentences = [caption(guarantees)] if guarantees else []
    if noiseless:
        sentences.append(f"Without noise, and not private: {' / '.join(noiseless)}.")
    return " ".join(sentences) or "No epsilon: nothing private was released."


def expected_guarantee(config: RunConfig, *, deployed: bool = False) -> Guarantee:
    """What a run will guarantee, before its first round.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible.
    """
    experiment = prepare(config)
    if not deployed:
        experiment.check_rounds()
    return run_guarantee(experiment, experiment.guaranteed_mu(), deployed=deployed)


def _basis(experiment: Experiment, deployed: bool, statements: Statements | None) -> str:
    if not deployed:
        return SIMULATED
    if experiment.method.trusted:
        return "Real machines; the server's noise key is the operating system's."
    if statements is None:
        return EXPECTED
    answered = f"{len(statements)} of {experiment.config.num_clients} machines"
    return f"Real machines: the figure is what {answered} say of themselves, which a server cannot check."
