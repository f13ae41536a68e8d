"""The figures of a report: of several runs together, and of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.guarantee import rounded_up
from ..models.model import KNOTS_ARRAY
from .figures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PALETTE,
    PINK,
    RED,
    SIZE,
    SKY,
    Plot,
    empty_figure,
    figure_style,
    line_style,
    new_figure,
    plain_text,
    rounds_along,
)
from .finding import RecordedRun
from .groups import Group, without_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..models.curves import ColumnCurve
    from ..models.trained_model import TrainedModel
    from ..runs.outcome import Round

_WITHOUT = "without noise, not private"
_LONGEST = 28
_MARKED = 40
"""Evaluations of a curve that are marked one by one."""
_MOST_CELLS, _MOST_LINES, _MOST_BARS, _MOST_ROWS, _ROW_GROUPS = 6000, 30, 120, 150, 60


def compared_plots(groups: Sequence[Group]) -> list[Plot]:
    """Draw the figures of several runs together."""
    made = [measure_plot(groups, "accuracy"), measure_plot(groups, "loss"), _against_epsilon(groups)]
    return [plot for plot in made if plot is not None]


def measure_plot(groups: Sequence[Group], measure: str) -> Plot | None:
    """Accuracy or loss against rounds; None if no run has it.

    Parameters
    ----------
    groups : sequence of Group
        A line each; several seeds have a band of one standard deviation around their mean.
    measure : str
        ``accuracy`` or ``loss``.
    """
    curves = [(number, group, *group.curve(measure)) for number, group in enumerate(groups)]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        return None
    figure, axes = new_figure()
    percent = 100 if measure == "accuracy" else 1
    with figure_style():
        for number, group, rounds, means, deviations in curves:
            mean, deviation = percent * np.array(means), percent * np.array(deviations)
            marker = "o" if len(rounds) <= _MARKED else None
            label = _named(number, group) if len(groups) > 1 or len(group.runs) > 1 else None
            axes.plot(rounds, mean, label=label, linewidth=2, marker=marker, markersize=3.5, **line_style(number))
            if len(group.runs) > 1:
                colour = line_style(number)["color"]
                axes.fill_between(rounds, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
        known = _draw_without_noise(axes, groups, measure)
        rounds_along(axes)
        axes.set_ylabel("test accuracy [%]" if measure == "accuracy" else "test loss")
        if measure == "accuracy":
            axes.set_ylim(0, 100)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=min(len(axes.get_legend_handles_labels()[1]), 2))
    return Plot(measure, f"{measure.capitalize()} against rounds", _measure_caption(groups, dotted=known), figure)


def _measure_caption(groups: Sequence[Group], *, dotted: bool) -> str:
    sentences = ["Of the published model, on the test set, which is public."]
    if any(group.outcome.of_table for group in groups):
        sentences = [
            "Of the published model, on rows held out from a table: they are private, and no epsilon covers the curve."
        ]
    sentences += ["Bands: one standard deviation over seeds."] if any(len(group.runs) > 1 for group in groups) else []
    sentences += ["Dotted: where the same run ended without noise; of a simulation, and not private."] if dotted else []
    return " ".join(sentences)


def _draw_without_noise(axes: Axes, groups: Sequence[Group], measure: str) -> bool:
    """Draw a dotted line for each non-private baseline; return True if there is any."""
    percent = 100 if measure == "accuracy" else 1
    drawn: dict[float, int] = {}  # groups that differ in their noise alone have one twin
    for number, group in enumerate(groups):
        found = group.without_noise(measure)
        if found is not None:
            drawn.setdefault(found[0], number)
    for value, number in drawn.items():
        colour = INK if len(drawn) == 1 else line_style(number)["color"]
        label = _WITHOUT if number == min(drawn.values()) else None
        axes.axhline(percent * value, color=colour, linestyle=":", linewidth=1.6, label=label)
    return bool(drawn)


def _named(number: int, group: Group) -> str:
    """Return a name that a legend has room for, with its number on the page."""
    name = without_time(group.name)
    name = name if len(name) <= _LONGEST else f"{name[:10]}…{name[11 - _LONGEST :]}"
    return f"{number + 1} {plain_text(name)}{'' if len(group.runs) == 1 else f', {len(group.runs)} seeds'}"


def _against_epsilon(groups: Sequence[Group]) -> Plot | None:
    known = [
        (i, group, epsilon, accuracy)
        for i, group in enumerate(groups)
        if (epsilon := group.outcome.epsilon) and (accuracy := group.spread("accuracy")) is not None
    ]
    if len(known) < 2:
        return None
    figure, axes = new_figure()
    with figure_style():
        for number, group, epsilon, (mean, deviation) in known:
            axes.errorbar(
                epsilon,
                100 * mean,
                yerr=None if deviation is None else 100 * deviation,
                fmt="osD^vP"[number % 6],
                color=PALETTE[number % len(PALETTE)],
                markersize=9,
                capsize=4,
                label=_named(number, group),
            )
        without = _draw_without_noise(axes, groups, "accuracy")
        epsilons = [epsilon for _, _, epsilon, _ in known]
        axes.set_xscale("log")
        axes.set_xlabel("ε of the whole run (less is more private)")
        axes.set_ylabel("test accuracy [%]")
        axes.set_ylim(0, 100)
        axes.set_xlim(min(epsilons) / 1.6, max(epsilons) * 1.6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        figure.legend(loc="outside lower center", ncols=min(len(known) + without, 2))
    note = "\n".join(f"{group.name}: {group.outcome.guarantee}" for _, group, *_ in known)
    sentences = ["Each ε is its run's own guarantee, as above."]
    sentences += (
        ["Bars: one standard deviation over seeds."] if any(spread[1] is not None for *_, spread in known) else []
    )
    sentences += ["Dotted: without noise, not private."] if without else []
    return Plot("accuracy-epsilon", "Accuracy against ε", " ".join(sentences), figure, note)


BOOKKEEPING = (
    "Lines are bookkeeping: what the releases made so far would cost had their number been fixed in advance; a request "
    "without an answer counts as a release. What is guaranteed is the dashed line, from the first round on."
)


def run_plots(run: RecordedRun) -> list[Plot]:
    """Draw the figures of one run; those whose data were not recorded are left out."""
    alone = [Group(run.name, [run])]
    measured = [measure_plot(alone, "accuracy"), measure_plot(alone, "loss")]
    curves = [] if run.model is None else curve_plots(run.model)
    made = [*measured, _reliability(run), *curves, _epsilon(run), _participation(run), _replies(run), _noise(run)]
    return [plot for plot in made if plot is not None]


def _reliability(run: RecordedRun) -> Plot | None:
    """Draw how often predictions of a rehearsal come true, against their probability."""
    rehearsal = run.outcome.rehearsal
    if rehearsal is None or not rehearsal.reliability:
        return None
    bins = rehearsal.reliability
    what = f"probability of {rehearsal.classes[1]}" if len(rehearsal.classes) == 2 else "probability of the prediction"
    figure, axes = new_figure()
    with figure_style():
        axes.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1, label="calibrated")
        axes.plot([one.predicted for one in bins], [one.observed for one in bins], color=BLUE, linewidth=1.5)
        most = max(one.rows for one in bins)
        axes.scatter(
            [one.predicted for one in bins],
            [one.observed for one in bins],
            s=[12 + 80 * one.rows / most for one in bins],
            color=BLUE,
            label="held-out rows by tenths, larger for more rows",
        )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel(plain_text(what))
        axes.set_ylabel("share that came true")
        figure.legend(loc="outside lower center", ncols=2)
    loss = "" if rehearsal.log_loss is None else f" Log loss {rehearsal.log_loss:.3f}."
    caption = f"Of a rehearsal, whose rows were seen: not private. Points on the dashed line are calibrated.{loss}"
    return Plot("reliability", "Reliability of probabilities", caption, figure)


def _epsilon(run: RecordedRun) -> Plot | None:
    epsilons, guaranteed = run.epsilons, run.outcome.epsilon
    if epsilons is None or guaranteed is None:
        return None
    known = epsilons[~np.isnan(epsilons).any(axis=1)]
    if not len(known):
        return None
    figure, axes = new_figure()
    with figure_style():
        if len(known) <= _MOST_LINES:
            for i, line in enumerate(known):
                label = "each client" if not i else None
                axes.step(run.rounds, line, where="post", color=SKY, linewidth=1, alpha=0.8, label=label)
        else:
            low, high = np.percentile(known, (5, 95), axis=0)
            axes.fill_between(
                run.rounds, low, high, step="post", color=SKY, alpha=0.35, linewidth=0, label="9 of 10 clients"
            )
            axes.step(run.rounds, np.median(known, axis=0), where="post", color=SKY, linewidth=1.5, label="median")
        axes.step(run.rounds, known.max(axis=0), where="post", color=BLUE, linewidth=2.2, label="the largest")
        axes.axhline(
            guaranteed, color=RED, linestyle="--", linewidth=1.8, label=f"guaranteed: ε = {rounded_up(guaranteed)}"
        )
        axes.set_ylim(0, guaranteed * 1.12)
        rounds_along(axes)
        axes.set_ylabel(f"ε at δ = {run.outcome.delta:g}")
        figure.legend(loc="outside lower center", ncols=4)
    note = f"{run.outcome.guarantee} {BOOKKEEPING}"
    return Plot("epsilon", "ε spent against rounds, by client", BOOKKEEPING, figure, note)


def _participation(run: RecordedRun) -> Plot | None:
    table = run.participation
    if table is None:
        return None
    rows = len(table)
    figure, axes = new_figure(min(max(2.2, 0.8 + 0.16 * rows), 6.0))
    edges = np.array(run.rounds, dtype=float) - 0.5
    extent = np.append(edges, edges[-1] + 1)
    with figure_style():
        axes.grid(visible=False)
        draw = _shares_of_groups if rows > _MOST_ROWS else _each_client
        caption = draw(figure, axes, table, extent)
        if rows <= _MOST_LINES:
            axes.set_yticks(range(rows), [plain_text(name) for name in run.names], fontsize=8)
        axes.invert_yaxis()
        rounds_along(axes)
        axes.set_ylabel("client")
    return Plot("participation", "Who took part", caption, figure)


def _shares_of_groups(figure: Figure, axes: Axes, table: NDArray[np.int32], extent: NDArray[np.float64]) -> str:
    """More clients than a picture has rows: how many of neighbouring ones took part. Its caption is returned."""
    groups = np.array_split(np.arange(len(table)), _ROW_GROUPS)
    shares = np.array([100 * (table[group] > 0).mean(axis=0) for group in groups])
    mesh = axes.pcolormesh(extent, np.linspace(0, len(table), _ROW_GROUPS + 1), shares, cmap="cividis", rasterized=True)
    figure.colorbar(mesh, label="clients with an aggregated release [%]")
    return f"Clients in order, in {_ROW_GROUPS} groups: how many of each had a release aggregated in a round."


def _each_client(figure: Figure, axes: Axes, table: NDArray[np.int32], extent: NDArray[np.float64]) -> str:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes.pcolormesh(
        extent,
        np.arange(len(table) + 1) - 0.5,
        np.ma.masked_less(np.where(table > 0, 1, table), 0),
        cmap=ListedColormap([RED, BLUE]),
        vmin=0,
        vmax=1,
        edgecolor="none",
        rasterized=table.size > _MOST_CELLS,
    )
    colours = {"aggregated": BLUE, "asked, nothing aggregated": RED}
    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)
    return "Empty: not asked. Nothing aggregated: the reply was lost, refused, late, malformed or not opened."


def _reply_kinds(history: Sequence[Round]) -> dict[str, tuple[str, list[int]]]:
    """Return what became of requests, each with its colour and its number in every round; without what never was."""
    kinds = {
        "aggregated": (BLUE, [one.aggregated for one in history]),
        "lost": (RED, [one.lost for one in history]),
        "refused": (ORANGE, [sum(one.refused.values()) for one in history]),
        "late": (PINK, [one.late for one in history]),
        "malformed": (GREEN, [one.malformed for one in history]),
        "not opened": (SKY, [one.unopened for one in history]),
    }
    return {kind: found for kind, found in kinds.items() if kind == "aggregated" or any(found[1])}


def _replies(run: RecordedRun) -> Plot:
    figure, axes = new_figure()
    history = run.outcome.per_round
    groups = np.array_split(np.arange(len(history)), min(len(history), _MOST_BARS))
    rounds = np.array([np.mean([run.rounds[i] for i in group]) for group in groups])
    widths = np.array([(0.92 if len(groups) <= 40 else 1.0) * len(group) for group in groups])
    with figure_style():
        bottom = np.zeros(len(groups))
        for label, (colour, counts) in _reply_kinds(history).items():
            heights = np.array([np.mean([counts[i] for i in group]) for group in groups])
            axes.bar(rounds, heights, widths, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom += heights
        rounds_along(axes)
        axes.set_ylabel("requests" + (", mean of neighbouring rounds" if len(groups) < len(history) else ""))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside lower center", ncols=6)
    return Plot("replies", "What became of the requests", "Kinds that never occurred are left out.", figure)


def _noise(run: RecordedRun) -> Plot | None:
    # Clients with the same noise differ only in how far they may go: the longest is drawn.
    levels: dict[float, dict[str, Any]] = {}
    for stream in (run.clients or {}).get("streams", []):
        level = levels.setdefault(stream["noise_std"], {"clients": 0, "releases": []})
        level["clients"] += stream.get("count", len(stream["clients"]))
        if len(stream["releases"]) > len(level["releases"]):
            level |= {"releases": stream["releases"], "prefix_std": stream["prefix_std"]}
            level["sensitivity"] = stream["sensitivity"]
    if not levels:
        return None
    figure, axes = new_figure()
    with figure_style():
        for number, (std, level) in enumerate(sorted(levels.items())[: len(PALETTE)]):
            count = level["clients"]
            axes.plot(
                level["releases"][1:],  # the first is that of nothing released
                level["prefix_std"][1:],
                linewidth=2,
                label=f"{count} client{'s' if count > 1 else ''}, noise std {std:.3g} a row",
                **line_style(number),
            )
        sensitivity = max(level["sensitivity"] for level in levels.values())
        axes.axhline(sensitivity, color=INK, linestyle=":", linewidth=1.2, label="what one sample can move")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("release of a client")
        axes.set_ylabel("noise of a prefix sum, std")
        figure.legend(loc="outside lower center", ncols=2)
    statements = [*run.statements.values(), *(group.statement for group in run.outcome.client_groups or ())]
    mechanism = next((statement["mechanism"] for statement in statements), "")
    caption = (
        f"Standard deviation, in one value, of the noise in all that a client has released so far ({mechanism}); "
        "dotted: the most that one sample can move a release, in all values together."
    )
    return Plot("noise", "Noise level", caption, figure)


_MOST_CURVES, _MOST_CATEGORIES, _PANELS_ACROSS, _SKEWED = 12, 12, 3, 50.0
"""Curves of a page, and categories of one; panels in a row of a picture; ratio of numbers from which an axis has
logarithms."""


def curve_plots(model: TrainedModel) -> list[Plot]:
    """Draw the curves of an additive model, the most important columns first; none of other models."""
    if KNOTS_ARRAY not in model.arrays:
        return []
    from ..models.curves import OF_NOISE, effect_name

    found, made = model.curves(), []
    for number, name in enumerate(list(model.importance())[:_MOST_CURVES]):
        figure, axes = new_figure(2.8)
        with figure_style():
            _draw_curve(axes, found[name], model)
            axes.set_ylabel(plain_text(effect_name(model)))
            if len(axes.get_legend_handles_labels()[1]) > 1:
                figure.legend(loc="outside lower center", ncols=3)
        title = f"Curve {number + 1} by importance: {_short(name)}"
        made.append(Plot(f"curve-{number + 1}", title, OF_NOISE, figure))
    return made


def curves_picture(model: TrainedModel, most: int | None = None) -> Figure:
    """Return one picture of the curves of an additive model: ``most`` of them or all, the most important first."""
    from ..models.curves import OF_NOISE, effect_name

    found, names = model.curves(), list(model.importance())[:most]
    across = min(_PANELS_ACROSS, len(names))
    down = -(-len(names) // across)
    with figure_style():
        figure = empty_figure(0.75 * SIZE[0] * across, 2.6 * down + 0.5)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for place, axes in enumerate(panels):
            if place >= len(names):
                axes.set_axis_off()
                continue
            _draw_curve(axes, found[names[place]], model)
            if not place % across:
                axes.set_ylabel(plain_text(effect_name(model)))
        if len(panels[0].get_legend_handles_labels()[1]) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=6)
        figure.suptitle(OF_NOISE, fontsize=9, x=0.01, ha="left")
    return figure


def _draw_curve(axes: Axes, curve: ColumnCurve, model: TrainedModel) -> None:
    effects, lows, highs = (np.atleast_2d(one) for one in (curve.effect, curve.lower, curve.upper))
    labels = [str(one) for one in model.classes] if len(effects) > 1 else [""]
    banded = bool(np.isfinite(lows).all())
    if curve.is_number:
        for number, label in enumerate(labels):
            style = line_style(number)
            axes.plot(curve.values, effects[number], label=plain_text(_short(label)), linewidth=2, **style)
            if banded:
                band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
                axes.fill_between(curve.values, lows[number], highs[number], **band)
        axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
        _spread_out(axes, np.asarray(curve.values, dtype=np.float64))
        axes.set_xlabel(plain_text(_short(curve.column) + _missing_words(curve)))
        return
    order = np.argsort(-np.abs(effects).max(axis=0))[:_MOST_CATEGORIES]
    order = order[np.argsort(effects[0, order])]
    heights = np.arange(len(order), dtype=np.float64)
    for number, label in enumerate(labels):
        colour = line_style(number)["color"]
        at = heights + 0.6 * ((number + 0.5) / len(labels) - 0.5)
        reach = highs[number, order] - effects[number, order] if banded else None
        marks = {"fmt": "o", "color": colour, "capsize": 3, "label": plain_text(_short(label))}
        axes.errorbar(effects[number, order], at, xerr=reach, **marks)
    axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(heights, [plain_text(_short(str(curve.values[one]))) for one in order], fontsize=8)
    left_out = len(curve.values) - len(order)
    axes.set_xlabel(plain_text(_short(curve.column) + (f" ({left_out} more)" if left_out else "")))


def _spread_out(axes: Axes, values: NDArray[np.float64]) -> None:
    """Give numbers from 0 on that span several orders of magnitude a logarithmic axis."""
    above = values[values > 0]
    smallest = float(np.quantile(above, 0.02)) if len(above) else 0.0
    if values[0] >= 0 and smallest and values[-1] > _SKEWED * smallest:
        axes.set_xscale("symlog", linthresh=smallest)


def _missing_words(curve: ColumnCurve) -> str:
    if curve.missing is None or curve.missing.ndim > 1:
        return ""
    effect, low, high = curve.missing
    return f" (missing: {effect:.2g}" + (f", {low:.2g} to {high:.2g})" if np.isfinite(low) else ")")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
