"""``murmurfl report``: what runs did and what they cost, as one HTML page that needs nothing but itself.

Everything comes from the files that a run leaves (:mod:`.recorded`). They hold nothing more than the server knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...privacy import gdp_epsilon, rounded_up
from ..runs.run_summary import is_summed, loss_text, plain_words, shown_accuracy, shown_evaluation
from .curves import compared_plots
from .groups import Group, Spread, grouped
from .page import page
from .plots import run_plots
from .recorded import RecordedRun, ReportError, setting_text
from .table import Column, Row, Table, spread

PAGE_NAME = "index.html"
_MOST_MACHINES = 1000
"""Machines that a page lists; the first of them."""


def make_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of runs into a folder: ``index.html``, and each plot as PNG and SVG beside it.

    Parameters
    ----------
    folders : sequence of Path
        The runs' folders, each as ``murmurfl run`` left it.
    out : Path
        Made if need be.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ReportError
        If a folder is no finished run, or none is given.
    """
    if not folders:
        raise ReportError("Expected the folder of at least one run, got none.")
    runs = _named([RecordedRun.read(folder) for folder in folders])
    out.mkdir(parents=True, exist_ok=True)
    groups = grouped(runs)
    compared = compared_plots(groups) if len(runs) > 1 else []
    plots = [run_plots(run) for run in runs]
    text = page(
        compared=[plot.inline("runs") for plot in compared],
        groups=[{"name": group.name, **_words(group.runs[0])} for group in groups],
        summary=_summary(groups),
        differing=_differing(groups),
        folded=len(groups) < len(runs),
        runs=[_section(run, [plot.inline(f"run{i}") for plot in plots[i]]) for i, run in enumerate(runs)],
    )
    for plot in compared:
        plot.write(out, "runs")
    for run, made in zip(runs, plots, strict=True):
        for plot in made:
            plot.write(out, run.name)
    path = out / PAGE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _section(run: RecordedRun, plots: Sequence[dict[str, str]]) -> dict[str, Any]:
    """What the page says of one run."""
    return {
        "name": run.name,
        **_words(run),
        "tiles": _tiles(run),
        "plots": plots,
        "refusals": _refusals(run),
        "forecast": run.document.get("forecast"),
        "training": run.document.get("training"),
        "machines": _machines(run),
        "left_out": max(len(run.groups or run.names) - _MOST_MACHINES, 0),
        "settings": run.settings,
        "recorded": bool(run.machines and run.machines["rounds"]),
    }


def _words(run: RecordedRun) -> dict[str, str]:
    """What a run guarantees, in its own words and in plain ones."""
    return {"guarantee": run.document["guarantee"], "meaning": plain_words(run.document)}


