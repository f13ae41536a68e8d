"""Examples that protect all data of a client: where the forecast says yes, where it says no, and a legacy project."""

import ast
import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from murmurfl.privacy import Guarantee, gdp_mu
from murmurfl.privacy.accounting.noise_forecast import StatedNoise, forecast_of, stated_noise
from murmurfl.privacy.forecast_text import forecast_banner

from tests.harness.packages import EXAMPLES, accuracy

STATED = Guarantee(gdp_mu(4.0, 1e-5), 1e-5, "noise on each client, by its own account", unit="client").sentence


def test_swap_strategy(run_example):
    lines = run_example("swap-strategy", num_clients=6, num_server_rounds=1)
    assert any(line.startswith("Round 1: 6 of 6 updates aggregated") for line in lines)
    assert any(STATED in line for line in lines)
    accuracy(lines)


def test_swap_strategy_changes_two_lines_of_a_plain_project():
    """Beside imports: the strategy, and the ClientApp with its policy."""
    folder = EXAMPLES / "swap-strategy" / "swap_strategy"
    assert "murmurfl" not in (folder / "task.py").read_text()
    for name, ours in (("client_app.py", ["POLICY =", "app ="]), ("server_app.py", ["strategy ="])):
        tree = ast.parse((folder / name).read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("murmurfl")
            for alias in node.names
        }
        lines = [line.strip() for line in (folder / name).read_text().splitlines()]
        used = [line for line in lines if any(f"{word}(" in line for word in imported) and "#" not in line]
        assert [line[: line.index("=") + 1] for line in used] == ours


@pytest.mark.long
def test_where_the_forecast_says_yes_the_model_is_useful(run_example):
    """94 % +- 2 %, and one of ten thousand runs would be below 85 %; the larger class alone is 59 %."""
    lines = run_example("swap-strategy")
    assert readme_forecast("swap-strategy") in words(" ".join(lines))
    assert accuracy(lines) > 0.85


def test_too_few_clients_are_told_so(run_example):
    """With six clients in the place of a hundred: the same words, other figures."""
    lines = run_example("too-few-clients", num_clients=6, num_server_rounds=1, local_epochs=1)
    assert "THIS MODEL IS LIKELY TO BE USELESS" in words(" ".join(lines))
    assert any(STATED in line for line in lines)


def test_too_few_clients_shows_the_forecast_that_it_gets(project):
    policy = project("too-few-clients", "client_app").UNTRUSTED
    plan = policy.privacy_policy().plan(410)
    stated = {**stated_noise(policy.privacy_policy(), plan, 1), "mu-guaranteed": plan.mu, "delta": 1e-5}
    stated |= {"max-participations": 10, "unit": "client", "mechanism": "independent"}
    clients = [StatedNoise.read(stated)] * 100
    found = forecast_of(clients, num_parameters=410, clients=100, per_round=100, rounds=10)
    assert readme_forecast("too-few-clients") == words(" ".join(forecast_banner(found)))


def test_too_few_clients_trains_as_the_project_it_was():
    assert "murmurfl" not in (EXAMPLES / "too-few-clients" / "too_few_clients" / "task.py").read_text()


def readme_forecast(folder):
    """The forecast that a README shows, in one line."""
    (shown,) = re.findall(
        r"^```text\n(.*?)^```", (EXAMPLES / folder / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return words(shown)


def words(text):
    """Without the bars of a warning, and in one line, wherever its lines end."""
    return " ".join(re.sub(r"={3,}", "", text).split())


def test_a_legacy_project_with_a_strategy_of_its_own(run_example):
    """Two rounds of fifteen, of which the model is still noise."""
    lines = run_example("legacy-numpyclient", nodes=102, num_server_rounds=2)
    (line,) = [line for line in lines if line.startswith("Round 2: 100 of 100 updates aggregated. mu = 0.925")]
    assert "if one helper and 90 clients of each sum are honest" in line
    accuracy(lines)


@pytest.mark.long
def test_a_legacy_project_is_useful(run_example):
    """88 % +- 2 %, and one of ten thousand runs would be below 78 %; guessing is 10 %."""
    lines = run_example("legacy-numpyclient", nodes=102)
    assert "Forecast before the first round: useful." in words(" ".join(lines))
    assert accuracy(lines) > 0.78


def test_the_own_strategy_does_what_it_did_before(project):
    """The settings of a round reach every client; the mean of the models is the one that is evaluated."""
    strategy = project("legacy-numpyclient", "strategy").AveragedModels(lr=0.5, memory=0.8, num_clients=2, seed=1)

    class Sent:
        def configure_train(self, server_round, arrays, config, grid):
            return [config]

        def aggregate_train(self, server_round, replies):
            return ArrayRecord([np.full((64, 10), float(server_round)), np.zeros(10)]), None

    base = type(strategy).__mro__[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "configure_train", Sent.configure_train)
        patch.setattr(base, "aggregate_train", Sent.aggregate_train)
        (config,) = strategy.configure_train(2, ArrayRecord(), ConfigRecord({"own": 1}), None)
        assert dict(config) == {"own": 1, "lr": pytest.approx(0.5 * 0.98**2), "epochs": 2}
        for server_round in (1, 2):
            arrays, _ = strategy.aggregate_train(server_round, [])
    assert arrays.to_numpy_ndarrays()[0][0, 0] == 2.0
    assert strategy.mean[0][0, 0] == pytest.approx(0.8 * 1.0 + 0.2 * 2.0)
