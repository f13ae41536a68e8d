"""``murmurfl node`` with an app of statistics: its operator's file settles privacy, and its ledger what is left."""

import pytest
from flwr.app import ConfigRecord, RecordDict
from murmurfl.app.commands.main import cli
from murmurfl.app.nodes.node_app import client_of, describe, installed_app, read_node
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import ConfigurationError, SQLiteLedger, gdp_mu, protocol, statistics_policy
from typer.testing import CliRunner

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node

SCHEMA = Schema(
    columns={
        "age": Column(kind="integer", bounds=(0, 120)),
        "ward": Column(kind="category", values=("a", "b")),
    },
    label=Label(column="ill", classes=2),
    reviewed=True,
)
WIDTH = 122 + 4 + 3
PROJECT = """
from murmurfl.clients import Schema, private_client_app

schema = Schema.read_file("SCHEMA")
app = private_client_app(schema, samples=lambda context: [], method="statistics", mu=1e3, rounds=1)
"""
FILE = """
client = "clinic-0"
ledger = "ledger.sqlite"
method = "statistics"
clip-norm = {clip_norm}
epsilon = 0.5
max-participations = {releases}
samples = "patients.csv"
schema = "schema.toml"
num-records = 4
app = "{app}"
"""


@pytest.fixture
def node(tmp_path, monkeypatch, hushed_noise):
    (tmp_path / "schema.toml").write_text(document(SCHEMA))
    (tmp_path / "patients.csv").write_text("age,ward,ill\n40,a,0\n57,,1\nforty,b,1\n71\n")
    name = f"statistics_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROJECT.replace("SCHEMA", str(tmp_path / "schema.toml")))
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    monkeypatch.syspath_prepend(str(tmp_path))
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=0.2, delta=1e-5)

    def made(clip_norm=1.0, releases=1):
        path = tmp_path / "node.toml"
        path.write_text(FILE.format(app=f"{name}:app", clip_norm=clip_norm, releases=releases))
        path.chmod(0o600)
        return read_node(path)

    return made


def asked(app, session):
    content = RecordDict({"config": ConfigRecord(training_config(session=session))})
    return ask_real_node(app, content)


def test_a_real_node_releases_statistics_under_its_own_policy_and_budget(node):
    answers, client = client_of(node())
    reply = asked(answers, "first")
    (values,) = reply.content[protocol.ARRAYS].to_numpy_ndarrays()
    metrics = reply.content[protocol.METRICS]
    plan = statistics_policy(gdp_mu(0.5, 1e-5), budget_mu=0.2, noise_quality="exact").plan(WIDTH)
    assert values.size == WIDTH
    assert metrics[protocol.NOISE_STD] == pytest.approx(plan.noise_std, rel=1e-9)
    assert metrics[protocol.NUM_EXAMPLES] == 4
    counts = client.gradients.rows.counts(values, 4, 0.0)  # a thousandth of the noise is in it
    assert counts[0].counts[[40, 57, -1]] == pytest.approx([1, 1, 2], abs=0.3)
    assert counts[1].counts == pytest.approx([1, 1, 0, 2], abs=0.3)
    assert asked(answers, "second").error.code == protocol.BUDGET_EXHAUSTED
    assert "up to 1 releases" in describe(client)


@pytest.mark.long
def test_an_audit_of_the_node_finds_no_strange_record_that_shows(node, tmp_path):
    node()
    result = CliRunner().invoke(cli, ["audit", "--node", str(tmp_path / "node.toml")])
    assert result.exit_code == 0, result.output
    assert "none moves more than is charged" in " ".join(result.output.split())


@pytest.mark.parametrize("wrong", [{"clip_norm": 2.0}, {"releases": 2}], ids=str)
def test_a_file_with_another_policy_is_refused(node, wrong):
    with raises(ConfigurationError, "conflict", "policy", match="statistics_policy"):
        client_of(node(**wrong))


def test_a_node_whose_schema_has_other_columns_is_refused(node, tmp_path):
    told = node()
    other = Schema(**{**dict(SCHEMA), "columns": {"age": SCHEMA.columns["age"]}})
    app = installed_app(told.app)
    (tmp_path / "schema.toml").write_text(document(other))
    with raises(ConfigurationError, "mismatch", "schema"):
        app.real_client(told)


def test_beside_a_training_is_not_how_this_node_is_asked(node):
    answers, _ = client_of(node())
    content = RecordDict({"config": ConfigRecord(training_config(session="s", **{protocol.RELEASE_OF: "statistics"}))})
    assert ask_real_node(answers, content).error.code == protocol.NOT_CONFIGURED
    assert not asked(answers, "s").has_error()
