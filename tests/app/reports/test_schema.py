"""What a run writes is what the schema of result.json says; results without a version are read as well."""

import json
from datetime import UTC, datetime, timedelta

import jsonschema
import pytest
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.outcome import FORMAT, result_schema
from murmurfl.app.runs.result import write_record
from typer.testing import CliRunner

from murmurfl import __version__
from tests.app.plain import simulate

pytestmark = pytest.mark.usefixtures("no_forecast")

VALIDATOR = jsonschema.Draft202012Validator(result_schema(), format_checker=jsonschema.FormatChecker())
SETTINGS = {
    "default": {"num_rounds": 2},
    "nothing private": {"num_rounds": 2, "mechanism": "none"},
    "lossy": {"num_rounds": 5, "lost_replies": 0.4, "noise_quality": "fast", "evaluate_every": 2},
    "norms": {"num_rounds": 2, "gradient_norm": True, "model": "mlp"},
    "sums": {"num_rounds": 2, "trust": "secure-aggregation", "num_clients": 4, "clients_per_round": 4},
    "trusted": {"num_rounds": 2, "strategy": "tree-momentum"},
    "online": {
        "strategy": "online",
        "task": "synthetic-logistic",
        "partition": "own",
        "model": "logistic",
        "clip_unit": "contractive",
        "num_clients": 2,
        "clients_per_round": 2,
        "num_rounds": 3,
        "batch_size": 5,
        "synthetic_samples": 200,
        "synthetic_features": 5,
        "learning_rate": 0.01,
    },
    "shuffled": {
        "strategy": "shuffled",
        "task": "synthetic-logistic",
        "partition": "own",
        "model": "logistic",
        "num_clients": 1,
        "clients_per_round": 1,
        "variant": "dp-shuffleg",
        "num_rounds": 1,
        "synthetic_samples": 80,
        "synthetic_features": 5,
    },
    "diverged": {"num_rounds": 3, "model": "mlp", "learning_rate": 1e30},
}


@pytest.fixture
def document(tmp_path):
    write_record(simulate(num_rounds=2), tmp_path)
    return json.loads((tmp_path / "result.json").read_text())


def test_the_schema_is_one_and_is_printed():
    jsonschema.Draft202012Validator.check_schema(result_schema())
    assert json.loads(CliRunner().invoke(cli, ["report", "--schema"]).stdout) == result_schema()


def test_a_rehearsal_of_a_table_follows_it(tmp_path):
    rows = [{"age": age, "site": f"s{age % 2}", "ill": "yes" if age > 50 else "no"} for age in range(20, 90)]
    write_record(fit(rows, label="ill", site="site", strategy="full-batch", num_rounds=2), tmp_path)
    document = json.loads((tmp_path / "result.json").read_text())
    VALIDATOR.validate(document)
    assert set(document) == set(result_schema()["properties"]) - {"all_calls"}
    assert len(document["queries"]["knots"]["answer"]) == 1 + 8
    assert document["rehearsal"]["baselines"]["linear"]["auc"] > 0.9
    page = make_report([tmp_path], tmp_path / "report").read_text()
    assert "boosted trees of 56 rows, not private" in page
    assert "this model with --trust secure-aggregation" in page


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("name", "engine"), [("default", "inprocess"), *((name, "cohort") for name in SETTINGS)])
def test_results_follow_it(name, engine, tmp_path):
    before = datetime.now(UTC)
    write_record(simulate(engine=engine, **SETTINGS[name]), tmp_path)
    document = json.loads((tmp_path / "result.json").read_text())
    VALIDATOR.validate(document)
    described = set(result_schema()["properties"]) - {
        "queries",
        "rehearsal",
        "all_calls",
    }  # of runs that have further ones
    assert set(document) == described, "every key is described, and every described one there"
    assert document["format"] == FORMAT == 1
    assert document["engine"] == engine
    assert timedelta(0) <= datetime.fromisoformat(document["date"]) - before + timedelta(seconds=1) < timedelta(hours=1)
    assert document["versions"]["murmurfl"] == __version__
    assert {"python", "flwr", "numpy", "scipy"} <= set(document["versions"])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "change",
    [
        {"format": "1"},
        {"engine": "spark"},
        {"versions": {"numpy": 2}},
        {"epsilon": "24"},
        {"privacy": {}},
        {"per_round": [{"round": 0}]},
        {"config": {"mu": "4"}},
        {"training": {"rows": 1}},
    ],
)
def test_another_document_would_be_noticed(document, change):
    VALIDATOR.validate(document)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({**document, **change})
    missing = {key: value for key, value in document.items() if key not in change}
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(missing)


@pytest.mark.parametrize("version", [None, 0, 2])
def test_a_result_of_another_format_is_not_reported(tmp_path, document, version):
    (tmp_path / "result.json").write_text(json.dumps({**document, "format": version}))
    result = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert f"of format 1 in {tmp_path}/result.json, got one of format {version}" in " ".join(result.output.split())
    assert not (tmp_path / "report").exists()
