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

from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import rounded_up
from ..runs.outcome import Outcome, Rehearsal, ReportError, infinite
from ..runs.result import WORKED_OUT
from ..runs.run_summary import loss_text, shown, shown_accuracy, shown_evaluation, shown_query
from ..settings.run_config import RunConfig
from .card import OF_THE_FOLDER, card, digest, made, persons, status
from .finding import RecordedRun
from .groups import Group, Spread, grouped, setting_text
from .page import page
from .plots import compared_plots, run_plots
from .table import Column, Row, Table, spread

PAGE_NAME = "index.html"
_MOST_CLIENTS = 1000
"""Clients that a page lists; the first of them."""
_UNFOLDED = 2
"""Runs whose sections are open from the beginning."""
_SIDE_BY_SIDE = 4
"""Groups of runs whose settings have a column each; of more, each has a line."""


def make_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of runs into a folder: ``index.html``, and each plot as PNG and SVG beside it."""
    if not folders:
        raise ReportError("Expected the folder of at least one run, got none.", kind="missing")
    runs = _named([RecordedRun.read(folder) for folder in folders])
    out.mkdir(parents=True, exist_ok=True)
    groups = grouped(runs)
    compared = compared_plots(groups) if len(runs) > 1 else []
    plots = [run_plots(run) for run in runs]
    text = page(
        card=card(groups),
        accuracy=_beside(groups[0].outcome) if len(groups) == 1 else [],
        compared=[plot.inline("runs") for plot in compared],
        groups=groups,
        summary=_summary(groups),
        differing=_differing(groups),
        folded=len(runs) > _UNFOLDED,
        runs=[_section(run, [plot.inline(f"run{i}") for plot in plots[i]]) for i, run in enumerate(runs)],
    )
    for plot in compared:
        plot.write(out, "runs")
    for run, drawn in zip(runs, plots, strict=True):
        for plot in drawn:
            plot.write(out, run.name)
    path = out / PAGE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _section(run: RecordedRun, plots: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the section of one run."""
    return {
        "name": run.name,
        "happened": _happened(run.outcome),
        "plots": plots,
        "refusals": _refusals(run.outcome),
        "forecast": run.outcome.forecast,
        "training": run.outcome.training,
        "rehearsal": _rehearsal_tables(run.outcome.rehearsal),
        "clients": _clients(run),
        "left_out": max(len(run.outcome.client_groups or run.names) - _MOST_CLIENTS, 0),
        "settings": _settings(run.outcome),
        "recorded": bool(run.clients and run.clients["rounds"]),
    }


