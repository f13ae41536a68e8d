"""Poisson batches in a run: what it goes with, what epsilon means, and that no file tells how large a batch was."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app import fit, simulate
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Column, Label, Schema
from murmurfl.privacy import ConfigurationError, SQLiteLedger, gdp_epsilon, poisson_epsilon
from murmurfl.privacy.release import prefix_sums

BASE = RunConfig(
    strategy="trusted-sgd", batch_selection="poisson", batch_size=14, num_rounds=20, epsilon=2.0, checkpoint=False
)
FIGURES = {"accuracy", "loss", "auc", "mean", "worst", "best", "seconds", "date"}
"""What the public test set, of all sites or by site, or a clock says of a model."""
CLIPPING = (".training.", ".warnings.")
"""What clipping did to all samples, which only a simulation collects."""


def test_epsilon_is_what_secret_batches_are_worth_and_mu_what_holds_without_the_secret():
    document = run_cohort(BASE).outcome.document()
    privacy = document["privacy"]
    assert 1.95 < privacy["epsilon_amplified"] <= 2.0
    assert privacy["amplified_proved"] is True
    assert document["epsilon"] == privacy["epsilon"] == pytest.approx(gdp_epsilon(privacy["mu"], 1e-5))
    experiment = prepare(BASE)
    rate = 14 * len(experiment.sizes) / sum(experiment.sizes)
    assert experiment.policy().sampling_rate == rate
    assert privacy["epsilon_amplified"] == pytest.approx(poisson_epsilon(privacy["mu"], rate, 20, 1e-5), rel=1e-3)
    assert privacy["epsilon"] > 10 * privacy["epsilon_amplified"]
    server = experiment.strategy().aggregator.stream
    assert server.amplification(experiment.model.num_parameters).epsilon == privacy["epsilon_amplified"]


def test_a_mu_that_is_asked_for_is_the_one_without_the_secret():
    outcome = run_cohort(replace(BASE, epsilon=0.0, mu=3.0)).outcome.document()
    assert outcome["privacy"]["mu"] == pytest.approx(3.0)
    assert outcome["privacy"]["epsilon_amplified"] < 0.5 * outcome["privacy"]["epsilon"]


def test_a_configuration_comes_back_as_it_was():
    assert RunConfig.from_mapping(BASE.to_mapping()) == BASE
    assert simulate(BASE, num_rounds=2).guarantee.amplified.epsilon <= 2.0
    settled = prepare(BASE).config
    assert settled.epsilon == 0.0
    assert settled.mu > 4 * BASE.mu
    assert prepare(settled).config == settled
    with pytest.raises(ConfigurationError, match="mu or epsilon, got both"):
        replace(BASE, mu=3.0)


def test_without_rounds_there_are_ten_passes_on_average_and_all_of_them_are_counted():
    experiment = prepare(replace(BASE, num_rounds=0))
    rate = experiment.policy().sampling_rate
    assert experiment.num_rounds == round(10 / rate) == experiment.policy().max_participations
    guarantee = experiment.method.guarantee(experiment, experiment.loss())
    assert guarantee.amplified.slots == experiment.num_rounds
    assert 1.95 < guarantee.amplified.epsilon <= 2.0
    twice = prepare(replace(BASE, num_rounds=0, passes=20))
    assert twice.num_rounds == round(20 / rate)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"strategy": "noisy-sgd"}, "batch-selection"),
        ({"strategy": "mu2"}, "batch-selection"),
        ({"strategy": "tree-momentum"}, "batch-selection"),
        ({"batch_selection": "shuffled", "epsilon": 0.0}, "batch-selection"),
        ({"centring": "private"}, "centring"),
        ({"private_evaluation": 0.1}, "evaluation"),
        ({"clients_per_round": 5}, "clients-per-round"),
        ({"trust": "untrusted-server"}, "trust"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        replace(BASE, **{"mu": 0.0, **changes})


def test_nothing_else_is_released_beside_it():
    """Features that are centred where nothing is set would show every sample, under a mu of their own."""
    assert prepare(replace(BASE, features="soft-gradients")).queries == []
    assert prepare(replace(BASE, features="soft-gradients", batch_selection="", epsilon=0.0)).queries != []


def test_a_real_client_of_another_strategy_does_not_ignore_it():
    node = {"client": "a", "ledger": "ledger.sqlite", "strategy": "noisy-sgd", "batch-selection": "poisson"}
    with pytest.raises(ConfigurationError, match="batch-selection"):
        NodeConfig.from_mapping({**node, "clip-norm": 1.0, "mu": 1.0, "batch-size": 8, "task": "digits"})


def leaves(value, name=""):
    """All values of a document by their path."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{name}.{key}")
    else:
        yield name, value


