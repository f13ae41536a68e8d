"""What a run's files say of its clients: by name, or of very many in groups."""

import json
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports import making
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.plots import run_plots
from murmurfl.app.runs import client_statements
from murmurfl.app.runs import result as run_files
from murmurfl.app.runs.client_statements import GroupedStatements, Participation, compact, statement_groups
from murmurfl.app.runs.outcome import result_schema
from murmurfl.app.runs.result import write_record
from murmurfl.app.settings.run_config import RunConfig

CONFIG = RunConfig(
    partition="unequal", num_clients=12, clients_per_round=4, num_rounds=5, batch_size=10, allow_exhaustion=True, mu=2.0
)


@pytest.fixture(scope="module")
def result():
    return run_cohort(CONFIG)


def written(result, folder):
    document = write_record(replace(result), folder)  # nothing is kept from before
    assert document == json.loads((folder / "result.json").read_text())
    return document, json.loads((folder / "clients.json").read_text())


def test_the_files_name_every_client(result, tmp_path):
    document, clients = written(result, tmp_path / "run")
    assert document["client_groups"] is None
    assert list(document["clients"]) == [str(i) for i in range(12)]
    assert document["clients"] == {name: dict(said) for name, said in result.statements.items()}
    assert sorted(name for stream in clients["streams"] for name in stream["clients"]) == sorted(document["clients"])
    assert all(stream["count"] == len(stream["clients"]) for stream in clients["streams"])


def test_the_files_of_very_many_clients_name_groups_of_them(result, tmp_path, monkeypatch):
    document, clients = written(result, tmp_path / "few")
    monkeypatch.setattr(client_statements, "MOST_NAMED", 11)
    grouped, summarised = written(result, tmp_path / "many")
    assert grouped["clients"] is None
    assert sum(group["clients"] for group in grouped["client_groups"]) == 12
    for group in grouped["client_groups"]:
        same = [name for name, said in document["clients"].items() if said == group["statement"]]
        assert (len(same), same[0]) == (group["clients"], group["first"])
    assert grouped["releases"] == document["releases"] == 20
    assert set(grouped) == set(result_schema()["required"])
    assert summarised["rounds"] == clients["rounds"]  # who was asked is always there
    assert [{**stream, "clients": []} for stream in clients["streams"]] == summarised["streams"]


def test_clients_written_by_round_are_one_document(result, tmp_path):
    run_files.write_clients(result, tmp_path / "clients.json")
    document = json.loads((tmp_path / "clients.json").read_text())
    assert document["rounds"] == {str(one.report.server_round): dict(one.clients) for one in result.progress}
    assert (tmp_path / "clients.json").read_text() == json.dumps(document) + "\n"
    run_files.write_clients(replace(result, progress=[]), tmp_path / "none.json")
    assert json.loads((tmp_path / "none.json").read_text())["rounds"] == {}


def test_a_report_of_very_many_clients_shows_groups(result, tmp_path, monkeypatch):
    written(result, tmp_path / "few")
    monkeypatch.setattr(client_statements, "MOST_NAMED", 11)
    written(result, tmp_path / "many")
    few, many = (RecordedRun.read(tmp_path / name) for name in ("few", "many"))
    rows = making._clients(many).texts()
    assert len(rows) == len(many.outcome.client_groups)
    assert rows[0]["client"] == f"{many.outcome.client_groups[0].clients} as {many.outcome.client_groups[0].first}"
    assert making._clients(few).texts()[0] == {**rows[0], "client": "0"}
    captions = [{plot.name: plot.caption for plot in run_plots(run)} for run in (few, many)]
    assert captions[0]["noise"] == captions[1]["noise"]
    assert "participation" in captions[1]
    monkeypatch.setattr("murmurfl.app.reports.finding._MOST_ENTRIES", many.participation.size - 1)
    large = RecordedRun.read(tmp_path / "many")  # more cells than any picture shows
    assert large.participation is None
    assert not {"participation", "epsilon"} & {plot.name for plot in run_plots(large)}


def test_statements_that_are_equal_are_kept_once():
    said = [{"releases": k, "mu": 1.0} for k in range(3)]
    parts = [(said[0], np.arange(0, 50_000, 2)), (said[1], np.array([1, 7])), (dict(said[0]), np.array([3, 5]))]
    statements = GroupedStatements([*parts, (said[2], np.array([], np.int64))])
    assert len(statements) == 25_004
    assert [(group.count, group.first) for group in statement_groups(statements)] == [(25_002, "0"), (2, "1")]
    assert list(statements)[:9] == ["0", "1", "2", "3", "4", "5", "6", "7", "8"]
    assert statements["7"] == said[1]
    assert statements["5"] == statements["49998"] == said[0]
    assert sum(array.nbytes for array in statements._whose) <= 12 * len(statements)
    for unknown_node in ("9", "07", "-1", "x", "", "9" * 40, "50001"):
        assert unknown_node not in statements
    listed = {name: statements[name] for name in statements}
    assert statements == listed
    assert statement_groups(listed) == statement_groups(statements)
    assert dict(GroupedStatements([])) == {}


def test_who_took_part_is_kept_in_a_few_bytes_a_client():
    asked = {str(i): None if i % 3 else i + 1 for i in range(5, 1000, 7)}
    kept = compact(asked)
    assert isinstance(kept, Participation)
    assert dict(kept) == kept.plain() == asked
    assert kept._numbers.nbytes + kept._releases.nbytes == 8 * len(asked)
    for unknown_node in ("6", "05", "x", "1000"):
        assert unknown_node not in kept
    assert dict(compact({})) == {}
    for others in ({"a": 1}, {"10": 1, "9": 2}, {"07": 1}, {str(2**40): 1}):
        assert compact(others) is others
