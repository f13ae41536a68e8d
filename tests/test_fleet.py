"""The benchmark of thousands of clients, with few: what it counts as nothing lost, and that it would see a loss."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig

from benchmarks import fleet
from benchmarks.fleet_clients import Clients, Told
from benchmarks.fleet_grid import Weather

CLIENTS, ASKED, FEATURES, ROUNDS = 10, 5, 4, 5


class Here:
    """A pipe to clients of this process."""

    def __init__(self, clients):
        self.clients, self.compared, self._answer = clients, None, None

    def send(self, asked):
        what, given = asked
        self._answer = getattr(self.clients, what)(given)
        self.compared = given if what == "compare" else None

    def recv(self):
        return self._answer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of few clients: the pipe, and what was measured."""
    folder = tmp_path_factory.mktemp("fleet")
    config = RunConfig(
        task="synthetic",
        synthetic_samples=CLIENTS,
        synthetic_features=FEATURES,
        num_clients=CLIENTS,
        clients_per_round=ASKED,
        batch_size=1,
        num_rounds=ROUNDS,
        mu=2.0,
    )
    experiment = prepare(config)
    told = Told(CLIENTS, FEATURES, fleet.SAMPLES, experiment.policy(0).clip_norm, config.mu)
    pipe = Here(Clients(folder, told))
    return pipe, fleet._train(pipe, experiment, folder, {"prepared": 1.0})


@pytest.mark.long
def test_nothing_is_lost_over_clients_that_are_late_or_down(trained):
    _, found = trained
    compared = found["compared"]
    assert compared["agreeing"] == compared["clients"] > 0
    assert compared["sums_equal"]
    assert compared["released"] - found["aggregated"] == compared["carried"]
    assert found["requests"] == ROUNDS * ASKED
    assert found["late_answers"] > 0
    assert found["refused"] == found["malformed"] == 0


@pytest.mark.long
def test_a_release_that_the_server_forgot_or_counted_twice_would_be_seen(trained):
    pipe, _ = trained
    session, acks, total = pipe.compared
    client = next(name for name, release in acks.items() if release > 1)
    for wrong in (0, acks[client] + 1):
        compared = pipe.clients.compare((session, {**acks, client: wrong}, total))
        assert compared["agreeing"] == compared["clients"] - 1
    twice = np.frombuffer(total) + 2.0**-20
    assert not pipe.clients.compare((session, acks, twice.tobytes()))["sums_equal"]


@pytest.mark.long
def test_the_table_says_what_became_of_every_release(trained):
    _, found = trained
    row = {"clients": CLIENTS, "asked": ASKED, "rounds": ROUNDS, **found}
    said = fleet.table([row])
    assert f"| {CLIENTS} | {ASKED} | {10 * (FEATURES + 1)} |" in said
    assert f"{found['compared']['released']} releases" in said


def test_so_many_clients_are_down_and_late_as_is_said():
    """2,000 coins: further than 0.045 from their share in less than one of a million."""
    weather = Weather()
    assert np.mean([weather.is_down(i, 0.0) for i in range(2_000)]) == pytest.approx(weather.down, abs=0.045)
    takes = np.array([weather.takes(i, i, "train") for i in range(2_000)])
    assert np.mean(takes >= weather.slow[0]) == pytest.approx(weather.late, abs=0.045)
    assert max(weather.takes(i, i, "query") for i in range(500)) < weather.slow[0]
    always = replace(weather, down=0.5)
    now = always.up_again(3, 0.0)
    assert not always.is_down(3, now)