def _named(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Names that are one of a kind: they name the plots' files."""
    seen: Counter[str] = Counter()
    named = []
    for run in runs:
        seen[run.name] += 1
        named.append(run if seen[run.name] == 1 else replace(run, name=f"{run.name}-{seen[run.name]}"))
    return named


def _beside(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the scores of the model, of the same without noise, and of one client alone."""
    evaluation, twin, alone = outcome.private_evaluation, outcome.without_noise, outcome.alone
    unreleased = outcome.engine is not None and not outcome.tested and evaluation is None
    measured = outcome.accuracy is not None or _has_loss(outcome)
    tiles = [("this model", shown_accuracy(outcome))] if measured or unreleased else []
    if evaluation is not None:
        tiles.append(("this model, counted by clients with noise", shown_evaluation(evaluation)))
    if twin is not None:
        rounds = "" if twin.rounds == outcome.rounds else f" in {twin.rounds:,} rounds"
        tiles.append((f"without noise{rounds}, not private", shown_accuracy(twin)))
    if (own := outcome.own_mixes) is not None:
        tiles.append(("this model, on average in each client's mix of classes, not private", f"{100 * own.mean:.1f} %"))
    if alone is not None and alone.clients:
        tiles.append(("one client alone, without noise, not private", shown_accuracy(alone)))
        if alone.own_mix is not None:
            tiles.append(("one client alone, in its own mix of classes, not private", f"{100 * alone.own_mix:.1f} %"))
    if outcome.rehearsal is not None:
        tiles += _rehearsed(outcome.rehearsal)
    return tiles


def _rehearsed(rehearsal: Rehearsal) -> list[tuple[str, str]]:
    """Return the scores of models without privacy, and of other options, on the rows of a rehearsal."""
    known = rehearsal.baselines
    found = {"each site's own model on its own rows, on average, not private": rehearsal.alone_on_own}
    if known is not None:
        rows = f"of {known.rows:,} rows, not private"
        found |= {f"boosted trees {rows}": known.boosted, f"an additive model {rows}": known.additive}
        found |= {f"a linear model {rows}": known.linear}
    found |= {f"this model with {option}": scores for option, scores in rehearsal.alternatives.items()}
    return [(name, shown_accuracy(scores)) for name, scores in found.items() if scores is not None]


def _rehearsal_tables(rehearsal: Rehearsal | None) -> list[dict[str, Any]]:
    """Return the tables of a rehearsal: scores by site, and held-out rows by class and predicted class."""
    if rehearsal is None:
        return []
    tables = []
    if rehearsal.sites:
        rows = [[name, f"{one.rows:,}", shown_accuracy(one)] for name, one in rehearsal.sites.items()]
        tables.append({"title": "Held-out rows by site", "head": ["site", "rows", "score"], "rows": rows})
    if rehearsal.confusion:
        rows = [[name, *map(str, row)] for name, row in zip(rehearsal.classes, rehearsal.confusion, strict=True)]
        head = ["class", *(f"predicted {name}" for name in rehearsal.classes)]
        tables.append({"title": "Held-out rows by class and prediction", "head": head, "rows": rows})
    return tables


def _happened(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the rows of the "Rounds" table."""
    history = outcome.per_round
    aggregated, asked = sum(one.aggregated for one in history), sum(one.asked for one in history)
    rows = [
        ("rounds", f"{outcome.rounds:,}"),
        ("clients", f"{outcome.num_clients:,}"),
        ("μ", shown(outcome.mu)),
        ("releases made", f"{outcome.releases:,}"),
        ("aggregated", f"{aggregated:,} of {asked:,}"),
        ("lost", f"{_lost(outcome):,}"),
        ("refused", f"{sum(_refusals(outcome).values()):,}"),
        ("late", f"{sum(one.late for one in history):,}"),
        ("malformed", f"{sum(one.malformed for one in history):,}"),
    ]
    if outcome.min_honest is not None:
        rows += [
            ("worst-case μ", shown(outcome.mu_local)),
            ("fewest clients of a sum", f"{outcome.min_cohort:,}"),
            ("helpers", f"{outcome.helpers:,}"),
            ("rounds that stayed closed", f"{outcome.closed_rounds:,}"),
            ("sums that were skipped", f"{outcome.skipped_rounds:,}"),
        ]
    rows += [(f"{name}, with noise", shown_query(found)) for name, found in (outcome.queries or {}).items()]
    return [*rows, ("test loss", loss_text(outcome.loss))] if _has_loss(outcome) else rows


def _lost(outcome: Outcome) -> int:
    return sum(one.lost for one in outcome.per_round)


def _has_loss(outcome: Outcome) -> bool:
    """Whether a loss was measured: a project of somebody's own need not have one, and a run's may have overflowed."""
    return outcome.loss is not None or (outcome.engine is not None and outcome.tested)


def _settings(outcome: Outcome) -> dict[str, tuple[str, bool]]:
    """Every key of the configuration: its value, and whether it was set to other than the default."""
    default = RunConfig().to_mapping()
    # What an earlier murmurfl worked out tells nothing of what was set.
    asked = {**outcome.config, **dict.fromkeys(WORKED_OUT), **outcome.asked}
    return {
        key: (
            setting_text(value),
            key not in OF_THE_FOLDER and asked[key] is not None and asked[key] != default.get(key),
        )
        for key, value in outcome.config.items()
    }


_SUMMARY = (
    Column("#", "its number on this page"),
    Column("run", "its folder's name; of runs that differ in their seed alone what these have in common", label=True),
    Column("seeds", "runs that the line is about, each with a seed of its own", form=","),
    Column("status", "whether anybody was protected"),
    Column("strategy", "of its configuration"),
    Column("accuracy", "on the test set, in the end; of several seeds, mean ± standard deviation"),
    Column("without noise", "the accuracy of the same runs without noise; of a simulation, and not private"),
    Column("one alone", "one client on its own samples, without noise; of a simulation, and not private"),
    Column("loss", "on the test set, in the end, likewise"),
    Column("ε", "what the run guarantees at its δ, in its own words in full", form=rounded_up),
    Column("ε of 5", "for a person with 5 records on one client, or on 5 clients", form=rounded_up),
    Column("ε of 20", "for a person with 20 records on one client, or on 20 clients", form=rounded_up),
    Column("ε local", "under secure aggregation, the worst case", form=rounded_up),
    Column("rounds", "that were run", form=","),
    Column("clients", "that could be asked", form=","),
    Column("lost", "requests without any reply, of all seeds", form=","),
    Column("refused", "requests that a client refused, of all seeds", form=","),
    Column("made", "when, and with which murmurfl"),
    Column("configuration", "the beginning of its SHA-256"),
)
_IF_DIFFERENT = ("status", "strategy", "rounds", "clients", "lost", "refused", "made")
"""Columns that say nothing where they say the same of every run."""


def _summary(groups: Sequence[Group]) -> Table:
    """Make a table with a line for each run, and one for all runs that differ in their seed alone."""
    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups, 1):
        outcome = group.outcome
        rows.append(
            {
                "#": number,
                "run": group.name,
                "seeds": len(group.runs),
                "status": status(outcome)[0],
                "strategy": outcome.config["strategy"],
                "accuracy": _accuracy(group),
                "without noise": _percent(group.without_noise("accuracy")),
                "one alone": _percent(group.alone),
                "loss": _loss(group) if _has_loss(outcome) and outcome.accuracy is None else "",
                "ε": infinite(outcome.epsilon),
                **{f"ε of {count}": gdp_epsilon(one.mu, outcome.delta) for count, one in persons(outcome) if count > 1},
                "ε local": None if outcome.min_honest is None else infinite(outcome.epsilon_local),
                "rounds": outcome.rounds,
                "clients": outcome.num_clients,
                "lost": group.total(lambda run: _lost(run.outcome)),
                "refused": group.total(lambda run: sum(_refusals(run.outcome).values())),
                "made": made(outcome).partition(",")[0],
                "configuration": digest(outcome.config)[:8],
            }
        )
    wanted = {"seeds": any(len(group.runs) > 1 for group in groups)}
    wanted |= {name: len({row[name] for row in rows}) > 1 for name in _IF_DIFFERENT}
    filled = {name for row in rows for name, value in row.items() if value not in ("", None)}
    columns = [one for one in _SUMMARY if wanted.get(one.name, one.name in filled)]
    return Table("Compared", columns, rows)


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


def _differing(groups: Sequence[Group]) -> list[list[str]]:
    """Return the settings in which the runs differ, but for their seeds, under a heading; for many runs a line each."""
    if len(groups) < 2:
        return []
    found = _different_settings(groups)
    if not found or len(groups) <= _SIDE_BY_SIDE:
        return [["setting", *(group.name for group in groups)], *([key, *values] for key, values in found.items())]
    texts = (", ".join(f"{key} = {values[at]}" for key, values in found.items()) for at in range(len(groups)))
    return [["run", "settings"], *([group.name, text] for group, text in zip(groups, texts, strict=True))]


def _different_settings(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return each group's value of the settings in which they differ, and their seeds if one group has several."""
    configs = [group.outcome.config for group in groups]
    keys = dict.fromkeys(key for config in configs for key in config if key not in OF_THE_FOLDER)
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


_CLIENTS = (
    Column("client", "its name", label=True),
    Column("releases", "made, of those its cap allows"),
    Column("samples used", "in any release", form=","),
    Column("noise std", "in front of the mechanism's rows", form=".4g"),
    Column("mechanism", "of its noise"),
    Column("μ of its releases", "bookkeeping: had their number been fixed in advance", form=rounded_up),
    Column("ε of its releases", "the same at the run's δ", form=rounded_up),
    Column("μ guaranteed", "of all releases its cap allows", form=rounded_up),
    Column("ε guaranteed", "the same at the run's δ", form=rounded_up),
    Column("μ local", "under secure aggregation, the worst case", form=rounded_up),
)


def _clients(run: RecordedRun) -> Table:
    """Make a table with a line for each client's statement, or for all that say the same."""
    delta, groups = run.outcome.delta, run.outcome.client_groups
    if groups:
        lines = [(f"{one.clients:,} as {one.first}", one.statement) for one in groups]
    else:
        lines = [(name, run.statements.get(name)) for name in run.names]
    rows = [_client(name, statement, delta) for name, statement in lines[:_MOST_CLIENTS]]
    if run.outcome.mu is not None:
        rows = [_of_trusted_server(row, statement) for row, (_, statement) in zip(rows, lines, strict=False)]
    return Table("Clients", _CLIENTS, rows)


SERVERS_NOISE = "none on the client: the server adds the noise"
"""Mechanism of a client that leaves the noise to a trusted server."""


def _of_trusted_server(row: Row, statement: Row | None) -> Row:
    """Return the row of a client that leaves the noise to a trusted server, and guarantees nothing itself."""
    if statement is None or statement.get("trust") != "trusted-server" or statement["mu-guaranteed"] is not None:
        return row
    figures = ("noise std", *(f"{one} {what}" for one in "με" for what in ("of its releases", "guaranteed")))
    return {**row, **dict.fromkeys(figures), "mechanism": SERVERS_NOISE}


def _client(name: str, statement: Row | None, delta: float) -> Row:
    if statement is None:
        return {"client": name, "releases": "did not say"}
    spent, guaranteed, std = statement["mu-spent"], statement["mu-guaranteed"], statement.get("noise-std")
    local = infinite(statement["mu-local"]) if "mu-local" in statement else None
    return {
        "client": name,
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
