"""A client's operator's file: what it may say, the tables it may have, and the client it makes."""

import os
import stat
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from murmurfl.app import client_app
from murmurfl.app.data.table_task import folder_schema
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.models import make_model
from murmurfl.app.nodes.connection import Connection
from murmurfl.app.nodes.node_app import describe, read_node
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig, configured_client
from murmurfl.app.nodes.supernode import repeating_the_last_answer
from murmurfl.clients import (
    Column,
    FullBatchClient,
    Label,
    Mu2Client,
    NoisySGDClient,
    OnlineClient,
    Schema,
    UpdateNode,
    numpy_client_app,
)
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.clients.nodes.operators_file import NODE_CONFIG_KEY, NODE_CONFIG_VARIABLE, operators_file
from murmurfl.clients.records.drafting import document
from murmurfl.clients.records.image_folders import ImageFolder
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, SystemKeys, gdp_mu, protocol
from murmurfl.privacy.files import write_private
from murmurfl.privacy.release.clipping import RowBound
from murmurfl.privacy.setting import by_key, settings_of

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node
from tests.harness.schemas import write_samples, write_schema

BASE = {
    "client": "clinic",
    "ledger": "ledger.sqlite",
    "clip-norm": 2.0,
    "batch-size": 32,
    "mu": 4.0,
    "task": "digits",
    "num-partitions": 4,
    "partition-id": 1,
}
FULL_BATCH = {"strategy": "full-batch", "batch-size": 1, "max-participations": 7}
OWN = {key: value for key, value in BASE.items() if key not in ("task", "num-partitions", "partition-id")}


def write(folder, values=BASE, **changes):
    values = {**values, **by_key(changes, settings_of(NodeConfig))}
    path = folder / "node.toml"
    path.write_text(toml_document(values))
    return path


def made(folder, **changes):
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    return NodeConfig.read(write(folder, **changes))


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    configured_client.cache_clear()
    monkeypatch.delenv(NODE_CONFIG_VARIABLE, raising=False)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mu-budget": 3.0}, "Expected known node-config keys, got mu-budget"),
        ({"mu": "4"}, "Expected mu to be a finite number, got '4'"),
        ({"mu": -1.0}, "Expected mu to be a number >= 0 (0: unset), got -1.0."),
        ({"clip-norm": 0.0}, "Expected clip-norm to be a number > 0"),
        ({"clip-norm": float("inf")}, "Expected clip-norm to be a finite number"),
        ({"batch-size": 0}, "Expected batch-size to be an integer >= 1"),
        ({"batch-size": True}, "Expected batch-size to be an integer"),
        ({"epsilon": 4.0}, "Expected mu or epsilon, got both: mu = 4.0, epsilon = 4.0."),
        ({"mu": 0.0, "epsilon": -4.0}, "Expected epsilon to be a number >= 0 (0: mu), got -4.0."),
        ({"mu": 0.0, "epsilon": 99.0}, "Expected mu <= 4, the budget of all runs in the ledger"),
        ({"budget-mu": 5.0}, "Expected budget_mu = 4"),
        ({"mu": 4.5}, "Expected mu <= 4, the budget of all runs in the ledger"),
        ({"delta": 2.0}, "Expected delta to be a number > 0 and < 1"),
        ({"partition-id": 4}, "Expected partition-id to be from 0 to num-partitions - 1 = 3"),
        ({"strategy": "sgd"}, "Expected strategy to be a known name"),
        (
            {"strategy": "tree-momentum"},
            "Expected strategy to be one for real nodes, one of mu2, trusted-mu2, ",
        ),
        (
            {**FULL_BATCH, "batch-size": 2},
            "Expected batch-size 1 with batch-selection 'full_batch', whose releases are sums",
        ),
        (
            {"strategy": "full-batch", "batch-size": 1},
            "Expected max-participations to be the number of rounds with strategy = 'full-batch'",
        ),
        (
            {**FULL_BATCH, "passes": 2},
            "Expected passes to be 1 with strategy = 'full-batch': every release has all samples",
        ),
        ({**FULL_BATCH, "mechanism": "cancelling"}, "Expected mechanism 'independent' for full batches"),
        ({"mechanism": "none"}, "Expected mechanism to be a known name"),
        ({"model.augmentations": 2}, "Expected model.augmentations to be 0 with a model that is no network of images"),
        ({"strategy": "trusted-mu2", "passes": 3}, "Expected passes to be 1 with strategy = 'trusted-mu2'"),
        ({"noise-quality": "fast"}, "Expected known node-config keys, got noise-quality"),
        ({"samples": "mine.npz"}, "Expected task to be set, or `samples`, and not both"),
        ({"learning-rate": 0.1}, "Expected learning-rate to be unset, for its clients take no steps of their own"),
        ({"client": ""}, "Expected client to be set"),
    ],
)
def test_an_impossible_configuration_is_refused_with_one_line(tmp_path, changes, complaint):
    path = write(tmp_path, {**BASE, **changes})
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    with pytest.raises(ConfigurationError) as caught:
        NodeConfig.read(path).make_client()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policys_refusal_names_the_key_of_the_file(tmp_path):
    path = write(tmp_path, {**BASE, **FULL_BATCH, "batch-size": 2})
    with pytest.raises(ConfigurationError) as caught:
        NodeConfig.read(path)
    assert (caught.value.setting, caught.value.got) == ("batch-size", 2)


