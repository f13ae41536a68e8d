"""The README's picture: accuracy with noise that cancels and with noise that does not, at the same epsilon.

``python -m benchmarks.pages`` draws docs/pictures/accuracy.svg from docs/results/reshef-levy-2025.json. The text of the
picture stays text, so that a test can hold its figures against that document.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from murmurfl.app.papers.drawing import new_figure
from murmurfl.privacy import rounded_up

_OURS, _OTHER = "#1f6f8b", "#b0b7bc"
_COLUMNS = 170


class Pair(NamedTuple):
    """A cell of the table, with what stands beside ours."""

    cell: Mapping[str, Any]
    other: str

    @property
    def entries(self) -> dict[str, Mapping[str, Any]]:
        """The figures of ours, and of what stands beside it."""
        return {label: self.cell["algorithms"][label] for label in ("mu2", self.other)}

    @property
    def practical(self) -> bool:
        """Whether clip and step are the practical preset's, and not the papers' constants."""
        return self.cell["settings"].get("preset") != "paper"

    @property
    def asked(self) -> str:
        """Machines asked in a round, of all there are."""
        return f"{self.cell['settings']['clients-per-round']} of {self.cell['settings']['num-clients']}"

    @property
    def epsilon(self) -> str:
        """Epsilon of ours, rounded up."""
        return rounded_up(self.entries["mu2"]["epsilon"]["mean"])

    def accuracies(self) -> list[tuple[float, float]]:
        """Mean and standard deviation in percent, ours first."""
        return [(100 * one["accuracy"]["mean"], 100 * one["accuracy"]["std"]) for one in self.entries.values()]


def pairs(document: Mapping[str, Any]) -> list[Pair]:
    """Every cell, with the algorithm that the summary sets beside ours: the first other one."""
    return [Pair(cell, next(label for label in cell["algorithms"] if label != "mu2")) for cell in document["cells"]]


def drawn(document: Mapping[str, Any]) -> list[Pair]:
    """The cells in the picture: those with practical constants, the strictest epsilon first, losses last."""
    practical = [pair for pair in pairs(document) if pair.practical]

    def order(pair: Pair) -> tuple[bool, float]:
        return "lost-replies" in pair.cell["settings"], pair.entries["mu2"]["epsilon"]["mean"]

    return sorted(practical, key=order)


def percent_text(value: float) -> str:
    """A percentage as the picture shows it."""
    return f"{value:.1f} %"


def draw(shown: Sequence[Pair], caption: str, path: Path) -> None:
    """Write the picture.

    Parameters
    ----------
    shown : sequence of Pair
    caption : str
        What its epsilons are true of.
    path : Path
        Of an SVG.
    """
    from matplotlib import rc_context

    # Text as text, and identifiers from a salt of ours: the same document gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "murmurfl", "font.family": "sans-serif"}):
        figure = new_figure(10, 4.4)
        axes = figure.add_subplot()
        for i, pair in enumerate(shown):
            for (mean, std), offset, colour in zip(pair.accuracies(), (-0.2, 0.2), (_OURS, _OTHER), strict=True):
                axes.bar(i + offset, mean, 0.36, yerr=std, color=colour, error_kw={"elinewidth": 1})
                axes.text(i + offset, mean + std + 1, percent_text(mean), ha="center", fontsize=8)
        axes.set_xticks(range(len(shown)), [_named(pair) for pair in shown], fontsize=8)
        axes.set_ylim(0, 105)
        axes.set_ylabel("test accuracy on MNIST [%]")
        axes.spines[["top", "right"]].set_visible(False)
        axes.bar(0, 0, color=_OURS, label="noise that cancels itself (DP-μ²-FL)")
        axes.bar(0, 0, color=_OTHER, label="the same privacy without: noisy SGD; with losses, the papers' release rule")
        axes.legend(loc="upper left", ncols=2, fontsize=8, frameon=False)
        figure.supxlabel(textwrap.fill(caption, _COLUMNS), fontsize=6.5, color="#444444")
        figure.savefig(path, metadata={"Date": None})
    # One newline at the end and none before line ends, as for every other text of the repository.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _named(pair: Pair) -> str:
    settings = pair.cell["settings"]
    what = "oriented gradients" if settings.get("features") else "pixels"
    if settings.get("lost-replies"):
        what = f"{100 * settings['lost-replies']:g} % of replies lost"
    return f"ε = {pair.epsilon}\n{what}\n{pair.asked} machines"
