"""Owners in a run: the same model on every engine, what is said of it, and what a plan says of a person."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_lines, audit_run
from murmurfl.app.commands.main import cli
from murmurfl.app.data.partition import OwnedShards, Parts
from murmurfl.app.data.task import Dataset
from murmurfl.app.engines.device.device_block import check_on_device
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.planning.noise_plans import compare_mechanisms, loss_of_person, losses_of_persons, noise_guarantee
from murmurfl.app.planning.plan_answers import base_of_numbers, base_of_run
from murmurfl.app.planning.plan_lines import persons_table, plan_lines
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.run_guarantees import configured_figures, run_guarantee
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, Guarantee, rounded_up
from typer.testing import CliRunner

from tests.harness.errors import raises

BASE = RunConfig(
    num_rounds=4,
    clients_per_round=6,
    batch_size=8,
    checkpoint=False,
    mu=1.0,
    learning_rate=0.05,
    clip_norm=1.0,
    samples_per_owner=3,
)
FULL = replace(BASE, strategy="full-batch", batch_size=8, num_rounds=2)
CONFIGS = {
    "mu2": replace(BASE, lost_replies=0.3),
    "full-batch": FULL,
    "secret order": replace(BASE, strategy="noisy-sgd", batch_selection="shuffled"),
    "sums": replace(BASE, trust="secure-aggregation"),
    "evaluated": replace(FULL, private_evaluation=0.1, score_bins=0),
}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name in ("full-batch", "evaluated") else [pytest.mark.long])
        for name, config in CONFIGS.items()
    ],
)
def test_the_model_is_the_same_on_every_engine(config):
    together, alone = run_cohort(config), run_in_process(config)
    for ours, theirs in zip(together.parameters, alone.parameters, strict=True):
        assert np.array_equal(ours, theirs)
    assert together.evaluation == alone.evaluation


def held_out_shares(result):
    """Each owner's share of right predictions, of those whom clients set aside."""
    experiment, shares = result.experiment, []
    for shard, trained in zip(experiment.shards, experiment.sizes, strict=True):
        features, labels, present = shard[trained : len(shard)]
        scores = np.asarray(experiment.model.logits(result.parameters, features.reshape(-1, features.shape[-1])))
        right = scores.argmax(axis=1).reshape(labels.shape) == labels
        shares += ((right & present).sum(axis=1) / present.sum(axis=1)).tolist()
    return shares


def test_an_evaluation_is_the_mean_over_owners_who_were_set_aside():
    result = run_cohort(replace(CONFIGS["evaluated"], mechanism="none"))
    shares, found = held_out_shares(result), result.evaluation
    assert found.held_out
    assert found.owners == pytest.approx(len(shares), abs=1e-3)
    assert found.accuracy == pytest.approx(np.mean(shares), abs=1e-5)
    assert len(set(shares)) > 2  # some owners are right in part
    assert sum(result.experiment.sizes) + len(shares) == sum(map(len, result.experiment.shards))
    assert result.strategy.history[0].samples == sum(result.experiment.sizes[:6]), "six of ten are asked"
    outcome = result.outcome
    assert outcome.private_evaluation.owners == found.owners
    assert f"about {found.owners:,.0f} held-out owners" in " ".join(summary_lines(outcome, Path()))


def test_a_result_says_that_owners_are_protected():
    document = run_cohort(FULL).outcome.document()
    assert document["privacy"]["unit"] == "owner"
    assert "every 3 of a client's stand for one owner's" in document["privacy"]["sentence"]


def dataset(owner_of):
    rows = np.arange(8, dtype=np.float32)[:, None]
    labels = np.zeros(8, np.int64)
    return Dataset(rows, labels, rows, labels, 2, owner_of=owner_of)