def test_a_missing_key_is_named(tmp_path):
    path = write(tmp_path, {key: value for key, value in BASE.items() if key != "clip-norm"})
    with raises(ConfigurationError, "missing", "clip-norm"):
        NodeConfig.read(path)


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path):
    (tmp_path / "node.toml").write_text("mu = = 3")
    with raises(ConfigurationError, "unreadable", match="Expected valid TOML"):
        NodeConfig.read(tmp_path / "node.toml")
    with raises(ConfigurationError, "unreadable", match=r"Expected a node configuration at .*No such file"):
        NodeConfig.read(tmp_path / "other.toml")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_file_anybody_may_change_is_no_operators_file(tmp_path):
    path = write(tmp_path)
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with raises(ConfigurationError, "insecure", match="chmod go-w"):
        NodeConfig.read(path)


def test_without_its_ledger_a_client_is_refused_and_none_is_made(tmp_path):
    config = NodeConfig.read(write(tmp_path))
    with raises(LedgerError, "not-found", match="Expected a ledger at"):
        config.make_client()
    assert not (tmp_path / "ledger.sqlite").exists()


def test_the_budget_is_the_ledgers_whatever_the_file_says_later(tmp_path):
    made(tmp_path)
    with raises(ConfigurationError, "mismatch", "budget_mu"):
        NodeConfig.read(write(tmp_path, budget_mu=40.0)).make_client()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, Mu2Client),
        ({"strategy": "noisy-sgd"}, NoisySGDClient),
        (FULL_BATCH, FullBatchClient),
        ({"strategy": "online", "learning-rate": 0.1}, OnlineClient),
        ({"passes": 2}, Mu2Client),
    ],
)
def test_a_real_client_has_exact_noise_system_keys_and_a_durable_ledger(tmp_path, changes, kind):
    client = made(tmp_path, **changes).make_client()
    assert type(client) is kind
    privatizer = client.privatizer
    assert privatizer.policy.noise_quality == "exact"
    assert isinstance(privatizer._keys, SystemKeys)
    assert not privatizer.simulated
    assert privatizer._ledger.durable
    assert "mu = 4 " in describe(client)


def test_a_client_that_trusts_its_server_says_that_it_adds_no_noise(tmp_path):
    said = describe(made(tmp_path, strategy="trusted-mu2", mu=2.0).make_client())
    assert "adds NO noise" in said
    assert "Against everybody else it is trusted to keep mu = 2 a run; budget of all runs: mu = 4." in said


def test_a_client_of_full_batches_says_that_every_sample_is_in_every_release(tmp_path):
    client = made(tmp_path, **FULL_BATCH).make_client()
    policy = client.privatizer.policy
    assert (policy.batch_selection, policy.max_participations, policy.release_mode) == ("full_batch", 7, "independent")
    assert policy.sensitivity == pytest.approx(2 * 2.0)  # 2 S, whatever the number of samples
    assert "up to 7 releases of the sum of all samples a run" in describe(client)


