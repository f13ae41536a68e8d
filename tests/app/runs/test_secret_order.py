"""A secret order in a run: what it goes with, the same model on every engine, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_lines, audit_run
from murmurfl.app.data.task import Shard
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.nodes.node_app import describe
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.planning.noise_plans import compare_mechanisms, noise_guarantee
from murmurfl.app.planning.plan_answers import base_of_numbers
from murmurfl.app.planning.plan_lines import plan_lines, plan_table
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, SQLiteLedger, gdp_epsilon

from tests.harness.errors import raises

BASE = RunConfig(
    num_rounds=5,
    clients_per_round=6,
    batch_size=30,
    checkpoint=False,
    mu=1.0,
    batch_selection="shuffled",
    learning_rate=0.05,
)
NOISY = replace(BASE, strategy="noisy-sgd")
SUMS = replace(NOISY, trust="secure-aggregation")


@pytest.mark.parametrize("config", [NOISY, replace(BASE, lost_replies=0.3), SUMS], ids=["noisy-sgd", "mu2", "sums"])
def test_the_model_is_the_same_on_every_engine(config):
    together, alone = run_cohort(config), run_in_process(config)
    for ours, theirs in zip(together.parameters, alone.parameters, strict=True):
        assert np.array_equal(ours, theirs)


def test_the_result_says_both_and_epsilon_is_the_one_that_holds_whoever_knows():
    for config, proved in ((NOISY, True), (BASE, False)):
        document = run_cohort(config).outcome.document()
        assert document["epsilon"] == document["privacy"]["epsilon"] == pytest.approx(gdp_epsilon(1.0, 1e-5))
        assert document["privacy"]["amplified_proved"] is proved
        assert document["privacy"]["epsilon_amplified"] < document["epsilon"]
    plain = run_cohort(replace(NOISY, batch_selection="")).outcome.document()
    assert plain["privacy"]["epsilon_amplified"] is None
    assert plain["epsilon"] == document["epsilon"]


def test_the_client_with_the_fewest_releases_counts():
    experiment = prepare(NOISY)
    small = Shard(experiment.data, np.arange(90))
    unequal = replace(experiment, shards=[small, *experiment.shards[1:]])
    assert [unequal.policy(client).max_participations for client in (0, 1)] == [3, 4]
    assert unequal.method.guarantee(unequal, 1.0).amplified.slots == 3


def test_a_client_has_a_release_for_every_batch_whatever_is_asked_for():
    policies = [prepare(config).policy(0) for config in (NOISY, replace(NOISY, max_participations=3))]
    assert [policy.max_participations for policy in policies] == [len(prepare(NOISY).shards[0]) // 30, 3]
    assert {policy.batch_selection for policy in policies} == {"shuffled"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"passes": 2}, "passes"),
        ({"strategy": "online"}, "batch-selection"),
        ({"strategy": "full-batch", "batch_size": 8}, "batch-selection"),
        ({"strategy": "isrl-dp"}, "batch-selection"),
        ({"trust": "trusted-server"}, "batch-selection"),
        ({"centring": "private"}, "centring"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        replace(BASE, **changes)


def test_an_operator_decides_it_for_a_real_client(tmp_path):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    values = {"client": "clinic", "ledger": "ledger.sqlite", "clip-norm": 2.0, "batch-size": 32, "mu": 4.0}
    values |= {"task": "digits", "num-partitions": 4, "partition-id": 1, "batch-selection": "shuffled"}
    path = tmp_path / "node.toml"

    def made(**changes):
        path.write_text(toml_document(values | changes))
        path.chmod(0o600)
        return NodeConfig.read(path)

    client = made(strategy="noisy-sgd").make_client()
    assert client.privatizer.policy.batch_selection == "shuffled"
    assert "While nobody learns which of 11 releases a sample is in, epsilon = " in describe(client)
    assert "no guarantee" in describe(made().make_client())
    with raises(ConfigurationError, "conflict", "batch-selection", match="batch-selection to be left out"):
        made(strategy="online", **{"learning-rate": 0.1})
    with raises(ConfigurationError, "unknown-name", "batch-selection"):
        made(**{"batch-selection": "random"})


def test_a_plan_shows_both_and_names_estimates(monkeypatch):
    monkeypatch.setattr("murmurfl.privacy.accounting.amplification._DRAWS", 4000)
    request = {"num-clients": 5, "num-rounds": 4, "batch-size": 5, "mu": 1.0}
    plan = compare_mechanisms(base_of_numbers(20, 1000, {**request, "batch-selection": "shuffled"}))
    texts = {row["mechanism"]: row["in a secret order"] for row in plan_table(plan).texts()}
    assert noise_guarantee(plan).epsilon == pytest.approx(gdp_epsilon(1.0, 1e-5))
    assert texts["cancelling uniform"].endswith(", estimated")
    assert not texts["independent"].endswith("estimated")
    assert texts["tree dyadic"] == "not known"
    assert any("An estimate guarantees nothing" in line for line in plan_lines(plan)[1])
    assert compare_mechanisms(base_of_numbers(20, 1000, request)).mechanisms[0].amplified is None


@pytest.mark.parametrize(("config", "proved"), [(NOISY, True), (BASE, False)], ids=["noisy-sgd", "mu2"])
def test_the_audit_holds_what_shows_against_what_is_claimed(config, proved):
    audit = audit_run(replace(config, batch_size=60, mu=3.0, num_rounds=2), 20)
    assert not audit.violated
    claimed = audit.guarantee.amplified.epsilon if proved else audit.guarantee.epsilon
    assert audit.result.claimed_epsilon == pytest.approx(claimed, rel=1e-6)
    assert audit.canary_mu == pytest.approx(3.0, rel=1e-3)
    assert "secret order" in audit_lines(audit)[-2]
