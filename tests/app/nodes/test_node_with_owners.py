"""A real client whose operator says whose its samples are."""

import json
import math

import numpy as np
import pytest
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.ledger_views import ledger_document, ledger_guarantee, ledger_lines
from murmurfl.app.nodes.node_app import describe
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients.messages import statement_entries
from murmurfl.clients.records.client_records import OwnedSamples
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, protocol, read_ledger
from murmurfl.privacy.setting import by_key, settings_of

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.schemas import write_schema

pytestmark = pytest.mark.usefixtures("quick_disk")

OWNERS, FEATURES = 12, 4
BASE = {
    "client": "clinic",
    "ledger": "ledger.sqlite",
    "clip-norm": 1.0,
    "batch-size": 3,
    "mu": 1.0,
    "samples": "samples.npz",
    "schema": "schema.toml",
    "num-records": OWNERS,
    "samples-per-owner": 3,
}


def chance(key):
    return np.random.Generator(np.random.Philox(key=key))


def write_samples(folder, counts, key=1, **arrays):
    """An operator's file with so many samples of each owner; what is the third owner's depends on the key."""
    names = np.repeat([f"patient {i}" for i in range(len(counts))], counts)
    features, labels = chance(0).normal(size=(len(names), FEATURES)), np.zeros(len(names), int)
    third = names == "patient 2"
    features[third], labels[third] = chance(key).normal(size=(third.sum(), FEATURES)), 1
    given = {"features": features, "labels": labels, "owners": names, **arrays}
    np.savez(folder / "samples.npz", **{name: value for name, value in given.items() if value is not None})


def made(folder, **changes):
    values = {**BASE, **by_key(changes, settings_of(NodeConfig))}
    (folder / "node.toml").write_text(toml_document(values))
    write_schema(folder / "schema.toml", (FEATURES,), owner="owners" if values["samples-per-owner"] else "")
    if not (folder / "ledger.sqlite").exists():
        SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=2.0, delta=1e-5)
    return NodeConfig.read(folder / "node.toml").make_client()


FULL = {"strategy": "full-batch", "batch_size": 1, "max_participations": 2}
COUNTS = [2, 1, 5, 3, 9, 1, 1, 2, 3, 3, 4, 1]


def test_owners_are_what_is_admitted_counted_and_claimed(tmp_path):
    write_samples(tmp_path, COUNTS)
    client = made(tmp_path)
    assert isinstance(client.samples, OwnedSamples)
    policy = client.privatizer.policy
    assert (policy.samples_per_owner, client.privatizer.num_samples, policy.max_participations) == (3, OWNERS, 4)
    said = describe(client)
    assert "up to 4 releases of 3 places of owners a run" in said
    assert "for replacement of all samples of one owner on one client by others of that owner, against the" in said
    assert "Of each owner the first 3 samples are used, and any others left out." in said
    point = [np.zeros((2, FEATURES)), np.zeros(2)]
    _, examples, _ = client.fit([*point, *point], training_config())
    assert examples == 3
    entries = statement_entries(client.privatizer, "s")
    assert (entries["unit"], entries["samples-per-owner"], entries["samples-used"]) == ("owner", 3, 3)
    summary = read_ledger(tmp_path / "ledger.sqlite")
    assert ledger_guarantee(summary).unit == "owner"
    assert any("3 owners used up" in line for line in ledger_lines(summary, tmp_path))
    assert "one owner on one client" in json.dumps(ledger_document(summary, tmp_path))


def test_nothing_that_is_said_depends_on_how_many_samples_an_owner_has(tmp_path):
    """The log, the statement and the shapes: of one sample, of more than are used, and of another owner's."""
    said = []
    for key, third in enumerate((COUNTS[2], 1, 400)):
        folder = tmp_path / str(key)
        folder.mkdir()
        write_samples(folder, [*COUNTS[:2], third, *COUNTS[3:]], key=key)
        client = made(folder)
        point = [np.zeros((2, FEATURES)), np.zeros(2)]
        arrays, examples, sent = client.fit([*point, *point], training_config())
        said.append(
            (describe(client), [a.shape for a in arrays], examples, sent, statement_entries(client.privatizer, "s"))
        )
    assert said[0] == said[1] == said[2]


def test_a_file_that_does_not_say_whose_its_samples_are_is_refused(tmp_path):
    for owners, complaint in (
        (None, "Expected an .npz with the arrays features, labels and owners"),
        (np.arange(3), "Expected inputs and targets of one length, got 3 and 35"),
    ):
        write_samples(tmp_path, COUNTS, owners=owners)
        with pytest.raises(ConfigurationError, match=complaint):
            made(tmp_path)


@pytest.mark.parametrize(("most", "owner"), [(3, ""), (0, "owners")])
def test_file_and_schema_say_the_same_of_owners(tmp_path, most, owner):
    write_samples(tmp_path, COUNTS)
    write_schema(tmp_path / "other.toml", (FEATURES,), owner=owner)
    with raises(ConfigurationError, "conflict", "samples-per-owner"):
        made(tmp_path, samples_per_owner=most, schema="other.toml")


