"""The README's picture and table: accuracy on MNIST for an epsilon, compared with the strongest rivals.

``python -m benchmarks.pages`` draws docs/pictures/accuracy.svg from docs/results/best-accuracy.json. The text of the
picture stays text, so that a test can hold its figures against that document.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from murmurfl.app.papers.accuracy import ALONE
from murmurfl.app.papers.best_accuracy import (
    BEST,
    FULL,
    HIDDEN_ORDER,
    NOISY_SGD,
    SECURE,
    WITHOUT,
    BestTable,
    compared_at,
    epsilon_name,
)
from murmurfl.app.reports.figures import empty_figure
from murmurfl.app.reports.table import spread
from murmurfl.privacy import SIMULATED, Guarantee, rounded_up
from murmurfl.privacy.accounting.guarantee import FAST_NOISE

_COLUMNS = 105
_ERRORS = (1, 2, 3, 5, 10, 15)
"""Where accuracies are marked, in percent wrong."""


class Line(NamedTuple):
    """A line of the picture: an algorithm on the best features."""

    name: str
    algorithm: str
    colour: str

    def rows(self, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Its rows of the reproduction with one client alone, the strictest epsilon first.

        With shuffled batches the epsilon is the amplified one.
        """
        found = [
            {**row, "epsilon": compared_at(row)}
            for row in BestTable().rows(document)
            if (row["table"], row["algorithm"]) == (BEST, self.algorithm)
        ]
        return sorted(found, key=lambda row: row["epsilon"] or 0.0)


SUMS = Line("murmurfl, the server sees only sums", SECURE, "#4c9f70")
RELEASES = Line("murmurfl, the server sees every release", FULL, "#0b3c49")
OTHERS = Line("noisy SGD", NOISY_SGD, "#b0704f")
HIDDEN = Line("noisy SGD with shuffled batches", HIDDEN_ORDER, "#8a5fa8")
NOISELESS = Line("murmurfl without noise, not private", WITHOUT, "#777777")
SINGLE = Line("one client alone, without noise", ALONE, "#b0b7bc")
LINES = (SUMS, RELEASES, HIDDEN, OTHERS)
DIGITS = 1
"""Of an epsilon, rounded up."""


class Record(NamedTuple):
    """A figure that others print, under assumptions of its own."""

    name: str
    epsilon: float
    accuracy: float
    assumes: str


CENTRAL = Record("DP-SGD at a trusted trainer", 2.93, 98.7, "published record, ε = 3 for a sample added or removed")
"""Tramèr and Boneh 2021, "Differentially Private Learning Needs Better Features (or Much More Data)": scattering and a
linear model, delta = 1e-5."""


def drawn(document: Mapping[str, Any]) -> dict[Line, list[Mapping[str, Any]]]:
    """Return the lines that the document has, with their rows."""
    return {line: rows for line in (NOISELESS, *LINES, SINGLE) if (rows := line.rows(document))}


