"""What a run leaves behind: result.json, a plot, the model, and a short summary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .config import TRUSTED, RunConfig
from .experiment import Progress, RunResult, model_arrays

_SERVER_NOISE = {"trusted-mu2": "fresh", "trusted-sgd": "fresh"}
_ACCOUNTS = {"amplified": "amplification by iteration", "composed": "plain composition"}

RESULT_NAME = "result.json"
CHECKPOINT_NAME = "checkpoint.npz"
FAILURE_NAME = "failure.json"


def result_document(result: RunResult) -> dict[str, Any]:
    """The contents of ``result.json``: plain values."""
    config = result.experiment.config
    history = result.strategy.history
    evaluations = {p.report.server_round: p for p in result.progress}
    per_round = []
    for report in history:
        progress = evaluations.get(report.server_round)
        per_round.append(
            {
                "round": report.server_round,
                "accuracy": None if progress is None else progress.accuracy,
                "loss": None if progress is None else progress.loss,
                **{k: v for k, v in asdict(report).items() if k != "server_round"},
            }
        )
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "mu": _finite_or_none(result.mu),
        "epsilon": _finite_or_none(result.epsilon),
        "delta": config.delta,
        "guarantee": guarantee_sentence(result),
        "rounds": len(history),
        "num_clients": config.num_clients,
        "releases": sum(int(statement["releases"]) for statement in result.statements.values()),
        "aggregated": sum(report.aggregated for report in history),
        "refusals": sum(report.refusals for report in history),
        "lost_replies": sum(report.lost for report in history),
        "late_replies": sum(report.late for report in history),
        "malformed_replies": sum(report.malformed for report in history),
        "num_parameters": result.experiment.model.num_parameters,
        "seconds": result.seconds,
        "config": {
            **config.to_mapping(),
            "num-rounds": result.experiment.num_rounds,
            "clip-norm": result.experiment.values.clip_norm,
            "learning-rate": result.experiment.values.learning_rate,
            "diameter": result.experiment.values.diameter,
            "schedule": result.experiment.values.schedule,
            "sampling": result.experiment.values.sampling,
        },
        "online": result.online,
        "gradient_norms": result.gradient_norms,
        # JSON has no infinity: null where nothing is guaranteed.
        "machines": {name: _finite(entries) for name, entries in result.statements.items()},
        "per_round": per_round,
    }


def _finite(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _finite_or_none(value) for key, value in entries.items()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def noise_note(noise_quality: str) -> str:
    """What must stand beside an epsilon that rests on noise of this quality."""
    return "" if noise_quality == "exact" else " (fast noise: no guarantee)"


def guarantee_sentence(result: RunResult) -> str:
    """The guarantee in one sentence: unit, relation, trust, mechanism and what it covers."""
    config = result.experiment.config
    if result.mu == 0.0:
        return "No private sample was used: nothing is spent, epsilon = 0."
    if math.isinf(result.mu):
        return "No noise was added: nothing is guaranteed."
    if config.strategy in TRUSTED:
        who = "against everybody but the trusted server"
        kind = _SERVER_NOISE.get(config.strategy, "tree")
        if config.strategy == "correlated-momentum":
            kind = config.mechanism or "blt"
        noise = f"{kind} server noise in each of {result.experiment.num_rounds} rounds"
    else:
        who = "against the server and everybody else"
        kind = result.experiment.mechanism
        if kind == "cancelling":
            kind += f" ({result.experiment.policy().schedule or 'uniform'})"
        noise = f"{kind} noise on each machine, over all releases its cap allows"
        if config.strategy == "online":
            noise += f", {result.experiment.clip_unit} sensitivity"
    if config.strategy == "shuffled":
        policy = result.experiment.shuffled_policy(max(len(shard) for shard in result.experiment.shards))
        noise = (
            f"noise on every step of {policy.max_participations} epochs of each silo that use private samples, "
            f"{_ACCOUNTS[policy.accounting_used]}, only their ends released"
        )
    elif config.passes > 1:
        noise += f", every sample in up to {config.passes} of them"
    quality = (
        ""
        if config.noise_quality == "exact"
        else " Fast simulation noise: a figure for research, no guarantee for the data used."
    )
    whose = "Simulated with seeded keys."
    if result.deployed:
        answered = f"{len(result.statements)} of {config.num_clients} machines"
        whose = f"Real machines: the figure is what {answered} say of themselves, which a server cannot check."
        if config.strategy in TRUSTED:
            whose = "Real machines; the server's noise key is the operating system's."
    return (
        f"mu = {result.mu:.4g} Gaussian DP, epsilon = {result.epsilon:.4g} at delta = {config.delta:g}, for "
        f"replacement of one sample of one machine, {who}; {noise}. {whose}{quality}"
    )


def write_record(result: RunResult, folder: Path) -> dict[str, Any]:
    """Write ``result.json``, ``accuracy.png`` and ``model.npz`` into a folder; the document is returned.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = result_document(result)
    arrays: dict[str, Any] = model_arrays(result)
    np.savez(folder / "model.npz", **arrays)
    plot_accuracy(document, folder / "accuracy.png")
    # Last, and whole: whoever finds a result.json finds a finished run.
    temporary = folder / f"{RESULT_NAME}.part"
    temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    temporary.replace(folder / RESULT_NAME)
    (folder / FAILURE_NAME).unlink(missing_ok=True)  # of an earlier try that this run took up
    return document


