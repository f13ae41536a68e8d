"""A differential audit: planted defects are found by the record that shows them, and neighbours are neighbours."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.auditing import differential
from murmurfl.app.auditing.differential import audit_app, audit_node
from murmurfl.app.auditing.neighbours import OWNERS, ROWS, made_up_rows, neighbours, written
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.node_app import read_node
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients import Mu2Client, Schema
from murmurfl.clients.records import client_records
from murmurfl.clients.records.client_records import Records, Rows, file_items
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import InvalidRecordError

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("quick_disk")

TABLE = """
reviewed = true
{owner}
[label]
column = "ill"
classes = ["no", "yes"]
[columns.age]
kind = "number"
bounds = [0, 100]
[columns.children]
kind = "integer"
bounds = [0, 9]
missing = 0
[columns.town]
kind = "category"
values = ["north", "south"]
"""
ARRAYS = """
reviewed = true
{owner}
[label]
classes = 3
[[inputs]]
kind = "number"
shape = [4]
bounds = [-1, 1]
"""
FULL_BATCH = {"strategy": "full-batch", "batch-size": 1, "max-participations": 50}
BESIDE = {"centring": "private", "centring.norm": 2.0, "evaluation.share": 0.2, "evaluation.held-out": 0.0}


def node(folder, samples="clinic.npz", *, owner="", **changes):
    """An operator's file; there are no data and there is no ledger, which an audit does not need."""
    schema = ARRAYS if samples.endswith(".npz") else TABLE
    (folder / "schema.toml").write_text(schema.format(owner=f'owner = "{owner}"' if owner else ""))
    values = {
        "client": "clinic",
        "ledger": "ledger.sqlite",
        "samples": samples,
        "schema": "schema.toml",
        "num-records": 500,
    }
    values |= {"clip-norm": 1.0, "batch-size": 40, "mu": 1.0}
    (folder / "node.toml").write_text(toml_document({**values, **changes}))
    return read_node(folder / "node.toml")


def config_schema(folder):
    return Schema.read_file(folder / "schema.toml")


@pytest.mark.long
def test_opposite_features_attain_the_means_sensitivity(tmp_path):
    found = audit_node(node(tmp_path, **FULL_BATCH, **BESIDE))
    assert not found.refuted
    assert found.worst == pytest.approx(1.0, abs=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.toml", "schema.toml"]


class Planted:
    """Defects of a client; each changes one thing that is right."""

    @staticmethod
    def types_of_the_column(patch):
        """Whole numbers are labels only if all of them are, as when a type is a column's."""
        read = client_records.npz_rows

        def invalid(number):
            raise InvalidRecordError("a label of another type")

        def typed(path, *, owners):
            rows = read(path, owners=owners)
            return Rows(len(rows), invalid, kind="row") if np.load(path)["labels"].dtype.kind == "f" else rows

        patch.setattr(client_records, "npz_rows", typed)

    @staticmethod
    def verdict_of_the_first_record(patch):
        def log(self):
            if not self.fits[0]:
                raise ConfigurationError("Expected records of this shape, got others.")

        patch.setattr(Records, "log", log)

    @staticmethod
    def label_out_of_range_refused(patch):
        def log(self):
            if any("none of the classes" in reason for reason in self.reasons):
                raise ConfigurationError("Expected labels from 0 to 2.")

        patch.setattr(Records, "log", log)

    @staticmethod
    def scale_of_the_data(patch):
        get = Records.__getitem__

        def scaled(self, chosen):
            inputs, labels = get(self, chosen)
            kept = [record.inputs for record in self._kept if record is not None]
            with np.errstate(all="ignore"):
                return inputs / np.abs(kept).min(), labels

        patch.setattr(Records, "__getitem__", scaled)

    @staticmethod
    def count_in_a_reply(patch):
        entries = Mu2Client.public_entries
        patch.setattr(
            Mu2Client, "public_entries", lambda self, of: {**entries(self, of), "fit": int(self.samples.fits.sum())}
        )

    @staticmethod
    def half_the_noise(patch):
        honest = NodeConfig.make_client

        def client(*arguments):
            made = honest(*arguments)
            made.privatizer.plan = replace(made.privatizer.plan, noise_std=made.privatizer.plan.noise_std / 2)
            return made

        patch.setattr(NodeConfig, "make_client", client)

    @staticmethod
    def failure_of_a_batch(patch):
        """A record that does not fit takes its whole batch with it."""
        get = Records.__getitem__

        def together(self, chosen):
            if not self.fits[chosen.start // 6 * 6 : chosen.start // 6 * 6 + 6].all():
                raise InvalidRecordError("a batch that cannot be stacked")
            return get(self, chosen)

        patch.setattr(Records, "__getitem__", together)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("defect", "record", "differs"),
    [
        (Planted.types_of_the_column, "half a number for a label", ""),
        (Planted.verdict_of_the_first_record, "a label far from all others", "does not start: ConfigurationError"),
        (Planted.label_out_of_range_refused, "a label far from all others", "does not start: ConfigurationError"),
        (Planted.scale_of_the_data, "zero everywhere", ""),
        (Planted.count_in_a_reply, "not a number", "fit of reply"),
        (Planted.half_the_noise, "a record at the ends of its bounds", ""),
        (Planted.failure_of_a_batch, "infinity", ""),
    ],
)
def test_a_planted_defect_is_found(tmp_path, monkeypatch, defect, record, differs):
    config = node(tmp_path)
    tried = [one for one in neighbours(config_schema(tmp_path), lines=False) if one.name in ("the same record", record)]
    monkeypatch.setattr(differential, "neighbours", lambda *_, **__: tried)
    defect(monkeypatch)
    found = audit_node(config)
    assert found.refuted
    assert found.found[0].ratio == 0, "the same record must move nothing"
    (one,) = (one for one in found.found if one.record == record)
    assert one.refutes
    assert any(differs in what for what in one.differs) if differs else one.ratio > 1


@pytest.mark.more_cases
def test_samples_that_are_refused_because_of_a_record_are_found(tmp_path, monkeypatch):
    """Where what a project hands over is looked at, before there is a client."""
    pytest.importorskip("sklearn")
    (tmp_path / f"refused_{tmp_path.name}.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(differential, "handed_over", lambda _, rows: [("list", rows)])
    looked_at = differential.items_of

    def picky(found):
        if any(np.shape(inputs) != (3,) for inputs, _ in found):
            raise ConfigurationError("Expected inputs of one length.")
        return looked_at(found)

    monkeypatch.setattr(differential, "items_of", picky)
    found = {one.record: one for one in audit_app(f"refused_{tmp_path.name}:app").found}
    assert found["inputs too long"].differs == ("does not start: ConfigurationError: Expected inputs of one length.",)
    assert not found["a label far from all others"].refutes


PROJECT = """
from murmurfl.clients import Label, LinearEstimator, Part, Schema, private_client_app
from sklearn.linear_model import SGDClassifier

SCHEMA = Schema(inputs=(Part(shape=(3,), bounds=(-1, 1)),), label=Label(classes=2))
MODEL = LinearEstimator(SGDClassifier(), num_features=3, classes=(0, 1))
app = private_client_app(MODEL, samples=lambda context: 1 / 0, mu=1.0, rounds=2, schema=SCHEMA)
"""


@pytest.mark.long
def test_secure_aggregation_is_audited_without_masks_and_says_so(tmp_path):
    sums = {"trust": "secure-aggregation", "trust.min-honest": 3, "trust.min-cohort": 5}
    sums |= {"roster": "roster.toml", "roster-digest": "0" * 32, "signing-key": "key", "budget-local-mu": 9.0}
    found = audit_node(node(tmp_path, **sums))
    assert not found.refuted
    assert "without masks" in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "setting", "complaint"),
    [
        (
            {"app": "package:app", "clip-norm": 1.0, "max-participations": 3},
            None,
            "all data of the client are its unit",
        ),
        (
            {"task": "digits", "num-partitions": 2, "partition-id": 0, "batch-size": 4, "clip-norm": 1.0},
            "task",
            "are public",
        ),
    ],
)
def test_what_has_no_records_of_its_own_is_refused(tmp_path, changes, setting, complaint):
    values = {"client": "clinic", "ledger": "ledger.sqlite", "mu": 1.0, **changes}
    (tmp_path / "node.toml").write_text(toml_document(values))
    with raises(ConfigurationError, "unsupported", setting, match=complaint):
        audit_node(read_node(tmp_path / "node.toml"))


