"""``murmurfl report``: what runs did and what they cost, as one HTML page that needs nothing but itself.

Everything comes from the files that a run leaves, which hold nothing more than the server knows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...privacy import gdp_epsilon, rounded_up
from ..runs.outcome import Outcome, ReportError, infinite
from ..runs.result import WORKED_OUT
from ..runs.run_summary import compared_lines, loss_text, plain_words, shown, shown_accuracy, shown_evaluation
from ..settings.run_config import RunConfig
from .finding import RecordedRun
from .groups import Group, Spread, grouped, setting_text
from .page import page
from .plots import compared_plots, run_plots
from .table import Column, Row, Table, spread

PAGE_NAME = "index.html"
_MOST_MACHINES = 1000
"""Machines that a page lists; the first of them."""
_OF_THE_FOLDER = ("run-name", "out-dir")
"""Keys that say where a run lies, and nothing of what was set."""


def make_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of runs into a folder: ``index.html``, and each plot as PNG and SVG beside it."""
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
    """The section of one run."""
    return {
        "name": run.name,
        **_words(run),
        "tiles": _tiles(run.outcome),
        "plots": plots,
        "refusals": _refusals(run.outcome),
        "forecast": run.outcome.forecast,
        "compared": compared_lines(run.outcome),
        "training": run.outcome.training,
        "machines": _machines(run),
        "left_out": max(len(run.outcome.machine_groups or run.names) - _MOST_MACHINES, 0),
        "settings": _settings(run.outcome),
        "recorded": bool(run.machines and run.machines["rounds"]),
    }


def _words(run: RecordedRun) -> dict[str, str]:
    """The guarantee of a run, in its own words and in plain ones."""
    return {"guarantee": run.outcome.guarantee, "meaning": plain_words(run.outcome)}


