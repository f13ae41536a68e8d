"""What a run's summary ends with: what its mu means, what noise cost, and how to do better at the same mu."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ...privacy import NO_NOISE, gdp_best_guess
from ..config import RunConfig, run_keys
from ..keys import Value
from ..methods.auto import AUTO
from ..summary import shown, shown_accuracy

_BETTER = ("task", "features", "num-clients", "clients-per-round", "mu")
"""Keys that stay as they are where another strategy is tried."""


def closing_lines(document: Mapping[str, Any], settings: Mapping[str, Value] | None = None) -> list[str]:
    """The end of a summary.

    Parameters
    ----------
    document : mapping
        Of a simulated run.
    settings : mapping, optional
        What it was started with, to make the same run without noise now; only where that takes a moment.

    Notes
    -----
    **Formal guarantees.** None of its own: the first line says what the document's mu is worth
    (:func:`~murmurfl.privacy.gdp_best_guess`). The figure without noise is of simulated data, and not private.
    """
    if document["mu"] is None:
        return []
    lines = ["", f"  {meaning(document['mu'])}"]
    if settings is not None and document["config"]["mechanism"] != NO_NOISE:
        lines.append(
            f"  Without noise the same run reaches {_without_noise(settings)}: just measured, and not private."
        )
    if document["config"]["strategy"] != AUTO and document["accuracy"] is not None:
        lines.append(f"  The most accuracy for this epsilon: {better(document['config'])}")
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


def _without_noise(settings: Mapping[str, Value]) -> str:
    """The accuracy of the same run without noise, with the step that the preset takes for a very large mu."""
    from ..engines.start import run_cohort
    from ..record import result_document

    changes: dict[str, Value] = {key.name: key.default for key in run_keys().values() if key.read_by == "mechanism"}
    changes |= {"mechanism": NO_NOISE, "schedule": "", "track": "", "evaluate-every": 1_000_000}
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # that nothing is private is what this run is for
    try:
        return shown_accuracy(result_document(run_cohort(RunConfig.from_mapping({**settings, **changes}))))
    finally:
        logging.disable(before)
