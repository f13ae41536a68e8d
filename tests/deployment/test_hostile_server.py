"""A server that wants the data, and what it has got after a thousand requests: no more than every node's budget.

Every sample of a node is a canary: it has a feature of its own and one of two classes, by a fair coin. So what a server
can tell of the classes bounds what was really released from below (Steinke, Nasr and Jagielski 2023), whatever ledgers
say. The audit's false-alarm rate is at most 5 %, and far less here, as its guesses fall short of what mu allows.
"""

import json
import math
import sqlite3
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.engines.superlink import CONNECTION_NAME
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.nodes.supernode import repeating_the_last_answer
from murmurfl.clients import Mu2Client, numpy_client_app
from murmurfl.privacy import Account, MemoryLedger, SQLiteLedger, gdp_epsilon, protocol
from murmurfl.privacy.audit import audit_one_run, canary_scores
from murmurfl.privacy.ledger.ledger_records import JoinedLedgers

from tests.deployment.hostile_app.hostile.attack import Attack
from tests.deployment.rig import HERE, rigged
from tests.harness.schemas import write_samples

SESSIONS, RELEASES, BATCH = 2, 2, 32
FEATURES = SESSIONS * RELEASES * BATCH
BUDGET, DELTA = 0.3, 1e-5
CLAIM = gdp_epsilon(BUDGET, DELTA)
NODE = {
    "clip-norm": 1.0,
    "batch-size": BATCH,
    "max-participations": RELEASES,
    "mu": BUDGET / math.sqrt(SESSIONS),
    "budget-mu": BUDGET,
    "delta": DELTA,
}


def coins_of(name):
    return np.random.Generator(np.random.Philox(key=[1, int(name.rpartition("-")[2])])).random(FEATURES) < 0.5


def canaries(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    features = 100 * np.eye(FEATURES, dtype=np.float32)
    return write_samples(folder, features, coins_of(name).astype(np.int64), bounds=(0, 100))


def make_client(folder, name):
    folder = folder / name
    config = {**NODE, "client": name, "ledger": "ledger.sqlite", **canaries(folder, name)}
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=BUDGET, delta=DELTA)
    (folder / "node.toml").write_text(toml_document(config))
    return NodeConfig.read(folder / "node.toml").make_client()