def _named(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Names that are one of a kind: they name the plots' files."""
    seen: Counter[str] = Counter()
    named = []
    for run in runs:
        seen[run.name] += 1
        named.append(run if seen[run.name] == 1 else replace(run, name=f"{run.name}-{seen[run.name]}"))
    return named


def _tiles(outcome: Outcome) -> list[tuple[str, str]]:
    history, tiles = outcome.per_round, []
    if outcome.accuracy is not None:
        tiles.append(("test accuracy", shown_accuracy(outcome)))
    if outcome.private_evaluation is not None:
        tiles.append(("private accuracy", shown_evaluation(outcome.private_evaluation)))
    if _has_loss(outcome):
        tiles.append(("test loss", loss_text(outcome.loss)))
    if (twin := outcome.without_noise) is not None:
        rounds = "" if twin.rounds == outcome.rounds else f" in {twin.rounds:,} rounds"
        tiles.append((f"without noise{rounds}, not private", shown_accuracy(twin)))
    if (alone := outcome.alone) is not None and alone.machines:
        tiles.append(("one machine alone, without noise, not private", shown_accuracy(alone)))
    tiles += [(f"ε at δ = {outcome.delta:g}", shown(outcome.epsilon)), ("μ", shown(outcome.mu))]
    if outcome.min_honest is not None:
        tiles += [
            ("ε whatever happens", shown(outcome.epsilon_local)),
            ("μ whatever happens", shown(outcome.mu_local)),
            ("honest machines of a sum, h", f"{outcome.min_honest:,}"),
            ("fewest machines of a sum", f"{outcome.min_cohort:,}"),
            ("helpers", f"{outcome.helpers:,}"),
            ("rounds that stayed closed", f"{outcome.closed_rounds:,}"),
        ]
    aggregated, asked = sum(one.aggregated for one in history), sum(one.asked for one in history)
    return [
        *tiles,
        ("rounds", f"{outcome.rounds:,}"),
        ("machines", f"{outcome.num_clients:,}"),
        ("releases made", f"{outcome.releases:,}"),
        ("aggregated", f"{aggregated:,} of {asked:,}"),
        ("lost", f"{_lost(outcome):,}"),
        ("refused", f"{sum(_refusals(outcome).values()):,}"),
        ("late", f"{sum(one.late for one in history):,}"),
        ("malformed", f"{sum(one.malformed for one in history):,}"),
    ]


def _lost(outcome: Outcome) -> int:
    return sum(one.lost for one in outcome.per_round)


def _has_loss(outcome: Outcome) -> bool:
    """Whether a loss was measured: a project of somebody's own need not have one, and a run's may have overflowed."""
    return outcome.loss is not None or outcome.engine is not None


def _settings(outcome: Outcome) -> dict[str, tuple[str, bool]]:
    """Every key of the configuration: its value, and whether it was set to other than the default."""
    default = RunConfig().to_mapping()
    # What an earlier murmurfl worked out tells nothing of what was set.
    asked = {**outcome.config, **dict.fromkeys(WORKED_OUT), **outcome.asked}
    return {
        key: (
            setting_text(value),
            key not in _OF_THE_FOLDER and asked[key] is not None and asked[key] != default.get(key),
        )
        for key, value in outcome.config.items()
    }


_SUMMARY = (
    Column("run", "its folder's name; of runs that differ in their seed alone what these have in common", label=True),
    Column("seeds", "runs that the line is about, each with a seed of its own", form=","),
    Column("strategy", "of its configuration"),
    Column("accuracy", "on the test set, in the end; of several seeds, mean ± standard deviation"),
    Column("without noise", "the accuracy of the same runs without noise; of a simulation, and not private"),
    Column("one alone", "one machine on its own samples, without noise; of a simulation, and not private"),
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
        outcome = group.outcome
        rows.append(
            {
                "run": group.name,
                "seeds": len(group.runs),
                "strategy": outcome.config["strategy"],
                "accuracy": _accuracy(group),
                "without noise": _percent(group.without_noise("accuracy")),
                "one alone": _percent(group.alone),
                "loss": _loss(group) if _has_loss(outcome) else "none",
                "μ": infinite(outcome.mu),
                "ε": infinite(outcome.epsilon),
                "ε local": None if outcome.min_honest is None else infinite(outcome.epsilon_local),
                "rounds": outcome.rounds,
                "machines": outcome.num_clients,
                "lost": group.total(lambda run: _lost(run.outcome)),
                "refused": group.total(lambda run: sum(_refusals(run.outcome).values())),
            }
        )
    wanted = {"seeds": any(len(group.runs) > 1 for group in groups)}
    wanted |= {name: any(row[name] for row in rows) for name in ("without noise", "one alone")}
    return Table("Compared", [column for column in _SUMMARY if wanted.get(column.name, True)], rows)


def _accuracy(group: Group) -> str:
    if len(group.runs) == 1:
        return shown_accuracy(group.outcome) if group.outcome.accuracy is not None else "none"
    auc = group.spread("auc")
    return _percent(group.spread("accuracy"), "none") + ("" if auc is None else f", AUC {spread(*auc, '.3f')}")


def _percent(found: Spread | None, missing: str = "") -> str:
    if found is None:
        return missing
    mean, deviation = found
    return f"{spread(100 * mean, None if deviation is None else 100 * deviation, '.1f')} %"


def _loss(group: Group) -> str:
    found = group.spread("loss")
    return loss_text(group.outcome.loss) if found is None or found[1] is None else spread(*found, ".4g", ".2g")


def _differing(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings in which the runs differ, but for their seeds."""
    if len(groups) < 2:
        return {}
    configs = [group.outcome.config for group in groups]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run-name")
    rows = {key: [setting_text(config.get(key, "")) for config in configs] for key in keys}
    several = any(len(group.runs) > 1 for group in groups)
    seeds = {"seed": [", ".join(map(str, group.seeds)) for group in groups]} if several else {}
    return {key: values for key, values in {**rows, **seeds}.items() if len(set(values)) > 1 or key in seeds}


def _refusals(outcome: Outcome) -> dict[str, int]:
    """Refusals by reason."""
    reasons: Counter[str] = Counter()
    for one in outcome.per_round:
        reasons.update(one.refused)
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
    delta, groups = run.outcome.delta, run.outcome.machine_groups
    if groups:
        lines = [(f"{one.machines:,} as {one.first}", one.statement) for one in groups]
    else:
        lines = [(name, run.statements.get(name)) for name in run.names]
    rows = [_machine(name, statement, delta) for name, statement in lines[:_MOST_MACHINES]]
    return Table("Machines", _MACHINES, rows)


def _machine(name: str, statement: Row | None, delta: float) -> Row:
    if statement is None:
        return {"machine": name, "releases": "did not say"}
    spent, guaranteed, std = statement["mu-spent"], statement["mu-guaranteed"], statement.get("noise-std")
    local = infinite(statement["mu-local"]) if "mu-local" in statement else None
    return {
        "machine": name,
        "releases": f"{statement['releases']} of {statement['max-participations']}",
        "samples used": statement["samples-used"],
        "noise std": std if isinstance(std, int | float) else None,
        "mechanism": str(statement.get("mechanism", "")),
        "μ of its releases": infinite(spent),
        "ε of its releases": math.inf if spent is None else gdp_epsilon(spent, delta),
        "μ guaranteed": infinite(guaranteed),
        "ε guaranteed": math.inf if guaranteed is None else gdp_epsilon(guaranteed, delta),
        "μ local": local,
    }