def test_all_samples_are_used_unless_the_cap_says_less(tmp_path):
    assert made(tmp_path).make_client().privatizer.policy.max_participations == 360 // 32


def test_an_operators_own_samples(tmp_path):
    generator = np.random.default_rng(1)
    own = write_samples(tmp_path, generator.random((100, 8, 8)), generator.integers(10, size=100), classes=10)
    path = write(tmp_path, {**OWN, **own})
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    client = NodeConfig.read(path).make_client()
    assert (client.privatizer.num_samples, client.privatizer.num_parameters) == (100, 650)


FEATURES, LABELS = np.arange(12, dtype=float).reshape(6, 2) / 6, np.arange(6) % 2
OF_ARRAYS = {"samples": "mine.npz", "schema": "schema.toml", "num-records": 6, **FULL_BATCH}


def made_of(folder, **arrays):
    np.savez(folder / "mine.npz", **arrays)
    write_schema(folder / "schema.toml", (2,), bounds=(0, 2))
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    return NodeConfig.read(write(folder, {**OWN, **OF_ARRAYS})).make_client()


@pytest.mark.parametrize(
    "arrays",
    [
        {"features": FEATURES},
        {"labels": LABELS},
        {"features": FEATURES, "labels": LABELS[:-1]},
        {"features": FEATURES.astype(object), "labels": LABELS},
        {"features": np.float64(3), "labels": LABELS},
    ],
    ids=["no labels", "no features", "fewer labels", "pickled", "a number"],
)
def test_a_file_that_is_not_what_was_promised_is_refused(tmp_path, arrays):
    with pytest.raises(ConfigurationError, match="Expected"):
        made_of(tmp_path, **arrays)


def with_third(array, value, dtype=None):
    changed = array.astype(dtype or array.dtype)
    changed[2] = value
    return changed


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "arrays",
    [
        {"features": FEATURES, "labels": with_third(LABELS, 7)},
        {"features": FEATURES, "labels": with_third(LABELS, -1)},
        {"features": FEATURES, "labels": with_third(LABELS, np.nan, float)},
        {"features": FEATURES, "labels": with_third(LABELS, 0.5, float)},
        {"features": with_third(FEATURES, np.nan), "labels": LABELS},
        {"features": with_third(FEATURES, "patient 4711", "<U32"), "labels": LABELS},
        {"features": with_third(FEATURES, np.inf), "labels": with_third(LABELS, "patient 4711", "<U32")},
    ],
    ids=["too large", "negative", "NaN label", "half a class", "NaN", "text", "both"],
)
def test_a_record_that_does_not_fit_counts_as_zero_and_nothing_shows(tmp_path, arrays, hushed_noise, caplog):
    client = made_of(tmp_path, **arrays)
    assert client.privatizer.num_samples == 6
    assert "5 of 6 records fit the schema" in caplog.text, "its operator is told"
    content = {"arrays": ArrayRecord([np.zeros((2, 2)), np.zeros(2)]), "config": ConfigRecord(training_config())}
    reply = ask_real_node(numpy_client_app(lambda context: client), RecordDict(content))
    assert not reply.has_error(), reply.error
    assert "4711" not in repr(reply.content)
    assert reply.content["metrics"]["num-examples"] == 6
    sent = np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])
    assert sent == pytest.approx(clipped_sum([0, 1, 3, 4, 5]), abs=0.1)
    assert np.abs(clipped_sum(range(6)) - clipped_sum([0, 1, 3, 4, 5])).max() > 0.3


def clipped_sum(numbers):
    """By hand: the gradient of a softmax at zero, (1/2 - y) times (features, 1), clipped to 2."""
    total = np.zeros(6)
    for i in numbers:
        residual = np.array([0.5, 0.5]) - np.eye(2)[LABELS[i]]
        row = np.concatenate([np.outer(residual, FEATURES[i]).ravel(), residual])
        total += row * min(1.0, 2.0 / np.linalg.norm(row))
    return total