def write_failure(error: Exception, folder: Path) -> None:
    """Leave the reason why a run ended without a result in ``failure.json``; its checkpoint stays where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT_NAME
    document = {"reason": str(error), "checkpoint": str(checkpoint) if checkpoint.exists() else None}
    (folder / FAILURE_NAME).write_text(json.dumps(document, indent=2) + "\n")


def shown(value: float | None) -> str:
    """A mu or an epsilon for people; None is infinite."""
    return "infinite" if value is None else f"{value:.4g}"


def shown_accuracy(document: Mapping[str, Any]) -> str:
    """A run's accuracy for people, or its loss where the model has no accuracy."""
    if document["accuracy"] is None:
        return f"none; loss {document['loss']:.4g}"
    return f"{100 * document['accuracy']:.1f} %"


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
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy [%]" if measure == "accuracy" else "loss")
    if measure == "accuracy":
        axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.set_title(f"{config['strategy']} on {config['task']}: {shown_accuracy(document)}")
    axes.text(
        0.98,
        0.05,
        f"whole run: μ = {shown(document['mu'])}, ε = {shown(document['epsilon'])} at δ = {document['delta']:g}\n"
        f"{document['num_clients']} machines, {document['releases']} releases"
        f"{noise_note(config['noise-quality'])}",
        transform=axes.transAxes,
        horizontalalignment="right",
        bbox={"facecolor": "white", "edgecolor": "#cccccc"},
    )
    figure.savefig(path, dpi=150)


def summary_lines(document: dict[str, Any], folder: Path) -> list[str]:
    """A short summary for people."""
    rows = [
        ("test accuracy", shown_accuracy(document)),
        ("mu", shown(document["mu"])),
        (
            "epsilon",
            f"{shown(document['epsilon'])} at delta = {document['delta']:g}"
            f"{noise_note(document['config']['noise-quality'])}",
        ),
        ("rounds", str(document["rounds"])),
        ("machines", str(document["num_clients"])),
        ("releases", f"{document['releases']} made, {document['aggregated']} aggregated"),
        ("refusals", str(document["refusals"])),
        ("lost replies", str(document["lost_replies"])),
        ("files", str(folder)),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows] + ["", f"  {document['guarantee']}"]


def progress_line(progress: Progress, config: RunConfig) -> str:
    """One round's line of progress."""
    server_round, num_rounds, accuracy = progress.report.server_round, progress.num_rounds, progress.accuracy
    shown = "      " if accuracy is None else f"{100 * accuracy:5.1f} %"
    rounds = f"{server_round:>{len(str(num_rounds))}}/{num_rounds}"
    epsilon = f"epsilon {progress.epsilon:.3g} at delta {config.delta:g}{noise_note(config.noise_quality)}"
    return f"round {rounds}  accuracy {shown}  {epsilon} (whole run)"
