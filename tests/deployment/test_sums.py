"""Secure aggregation between real processes over TLS: helpers and a server killed, replies lost, two runs at once.

Every check is exact: what the server added up is what the clients' data and the noise in their ledgers say, and the
model is that of the same releases given to the strategy without messages and masks.
"""

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines.loopback import LaunchError, toml_document
from murmurfl.app.engines.superlink import CONNECTION_NAME
from murmurfl.privacy import SQLiteOpeningRecord, read_ledger

from tests.deployment.rig import (
    HERE,
    Federation,
    assert_helpers_opened_what_the_server_has_and_nothing_twice,
    assert_ledgers_know_all_that_was_heard,
    assert_no_release_was_sent_with_two_contents,
    assert_nothing_is_missing_or_left_over,
    assert_the_model_is_that_of_the_same_releases_without_messages,
    configuration,
    federation,
)

pytestmark = pytest.mark.deployment

SETTINGS = {"trust": "secure-aggregation", "helpers": 2, "batch_size": 16, "node_deadline_s": 120.0, "mu": 1.0}
HELPERS = ["helper-0", "helper-1"]


def assert_all_is_well(real):
    assert_no_release_was_sent_with_two_contents(real)
    assert_ledgers_know_all_that_was_heard(real)
    assert_nothing_is_missing_or_left_over(real)
    assert_helpers_opened_what_the_server_has_and_nothing_twice(real)
    assert_the_model_is_that_of_the_same_releases_without_messages(real)


def start(real, plans=None):
    real.start({name: (plans or {}).get(name, {}) for name in (*real.running.helpers, *real.running.nodes)})


ROUNDS, CLIENTS, TIMEOUT_S = 12, 6, 15.0
# A fifth of all replies; those of the last round come, so that everything made was opened.
DROPPED, LATE = 0.14, 0.06


def test_lost_replies_leave_the_model_of_plain_sums(tmp_path):
    folder = tmp_path / "run"
    sizes = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "num_rounds": ROUNDS}
    cohort = {"min_cohort": 4, "colluders": 1, "round_timeout_s": TIMEOUT_S}
    config = configuration(folder, **{**SETTINGS, **sizes, **cohort, "give_up_after": 0})
    with federation(config, folder, 1500, {"max-participations": ROUNDS}, helpers=2) as real:
        late = {"delay": (LATE, TIMEOUT_S + 3.0, 1, ROUNDS - 1)}
        start(real, dict.fromkeys(real.running.nodes, late))
        real.submit({"drop": DROPPED, "seed": 2, "punctual_from": ROUNDS, "late": True})
        assert real.result()["rounds"] == ROUNDS
        assert real.result()["refusals"] == 0
        troubled = real.result()["lost_replies"] + real.result()["late_replies"]
        assert troubled > 0.1 * ROUNDS * CLIENTS
        assert_all_is_well(real)


# Helpers die in rounds 2, 3, 4, ...: before they look at a set, between every two steps of recording it, and after.
HELPER_STEPS = {
    "helper-0": ["open", "commit", "mark written", "recorded", "sent"],
    "helper-1": ["record", "mark", "mark renamed", "marked", "send"],
}


def test_helpers_killed_anywhere_open_each_set_once(tmp_path):
    folder = tmp_path / "run"
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 8, "min_cohort": 3, "colluders": 1}
    config = configuration(folder, **{**SETTINGS, **sizes, "round_timeout_s": 20.0, "give_up_after": 0})
    with federation(config, folder, 1500, {"max-participations": 10}, helpers=2) as real:
        start(
            real, {name: {"kills": [[s, 2 + i] for i, s in enumerate(steps)]} for name, steps in HELPER_STEPS.items()}
        )
        real.submit()
        for name, steps in HELPER_STEPS.items():
            assert [step for step, _ in real.lines(name, "killed")] == steps
            assert real.restarts[name] == len(steps)
        assert real.result()["rounds"] == 8
        assert_all_is_well(real)


# The set is saved and nobody was asked; everybody has opened it and nobody knows.
SERVER_KILLS = [["held", 2], ["opened", 3]]


def test_a_server_killed_before_opening_ends_with_the_same_model(tmp_path):
    folder = tmp_path / "run"
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 4, "min_cohort": 3, "colluders": 1}
    config = configuration(folder, **{**SETTINGS, **sizes, "round_timeout_s": 30.0})
    with federation(config, folder, 1200, {"max-participations": 4}, helpers=2) as real:
        start(real)
        for _ in SERVER_KILLS:
            with pytest.raises(LaunchError):
                real.submit({"kills": SERVER_KILLS})
        real.submit({"kills": SERVER_KILLS})
        assert (folder / "killed").read_text().splitlines() == [f"{step} {number}" for step, number in SERVER_KILLS]
        # The set of a round that was cut off was asked for again, and no client was asked a second time.
        sessions = [read_ledger(real.ledger(name)).sessions for name in real.running.nodes]
        assert [[session.releases for session in of_one] for of_one in sessions] == [[4]] * 3
        asked = Counter(numbers[0] for numbers, _, _ in real.events("asked"))
        assert set(asked.values()) == {1}
        assert_all_is_well(real)


