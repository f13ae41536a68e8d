"""`murmurfl plan`: what it prints of the noise, the trust models and the updates of whole clients."""

import json

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.planning import rehearsal
from murmurfl.app.planning.deciding import Candidate
from murmurfl.app.planning.rehearsal import ALIKE, LocalBaseline
from murmurfl.clients import Label, Part, Schema
from murmurfl.privacy import gdp_mu
from typer.testing import CliRunner

PLANS = {
    "a table of clients": ["--clients=10", "--samples=140", "--rounds=17", "--batch=8", "--epsilon=2"],
    "a run under secure aggregation": ["--set", "trust=secure-aggregation", "--set", "num-rounds=4", "--details"],
    "whole clients": ["--unit=client", "--clients=100", "--parameters=60000", "--epsilon=4", "--samples=600"],
}


@pytest.fixture
def not_rehearsed(monkeypatch):
    """Plan without trying out the ways to train, which tests of rehearsals do."""
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: [])


@pytest.mark.parametrize("name", PLANS)
def test_plan_prints(name, not_rehearsed, check_output):
    planned = CliRunner().invoke(cli, ["plan", *PLANS[name]])
    assert planned.exit_code == 0, planned.output
    check_output(planned.stdout)


FEW = ["--clients=6", "--samples=40", "--parameters=8", "--epsilon=3", "--rounds=3"]


@pytest.mark.usefixtures("no_result_folder")
@pytest.mark.parametrize(
    ("options", "helpers"),
    [([], 0), (["--trust=secure-aggregation"], 2), (["--sample-uses=once"], 0), (["--per-round=3"], 0)],
)
def test_the_code_of_a_plan_runs_and_has_its_settings(options, helpers, not_rehearsed):
    """It is executed next to a project's own model, loss, samples and schema."""
    torch = pytest.importorskip("torch")
    planned = CliRunner().invoke(cli, ["plan", *FEW, *options, "--code"])
    assert planned.exit_code == 0, planned.output
    assert "murmurfl run" not in planned.stdout
    code = planned.stdout[planned.stdout.index("from murmurfl") :].partition("More, with --details")[0]

    def samples(context):
        random = np.random.Generator(np.random.Philox(key=int(context.node_config["partition-id"])))
        return random.uniform(-1, 1, size=(40, 3)).astype(np.float32), random.integers(0, 2, 40)

    project = {
        "make_model": lambda: torch.nn.Linear(3, 2),
        "loss": torch.nn.functional.cross_entropy,
        "samples": samples,
        "schema": Schema(inputs=(Part(shape=(3,), bounds=(-1, 1)),), label=Label(classes=2)),
    }
    before, _, after = code.partition("result = ")
    exec(compile(before, "plan", "exec"), project)
    project["grid"] = InProcessGrid(project["app"], 6 + helpers, {})
    exec(compile(f"result = {after}", "plan", "exec"), project)
    policy, strategy = project["app"].policy, project["strategy"]
    assert policy.mu == pytest.approx(gdp_mu(3.0, 1e-5))
    assert (strategy.num_clients, strategy.clients_per_round) == (6, 3 if "--per-round=3" in options else 6)
    assert len(strategy.history) <= 3
    assert sum(report.aggregated for report in strategy.history) > 0
    assert (strategy.secure_aggregation is not None) == bool(helpers)


def test_a_plan_of_updates_has_no_code():
    planned = CliRunner().invoke(
        cli, ["plan", "--unit=client", "--clients=9", "--parameters=8", "--epsilon=4", "--code"]
    )
    assert planned.exit_code == 2


def test_with_code_a_plan_says_only_what_the_code_does(not_rehearsed):
    """The printed ClientApp counts no clipped gradients, and its clip norm follows from the schema."""
    options = ["--clients=100", "--samples=600", "--epsilon=4"]
    run, code = (CliRunner().invoke(cli, ["plan", *options, *more]).stdout for more in ([], ["--code"]))
    assert "gradients are clipped" in run
    assert "gradients are clipped" not in code
    assert "All of mu is for gradients" in code
    assert "clip norm from the schema" in code
    assert "mu = 0.925" in code


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_sums_are_advised_only_where_they_are_not_chosen(trust, monkeypatch):
    monkeypatch.setattr(Candidate, "local_baselines", [LocalBaseline(ALIKE, 0.1, 0.9, 0.5)])
    planned = CliRunner().invoke(cli, ["plan", *FEW, f"--trust={trust}"])
    assert "Not worth federating" in planned.stdout
    assert ("--trust secure-aggregation" in planned.stdout) == (trust == "untrusted-server")


def test_code_and_json_exclude_each_other():
    assert CliRunner().invoke(cli, ["plan", *FEW, "--code", "--json"]).exit_code == 2


def test_a_declared_skew_with_a_typo_is_refused_with_the_nearest_name():
    planned = CliRunner().invoke(cli, ["plan", *FEW, "--partition=lable-skew"])
    assert planned.exit_code != 0
    assert "did you mean 'label-skew'?" in " ".join(planned.stderr.split())


@pytest.mark.more_cases
def test_sites_with_a_single_record_have_a_plan():
    pytest.importorskip("flwr_datasets")
    skew = ["--set=task=digits", "--set=num-clients=20", "--set=partition=dirichlet", "--set=partition.alpha=0.1"]
    planned = CliRunner().invoke(cli, ["plan", *skew, "--epsilon=4", "--json"])
    assert planned.exit_code == 0, planned.output
    alike, declared = json.loads(planned.stdout)["decision"]["worth_federating"]
    assert (declared["partition"], declared["amount"], declared["is_worth"]) == ("dirichlet", 0.1, True)
    assert declared["alone"] < alike["alone"]
    assert not declared["is_worth_on_own"]
