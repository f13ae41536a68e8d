"""What a run leaves behind: its documents, a plot and the model.

Programs read ``result.json``, so it has a version (:data:`FORMAT`): a key that is added keeps it, one that goes, or
means something else, counts it up. What each key is stands in :mod:`murmurfl.app.reports.result_schema` and, made from it, in
the documentation.
"""

from __future__ import annotations

import json
import math
import platform
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ...privacy.machine.clipping_figures import TrainingFigures
from ...strategies import FullBatch
from ...strategies.side.evaluation_figures import EVALUATION_FIGURES
from .centring_settings import NONE, PRIVATE
from .machine_files import finite, finite_or_none, releases_made, stated, write_machines
from .result import RunResult
from .run_summary import noise_note, shown, shown_accuracy
from ..version import __version__

RESULT_NAME = "result.json"
MACHINES_NAME = "machines.json"
CHECKPOINT_NAME = "checkpoint.npz"
FAILURE_NAME = "failure.json"

CENTRE_ARRAY, CONSTANT_ARRAY = "centring.centre", "centring.constant"
"""Arrays of ``model.npz`` beside the model's own: what its inputs are seen from (:func:`murmurfl.privacy.centred`)."""

FORMAT = 1
"""The version of ``result.json``."""

WORKED_OUT = ("num-rounds", "clip-norm", "learning-rate", "diameter", "centring", "schedule", "sampling")
"""Keys of ``config`` under which a result has what preset and data made of them; ``asked`` has what was asked for."""

_PACKAGES = ("flwr", "numpy", "scipy", "scikit-learn", "torch", "ray")
"""What a result may depend on; those that are not installed are left out."""


def result_document(result: RunResult) -> dict[str, Any]:
    """The contents of ``result.json``: plain values."""
    config = result.experiment.config
    guarantee = result.guarantee
    history = result.strategy.history
    evaluations = {p.report.server_round: p for p in result.progress}
    per_round = []
    for report in history:
        progress = evaluations.get(report.server_round)
        per_round.append(
            {
                "round": report.server_round,
                "accuracy": None if progress is None else progress.accuracy,
                "auc": None if progress is None else progress.auc,
                "loss": None if progress is None else progress.loss,
                **{k: v for k, v in asdict(report).items() if k != "server_round"},
            }
        )
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": result.engine or None,
        "device": result.device or None,
        "chosen_by": result.experiment.chosen_by or None,
        "chosen_because": result.experiment.chosen_because or None,
        "versions": versions(),
        "accuracy": result.accuracy,
        "auc": result.auc,
        "loss": result.loss,
        "mu": finite_or_none(result.mu),
        "epsilon": finite_or_none(result.epsilon),
        "mu_local": finite_or_none(result.mu_local),
        "epsilon_local": finite_or_none(result.epsilon_local),
        "min_honest": result.min_honest,
        "min_cohort": result.min_cohort,
        "helpers": config.helpers if config.secure else None,
        "delta": config.delta,
        "guarantee": guarantee.sentence,
        "privacy": guarantee.document(),
        "forecast": None if result.forecast is None else finite(result.forecast.document()),
        "rounds": len(history),
        "num_clients": config.num_clients,
        "releases": releases_made(result),
        "aggregated": sum(report.aggregated for report in history),
        "refusals": sum(report.refusals for report in history),
        "lost_replies": sum(report.lost for report in history),
        "late_replies": sum(report.late for report in history),
        "malformed_replies": sum(report.malformed for report in history),
        "closed_rounds": sum(bool(report.closed) for report in history),
        "num_parameters": result.experiment.model.num_parameters,
        "seconds": result.seconds,
        "config": {
            **config.shown(),
            "num-rounds": result.experiment.num_rounds,
            "clip-norm": result.experiment.values.clip_norm,
            "learning-rate": result.experiment.values.learning_rate,
            "diameter": result.experiment.values.diameter,
            "centring": PRIVATE if result.experiment.is_centred else NONE,
            "schedule": result.experiment.values.schedule,
            "sampling": result.experiment.values.sampling,
        },
        "asked": {name: config.to_mapping()[name] for name in WORKED_OUT},
        "without_noise": None,  # a run of its own, where one was made (:mod:`.without_noise`)
        "centring": centring_document(result),
        "private_evaluation": evaluation_document(result),
        "clip": clip_document(result),
        "online": result.online,
        "gradient_norms": result.gradient_norms,
        "training": training_document(result),
        **stated(result),
        "per_round": per_round,
    }


def clip_document(result: RunResult) -> dict[str, Any] | None:
    """Where the clip came to; None unless it follows the gradients.

    Notes
    -----
    Nothing in it is new to a server: it is made of releases.
    """
    strategy, config = result.strategy, result.experiment.config
    if not isinstance(strategy, FullBatch) or not strategy.quantile or strategy.state is None:
        return None
    last = float(strategy.state.clip)
    return {"quantile": config.quantile, "share": config.quantile_share, "first": strategy.first_clip, "last": last}


def centring_document(result: RunResult) -> dict[str, Any] | None:
    """What became of the mean of the features; None without centring.

    Notes
    -----
    Nothing in it is new to a server; mu is of the mean's release, by the run configuration.
    """
    mean = result.mean
    if mean is None:
        return None
    return {
        "mu": finite_or_none(result.experiment.mean_mu if result.experiment.config.private else math.inf),
        "share": result.experiment.config.centring_share,
        "constant": mean.constant,
        "asked": mean.report.asked,
        "aggregated": mean.report.aggregated,
        "samples": mean.report.samples,
    }


