"""secure-aggregation: mu^2-SGD on MNIST by whom a machine trusts (docs/secure-aggregation.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...privacy import rounded_up
from ..reports.table import Column, Row, Table, statistics
from ..settings.run_config import RunConfig
from .accuracy import ACCURACY, NOISE, SECONDS, accuracy_rows
from .cell import JUDGED_AT_THE_END, Cell, Overrides, Settings
from .kind import TableKind, Trial
from .paper import Paper
from .paper_figures import accuracy_axis, add_legend, colours, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_CLOSED = "closed"
_ERRORS = (2.5, 5, 10, 20, 40)
"""Ticks of the accuracy axis, in percent wrong."""


class TrustTable(TableKind):
    """A line for each algorithm: accuracy, and what is guaranteed with and without what it assumes of others."""

    name = "trust"
    sentence = "test accuracy by whom a machine trusts, with what holds under that and what holds whatever happens"
    curves_needed = frozenset({_CLOSED})
    honest_in_columns = True

    columns = (
        Column("table", "the part of the table that the line belongs to", label=True),
        Column(
            "asked of machines",
            "machines asked in a round, of all there are",
            lambda row: f"{row['asked']} of {row['machines']}",
        ),
        Column("trust", "who is trusted with what", "algorithm", label=True),
        Column("honest", "h, machines of every sum that do not work with the server", form="d", missing="-"),
        Column("in a sum", "the fewest releases that are opened together", "min cohort", "d", missing="-"),
        ACCURACY,
        Column("mu", "what every run of the line guarantees, in the terms above", form=rounded_up),
        Column("epsilon", "the same at delta", form=rounded_up),
        Column("mu whatever happens", "what holds if nobody else is honest", "mu_local", rounded_up, missing="nothing"),
        Column("epsilon whatever happens", "the same at delta", "epsilon_local", rounded_up, missing="nothing"),
        Column("closed", "rounds that too few releases came in, mean over seeds", "closed", ".1f"),
        NOISE,
        SECONDS,
    )

    def curves(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The rounds in which no sum was opened, because too few releases came."""
        rounds = document["per_round"]
        closed = [float(bool(entry[_CLOSED])) for entry in rounds]
        return {_CLOSED: {"rounds": [entry["round"] for entry in rounds], "values": closed}}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The number of closed rounds."""
        return {"closed": statistics([sum(run["curves"][_CLOSED]["values"]) for run in best.runs])}

    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """A line for each algorithm of each cell."""
        rows, caption = trust_rows(document), str(document.get("guarantee", ""))
        return Table(title, self.columns, rows, caption, draw=lambda path: _draw(document, title, caption, path))

    def further_tables(self, document: Mapping[str, Any]) -> list[Table]:
        """A line for each cell: accuracies beside each other, then what holds whatever happens."""
        rows, caption = trust_rows(document), str(document.get("guarantee", ""))
        labels = list(dict.fromkeys(row["algorithm"] for row in rows))
        part = Column("table", "the part of the table that the line belongs to", label=True)
        accuracies = [part, *_COMMON, *(Column(one, "accuracy", form=".1f", spread=f"± {one}") for one in labels)]
        local = [*_COMMON, *(Column(one, "epsilon whatever happens", form=_or_nothing) for one in labels)]
        return [
            Table("test accuracy in percent", accuracies, _crosswise(rows, "table", value="accuracy %"), caption),
            Table("epsilon whatever happens", local, _crosswise(rows, value="epsilon_local"), caption),
        ]


_COMMON = (
    Column("asked of machines", "machines asked in a round, of all there are", label=True),
    Column("mu", "what every run of the line guarantees, in the terms above", form=rounded_up),
    Column("epsilon", "the same at delta", form=rounded_up),
)


def _or_nothing(value: float | str) -> str:
    return value if isinstance(value, str) else rounded_up(value)


def _crosswise(rows: Sequence[Row], *parts: str, value: str) -> list[dict[str, Any]]:
    """One row for the lines with one mu, as many machines and the same ``parts``, with a value of each of them."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        asked = f"{row['asked']} of {row['machines']}"
        shared = {"asked of machines": asked, "mu": row["mu"], "epsilon": row["epsilon"]}
        named = {part: row[part] for part in parts}
        cell = cells.setdefault((asked, row["mu asked"], *named.values()), {**named, **shared})
        found = row[value]
        cell |= {row["algorithm"]: "nothing" if found is None else found, f"± {row['algorithm']}": row["± std"]}
    return list(cells.values())


