"""``murmurfl node`` with its operator's own ClientApp: whose settings it has, and that nothing goes around the mod."""

import importlib
import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.nodes.journal import Journal, noting
from murmurfl.app.nodes.node_app import describe_own, own_app, read_node
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients import UpdateNode
from murmurfl.privacy import (
    ConfigurationError,
    Guarantee,
    LedgerError,
    SQLiteLedger,
    gdp_mu,
    protocol,
    read_ledger,
    rounded_up,
)
from typer.testing import CliRunner

from tests.harness.errors import raises

SECRET = "patient 4711"

PROJECT = """
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy

HERE = Path(__file__).parent
nothing = 3


def made(mods):
    app = ClientApp(mods=mods)

    @app.lifespan()
    def life(context):
        if (HERE / "broken").exists():
            raise ValueError("SECRET")
        yield

    @app.train()
    def train(message, context):
        (HERE / "seen.json").write_text(json.dumps([dict(context.run_config), dict(context.node_config)]))
        arrays = {name: Array(np.asarray(array.numpy() + 100.0)) for name, array in message.content["arrays"].items()}
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"loss": 0.5, "num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    @app.query()
    def query(message, context):
        return Message(RecordDict({"arrays": ArrayRecord([np.full(3, 42.0)])}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    return app


# The policy in the app is a simulation's and no protection at all.
app = made([CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1e3, mu=1e3, max_participations=9))])
bare = made([])
""".replace("SECRET", SECRET)

FILE = """
client = "clinic-0"
ledger = "ledger.sqlite"
clip-norm = 0.5
mu = 10.0
max-participations = 3
app = "{app}"

[run-config]
local-epochs = 2

[node-config]
partition-id = 4
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, hushed_noise):
    name = f"project_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=10.0, delta=1e-5)
    return tmp_path, name


def write(folder, text=FILE, app="app"):
    path, name = folder
    (path / "node.toml").write_text(text.format(app=f"{name}:{app}"))
    return path / "node.toml"


class Asking:
    """A server and one node that answers with ``app``, whose messages come with settings of the server's."""

    def __init__(self, app):
        self.grid = InProcessGrid(app, 1, {"local-epochs": 99})

    def __call__(self, kind="train", ack=0, session="s"):
        entries = {"protocol-version": protocol.PROTOCOL_VERSION, "server-round": 1, "session": session, "ack": ack}
        arrays = ArrayRecord({"w": Array(np.zeros(3)), "b": Array(np.zeros(()))})
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(entries)})
        (node,) = self.grid.get_node_ids()
        (reply,) = self.grid.send_and_receive([Message(content, dst_node_id=node, message_type=kind)])
        return reply


def sent(reply):
    return np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])


@pytest.mark.parametrize("app", ["app", "bare"])
def test_the_update_leaves_once_with_the_operators_noise_and_settings(folder, app):
    ask = Asking(own_app(read_node(write(folder, app=app))))
    reply = ask()
    # An update of 100 in every value, clipped to 0.5, with next to no noise: a mod in the app does not release too.
    assert sent(reply) == pytest.approx(np.full(4, 0.25), abs=0.2)
    assert (sent(reply) != 0.25).all()
    assert reply.content["metrics"]["num-examples"] == 1
    assert "loss" not in reply.content["metrics"]
    (session,) = read_ledger(folder[0] / "ledger.sqlite").sessions
    assert session.releases == 1
    run, node = json.loads((folder[0] / "seen.json").read_text())
    assert run == {"local-epochs": 2}, "the server's run configuration stays outside"
    assert node == {"partition-id": 4, "num-partitions": 1}
    for ack in (1, 2):
        assert not ask(ack=ack).has_error()
    assert ask(ack=3).error.code == protocol.CAP_REACHED
    assert ask(session="t").error.code == protocol.BUDGET_EXHAUSTED


@pytest.mark.parametrize("app", ["app", "bare"])
def test_nothing_goes_around_the_mod(folder, app):
    ask = Asking(own_app(read_node(write(folder, app=app))))
    assert ask("query").error.code == protocol.MALFORMED_REQUEST
    assert ask("evaluate").error.code == protocol.EVALUATION_BLOCKED
    assert ask("train.other").content["metrics"]["release"] == 1
    # Flower's lifespan is outside of a ClientApp's mods, and inside of this one.
    (folder[0] / "broken").touch()
    reply = ask(ack=1)
    assert not reply.has_error(), "whether it fails may depend on data"
    assert np.abs(sent(reply)).max() < 0.2, "it counts as an update of zero"
    assert SECRET not in str(reply.content)


def test_what_an_own_app_answers_is_noted_without_anything_that_the_app_says(folder):
    journal, entries = Journal(), []
    journal.listen(entries.append)
    ask = Asking(noting(own_app(read_node(write(folder))), journal))
    ask()
    ask(ack=1)
    ask("query")
    run = entries[0].facts["run"]
    asked = {"run": run, "session": "s", "round": 1}
    why = {"why": entries[2].facts["why"]}
    assert "a query of a project's own would be answered without noise" in why["why"]
    assert [(entry.kind, dict(entry.facts)) for entry in entries] == [
        ("released", {**asked, "release": 1, "samples": 1}),
        ("released", {**asked, "release": 2, "samples": 1}),
        ("refused", {**asked, "reason": "malformed-request", **why}),
    ]


