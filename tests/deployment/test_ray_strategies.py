"""Strategies with states, orders and trees of their own on Ray: the in-process model to the last bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines.start import num_nodes, ray_environment, ray_overrides, run_in_process
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.settings.run_config import RunConfig

from tests.app.run_configs import SECURE

pytestmark = pytest.mark.deployment

ROOT = Path(__file__).parent.parent.parent
LOGISTIC = RunConfig(
    task="synthetic-logistic",
    partition="iid",
    synthetic_samples=150,
    synthetic_features=8,
    num_clients=3,
    clients_per_round=3,
    checkpoint=False,
)
CONFIGURATIONS = {
    "shuffled": replace(
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
    "reduced-tree-momentum": replace(
        LOGISTIC,
        strategy="reduced-tree-momentum",
        model="nonconvex-logistic",
        feature_bound=1.0,
        batch_size=20,
        passes=3,
        clip_norm=1.1,
        learning_rate=0.1,
    ),
    "correlated-momentum": replace(
        LOGISTIC, strategy="correlated-momentum", mechanism="sqrt_toeplitz", batch_size=10, passes=3, lost_replies=0.2
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ray_gives_the_in_process_engines_model(name, tmp_path):
    check_same(CONFIGURATIONS[name], num_nodes(CONFIGURATIONS[name]), tmp_path)


@pytest.mark.parametrize(("strategy", "nodes"), [("mu2", num_nodes(SECURE)), ("noisy-sgd", 2)])
def test_on_ray_machines_send_masks_and_helpers_open_the_same_model(strategy, nodes, tmp_path):
    check_same(replace(SECURE, strategy=strategy), nodes, tmp_path)


def check_same(config, nodes, tmp_path):
    config = replace(config, out_dir=str(tmp_path), run_name="run")
    run_flower_app(
        ROOT,
        run_config=ray_overrides(config),
        num_supernodes=nodes,
        environment=ray_environment(config),
        timeout_s=400,
    )
    expected = run_in_process(config)
    with np.load(tmp_path / "run" / "model.npz") as model:
        for part, values in zip(expected.experiment.model.names, expected.parameters, strict=True):
            assert model[part].tobytes() == np.asarray(values).tobytes()
