"""A node killed with SIGKILL at every step of a release: what it sends once started again, and what its ledger says."""

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    LedgerError,
    PrivacyPolicy,
    Privatizer,
    SQLiteLedger,
    SystemKeys,
    clip_per_sample,
    read_ledger,
    row_bytes,
)
from murmurfl.privacy.ledger import store
from murmurfl.privacy.release.prefix_sums import ReleaseRule

from tests.harness.clients import stream_noise
from tests.harness.errors import raises
from tests.harness.kill_points import lethal

D = 6
RELEASES = 200
DATA = np.random.Generator(np.random.Philox(key=6)).normal(size=(2 * RELEASES, D))
fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.db"
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    return path


class NotedKeys(SystemKeys):
    """Real keys that note the nonces that they draw."""

    def __init__(self, ledger):
        super().__init__(ledger.keys().secret_key)
        self._drawn = ledger.path.with_name("drawn")

    def nonce(self, session, release):
        nonce = super().nonce(session, release)
        with self._drawn.open("a") as file:
            file.write(json.dumps([release, nonce.hex()]) + "\n")
        return nonce


def client(ledger, mechanism=""):
    named = {"mechanism": mechanism} if mechanism else {}
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=RELEASES, mu=2.0, **named)
    return Privatizer(policy, D, len(DATA), ledger, NotedKeys(ledger), data=row_bytes(DATA))


def contribution(samples):
    return DATA[samples]


def stream_of(path, session="s"):
    with SQLiteLedger(path).exclusive() as page:
        return page.stream(session)


def exit_code(target):
    child = fork.Process(target=target)
    child.start()
    child.join(30)
    return child.exitcode


STATEMENTS = {
    "begin": "BEGIN IMMEDIATE",
    "read account": "SELECT session, mu, local FROM reserved ORDER",
    "write": "DELETE FROM arrays",
    "log": "INSERT INTO releases",
    "seal": "UPDATE state SET seal",
    "commit": "COMMIT",
}
METHODS = [
    (Privatizer, "_contribution_counts", "gradient", "gradient made"),
    (ReleaseRule, "advance", "noise", "noise made"),
    (store.StoreTransaction, "move_mark", "mark", "marked"),
    (Path, "replace", "mark written", "mark renamed"),
]
POINTS = """begin, read account, gradient, gradient made, noise, noise made, write, log, seal, commit, committed, mark,
mark written, mark renamed, marked, send, sent, aggregated""".replace("\n", " ").split(", ")


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def heard(path):
    """What the server has: its acknowledgement and its sum."""
    ack, total = 0, np.zeros(D)
    for release, base, values in lines_of(path.with_name("aggregated")):
        assert base == ack
        ack, total = release, total + np.array([float.fromhex(value) for value in values])
    return ack, total


def serve(path, releases, point=None, at=None, make_ledger=SQLiteLedger, mechanism=""):
    """A node and its server, until so many releases were made; with a point, killed there in release ``at``."""
    making = None
    here = lethal(point, STATEMENTS, METHODS, lambda: making == at)
    ledger = make_ledger(path)
    subject = client(ledger, mechanism)
    made = subject.statement("s").releases
    while made < releases:
        making = made + 1
        release = subject.release("s", heard(path)[0], contribution)
        made = release.release
        line = json.dumps([made, release.ack, [value.hex() for value in release.values]]) + "\n"
        for log, before, after in (("sent", "send", "sent"), ("aggregated", None, "aggregated")):
            here(before)
            with path.with_name(log).open("a") as file:
                file.write(line)
            here(after)
        getattr(ledger, "sent", lambda: None)()


