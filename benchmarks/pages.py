"""Write the tables of README.md and docs/ from what they speak of, so that no figure and no sentence is typed twice.

The tables come from the documents that ``murmurfl reproduce`` and ``python -m benchmarks`` left in docs/results/;
tables of declarations are made while the site is built (docs/reference.py). A page has a table in one of two ways:

* between ``<!-- NAME -->`` and ``<!-- /NAME -->``: ``python -m benchmarks.pages`` writes it there, a test compares it;
* as ``[Table: NAME](results/FILE.json)``, in whose place docs/conf.py puts the table when the site is built.
  ``python -m benchmarks.pages docs/results.md`` prints such a page with its tables.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from murmurfl.app.methods.presets import PaperConstants
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.papers import PAPERS, rates
from murmurfl.app.papers.accuracy import ALONE, AccuracyTable, with_alone
from murmurfl.app.papers.best_accuracy import (
    BEST,
    FULL,
    HIDDEN_ORDER,
    NOISY_SGD,
    ONE_PASS,
    BestTable,
    compared_at,
    epsilon_name,
)
from murmurfl.app.papers.jiang_2026 import end_of_grid, standing_still
from murmurfl.app.papers.reproduction import cell_guarantees, tables_of
from murmurfl.app.reports.table import Table, spread
from murmurfl.privacy import errors, gdp_epsilon, rounded_up
from murmurfl.privacy.accounting.guarantee import WORST_CASE_SENTENCE

from . import (
    bare,
    collusion,
    device,
    drift,
    engines,
    fleet,
    footprint,
    forecast,
    glance,
    images,
    large,
    masks,
    mechanisms,
    momentum,
    noise,
    personal,
    picture,
    profile,
    ray,
    rivals,
    scale,
    situations,
    skew,
    stragglers,
    streams,
    tables,
    workers,
)
from .judged_tables import JUDGED, REGRESSION
from .peers import in_process
from .peers import run as peers
from .unmeasured import is_missing, shown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "pictures" / "accuracy.svg"


def document(name: str) -> dict[str, Any]:
    """Return a reproduction's JSON."""
    return json.loads((DOCUMENTS / f"{name}.json").read_text())


ROWS = 8
"""Rows of a table of the README, at most."""


def summary() -> str:
    """Return the README's table of results: the picture's lines and their strongest rivals."""
    made = best()
    drawn = picture.drawn(made)
    seeds = sorted({row["runs"] for line in picture.LINES for row in drawn[line]})
    return "\n".join(
        [
            "Test accuracy on MNIST with 100 clients, in percent (mean ± standard deviation over "
            f"{' or '.join(map(str, seeds))} seeds):",
            "",
            picture.table(made),
            "",
            told_of(drawn),
        ]
    )


