"""Small run configurations that tests of several engines share."""

from murmurfl.app.settings.run_config import RunConfig

SECURE = RunConfig(
    num_clients=6,
    clients_per_round=5,
    num_rounds=8,
    batch_size=3,
    lost_replies=0.2,
    trust="secure-aggregation",
    min_cohort=4,
    colluders=1,
    give_up_after=0,  # so few machines leave several rounds in a row closed
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
GRADIENT_NORMS = {
    "task": "synthetic-logistic",
    "model": "nonconvex-logistic",
    "feature-bound": 1.0,
    "synthetic-features": 6,
    "synthetic-samples": 400,
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
"""A model that is not convex, whose gradient norms are told."""
