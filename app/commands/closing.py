"""What a run's summary ends with: what its mu means, what noise cost, and how to do better at the same mu."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ...privacy import NO_NOISE, ConfigurationError, gdp_best_guess
from ..config import RunConfig, run_keys
from ..methods.auto import AUTO
from ..summary import shown, shown_accuracy

_BETTER = ("task", "features", "num-clients", "clients-per-round", "mu")
"""Keys that stay as they are where another strategy is tried."""


def closing_lines(document: Mapping[str, Any], *, measure: bool = False) -> list[str]:
    """The end of a summary.

    Parameters
    ----------
    document : mapping
        Of a simulated run.
    measure : bool
        Whether to make the same run without noise now, in this process: only where that takes a moment.

    Notes
    -----
    **Formal guarantees.** None of its own: the first line says what the document's mu is worth
    (:func:`~murmurfl.privacy.gdp_best_guess`). The figure without noise is of simulated data, and not private.
    """
    if document["mu"] is None:
        return []
    lines = ["", f"  {meaning(document['mu'])}"]
    settings = {key: value for key, value in document["config"].items() if key in run_keys()}
    if measure and (told := _without_noise(settings)):
        lines.append(f"  Without noise the same run reaches {told}: measured now, in simulation, and not private.")
    if settings["strategy"] != AUTO and document["accuracy"] is not None:
        lines.append(f"  The most accuracy for this epsilon: {better(settings)}")
    return lines


def meaning(mu: float) -> str:
    """What a mu means to whoever wants to know of a sample."""
    percent = math.ceil(1000 * gdp_best_guess(mu) - 1e-9) / 10
    return (
        f"mu = {shown(mu)} means: whoever sees all that is guarded against, and knows every other sample, guesses "
        f"whether one sample was replaced with at most {percent:g} % right; tossing a coin has 50 %."
    )


def better(settings: Mapping[str, Any]) -> str:
    """The command that lets murmurfl choose the strategy for the same privacy."""
    plain = {name: key.default for name, key in run_keys().items()}
    kept = [
        f"--set {name}={settings[name]:g}" if name == "mu" else f"--set {name}={settings[name]}"
        for name in _BETTER
        if settings[name] != plain[name]
    ]
    trust = [f"--set trust={settings['trust']}"] if settings["trust"] else []
    return " ".join(["murmurfl run", f"--set strategy={AUTO}", *kept, *trust])


def _without_noise(settings: Mapping[str, Any]) -> str:
    """The accuracy of the same run without noise; empty where there is none such."""
    from ..engines.start import run_cohort
    from ..record import result_document

    plain = {name: key.default for name, key in run_keys().items() if key.read_by == "mechanism" or name == "schedule"}
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # that nothing is private is what this run is for
    try:
        config = RunConfig.from_mapping(
            {**settings, **plain, "mechanism": NO_NOISE, "track": "", "evaluate-every": 1_000_000}
        )
        return shown_accuracy(result_document(run_cohort(config)))
    except ConfigurationError:
        return ""
    finally:
        logging.disable(before)