@pytest.mark.parametrize("rows", [0, 4, 9])
def test_the_operators_number_of_rows_stands_whatever_is_in_the_file(tmp_path, rows):
    client = made_of(tmp_path, features=np.ones((rows, 2)), labels=np.zeros(rows, int))
    assert client.privatizer.num_samples == 6


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num-records": 0}, "Expected num-records to be the public number of records"),
        ({"schema": ""}, "Expected schema to be the path of the schema of `samples`"),
        ({"samples": "mine.txt"}, "Expected a file that ends in .csv"),
        ({"schema": "none.toml"}, "`murmurfl schema FILE` drafts one"),
        ({"num-classes": 2}, "Expected known node-config keys, got num-classes"),
        ({"rows": 6}, "Expected known node-config keys, got rows: it is called 'num-records'"),
        ({"samples-per-owner": 2, "strategy": "mu2", "max-participations": 0}, "with a schema that names an owner"),
    ],
)
def test_what_an_operator_says_of_samples_is_said_whole(tmp_path, changes, complaint):
    made_of(tmp_path, features=FEATURES, labels=LABELS)
    with pytest.raises(ConfigurationError, match=complaint):
        NodeConfig.read(write(tmp_path, {**OWN, **OF_ARRAYS, **changes})).make_client()


def test_a_schema_that_nobody_reviewed_is_refused(tmp_path):
    made_of(tmp_path, features=FEATURES, labels=LABELS)
    path = tmp_path / "schema.toml"
    path.write_text(path.read_text().replace("reviewed = true", "reviewed = false"))
    with raises(ConfigurationError, "missing", "reviewed"):
        NodeConfig.read(tmp_path / "node.toml").make_client()


def test_a_node_reads_a_table_by_its_schema(tmp_path):
    rows = [f"{i},{'mf'[i % 2]},{'' if i == 3 else i % 2}" for i in range(6)]
    (tmp_path / "mine.csv").write_text("\n".join(["age,sex,ill", *rows]))
    columns = {"age": Column(kind="number", bounds=(0, 100)), "sex": Column(kind="category", values=("f", "m"))}
    schema = Schema(columns=columns, label=Label(column="ill", classes=2), reviewed=True)
    (tmp_path / "schema.toml").write_text(document(schema))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    client = NodeConfig.read(write(tmp_path, {**OWN, **OF_ARRAYS, "samples": "mine.csv"})).make_client()
    assert (client.privatizer.num_samples, client.privatizer.num_parameters) == (6, 2 * (4 + 1))


@pytest.mark.parametrize("strange", [b"no image", None, b"\x89PNG\r\n\x1a\n"])
def test_a_node_reads_texts_and_images_and_a_strange_one_counts_as_zero(tmp_path, strange, hushed_noise, caplog):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pixels = np.random.default_rng(3).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    packed = []
    for one in pixels:
        out = BytesIO()
        pytest.importorskip("PIL.Image").fromarray(one).save(out, "PNG")
        packed.append({"bytes": out.getvalue()})
    packed[2] = {"bytes": strange}
    table = {"photo": packed, "note": ["fever", "well", "", "cough", "fever", "well"], "ill": LABELS}
    parquet.write_table(arrow.table(table), tmp_path / "mine.parquet")
    columns = {
        "photo": Column(kind="image", dimension=385),
        "note": Column(kind="text", dimension=16),
    }
    schema = Schema(columns=columns, label=Label(column="ill", classes=2), reviewed=True)
    (tmp_path / "schema.toml").write_text(document(schema))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    client = NodeConfig.read(write(tmp_path, {**OWN, **OF_ARRAYS, "samples": "mine.parquet"})).make_client()
    assert client.privatizer.num_samples == 6
    assert "5 of 6 records fit the schema" in caplog.text, "its operator is told"
    content = {"arrays": ArrayRecord([np.zeros((2, 401)), np.zeros(2)]), "config": ConfigRecord(training_config())}
    reply = ask_real_node(numpy_client_app(lambda context: client), RecordDict(content))
    assert not reply.has_error(), reply.error
    sent = np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])
    expected = np.zeros((2, 402))
    for i in (0, 1, 3, 4, 5):
        row = np.append(
            np.concatenate([columns["photo"].encode(pixels[i]), columns["note"].encode(table["note"][i])]), 1
        )
        gradient = np.outer(np.array([0.5, 0.5]) - np.eye(2)[LABELS[i]], row)
        expected += gradient * min(1.0, 2.0 / np.linalg.norm(gradient))
    assert sent == pytest.approx(np.concatenate([expected[:, :-1].ravel(), expected[:, -1]]), abs=0.1)
    assert np.abs(expected).max() > 0.3