def _named(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Names that are one of a kind: they name the plots' files."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        name = run.name if seen[run.name] == 1 else f"{run.name}-{seen[run.name]}"
        named.append(RecordedRun(name, run.document, run.machines))
    return named


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    document, totals = run.document, run.totals
    accuracy, evaluation = document["accuracy"], document.get("private_evaluation")
    return [
        *([("test accuracy", shown_accuracy(document))] if accuracy is not None else []),
        *([("private accuracy", shown_evaluation(evaluation))] if evaluation else []),
        *([("test loss", loss_text(document["loss"]))] if _has_loss(document) else []),
        *_twin_tiles(document),
        (f"ε at δ = {document['delta']:g}", rounded_up(_known(document["epsilon"]))),
        ("μ", rounded_up(_known(document["mu"]))),
        *_local_tiles(document),
        ("rounds", f"{document['rounds']:,}"),
        ("machines", f"{document['num_clients']:,}"),
        ("releases made", f"{document.get('releases', 0):,}"),
        ("aggregated", f"{totals['aggregated']:,} of {totals['asked']:,}"),
        *((name, f"{totals[name]:,}") for name in ("lost", "refused", "late", "malformed")),
    ]


def _has_loss(document: Row) -> bool:
    """Whether a loss was measured: a project of somebody's own need not have one, and a run's may have overflowed."""
    return document["loss"] is not None or document["engine"] is not None


def _twin_tiles(document: Row) -> list[tuple[str, str]]:
    """What the same run came to without noise, where it was made."""
    twin = document.get("without_noise")
    if not twin:
        return []
    rounds = "" if twin["rounds"] == document["rounds"] else f" in {twin['rounds']:,} rounds"
    return [(f"without noise{rounds}, not private", shown_accuracy(twin))]


def _local_tiles(document: Row) -> list[tuple[str, str]]:
    """Under secure aggregation: what μ rests on, and what holds without."""
    if not is_summed(document):
        return []
    return [
        ("ε whatever happens", rounded_up(_known(document["epsilon_local"]))),
        ("μ whatever happens", rounded_up(_known(document["mu_local"]))),
        ("honest machines of a sum, h", f"{document['min_honest']:,}"),
        ("fewest machines of a sum", f"{document['min_cohort']:,}"),
        ("helpers", f"{document['helpers']:,}"),
        ("rounds that stayed closed", f"{document['closed_rounds']:,}"),
    ]


_SUMMARY = (
    Column("run", "its folder's name; of runs that differ in their seed alone what these have in common", label=True),
    Column("seeds", "runs that the line is about, each with a seed of its own", form=","),
    Column("strategy", "of its configuration"),
    Column("accuracy", "on the test set, in the end; of several seeds, mean ± standard deviation"),
    Column("without noise", "the accuracy of the same runs without noise; of a simulation, and not private"),
    Column("loss", "on the test set, in the end, likewise"),
    Column("μ", "what the run guarantees, in its own words below", form=rounded_up),
    Column("ε", "the same at the run's δ", form=rounded_up),
    Column("ε local", "under secure aggregation, what holds whatever happens", form=rounded_up),
    Column("rounds", "that were run", form=","),
    Column("machines", "that could be asked", form=","),
    Column("lost", "requests without any reply, of all seeds", form=","),
    Column("refused", "requests that a machine refused, of all seeds", form=","),
)


def _summary(groups: Sequence[Group]) -> Table:
    """A line for each run, and for runs that differ in their seed alone one together."""
    rows = []
    for group in groups:
        document = group.document
        rows.append(
            {
                "run": group.name,
                "seeds": len(group.runs),
                "strategy": document["config"]["strategy"],
                "accuracy": _accuracy(group),
                "without noise": _percent(group.without_noise("accuracy")),
                "loss": _loss(group) if _has_loss(document) else "none",
                "μ": _known(document["mu"]),
                "ε": _known(document["epsilon"]),
                "ε local": _known(document["epsilon_local"]) if is_summed(document) else None,
                "rounds": document["rounds"],
                "machines": document["num_clients"],
                "lost": group.total(lambda run: run.totals["lost"]),
                "refused": group.total(lambda run: run.totals["refused"]),
            }
        )
    wanted = {"seeds": any(len(group.runs) > 1 for group in groups)}
    wanted["without noise"] = any(row["without noise"] for row in rows)
    return Table("Compared", [column for column in _SUMMARY if wanted.get(column.name, True)], rows)


def _accuracy(group: Group) -> str:
    if len(group.runs) == 1:
        return shown_accuracy(group.document) if group.document["accuracy"] is not None else "none"
    auc = group.spread("auc")
    return _percent(group.spread("accuracy"), "none") + ("" if auc is None else f", AUC {spread(*auc, '.3f')}")


def _percent(found: Spread | None, missing: str = "") -> str:
    if found is None:
        return missing
    mean, deviation = found
    return f"{spread(100 * mean, None if deviation is None else 100 * deviation, '.1f')} %"


def _loss(group: Group) -> str:
    found = group.spread("loss")
    return loss_text(group.document["loss"]) if found is None or found[1] is None else spread(*found, ".4g", ".2g")


def _differing(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings in which the runs differ, but for their seeds."""
    if len(groups) < 2:
        return {}
    runs = [group.runs[0] for group in groups]
    keys = dict.fromkeys(key for run in runs for key in run.document["config"])
    rows = {
        key: [setting_text(run.document["config"].get(key, "")) for run in runs] for key in keys if key != "run-name"
    }
    several = any(len(group.runs) > 1 for group in groups)
    seeds = {"seed": [", ".join(map(str, group.seeds)) for group in groups]} if several else {}
    return {key: values for key, values in {**rows, **seeds}.items() if len(set(values)) > 1 or key in seeds}


def _refusals(run: RecordedRun) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for entry in run.document["per_round"]:
        for reason, count in entry["refused"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return dict(sorted(reasons.items()))


_MACHINES = (
    Column("machine", "its name", label=True),
    Column("releases", "made, of those its cap allows"),
    Column("samples used", "in any release", form=","),
    Column("noise std", "in front of the mechanism's rows", form=".4g"),
    Column("mechanism", "of its noise"),
    Column("μ of its releases", "bookkeeping: had their number been fixed in advance", form=rounded_up),
    Column("ε of its releases", "the same at the run's δ", form=rounded_up),
    Column("μ guaranteed", "of all releases its cap allows", form=rounded_up),
    Column("ε guaranteed", "the same at the run's δ", form=rounded_up),
    Column("μ local", "under secure aggregation, what holds whatever happens", form=rounded_up),
)


def _machines(run: RecordedRun) -> Table:
    """A line for each machine with what it says of itself, or for all that say the same."""
    delta, statements = run.document["delta"], run.statements
    if run.groups:
        lines = [(f"{one['machines']:,} as {one['first']}", one["statement"]) for one in run.groups]
    else:
        lines = [(name, statements.get(name)) for name in run.names]
    rows = [_machine(name, statement, delta) for name, statement in lines[:_MOST_MACHINES]]
    return Table("Machines", _MACHINES, rows)


def _machine(name: str, statement: Row | None, delta: float) -> Row:
    if statement is None:
        return {"machine": name, "releases": "did not say"}
    spent, guaranteed, std = statement["mu-spent"], statement["mu-guaranteed"], statement.get("noise-std")
    local = _known(statement["mu-local"]) if "mu-local" in statement else None
    return {
        "machine": name,
        "releases": f"{statement['releases']} of {statement['max-participations']}",
        "samples used": statement["samples-used"],
        "noise std": std if isinstance(std, int | float) else None,
        "mechanism": str(statement.get("mechanism", "")),
        "μ of its releases": _known(spent),
        "ε of its releases": math.inf if spent is None else gdp_epsilon(spent, delta),
        "μ guaranteed": _known(guaranteed),
        "ε guaranteed": math.inf if guaranteed is None else gdp_epsilon(guaranteed, delta),
        "μ local": local,
    }


def _known(value: float | None) -> float:
    """A mu or an epsilon of a record, where JSON has no word for infinity but null."""
    return math.inf if value is None else value
