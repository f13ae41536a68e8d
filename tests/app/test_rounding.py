"""One rounding of mu and epsilon wherever they are shown, and no spread of a single run."""

import re
from pathlib import Path

import pytest
from murmurfl.app.auditing.run_audit import _rounded_down
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.papers.accuracy import AccuracyTable
from murmurfl.app.papers.tran_cutkosky_2022 import GradientNormTable
from murmurfl.app.papers.zhang_2025 import SUMS, RegretTable
from murmurfl.app.reports.table import spread
from murmurfl.app.runs.progress import RoundLine
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import gdp_epsilon, gdp_mu, rounded_up, row_bytes
from murmurfl.privacy.accounting.guarantee import rounded_down
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
DELTA = 1e-5


def command(*arguments):
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_says_the_same_epsilon_in_every_round_and_in_its_summary(tmp_path):
    settings = [word for one in ("num-rounds=2", "mu=1", "trust=untrusted-server") for word in ("--set", one)]
    text = command("run", "--out", tmp_path, *settings, "--details")
    figures = re.findall(r"epsilon (?:= )? *([\d.]+)", text)
    assert len(figures) == 5  # two rounds, the sentence above and below, the summary
    assert set(figures) == {"4.378"}
    assert gdp_epsilon(1.0, DELTA) > 4.377


@pytest.mark.parametrize("mu", [4.0, 1.2345678, 0.333333])
def test_a_budget_reads_like_the_session_that_spends_all_of_it(mu, tmp_path):
    from murmurfl.privacy import PrivacyPolicy, Privatizer, SQLiteLedger

    path = tmp_path / "ledger"
    command("ledger", "create", path, "--delta", DELTA, "--mu", mu)

    def amounts():
        return dict(
            re.findall(r"^(budget|spent|left) +epsilon (\S+) .*", command("ledger", "show", path), re.MULTILINE)
        )

    assert amounts() == {
        "budget": rounded_up(gdp_epsilon(mu, DELTA)),
        "spent": "0",
        "left": rounded_down(gdp_epsilon(mu, DELTA)),
    }
    ledger = SQLiteLedger(path)
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=2, mu=mu)
    Privatizer(policy, 3, 9, ledger, ledger.keys(), data=row_bytes(range(9))).release(
        "s", 0, lambda samples: [[0.0] * 3]
    )
    assert amounts() == {"budget": rounded_up(gdp_epsilon(mu, DELTA)), "spent": amounts()["budget"], "left": "0"}


def test_a_round_and_a_table_round_as_the_guarantee_does():
    result = run_cohort(RunConfig(num_rounds=1, mu=gdp_mu(1.23456, DELTA)))
    assert RoundLine.of(result.progress[-1], "exact").epsilon == rounded_up(result.epsilon) == "1.235"


def entry(runs):
    return {"mean": 0.5, "std": 0.0 if runs == 1 else 0.1, "runs": [0.5] * runs}


@pytest.mark.parametrize("kind", [AccuracyTable(), GradientNormTable(), RegretTable()], ids=lambda kind: kind.name)
@pytest.mark.parametrize("runs", [1, 3])
def test_a_single_run_has_no_spread(runs, kind):
    figures = {name: entry(runs) for name in ("accuracy", "loss", "mu", "epsilon", "delta", "seconds")}
    algorithm = {**figures, "settings": {"strategy": "mu2"}, "paper": {}}
    settings = {"num-clients": 2, "clients-per-round": 2, "batch-size": 1, "mu": 1.0, "learning-rate": 0.1}
    if isinstance(kind, GradientNormTable):
        algorithm |= {"gradient_norm": entry(runs), "last_gradient_norm": entry(runs)}
    if isinstance(kind, RegretTable):
        curve = {"rounds": [1], "mean": [5.0], "std": [0.0]}
        algorithm["curves"] = dict.fromkeys(SUMS, curve)
    document = {"cells": [{"table": "t", "settings": settings, "algorithms": {"mu2": algorithm}}]}
    table = kind.table(document)
    spreads = [value for name, value in table.rows[0].items() if name.startswith("±")]
    assert spreads
    assert all((value is None) == (runs == 1) for value in spreads)
    assert ("±" in table.markdown()) == (runs > 1)
    assert spread(0.5, None, ".1f") == "0.5"


def test_what_was_measured_is_a_lower_bound_and_rounded_down():
    assert [_rounded_down(value) for value in (24.3899, 4.0, 0.0)] == ["24.38", "4", "0"]


def test_nothing_else_rounds_a_mu_or_an_epsilon():
    """Settings that were asked for, such as a table's name, are not rounded: ``:g``."""
    own = re.compile(r"\{[^{}]*(?:epsilon|\bmu\b|_mu\b)[^{}]*:\.\d[efg]\}")
    found = [
        f"{path.name}: {line.strip()}"
        for folder in ("app", "clients", "strategies", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if own.search(line)
    ]
    # What an audit estimates, or could show at most, is neither a claim nor a bound.
    assert {line.partition(":")[0] for line in found} <= {"run_audit.py"}, found
    names = ("estimated_mu", "canary_mu", "largest_measurable_mu")
    assert all(any(name in line for name in names) for line in found)