def test_a_nodes_network_averages_augmentations_in_a_process_of_its_own(tmp_path, hushed_noise):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    own = {"model": "group-norm-cnn", "model.augmentations": 2, "num-partitions": 120}
    config = NodeConfig.read(write(tmp_path, {**BASE, **FULL_BATCH, **own}))
    client = config.make_client()
    plain, model = (make_model("group-norm-cnn", 64, 10, augmentations=number) for number in (1, 2))
    generator = np.random.Generator(np.random.Philox(key=5))
    point = [
        values + 0.3 * generator.standard_normal(values.shape, np.float32) for values in model.initial_parameters(1)
    ]
    content = {"arrays": ArrayRecord(point), "config": ConfigRecord(training_config())}
    reply = ask_real_node(numpy_client_app(lambda context: client), RecordDict(content))
    assert not reply.has_error(), reply.error
    sent = np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])
    samples = config.load_samples()[0][:]
    expected, other = (RowBound(2.0).total(one(point, samples), model.num_parameters) for one in (model, plain))
    assert np.abs(sent - expected).max() < 0.1 < np.abs(sent - other).max()


@pytest.mark.parametrize("task", ["package.module:load", "schema.toml"])
def test_neither_a_function_of_ones_own_nor_a_schema_is_data_of_a_real_node(task, tmp_path):
    with raises(ConfigurationError, "conflict", "task", match="Expected task to be a built-in one; data of one's own"):
        made(tmp_path, task=task)


def context(node_config, run_config):
    return Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config=run_config)


def test_on_a_real_node_the_run_configuration_decides_nothing(tmp_path, monkeypatch):
    made(tmp_path)
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, str(tmp_path / "node.toml"))
    weaker = {"mu": 1e6, "clip-norm": 1e6, "noise-quality": "fast", "strategy": "trusted-mu2", "unknown": 1}
    client = client_app.client_fn(context({"partition-id": 3}, weaker))
    assert (client.privatizer.policy.mu, client.privatizer.policy.clip_norm, client.name) == (4.0, 2.0, "clinic")
    assert client.privatizer.policy.trust == "untrusted-server"


def test_a_run_configuration_cannot_have_a_real_node_import_anything(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_stranger.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("strategy", "task", "features", "model", "partition", "mechanism")
    asked = context({"partition-id": 3}, dict.fromkeys(names, "module_of_a_stranger:Thing"))
    with raises(ConfigurationError, "missing", match="Expected an operator's configuration"):
        client_app.client_fn(asked)
    made(tmp_path)
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, str(tmp_path / "node.toml"))
    assert client_app.client_fn(asked).name == "clinic"
    with raises(
        ConfigurationError, "not-found", "model", match="imported"
    ):  # what an operator's own file names is imported
        NodeConfig.from_mapping({**BASE, "model": "module_of_a_stranger:Thing"})


def test_the_operators_command_line_may_name_the_file(tmp_path):
    made(tmp_path)
    client = client_app.client_fn(context({NODE_CONFIG_KEY: str(tmp_path / "node.toml")}, {}))
    assert client.name == "clinic"


def test_a_run_configuration_cannot_name_the_file(tmp_path):
    made(tmp_path)
    with raises(ConfigurationError, "missing", match="Expected an operator's configuration"):
        client_app.client_fn(context({}, {NODE_CONFIG_KEY: str(tmp_path / "node.toml")}))


def test_a_client_is_made_once_in_a_process(tmp_path, monkeypatch):
    made(tmp_path)
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, str(tmp_path / "node.toml"))
    assert client_app.client_fn(context({}, {})) is client_app.client_fn(context({}, {}))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"superlink": ""}, "HOST:PORT"),
        ({"superlink": "host"}, "HOST:PORT"),
        ({"superlink": "host:99999"}, "HOST:PORT"),
        ({"superlink": "host:1", "insecure": True, "private_key": "x"}, "no certificates and no key with --insecure"),
        ({"superlink": "host:1", "private_key": "/nowhere/key"}, "a private key at /nowhere/key"),
        ({"superlink": "host:1", "root_certificates": "/nowhere/ca"}, "root certificates at /nowhere/ca"),
    ],
)
def test_a_connection_that_cannot_be_is_refused_before_anything_starts(arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Connection(**arguments)


def test_the_environment_goes_before_the_command_line(monkeypatch):
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, "/a")
    assert str(operators_file({NODE_CONFIG_KEY: "/b"})) == "/a"
    monkeypatch.delenv(NODE_CONFIG_VARIABLE)
    assert str(operators_file({NODE_CONFIG_KEY: "/b"})) == "/b"
    assert operators_file(SimpleNamespace(get=lambda key: None)) is None