def test_added_missing_and_moved_owners_change_no_message(tmp_path):
    """And the ledger, which knows owners by their names, lets a client go on with rows that moved."""
    said, point = [], [np.zeros((2, FEATURES)), np.zeros(2)]
    for counts in (COUNTS, [*COUNTS, 2], COUNTS[:-1]):
        folder = tmp_path / str(len(counts))
        folder.mkdir()
        write_samples(folder, counts)
        client = made(folder)
        _, examples, sent = client.fit([*point, *point], training_config())
        said.append((describe(client), examples, sent, statement_entries(client.privatizer, "s")))
    assert said[0] == said[1] == said[2]
    with np.load(tmp_path / str(len(COUNTS)) / "samples.npz") as file:
        held = dict(file)
    order = np.random.default_rng(3).permutation(len(held["labels"]))
    np.savez(tmp_path / str(len(COUNTS)) / "samples.npz", **{name: values[order] for name, values in held.items()})
    _, examples, _ = made(tmp_path / str(len(COUNTS))).fit([*point, *point], training_config(ack=1))
    assert examples == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples-per-owner": -1}, "Expected samples-per-owner to be an integer >= 0"),
        (
            {"strategy": "online", "learning-rate": 0.1},
            "Expected samples-per-owner to be 0 with strategy = 'online', which does not clip by owner, got 3.",
        ),
        (
            {"centring": "private", "centring.norm": 1.0},
            "Expected samples-per-owner to be 0 with centring, which counts samples",
        ),
    ],
)
def test_what_would_count_samples_is_refused_beside_owners(tmp_path, changes, complaint):
    write_samples(tmp_path, COUNTS)
    with pytest.raises(ConfigurationError, match=complaint):
        made(tmp_path, **changes)


def test_owners_of_a_built_in_task_are_for_simulation(tmp_path):
    task = {"samples": "", "schema": "", "num-records": 0, "task": "digits", "num-partitions": 4, "partition-id": 1}
    with raises(
        ConfigurationError,
        "missing",
        "samples-per-owner",
        match="Expected data that say whose they are with samples-per-owner = 3",
    ):
        made(tmp_path, **task)


def test_a_ledger_that_was_used_with_samples_is_not_used_with_owners(tmp_path):
    write_samples(tmp_path, [1] * OWNERS)
    client = made(tmp_path, samples_per_owner=0)
    point = [np.zeros((2, FEATURES)), np.zeros(2)]
    client.fit([*point, *point], training_config())
    for most in (1, 3):
        with raises(
            LedgerError, "mismatch", "owners", match="Expected the 3 places of owners this ledger was used with"
        ):
            made(tmp_path, samples_per_owner=most)
    assert ledger_guarantee(read_ledger(tmp_path / "ledger.sqlite")).unit == "sample"


def test_a_node_sets_places_aside_for_its_evaluation(tmp_path):
    write_samples(tmp_path, COUNTS)
    client = made(tmp_path, **FULL, private_evaluation=0.2, held_out=0.25)
    part = client.parts["evaluation"]
    assert (client.privatizer.num_samples, part.samples, part.privatizer.num_samples) == (9, 3, OWNERS)
    assert part.privatizer.policy.samples_per_owner == 3
    assert math.hypot(part.privatizer.plan.mu, client.privatizer.plan.mu) == pytest.approx(1.0)
    point = [np.zeros((2, FEATURES)), np.zeros(2)]
    _, examples, _ = client.fit(point, training_config())
    assert examples == 9
    asked = {protocol.RELEASE_OF: protocol.OF_EVALUATION}
    _, examples, sent = client.fit(point, training_config(session="e", **asked))
    assert (examples, sent[protocol.OF_OWNERS], sent[protocol.HELD_OUT]) == (3, 1, 1)
    assert ledger_guarantee(read_ledger(tmp_path / "ledger.sqlite")).unit == "owner"


def test_a_node_weighs_gradients_as_its_schema_says_or_refuses(tmp_path):
    write_samples(tmp_path, COUNTS)
    made(tmp_path, **FULL)
    schema = tmp_path / "schema.toml"
    schema.write_text(schema.read_text().replace("[label]", "[label]\nclass_weights = [1, 4]"))
    config = NodeConfig.read(tmp_path / "node.toml")
    assert config.make_model(FEATURES, 2).class_weights.tolist() == [0.25, 1.0]
    assert config.make_client().privatizer.plan == made(tmp_path, **FULL).privatizer.plan, "the bound is the same"
    schema.write_text(schema.read_text().replace("[label]", "[label]\nclass_weights = [1, 4]"))
    (tmp_path / "node.toml").write_text(toml_document(BASE))
    with raises(ConfigurationError, "conflict", "strategy", match="class_weights"):
        NodeConfig.read(tmp_path / "node.toml").make_client()


def test_full_batches_are_sums_over_owners(tmp_path):
    write_samples(tmp_path, COUNTS)
    client = made(tmp_path, strategy="full-batch", batch_size=1, max_participations=2)
    _, examples, _ = client.fit([np.zeros((2, FEATURES)), np.zeros(2)], training_config())
    assert examples == OWNERS
    assert "releases of the sum of all owners a run" in describe(client)