def test_data_that_say_whose_samples_are_are_grouped_so_on_each_client():
    parts = Parts.together([np.array([0, 1, 2, 3]), np.array([7, 6, 5, 4])])
    shards = OwnedShards(dataset(np.array([5, 5, 9, 5, 5, 9, 9, 9])), parts, 2, 7)
    assert shards.sizes.tolist() == [2, 2]
    for samples in (shards[1], shards.real(1, b"a secret of a machine", 2)):  # in any order
        features, _, present = samples[0:2]
        assert sorted(features[:, :, 0].tolist()) == [[4.0, 4.0], [7.0, 6.0]]
        assert sorted(present.tolist()) == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"strategy": "online", "mechanism": ""},
            "Expected samples-per-owner to be left at 0 with strategy = 'online'",
        ),
        (
            {"strategy": "auto", "learning_rate": 0.0},
            "Expected samples-per-owner to be left at 0 with strategy = 'auto'",
        ),
        ({"centring": "private"}, "with samples-per-owner: the mean is one of samples, got 'private'"),
        ({"batch_size": 6000}, r"Expected batch-size <= \d+, the owners of all clients, got 6000"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        prepare(replace(BASE, **changes))


def test_a_device_computes_no_owners():
    with raises(ConfigurationError, "conflict", "samples-per-owner", got=3):
        check_on_device(prepare(replace(BASE, noise_quality="fast")))


def test_of_real_clients_owners_are_said_only_if_every_one_says_so():
    experiment = prepare(BASE)
    figures = configured_figures(experiment)

    def unit(statements):
        """The unit; of samples the sentence says that an owner's stay the owner's, for others cost twice the mu."""
        guarantee = run_guarantee(experiment, figures, deployed=True, statements=statements)
        replaced = "by others of that owner" if guarantee.unit == "owner" else "replaced by one of the same owner"
        assert replaced in guarantee.sentence
        return guarantee.unit

    said = {"mu-guaranteed": 1.0, "mechanism": "decay", "unit": "owner", "samples-per-owner": 3}
    everybody = {str(i): said for i in range(BASE.num_clients)}
    assert unit(everybody) == "owner"
    assert unit(dict(list(everybody.items())[1:])) == "sample"  # one did not answer
    assert unit({**everybody, "0": {**said, "unit": "sample"}}) == "sample"
    assert unit(None) == "sample"  # what the server expects of them proves nothing


@pytest.mark.long
@pytest.mark.parametrize("config", [BASE, FULL], ids=["mu2", "full-batch"])
def test_the_audit_replaces_all_samples_of_an_owner(config):
    found = audit_run(replace(config, num_rounds=2, max_participations=0), 60)
    assert not found.violated
    assert found.canary_mu == pytest.approx(1.0, rel=1e-3)  # the canary uses all of the claim
    assert "all samples of one owner on one client replaced" in audit_lines(found)[0]


REQUEST = {"num-clients": 4, "num-rounds": 5, "batch-size": 4, "epsilon": 1.0}


def test_a_plan_of_owners_says_owners():
    plan = compare_mechanisms(base_of_numbers(20, 10, {**REQUEST, "samples-per-owner": 3}))
    guarantee, values = noise_guarantee(plan), 10 * 5
    assert guarantee.unit == "owner"
    assert "when one owner does." in plan_lines(plan)[0][0]
    assert base_of_run(BASE).policy.samples_per_owner == 3
    found = losses_of_persons(guarantee, values)
    (row,) = persons_table(guarantee, found).texts()
    assert (row["clients"], row["samples on each"]) == ("3", "all")
    (loss,) = losses_of_persons(guarantee, values, samples=7).values()  # however many they are, they are one row
    assert loss.mu == guarantee.mu


def test_a_plan_says_what_becomes_of_a_person_with_samples_and_with_clients():
    guarantee = noise_guarantee(compare_mechanisms(base_of_numbers(20, 10, REQUEST)))
    several, spread = losses_of_persons(guarantee, 50).values()
    assert several.mu == pytest.approx(3 * guarantee.mu)
    assert spread.mu == pytest.approx(math.sqrt(3) * guarantee.mu)
    asked = losses_of_persons(guarantee, 50, 4, 2)
    assert asked[4, 2].mu == pytest.approx(4 * guarantee.mu)
    (row,) = persons_table(guarantee, asked).texts()
    assert (row["clients"], row["samples on each"], row["mu"]) == ("4", "2", rounded_up(asked[4, 2].mu))


def test_what_noise_does_not_reach_over_is_not_vouched_for():
    known = Guarantee(6.0, 1e-5, "noise")
    sure, doubtful = (loss_of_person(known, 1000, samples=samples) for samples in (2, 4))
    assert sure.mu == 12.0
    assert math.isinf(doubtful.mu)
    assert persons_table(known, {(1, 4): doubtful}).texts()[0]["mu"] == "not vouched for"
    assert doubtful.document(1e-5)["mu"] is None
    many = loss_of_person(Guarantee(3.0, 1e-5, "noise"), 1000, clients=9)
    assert many.mu == 9.0  # each client's own noise reaches over its own part
    once = Guarantee(3.0, 1e-5, "noise", trust="trusted-server")
    assert math.isinf(loss_of_person(once, 1000, clients=9).mu)  # one noise must reach over all of it


@pytest.mark.long
def test_the_figure_of_the_documentation_is_what_the_command_prints():
    page = (Path(__file__).parents[3] / "docs" / "owners.md").read_text()
    command = re.search(r"murmurfl plan (.*)", page)[1]
    shown = re.search(r"samples on each .*\n.*\n\| (.*) \|", page)[1].split(" | ")
    printed = CliRunner().invoke(cli, ["plan", *command.split()]).output
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines()]
    assert shown in rows
