"""A training of one's own project leaves a folder that is reported and listed, with its clients' own guarantee."""

import json
import math
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from murmurfl.app import record_training
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.outcome import result_schema
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import ConfigurationError, SumAssumption
from murmurfl.privacy.accounting.guarantee import stated_guarantee
from murmurfl.strategies import CorrelatedFedAvg, ResultFolder, SecureAggregation
from typer.testing import CliRunner

from tests.harness.errors import raises

SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3)}


def app_with(**policy):
    app = ClientApp(mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(**policy))])

    @app.train()
    def train(msg, context):
        arrays = {name: Array(array.numpy() + 0.1) for name, array in msg.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=msg)

    return app


@pytest.fixture
def trained():
    """A training of four clients, and what they state after it."""

    def train(nodes=4, summed=None, folder=None, simulated=False, **policy):
        grid = InProcessGrid(
            app_with(clip_norm=1.0, mu=1.0, max_participations=3, **policy), nodes, {}, simulated=simulated
        )
        strategy = CorrelatedFedAvg(num_clients=4, secure_aggregation=summed, callbacks=[ResultFolder(folder)])
        result = strategy.start(
            grid,
            ArrayRecord([np.zeros(5)]),
            num_rounds=3,
            evaluate_fn=lambda number, _: MetricRecord({"accuracy": 0.2 * number, "of-rows": [1, 2]}),
        )
        return strategy, result, strategy.ask_privacy(grid)

    return train


def test_a_training_is_reported_and_listed_as_a_run_is(tmp_path, trained):
    written = record_training(tmp_path / "x", *trained(), task="breast tumours")
    document = json.loads((tmp_path / "x" / "result.json").read_text())
    assert document == json.loads(json.dumps(written))
    jsonschema.Draft202012Validator(result_schema()).validate(document)
    assert set(document) == set(result_schema()["properties"]) - {"queries", "rehearsal", "all_calls"}
    assert document["privacy"]["unit"] == "client"
    assert document["mu"] == pytest.approx(1.0)
    assert "It is what 4 of 4 clients say of themselves" in document["guarantee"]
    assert document["accuracy"] == pytest.approx(0.6)
    assert [entry["accuracy"] for entry in document["per_round"]] == pytest.approx([0.2, 0.4, 0.6])
    assert (document["releases"], document["aggregated"], document["num_parameters"]) == (12, 12, 5)
    for command in (["report", str(tmp_path / "x")], ["list", str(tmp_path)]):
        said = CliRunner().invoke(cli, command)
        assert said.exit_code == 0, said.output
    assert "own:breast_tumours" in said.stdout
    page = (tmp_path / "x" / "report" / "index.html").read_text()
    assert document["guarantee"].partition(";")[0] in page
    assert "diverged" not in page, "no loss was measured"


def test_sums_are_said_to_rest_on_who_is_honest(tmp_path, trained):
    document = record_training(tmp_path, *trained(6, SecureAggregation(min_cohort=3, helpers=2), **SUMS), task="x")
    assert document["privacy"]["trust"] == "secure-aggregation"
    assert document["mu"] == pytest.approx(1.0, rel=1e-3)
    assert document["mu_local"] == pytest.approx(2**0.5, rel=1e-3)
    assert (document["min_honest"], document["min_cohort"], document["helpers"]) == (2, 3, 2)
    assert CliRunner().invoke(cli, ["report", str(tmp_path)]).exit_code == 0


def test_the_smallest_sum_that_a_client_allows_is_reported(tmp_path, trained):
    strategy, result, statements = trained(6, SecureAggregation(min_cohort=3, helpers=2), **SUMS)
    statements["0"] = {**statements["0"], "min-cohort": 4}
    assert record_training(tmp_path, strategy, result, statements, task="x")["min_cohort"] == 3


def test_the_weakest_client_is_what_is_said_of_all(tmp_path, trained):
    strategy, result, statements = trained()
    statements["2"] = {**statements["2"], "mu-guaranteed": 3.0, "unit": "sample"}
    document = record_training(tmp_path, strategy, result, statements, task="x")
    assert document["mu"] == 3.0
    assert document["privacy"]["unit"] == "sample"
    assert "same owner" not in document["privacy"]["sentence"]
    statements["1"] = {**statements["1"], "unit": "owner"}
    document = record_training(tmp_path / "owners", strategy, result, statements, task="x")
    assert "On clients that protect owners a sample is replaced by one of the same" in document["privacy"]["sentence"]


def test_a_client_without_masks_takes_the_sums_out_of_the_sentence(tmp_path, trained):
    strategy, result, statements = trained(6, SecureAggregation(min_cohort=3, helpers=2), **SUMS)
    statements["0"] = {**statements["0"], "trust": "untrusted-server"}
    document = record_training(tmp_path, strategy, result, statements, task="x")
    assert document["privacy"]["trust"] == "untrusted-server"
    assert document["mu"] == pytest.approx(2**0.5, rel=1e-3), "the worst case"