KILLS = int(os.environ.get("MURMURFL_KILLS", "50"))
OF_THE_RUN, ROUNDS_OF_KILLS = -(-KILLS // 25), max(2 * KILLS // 5, 6)
LONGEST_PAUSE_S = 3.0
BURST = (4, 11)


class Killer(threading.Thread):
    """Kills members with SIGKILL at random moments: nodes, helpers and, now and then, the process of the run.

    They come in bursts, and between two of them the training goes on: a node whose session was not closed is let in
    again after a minute.
    """

    def __init__(self, real):
        super().__init__(daemon=True)
        self._real, self.killed, self.ended = real, [], threading.Event()
        self._random = np.random.Generator(np.random.Philox(key=50))

    def run(self):
        while not self._events() and not self.ended.wait(0.2):
            pass
        of_the_run = set(self._random.choice(np.arange(5, KILLS), size=OF_THE_RUN, replace=False).tolist())
        while len(self.killed) < KILLS and not self.ended.is_set():
            before = self._events()
            for _ in range(self._random.integers(*BURST)):
                self.ended.wait(self._random.uniform(0.0, LONGEST_PAUSE_S))
                names = sorted(self._real.running.running)
                name = "the run" if len(self.killed) in of_the_run else names[self._random.integers(len(names))]
                process = None if name == "the run" else self._real.running.running[name]
                pid = self._run() if process is None else process.pid
                if pid is not None and (process is None or process.poll() is None) and len(self.killed) < KILLS:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(name)
            while self._events() == before and not self.ended.wait(0.2):
                pass

    def _events(self):
        return sum(1 for kind in ("asked", "heard") for _ in self._real.folder.glob(f"{kind}-*.npz"))

    def _run(self):
        """The process of the run; None if there is none."""
        with suppress(OSError, ValueError):
            pid = int((self._real.folder / "pid").read_text())
            return pid if b"serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        return None


def test_random_kills_of_members_leave_sums_right_to_the_bit(tmp_path):
    """Every member dies again and again, wherever it stands; Flower notices the end of a run after a minute."""
    folder = tmp_path / "run"
    sizes = {"num_clients": 5, "clients_per_round": 5, "num_rounds": ROUNDS_OF_KILLS, "min_cohort": 3, "colluders": 1}
    settings = {**SETTINGS, **sizes, "batch_size": 4, "round_timeout_s": 10.0, "give_up_after": 0}
    config = configuration(folder, **settings)
    with federation(config, folder, 3000, {"max-participations": 70}, helpers=2) as real:
        start(real)
        killer, ends = Killer(real), 0
        killer.start()
        try:
            while not (folder / "result.json").exists():
                try:
                    real.submit()
                except LaunchError:
                    ends += 1
                    assert ends == killer.killed.count("the run"), "the run ended by itself"
        finally:
            killer.ended.set()
        assert len(killer.killed) == KILLS
        assert ends == OF_THE_RUN
        assert all(set(killer.killed) & kind for kind in ({"the run"}, {*real.running.nodes}, {*real.running.helpers}))
        assert real.result()["rounds"] == ROUNDS_OF_KILLS
        assert real.result()["closed_rounds"] < ROUNDS_OF_KILLS / 2
        assert_all_is_well(real)


def test_two_runs_at_once_through_the_same_nodes_and_helpers_do_not_mix(tmp_path):
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 3, "min_cohort": 3, "colluders": 1}
    settings = {**SETTINGS, **sizes, "round_timeout_s": 120.0}
    first, second = (configuration(tmp_path / name, **settings) for name in ("first", "second"))
    budgets = {"max-participations": 4, "budget-mu": 1.5, "budget-local-mu": 3.0}
    with federation(first, tmp_path / "first", 1200, budgets, helpers=2) as real:
        start(real)
        other = Federation(real.running, second, tmp_path / "second")
        other.folder.mkdir()
        other.notes = real.notes
        (real.running.home / "second.toml").write_text(toml_document(other.run_config()))
        options = ["--run-config", str(real.running.home / "second.toml"), "--stream"]
        beside = real.running._flwr("run", str(HERE / "watching_app"), CONNECTION_NAME, *options)
        real.submit()
        while not (other.folder / "result.json").exists():
            real.running.check_time()
            time.sleep(0.5)
        beside.communicate(timeout=60)
        for run in (real, other):
            assert_nothing_is_missing_or_left_over(run)
            assert_helpers_opened_what_the_server_has_and_nothing_twice(run)
            assert_the_model_is_that_of_the_same_releases_without_messages(run)
        assert [SQLiteOpeningRecord(config.record).sets for config in real.helper_configs().values()] == [6, 6]
