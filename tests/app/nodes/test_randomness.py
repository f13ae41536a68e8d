"""Real nodes draw all that must be secret from the operating system: no fixed seed, no short one, no other source."""

import ast
import random
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients import numpy_client_app
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, protocol, read_ledger, row_key
from murmurfl.privacy import noise as keys
from murmurfl.privacy.release import prefix_sums as noise_stream

from tests.harness.errors import raises
from tests.harness.schemas import write_samples

ROOT = Path(__file__).resolve().parents[3]
FEATURES = 5
BASE = {"client": "clinic", "ledger": "ledger.sqlite"}
BASE |= {"clip-norm": 1.0, "batch-size": 2, "mu": 1.0, "max-participations": 6}
KINDS = [
    {},
    {"mechanism": "tree"},
    {"mechanism": "blt"},
    {"mechanism": "optimal"},
    {"passes": 2, "mechanism": "banded"},
    {"strategy": "noisy-sgd"},
    {"strategy": "online", "learning-rate": 0.1},
]


def make_client(folder, **changes):
    folder.mkdir(exist_ok=True)
    generator = np.random.Generator(np.random.Philox(key=1))
    own = write_samples(folder, generator.random((20, FEATURES)), generator.integers(2, size=20))
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=2.0, delta=1e-5)
    (folder / "node.toml").write_text(toml_document({**BASE, **own, **changes}))
    return NodeConfig.read(folder / "node.toml").make_client()


def ask(client, server_round, ack):
    points = ArrayRecord([np.zeros((2, FEATURES)), np.zeros(2)])
    records = {protocol.ARRAYS: points}
    if client.query_points == 2:
        records[protocol.PREVIOUS_ARRAYS] = points
    entries = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SESSION: "s", protocol.ACK: ack}
    records[protocol.CONFIG] = ConfigRecord(
        {**entries, protocol.SERVER_ROUND: server_round, "seed": 1, "key": "00" * 32}
    )
    grid = InProcessGrid(numpy_client_app(lambda context: client), 1, {"seed": 1})
    message = Message(RecordDict(records), dst_node_id=grid.get_node_ids()[0], message_type=MessageType.TRAIN)
    return grid.send_and_receive([message])[0]


def values_of(reply):
    assert not reply.has_error(), reply.error
    return np.concatenate([array.numpy().ravel() for array in reply.content[protocol.ARRAYS].values()])


SEEDED = (
    (np.random, ("Generator", "default_rng", "RandomState", "normal", "random", "seed", "standard_normal")),
    (random, ("Random", "random", "seed", "getrandbits", "gauss", "randbytes")),
    (torch, ("manual_seed", "randn", "rand", "normal", "Generator")),
    (keys, ("SimulatedKeys", "derived_seed")),
)


def only_the_operating_system(monkeypatch):
    """Every other source of randomness raises from here on; returns what is drawn from the right one."""
    real, drawn = secrets.token_bytes, []

    def token_bytes(size=None):
        drawn.append(real(size))
        return drawn[-1]

    def refuse(*_, **__):
        raise AssertionError("a seeded source was asked")

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    for owner, names in SEEDED:
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    return drawn


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes.values())) or "mu2")
def test_noise_is_of_the_ledgers_key_and_a_fresh_nonce(tmp_path, monkeypatch, changes):
    client = make_client(tmp_path, **changes)
    key = SQLiteLedger(tmp_path / "ledger.sqlite").keys().secret_key
    assert len(key) == 32
    drawn, used = only_the_operating_system(monkeypatch), []
    monkeypatch.setattr(noise_stream, "row_key", lambda *names: used.append(names) or row_key(*names))
    for k in range(1, 4):
        assert values_of(ask(client, k, k - 1)).any()
        assert [len(nonce) for nonce in drawn] == [16] * k
        assert drawn[-1] in {nonce for _, nonce in used}
    assert len(set(drawn)) == 3
    assert {secret for secret, _ in used} == {key}
    assert {nonce for _, nonce in used} == set(drawn)


def test_the_check_sees_a_node_with_seeded_keys(tmp_path, monkeypatch):
    client = make_client(tmp_path)
    client.privatizer._keys = keys.SimulatedKeys(1, "clinic")
    drawn = only_the_operating_system(monkeypatch)
    values_of(ask(client, 1, 0))
    assert drawn == []