def _percent(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else spread(row["accuracy %"], row["± std"], ".1f")


def best() -> dict[str, Any]:
    """Return the document of ``best-accuracy``, with one client alone."""
    return with_alone(document("best-accuracy"))


def told_of(drawn: Mapping[picture.Line, Sequence[Mapping[str, Any]]]) -> str:
    """Return what the epsilons of the picture's lines are true of."""
    wanted = {line.algorithm for line in drawn}
    cells = []
    for cell in best()["cells"]:
        if cell["table"] == BEST:
            kept = {label: entry for label, entry in cell["algorithms"].items() if label in wanted}
            cells.append({**cell, "algorithms": kept})
    return picture.terms(cell_guarantees({"cells": cells})[0])


def terms(made: Mapping[str, Any], *, in_columns: bool = False) -> str:
    """Return what a table's epsilons are true of, in a sentence for each kind of trust.

    :func:`~murmurfl.app.papers.reproduction.table_caption` names every line's mechanism as well; the JSON has that.
    """
    guarantees, noiseless = cell_guarantees(made)
    groups: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for label, one in guarantees:
        protects = one.protected("h") if in_columns else one.protects
        found = groups.setdefault((protects, one.covers), {"lines": {}, "noise": {}, "local": {}, "notes": {}})
        found["lines"][label] = None
        found["noise"][_whose_noise(one.mechanism)] = None
        if one.whatever_happens:
            found["local"][one.whatever_happens] = None
        found["notes"] |= dict.fromkeys(one.notes)
    most = max(groups, key=lambda key: len(groups[key]["lines"]))
    sentences = []
    for (protects, covers), found in sorted(groups.items(), key=lambda group: group[0] == most):
        named = " / ".join(found["lines"]) if (protects, covers) != most else "the other lines"
        of = f" of {named}" if len(groups) > 1 else ""
        sentences.append(f"Epsilon{of} is {protects}; {' or '.join(found['noise'])}; {covers}.")
        if found["local"] and not in_columns:
            sentences.append(f"Without anybody's honesty: {'; '.join(found['local'])}.")
    if in_columns:
        sentences.append(WORST_CASE_SENTENCE)
    hidden = [(label, one) for label, one in guarantees if one.amplified is not None]
    for label in dict.fromkeys(label for label, _ in hidden):
        sentences.append(picture.in_secret(f"Epsilon of {label}", [one for name, one in hidden if name == label]))
    sentences += dict.fromkeys(note for found in groups.values() for note in found["notes"])
    if noiseless:
        sentences.append(f"Not private: {' / '.join(noiseless)}.")
    return " ".join(sentences)


def _whose_noise(mechanism: str) -> str:
    """Who adds the noise, and where, without the name of its correlation."""
    words = next((one for one in _NOISES if one in mechanism), mechanism)
    return f"{words}, under masks" if ", under masks" in mechanism else words


_NOISES = ("noise on each client", "noise of the server in each round")


def draw_pictures() -> None:
    """Draw the README's picture anew, and that of sites that differ."""
    made = best()
    picture.draw(made, told_of(picture.drawn(made)), PICTURE)
    skew.draw(document("skew"), skew.PICTURE)


def crosswise(name: str) -> str:
    """Figures of a reproduction beside each other: its tables but for the first, which has a line for each run."""
    made = with_alone(document(name))
    _, *further = tables_of(made, name, PAPERS[name].table)
    told = terms(made, in_columns=PAPERS[name].table.honest_in_columns)
    further = [replace(one, rows=[row for row in one.rows if _is_shown(row)]) for one in further]
    shown = [f"{one.title[0].upper()}{one.title[1:]}:\n\n{one.markdown().rstrip()}" for one in further]
    return "\n\n".join([told, *shown])


def in_secret_orders() -> str:
    """Noisy SGD in a secret order beside the same without one and its rivals, at the epsilons that it was run at."""
    made = document("best-accuracy")
    rows = [row for row in BestTable().rows(made) if row["table"] == BEST]
    names = [epsilon_name(compared_at(row)) for row in rows if row["algorithm"] == HIDDEN_ORDER]
    figures = {(row["algorithm"], epsilon_name(compared_at(row))): row for row in rows}
    lines = [f"| {BEST} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for label in (FULL, HIDDEN_ORDER, ONE_PASS, NOISY_SGD):
        lines.append(f"| {label} | {' | '.join(_percent(figures[label, name]) for name in names)} |")
    shown = [
        {
            **cell,
            "algorithms": {label: cell["algorithms"][label] for label in (FULL, HIDDEN_ORDER, ONE_PASS, NOISY_SGD)},
        }
        for cell in made["cells"]
        if cell["table"] == BEST and HIDDEN_ORDER in cell["algorithms"]
    ]
    return "\n\n".join([terms({"cells": shown}), "\n".join(lines)])


def _is_shown(row: Mapping[str, Any]) -> bool:
    """Return True if a page has a row; the JSON has all.

    Lost replies stand at one budget, and other partitions only where they matter: to one pass.
    """
    table = str(row.get("table", ""))
    if "replies lost" in table:
        return row["mu"] == 0.25
    return row.get("algorithm") != "full batches" or not ("skewed" in table or "unequal" in table)


def beside(name: str) -> str:
    """Accuracies of a paper's algorithms side by side: a line for each cell, a column for each algorithm."""
    made = document(name)
    parts: dict[bool, list[Mapping[str, Any]]] = {}
    for cell in made["cells"]:
        parts.setdefault(cell["table"] == "paper's constants", []).append(cell)
    return "\n\n".join([terms(made), *(_lines(cells) for cells in parts.values()), *_alone(made["cells"])])


def _alone(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what one client alone reaches, in a sentence; none of documents that do not say it."""
    known = [(cell["settings"].get("features", "pixels"), cell["alone"]) for cell in cells if cell.get("alone")]
    figures = dict.fromkeys(f"{100 * found['accuracy']:.1f} % ({features})" for features, found in known)
    return [f"{ALONE.capitalize()}, and not private: {', '.join(figures)}."] if figures else []


def _lines(cells: Sequence[Mapping[str, Any]]) -> str:
    labels = list(dict.fromkeys(label for cell in cells for label in cell["algorithms"]))
    lines = [f"| | mu | ε | {' | '.join(labels)} |", f"|---|---|---|{'---|' * len(labels)}"]
    for cell in cells:
        rows = {row["algorithm"]: row for row in AccuracyTable().rows({"cells": [cell]})}
        any_row = next(iter(rows.values()))
        where = f"{any_row['asked']} of {any_row['clients']}"
        if cell["table"] != "paper's constants":
            where = f"{cell['table']}, {where}"
        mu = cell["settings"]["mu"]
        epsilon = rounded_up(gdp_epsilon(mu, any_row["delta"]))
        entries = [_accuracy_cell(rows[label], epsilon) if label in rows else "" for label in labels]
        lines.append(f"| {where} | {mu:g} | {epsilon} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _accuracy_cell(row: Mapping[str, Any], asked: str) -> str:
    paper = "" if row["paper %"] is None else f" ({row['paper %']:.1f})"
    epsilon = rounded_up(row["epsilon"])
    return f"{_percent(row)}{paper}{'' if epsilon == asked else f', ε {epsilon}'}"


def by_mechanism(name: str, *also: str) -> str:
    """Accuracy, and a further figure after it, of each mechanism in each setting."""
    made = document(name)
    first, *_ = tables_of(made, name, PAPERS[name].table)
    settings = list(dict.fromkeys(row["table"] for row in first.rows))
    figures = {(row["table"], row["algorithm"]): row for row in first.rows}
    heads = []
    for setting in settings:
        true_of = {rounded_up(row["epsilon"]) for row in first.rows if row["table"] == setting and row["epsilon"]}
        heads.append(setting if "epsilon" in setting else f"{setting}, ε = {' / '.join(sorted(true_of))}")
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(settings)}"]
    for label in dict.fromkeys(row["algorithm"] for row in first.rows):
        found = (figures[setting, label] for setting in settings)
        shown = [
            "; ".join([_percent(row), *(f"{row[one]:,.0f} ± {row[f'± {one}']:,.0f}" for one in also)]) for row in found
        ]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n\n".join([terms(made), "\n".join(lines)])


def regrets() -> str:
    """Accuracy and static regret of zhang-2025's logistic regression, what noise costs, and what dynamic regret is."""
    name = "zhang-2025-logistic"
    told, costs, made = {}, [], document(name)
    for cell in made["cells"]:
        entries = cell["algorithms"]
        lost = {
            label: 100 * (entries["noiseless"]["accuracy"]["mean"] - entry["accuracy"]["mean"])
            for label, entry in entries.items()
            if label != "noiseless"
        }
        least = [f"{lost[label]:.1f} ({label})" for label in ("(ii) optimal", "(i) tree", *_INDEPENDENT)]
        costs.append(f"At {cell['table']} noise costs {', '.join(least[:-1])} and {least[-1]} points.")
        for label, entry in cell["algorithms"].items():
            if entry["epsilon"]["mean"] is None:
                loss, regret = (entry["curves"][curve]["mean"][-1] for curve in ("cumulative-loss", "dynamic-regret"))
                told[label] = f"{regret:,.2f} of {loss:,.2f} ({label})"
    return (
        f"{by_mechanism(name, 'static-regret')}\n\nThe paper's own measure, the dynamic regret, is nearly all of the "
        f"cumulative loss: {', '.join(told.values())}. A model with 100 values can make almost no loss on the 100 "
        f"samples of a round, so next to nothing is taken off. {' '.join(costs)} Means are over {made['seeds']} runs."
    )


_INDEPENDENT = ("independent", "independent, own step")


def excess_risks() -> str:
    """Return the least excess risks of jiang-2026 with an order drawn anew (RR); ends of the grid are marked."""
    lines, told, ends = [], {}, {}
    for kind in ("mean", "ridge", "lasso"):
        name = f"jiang-2026-{kind}"
        made = document(name)
        told[terms(made)] = None
        first, *_ = tables_of(made, name, PAPERS[name].table)
        labels = [one for one in first.columns if one.name in made["cells"][0]["algorithms"]]
        if not lines:
            lines = [f"| | {' | '.join(one.name for one in labels)} |", f"|---|{'---|' * len(labels)}"]
        for row in first.rows:
            if ", RR, " in row["setting"]:
                at_ends = [one.name for one in labels if row["cell"][one.name]["end of grid"]]
                entries = (
                    re.sub(r" \([^)]*\)$", "", _marked(one.shown(row))) + (" †" if one.name in at_ends else "")
                    for one in labels
                )
                lines.append(f"| {row['setting'].replace(', RR', '')} | {' | '.join(entries)} |")
                ends |= {(row["cell"][one]["end of grid"], row["cell"][one]["step"]): None for one in at_ends}
    said = ", ".join(f"{step:g}, the {end} that was tried" for end, step in ends)
    notes = [f"† The best step is an end of the grid: {said}. {_still(('mean', 'ridge', 'lasso'))}"] if ends else []
    return "\n\n".join([*told, "\n".join(lines), *notes])


def _still(kinds: Sequence[str]) -> str:
    """Say how near the excess risks at the smallest step are to those of a model that does not move."""
    apart = {}
    for cell in (cell for kind in kinds for cell in document(f"jiang-2026-{kind}")["cells"]):
        still = standing_still(cell)
        for entry in cell["algorithms"].values():
            if still and end_of_grid(entry) == "smallest":
                task = str(cell["table"]).partition(",")[0]
                apart.setdefault((task, f"{still:.3g}"), []).append(abs(entry["excess"]["mean"] / still - 1))
    return " ".join(
        f"On {task} the excess risk there is that of standing still, {still}, within {100 * max(found):.2g} %: nothing "
        "was learnt."
        for (task, still), found in apart.items()
    )


def _marked(shown: Any) -> str:
    return getattr(shown, "markdown", shown)


def gradient_norms() -> str:
    """Gradient norm and accuracy of tran-cutkosky-2022's algorithms, side by side."""
    made = document("tran-cutkosky-2022")
    first, *_ = tables_of(made, "tran-cutkosky-2022", PAPERS["tran-cutkosky-2022"].table)
    labels = list(dict.fromkeys(row["algorithm"].partition(",")[0] for row in first.rows))
    lines = [f"| | {' | '.join(labels)} |", f"|---|{'---|' * len(labels)}"]
    for setting in dict.fromkeys(row["table"] for row in first.rows):
        rows = {row["algorithm"].partition(",")[0]: row for row in first.rows if row["table"] == setting}
        entries = (
            f"{spread(rows[one]['gradient norm'], rows[one]['± gradient norm'], '.3f')}; {_percent(rows[one])}"
            if one in rows
            else ""
            for one in labels
        )
        lines.append(f"| {setting} | {' | '.join(entries)} |")
    return "\n\n".join([terms(made), "\n".join(lines)])


def speed_of_peers() -> str:
    """Return the table of speed: each framework beside its peer."""
    measured = document("performance")
    return shown(measured if glance.pairs(measured, loop=False) else None, lambda made: glance.table(made, loop=False))


def error_kinds() -> str:
    """Return the table of the kinds of errors, each with what its declaration says of it."""
    kinds = re.findall(r'^    "([a-z-]+)",  # (.*)$', inspect.getsource(errors), flags=re.MULTILINE)
    return "\n".join(["| kind | what is wrong |", "|---|---|", *(f"| `{kind}` | {words} |" for kind, words in kinds)])


def error_sections() -> str:
    """Return the sections of docs/errors.md from docs/errors.toml, with the message and the kind of each error."""
    made = tomllib.loads((ROOT / "docs" / "errors.toml").read_text())

    def shown_error(name: re.Match[str]) -> str:
        error = made["error"][name[1]]
        text = f"<!-- error: {name[1]} -->\n```text\n{error['message'].strip()}\n```"
        return f"{text}\n\nIts [kind](#what-programs-read) is `{error['kind']}`." if "kind" in error else text

    sections = (
        f"## {one['title']}\n\n{re.sub(r'^{([a-z-]+)}$', shown_error, one['body'].strip(), flags=re.MULTILINE)}"
        for one in made["section"]
    )
    return "\n" + "\n\n".join(sections) + "\n"


def part(name: str, table: Callable[[Any], str]) -> Callable[[], str]:
    """Return a table of docs/performance.md."""
    return lambda: shown(document("performance").get(name), table)


def other_frameworks() -> str:
    """Return what the same work takes in other frameworks, in the documents that have them."""
    measured = document("performance")
    made = measured.get("inprocess")
    pfl = {} if is_missing(made) else {"pfl": made["pfl"]}
    others = measured.get("peers")
    return shown(others, lambda found: peers.table(found | pfl))


def measured_on() -> str:
    """Return the versions and cores of the computer that ran the benchmarks."""
    told = document("performance")["computer"]
    packages = ", ".join(f"{name} {told[name]}" for name in ("flwr", "ray", "torch", "numpy", "numba") if name in told)
    return f"Python {told['python']} on {told['cores']} cores, {packages}."


def powers() -> str:
    """Return the powers fitted to tran-cutkosky-2022's gradient norms."""
    name = "tran-cutkosky-2022"
    made = document(name)
    _, fitted = tables_of(made, name, PAPERS[name].table)
    return f"{terms(made)}\n\n{fitted.markdown().rstrip()}"


def measured_rates() -> str:
    """Return the rates that ``murmurfl reproduce rates`` measured."""
    made = document("rates")
    first, *_ = tables_of(made, "rates", PAPERS["rates"].table)
    terms = (
        "Where epsilon varies it is, of zhang-2025, at delta = 0.001, for replacement of one sample of one client, "
        "against the server and everybody else; noise on each client; over all releases. Of jiang-2026 delta is "
        "1e-06, of tran-cutkosky-2022 1e-05 with a trusted server."
    )
    return f"{terms}\n\n{first.markdown().rstrip()}"


def recorded_rates() -> str:
    """Return the same of the runs of both papers of Reshef and Levy on MNIST, at the papers' constants.

    Sigma and sigma_L are taken to be G and L, the largest that the theorems allow.
    """
    (_, start, _), (_, least, norm) = document("noted")["ball"]["rows"]
    start, least = float(start), float(least)
    constants = PaperConstants.of(SoftmaxRegression(784, 10))
    sensitivity = constants.lipschitz + 2 * constants.smoothness * constants.diameter
    problem = rates.ConvexConstants(
        7850, constants.diameter, constants.lipschitz, constants.smoothness, float(norm), deviation=sensitivity
    )
    lines = []
    for name, label, quantity, fixed, power in _RECORDED:
        points = []
        for cell in document(name)["cells"]:
            settings = cell["settings"]
            if settings["preset"] != "paper" or any(settings[key] != value for key, value in fixed.items()):
                continue
            clients, asked = settings["num-clients"], settings["clients-per-round"]
            measured = [loss - least for loss in cell["algorithms"][label]["loss"]["runs"]]
            sizes = settings["mu"], clients, asked, 60_000 // asked
            bound = problem.bound(*sizes, trusted=label == "trusted-mu2")
            points.append(rates.Point(settings[quantity], measured, bound))
        points.sort(key=lambda point: point.value)
        made = rates.measured_rate(points, [start - least] * len(points), "noise", power)
        where = ", ".join([f"n = {60_000:,}", *(f"{_LETTERS[key]} = {value:g}" for key, value in fixed.items())])
        trust = "trusted server, " if label == "trusted-mu2" else ""
        table = f"{name}, MNIST: {_LETTERS[quantity]}, {trust}{where}"
        lines.append(rates.rate_row({"table": table, **made}))
    return Table("Recorded", PAPERS["rates"].table.columns, lines).markdown().rstrip()


_LETTERS = {"mu": "rho", "num-clients": "M", "clients-per-round": "m"}
_RECORDED: tuple[tuple[str, str, str, Mapping[str, float], float], ...] = (
    ("reshef-levy-2024", "mu2", "num-clients", {"mu": 4.0}, 0.5),
    ("reshef-levy-2024", "mu2", "num-clients", {"mu": 16.0}, 0.5),
    ("reshef-levy-2024", "mu2", "mu", {"num-clients": 10}, -1.0),
    ("reshef-levy-2024", "mu2", "mu", {"num-clients": 100}, -1.0),
    ("reshef-levy-2024", "trusted-mu2", "num-clients", {"mu": 8.0}, 0.0),
    ("reshef-levy-2025", "mu2", "mu", {"clients-per-round": 50}, -1.0),
    ("reshef-levy-2025", "mu2", "clients-per-round", {"mu": 8.0}, 0.0),
)
"""Document, algorithm, quantity, what is fixed, and the power of the theorem's noise term with n fixed: T = n / m."""


_SHOWN = ("1", "4", "32", "100", "10,000", "no noise")


def _mean_of(found: Mapping[str, float]) -> str:
    return spread(found["mean"], found["std"], ".1f")


def bounded_steps() -> str:
    """Accuracy with the bounded step, at some of the budgets that were tried, and without the bound in brackets."""
    lines = [f"| test accuracy in % | mu = {' | '.join(_SHOWN)} |", f"|---{'|---' * len(_SHOWN)}|"]
    for row in document("tuning")["step"]["rows"]:
        loose = row.get("unbounded", {})
        entries = (
            _mean_of(row["bounded"][at]) + (f" ({_mean_of(loose[at])})" if at in loose else "")
            if at in row["bounded"]
            else ""
            for at in _SHOWN
        )
        lines.append(f"| {row['of']} | {' | '.join(entries)} |")
    return "\n".join(lines)


def gained_by_noise() -> str:
    """Return what `decay` gains on `cancelling`, a line for each setting."""
    gains: dict[str, list[str]] = {}
    for row in document("tuning")["noise"]["rows"]:
        gained = row["gained"]
        gains.setdefault(row["of"], []).append(f"{gained['mean']:.3g} ± {gained['std']:.2g} (mu = {row['mu']:g})")
    return "\n".join(
        ["| | gained, points |", "|---|---|", *(f"| {of} | {', '.join(all_)} |" for of, all_ in gains.items())]
    )


def noted(name: str) -> Callable[[], str]:
    """Return a table of docs/results/noted.json: figures that were measured once, which no command writes."""

    def table() -> str:
        found = document("noted")[name]
        lines = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
        told = [terms(document(found["true of"])), ""] if "true of" in found else []
        told += [found["terms"], ""] if "terms" in found else []
        return "\n".join([*told, *(f"| {' | '.join(cells)} |" for cells in lines)])

    return table


def foreign_apps() -> str:
    """Return the table of small Flower apps, as they are and with privacy."""
    made = json.loads((DOCUMENTS / "foreign.json").read_text())
    lines = [
        "| app | lines changed | guessing | without privacy | untrusted server | under sums | `try` said |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in made["rows"]:
        shares = [one[key] for key in ("guessing", "without", "untrusted", "sums")]
        guess, *others = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        lines.append(
            f"| `{one['app']}` | {one['lines'] or ''} | {guess if one['lines'] else ''} | {' | '.join(others)} | "
            f"{one['verdict']} |"
        )
    return "\n".join(lines)


def apps_of_others() -> str:
    """Return the table of apps that somebody else wrote, as they are and with privacy."""
    made = json.loads((DOCUMENTS / "foreign.json").read_text())
    lines = [
        "| app | from | lines changed | guessing | without privacy | untrusted server | under sums | `try` said |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in made["foreign"]:
        shares = [one[key] for key in ("guessing", "without", "untrusted", "sums")]
        guess, *others = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        cells = [f"{one['app']} {one['version']}", one["origin"], one["lines"] or "", guess if one["lines"] else ""]
        lines.append(f"| {' | '.join(map(str, [*cells, *others, one['verdict']]))} |")
    return "\n".join(lines)


BLOCKS = {
    "README.md": {"results": summary},
    "docs/performance.md": {
        "computer": measured_on,
        "speed": speed_of_peers,
        "engines": part("engines", engines.table),
        "profile": part("profile", profile.table),
        "bare": part("bare", bare.table),
        "workers": part("workers", workers.table),
        "ray": part("ray", ray.table),
        "inprocess": part("inprocess", in_process.table),
        "large": part("large", large.table),
        "steps": lambda: shown(document("steps").get("steps"), large.steps_table),
        "scale": part("scale", scale.table),
        "fleet": part("fleet", fleet.table),
        "device": part("device", device.table),
        "noise": part("noise", noise.table),
        "streams": part("streams", streams.table),
        "stragglers": part("stragglers", stragglers.table),
        "footprint": lambda: footprint.table(document("footprint")),
        "masks": part("masks", masks.table),
        "peers": other_frameworks,
    },
    "docs/errors.md": {"sections": error_sections, "kinds": error_kinds},
    "docs/swap-in.md": {
        "clients-needed": forecast.needed,
        "forecast": lambda: forecast.table(json.loads(forecast.DEFAULT.read_text())),
    },
    "docs/comparison.md": {"collusion": collusion.table},
    "docs/accuracy.md": {"secret-orders": in_secret_orders, "poisson-batches": noted("poisson-batches")},
    "docs/which.md": {
        "portions": lambda: drift.table(json.loads(drift.DEFAULT.read_text()), moving=False),
        "drift": lambda: drift.table(json.loads(drift.DEFAULT.read_text())),
    },
    "docs/tables.md": {
        "personal": lambda: personal.table(document("personal")),
        "tables": lambda: tables.shown(json.loads(tables.DEFAULT.read_text())),
        "rivals": lambda: f"{rivals.shown(document('rivals'), [*REGRESSION])}\n\n{rivals.TERMS}",
        "rivals-judged-all": lambda: f"{rivals.shown(document('rivals'), [*JUDGED])}\n\n{rivals.TERMS}",
        "rivals-judged-leads": lambda: f"{rivals.leads(document('rivals'), [*JUDGED])}\n\n{rivals.TERMS}",
        "rivals-judged": lambda: f"{rivals.gaps(document('rivals'), [*JUDGED])}\n\n{rivals.TERMS}",
        "rivals-gaps": lambda: f"{rivals.gaps(document('rivals'), [*REGRESSION])}\n\n{rivals.TERMS}",
    },
    "docs/sites-that-differ.md": {
        "everybody": lambda: skew.everybody(document("skew")),
        "own": lambda: skew.own(document("skew")),
        "epsilons": lambda: skew.by_epsilon(document("skew")),
        "streams": lambda: skew.streams(document("skew")),
    },
    "docs/images.md": {"images": lambda: images.table(document("images"))},
    "docs/mechanisms.md": {"mechanisms": lambda: mechanisms.table(document("mechanisms"))},
    "docs/tuning.md": {
        "bounded-step": bounded_steps,
        "which-noise": gained_by_noise,
        "verdict": lambda: forecast.verdict_table(json.loads(forecast.DEFAULT.read_text())),
        **{
            name: noted(name)
            for name in (
                "searched",
                "default-run",
                "features",
                "largest-step",
                "one-shot",
                "automatic-clipping",
                "following-clip",
                "secret-order-batches",
                "zhang-logistic-steps",
                "zhang-cnn-steps",
                "sampling",
                "steps-of-decay",
            )
        },
    },
    "docs/private-client-app.md": {"foreign": foreign_apps, "apps-of-others": apps_of_others},
    "docs/results.md": {
        **{name: lambda name=name: beside(name) for name in ("reshef-levy-2025", "reshef-levy-2024")},
        **{name: lambda name=name: crosswise(name) for name in ("best-accuracy", "many-sites", "secure-aggregation")},
        "zhang-2025-logistic": regrets,
        "zhang-2025-cnn": lambda: by_mechanism("zhang-2025-cnn"),
        "jiang-2026": excess_risks,
        "rates": measured_rates,
        "recorded-rates": recorded_rates,
        "tran-cutkosky-2022": gradient_norms,
        "tran-cutkosky-2022-powers": powers,
        "momentum": lambda: momentum.table(document("momentum")),
        "situations": lambda: situations.table(json.loads(situations.DEFAULT.read_text())),
        **{
            name: noted(name)
            for name in ("delayed-momentum", "differences", "other-seeds", "jiang-data", "tran-tasks", "ball")
        },
    },
}


LINK = re.compile(r"^\[Table: ([\w-]+)\]\(results/[\w-]+\.json\)$", re.MULTILINE)


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with what stands between marks written anew; links to tables stay links.

    Raises
    ------
    ValueError
        If a block has neither its marks nor a link.
    """
    linked = set(LINK.findall(text))
    for name, write in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda marks, write=write: f"{marks[1]}{write()}\n{marks[2]}", text)
        elif name not in linked:
            raise ValueError(f"Expected the marks of block {name!r} or a link to it, found neither.")
    return text


def built(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text as the site shows it: each link to a table is the table.

    Raises
    ------
    ValueError
        If a link names no block of the page.
    """

    def table(link: re.Match[str]) -> str:
        if link[1] not in blocks:
            raise ValueError(f"Expected one of {', '.join(blocks)}, got a link to table {link[1]!r}.")
        return blocks[link[1]]()

    return LINK.sub(table, text)


def main() -> None:
    """Print the pages that are named with their tables; without a name, write the tables that pages keep."""
    if named := sys.argv[1:]:
        for page in named:
            print(built((ROOT / page).read_text(), BLOCKS[page]))
        return
    for page, blocks in BLOCKS.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), blocks))
        print(page)
    draw_pictures()
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
