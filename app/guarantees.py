"""What the epsilons of runs are true of: their :class:`~murmurfl.privacy.Guarantee`.

The words come from the policy that was used and from nowhere else; the method hands it over
(:meth:`~murmurfl.app.methods.Method.guarantee`). This file adds what only a run knows: what the figure rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..privacy import SIMULATED, Guarantee, stated_words
from .config import RunConfig
from .experiment import Experiment, prepare

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