@pytest.mark.parametrize("schema", [TABLE, ARRAYS])
@pytest.mark.parametrize("owner", ["", "patient"])
def test_neighbours_differ_in_one_record_or_in_one_owners(tmp_path, schema, owner):
    (tmp_path / "schema.toml").write_text(schema.format(owner=f'owner = "{owner}"' if owner else ""))
    read = Schema.read_file(tmp_path / "schema.toml")
    first, *others = neighbours(read, lines=bool(read.columns))
    rows = first.rows
    assert len(rows) == ROWS
    assert not owner or len({read.owner_of(row) for row in rows}) == OWNERS
    for neighbour in others:
        changed = [i for i, row in enumerate(neighbour.rows) if i < ROWS and row is not rows[i]]
        if not neighbour.name.startswith("an owner"):
            assert len(neighbour.rows) == ROWS
            assert len(changed) <= 1
            continue
        left = [[id(row) for row in some if any(row is one for one in rows)] for some in (rows, neighbour.rows)]
        gone = {read.owner_of(row) for row in rows if id(row) not in left[1]}
        assert len(gone) <= 1


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet", ".npz"])
def test_what_is_written_is_read_as_it_was_made_up(tmp_path, ending):
    (tmp_path / "schema.toml").write_text((ARRAYS if ending == ".npz" else TABLE).format(owner=""))
    schema, path = Schema.read_file(tmp_path / "schema.toml"), Path(tmp_path / f"samples{ending}")
    assert written(schema, made_up_rows(schema), path)
    items = file_items(path, schema)
    for number, row in enumerate(made_up_rows(schema)):
        expected, got = schema.read(row), schema.read(items[number])
        assert np.array_equal(got.inputs, expected.inputs)
        assert np.array_equal(got.label, expected.label)


def test_a_complex_number_in_one_record_leaves_all_others_as_they_are(tmp_path):
    (tmp_path / "schema.toml").write_text(ARRAYS.format(owner=""))
    schema = Schema.read_file(tmp_path / "schema.toml")
    row = np.array([0.5, 0.25, 0.0, -1.0])
    assert np.array_equal(schema.read((row.astype(complex), 1 + 0j)).inputs, row)
    with pytest.raises(InvalidRecordError):
        schema.read((row + 1j, 1))