def request(server_round=1, ack=0):
    points = [np.zeros((10, 64)), np.zeros(10)]
    entries = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.SERVER_ROUND: server_round,
        protocol.SESSION: "training",
        protocol.ACK: ack,
    }
    return RecordDict(
        {
            protocol.ARRAYS: ArrayRecord(points),
            protocol.PREVIOUS_ARRAYS: ArrayRecord(points),
            protocol.CONFIG: ConfigRecord(entries),
        }
    )


def test_a_request_that_comes_twice_gets_one_release_twice_and_spends_once(tmp_path):
    client = made(tmp_path).make_client()
    app = numpy_client_app(lambda context: client, mods=[repeating_the_last_answer()])
    grid = InProcessGrid(app, 1, {})

    def ask(content):
        message = Message(content, dst_node_id=grid.get_node_ids()[0], message_type=MessageType.TRAIN)
        return grid.send_and_receive([message])[0]

    first, again = (ask(request()) for _ in range(2))
    assert first.content == again.content
    assert client.statement("training")["releases"] == 1
    other = ask(request(server_round=2, ack=1))
    assert other.content[protocol.METRICS][protocol.RELEASE] == 2
    late = ask(request())  # no longer the last: a new request, with an acknowledgement of old
    assert late.error.code == protocol.BAD_ACKNOWLEDGEMENT


def used_once(path):
    """A node answers one request and is stopped."""
    client = NodeConfig.read(path).make_client()
    points = [np.zeros(shape) for shape in client.gradients.shapes] * client.query_points
    entries = {protocol.SERVER_ROUND: 1, protocol.SESSION: "s", protocol.ACK: 0}
    client.fit(points, {protocol.VERSION: protocol.PROTOCOL_VERSION, **entries})


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"clip_norm": 1.0}, True),  # another policy, the same data
        ({"partition_id": 2}, False),
        ({"partition_seed": 2}, False),
        ({"num_partitions": 5}, False),
        ({"partition": "dirichlet"}, False),
    ],
)
def test_a_restarted_node_refuses_another_partition_or_seed(tmp_path, changes, same):
    made(tmp_path)
    used_once(tmp_path / "node.toml")
    again = NodeConfig.read(write(tmp_path, **changes))
    if same:
        again.make_client()
    else:
        with raises(LedgerError, "mismatch", "data", match="Put the data back"):
            again.make_client()
        with raises(LedgerError, "mismatch", "data", match="ledger create"):
            configured_client(tmp_path / "node.toml")


def test_reordered_rows_are_refused_and_new_rows_accepted(tmp_path):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(100, 5)), rng.integers(0, 3, 100)

    def save(order):
        return write_samples(tmp_path, features[order], labels[order], classes=3)

    own = save(np.arange(80))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    path = write(tmp_path, {**OWN, **own})
    used_once(path)
    write(tmp_path, {**OWN, **save(np.arange(100))})
    NodeConfig.read(path).make_client()
    for order in (np.arange(100)[::-1], np.roll(np.arange(100), 1)):
        save(order)
        with raises(LedgerError, "mismatch", "data", match=r"32 rows .* the data or their schema were changed"):
            NodeConfig.read(path).make_client()
    labels[3] = (labels[3] + 1) % 3
    save(np.arange(100))
    with raises(LedgerError, "mismatch", "data"):
        NodeConfig.read(path).make_client()


NO_MU = {key: value for key, value in BASE.items() if key != "mu"}


