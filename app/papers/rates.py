"""rates: what the papers' theorems bound, measured against each quantity of the bound, next to the bound's own slope.

A bound is a sum of terms. A theorem's rate in a quantity is the power that one term has, and it shows only where that
term leads. So a line says which terms lead in its cells, what slope the whole bound has over them, and how much of the
starting excess is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ...privacy.accounting.gdp import gdp_mu
from ..reports.table import Column, Row, Table, statistics
from .accuracy import Document, TableKind, Trial, add_legend, at_the_end, caption_of, entries_of, panels, save
from .least_squares import RULE_NORM, SMOOTHNESS, curvatures, starting_excess, starting_gradient
from .paper import JUDGED_AT_THE_END, Cell, Paper, Settings, everybody, hyphenated
from .zhang_2025 import lemma_mu

Terms = Mapping[str, float]
"""The terms of a bound, by name."""


class Point(NamedTuple):
    """A cell of a line: the quantity's value, what its runs measured, and the bound's terms there."""

    value: float
    measured: Sequence[float]
    bound: Terms


def fitted_slope(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Return the slope of a line through points by least squares, and its standard error."""
    offsets = np.asarray(x) - np.mean(x)
    squares = float(offsets @ offsets)
    slope = float(offsets @ np.asarray(y)) / squares
    residuals = np.asarray(y) - np.mean(y) - slope * offsets
    error = math.sqrt(float(residuals @ residuals) / max(len(offsets) - 2, 1) / squares)
    return {"slope": slope, "standard_error": error}


