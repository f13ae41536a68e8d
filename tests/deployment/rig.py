"""Federations of rigged nodes under a watched server, and what must be true of everything they sent."""

import json
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.clients.nodes.roster_files import read_helper_key
from murmurfl.clients.private_client import Request
from murmurfl.privacy import (
    Header,
    Release,
    Sealed,
    SQLiteLedger,
    SQLiteOpeningRecord,
    add_mask,
    clip_per_sample,
    protocol,
    read_ledger,
)
from murmurfl.privacy.setting import by_key
from murmurfl.privacy.sums.masking import opened_seal
from murmurfl.strategies.rounds.replies import Reply

from tests.harness.clients import stream_noise

HERE = Path(__file__).parent


def rigged(notes, plan):
    """The program of a node that keeps to a plan; without anything in it, one that looks for messages more often."""
    path = notes.with_name("plan.json")
    path.write_text(json.dumps({"folder": str(notes), **plan}))
    return [sys.executable, str(HERE / "rigged_node.py"), str(path)]


class Federation:
    """Nodes of one configuration on this computer, each with a plan of what shall go wrong on it.

    A node that has died is started again. ``folder`` holds the server's notes and, below ``nodes``, the nodes'.
    """

    def __init__(self, running, config, folder):
        self.running, self.config, self.folder = running, config, folder
        self.restarts = defaultdict(int)
        self._programs, self._ended = {}, threading.Event()

    def start(self, plans):
        for name, plan in plans.items():
            self._programs[name] = rigged(self.notes(name), plan)
            self.running.start_node(name, self._programs[name])
        threading.Thread(target=self._keep_running, daemon=True).start()

    def notes(self, name):
        return self.running.files_of(name).config.parent / name

    def _keep_running(self):
        while not self._ended.wait(0.2):
            for name, process in list(self.running.running.items()):
                if process.poll() is not None and not self._ended.is_set():
                    self.restarts[name] += 1
                    self.running.start_node(name, self._programs[name])

    def end(self):
        self._ended.set()

    def submit(self, plan=None):
        """Run the configuration over the nodes, to its end."""
        self.running.submit(self.run_config(plan), HERE / "watching_app")

    def run_config(self, plan=None):
        """What the watching app is told."""
        run = {"settings": json.dumps(self.config.to_mapping()), "plan": json.dumps(plan or {})}
        return {**run, "folder": str(self.folder)}

    # What was noted.

    def lines(self, node, name):
        path = self.notes(node) / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind):
        """What the server asked or heard: numbers of the event, lines of its messages, arrays."""
        for path in sorted(self.folder.glob(f"{kind}-*.npz"), key=lambda path: _numbers(path)):
            with np.load(path) as file:
                arrays = [file[name] for name in file.files if name != "header"]
                yield _numbers(path), json.loads(str(file["header"])), arrays

    def checkpoint(self):
        """Acknowledgements and sum of all releases of the server, at the end."""
        with np.load(self.folder / "checkpoint.npz") as file:
            plain = json.loads(str(file["header"]))["plain"]
            return plain, file["array state.release_sum"]

    def history(self):
        """The server's rounds, by its checkpoint."""
        return [{"closed": "", "unopened": 0, **report} for report in self.checkpoint()[0]["history"]]

    def result(self):
        return json.loads((self.folder / "result.json").read_text())

    def ledger(self, name):
        return self.running.nodes[name].config.parent / "ledger.sqlite"

    def replies(self):
        """What the server heard in each round, in the last attempt at it."""
        rounds = defaultdict(lambda: defaultdict(list))
        for (number, attempt, _), (line,), arrays in self.events("heard"):
            values = np.concatenate([a.ravel() for a in arrays])
            contents = self._unmasked(line, values) if protocol.HEADER in line else values.astype(np.float64)
            rounds[number][attempt].append(Reply(line["client"], line["release"], line["ack"], contents, line))
        return {number: attempts[max(attempts)] for number, attempts in rounds.items()}

    def _unmasked(self, line, counts):
        """A masked release without its masks, by the keys of all helpers: what a test may and nobody else."""
        sealed = Sealed(
            bytes.fromhex(line[protocol.HEADER]),
            tuple(map(bytes.fromhex, line[protocol.SEALS])),
            bytes.fromhex(line[protocol.SIGNATURE]),
        )
        header = Header.from_bytes(sealed.header)
        for name, key in self.helper_keys().items():
            add_mask(counts, opened_seal(sealed, header, name, key), subtract=True)
        return Release(counts.view(np.int64), header.spacing, line["release"], line["ack"])

    def helper_keys(self):
        return dict(read_helper_key(Path(config.key)) for config in self.helper_configs().values())

    def helper_configs(self):
        return {name: HelperConfig.read(files.config) for name, files in self.running.helpers.items()}


def _numbers(path):
    return tuple(int(number) for number in path.stem.split("-")[1:])


def configuration(folder, **changes):
    settings = by_key(changes, run_keys())
    return RunConfig.from_mapping({"out-dir": str(folder.parent), "run-name": folder.name, **settings})


@contextmanager
def federation(config, folder, timeout_s, node_changes=None, helpers=0):
    experiment = prepare(config)
    with deployment(folder, timeout_s=timeout_s) as running:
        names = [f"node-{i}" for i in range(config.num_clients)]
        settings = [{**node_settings(experiment, i), **(node_changes or {})} for i in range(config.num_clients)]
        running.add_nodes(dict(zip(names, settings, strict=True)), [f"helper-{i}" for i in range(helpers)])
        made = Federation(running, config, folder)
        try:
            yield made
        finally:
            made.end()


