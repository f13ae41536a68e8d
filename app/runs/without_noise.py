"""The same run without noise: the line that pictures compare a private run with.

It is a run of its own, made in this process on the data that the simulated run had, so there is none for real machines.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError
from ..settings.run_config import NO_NOISE, RunConfig, run_keys
from ..engines.start import ENGINES, run_document
from .experiment import prepare
from ...privacy.setting import Value
from .run_files import RESULT_NAME, plot_accuracy, write_document
from ..settings.layers import names_own, search_here

NOTE = "simulation only, and not private"
_FIGURES = ("accuracy", "auc", "loss", "rounds", "seconds")
_FINAL_ONLY = 1_000_000
"""``evaluate-every``: the last round alone."""
_OF_FILES = ("track", "out-dir", "run-name", "checkpoint", "gradient-norm")
"""Keys that say what a run leaves, and where: this one leaves nothing."""
_OF_NOISE = ("epsilon", "noise-quality", "schedule", "secret-order")


def configs_without_noise(document: Mapping[str, Any]) -> list[RunConfig]:
    """The configurations that a recorded run's twin without noise may have.

    In the first the preset chooses anew what it chose for the noise, in the second everything is the run's own, and in
    the third the rounds are the preset's as well: few rounds may be too few for steps that are not afraid of noise.

    Parameters
    ----------
    document : mapping
        ``result.json``.

    Raises
    ------
    ConfigurationError
        If the run cannot be made again here, or not without noise.
    """
    if document.get("engine") not in (*ENGINES, None):
        raise ConfigurationError(
            "Expected a simulated run, got one of real machines: their data are in no one place, so there is no run "
            "without noise to compare with."
        )
    if "mechanism" not in document["config"]:
        raise ConfigurationError(
            "Expected a run of murmurfl's own app, got one of another program, which alone can make it without noise."
        )
    chosen = {name: value for name, value in document["config"].items() if name in run_keys()}
    asked = {**chosen, **(document.get("asked") or {})}
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


def without_noise(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded run comes to without noise, as plain values.

    Parameters
    ----------
    document : mapping
        ``result.json``.

    Raises
    ------
    ConfigurationError
        As :func:`configs_without_noise`.

    Notes
    -----
    The figures are of simulated data without noise, and say so.
    """
    if names_own(document["config"]):
        search_here()
    best: dict[str, Any] = {}
    with _quiet():
        for config in configs_without_noise(document):
            made = run_document(config, "cohort")
            best = made if not best or _quality(made) > _quality(best) else best
            if _quality(best) > _quality(document):
                break  # noise cost something, and that is what there was to see
    return {"note": NOTE, **{name: _finite(best[name]) for name in _FIGURES}}


def _quality(document: Mapping[str, Any]) -> float:
    accuracy, loss = document["accuracy"], document["loss"]
    return accuracy if accuracy is not None else -(math.inf if loss is None or math.isnan(loss) else loss)


def add_without_noise(folder: Path) -> dict[str, Any]:
    """Make a run's twin without noise and put it into the run's files; its ``result.json`` is returned.

    A run that has one already, or that had no noise itself, stays as it is.

    Parameters
    ----------
    folder : Path
        Of a finished run.

    Raises
    ------
    ConfigurationError
        As :func:`configs_without_noise`.
    """
    document: dict[str, Any] = json.loads((folder / RESULT_NAME).read_text(encoding="utf-8"))
    if document["config"].get("mechanism") == NO_NOISE or document.get("without_noise"):
        return document
    document["without_noise"] = without_noise(document)
    plot_accuracy(document, folder / "accuracy.png")
    write_document(document, folder)
    return document


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a log: that nothing is private is what this run is for."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