def fitted_power(cells: Iterable[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """Return the power of a quantity that a measure goes with: the slope by logarithms, over every run of each cell."""
    pairs = [(math.log(value), math.log(one)) for value, measured in cells for one in measured]
    return fitted_slope(*zip(*pairs, strict=True))


def bound_power(points: Sequence[Point]) -> float:
    """Return the power that a whole bound goes with over some cells: the same fit through the sums of its terms."""
    return fitted_power((point.value, [sum(point.bound.values())]) for point in points)["slope"]


def leading_terms(points: Sequence[Point]) -> list[str]:
    """Return the largest term of the bound in each cell, each name once."""
    return list(dict.fromkeys(max(point.bound, key=lambda name: point.bound[name]) for point in points))


_MOST_LEFT = 0.5
"""Share of the starting excess above which nothing was learnt that a rate could be read from."""


@dataclass(frozen=True)
class Instance:
    """A problem of a theorem, at the constants that the theorem prescribes for it.

    Parameters
    ----------
    settings : mapping
        Run-config settings, with clip, step and noise as the theorem has them.
    bound : mapping of str to float
        The terms of the theorem's bound.
    start : float
        The measure before the first round.
    """

    settings: Settings
    bound: Terms
    start: float


@dataclass(frozen=True)
class Rate:
    """A theorem's rate in one quantity, and the cells it is measured in.

    Parameters
    ----------
    paper, theorem : str
        Where it is stated.
    algorithm : str
        Name of the strategy.
    quantity : str
        What varies, with what is fixed where that is not plain.
    term : str
        The bound's term that the rate is of.
    power : float
        The power of the quantity in that term, logarithms aside.
    instances : mapping of float to Instance
        By the quantity's value.
    """

    paper: str
    theorem: str
    algorithm: str
    quantity: str
    term: str
    power: float
    instances: Mapping[float, Instance]

    @property
    def table(self) -> str:
        """Name of its cells' part of the document."""
        return f"{self.paper}, {self.theorem}: {self.quantity}"

    def cells(self) -> list[Cell]:
        """Return a cell for each value."""
        label = self.algorithm
        return [
            Cell(
                self.table,
                {key: value for key, value in one.settings.items() if key != "strategy"},
                {label: {"strategy": label}},
                {label: {"value": value, "start": one.start, **one.bound}},
            )
            for value, one in self.instances.items()
        ]


_DIAMETER = 2.0


def _excess_settings(**settings: Any) -> Settings:
    shared = {"preset": "practical", "task": LEAST_SQUARES, "partition": "own", "model": "ridge"}
    return {**shared, **JUDGED_AT_THE_END, **hyphenated(**settings)}


LEAST_SQUARES = "murmurfl.app.papers.least_squares:LeastSquares"
"""Name of the task."""


class ConvexConstants(NamedTuple):
    """The constants of a convex problem, as the theorems of Reshef and Levy name them.

    Parameters
    ----------
    parameters : int
        d.
    diameter, lipschitz, smoothness : float
        D, G and L.
    at_optimum : float
        G*, the norm of the risk's gradient at its optimum in the ball.
    deviation, heterogeneity : float
        sigma + 2 sigma_L D, and the same of xi.
    """

    parameters: int
    diameter: float
    lipschitz: float
    smoothness: float
    at_optimum: float
    deviation: float
    heterogeneity: float = 0.0

    @property
    def sensitivity(self) -> float:
        """S = G + 2 L D."""
        return self.lipschitz + 2 * self.smoothness * self.diameter

    def noise(self, rho: float, clients: int, asked: int, rounds: int, *, trusted: bool = False) -> float:
        """Return D / (eta T^2) at the step that the noise allows: a quarter of the bound's term of it, by D."""
        plain = 2 * self.sensitivity * math.sqrt(self.parameters) / (rho * rounds)
        if asked == clients:
            return plain / (clients if trusted else math.sqrt(clients))
        return plain * math.sqrt(2 * clients * (1 + math.log(rounds))) / asked

    def bound(self, rho: float, clients: int, asked: int, rounds: int, *, trusted: bool = False) -> Terms:
        """Return the terms of theorem 5.2 or 6.2 of the 2024 paper, or with ``asked`` < M of theorem 5.2 of 2025."""
        flat = 2 if asked == clients else 4
        deviation = self.deviation if asked == clients else math.hypot(self.deviation, self.heterogeneity)
        return {
            "optimisation": 4 * self.diameter * (self.at_optimum + flat * self.smoothness * self.diameter) / rounds,
            "noise": 4 * self.diameter * self.noise(rho, clients, asked, rounds, trusted=trusted),
            "sampling": 4 * self.diameter * deviation / math.sqrt(asked * rounds),
        }

    def step(self, rho: float, clients: int, asked: int, rounds: int, *, trusted: bool = False) -> float:
        """Return eta: the smaller of what the noise and what smoothness allows."""
        noise = self.noise(rho, clients, asked, rounds, trusted=trusted)
        most = 1 / ((4 if asked == clients else 8) * self.smoothness * rounds)
        return min(self.diameter / (noise * rounds**2), most)


class _Federation(NamedTuple):
    """The quantities of the theorems of Reshef and Levy."""

    rho: float
    clients: int
    rounds: int
    asked: int = 0
    features: int = 16
    spread: float = 0.0
    widest: float = 0.0
    trusted: bool = False

    @property
    def problem(self) -> ConvexConstants:
        """The constants of the least squares; the optimum is inside the ball, and all clients have one curvature."""
        moments = curvatures(self.features)
        unit = SMOOTHNESS * math.sqrt(float(moments[0] * (1 - moments[0])))  # sigma_L
        away = _DIAMETER / 2 + RULE_NORM
        return ConvexConstants(
            parameters=self.features,
            diameter=_DIAMETER,
            lipschitz=SMOOTHNESS * (away + math.sqrt(max(self.widest, self.spread))),
            smoothness=SMOOTHNESS,
            at_optimum=0.0,
            deviation=unit * (away + math.sqrt(self.spread)) + 2 * unit * _DIAMETER,
            heterogeneity=SMOOTHNESS * math.sqrt(self.spread * float(np.square(moments).mean())),
        )

    def varied(self, name: str, values: Sequence[float]) -> dict[float, Instance]:
        """Return an instance for each value of one quantity."""
        return _varied(lambda **changed: self._replace(**changed).instance(), name, values)

    def instance(self) -> Instance:
        """Return the problem at the theorem's step and noise."""
        problem, asked = self.problem, self.asked or self.clients
        sizes = self.rho, self.clients, asked, self.rounds
        used = self.rounds
        if asked < self.clients:  # chosen uniformly, some clients are asked more often than others
            used = math.ceil(1.5 * asked * self.rounds / self.clients) + 30
        settings = _excess_settings(
            num_clients=self.clients,
            clients_per_round=asked,
            num_rounds=self.rounds,
            batch_size=1,
            mu=self.rho,
            clip_norm=problem.sensitivity,
            learning_rate=problem.step(*sizes, trusted=self.trusted),
            projection_radius=_DIAMETER / 2,
            synthetic_samples=self.clients * used,
            synthetic_features=self.features,
            synthetic_alpha=self.spread,
        )
        if not self.trusted:
            settings |= {"mechanism": "cancelling", "mechanism.schedule": "uniform" if used == self.rounds else "paper"}
        return Instance(settings, problem.bound(*sizes, trusted=self.trusted), starting_excess(self.features))


_ONLINE_DELTA = 1e-3
_ONLINE_CLIP = 2.0
"""B: gradients at rest are at most 1.6 long, and noise may carry the model away from the rule."""


def _online(rounds: int, clients: int = 16, local_steps: int = 4, epsilon: float = 2.0, shortest: int = 64) -> Instance:
    """Return a problem of theorem IV.10: lemma IV.9's bound with its constants, at a step of R^(-1/3) (ln R)^(-2/3).

    The theorem leaves that step's constant open. Here the step is alpha / (8 L), its largest, at ``shortest`` rounds.
    All clients measure one rule without error, so C_R = 0, the regret is the cumulative loss, and quasi-strong
    convexity holds with alpha = 1.
    """
    features, largest = 16, 1 / (8 * SMOOTHNESS)
    step = largest * (rounds / shortest) ** (-1 / 3) * (math.log(rounds) / math.log(shortest)) ** (-2 / 3)
    roots = np.cumprod([1.0, *(1 - 1 / (2 * np.arange(1, rounds)))])  # of the Toeplitz square root
    columns, rows = float(roots @ roots), float(np.cumsum(roots**2).sum())
    mu = lemma_mu(epsilon, _ONLINE_DELTA)
    variance = (2 * _ONLINE_CLIP / local_steps / mu) ** 2 * columns / clients
    flattest = SMOOTHNESS * float(curvatures(features)[-1])
    bound = {
        "initialisation": RULE_NORM**2 / (rounds * step),
        "drift": (step + 1 / (12 * SMOOTHNESS) + 1 / flattest) * 2 * SMOOTHNESS**2 * (step * _ONLINE_CLIP) ** 2,
        "noise": 24 * SMOOTHNESS * 2 * step**2 / rounds * rows * features * variance,
    }
    settings = _excess_settings(
        num_clients=clients,
        clients_per_round=clients,
        num_rounds=rounds,
        batch_size=local_steps,
        mu=mu,
        delta=_ONLINE_DELTA,
        mechanism="sqrt_toeplitz",
        clip_unit="contractive",
        clip_norm=_ONLINE_CLIP,
        learning_rate=step / local_steps,
        synthetic_samples=clients * local_steps * rounds,
        synthetic_features=features,
        synthetic_alpha=0.0,
    )
    return Instance(settings, bound, starting_excess(features))


_noisy_online = partial(_online, rounds=256, epsilon=0.5)


_SHUFFLED_DELTA = 1e-6


def _shuffled(samples: int = 1024, epsilon: float = 8.0, features: int = 4) -> Instance:
    """Return a problem of corollary 4.1 at the step and a number of epochs of appendix E.3.

    The appendix leaves the constant of K = O(n epsilon^2 / d) open; with 1 / 800, at these sizes, neither the way from
    the start nor the noise is all of the excess. All samples have one optimum, so sigma_any = 0.
    """
    epochs = max(round(samples * epsilon**2 / features / 800), 1)
    growth, clip, mu = 1 + math.log(epochs), SMOOTHNESS * RULE_NORM, gdp_mu(epsilon, _SHUFFLED_DELTA)
    step = RULE_NORM ** (2 / 3) / (samples * SMOOTHNESS * (epochs * growth) ** (1 / 3))
    step = min(step, 1 / (2 * samples * SMOOTHNESS * math.sqrt(10 * growth)))
    variance = (2 * clip / mu) ** 2 * epochs
    bound = {
        "initialisation": RULE_NORM**2 / (step * samples * epochs),
        "noise": 12 * step**2 * samples * features * variance * SMOOTHNESS * growth,
    }
    settings = _excess_settings(
        **everybody(1),
        num_rounds=epochs,
        mu=mu,
        delta=_SHUFFLED_DELTA,
        clip_norm=clip,
        learning_rate=step,
        variant="dp-shuffleg",
        synthetic_samples=samples,
        synthetic_features=features,
        synthetic_alpha=0.0,
    )
    return Instance(settings, bound, starting_excess(features))


_MOMENTUM_DELTA = 1e-5


def theorem_6(epsilon: float, samples: int, parameters: int, delta: float) -> tuple[int, float, float]:
    """Return T, alpha and eta of tran-cutkosky-2022's theorem 6."""
    width = math.sqrt(parameters * math.log(1 / delta))
    rounds = 2.0
    for _ in range(100):  # T = epsilon N^2 / (log2(T) width)
        rounds = epsilon * samples**2 / (math.log2(max(rounds, 2.0)) * width)
    num_rounds = max(round(rounds), 2)
    alpha = min(epsilon * samples / (num_rounds * math.log2(num_rounds) * width), 1.0)
    return num_rounds, alpha, 1 / math.sqrt(samples * num_rounds)


def theorem_6_bound(
    epsilon: float, samples: int, parameters: int, delta: float, lipschitz: float, smoothness: float, excess: float
) -> Terms:
    """Return the terms of theorem 6's bound on the mean gradient norm; ``excess`` is R, F(w_1) less its least value."""
    rounds, logarithm = theorem_6(epsilon, samples, parameters, delta)[0], math.log(1 / delta)
    spread_, root = math.log2(rounds) * logarithm, math.sqrt(epsilon * samples)
    noise = 12 * lipschitz * math.sqrt(spread_) * parameters**0.25
    return {
        "noise": (1.5 * excess + 6 * smoothness * math.sqrt(spread_) + noise) * parameters**0.25 / root,
        "momentum": 0.75
        * smoothness
        * (parameters * logarithm) ** 0.25
        * math.sqrt(math.log2(rounds))
        / (math.sqrt(epsilon) * samples**1.5),
        "sampling": 6 * lipschitz / math.sqrt(samples),
        "first steps": 6 * lipschitz * math.log2(rounds) * math.sqrt(parameters * logarithm) / (epsilon * samples),
    }


def _momentum(samples: int = 500, epsilon: float = 4.0) -> Instance:
    """Return a problem of theorem 6, one sample a step."""
    features = 16
    clip = SMOOTHNESS * (_DIAMETER / 2 + RULE_NORM)
    rounds, alpha, step = theorem_6(epsilon, samples, features, _MOMENTUM_DELTA)
    start = starting_excess(features)
    bound = theorem_6_bound(epsilon, samples, features, _MOMENTUM_DELTA, clip, SMOOTHNESS, start)
    settings = _excess_settings(
        **everybody(1),
        num_rounds=rounds,
        batch_size=1,
        passes=max(math.ceil(rounds / samples), 2),
        mu=gdp_mu(epsilon, _MOMENTUM_DELTA),
        delta=_MOMENTUM_DELTA,
        clip_norm=clip,
        learning_rate=step,
        alpha=alpha,
        gradient_norm=True,
        synthetic_samples=samples,
        synthetic_features=features,
        synthetic_alpha=0.0,
    )
    return Instance({**settings, "evaluate-every": max(rounds // 20, 1)}, bound, starting_gradient(features))


def _varied(made: Callable[..., Instance], name: str, values: Sequence[float]) -> dict[float, Instance]:
    """Return an instance for each value of one parameter."""
    return {float(value): made(**{name: value}) for value in values}


def _rates() -> list[Rate]:
    everyone, some = _Federation(0.7, 32, 1024), _Federation(2.8, 64, 1024, 16)
    served = _Federation(0.25, 16, 1024, trusted=True)
    unequal = [some._replace(rho=64.0, spread=spread, widest=16.0) for spread in (0.25, 1.0, 4.0, 16.0)]
    all_alike = {float(m): some._replace(asked=m, rounds=16_384 // m).instance() for m in (8, 16, 32)}
    by_rounds = {16.0 * t: some._replace(rho=4.0, rounds=t).instance() for t in (512, 1024, 2048)}
    by_spread = {one.problem.heterogeneity: one.instance() for one in unequal}
    in_2024, in_2025 = ("reshef-levy-2024", "theorem 5.2", "mu2"), ("reshef-levy-2025", "theorem 5.2", "mu2")
    trusted, online = ("reshef-levy-2024", "theorem 6.2", "trusted-mu2"), ("zhang-2025", "theorem IV.10", "online")
    shuffled, momentum = ("jiang-2026", "corollary 4.1", "shuffled"), ("tran-cutkosky-2022", "theorem 6")
    return [
        Rate(*in_2024, "M, n a client fixed", "noise", -1 / 2, everyone.varied("clients", (4, 8, 16, 32))),
        Rate(*in_2024, "rho", "noise", -1.0, everyone.varied("rho", (0.15, 0.3, 0.6, 1.0))),
        Rate(*in_2024, "n a client", "noise", -1.0, everyone.varied("rounds", (512, 1024, 2048))),
        Rate(*in_2024, "d", "noise", 1 / 2, everyone.varied("features", (8, 16, 32))),
        Rate(*trusted, "M, n a client fixed", "noise", -1.0, served.varied("clients", (4, 8, 16))),
        Rate(*in_2025, "m, T fixed", "noise", -1.0, some.varied("asked", (8, 16, 32))),
        Rate(*in_2025, "m, n = m T fixed", "noise", 0.0, all_alike),
        Rate(*in_2025, "M, m fixed", "noise", 1 / 2, some._replace(rho=4.0).varied("clients", (32, 64, 128))),
        Rate(*in_2025, "rho", "noise", -1.0, some.varied("rho", (1.4, 2.8, 5.6))),
        Rate(*in_2025, "n = m T, m fixed", "noise", -1.0, by_rounds),
        Rate(*in_2025, "d", "noise", 1 / 2, some.varied("features", (8, 16, 32))),
        Rate(*in_2025, "xi", "sampling", 1.0, by_spread),
        Rate(*online, "R", "initialisation", -2 / 3, _varied(_online, "rounds", (128, 256, 512, 1024))),
        Rate(*online, "n", "noise", -1.0, _varied(_noisy_online, "clients", (4, 8, 16, 32))),
        Rate(*online, "tau", "noise", -2.0, _varied(_noisy_online, "local_steps", (1, 2, 4, 8))),
        Rate(*online, "epsilon", "noise", -2.0, _varied(_noisy_online, "epsilon", (0.125, 0.25, 0.5, 1.0))),
        Rate(*shuffled, "n", "initialisation", -2 / 3, _varied(_shuffled, "samples", (256, 512, 1024, 2048))),
        Rate(*shuffled, "epsilon", "initialisation", -4 / 3, _varied(_shuffled, "epsilon", (4.0, 8.0, 16.0))),
        Rate(*momentum, "tree-momentum", "N", "noise", -1 / 2, _varied(_momentum, "samples", (60, 125, 250, 500))),
        Rate(
            *momentum, "tree-momentum", "epsilon", "noise", -1 / 2, _varied(_momentum, "epsilon", (0.5, 1.0, 2.0, 4.0))
        ),
    ]


@dataclass(frozen=True)
class RateTable(TableKind):
    """A line for each rate: the fitted power, the theorem's and the whole bound's; and a line for each cell.

    ``rates`` are the theorems' terms and powers, by the cells' part of the document.
    """

    name = "rate"
    sentence = "what a theorem bounds against each quantity of the bound: the fitted power and the theorem's"
    curves_needed = frozenset({"bounded"})
    digits = 6
    columns = (
        Column("theorem", "where the rate is stated", label=True),
        Column("against", "the quantity that varies, with its values", label=True),
        Column("slope", "the fitted power ± its standard error", form=".2f", spread="± slope"),
        Column("theorem's", "the power in the term that the theorem names", "theorem's", ".2f"),
        Column("whole bound's", "the power fitted to the sum of the bound's terms at the same values", form=".2f"),
        Column("leading term", "the largest term of the bound at these values"),
        Column("of the start", "the measure at both ends, as a share of that before the first round"),
        Column("of the bound", "the measure at both ends, as a share of the bound"),
        Column("in the regime", "whether the theorem's term leads, and half of the start is learnt, at all values"),
    )
    cell_columns = (
        Column("theorem", "where the rate is stated", label=True),
        Column("value", "the quantity's value", form="g", label=True),
        Column("measured", "mean ± standard deviation over seeds", form=".4g", spread="± measured"),
        Column("bound", "the sum of the bound's terms", form=".3g"),
        Column("step", "the learning rate that the theorem prescribes", form=".3g"),
        Column("mu", "what every run of the line guarantees", form=".3g"),
    )
    rates: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def curves(self, document: Document) -> dict[str, Any]:
        """Return what the run's theorem bounds: a mean regret, a mean gradient norm, or the excess risk."""
        if online := document["online"]:
            steps = document["config"]["batch-size"] * document["rounds"]
            value = online["cumulative-loss"][-1] / steps
        elif norms := document["gradient_norms"]:
            value = fmean(norms["values"])
        else:
            value = document["loss"]
        return {"bounded": at_the_end(document, value)}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the theorem bounds, under ``bounded``."""
        return {"bounded": statistics([run["curves"]["bounded"]["values"][-1] for run in best.runs], self.digits)}

    def summary(self, document: Document) -> dict[str, Any]:
        """Return the fitted powers, under ``slopes``."""
        tables = dict.fromkeys(cell["table"] for cell in document["cells"])
        return {"slopes": [self._slope(table, document) for table in tables if table in self.rates]}

    def _slope(self, table: str, document: Document) -> dict[str, Any]:
        found = [entry for cell, _, entry in entries_of(document) if cell["table"] == table]
        starts = [entry["paper"]["start"] for entry in found]
        return {"table": table, **measured_rate([point_of(entry) for entry in found], starts, *self.rates[table])}

    def draw(self, document: Document, title: str, path: Path) -> None:
        """Draw a panel for each rate: the measure, mean and deviation, and the theorem's and the bound's powers."""
        figure, grid, _ = panels(len(document["slopes"]), 5, (3.0, 2.5), 0.8)
        for line, axes in zip(document["slopes"], grid, strict=True):
            found = [entry for cell, _, entry in entries_of(document) if cell["table"] == line["table"]]
            means = [entry["bounded"]["mean"] for entry in found]
            x = line["values"]
            axes.errorbar(
                x, means, [entry["bounded"]["std"] for entry in found], marker="o", markersize=3, label="measured"
            )
            for name, style in (("theorem", ":"), ("bound", "--")):
                axes.plot(x, [means[0] * (value / x[0]) ** line[name] for value in x], style, label=name)
            theorem, _, quantity = line["table"].partition(": ")
            axes.set_title(theorem, fontsize=7)
            axes.set_xlabel(quantity, fontsize=7)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.tick_params(labelsize=6, which="both")
            axes.grid(alpha=0.3)
        add_legend(figure, grid[:1])
        what = f"mean and standard deviation over {document['seeds']} runs, and powers from the first value on"
        save(figure, path, f"{title}: {what}", document, 180)

    def rows(self, document: Document) -> list[dict[str, Any]]:
        """Return a flat row for each rate."""
        return [rate_row(line) for line in document["slopes"]]

    def further_tables(self, document: Document) -> list[Table]:
        """Return the cells."""
        rows = []
        for cell, _, entry in entries_of(document):
            point, runs = point_of(entry), len(entry["bounded"]["runs"])
            rows.append(
                {
                    "theorem": cell["table"],
                    "value": point.value,
                    "measured": entry["bounded"]["mean"],
                    "± measured": entry["bounded"]["std"] if runs > 1 else None,
                    "bound": sum(point.bound.values()),
                    "step": cell["settings"]["learning-rate"],
                    "mu": entry["mu"]["mean"],
                }
            )
        return [Table("Cells", self.cell_columns, rows, caption_of(document))]


def measured_rate(points: Sequence[Point], starts: Sequence[float], term: str, power: float) -> dict[str, Any]:
    """Return a line of a table of rates: fitted power, the theorem's, the whole bound's, and whether the term leads.

    Parameters
    ----------
    points : sequence of Point
        The cells of the line.
    starts : sequence of float
        The measure before the first round, in each cell.
    term : str
        The bound's term that the theorem's rate is of.
    power : float
        The theorem's power.
    """
    left = [fmean(point.measured) / start for point, start in zip(points, starts, strict=True)]
    shares = [fmean(point.measured) / sum(point.bound.values()) for point in points]
    leading = leading_terms(points)
    return {
        "values": [point.value for point in points],
        **fitted_power((point.value, point.measured) for point in points),
        "theorem": power,
        "bound": bound_power(points),
        "leading": leading,
        "left": [left[0], left[-1]],
        "share of bound": [shares[0], shares[-1]],
        "outside": _outside(term, leading, left),
    }


def point_of(entry: Document) -> Point:
    """Return the point of a cell's entry in a document."""
    terms = dict(entry["paper"])
    value, _ = terms.pop("value"), terms.pop("start")
    return Point(value, entry["bounded"]["runs"], terms)


def _outside(term: str, leading: Sequence[str], left: Sequence[float]) -> list[str]:
    """Return why some values are outside the regime of a theorem's term; empty if none is."""
    others = [name for name in leading if name != term]
    reasons = [f"{' and '.join(others)} {'leads' if len(others) == 1 else 'lead'} at some values"] if others else []
    return reasons + ([f"up to {100 * max(left):.0f} % of the start is left"] if max(left) > _MOST_LEFT else [])


def rate_row(line: Row) -> dict[str, Any]:
    """Return the flat row of a measured rate."""
    theorem, _, quantity = str(line["table"]).partition(": ")
    values = "; ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in line["values"])
    return {
        "theorem": theorem,
        "against": f"{quantity} ({values})",
        "slope": line["slope"],
        "± slope": line["standard_error"],
        "theorem's": line["theorem"],
        "whole bound's": line["bound"],
        "leading term": ", then ".join(line["leading"]),
        "of the start": " to ".join(f"{100 * share:.3g} %" for share in line["left"]),
        "of the bound": " to ".join(f"{100 * share:.2g} %" for share in line["share of bound"]),
        "in the regime": f"no: {'; '.join(line['outside'])}" if line["outside"] else "yes",
    }


class Rates(Paper):
    """The theorems of all papers whose algorithms are here."""

    name = "rates"
    sentence = "the papers' theorems: what each bounds, against each quantity of the bound, and the fitted powers"
    seeds = 5

    @cached_property
    def rates(self) -> list[Rate]:
        """Every rate."""
        return _rates()

    @cached_property
    def table(self) -> RateTable:  # type: ignore[override] - made when it is asked for, as its constants take a moment
        """The kind of its tables, which knows the rates."""
        return RateTable({rate.table: (rate.term, rate.power) for rate in self.rates})

    def cells(self) -> list[Cell]:
        """Return the cells of every rate."""
        return [cell for rate in self.rates for cell in rate.cells()]