@pytest.mark.parametrize("changes", [{}, {"centring": "private"}, {"strategy": "trusted-mu2"}])
@pytest.mark.parametrize("ledgers_delta", [1e-5, 1e-7])
def test_an_epsilon_in_the_place_of_mu_is_one_at_the_ledgers_delta(tmp_path, ledgers_delta, changes):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=ledgers_delta)
    by_epsilon = NodeConfig.read(write(tmp_path, NO_MU, epsilon=2.0, **changes)).make_client()
    by_mu = NodeConfig.read(write(tmp_path, mu=gdp_mu(2.0, ledgers_delta), **changes)).make_client()
    assert by_epsilon.privatizer.policy == by_mu.privatizer.policy
    assert describe(by_epsilon) == describe(by_mu)
    means = [None if one.giver is None else one.giver.privatizer.policy for one in (by_epsilon, by_mu)]
    assert means[0] == means[1]


def test_a_file_with_neither_mu_nor_epsilon_says_that_one_is_missing(tmp_path):
    with raises(ConfigurationError, "missing", "mu", match="Expected values for mu or epsilon, got none of that name"):
        NodeConfig.read(write(tmp_path, NO_MU))


PLACE = {"client": "clinic", "ledger": "ledger"}
NODE = {**PLACE, "task": "digits", "num-partitions": 4, "partition-id": 1, "batch-size": 4, "clip-norm": 1.0, "mu": 1.0}
OF_SAMPLES = {
    **PLACE,
    "app": "a:b",
    "method": "mu2",
    "schema": "s",
    "num-records": 20,
    "batch-size": 4,
    "clip-norm": 1.0,
}
OF_SAMPLES |= {"max-participations": 5, "mu": 1.0}
OF_UPDATES = {**PLACE, "app": "a:b", "clip-norm": 1.0, "max-participations": 5, "mu": 1.0}
HELPER = {"helper": "ward", "record": "r", "key": "k", "roster": "list", "roster-digest": "ab"}
KINDS = [(NodeConfig, NODE), (SampleNode, OF_SAMPLES), (UpdateNode, OF_UPDATES), (HelperConfig, HELPER)]


SUMS = {"trust": "secure-aggregation", "trust.min-honest": 2, "trust.min-cohort": 3, "signing-key": "k"}
SUMS |= {"roster": "list", "roster-digest": "ab"}
CHOSEN = [
    (NodeConfig, {**NODE, "clipping": "automatic", "clipping.stability": 0.5, "evaluation.share": 0.1}),
    (SampleNode, {**OF_SAMPLES, **SUMS}),
    (UpdateNode, {**OF_UPDATES, **SUMS}),
]


def tabled(values):
    """The same document with the options of every choice in its table, beside its kind."""
    found = {name: value for name, value in values.items() if "." not in name}
    for name, value in values.items():
        table, _, key = name.partition(".")
        if key and not isinstance(found.get(table), dict):
            found[table] = {"kind": found[table]} if table in found else {}
        if key:
            found[table][key] = value
    return found


@pytest.mark.parametrize(("kind", "values"), CHOSEN)
def test_a_table_and_dotted_keys_mean_the_same(kind, values):
    assert any(isinstance(value, dict) for value in tabled(values).values())
    assert kind.from_mapping(tabled(values)) == kind.from_mapping(values)


@pytest.mark.parametrize(("kind", "values"), CHOSEN)
def test_a_setting_given_twice_or_in_a_wrong_table_is_refused(kind, values):
    for table, inner in ((name, inner) for name, inner in tabled(values).items() if isinstance(inner, dict)):
        for twice in inner:
            key = table if twice == "kind" else f"{table}.{twice}"
            with pytest.raises(ConfigurationError, match=f"Expected {key} once, got it twice"):
                kind.from_mapping({f"{table}.{twice}": inner[twice], **tabled(values)})
        for unknown_node in ("ledger", "nothing"):
            with pytest.raises(
                ConfigurationError, match=f"Expected known node-config keys, got {table}.{unknown_node}"
            ):
                kind.from_mapping({**values, f"{table}.{unknown_node}": 1})


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("kind", "values"), KINDS)
@pytest.mark.parametrize("value", [{"a": 1}, {}, [1], ["a"], [{}]])
def test_a_table_or_a_list_is_no_value(kind, values, value):
    for name in kind.settings():
        if name in ("run-config", "node-config") and isinstance(value, dict):
            continue
        if name == "data-files" and value == ["a"]:
            continue
        with pytest.raises(ConfigurationError, match=rf"Expected {name} to be|got {name}\.a"):
            kind.from_mapping({**values, name: value})


