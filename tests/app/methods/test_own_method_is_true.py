"""A method of one's own cannot have an epsilon printed that is not that of its clients."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data.partition import Partition
from murmurfl.app.engines import run_cohort
from murmurfl.app.methods.gradient_methods import TreeMomentumMethod
from murmurfl.app.methods.mu2_methods import Mu2Method
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import OnlineClient
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, SimulatedKeys

from tests.harness.errors import raises

NAME = f"{__name__}:"


class Longer(TreeMomentumMethod):
    """Each client's epoch is as long as its samples last; the server would charge the longest for all."""

    name = "longer"
    everybody = False


class RealTree(TreeMomentumMethod):
    name = "real-tree"
    on_real_nodes = True


class Weak(Mu2Method):
    """Says mu and has clients with another one."""

    name = "weak"

    def client(self, gradients, samples, policy, ledger, keys, **options):
        return super().client(gradients, samples, replace(policy, mu=20.0, budget_mu=20.0), ledger, keys, **options)


class Nobody(Mu2Method):
    """Says that nobody is asked, and asks."""

    name = "nobody"

    def asked_rounds(self, config, num_rounds):
        return range(0)


class Uneven(Partition):
    name = "uneven"

    def parts(self, dataset, config):
        return [np.arange(80), np.arange(80, 480)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch, request):
    """Under the name by which a run configuration finds this file's things."""
    monkeypatch.setitem(__import__("sys").modules, __name__, request.module)


def config(strategy, **changes):
    return RunConfig(strategy=NAME + strategy, num_clients=2, clients_per_round=2, mu=1.0, **changes)


def test_a_trusted_server_charges_what_is_true_of_every_client():
    uneven = {"partition": NAME + "Uneven", "passes": 4, "num_rounds": 40}
    with raises(ConfigurationError, "conflict", "min_separation"):
        run_cohort(config("Longer", **uneven))
    built_in = run_cohort(replace(config("Longer", **uneven), strategy="tree-momentum"))
    assert {s["max-participations"] for s in built_in.statements.values()} == {40}


@pytest.mark.parametrize("strategy", ["Weak", "Nobody"])
def test_a_mu_that_the_clients_do_not_guarantee_is_no_result(strategy):
    with raises(ConfigurationError, "mismatch", match="There is no result"):
        run_cohort(config(strategy, num_rounds=3, allow_exhaustion=True))


def test_under_a_trusted_server_a_real_client_uses_its_samples_once():
    values = {
        "client": "a", "ledger": "l", "clip-norm": 1.0, "batch-size": 4, "mu": 1.0, "strategy": NAME + "RealTree",
        "task": "digits", "num-partitions": 2, "partition-id": 0, "mechanism": "independent",
    }  # fmt: skip
    assert NodeConfig.from_mapping(values).method.trusted
    with raises(ConfigurationError, "conflict", "passes", match="passes to be 1"):
        NodeConfig.from_mapping({**values, "passes": 3})


def test_a_client_that_overrides_a_hook_keeps_the_checks_of_contractive_updates():
    class Careless(OnlineClient):
        def check_model(self, gradients, policy):
            pass

    samples = np.zeros((16, 3)), np.zeros(16, dtype=int)
    policy = PrivacyPolicy(clip_norm=0.1, batch_size=8, max_participations=2, mu=1.0, clip_unit="contractive")
    for kind in (OnlineClient, Careless):
        with pytest.raises(ConfigurationError):
            kind(
                SoftmaxRegression(3, 2), _Samples(*samples), policy, MemoryLedger(), SimulatedKeys(1, "0"),
                name="0", learning_rate=50.0,
            )  # fmt: skip


class _Samples:
    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, chosen):
        return self.features[chosen], self.labels[chosen]