def attacked(clients, requests):
    """What came back of an attack on each client, as from a node of its own."""
    answers = []
    for i, client in enumerate(clients):
        app = numpy_client_app(lambda context, client=client: client, mods=[repeating_the_last_answer()])
        grid = InProcessGrid(app, 1, {})
        answers += list(Attack(FEATURES, 10 + i).on(grid, grid.get_node_ids(), requests // len(clients)))
    return answers


# What came back.


def releases_of(answers):
    """For each client, session and release what was heard of it: contents, each once."""
    heard = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for answer in answers:
        if "values" in answer:
            content = answer["ack"], tuple(answer["values"])
            heard[answer["client"]][answer["session"]][answer["release"]].add(content)
    return heard


def spent_mu(sessions, plan):
    """What a client has spent by what came back: a session for every content there is of one release."""
    squares = 0.0
    for contents in sessions.values():
        copies = max(len(of_one) for of_one in contents.values())
        squares += copies * plan.spent_mu(min(max(contents), RELEASES)) ** 2 * max(1.0, max(contents) / RELEASES)
    return math.sqrt(squares)


def prefixes_of(contents):
    """P_1, P_2, ... of a session, as far as they follow from what was heard."""
    sums = {0: 0.0}
    for _ in contents:
        for release, of_one in contents.items():
            for ack, values in of_one:
                if ack in sums:
                    sums[release] = sums[ack] + np.array([float.fromhex(value) for value in values])
    known = [k for k in range(1, max(sums) + 1) if all(j in sums for j in range(1, k + 1))]
    return np.array([sums[k] for k in known])


def audited(answers, plan, samples_of):
    """The audit's lower bound on epsilon from what came back of all clients."""
    scores, coins = [], []
    for client, sessions in releases_of(answers).items():
        score, used = np.zeros(FEATURES), np.zeros(FEATURES, bool)
        for session, contents in sessions.items():
            prefixes = prefixes_of(contents)
            weights = prefixes[:, : 2 * FEATURES].reshape(len(prefixes), 2, FEATURES)
            canaries = (weights[:, 0] - weights[:, 1]) / math.sqrt(2)
            for k in range(1, len(prefixes) + 1):
                samples = samples_of(client, session, k)
                columns = canaries[:, samples]
                score[samples] += canary_scores(plan.mechanism, columns, np.full(columns.shape[1], k))
                used[samples] = True
        scores.append(score[used])
        coins.append(coins_of(client)[used])
    return audit_one_run(np.concatenate(scores), np.concatenate(coins), DELTA)


def of_the_ledger(ledgers):
    """Which samples a release used, by the ledgers: what a server may well find out."""

    def samples_of(client, session, release):
        with closing(sqlite3.connect(f"{ledgers[client].as_uri()}?mode=ro", uri=True)) as connection:
            where = "WHERE session = ? AND release = ?"
            (used,) = connection.execute(f"SELECT samples_used FROM releases {where}", (session, release)).fetchone()
        return slice(used - BATCH, used)

    return samples_of


def assert_no_node_went_beyond_its_budget(answers, plan, samples_of):
    heard = releases_of(answers)
    assert heard
    for client, sessions in heard.items():
        assert spent_mu(sessions, plan) <= BUDGET * (1 + 1e-9), f"{client} released beyond its budget"
        made = sum(len(of_one) for contents in sessions.values() for of_one in contents.values())
        assert made * BATCH <= FEATURES, f"{client} used samples again"
    measured = audited(answers, plan, samples_of).measured_epsilon
    assert measured <= CLAIM, f"the server can tell more than {CLAIM:.3g}: {measured:.3g}"


def assert_everything_was_tried(answers):
    codes = {answer["code"] for answer in answers if "code" in answer}
    tried = {"BUDGET_EXHAUSTED", "BAD_ACKNOWLEDGEMENT", "CAP_REACHED", "MALFORMED_REQUEST", "PROTOCOL_MISMATCH"}
    assert {getattr(protocol, name) for name in tried} <= codes
    assert protocol.EVALUATION_BLOCKED in codes
    assert not codes & {protocol.INTERNAL_ERROR, protocol.LEDGER_UNUSABLE, protocol.NOT_CONFIGURED}


def test_a_thousand_hostile_requests_get_no_more_than_the_budget(tmp_path):
    clients = [make_client(tmp_path, f"node-{i}") for i in range(2)]
    answers = attacked(clients, 1000)
    assert_everything_was_tried(answers)
    ledgers = {client.name: tmp_path / client.name / "ledger.sqlite" for client in clients}
    assert_no_node_went_beyond_its_budget(answers, clients[0].privatizer.plan, of_the_ledger(ledgers))
    heard = releases_of(answers)
    made = [len(contents) for sessions in heard.values() for contents in sessions.values()]
    assert made == [RELEASES] * SESSIONS * len(clients), "the attack gets all that the budget allows"


class ForgetfulLedger(MemoryLedger):
    """A planted bug: every session has books of its own, so budget and samples are there anew."""

    durable = True

    def __init__(self):
        super().__init__()
        self._books = {}
        self._session = ""

    def account(self):
        return self._books.get(self._session, Account())

    def asked_for(self, session):
        """Take the session of a request, which alone says whose books are looked at: accounts are read first."""
        self._session = session

    def commit(self, session, stream, account):
        super().commit(session, stream, account)
        self._books[session] = account


class GullibleClient(Mu2Client):
    """A planted bug: a server may say how much noise is enough."""

    def fit(self, parameters, config):
        if config.get("mu", 0.0) > 1.0:
            self.privatizer.release_rule.noise.__dict__["_scale"] = 0.1 * self.privatizer.plan.grid.factor(
                self.privatizer.plan.noise_std
            )
        return super().fit(parameters, config)


def forgetful_nodes(folder, count):
    clients = [make_client(folder, f"node-{i}") for i in range(count)]
    for client in clients:
        ledger = ForgetfulLedger()
        client.privatizer._ledgers = JoinedLedgers([ledger])
        client.privatizer.release = _noting(client.privatizer.release, ledger)
    return clients


def _noting(release, ledger):
    def noted(session, *rest, **named):
        ledger.asked_for(session)
        return release(session, *rest, **named)

    return noted


def from_the_first_sample(client, session, release):
    return slice((release - 1) * BATCH, release * BATCH)


def test_a_ledger_that_forgets_is_caught_by_counting_what_came_back(tmp_path):
    (client,) = forgetful_nodes(tmp_path, 1)
    with pytest.raises(AssertionError, match="released beyond its budget"):
        assert_no_node_went_beyond_its_budget(attacked([client], 50), client.privatizer.plan, from_the_first_sample)


@pytest.mark.deployment
def test_a_ledger_that_forgets_is_caught_by_the_audit(tmp_path):
    clients = forgetful_nodes(tmp_path, 4)
    answers = attacked(clients, 2400)
    assert audited(answers, clients[0].privatizer.plan, from_the_first_sample).measured_epsilon > CLAIM


@pytest.mark.deployment
def test_a_node_that_lets_the_server_choose_its_noise_is_caught_by_the_audit(tmp_path):
    clients = [make_client(tmp_path, f"node-{i}") for i in range(4)]
    ledgers = {client.name: tmp_path / client.name / "ledger.sqlite" for client in clients}
    for client in clients:
        client.__class__ = GullibleClient
    answers = attacked(clients, 400)
    with pytest.raises(AssertionError, match="the server can tell more"):
        assert_no_node_went_beyond_its_budget(answers, clients[0].privatizer.plan, of_the_ledger(ledgers))


@pytest.mark.deployment
def test_two_hostile_runs_at_once_get_no_more_from_real_nodes(tmp_path):
    folder, names = tmp_path / "run", [f"node-{i}" for i in range(4)]
    with deployment(folder, timeout_s=1500) as running:
        running.add_nodes({name: {**NODE, **canaries(tmp_path / name, name)} for name in names})
        for name, files in running.nodes.items():
            running.start_node(name, rigged(files.config.parent / name, {}))
        first, second = ({"answers": str(tmp_path / f"answers-{i}"), "seed": i} for i in range(2))
        common = {"nodes": len(names), "features": FEATURES}
        (running.home / "second.toml").write_text(toml_document({**common, **second, "requests": 200}))
        arguments = [str(HERE / "hostile_app"), CONNECTION_NAME, "--run-config", str(running.home / "second.toml")]
        beside = running._flwr("run", *arguments, "--stream")
        running.submit({**common, **first, "requests": 800}, HERE / "hostile_app")
        while not all(Path(run["answers"]).exists() for run in (first, second)):  # either may end first
            running.check_time()
            time.sleep(0.5)
        beside.communicate(timeout=60)
        paths = {name: Path(NodeConfig.read(files.config).ledger) for name, files in running.nodes.items()}
        plan = NodeConfig.read(running.nodes["node-0"].config).make_client().privatizer.plan
    runs = [[json.loads(line) for line in (tmp_path / f"answers-{i}").read_text().splitlines()] for i in range(2)]
    answers = [answer for run in runs for answer in run]
    assert len(answers) > 950  # of a thousand
    assert all(runs), "both runs were answered"
    assert_everything_was_tried(answers)
    assert_no_node_went_beyond_its_budget(answers, plan, of_the_ledger(paths))
