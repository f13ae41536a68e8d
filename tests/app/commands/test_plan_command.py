"""`murmurfl plan`: what it prints of the noise, the trust models and the updates of whole clients."""

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.planning import rehearsal
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
