"""Automatic clipping in the app: who reads it, what clients then do, and what is said of it."""

import numpy as np
import pytest
from murmurfl.app.methods import METHODS
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, MemoryLedger

from tests.app.plain import simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")


@pytest.mark.parametrize("strategy", [name for name, method in METHODS.items() if "clipping" in method.keys])
def test_clients_bound_gradients_as_it_says_and_their_noise_is_the_same(strategy):
    plain, automatic = (
        prepare(RunConfig(strategy=strategy, clipping=clipping, clip_norm=1.0)).policy()
        for clipping in ("", "automatic")
    )
    assert (plain.bound.stability, automatic.bound.stability) == (None, 0.01)
    assert plain.sensitivity == automatic.sensitivity
    assert (
        prepare(RunConfig(strategy=strategy, clipping="automatic", clip_stability=0.5)).policy().clip_stability == 0.5
    )


def test_the_guarantee_says_so_and_the_model_is_another():
    few = {"num_rounds": 3, "mu": 2.0, "strategy": "noisy-sgd"}
    plain, automatic = simulate(**few), simulate(**few, clipping="automatic")
    assert "automatic clipping" in automatic.guarantee.sentence
    assert "clipping" not in plain.guarantee.sentence
    assert plain.guarantee.mu == automatic.guarantee.mu == 2.0
    assert not np.allclose(plain.parameters[0], automatic.parameters[0])
    assert not automatic.training  # there is nothing to warn of where all gradients are shortened


def test_engines_agree_on_automatic_clipping():
    for strategy in ("mu2", "full-batch"):
        few = {"num_rounds": 2, "num_clients": 3, "clients_per_round": 3, "strategy": strategy, "clipping": "automatic"}
        one, other = (simulate(**few, engine=engine).parameters[0] for engine in ("cohort", "inprocess"))
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("strategy", ["online", "shuffled", "reduced-tree-momentum", "one-shot"])
def test_methods_that_need_more_of_a_gradient_than_its_length_refuse_it(strategy):
    with raises(ConfigurationError, "conflict", "clipping"):
        RunConfig(strategy=strategy, clipping="automatic")


def test_a_gamma_without_automatic_clipping_is_refused():
    with raises(ConfigurationError, "conflict", "clipping.stability"):
        RunConfig(clip_stability=0.5)


def test_a_client_of_the_experiment_clips_automatically():
    experiment = prepare(RunConfig(strategy="noisy-sgd", clipping="automatic", clip_norm=1.0, batch_size=1))
    privatizer = experiment.client(0, MemoryLedger()).privatizer
    rows = privatizer.policy.bound.rows(np.diag([1e-3, 1.0, 50.0]))
    assert np.diag(rows) == pytest.approx([1 / 11, 1 / 1.01, 50 / 50.01], rel=1e-9)
