"""Accuracy and loss: of a run against rounds, and of groups of runs beside each other, with what noise cost them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .figures import INK, PALETTE, Plot, figure_style, line_style, new_figure, rounds_along
from .groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITHOUT = "without noise, not private"
_MARKED = 40
"""Evaluations of a curve that are marked one by one."""


def compared_plots(groups: Sequence[Group]) -> list[Plot]:
    """The figures of several runs together.

    Parameters
    ----------
    groups : sequence of Group
    """
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
            label = _named(group) if len(groups) > 1 or len(group.runs) > 1 else None
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
    said = ["Of the published model, on the test set, which is public."]
    said += ["Bands: one standard deviation over seeds."] if any(len(group.runs) > 1 for group in groups) else []
    said += ["Dotted: where the same run ended without noise; of a simulation, and not private."] if known else []
    return Plot(measure, f"{measure.capitalize()} against rounds", " ".join(said), figure)


def _draw_without_noise(axes: Axes, groups: Sequence[Group], measure: str) -> bool:
    """A dotted line across for each twin without noise; whether there is any."""
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


def _named(group: Group) -> str:
    return group.name if len(group.runs) == 1 else f"{group.name}, {len(group.runs)} seeds"


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
                label=_named(group),
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
    said = ["Each ε is its run's own guarantee, as above."]
    said += ["Bars: one standard deviation over seeds."] if any(spread[1] is not None for *_, spread in known) else []
    said += ["Dotted: without noise, not private."] if without else []
    return Plot("accuracy-epsilon", "Accuracy against ε", " ".join(said), figure, note)
