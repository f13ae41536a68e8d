"""What Ray does to a simulation, without Ray: messages and states travel, and any worker may get any machine."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message, MessageType
from murmurfl.app import client_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import num_nodes, run_in_process
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import messages as simulation
from murmurfl.clients.simulation.simulated_machines import TravellingLedger
from murmurfl.privacy import MurmurflError

BASE = RunConfig(num_clients=6, clients_per_round=4, num_rounds=5, batch_size=2, lost_replies=0.3, checkpoint=False)
CONFIGURATIONS = {
    "mu2, losses": BASE,
    "mu2, refusals": replace(BASE, lost_replies=0.0, max_participations=3, allow_exhaustion=True, give_up_after=0),
    "mu2, blt": replace(BASE, mechanism="blt"),
    "mu2, banded": replace(BASE, mechanism="banded", bands=3),
    "delayed-momentum": replace(BASE, strategy="delayed-momentum"),
    "full-batch": replace(BASE, strategy="full-batch", average="linear", batch_size=8),
    "secure aggregation": replace(
        BASE, strategy="noisy-sgd", trust="secure-aggregation", num_clients=9, clients_per_round=9, min_cohort=4
    ),
}


class Workers(InProcessGrid):
    """Two workers that take turns, each with what it keeps; everything is pickled on its way, as Ray does it."""

    def __init__(self, monkeypatch, config):
        super().__init__(client_app.app, num_nodes(config), config.to_mapping())
        self.turn = lambda worker: monkeypatch.setattr(simulation, "_worker", worker)
        self.workers = [simulation._Worker(), simulation._Worker()]
        self.generator = np.random.Generator(np.random.Philox(key=3))
        self.sizes = []
        monkeypatch.setattr(simulation, "_known_as_worker", True)

    def _handle(self, message: Message, identifier: str) -> Message:
        message.metadata.__dict__["_message_id"] = identifier
        node = message.metadata.dst_node_id
        self.turn(self.workers[self.generator.integers(2)])
        app, sent, context = (
            pickle.loads(pickle.dumps(part)) for part in (self._client_app, message, self._contexts[node])
        )
        pickled = pickle.dumps((reply := app(sent, context), context))
        if message.metadata.message_type == MessageType.TRAIN and reply.has_content():
            self.sizes.append((len(pickled), len(pickle.dumps(reply))))
        reply, self._contexts[node] = pickle.loads(pickled)
        reply.metadata.__dict__["_message_id"] = f"{identifier}-reply"
        return reply


def run_with_workers(monkeypatch, config):
    prepare(config)
    grid = Workers(monkeypatch, config)
    return run_experiment(grid, config, engine="ray"), grid


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_model_does_not_depend_on_the_worker(name, monkeypatch):
    config = CONFIGURATIONS[name]
    expected = run_in_process(config)
    travelled, grid = run_with_workers(monkeypatch, config)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(travelled.parameters, expected.parameters, strict=True))
    assert travelled.strategy.history == expected.strategy.history
    assert travelled.statements == expected.statements
    assert all(worker.nodes for worker in grid.workers), "both had something to do"
    if config.lost_replies:
        assert sum(report.lost for report in travelled.strategy.history) > 0
    if config.max_participations:
        assert sum(report.refusals for report in travelled.strategy.history) > 0


def stays_with_its_first_state(self, state, arrive=TravellingLedger.arrive):
    vars(self).setdefault("arrivals", []).append(state)
    if len(self.arrivals) <= 2:  # the first is that of its making
        arrive(self, state)


@pytest.mark.parametrize("bug", ["arrive", "leave"])
def test_a_worker_that_went_by_the_ledger_it_kept_would_be_noticed(bug, monkeypatch):
    """The planted bugs: a kept machine's ledger reads the state of an earlier message, or gives back none."""
    planted = stays_with_its_first_state if bug == "arrive" else lambda self, reply: None
    monkeypatch.setattr(TravellingLedger, bug, planted)
    with pytest.raises((AssertionError, MurmurflError)):
        test_the_model_does_not_depend_on_the_worker("mu2, losses", monkeypatch)


def test_a_state_adds_little_to_the_reply_it_goes_back_with(monkeypatch):
    _, grid = run_with_workers(monkeypatch, replace(BASE, lost_replies=0.0))
    together, alone = map(np.median, zip(*grid.sizes, strict=True))
    assert alone > 8 * 10 * 65, "a release in float64"
    assert together < alone + 4_500


def test_the_app_goes_to_a_worker_by_its_name():
    pickled = pickle.dumps(client_app.app)
    assert pickle.loads(pickled) is client_app.app
    assert len(pickled) < 100
