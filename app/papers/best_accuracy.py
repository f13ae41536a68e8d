"""best-accuracy: the most accuracy that an epsilon buys, on MNIST and on two tables of people (docs/results.md)."""

from __future__ import annotations

from ..settings.run_config import NO_NOISE
from .best import BestTable
from .cell import Cell, Overrides, Settings
from .paper import Paper

_SHARED: Settings = {
    "num-clients": 100,
    "clients-per-round": 100,
    "noise-quality": "fast",
    "evaluate-every": 1_000_000,
    "checkpoint": False,
    "node-deadline-s": 600.0,
}
SOFT, STROKES, BEST = "soft-gradients", "strokes", "scattering+strokes"
MUS = (0.1, 0.25, 0.5, 1.0, 2.0)

FULL_BATCH: Overrides = {"strategy": "full-batch"}
ONE_SHOT: Overrides = {"strategy": "one-shot"}
_HONEST = 70
SUMS: Overrides = {
    "strategy": "full-batch",
    "trust": "secure-aggregation",
    "min-cohort": 100,
    "colluders": 100 - _HONEST,
}

FULL, ONE_PASS, NOISY_SGD, SHOT = "full batches", "one pass of mu2", "one pass of noisy SGD", "one shot"
SECURE, WITHOUT = f"full batches, sums of {_HONEST} honest machines", "full batches without noise"


_BATCHES = {
    SOFT: {0.1: (100, 100), 0.25: (50, 100), 0.5: (50, 50), 1.0: (50, 50), 2.0: (25, 25)},
    BEST: {0.1: (100, 100), 0.25: (100, 100), 0.5: (100, 100), 1.0: (50, 50), 2.0: (25, 25)},
}
"""By features and mu, the best of 12, 25, 50 and 100 on held-out images: of mu^2, and of noisy SGD."""


def _one_pass(batch_size: int, of_sgd: int = 0) -> dict[str, Overrides]:
    """Every sample once: mu^2 with the best of its noises, and the same with noise that adds up."""
    return {
        ONE_PASS: {"strategy": "mu2", "batch-size": batch_size, "mechanism": "decay"},
        NOISY_SGD: {"strategy": "noisy-sgd", "batch-size": of_sgd or batch_size},
    }


def _algorithms(features: str, mu: float) -> dict[str, Overrides]:
    found: dict[str, Overrides] = {FULL: FULL_BATCH}
    if features == STROKES:
        return {**found, SHOT: ONE_SHOT}
    found |= _one_pass(*_BATCHES[features][mu])
    return {**found, SECURE: SUMS} if features == BEST and mu <= 0.25 else found


def _images(features: str, **more: bool | float | str) -> Settings:
    return {**_SHARED, "task": "mnist", "features": features, **more}


def _standard() -> list[Cell]:
    return [
        Cell(features, _images(features, mu=mu), _algorithms(features, mu))
        for features in (SOFT, BEST, STROKES)
        for mu in MUS
    ]


def _noiseless() -> list[Cell]:
    """Without noise: what the features and the model are good for."""
    return [Cell(features, _images(features, mechanism=NO_NOISE), {WITHOUT: FULL_BATCH}) for features in (SOFT, BEST)]


_SKEWED: Settings = {"partition": "dirichlet", "dirichlet-alpha": 0.1}
_UNEQUAL: Settings = {"partition": "unequal"}
_FITTING_BATCH = 12
"""No larger than the smallest of unequal machines; skewed ones may have a single sample, which is none for one pass."""


def _partitions() -> list[Cell]:
    one_pass = {ONE_PASS: _one_pass(_FITTING_BATCH)[ONE_PASS]}
    return [
        Cell(f"{features}, {name}", {**_images(features, mu=mu), **partition}, {FULL: FULL_BATCH, **others})
        for name, partition, others in (
            ("labels skewed (Dirichlet 0.1)", _SKEWED, {}),
            ("machines of unequal size", _UNEQUAL, one_pass),
        )
        for features in (SOFT, BEST)
        for mu in (0.25, 1.0)
    ]


_TABLES = {"credit-default": 48, "recidivism": 28}
"""Tables of people, and how many samples there are in a release of one pass: the best of three on held-out people."""


_UNCLIPPED: Overrides = {"clip-norm": 2.0}
_NOISELESS_STEPS: dict[str, Overrides] = {
    "credit-default": {"learning-rate": 10.0},
    "recidivism": {"learning-rate": 3.0},
}
"""The preset's clip and step are for noise; tables of people are small enough that it shows without."""


def _tables() -> list[Cell]:
    noisy = [
        Cell(task, {**_SHARED, "task": task, "mu": mu}, {FULL: FULL_BATCH, **_one_pass(batch_size)})
        for task, batch_size in _TABLES.items()
        for mu in (0.25, 1.0)
    ]
    return noisy + [
        Cell(task, {**_SHARED, "task": task, "mechanism": NO_NOISE}, {WITHOUT: {**FULL_BATCH, **_UNCLIPPED, **step}})
        for task, step in _NOISELESS_STEPS.items()
    ]


class BestAccuracy(Paper):
    """60,000 images of MNIST on 100 machines that trust nobody, by epsilon, features and method."""

    name = "best-accuracy"
    sentence = "The most accuracy an epsilon buys: full batches, one pass and one shot on fixed features"
    seeds = 5
    table = BestTable()

    def cells(self) -> list[Cell]:
        """By features and mu; then other partitions, and tables of people by AUC."""
        return [*_standard(), *_noiseless(), *_partitions(), *_tables()]