def test_a_mod_is_passed_only_inside_of_another(folder):
    """Else a message would find the way to the training that the mod is for."""
    ask = Asking(own_app(read_node(write(folder))))
    inner = Asking(importlib.import_module(folder[1]).app)
    for _ in range(2):
        reply = inner()
        assert reply.content["metrics"]["num-examples"] == 1
        assert np.abs(sent(reply)).max() != 100.0
        assert not ask(session="s").has_error()


def test_check_says_what_the_client_guarantees(folder):
    said = CliRunner().invoke(cli, ["node", str(write(folder)), "--check"])
    assert said.exit_code == 0, said.output
    words = " ".join(said.stdout.split())
    mechanism = "independent noise on each client, update sensitivity, every sample in up to 3 releases"
    stated = Guarantee(10.0, 1e-5, mechanism, unit="client").sentence
    assert f"clinic-0: up to 3 releases of the updates of {folder[1]}:app a run, {stated}" in words
    assert "Budget of all runs: mu = 10." in words
    assert stated in describe_own(UpdateNode.read(folder[0] / "node.toml"))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("{app}", "no.such.module:app"), "Expected a ClientApp at no.such.module:app, got: No module named 'no'"),
        (('"{app}"', '"{app}s"'), "Expected a ClientApp at .*has no attribute 'apps'"),
        (("{app}", "json:dumps"), "Expected a ClientApp at json:dumps, got function"),
        (('"{app}"', '"app"'), "Expected app as MODULE:NAME of an installed ClientApp, got 'app'"),
        (('"{app}"', "3"), "Expected app to be a text"),
        (("local-epochs = 2", "local-epochs = [2]"), "Expected run-config to be a table of numbers"),
        (("[run-config]", "[run-settings]"), "Expected known node-config keys, got run-settings"),
        (("mu = 10.0", "mu = 20.0"), "Expected mu <= 10, the budget of all runs"),
        (("mu = 10.0", "mu = 10.0\nepsilon = 2.0"), "Expected mu or epsilon, got both: mu = 10.0, epsilon = 2.0"),
        (("mu = 10.0", "epsilon = 0.0"), "Expected epsilon > 0 and finite, got 0.0"),
        (("mu = 10.0", ""), "Expected values for mu or epsilon"),
    ],
)
def test_a_file_that_is_none_is_refused_before_anything_starts(folder, change, complaint):
    path = write(folder, FILE.replace(*change))
    with pytest.raises(ConfigurationError, match=complaint):
        own_app(read_node(path))
    ended = CliRunner().invoke(cli, ["node", str(path), "--check"])
    assert ended.exit_code == 1


def test_a_client_without_its_ledger_does_not_start(folder):
    path = write(folder, FILE.replace("ledger.sqlite", "gone.sqlite"))
    with raises(LedgerError, "not-found", match="murmurfl ledger create"):
        own_app(read_node(path))


def test_which_kind_of_client_a_file_is_of(folder):
    path = write(folder, FILE.replace('app = "{app}"', "").partition("[run")[0])
    with raises(ConfigurationError, "missing", match="or app = 'MODULE:NAME'"):
        read_node(path)
    assert UpdateNode.read(path).app == "", "for a plain flower-supernode it is enough"
    path = write(folder, FILE.replace('app = "{app}"', ""))
    with raises(ConfigurationError, "conflict", "run-config"):
        UpdateNode.read(path)
    text = 'client = "a"\nledger = "l"\nclip-norm = 1\nbatch-size = 2\nmu = 1\ntask = "digits"\nnum-partitions = 2\n'
    path.write_text(f"{text}partition-id = 0\n")
    assert isinstance(read_node(path), NodeConfig)


@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_an_epsilon_in_the_place_of_mu_is_one_at_the_ledgers_delta(folder, tmp_path, delta):
    SQLiteLedger.create(tmp_path / "other.sqlite", budget_mu=10.0, delta=delta)
    text = FILE.replace("mu = 10.0", "epsilon = 2.0").replace("ledger.sqlite", str(tmp_path / "other.sqlite"))
    node = UpdateNode.read(write(folder, text))
    policy = node.policy(SQLiteLedger(node.ledger))
    assert policy.mu == gdp_mu(2.0, delta)
    assert policy.delta == delta
    assert f"epsilon = {rounded_up(2.0)} at delta = {delta:g}" in describe_own(node)


@pytest.mark.parametrize("more", ["", 'releases-per-pass = 3\ndata-files = ["data.csv"]\n'], ids=["client", "parts"])
def test_its_noise_key_is_rotated_by_its_operators_file(folder, more):
    path, _ = folder
    (path / "data.csv").write_text("1,2,3")
    config = write(folder, FILE.replace("mu = 10.0\n", f"mu = 5.0\n{more}"))
    assert not Asking(own_app(read_node(config)))().has_error()
    key = SQLiteLedger(path / "ledger.sqlite").keys().secret_key
    if more:
        (path / "data.csv").write_text("1,2,4")
        assert CliRunner().invoke(cli, ["ledger", "rotate-key", str(config), "--yes"]).exit_code == 1
        (path / "data.csv").write_text("1,2,3")
    assert CliRunner().invoke(cli, ["ledger", "rotate-key", str(config), "--yes"]).exit_code == 0
    assert SQLiteLedger(path / "ledger.sqlite").keys().secret_key != key
    ask = Asking(own_app(read_node(config)))
    assert ask(ack=1).error.code == protocol.POLICY_CHANGED
    assert not ask(session="t").has_error()