def table(document: Mapping[str, Any]) -> str:
    """Return the README's table: a line for each of the strictest epsilons, one pair of columns."""
    ours = {(line, epsilon_name(row["epsilon"])): _cell(row) for line in LINES for row in line.rows(document)}
    epsilons = {epsilon_name(row["epsilon"]): row["epsilon"] for row in RELEASES.rows(document)}
    few, one, two, *_ = epsilons
    (alone,) = SINGLE.rows(document)
    beside = {
        **{
            (RELEASES, at): f"{ours[OTHERS, at]}, {OTHERS.name}; {ours[HIDDEN, at]}, with shuffled batches"
            for at in (few, one, two)
        },
        (SUMS, few): f"{_cell(alone)}, {SINGLE.name}",
        (SUMS, one): f"{CENTRAL.accuracy:g}, {CENTRAL.name} ({CENTRAL.assumes})",
    }
    lines = ["| | murmurfl | strongest rivals |", "|---|---|---|"]
    for (line, at), other in beside.items():
        seen = line.name.partition(", ")[2]
        lines.append(f"| {_shown(epsilons[at])}, {seen} | {ours[line, at]} | {other} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    return spread(row["accuracy %"], row["± std"], ".1f")


def _shown(epsilon: float) -> str:
    return f"ε = {float(rounded_up(epsilon, DIGITS)):g}"


def terms(guarantees: Sequence[tuple[str, Guarantee]]) -> str:
    """Return the conditions of the epsilons of picture and table, and that nobody was protected.

    Raises
    ------
    ValueError
        If they differ in more than in sums, and a sentence would not be true of all.
    """
    plain = [one for _, one in guarantees if one.min_honest is None]
    sums = [one for _, one in guarantees if one.min_honest is not None]
    said = {(one.protects, one.covers, one.notes) for one in plain}
    said |= {(_without_sums(one).protects, one.covers, one.notes) for one in sums}
    honest = {one.min_honest for one in sums}
    noise = {"noise on each client" in one.mechanism for one in (*plain, *sums)}
    if len(said) != 1 or len(honest) != 1 or noise != {True}:
        raise ValueError(f"Expected guarantees of the same words, got {said}, {honest} and {noise}.")
    ((protects, covers, notes),) = said
    if set(notes) != {FAST_NOISE, SIMULATED}:
        raise ValueError(f"Expected notes on fast noise and seeded keys, got {notes}.")
    hidden = [one for one in plain if one.amplified is not None]
    local = " and ".join(rounded_up(one, 2) for one in sorted({one.loss.worst_case.epsilon(one.delta) for one in sums}))
    return (
        f"ε is rounded up and holds {protects}; noise on each client; {covers}. Where the server sees only sums, this "
        f"assumes that one helper and {honest.pop()} clients of each sum are honest; in the worst case ε is {local}. "
        f"{in_secret('With shuffled batches ε', hidden)} The runs are simulated with fast noise and seeded keys, which "
        "protect nobody."
    )


def in_secret(epsilon: str, guarantees: Sequence[Guarantee]) -> str:
    """Return the assumptions, worst case and cost of epsilons with shuffled batches; empty without such batches."""
    found = {one.epsilon: one.amplified.slots for one in guarantees if one.amplified is not None}
    if not found:
        return ""
    known = _listed([rounded_up(one, 2) for one in sorted(found)], "and")
    times = _listed([str(one) for one in sorted(set(found.values()))], "or")
    return (
        f"{epsilon} holds while nobody learns which release contains a sample or how long a client takes. Against "
        f"somebody who learns this, it is {known}. This method computes {times} times the gradients of one pass."
    )


def _listed(texts: Sequence[str], word: str) -> str:
    *before, last = texts
    return f"{', '.join(before)} {word} {last}" if before else last


def _without_sums(guarantee: Guarantee) -> Guarantee:
    return replace(guarantee, loss=guarantee.loss.unconditional(), trust="untrusted-server", min_honest=None)


def percent_text(value: float) -> str:
    """Return a percentage as the picture shows it."""
    return f"{value:.1f}"


def draw(document: Mapping[str, Any], caption: str, path: Path) -> None:
    """Write the picture.

    Parameters
    ----------
    document : mapping
        Of ``best-accuracy``.
    caption : str
        What its epsilons are true of.
    path : Path
        Of an SVG.
    """
    from matplotlib import rc_context

    # Text as text, and identifiers from a salt of ours: the same document gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "murmurfl", "font.family": "sans-serif"}):
        figure = empty_figure(7, 5)
        axes = figure.add_subplot()
        for line, rows in drawn(document).items():
            _draw_line(axes, line, rows)
        axes.plot(CENTRAL.epsilon, 100 - CENTRAL.accuracy, "*", color="#8a1c1c", markersize=12)
        _note(axes, CENTRAL.epsilon, CENTRAL.accuracy, percent_text(CENTRAL.accuracy), "#8a1c1c")
        axes.plot([], [], "*", color="#8a1c1c", label=f"{CENTRAL.name}: {CENTRAL.assumes}")
        _name_axes(axes, [row["epsilon"] for rows in drawn(document).values() for row in rows if row["epsilon"]])
        axes.legend(loc="lower right", fontsize=8, frameon=False)
        figure.supxlabel(textwrap.fill(caption, _COLUMNS), fontsize=7.5, color="#444444")
        figure.savefig(path, metadata={"Date": None})
    # One newline at the end and none before line ends, as for every other text of the repository.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _draw_line(axes: Any, line: Line, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows[0]["epsilon"] is None:
        axes.axhline(100 - rows[0]["accuracy %"], color=line.colour, linestyle=":", label=line.name)
        return
    axes.errorbar(
        [row["epsilon"] for row in rows],
        [100 - row["accuracy %"] for row in rows],
        yerr=[row["± std"] or 0.0 for row in rows],
        color=line.colour,
        label=line.name,
        marker="o",
        markersize=4,
        capsize=2,
    )
    for row in rows:
        text = percent_text(row["accuracy %"])
        _note(axes, row["epsilon"], row["accuracy %"], text, line.colour, below=line in (OTHERS, HIDDEN))


def _note(axes: Any, epsilon: float, accuracy: float, text: str, colour: str, *, below: bool = False) -> None:
    axes.annotate(
        text,
        (epsilon, 100 - accuracy),
        xytext=(0, -23 if below else 14),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=colour,
    )


def _name_axes(axes: Any, epsilons: Sequence[float]) -> None:
    """Epsilon along, accuracy up, by the logarithm of the error: what is near 100 % is told apart too."""
    ticks = sorted(set(epsilons))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [_shown(tick) for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_yticks(_ERRORS, [f"{100 - error:g}" for error in _ERRORS], fontsize=8)
    axes.set_yticks([], minor=True)
    axes.set_ylabel("test accuracy on MNIST [%]")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