def killed_and_resumed(path, point, make_ledger=SQLiteLedger, mechanism=""):
    """Kill a node in its third release, start it again, and look at what it sent and what its ledger says."""
    assert exit_code(lambda: serve(path, 5, point, 3, make_ledger, mechanism)) == -signal.SIGKILL
    sent = [release for release, _, _ in lines_of(path.with_name("sent"))]
    recorded = stream_of(path).release
    assert exit_code(lambda: serve(path, 6, mechanism=mechanism)) == 0
    sent_in_all = [release for release, _, _ in lines_of(path.with_name("sent"))]
    assert len(set(sent_in_all)) == len(sent_in_all), "a release was sent twice"
    assert recorded >= max(sent)
    return sent_in_all


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("point", POINTS)
def test_a_node_killed_anywhere_goes_on_and_never_sends_a_release_twice(path, point):
    sent = killed_and_resumed(path, point)
    wasted = point in ("committed", "mark", "mark written", "mark renamed", "marked", "send")
    assert sent == ([1, 2, 4, 5, 6] if wasted else [1, 2, 3, 4, 5, 6])
    assert stream_of(path).release == 6
    assert_nothing_is_missing_or_left_over(path)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("mechanism", sorted(MECHANISMS))
def test_killed_nodes_sum_has_its_streams_noise(path, mechanism):
    killed_and_resumed(path, "committed", mechanism=mechanism)
    assert_nothing_is_missing_or_left_over(path, mechanism)


def assert_nothing_is_missing_or_left_over(path, mechanism=""):
    """The server's sum has every contribution in it, a wasted release's too, and the noise of the stream alone."""
    (ack, total), ledger, stream = heard(path), SQLiteLedger(path), stream_of(path)
    assert ack == stream.release
    plan, drawn = client(ledger, mechanism).plan, dict(lines_of(path.with_name("drawn")))  # the last of a release
    nonces = [bytes.fromhex(drawn[release]) for release in range(1, ack + 1)]
    noise = stream_noise(plan, D, ledger.keys().secret_key, nonces)
    assert noise.any()
    contributions = plan.grid.counts(clip_per_sample(DATA[: 2 * ack], 1.0), scale=0.5).sum(axis=0)
    assert (total == plan.grid.values(contributions + noise)).all()
    assert read_ledger(path).samples_used == 2 * ack
    assert not read_ledger(path).mark_problem


def test_a_node_killed_from_outside_at_any_moment_again_and_again(path, real_disk):
    """Moments nobody named: inside SQLite, in the middle of a write."""
    log = path.with_name("sent")
    log.touch()
    for delay in np.random.Generator(np.random.Philox(key=7)).uniform(0.0, 0.06, size=12):
        node, before = fork.Process(target=serve, args=(path, RELEASES - 1)), log.stat().st_size
        node.start()
        while node.is_alive() and log.stat().st_size == before:
            time.sleep(0.001)
        node.join(delay)
        node.kill()
        node.join()
    serve(path, stream_of(path).release + 1)
    sent = [release for release, _, _ in lines_of(log)]
    assert len(set(sent)) == len(sent) > 12
    assert_nothing_is_missing_or_left_over(path)


class LateLedger(SQLiteLedger):
    """The planted bug: it commits after the reply has left."""

    @contextmanager
    def exclusive(self):
        with super().exclusive() as page:
            real = page.commit

            def commit(*record):
                self._record = record

            page.commit = commit
            yield page
        self._commit = real

    def sent(self):
        with super().exclusive() as page:
            page.commit(*self._record)


def test_the_kill_test_catches_a_ledger_that_commits_after_sending(path):
    with pytest.raises(AssertionError, match="sent twice"):
        killed_and_resumed(path, "sent", LateLedger)


def test_a_ledger_whose_making_was_interrupted_can_be_made_again(tmp_path):
    path = tmp_path / "ledger.db"

    def die():
        store.connect = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)

    assert exit_code(die) == -signal.SIGKILL
    with raises(LedgerError, "malformed", match="whose making was interrupted"):
        SQLiteLedger(path)
    path.unlink()
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    serve(path, 1)
    assert stream_of(path).release == 1


def test_an_old_file_under_a_newer_log_is_not_believed(path):
    """The node was killed, its log is still there, and somebody copies only the file back."""
    serve(path, 1)
    saved = path.read_bytes()
    serve(path, 3)
    assert exit_code(lambda: serve(path, 4, "mark", 4)) == -signal.SIGKILL
    assert Path(f"{path}-wal").stat().st_size > 0
    path.write_bytes(saved)
    try:
        ledger = SQLiteLedger(path)
    except LedgerError:
        return
    assert client(ledger).statement("s").releases == 4