def trust_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm of each cell."""
    entries = [(cell, entry) for cell in document["cells"] for entry in cell["algorithms"].values()]
    return [
        {**row, **_trusted(cell, entry)} for row, (cell, entry) in zip(accuracy_rows(document), entries, strict=True)
    ]


def _trusted(cell: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    config = RunConfig.from_mapping({**cell["settings"], **entry["settings"]})
    summed = config.secure
    # What a machine releases for itself holds anyway; a trusted server's noise is nobody's but the server's.
    own = "mu", "epsilon"
    local = {
        f"{name}_local": entry[f"{name}_local" if summed or config.trust_model == "trusted-server" else name]["mean"]
        for name in own
    }
    return {
        "honest": config.min_honest if summed else None,
        "min cohort": config.cohort_floor if summed else None,
        **local,
        "lost": config.lost_replies,
        "closed": entry["closed"]["mean"],
    }


def _draw(document: Mapping[str, Any], title: str, caption: str, path: Path) -> None:
    """A panel for each features and number of machines asked: accuracy against epsilon, a line for each trust."""
    rows, colour = trust_rows(document), colours(document)
    settings = [{**RunConfig().to_mapping(), **cell["settings"]} for cell in document["cells"]]
    places = [one for cell, one in zip(document["cells"], settings, strict=True) for _ in cell["algorithms"]]
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for place, row in zip(places, rows, strict=True):
        parts.setdefault((place["features"], row["asked"], row["machines"]), []).append(row)
    figure, grid, columns = panels(len(parts), 2, (5.2, 3.6), 1.6)
    for axes, (place, shown) in zip(grid, parts.items(), strict=True):
        features, asked, machines = place
        for lost in sorted({row["lost"] for row in shown}):
            for label in colour:
                _draw_line(axes, [r for r in shown if (r["algorithm"], r["lost"]) == (label, lost)], colour[label])
        axes.set_title(f"{features.replace('-', ' ')}, {asked} of {machines} machines asked", fontsize=9)
        axes.set_xscale("log")
        ticks = sorted({row["epsilon"] for row in shown if row["epsilon"] is not None})
        axes.set_xticks(ticks, [rounded_up(tick, 3) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"epsilon at delta = {shown[0]['delta']:g}")
        accuracy_axis(axes, _ERRORS)
        axes.set_ylabel("test accuracy [%]")
        axes.grid(alpha=0.3)
    add_legend(figure, list(figure.axes))
    heading = f"{title}: mean and standard deviation over {document['seeds']} runs; dashed: replies lost"
    save(figure, path, heading, caption, 75 * columns)


def _draw_line(axes: Axes, rows: Sequence[Row], colour: Any) -> None:
    """One trust in one panel: solid where every reply came, dashed with hollow marks where some were lost."""
    for row in rows:
        if row["epsilon"] is None:  # without noise: a line across
            axes.axhline(100 - row["accuracy %"], color=colour, linestyle=":", label=row["algorithm"])
    rows = sorted((row for row in rows if row["epsilon"] is not None), key=lambda row: row["epsilon"])
    if not rows:
        return
    lossy = bool(rows[0]["lost"])
    axes.errorbar(
        [row["epsilon"] for row in rows],
        [100 - row["accuracy %"] for row in rows],
        yerr=[row["± std"] or 0.0 for row in rows],
        color=colour,
        label=None if lossy else rows[0]["algorithm"],
        linestyle="--" if lossy else "-",
        linewidth=1.0 if lossy else 1.6,
        marker="o",
        markersize=4,
        markerfacecolor="white" if lossy else colour,
        capsize=2,
    )


_MNIST: Settings = {
    "task": "mnist",
    "preset": "practical",
    "num-clients": 100,
    "batch-size": 6,  # 600 samples a machine: 100 releases of each in one pass
    "sampling": "balanced",
    **JUDGED_AT_THE_END,
}
_MU2: Overrides = {"strategy": "mu2", "mechanism": "cancelling"}
_FEATURES = ("pixels", "oriented-gradients")
_MUS = (1.0, 0.25, 0.1)
_ASKED = (100, 50)
_LOST = 0.2

_HONEST = (0.5, 0.7, 0.9)
"""h, as a share of the machines asked in a round."""
_LOSSY_COHORT = 0.7
"""The smallest sum where replies are lost, as a share of m; h = 0.9 m has no room for that."""


def _kinds(asked: int, *, lossy: bool) -> dict[str, Overrides]:
    """Whom a machine trusts, from nobody to the server; h machines of a sum in between.

    Where every reply comes, all that are asked are in the sum, so that all of them but h may work with the server.
    Where some are lost fewer must do, so fewer may; h = 0.7 m is then for sums without a machine that does.
    """
    cohort = round(_LOSSY_COHORT * asked) if lossy else asked
    shares = {f"h = {share:g} m": round(share * asked) for share in _HONEST}
    return {
        "untrusted server": _MU2,
        **{
            label: {
                **_MU2,
                "trust": "secure-aggregation",
                "min-cohort": cohort,
                "colluders": cohort - honest,
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
    """One pass over MNIST by 100 machines, all of them or half asked in a round, with and without lost replies."""

    name = "secure-aggregation"
    sentence = "DP-mu^2-FL by whom a machine trusts: nobody, that some of a sum are honest, the server"
    seeds = 5
    table = TrustTable()

    def cells(self) -> list[Cell]:
        """A cell for each loss, number of machines asked, features and mu."""
        return [
            _cell(features, mu, asked, lossy=lossy)
            for lossy in (False, True)
            for asked in _ASKED
            for features in _FEATURES
            for mu in _MUS
        ]

    def cells_with(self, overrides: Overrides) -> list[Cell]:
        """The cells with overrides; h and the size of a sum stay the same shares of m."""
        cells = super().cells_with(overrides)
        return [_fitting(cell, overrides) for cell in cells] if overrides else cells


def _fitting(cell: Cell, overrides: Overrides) -> Cell:
    asked = int(cell.settings["clients-per-round"])
    kinds = _kinds(asked, lossy=bool(cell.settings.get("lost-replies")))
    algorithms = {
        label: {**options, **kinds.get(label, {}), **{name: overrides[name] for name in options if name in overrides}}
        for label, options in cell.algorithms.items()
        if label in kinds or "min-cohort" not in options  # where replies are lost there are fewer
    }
    return replace(cell, algorithms=algorithms)
