"""What a run's summary ends with: what its mu means, what noise cost, and how to do better at the same mu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...privacy import NO_NOISE
from ..methods.auto_method import AUTO
from ..runs.run_summary import meaning_lines, shown_accuracy
from ..settings.run_config import run_keys

_BETTER = ("task", "features", "num-clients", "clients-per-round", "mu")
"""Keys that stay as they are where another strategy is tried."""


def closing_lines(document: Mapping[str, Any]) -> list[str]:
    """The end of a summary.

    Parameters
    ----------
    document : mapping
        ``result.json`` of a simulated run.

    Notes
    -----
    The first line says what the document's mu is worth (:attr:`~murmurfl.privacy.Guarantee.meaning`). The figure
    without noise is of simulated data, and not private.
    """
    if document["mu"] is None:
        return []
    lines = ["", *(f"  {line}" for line in meaning_lines(document))]
    lines += [f"  {line}" for line in without_noise_lines(document)]
    # No decision counts owners yet: it would have another unit.
    chosen = document.get("chosen_by") or document["config"].get("samples-per-owner")
    if not chosen and document["config"]["strategy"] != AUTO and document["accuracy"] is not None:
        lines.append(f"  The most accuracy for this epsilon: {better(document['config'])}")
    return lines


def without_noise_lines(document: Mapping[str, Any]) -> list[str]:
    """What the same run reaches without noise, where it was made."""
    twin = document.get("without_noise")
    if not twin or document["config"].get("mechanism") == NO_NOISE:
        return []
    rounds = "" if twin["rounds"] == document["rounds"] else f" in {twin['rounds']} rounds"
    return [f"Without noise the same run reaches {shown_accuracy(twin)}{rounds}: just measured, and not private."]


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