@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_what_another_kind_of_file_says_is_refused(kind, values):
    others = {name for other, _ in KINDS for name in other.settings()} - set(kind.settings())
    assert others
    for name in (*others, "num-clients", "noise-quality", "strategy.release-rule", "trust.helpers"):
        with pytest.raises(ConfigurationError, match=f"Expected known node-config keys, got {name}"):
            kind.from_mapping({**values, name: 1})


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("kind", "values"), KINDS[:3])
@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -1, 10**400])
def test_no_mu_and_no_clip_but_numbers_above_zero(kind, values, value):
    for name in ("mu", "clip-norm"):
        with pytest.raises(ConfigurationError, match=f"Expected {name}"):
            kind.from_mapping({**values, name: value})


@pytest.mark.parametrize(("kind", "values"), KINDS[:3])
def test_mu_beside_epsilon_is_refused(kind, values):
    with raises(ConfigurationError, "conflict", "mu"):
        kind.from_mapping({**values, "epsilon": 1.0})


def test_a_node_is_known_by_settings_in_tables(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(
        'client = "clinic"\nledger = "ledger"\nbatch-size = 4\nmu = 1.0\nclip-norm = 1.0\ntask = "digits"\n'
        'num-partitions = 4\npartition-id = 1\n[mechanism]\nkind = "blt"\n[clipping]\nkind = "automatic"\n'
    )
    path.chmod(0o600)
    node = read_node(path)
    assert isinstance(node, NodeConfig)
    assert (node.batch_size, node.mechanism, node.clipping) == (4, "blt", "automatic")


posix = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")
TEXT = 'client = "clinic-0"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'


@posix
def test_our_own_writers_make_files_that_pass_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write_private(tmp_path / "node.toml", TEXT)
        write_private(tmp_path / "node.toml", TEXT)
    finally:
        os.umask(before)
    assert (tmp_path / "node.toml").stat().st_mode & 0o777 == 0o600
    assert UpdateNode.read(tmp_path / "node.toml").client == "clinic-0"


@posix
def test_a_file_of_somebody_else_is_not_read(tmp_path, monkeypatch):
    write_private(tmp_path / "node.toml", TEXT)
    owner = (tmp_path / "node.toml").stat().st_uid
    if owner == 0:
        os.chown(tmp_path / "node.toml", 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with raises(ConfigurationError, "insecure", match=f"belongs to user {owner or 4711}"):
        read_node(tmp_path / "node.toml")


def folder_node(tmp_path):
    """A node's client whose samples are a folder of images."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.Generator(np.random.Philox(key=9))
    folder = tmp_path / "photos"
    for number in range(6):
        where = folder / ("cat", "dog")[number % 2]
        where.mkdir(parents=True, exist_ok=True)
        image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(where / f"{number}.png")
    schema = folder_schema(ImageFolder(folder), "colour-24").model_copy(update={"reviewed": True})
    (tmp_path / "schema.toml").write_text(document(schema))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    own = {"samples": "photos", "centring": "private", "centring.norm": 1.0}
    return NodeConfig.read(write(tmp_path, {**OWN, **OF_ARRAYS, **own})).make_client()


def test_folder_of_images_is_an_operators_samples(tmp_path):
    client = folder_node(tmp_path)
    assert (client.privatizer.num_samples, client.privatizer.num_parameters) == (6, 2 * 26)
    inputs, labels = client.samples[:]
    assert inputs.shape == (6, 25)
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


def test_files_of_a_folder_stand_where_the_ledgers_secret_says(tmp_path, monkeypatch):
    """In the order of names, one file that is replaced by one of another class would move all those between."""
    orders = []
    for secret in (b"one", b"two", b"two"):
        monkeypatch.setattr(SQLiteLedger, "secret_of_owners", lambda ledger, keys, secret=secret: secret)
        inputs, _ = folder_node(tmp_path / f"{len(orders)}").samples[:]
        orders.append([row.tobytes() for row in inputs])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] == orders[2]