def evaluation_document(result: RunResult) -> dict[str, Any] | None:
    """What machines said of the model; None without a private evaluation.

    Notes
    -----
    Nothing in it is new to a server: arithmetic on releases. mu is of the evaluation's, by the run configuration.
    """
    experiment, found = result.experiment, result.evaluation
    if not experiment.is_evaluated:
        return None
    figures = dict.fromkeys(EVALUATION_FIGURES) if found is None else found.document
    return {
        "mu": finite_or_none(experiment.evaluation_mu if experiment.config.private else math.inf),
        "share": experiment.config.private_evaluation,
        **figures,
        "failure": result.evaluation_failure or None,
    }


def versions() -> dict[str, str]:
    """The version of murmurfl, of Python and of the packages a result may depend on."""
    found = {"murmurfl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def with_nulls(value: Any) -> Any:
    """A document in which numbers that are none, as a loss that overflowed, are null: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: with_nulls(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def training_document(result: RunResult) -> dict[str, Any] | None:
    """What clipping did in a simulation, in all and in each round; None where nothing is known of it.

    Notes
    -----
    It is of a simulation's data without noise, and marked so; never of real machines.
    """
    if not result.training:
        return None
    figures = list(result.training.values())
    names = ("not_finite", "clipped", "median_ratio", "largest_ratio")
    per_round = {name: [getattr(one, name) for one in figures] for name in names}
    whole = TrainingFigures.together(figures)
    rounds = list(result.training)
    return {
        **whole.document(),
        "sentence": whole.sentence,
        "worrying": whole.worrying,
        "rounds": rounds,
        **{f"{name}_per_round": values for name, values in per_round.items()},
    }


def write_record(result: RunResult, folder: Path) -> dict[str, Any]:
    """Write what a run leaves into a folder: its documents, the plot and the model; ``result.json`` is returned.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = with_nulls(result_document(result))
    arrays: dict[str, Any] = dict(zip(result.experiment.model.names, result.parameters, strict=True))
    if result.mean is not None:  # without which nobody could use the model
        arrays |= {CENTRE_ARRAY: result.mean.centre, CONSTANT_ARRAY: np.float64(result.mean.constant)}
    np.savez(folder / "model.npz", **arrays)
    plot_accuracy(document, folder / "accuracy.png")
    write_machines(result, folder / MACHINES_NAME)
    write_document(document, folder)  # last: whoever finds a result.json finds a finished run
    (folder / FAILURE_NAME).unlink(missing_ok=True)  # of an earlier try that this run took up
    return document


def write_document(document: Mapping[str, Any], folder: Path) -> None:
    """Write ``result.json``, whole or not at all.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    temporary = folder / f"{RESULT_NAME}.part"
    temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    temporary.replace(folder / RESULT_NAME)


def write_failure(error: Exception, folder: Path) -> None:
    """Leave the reason why a run ended without a result in ``failure.json``; its checkpoint stays where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT_NAME
    document = {"reason": str(error), "checkpoint": str(checkpoint) if checkpoint.exists() else None}
    (folder / FAILURE_NAME).write_text(json.dumps(document, indent=2) + "\n")


def plot_accuracy(document: dict[str, Any], path: Path) -> None:
    """Accuracy against rounds, with the epsilon of the run, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measure = "loss" if document["accuracy"] is None else "accuracy"
    percent = 100 if measure == "accuracy" else 1
    evaluated = [entry for entry in document["per_round"] if entry[measure] is not None]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [entry["round"] for entry in evaluated],
        [percent * entry[measure] for entry in evaluated],
        marker="o" if len(evaluated) <= 40 else None,
        color="#1f6f8b",
        linewidth=2,
    )
    config = document["config"]
    _draw_without_noise(axes, document, measure)
    spent = f"whole run: μ = {shown(document['mu'])}, ε = {shown(document['epsilon'])} at δ = {document['delta']:g}"
    axes.set_xlabel("round")
    figure.supxlabel(textwrap.fill(document["guarantee"], 120), fontsize=6.5, color="#444444")
    axes.set_ylabel("test accuracy [%]" if measure == "accuracy" else "loss")
    if measure == "accuracy":
        axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.set_title(f"{config['strategy']} on {config['task']}: {shown_accuracy(document)}")
    axes.text(
        0.98,
        0.05,
        f"{'NOT PRIVATE: ε is infinite' if document['epsilon'] is None else spent}\n"
        f"{document['num_clients']} machines, {document['releases']} releases"
        f"{noise_note(config['noise-quality'])}",
        transform=axes.transAxes,
        horizontalalignment="right",
        bbox={"facecolor": "white", "edgecolor": "#cccccc"},
    )
    figure.savefig(path, dpi=150)


def _draw_without_noise(axes: Any, document: Mapping[str, Any], measure: str) -> None:
    """A line across: where the same run ended without noise, if it was made."""
    value = (document.get("without_noise") or {}).get(measure)
    if value is None:
        return
    percent = 100 if measure == "accuracy" else 1
    axes.axhline(percent * value, color="#444444", linestyle=":", linewidth=1.6, label="without noise, not private")
    axes.legend(loc="lower left", fontsize=8)