# What must be true.


def assert_no_release_was_sent_with_two_contents(federation):
    """On the nodes, before the network: also of what never arrived."""
    for name in federation.running.nodes:
        digests = defaultdict(set)
        for line in federation.lines(name, "sent"):
            digests[line["release"]].add((line["ack"], line["digest"]))
        assert all(len(contents) == 1 for contents in digests.values()), f"{name} sent a release with two contents"


def assert_ledgers_know_all_that_was_heard(federation):
    heard = defaultdict(set)
    for _, (line,), _ in federation.events("heard"):
        heard[line["client"]].add(line["release"])
    for name in federation.running.nodes:
        (session,) = read_ledger(federation.ledger(name)).sessions
        sent = {line["release"] for line in federation.lines(name, "sent")}
        assert heard[name] <= sent
        assert session.releases >= max(sent)
        assert session.releases >= len(heard[name])


@dataclass(frozen=True)
class Sum:
    """Server's sum of releases, and what it must consist of, in counts of the clients' grid."""

    server: np.ndarray
    contributions: np.ndarray
    noise: np.ndarray


def sum_and_parts(federation):
    """The server's sum; all contributions of the releases up to its acknowledgements; the noise in the sum of them.

    Contributions are computed again from the requests and the nodes' samples, noise from their keys and the nonces that
    they drew: of a release that was made twice, the later one's.
    """
    points = {numbers[0]: arrays for numbers, _, arrays in federation.events("asked")}
    plain, total = federation.checkpoint()
    contributions, noise, spacings = 0, 0, set()
    for name, files in federation.running.nodes.items():
        node = NodeConfig.read(files.config)
        client, ledger = node.make_client(), SQLiteLedger(node.ledger)
        privatizer = client.privatizer
        releases = range(1, plain["acks"].get(name, 0) + 1)
        made, drawn = (
            {line["release"]: line for line in federation.lines(name, what) if line["session"] == plain["session"]}
            for what in ("made", "drawn")
        )
        for line in (made[release] for release in releases):
            width = len(client._shapes)
            arrays = points[line["round"]]
            request = Request(line["round"], plain["session"], 0, (arrays[:width], arrays[width:]))
            rows = [client.contribution(request, client.samples[i : i + 1])[0] for i in range(*line["samples"])]
            clipped = clip_per_sample(np.array(rows), privatizer.policy.clip_norm)
            contributions = contributions + privatizer.plan.grid.counts(clipped, scale=1 / len(rows)).sum(axis=0)
        nonces = [bytes.fromhex(drawn[release]["nonce"]) for release in releases]
        noise = noise + stream_noise(privatizer.plan, privatizer.num_parameters, ledger.keys().secret_key, nonces)
        spacings.add(privatizer.plan.grid.spacing)
    (spacing,) = spacings
    return Sum(np.rint(total / spacing).astype(np.int64), contributions, noise)


def assert_nothing_is_missing_or_left_over(federation):
    """The server's sum is every contribution and the noise of each client's stream, to the last bit."""
    parts = sum_and_parts(federation)
    assert np.abs(parts.noise).max() > 0
    assert np.array_equal(parts.server, parts.contributions + parts.noise)


# Under secure aggregation.


class Replayed:
    """Clients that answer what they answered before, if they are asked the same."""

    def __init__(self, replies, asked):
        self._replies, self._asked = replies, asked

    def names(self):
        return sorted({reply.client for replies in self._replies.values() for reply in replies})

    def answer(self, request):
        point = np.concatenate(request.points)
        attempts = [arrays for (number, _), arrays in self._asked.items() if number == request.server_round]
        assert attempts
        for arrays in attempts:  # every attempt at a round asked the same
            assert np.array_equal(np.concatenate([a.ravel() for a in arrays]), point)
        return self._replies[request.server_round]

    def statements(self, session):
        return {}


def assert_the_model_is_that_of_the_same_releases_without_messages(federation):
    """The releases that were heard, their masks taken off, given to a strategy that is asked without messages."""
    experiment = prepare(federation.config)
    plain, total = federation.checkpoint()
    asked = {numbers: arrays for numbers, _, arrays in federation.events("asked")}
    strategy = experiment.strategy(deployed=True, session=plain["session"])
    replayed = Replayed(federation.replies(), asked)
    result = strategy.start(replayed, experiment.initial_arrays(), num_rounds=federation.config.num_rounds)
    with np.load(federation.folder / "model.npz") as model:
        for ours, name in zip(result.arrays.to_numpy_ndarrays(), experiment.model.names, strict=True):
            assert np.array_equal(ours, model[name])
    assert np.array_equal(strategy.state.release_sum, total)
    assert [report.closed for report in strategy.history] == [report["closed"] for report in federation.history()]


def assert_helpers_opened_what_the_server_has_and_nothing_twice(federation):
    opened = {report["server_round"] for report in federation.history() if not report["closed"]}
    session = federation.checkpoint()[0]["session"]
    for name, config in federation.helper_configs().items():
        totals = defaultdict(set)
        for line in federation.lines(name, "opened"):
            totals[line["session"], line["opening"]].add((line["set"], line["total"]))
        assert all(len(contents) == 1 for contents in totals.values()), f"{name} opened two sets under one name"
        assert {int(opening) for of_session, opening in totals if of_session == session} == opened
        assert SQLiteOpeningRecord(config.record).sets >= len(opened)
