"""The runs that tests share: one table, each row with the engines that have to give it one model.

``tests/app/engines/test_engines.py`` is the suite over the table. Every row runs on the in-process engine, over real
messages; ``engines`` names those it is compared with. A new engine or a new algorithm is a word or a row here.
"""

from dataclasses import dataclass, replace

import pytest
from murmurfl.app.settings.run_config import RunConfig

BASE = RunConfig(num_rounds=6, clients_per_round=7, batch_size=3, checkpoint=False)
PASSES = replace(BASE, passes=3, num_rounds=0, batch_size=30, clients_per_round=10)
FULL_BATCH = RunConfig(strategy="full-batch", num_rounds=3, average="linear", checkpoint=False)
SECURE = RunConfig(
    num_clients=6,
    clients_per_round=5,
    num_rounds=8,
    batch_size=3,
    lost_replies=0.2,
    trust="secure-aggregation",
    min_cohort=4,
    colluders=1,
    give_up_after=0,  # so few clients leave several rounds in a row closed
    checkpoint=False,
)
FEW = RunConfig(num_clients=6, clients_per_round=4, num_rounds=5, batch_size=2, lost_replies=0.3, checkpoint=False)
LOGISTIC = RunConfig(
    task="synthetic-logistic",
    partition="iid",
    synthetic_samples=150,
    synthetic_features=8,
    num_clients=3,
    clients_per_round=3,
    checkpoint=False,
)
CONTRACTIVE = {
    "strategy": "online",
    "mechanism": "banded",
    "clip_unit": "contractive",
    "task": "synthetic-logistic",
    "partition": "own",
    "model": "logistic",
    "synthetic_samples": 300,
    "synthetic_features": 20,
}
"""Local steps on a model that is convex and smooth."""
ADDITIVE = RunConfig(
    task="tests.app.additive_table:Incomes",
    model="additive",
    strategy="full-batch",
    num_clients=5,
    clients_per_round=5,
    num_rounds=4,
    checkpoint=False,
)
"""A run whose clients release the counts for its knots first."""
SHUFFLED = replace(
    BASE,
    batch_size=8,  # it reads none: a release is made from all samples
    strategy="shuffled",
    task="synthetic-logistic",
    model="logistic",
    num_clients=3,
    clients_per_round=2,
    synthetic_samples=150,
    synthetic_features=8,
    public_samples=60,
    regularizer="l2",
    regularizer_strength=0.1,
)
SHUFFLED_ALONE = RunConfig(
    strategy="shuffled",
    task="synthetic-logistic",
    model="logistic",
    num_clients=1,
    clients_per_round=1,
    num_rounds=4,
    synthetic_samples=60,
    synthetic_features=5,
    public_samples=30,
    regularizer="l1",
    regularizer_strength=0.02,
    learning_rate=0.005,
    checkpoint=False,
    mu=2.0,
)
"""A small run of shuffled gradients, with private and public samples: what tests of it begin with."""
GRADIENT_NORMS = {
    "task": "synthetic-logistic",
    "model": "nonconvex-logistic",
    "feature-bound": 1.0,
    "task.features": 6,
    "task.samples": 400,
    "num-clients": 1,
    "clients-per-round": 1,
    "batch-size": 20,
    "passes": 3,
    "clip-norm": 1.1,
    "evaluate-every": 5,
    "gradient-norm": True,
    "noise-quality": "fast",
    "checkpoint": False,
}
"""A run whose model is not convex and whose result has gradient norms."""


@dataclass(frozen=True)
class Run:
    """A row of the table.

    Parameters
    ----------
    engines : str
        The engines that are compared: ``cohort``; ``alone``, which is the cohort engine with each client asked alone;
        ``workers``, the cohort engine over three of them; ``travelling``, messages and states pickled on their way
        to either of two workers; ``ray``, real processes.
    config : RunConfig
        What is run.
    long : bool
        Whether `make test-long` alone runs it: a mixture of what other rows have alone. Ray is always long.
    nodes : int
        Ray's nodes; 0 for one each of clients and helpers.
    """

    engines: str
    config: RunConfig
    long: bool = False
    nodes: int = 0


SMALL = {"partition": "power-law", "batch_size": 40}
"""Clients of very different sizes, some with less than a batch."""


