"""secure-aggregation: mu^2-SGD on MNIST by whom a client trusts (docs/secure-aggregation.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...privacy.accounting.guarantee import rounded_up
from ..reports.table import Column, Row, Table, statistics
from ..settings.run_config import RunConfig
from .accuracy import (
    ACCURACY,
    ASKED,
    AT_DELTA,
    MU,
    NOISE,
    PART,
    SECONDS,
    Document,
    TableKind,
    Trial,
    accuracy_axis,
    add_legend,
    caption_of,
    colours,
    draw_by_epsilon,
    panels,
    save,
)
from .paper import JUDGED_AT_THE_END, Cell, Overrides, Paper, Settings

_CLOSED = "closed"
_ERRORS = (2.5, 5, 10, 20, 40)
"""Ticks of the accuracy axis, in percent wrong."""


class TrustTable(TableKind):
    """A line for each algorithm: accuracy, and what is guaranteed with and without what it assumes of others."""

    name = "trust"
    sentence = "test accuracy by whom a client trusts, with what holds under that and the worst case"
    curves_needed = frozenset({_CLOSED})
    honest_in_columns = True

    columns = (
        PART,
        ASKED,
        Column("trust", "who is trusted with what", "algorithm", label=True),
        Column("honest", "h, clients of every sum that do not work with the server", form="d", missing="-"),
        Column("in a sum", "the fewest releases that are opened together", "min cohort", "d", missing="-"),
        ACCURACY,
        MU,
        AT_DELTA,
        Column("worst-case mu", "what holds if nobody else is honest", "mu_local", rounded_up, missing="nothing"),
        Column("worst-case epsilon", "the same at delta", "epsilon_local", rounded_up, missing="nothing"),
        Column("closed", "rounds that too few releases came in, mean over seeds", "closed", ".1f"),
        NOISE,
        SECONDS,
    )

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the rounds in which no sum was opened, because too few releases came."""
        rounds = document["per_round"]
        closed = [float(bool(entry[_CLOSED])) for entry in rounds]
        return {_CLOSED: {"rounds": [entry["round"] for entry in rounds], "values": closed}}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the number of closed rounds."""
        return {"closed": statistics([sum(run["curves"][_CLOSED]["values"]) for run in best.runs])}

    def row(self, cell: Document, label: str, entry: Document) -> dict[str, Any]:
        """Accuracy, whom the figures rest on, and the worst case."""
        config = RunConfig.from_mapping({**cell["settings"], **entry["settings"]})
        summed = config.secure
        # What a client releases for itself holds anyway; a trusted server's noise is nobody's but the server's.
        others = summed or config.trust_model == "trusted-server"
        return {
            **super().row(cell, label, entry),
            "honest": config.sums.min_honest if summed else None,
            "min cohort": config.sums.min_cohort if summed else None,
            **{f"{name}_local": entry[f"{name}_local" if others else name]["mean"] for name in ("mu", "epsilon")},
            "lost": config.lost_replies,
            "closed": entry["closed"]["mean"],
        }

    def further_tables(self, document: Document) -> list[Table]:
        """Return a line for each cell: accuracies beside each other, then the worst case."""
        rows, caption = self.rows(document), caption_of(document)
        labels = list(dict.fromkeys(row["algorithm"] for row in rows))
        common = [replace(ASKED, value="", label=True), MU, AT_DELTA]
        accuracies = [PART, *common, *(Column(one, "accuracy", form=".1f", spread=f"± {one}") for one in labels)]
        local = [*common, *(Column(one, "worst-case epsilon", form=_or_nothing) for one in labels)]
        return [
            Table("test accuracy in percent", accuracies, _crosswise(rows, "table", value="accuracy %"), caption),
            Table("worst-case epsilon", local, _crosswise(rows, value="epsilon_local"), caption),
        ]

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Draw a panel for each features and number of clients: accuracy against epsilon, a line for each trust."""
        rows, colour = self.rows(document), colours(document)
        default = RunConfig().features
        features = [cell["settings"].get("features", default) for cell in document["cells"] for _ in cell["algorithms"]]
        parts: dict[tuple[Any, ...], list[Row]] = {}
        for name, row in zip(features, rows, strict=True):
            parts.setdefault((name, row["asked"], row["clients"]), []).append(row)
        figure, grid, columns = panels(len(parts), 2, (5.2, 3.6), 1.6)
        for axes, ((name, asked, clients), cells) in zip(grid, parts.items(), strict=True):
            for lost in sorted({row["lost"] for row in cells}):
                for label in colour:
                    lines = [row for row in cells if (row["algorithm"], row["lost"]) == (label, lost)]
                    draw_by_epsilon(axes, lines, colour[label], **_style(colour[label], lost))
            axes.set_title(f"{name.replace('-', ' ')}, {asked} of {clients} clients asked", fontsize=9)
            axes.set_xscale("log")
            ticks = sorted({row["epsilon"] for row in cells if row["epsilon"] is not None})
            axes.set_xticks(ticks, [rounded_up(tick, 3) for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.set_xlabel(f"epsilon at delta = {cells[0]['delta']:g}")
            accuracy_axis(axes, _ERRORS)
            axes.set_ylabel("test accuracy [%]")
            axes.grid(alpha=0.3)
        add_legend(figure, list(figure.axes))
        heading = f"{title}: mean and standard deviation over {document['seeds']} runs; dashed: replies lost"
        save(figure, path, heading, document, 75 * columns)


def _style(colour: Any, lost: float) -> dict[str, Any]:
    """Solid where every reply came; where some were lost dashed, with hollow marks and no entry in the legend."""
    if lost:
        return {"label": None, "linestyle": "--", "linewidth": 1.0, "markersize": 4, "markerfacecolor": "white"}
    return {"linestyle": "-", "linewidth": 1.6, "markersize": 4, "markerfacecolor": colour}


def _or_nothing(value: float | str) -> str:
    return value if isinstance(value, str) else rounded_up(value)


def _crosswise(rows: Sequence[Row], *parts: str, value: str) -> list[dict[str, Any]]:
    """One row for the lines with one mu, as many clients and the same ``parts``, with a value of each of them."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        asked = f"{row['asked']} of {row['clients']}"
        shared = {ASKED.name: asked, "mu": row["mu"], "epsilon": row["epsilon"]}
        named = {part: row[part] for part in parts}
        cell = cells.setdefault((asked, row["mu asked"], *named.values()), {**named, **shared})
        found = row[value]
        cell |= {row["algorithm"]: "nothing" if found is None else found, f"± {row['algorithm']}": row["± std"]}
    return list(cells.values())


_MNIST: Settings = {
    "task": "mnist",
    "preset": "practical",
    "num-clients": 100,
    "batch-size": 6,  # 600 samples a client: 100 releases of each in one pass
    "sampling": "balanced",
    **JUDGED_AT_THE_END,
}
_MU2: Overrides = {"strategy": "mu2", "mechanism": "cancelling"}
_FEATURES = ("pixels", "oriented-gradients")
_MUS = (1.0, 0.25, 0.1)
_ASKED = (100, 50)
_LOST = 0.2

_HONEST = (0.5, 0.7, 0.9)
"""h, as a share of the clients asked in a round."""
_LOSSY_COHORT = 0.7
"""The smallest sum where replies are lost, as a share of m; h = 0.9 m has no room for that."""


def _kinds(asked: int, *, lossy: bool) -> dict[str, Overrides]:
    """Return the settings of trust, from nobody to the server; h clients of a sum in between.

    Where every reply comes, all that are asked are in the sum, so that all of them but h may work with the server.
    Where some are lost fewer must do, so fewer may; h = 0.7 m is then for sums without a client that does.
    """
    cohort = round(_LOSSY_COHORT * asked) if lossy else asked
    shares = {f"h = {share:g} m": round(share * asked) for share in _HONEST}
    return {
        "untrusted server": _MU2,
        **{
            label: {
                **_MU2,
                "trust": "secure-aggregation",
                "trust.min-cohort": cohort,
                "trust.colluders": cohort - honest,
            }
            for label, honest in shares.items()
            if honest <= cohort
        },
        "trusted server": {"strategy": "trusted-mu2"},
    }


def _cell(features: str, mu: float, asked: int, *, lossy: bool) -> Cell:
    settings = {**_MNIST, "features": features, "mu": mu, "clients-per-round": asked}
    table = features.replace("-", " ")
    if lossy:
        settings["lost-replies"] = _LOST
        table += f", {100 * _LOST:g} % of replies lost"
    return Cell(table, settings, _kinds(asked, lossy=lossy))


class SecureAggregation(Paper):
    """One pass over MNIST by 100 clients, all of them or half asked in a round, with and without lost replies."""

    name = "secure-aggregation"
    sentence = "DP-mu^2-FL by whom a client trusts: nobody, that some of a sum are honest, the server"
    seeds = 5
    table = TrustTable()

    def cells(self) -> list[Cell]:
        """Return a cell for each loss, number of clients asked, features and mu."""
        return [
            _cell(features, mu, asked, lossy=lossy)
            for lossy in (False, True)
            for asked in _ASKED
            for features in _FEATURES
            for mu in _MUS
        ]

    def cells_with(self, overrides: Overrides) -> list[Cell]:
        """Return the cells with overrides; h and the size of a sum stay the same shares of m."""
        cells = super().cells_with(overrides)
        return [_fitting(cell, overrides) for cell in cells] if overrides else cells


def _fitting(cell: Cell, overrides: Overrides) -> Cell:
    asked = int(cell.settings["clients-per-round"])
    kinds = _kinds(asked, lossy=bool(cell.settings.get("lost-replies")))
    algorithms = {
        label: {**options, **kinds.get(label, {}), **{name: overrides[name] for name in options if name in overrides}}
        for label, options in cell.algorithms.items()
        if label in kinds or "trust.min-cohort" not in options  # where replies are lost there are fewer
    }
    return replace(cell, algorithms=algorithms)