def test_evaluations_without_noise_are_named(tmp_path, trained):
    strategy, result, statements = trained()
    result.evaluate_metrics_clientapp[3] = MetricRecord({"accuracy": 1.0})
    assert "no epsilon covers" in record_training(tmp_path, strategy, result, statements, task="x")["guarantee"]


def test_nobody_is_spoken_for(tmp_path, trained):
    strategy, result, statements = trained()
    with raises(ConfigurationError, "missing", "statements"):
        record_training(tmp_path, strategy, result, {}, task="x")
    for statement in statements.values():
        statement["trust"] = "trusted-server"
    with raises(ConfigurationError, "conflict", "statements"):
        record_training(tmp_path, strategy, result, statements, task="x")
    assert not (tmp_path / "result.json").exists()


def test_log_ends_with_what_clients_guarantee_and_where_it_is(trained, caplog, tmp_path):
    with caplog.at_level("INFO", logger="flwr"):
        _, _, statements = trained(6, SecureAggregation(min_cohort=3, helpers=2), tmp_path / "left", **SUMS)
    said, where = caplog.messages[-2:]
    assert where.startswith(f"Its result is in {tmp_path / 'left'}: `murmurfl report`")
    assert said == f"Guarantee: {stated_guarantee(statements, 4, masked=True)}", (
        "the same as what they state in the end"
    )
    assert "It is what 4 of 4 clients say of themselves" in said
    assert "epsilon = " in said
    assert "worst case" in said


def test_a_training_leaves_what_its_record_would_be_without_being_asked(tmp_path, trained, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy, result, statements = trained(folder="")
    (folder,) = (tmp_path / "runs").glob("CorrelatedFedAvg-*")
    recorded = record_training(tmp_path / "x", strategy, result, statements, task="")
    assert {**json.loads((folder / "result.json").read_text()), "date": ""} == {**recorded, "date": ""}
    said = CliRunner().invoke(cli, ["report", str(folder)])
    assert said.exit_code == 0, said.output
    assert "AS STATED" in (folder / "report" / "index.html").read_text()


def test_a_simulated_training_is_a_rehearsal_in_its_first_word(tmp_path, trained, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        trained(folder=tmp_path / "left", simulated=True)
    assert next(line for line in caplog.messages if line.startswith("REHEARSAL: ")) in caplog.messages[-2:]
    assert "Guarantee: " not in caplog.text
    assert "REHEARSAL: " in json.loads((tmp_path / "left" / "result.json").read_text())["guarantee"]
    assert CliRunner().invoke(cli, ["report", str(tmp_path / "left")]).exit_code == 0
    page = (tmp_path / "left" / "report" / "index.html").read_text()
    assert "AS STATED" not in page
    assert ">REHEARSAL" in page
    assert "ε would be" in page


def test_a_training_leaves_other_runs_as_they_are(tmp_path, trained):
    for name in ("mine", "mine-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "result.json").write_text("{}")
    (tmp_path / "mine-2" / "notes.txt").write_text("kept")
    (tmp_path / "empty").mkdir()
    for name, found in (("mine", "mine-3"), ("empty", "empty"), ("empty", "empty-2")):
        trained(folder=tmp_path / name)
        assert json.loads((tmp_path / found / "result.json").read_text())["rounds"] == 3
    assert (tmp_path / "mine" / "result.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "mine-2").iterdir()] == ["notes.txt"]


def test_without_a_folder_a_training_says_and_leaves_nothing(tmp_path, trained, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO", logger="flwr"):
        trained(folder=None)
    assert not [message for message in caplog.messages if message.startswith(("Guarantee", "Its result"))]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_takes_no_model_away(tmp_path, trained, caplog):
    (tmp_path / "file").write_text("")
    _, result, _ = trained(folder=tmp_path / "file" / "run")
    assert len(result.arrays) == 1
    assert "result could not be written" in caplog.text


def test_nothing_is_said_of_sums_where_the_server_has_none(trained):
    _, _, statements = trained(6, SecureAggregation(min_cohort=3, helpers=2), **SUMS)
    alone, summed = (stated_guarantee(statements, 4, masked=masked) for masked in (False, True))
    assert summed.trust == "secure-aggregation"
    assert (alone.trust, alone.mu) == ("untrusted-server", pytest.approx(summed.loss.worst_case.mu))


def test_run_of_our_own_app_says_its_guarantee_itself(caplog):
    with caplog.at_level("INFO", logger="flwr"):
        run_cohort(RunConfig(num_rounds=1))
    assert not [message for message in caplog.messages if message.startswith("Guarantee: ")]


@pytest.mark.parametrize("stated", [{"trust": "untrusted-server"}, {"mu-guaranteed": math.nan, "delta": 1e-5}])
def test_statement_that_makes_no_sense_is_logged_and_ends_nothing(stated, caplog, tmp_path):
    training = SimpleNamespace(stated={"a": stated}, num_clients=4, secure_aggregation=None, simulated=False)
    ResultFolder(tmp_path / "runs").on_end(training, None, Result())
    assert not (tmp_path / "runs").exists()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("What clients state makes no guarantee")