def test_a_ledger_draws_its_key_of_32_bytes_from_the_operating_system(tmp_path, monkeypatch):
    drawn = only_the_operating_system(monkeypatch)
    made = [SQLiteLedger.create(tmp_path / name, budget_mu=1.0, delta=1e-5).keys().secret_key for name in "ab"]
    assert [key for key in drawn if len(key) == 32] == made
    assert made[0] != made[1]


def test_equal_nodes_draw_different_noise(tmp_path):
    first, second = (values_of(ask(make_client(tmp_path / name), 1, 0)) for name in "ab")
    assert not (first == second).any()


def test_an_operating_system_without_randomness_gets_no_release_and_no_weaker_one(tmp_path, monkeypatch):
    client = make_client(tmp_path)

    def broken(size=None):
        raise NotImplementedError("no source of randomness")

    monkeypatch.setattr(secrets, "token_bytes", broken)
    assert ask(client, 1, 0).error.code == protocol.INTERNAL_ERROR
    assert read_ledger(tmp_path / "ledger.sqlite").sessions == ()
    with pytest.raises(NotImplementedError):
        SQLiteLedger.create(tmp_path / "other.sqlite", budget_mu=1.0, delta=1e-5)
    assert not (tmp_path / "other.sqlite").exists()


@pytest.mark.parametrize("short", [b"", b"\x01", bytes(8), bytes(31), bytes(33)])
def test_a_key_of_another_length_is_refused_wherever_it_is(tmp_path, short):
    SQLiteLedger.create(tmp_path / "a.sqlite", budget_mu=1.0, delta=1e-5, key_file=tmp_path / "a.key")
    (tmp_path / "a.key").write_bytes(short)
    with raises(LedgerError, "mismatch", match="Expected the noise key"):
        SQLiteLedger(tmp_path / "a.sqlite").keys()
    with raises(ConfigurationError, "wrong-shape", "secret_key", match="32 bytes"):
        keys.SystemKeys(short)


# What a real node executes must not even name a seeded source. Its public data splits may (`app/data/`).
NODE_MODULES = (
    "app/nodes/node_config.py",
    "app/nodes/supernode.py",
    "app/nodes/executor.py",
    "app/nodes/flower_process.py",
    "app/commands/node_command.py",
)
NODE_MODULES += ("clients/*.py", "clients/records/*.py", "privacy/*.py", "privacy/mechanisms/*.py")
SEEDED_NAMES = {"SimulatedKeys", "derived_seed", "default_rng", "Generator", "Philox", "RandomState", "manual_seed"}
# Where seeded keys are defined, exported, and handed out in simulation only; the public order of epochs is no noise.
ALLOWED = {
    "privacy/noise.py": {"SimulatedKeys", "derived_seed"},
    "privacy/__init__.py": {"SimulatedKeys", "derived_seed"},
    "clients/simulation/simulated_clients.py": {"SimulatedKeys"},
    "privacy/release/shuffled_privatizer.py": {"derived_seed", "Generator", "Philox"},
    # Generators that it puts back, and draws nothing from.
    "clients/adapters/torch_checks.py": {"derived_seed", "manual_seed"},  # of frozen layers' weights, which are public
    # Of the point at which made-up records are tried.
    "clients/adapters/per_sample_gradients.py": {"Generator", "Philox"},
    "clients/records/client_records.py": {"Generator", "Philox"},  # of a record that is made up
    "clients/records/schema.py": {"Generator", "Philox"},  # of records that are made up
    "privacy/accounting/amplification.py": {
        "derived_seed",
        "Generator",
        "Philox",
    },  # of an estimate that sees no data and no key
}


def seeded_names(path):
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            named |= {"random"} & set(names)
        named |= SEEDED_NAMES & set(names)
    return named


def test_what_a_real_node_executes_names_no_seeded_source():
    paths = [path for pattern in NODE_MODULES for path in ROOT.glob(pattern)]
    assert len(paths) > 25
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        assert seeded_names(path) <= ALLOWED.get(name, set()), name


def test_the_check_sees_a_seeded_source(tmp_path):
    (tmp_path / "bad.py").write_text("import random\nimport numpy as np\nnoise = np.random.default_rng(1)\n")
    assert seeded_names(tmp_path / "bad.py") == {"random", "default_rng"}
