"""plan-grid: every strategy on every kind of data, with a few settings each, to see what is best before it is chosen.

The settings of what has no preset for some data were taken from docs/tuning.md and from a few runs on held-out training
samples; the grid was fixed before :mod:`murmurfl.app.planning` was tried on it.
"""

from __future__ import annotations

from .cell import Cell, Overrides, Settings
from .grid_table import GridTable
from .paper import Paper

_COMMON: Settings = {
    "preset": "practical",
    "noise-quality": "fast",
    "evaluate-every": 1_000_000,
    "checkpoint": False,
    "node-deadline-s": 600.0,
}


_CHOSEN: dict[str, Overrides] = {"auto": {"strategy": "auto"}}


def _everybody(machines: int, **more: object) -> Settings:
    settings = {name.replace("_", "-"): value for name, value in more.items()}
    return {**_COMMON, "num-clients": machines, "clients-per-round": machines, **settings}  # type: ignore[dict-item]


def _full(**more: object) -> Overrides:
    return {"strategy": "full-batch", **{name.replace("_", "-"): value for name, value in more.items()}}  # type: ignore[dict-item]


def _mu2(batch: int, rounds: int, clip: float, rate: float, **more: object) -> Overrides:
    """One pass with a step of rate / T^2."""
    eta = rate / rounds**2
    own = {name.replace("_", "-"): value for name, value in more.items()}
    shared = {"batch-size": batch, "clip-norm": clip, "learning-rate": eta, "mechanism": "cancelling"}
    return {"strategy": "mu2", **shared, **own}  # type: ignore[dict-item]


def _sgd(batch: int, clip: float, eta: float, **more: object) -> Overrides:
    own = {name.replace("_", "-"): value for name, value in more.items()}
    return {"strategy": "noisy-sgd", "batch-size": batch, "clip-norm": clip, "learning-rate": eta, **own}  # type: ignore[dict-item]


def _whole(samples: int, passes: int, clip: float, eta: float, **more: object) -> Overrides:
    """ISRL-DP with all samples of a machine as its batch."""
    own = {name.replace("_", "-"): value for name, value in more.items()}
    settings = {"batch-size": samples, "passes": passes, "clip-norm": clip, "learning-rate": eta, **own}
    return {"strategy": "isrl-dp-accelerated", **settings}  # type: ignore[dict-item]


def _mnist() -> list[Cell]:
    """60,000 samples on 100 machines; the features are each algorithm's own."""
    soft, oriented = {"features": "soft-gradients"}, {"features": "oriented-gradients"}
    rates = {0.25: 500.0, 1.0: 1500.0}
    return [
        Cell(
            "MNIST, 100 machines",
            _everybody(100, task="mnist", mu=mu),
            {
                "full batch": _full(**soft),
                "full batch, T = 4": _full(num_rounds=4, **soft),
                "full batch, oriented": _full(**oriented),
                "mu2, T = 75": _mu2(8, 75, 0.5, rate, **soft),
                "mu2, T = 25": _mu2(24, 25, 0.5, rate, **soft),
                "mu2, T = 75, oriented": {"strategy": "mu2", "batch-size": 8, **oriented},
                "mu2, T = 25, decay": _mu2(24, 25, 0.5, rate, mechanism="decay", workload="mu2", **soft),
                "noisy SGD, T = 75": _sgd(8, 0.5, 14 * mu, **soft),
                "noisy SGD, T = 25": _sgd(24, 0.5, 72 * mu, **soft),
                "noisy SGD, T = 75, oriented": {"strategy": "noisy-sgd", "batch-size": 8, **oriented},
                "ISRL-DP, 8 passes": _whole(600, 8, 0.5, 48.0, **soft),
                "one shot": {"strategy": "one-shot", **soft},
                "one shot, oriented": {"strategy": "one-shot", **oriented},
                **_CHOSEN,
            },
        )
        for mu, rate in rates.items()
    ]


