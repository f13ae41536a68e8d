"""What a run's files say of its machines: by name, or of very many in groups."""

import json
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports import making
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.plots import run_plots
from murmurfl.app.runs import machine_statements
from murmurfl.app.runs import result as run_files
from murmurfl.app.runs.machine_statements import GroupedStatements, Participation, compact, statement_groups
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
    return document, json.loads((folder / "machines.json").read_text())


def test_the_files_name_every_machine(result, tmp_path):
    document, machines = written(result, tmp_path / "run")
    assert document["machine_groups"] is None
    assert list(document["machines"]) == [str(i) for i in range(12)]
    assert document["machines"] == {name: dict(said) for name, said in result.statements.items()}
    assert sorted(name for stream in machines["streams"] for name in stream["machines"]) == sorted(document["machines"])
    assert all(stream["count"] == len(stream["machines"]) for stream in machines["streams"])


def test_the_files_of_very_many_machines_name_groups_of_them(result, tmp_path, monkeypatch):
    document, machines = written(result, tmp_path / "few")
    monkeypatch.setattr(machine_statements, "MOST_NAMED", 11)
    grouped, summarised = written(result, tmp_path / "many")
    assert grouped["machines"] is None
    assert sum(group["machines"] for group in grouped["machine_groups"]) == 12
    for group in grouped["machine_groups"]:
        same = [name for name, said in document["machines"].items() if said == group["statement"]]
        assert (len(same), same[0]) == (group["machines"], group["first"])
    assert grouped["releases"] == document["releases"] == 20
    assert set(grouped) == set(result_schema()["required"])
    assert summarised["rounds"] == machines["rounds"]  # who was asked is always there
    assert [{**stream, "machines": []} for stream in machines["streams"]] == summarised["streams"]


def test_machines_written_by_round_are_one_document(result, tmp_path):
    run_files.write_machines(result, tmp_path / "machines.json")
    document = json.loads((tmp_path / "machines.json").read_text())
    assert document["rounds"] == {str(one.report.server_round): dict(one.machines) for one in result.progress}
    assert (tmp_path / "machines.json").read_text() == json.dumps(document) + "\n"
    run_files.write_machines(replace(result, progress=[]), tmp_path / "none.json")
    assert json.loads((tmp_path / "none.json").read_text())["rounds"] == {}


def test_a_report_of_very_many_machines_shows_groups(result, tmp_path, monkeypatch):
    written(result, tmp_path / "few")
    monkeypatch.setattr(machine_statements, "MOST_NAMED", 11)
    written(result, tmp_path / "many")
    few, many = (RecordedRun.read(tmp_path / name) for name in ("few", "many"))
    rows = making._machines(many).texts()
    assert len(rows) == len(many.outcome.machine_groups)
    assert rows[0]["machine"] == f"{many.outcome.machine_groups[0].machines} as {many.outcome.machine_groups[0].first}"
    assert making._machines(few).texts()[0] == {**rows[0], "machine": "0"}
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
    for stranger in ("9", "07", "-1", "x", "", "9" * 40, "50001"):
        assert stranger not in statements
    listed = {name: statements[name] for name in statements}
    assert statements == listed
    assert statement_groups(listed) == statement_groups(statements)
    assert dict(GroupedStatements([])) == {}


def test_who_took_part_is_kept_in_a_few_bytes_a_machine():
    asked = {str(i): None if i % 3 else i + 1 for i in range(5, 1000, 7)}
    kept = compact(asked)
    assert isinstance(kept, Participation)
    assert dict(kept) == kept.plain() == asked
    assert kept._numbers.nbytes + kept._releases.nbytes == 8 * len(asked)
    for stranger in ("6", "05", "x", "1000"):
        assert stranger not in kept
    assert dict(compact({})) == {}
    for others in ({"a": 1}, {"10": 1, "9": 2}, {"07": 1}, {str(2**40): 1}):
        assert compact(others) is others