def test_nothing_that_a_run_says_tells_how_large_a_batch_was(monkeypatch):
    """Two runs that differ in batches alone, of all samples and of none: only what the model gets right differs."""
    told, sizes = [], []
    for share in (0.0, 1.0):

        def drawn(key, nonce, samples, rate, share=share):
            sizes.append(share * samples)
            return np.full(samples, share)

        monkeypatch.setattr(prefix_sums, "sampled", drawn)
        told.append(dict(leaves(run_cohort(replace(BASE, num_rounds=4)).outcome.document())))
    assert min(sizes) == 0.0 < max(sizes), "the batches were of all samples and of none"
    ours, theirs = told
    assert ours.keys() == theirs.keys()
    differ = {name for name in ours if ours[name] != theirs[name] and ours[name] == ours[name]}
    assert {name.rsplit(".", 1)[-1] for name in differ if not name.startswith(CLIPPING)} <= FIGURES
    assert any(name.endswith("accuracy") for name in differ), "the model did differ"


@pytest.mark.usefixtures("small_rehearsals")
def test_a_trusted_curator_trains_on_a_table_with_secret_keys(tmp_path):
    """One computer with all rows: nothing else shows every row, and the ledger counts what needs no secret."""
    schema = Schema(
        columns={"age": Column(kind="number", bounds=(0, 100))}, label=Label(column="ill", classes=2), reviewed=True
    )
    (tmp_path / "rows.csv").write_text(
        "age,ill\n" + "".join(f"{age % 90},{int(age % 90 > 45)}\n" for age in range(200))
    )
    known = {"schema": schema, "real": True, "strategy": "trusted-sgd", "batch_selection": "poisson", "num_rounds": 8}
    result = fit(tmp_path / "rows.csv", epsilon=2.0, ledger=tmp_path / "ledger", **known)
    found = result.guarantee.amplified
    assert (found.slots, found.proved) == (8, True)
    assert found.epsilon <= 2.0
    with SQLiteLedger(tmp_path / "ledger").exclusive() as page:
        spent = page.account().spent.mu
    assert spent == pytest.approx(result.guarantee.mu)
    assert found.epsilon == pytest.approx(poisson_epsilon(spent, found.rate, 8, 1e-5), rel=1e-2)
    for other, complaint in (({"evaluate": "private"}, "evaluation"), ({"scale": "private"}, "scale")):
        with pytest.raises(ConfigurationError, match=complaint):
            fit(tmp_path / "rows.csv", epsilon=2.0, ledger=tmp_path / "other", **known, **other)
    assert not (tmp_path / "other").exists()


def test_more_noise_makes_all_steps_together_shorter_and_more_rounds_do_not():
    def travel(**changes):
        experiment = prepare(replace(BASE, mu=0.0, **changes))
        return experiment.values.learning_rate * experiment.num_rounds

    lengths = [travel(epsilon=epsilon) for epsilon in (0.5, 2.0, 8.0)]
    assert lengths[0] < 0.7 * lengths[1] < 0.5 * lengths[2]
    assert travel(num_rounds=80) == pytest.approx(lengths[1], rel=0.2)
    assert travel(epsilon=1000.0) == travel(epsilon=500.0), "no longer than without noise"