def _mu2(**changes: object) -> RunConfig:
    return replace(BASE, **changes)


def _secure(**changes: object) -> RunConfig:
    return replace(SECURE, **changes)


RUNS = {
    "mu2": Run("cohort workers", BASE),
    "mu2, papers' schedule": Run("cohort", _mu2(preset="paper", batch_size=1)),
    "mu2, losses": Run("cohort workers", _mu2(lost_replies=0.3, num_rounds=12)),
    "mu2, losses, papers' rule": Run("cohort", _mu2(lost_replies=0.3, release_rule="paper")),
    "mu2, refusals": Run("cohort workers", _mu2(max_participations=3, allow_exhaustion=True, give_up_after=0)),
    "mu2, skewed": Run("cohort workers", _mu2(partition="dirichlet", batch_size=2)),
    "mu2, fewer samples than a batch": Run(
        "cohort workers travelling", _mu2(**SMALL, num_rounds=0, clients_per_round=10)
    ),
    "mu2, fewer samples than a batch, sums": Run(
        "cohort alone workers", replace(SECURE, **SMALL, num_clients=10, clients_per_round=10, num_rounds=0)
    ),
    "noisy-sgd, fewer samples than a batch, several passes": Run(
        "cohort workers", _mu2(**SMALL, strategy="noisy-sgd", passes=3, num_rounds=0, clients_per_round=10)
    ),
    "tree-momentum, fewer samples than a batch": Run(
        "cohort", _mu2(**SMALL, strategy="tree-momentum", num_rounds=0, clients_per_round=10)
    ),
    "mu2, fast noise": Run("cohort", _mu2(noise_quality="fast"), long=True),
    "mu2, mlp": Run("cohort workers", _mu2(model="mlp")),
    "mu2, blt": Run("cohort workers", _mu2(mechanism="blt", lost_replies=0.2, num_rounds=12)),
    "mu2, banded": Run("cohort", _mu2(mechanism="banded", bands=3), long=True),
    "mu2, sqrt_toeplitz, fast noise": Run("cohort", _mu2(mechanism="sqrt_toeplitz", noise_quality="fast"), long=True),
    "mu2, tree": Run("cohort", _mu2(mechanism="tree"), long=True),
    "mu2, optimal": Run("cohort", _mu2(mechanism="optimal", workload="mu2", num_rounds=40, batch_size=1), long=True),
    "mu2, several passes": Run("cohort", _mu2(mechanism="blt", passes=3, num_rounds=0, batch_size=40)),
    "mu2, anytime, window, losses": Run("cohort", _mu2(steps="anytime", window=2, lost_replies=0.3)),
    "mu2, mean of features": Run("workers", _mu2(features="soft-gradients", centring="private")),
    "mu2, private evaluation": Run("workers", _mu2(private_evaluation=0.1, clients_per_round=10)),
    "trusted-mu2": Run("cohort", _mu2(strategy="trusted-mu2"), long=True),
    "trusted-mu2, losses": Run("cohort workers", _mu2(strategy="trusted-mu2", lost_replies=0.3)),
    "online": Run("cohort workers", _mu2(strategy="online", mechanism="sqrt_toeplitz")),
    "online, mlp, losses": Run(
        "cohort", _mu2(strategy="online", model="mlp", mechanism="blt", lost_replies=0.3), long=True
    ),
    "online, contractive": Run("cohort", _mu2(**CONTRACTIVE, clients_per_round=10, num_rounds=10)),
    "online, no noise": Run("cohort", _mu2(strategy="online", mechanism="none"), long=True),
    "shuffled, interleaved": Run("cohort", SHUFFLED),
    "shuffled, dp-shuffleg, losses": Run(
        "cohort workers", replace(SHUFFLED, variant="dp-shuffleg", order="IG", lost_replies=0.3)
    ),
    "shuffled, priv-pub, l1": Run(
        "cohort", replace(SHUFFLED, variant="priv-pub", regularizer="l1", regularizer_strength=0.01), long=True
    ),
    "shuffled, pub-priv, refusals": Run(
        "cohort", replace(SHUFFLED, variant="pub-priv", order="SO", max_participations=2, allow_exhaustion=True)
    ),
    "shuffled, public-only, ball": Run(
        "cohort", replace(SHUFFLED, variant="public-only", regularizer="ball", regularizer_strength=0.1), long=True
    ),
    "shuffled, composed, softmax, no noise": Run(
        "cohort",
        replace(
            SHUFFLED,
            task="digits",
            synthetic_samples=6000,  # the default: digits read none
            synthetic_features=784,
            model="softmax",
            accounting="composed",
            mechanism="none",
            learning_rate=0.01,
            public_samples=300,
        ),
    ),
    "full-batch, losses": Run("cohort workers", replace(FULL_BATCH, lost_replies=0.3, shares="average")),
    "full-batch, some clients, skewed": Run("cohort", replace(FULL_BATCH, partition="dirichlet", clients_per_round=7)),
    "full-batch, mlp": Run("cohort", replace(FULL_BATCH, model="mlp", num_rounds=2, training_samples=60), long=True),
    "full-batch, cap": Run("cohort", replace(FULL_BATCH, max_participations=2, allow_exhaustion=True), long=True),
    "additive": Run("cohort alone workers ray", ADDITIVE),
    "additive, losses, private evaluation": Run("cohort", replace(ADDITIVE, lost_replies=0.2, private_evaluation=0.1)),
    "additive, trusted server": Run("cohort", replace(ADDITIVE, strategy="trusted-full-batch")),
    "additive, mu2": Run("cohort", replace(ADDITIVE, strategy="mu2", batch_size=20)),
    "additive, sums": Run("alone", replace(ADDITIVE, trust="secure-aggregation", min_cohort=4, colluders=1)),
    "trusted-full-batch": Run("cohort", replace(FULL_BATCH, strategy="trusted-full-batch", lost_replies=0.3)),
    "noisy-sgd": Run("cohort workers", _mu2(strategy="noisy-sgd")),
    "noisy-sgd, mlp": Run("cohort", _mu2(strategy="noisy-sgd", model="mlp"), long=True),
    "isrl-dp, several passes": Run(
        "cohort", _mu2(strategy="isrl-dp", passes=3, num_rounds=0, batch_size=40), long=True
    ),
    "isrl-dp-accelerated, losses": Run("cohort", _mu2(strategy="isrl-dp-accelerated", passes=2, lost_replies=0.3)),
    "tree-momentum, several passes, losses": Run("cohort", replace(PASSES, strategy="tree-momentum", lost_replies=0.2)),
    "reduced-tree-momentum, several passes": Run(
        "cohort", replace(PASSES, strategy="reduced-tree-momentum"), long=True
    ),
    "correlated-momentum, blt, losses": Run(
        "cohort workers", replace(PASSES, strategy="correlated-momentum", lost_replies=0.2)
    ),
    "trusted-sgd, Poisson batches, losses": Run(
        "cohort workers ray",
        _mu2(
            strategy="trusted-sgd",
            batch_selection="poisson",
            mu=0.0,
            epsilon=2.0,
            clients_per_round=10,
            lost_replies=0.2,
        ),
    ),
    "trusted-sgd, several passes": Run("cohort", replace(PASSES, strategy="trusted-sgd"), long=True),
    "delayed-momentum": Run("cohort", _mu2(strategy="delayed-momentum"), long=True),
    "delayed-momentum, papers' schedule, losses": Run(
        "cohort workers",
        _mu2(strategy="delayed-momentum", preset="paper", batch_size=1, lost_replies=0.3, num_rounds=12),
    ),
    # Sums behind masks, with helpers that open them.
    "sums": Run("alone ray", SECURE),
    "sums, large cohort": Run("workers", _mu2(trust="secure-aggregation")),
    "sums, closed rounds": Run(
        "workers",
        _mu2(trust="secure-aggregation", lost_replies=0.2, num_rounds=12, give_up_after=0, min_cohort=5),
    ),
    "sums, three helpers, nothing lost": Run("alone", _secure(helpers=3, lost_replies=0.0), long=True),
    "sums, one helper": Run("alone", _secure(helpers=1)),
    "sums, independent": Run("alone", _secure(mechanism="independent")),
    "sums, blt": Run("alone", _secure(mechanism="blt")),
    "sums, banded": Run("alone", _secure(mechanism="banded", bands=3), long=True),
    "sums, sqrt_toeplitz": Run("alone", _secure(mechanism="sqrt_toeplitz"), long=True),
    "sums, tree": Run("alone", _secure(mechanism="tree"), long=True),
    "sums, optimal": Run("alone", _secure(mechanism="optimal", workload="mu2", num_rounds=12, batch_size=1), long=True),
    "sums, several passes": Run("alone", _secure(mechanism="blt", passes=3, num_rounds=0, batch_size=80)),
    "sums, papers' schedule": Run("alone", _secure(preset="paper", batch_size=1)),
    "sums, independent, papers' rule": Run("alone", _secure(mechanism="independent", release_rule="paper")),
    "sums, skewed": Run("alone", _secure(partition="dirichlet", batch_size=1)),
    "sums, no noise": Run("alone", _secure(mechanism="none")),
    "sums, fast noise": Run("alone", _secure(noise_quality="fast"), long=True),
    "sums, refusals": Run("alone", _secure(max_participations=3, allow_exhaustion=True)),
    "sums, mlp": Run("alone", _secure(model="mlp", num_rounds=4), long=True),
    "sums, online": Run("alone", _secure(strategy="online")),
    "sums, online, independent": Run("alone", _secure(strategy="online", mechanism="independent"), long=True),
    "sums, online, sqrt_toeplitz": Run("alone", _secure(strategy="online", mechanism="sqrt_toeplitz"), long=True),
    "sums, online, contractive": Run("alone", _secure(**CONTRACTIVE)),
    "sums, full-batch": Run("alone", _secure(strategy="full-batch", batch_size=8, num_rounds=4)),
    "sums, noisy-sgd": Run("alone ray", _secure(strategy="noisy-sgd"), nodes=2),
    "sums, noisy-sgd, several passes": Run(
        "alone", _secure(strategy="noisy-sgd", passes=2, num_rounds=0, batch_size=80), long=True
    ),
    # States that travel, as they do on Ray.
    "few, losses": Run("travelling", FEW),
    "few, refusals": Run(
        "travelling",
        replace(FEW, lost_replies=0.0, max_participations=3, allow_exhaustion=True, give_up_after=0),
    ),
    "few, blt": Run("travelling", replace(FEW, mechanism="blt")),
    "few, banded": Run("travelling", replace(FEW, mechanism="banded", bands=3)),
    "few, delayed-momentum": Run("travelling", replace(FEW, strategy="delayed-momentum")),
    "few, full-batch": Run("travelling", replace(FEW, strategy="full-batch", average="linear", batch_size=8)),
    "few, sums": Run(
        "travelling",
        replace(
            FEW, strategy="noisy-sgd", trust="secure-aggregation", num_clients=9, clients_per_round=9, min_cohort=4
        ),
    ),
    # Orders, trees and states of strategies, in real processes.
    "logistic, shuffled": Run(
        "ray",
        replace(
            LOGISTIC,
            strategy="shuffled",
            model="logistic",
            partition="own",
            clients_per_round=2,
            num_rounds=4,
            public_samples=60,
            regularizer="l2",
            regularizer_strength=0.1,
            lost_replies=0.2,
        ),
    ),
    "logistic, reduced-tree-momentum": Run(
        "ray",
        replace(
            LOGISTIC,
            strategy="reduced-tree-momentum",
            model="nonconvex-logistic",
            feature_bound=1.0,
            batch_size=20,
            passes=3,
            clip_norm=1.1,
            learning_rate=0.1,
        ),
    ),
    "logistic, correlated-momentum": Run(
        "ray",
        replace(
            LOGISTIC,
            strategy="correlated-momentum",
            mechanism="sqrt_toeplitz",
            batch_size=10,
            passes=3,
            lost_replies=0.2,
        ),
    ),
}


def cases() -> list[object]:
    """Return the table as parameters of a test: each engine of each row."""
    return [
        pytest.param(
            engine, name, id=f"{name}-{engine}", marks=[pytest.mark.long] if run.long or engine == "ray" else []
        )
        for name, run in RUNS.items()
        for engine in run.engines.split()
    ]