def _digits() -> list[Cell]:
    """1,437 samples on 10 machines."""
    soft = {"features": "soft-gradients"}
    return [
        Cell(
            "digits, 10 machines",
            _everybody(10, task="digits", mu=mu),
            {
                "full batch": _full(),
                "full batch, T = 4": _full(num_rounds=4),
                "full batch, T = 12": _full(num_rounds=12),
                "full batch, soft gradients": _full(**soft),
                "full batch, soft gradients, T = 4": _full(num_rounds=4, **soft),
                "mu2, T = 17": {"strategy": "mu2", "batch-size": 8},
                "mu2, T = 8": {"strategy": "mu2", "batch-size": 17},
                "mu2, T = 8, cancelling": {"strategy": "mu2", "batch-size": 17, "mechanism": "cancelling"},
                "noisy SGD, T = 17": {"strategy": "noisy-sgd", "batch-size": 8},
                "noisy SGD, T = 8": {"strategy": "noisy-sgd", "batch-size": 17},
                "ISRL-DP, 8 passes": {"strategy": "isrl-dp-accelerated", "batch-size": 143, "passes": 8},
                "ISRL-DP, 20 passes": {"strategy": "isrl-dp-accelerated", "batch-size": 143, "passes": 20},
                "one shot": {"strategy": "one-shot"},
                "one shot, soft gradients": {"strategy": "one-shot", **soft},
                **_CHOSEN,
            },
        )
        for mu in (0.25, 1.0, 4.0)
    ]


def _tables(table: str, task: str, samples: int) -> list[Cell]:
    """Tables of people on 100 machines, by AUC."""
    return [
        Cell(
            f"{table}, 100 machines",
            _everybody(100, task=task, mu=mu),
            {
                "full batch": _full(),
                "full batch, T = 2": _full(num_rounds=2),
                "full batch, T = 4": _full(num_rounds=4),
                "full batch, T = 4, averaged": _full(num_rounds=4, average="linear"),
                "full batch, T = 10, averaged": _full(num_rounds=10, average="linear"),
                "mu2, b = 6": _mu2(6, samples // 6, 0.5, 300.0 * mu),
                "mu2, b = 19": _mu2(19, samples // 19, 0.5, 100.0 * mu),
                "noisy SGD, b = 6": _sgd(6, 0.5, 2 * mu),
                "noisy SGD, b = 19": _sgd(19, 0.5, 4 * mu),
                "ISRL-DP, 8 passes": _whole(samples, 8, 0.5, 3 * mu),
                "one shot": {"strategy": "one-shot"},
                **_CHOSEN,
            },
        )
        for mu in (0.25, 1.0)
    ]


def _stream() -> list[Cell]:
    """zhang-2025's logistic regression: 1,000 samples of each of 20 machines, each used as it comes."""
    steps: Settings = {"clip-unit": "contractive", "clip-norm": 12.0}

    def online(mechanism: str, batch: int, eta: float) -> Overrides:
        return {"strategy": "online", "mechanism": mechanism, "batch-size": batch, "learning-rate": eta, **steps}

    return [
        Cell(
            "stream of zhang-2025, 20 machines",
            _everybody(
                20,
                task="synthetic-logistic",
                partition="own",
                model="logistic",
                synthetic_samples=20_000,
                synthetic_features=100,
                delta=1e-3,
                mu=mu,
            ),
            {
                "online, square root, tau = 5": online("sqrt_toeplitz", 5, 0.003),
                "online, square root, tau = 20": online("sqrt_toeplitz", 20, 0.003),
                "online, square root, tau = 5, short": online("sqrt_toeplitz", 5, 0.001),
                "online, cancelling, tau = 5": online("cancelling", 5, 0.003),
                "online, independent, tau = 5": online("independent", 5, 0.0003),
                "mu2, b = 5": {"strategy": "mu2", "batch-size": 5},
                "mu2, b = 20": {"strategy": "mu2", "batch-size": 20},
                "mu2, b = 50": {"strategy": "mu2", "batch-size": 50},
                "noisy SGD, b = 20": {"strategy": "noisy-sgd", "batch-size": 20},
                "noisy SGD, b = 50": {"strategy": "noisy-sgd", "batch-size": 50},
                "auto": {"strategy": "auto", "stream": True},
            },
        )
        for mu in (0.25, 1.0)
    ]


class PlanGrid(Paper):
    """Small data: digits, tables of people, a stream."""

    name = "plan-grid"
    sentence = "every strategy on digits, tables of people and a stream, and what `strategy = auto` takes"
    seeds = 5
    table = GridTable()

    def cells(self) -> list[Cell]:
        """By data and mu."""
        people = [*_tables("CreditCard", "credit-default", 240), *_tables("COMPAS", "recidivism", 57)]
        return [*_digits(), *people, *_stream()]


class PlanGridMnist(Paper):
    """MNIST."""

    name = "plan-grid-mnist"
    sentence = "every strategy on MNIST, and what `strategy = auto` takes"
    seeds = 3
    table = GridTable()

    def cells(self) -> list[Cell]:
        """By mu."""
        return _mnist()
