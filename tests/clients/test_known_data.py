"""The ledger of every kind of client knows the data: files are rewritten between starts, in one session or two."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import (
    CorrelatedNoiseMod,
    DelayedMomentumClient,
    FullBatchClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    OnlineClient,
    ShuffledClient,
    UpdateNode,
    UpdatePolicy,
)
from murmurfl.clients.adapters.noise_mod import _real
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    PrivacyPolicy,
    RefusedError,
    ShuffledPolicy,
    SQLiteLedger,
    protocol,
    read_ledger,
)

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask as ask_node

pytestmark = pytest.mark.usefixtures("quick_disk")
D, ROWS = 3, 12
DATA = np.arange(1.0, 1.0 + D * ROWS).reshape(ROWS, D)
COMMON = {"clip_norm": 1.0, "max_participations": 4, "mu": 1.0, "budget_mu": 2.0}


class Mean:
    """Gradients of half the squared distance, of norm at most 1."""

    shapes = ((D,),)
    smoothness, gradient_bound, clips_contractively = 1.0, 100.0, True

    def __call__(self, parameters, samples):
        return parameters[0] - samples

    def at_points(self, points, samples):
        return points - samples


def policy(**changes):
    return PrivacyPolicy(**{**COMMON, "batch_size": 2, **changes})


RETURNING = {"sample_participations": 2, "min_separation": 3, "mechanism": "independent"}
ALL = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
KINDS = {
    "mu2": (Mu2Client, policy(), {}),
    "full-batch": (FullBatchClient, policy(**ALL), {}),
    "noisy-sgd": (NoisySGDClient, policy(mechanism="independent"), {}),
    "isrl-dp": (IsrlDpClient, policy(**RETURNING), {}),
    "delayed-momentum": (DelayedMomentumClient, policy(), {}),
    "online": (OnlineClient, policy(clip_unit="update"), {"learning_rate": 0.1}),
    "online-contractive": (OnlineClient, policy(clip_unit="contractive"), {"learning_rate": 0.1}),
    "shuffled": (ShuffledClient, ShuffledPolicy(**COMMON, batch_size=ROWS), {"learning_rate": 0.1}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def path(tmp_path):
    SQLiteLedger.create(tmp_path / "ledger", budget_mu=2.0, delta=1e-5)
    return tmp_path / "ledger"


def start(path, kind, data):
    client, terms, options = KINDS[kind]
    ledger = SQLiteLedger(path)
    return client(Mean(), data, terms, ledger, ledger.keys(), name="7", **options)


def ask(client, session="s"):
    done = client.privatizer.statement(session).releases
    ack = 0 if isinstance(client, DelayedMomentumClient) else done
    return client.fit([np.zeros(D)] * client.query_points, training_config(done + 1, ack, session))


@pytest.mark.few_cases(6)
@kinds
@pytest.mark.parametrize("session", ["s", "t"])
def test_a_file_rewritten_in_another_order_is_refused(path, kind, session):
    ask(start(path, kind, DATA))
    before = read_ledger(path)
    for rewritten in (DATA[::-1], np.roll(DATA, 1, axis=0), DATA + np.eye(ROWS, D)):
        with raises(LedgerError, "mismatch", "data", match="Put the data back"):
            ask(start(path, kind, rewritten), session)
    assert read_ledger(path) == before
    ask(start(path, kind, DATA), session)


@pytest.mark.few_cases(6)
@kinds
def test_appended_rows_are_welcome(path, kind):
    if kind == "shuffled":
        pytest.skip("its policy names the number of samples: more are another policy")
    ask(start(path, kind, DATA))
    ask(start(path, kind, np.concatenate([DATA, DATA])))


# A client around somebody else's ClientApp cannot see rows: what its operator named is what the ledger knows.


def node(tmp_path, **changes):
    parts = changes.pop("releases_per_pass", 4)
    updates = UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=4, releases_per_pass=parts)
    place = {"client": "7", "ledger": str(tmp_path / "ledger"), "app": "clinic:app"}
    return UpdateNode(updates=updates, **{**place, **changes})


def test_a_noise_mod_knows_its_operators_configuration_and_named_files(tmp_path):
    data = tmp_path / "clinic.npz"
    data.write_bytes(b"rows")
    named = {"data_files": (str(data),)}
    known = node(tmp_path, **named).known_by({})
    assert known == node(tmp_path, **named).known_by({"partition-id": 3}), "its own app sees the operator's file only"
    others = [
        node(tmp_path, **named, node_config={"partition-id": 1}),
        node(tmp_path, **named, run_config={"seed": 2}),
        node(tmp_path, **{**named, "app": "clinic:other"}),
        node(tmp_path, **{**named, "releases_per_pass": 2}),
    ]
    assert len({known, *(other.known_by({}) for other in others)}) == 5
    data.write_bytes(b"other rows")
    assert node(tmp_path, **named).known_by({}) != known
    plain = node(tmp_path, app="")
    assert plain.known_by({"partition-id": 1}) != plain.known_by({"partition-id": 2})
    data.unlink()
    with raises(ConfigurationError, "unreadable", match="data-files"):
        node(tmp_path, **named).known_by({})


def test_a_client_level_noise_mod_needs_to_know_nothing(tmp_path):
    assert node(tmp_path, releases_per_pass=1).known_by({"partition-id": 3}) == b""
    with raises(ConfigurationError, "conflict", "data-files", match="client-level"):
        node(tmp_path, releases_per_pass=1, data_files=("clinic.npz",))


def test_a_noise_mod_refuses_once_its_operators_configuration_changed(path, tmp_path):
    for config, works in (({"partition-id": 1}, True), ({"partition-id": 2}, False), ({"partition-id": 1}, True)):
        if works:
            privatizer = _real(node(tmp_path, node_config=config), {}).private(D)
            privatizer.release("s", privatizer.statement("s").releases, lambda samples: np.ones((1, D)))
        else:
            with raises(LedgerError, "mismatch", "data"):
                _real(node(tmp_path, node_config=config), {})
    client_level = _real(node(tmp_path, releases_per_pass=1), {}).private(D)
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="policy"):
        client_level.release("s", 2, lambda samples: np.ones((1, D)))
    client_level.release("t", 0, lambda samples: np.ones((1, D)))  # for which any data will do
    sample_level = _real(node(tmp_path, node_config={"partition-id": 1}), {}).private(D)
    sample_level.check_data()  # what it used before is still known
    with raises(LedgerError, "mismatch", "data"):
        _real(node(tmp_path, node_config={"partition-id": 2}), {})


def test_a_mod_notices_data_files_that_are_rewritten_while_it_runs(path, tmp_path):
    """They are rewritten between two messages."""
    data = tmp_path / "clinic.npz"
    data.write_bytes(b"rows in one order")
    client = _real(node(tmp_path, data_files=(str(data),)), {})
    client.private(D).release("s", 0, lambda samples: np.ones((1, D)))
    data.write_bytes(b"rows in another order")
    with raises(LedgerError, "mismatch", "data", match="Put the data back"):
        client.private(D).release("s", 1, lambda samples: np.ones((1, D)))
    data.write_bytes(b"rows in one order")
    client.private(D).release("s", 1, lambda samples: np.ones((1, D)))


def test_a_mod_releases_nothing_of_a_training_during_which_its_data_files_were_rewritten(path, tmp_path):
    data = tmp_path / "clinic.npz"
    data.write_bytes(b"rows in one order")
    app, rewrites = ClientApp(mods=[CorrelatedNoiseMod(node=node(tmp_path, data_files=(str(data),)))]), [True, False]

    @app.train()
    def train(message, context):
        if rewrites.pop(0):
            data.write_bytes(b"rows in another order")
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    records = {"arrays": ArrayRecord([np.zeros(D)]), "config": ConfigRecord(training_config())}
    assert ask_node(app, content=RecordDict(dict(records))).error.code == protocol.LEDGER_UNUSABLE
    assert read_ledger(path).sessions == (), "nothing was spent"
    data.write_bytes(b"rows in one order")
    assert not ask_node(app, content=RecordDict(dict(records))).has_error()
