"""`murmurfl audit`: the run's own clients, measured; half their noise is found out."""

import json
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.auditing.run_audit import audit_lines, audit_run, canaries
from murmurfl.app.commands.main import cli
from murmurfl.app.models import make_model
from murmurfl.app.runs.experiment import Experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy.release.clipping import clip_per_sample
from typer.testing import CliRunner

RUNS, RUNS_TO_CATCH = 600, 300

CONFIGS = {
    "mu2": {"mu": 1},
    "noisy sgd": {"strategy": "noisy-sgd", "mu": 1},
    "lost replies, blt": {"mechanism": "blt", "mu": 1, "lost-replies": 0.3},
    "samples that return": {"mechanism": "banded", "passes": 2, "batch-size": 30, "mu": 1},
    "online": {
        "strategy": "online",
        "mu": 1,
        "num-rounds": 6,
        "clip-norm": 1,
        "learning-rate": 0.05,
    },  # which the canary fills
}


@pytest.fixture
def half_the_noise(monkeypatch):
    honest = Experiment.client

    def client(*arguments):
        made = honest(*arguments)
        made.privatizer.plan = replace(made.privatizer.plan, noise_std=made.privatizer.plan.noise_std / 2)
        return made

    monkeypatch.setattr(Experiment, "client", client)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_the_measured_loss_stays_below_the_claimed_and_is_not_nothing(name):
    """Seeds are fixed; an honest run of other seeds would be accused with probability at most 5 %."""
    audit = audit_run(RunConfig.from_mapping(CONFIGS[name]), RUNS)
    assert not audit.result.violated
    assert audit.result.claimed_mu == pytest.approx(1.0, rel=1e-6)
    assert audit.result.measured_mu > 0.5
    assert "The claim stands" in audit_lines(audit)[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["mu2", "lost replies, blt", "online"])
def test_half_the_noise_is_found_out(name, half_the_noise):
    audit = audit_run(RunConfig.from_mapping(CONFIGS[name]), RUNS_TO_CATCH)
    assert audit.result.violated
    assert "refuted" in audit_lines(audit)[-1]


def test_canaries_use_all_of_the_sensitivity():
    model = make_model("softmax", 64, 10, 1.0)
    point, features, labels = canaries(model, 0.5, seed=3)
    rows = clip_per_sample(np.asarray(model(point, (features, labels)), dtype=np.float64), 0.5)
    assert np.linalg.norm(rows[0] - rows[1]) > 0.99 * 2 * 0.5


def test_the_command_prints_claimed_against_measured():
    result = CliRunner().invoke(cli, ["audit", "--set", "mu=2", "--set", "num-rounds=3", "--runs", "100"])
    assert result.exit_code == 0, result.output
    assert "claimed    mu 2 " in result.output
    assert "measured   mu >= " in result.output


@pytest.mark.long
def test_the_command_fails_when_the_claim_is_false(half_the_noise):
    result = CliRunner().invoke(cli, ["audit", "--set", "mu=1", "--runs", str(RUNS_TO_CATCH), "--json"])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["violated"] is True
    assert "above the claimed" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--set", "strategy=trusted-mu2"], ["--set", "mechanism=none"], ["--runs", "3"], ["--set", "x=1"]]
)
def test_what_cannot_be_audited_is_refused_in_one_line(arguments):
    result = CliRunner().invoke(cli, ["audit", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("murmurfl: Expected")
