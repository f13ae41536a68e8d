"""Callbacks of a user: when a training calls them, and what they can change."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from murmurfl.clients import Mu2Client
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import Callback, CorrelatedFedAvg, Mu2, NothingAggregatedError

from tests.harness.clients import normal_samples, simulated_app
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.models import Data

ROUNDS, CLIENTS = 4, 3
START = ArrayRecord([np.zeros(3)])


def trained(*callbacks, lost=0.0, **options):
    app = simulated_app(Mu2Client, Data([(3,)]), lambda name: normal_samples(name, 30, 3))
    common = {"num_clients": CLIENTS, "learning_rate": 0.1, "seed": 1, "session": "s", "node_deadline_s": 1.0}
    strategy = Mu2(**{**common, **options}, callbacks=callbacks)
    result = strategy.start(NodesGrid(app, CLIENTS, lost=lost), START, num_rounds=ROUNDS)
    return strategy, result


class Diary(Callback):
    """Notes every call, with the number of rounds that are over."""

    def __init__(self):
        self.calls = []

    def _note(self, name, training):
        self.calls.append((name, len(training.history)))

    def on_start(self, training, grid, num_rounds):
        assert training.stated.keys() == {"0", "1", "2"}
        self._note("start", training)

    def exclude(self, training):
        self._note("exclude", training)
        return ()

    def on_forecast(self, training, forecast):
        self._note("forecast", training)
        return

    def evaluate(self, training, server_round, arrays):
        assert server_round == len(training.history)
        self._note("evaluate", training)
        return MetricRecord({"largest": float(np.abs(arrays.to_numpy_ndarrays()[0]).max())})

    def should_stop(self, training, server_round):
        self._note("stop", training)
        return False

    def after_round(self, training, report, metrics):
        assert training.history[-1] is report
        assert metrics is None or metrics["largest"] > 0
        self._note("round", training)

    def on_end(self, training, grid, result):
        self._note("end", training)


def test_hooks_are_called_in_their_order():
    diary = Diary()
    trained(diary, evaluate_every=2)
    calls = [call for call in diary.calls if call[0] != "exclude"]
    assert calls[:3] == [("forecast", 0), ("start", 0), ("evaluate", 0)]
    odd = [("stop", 1), ("round", 1), ("evaluate", 2), ("stop", 2), ("round", 2)]
    assert calls[3:] == [*odd, ("stop", 3), ("round", 3), ("evaluate", 4), ("round", 4), ("end", 4)]
    assert {("exclude", number) for number in range(ROUNDS)} <= set(diary.calls), "before every round"


class Stops(Callback):
    """Ends a training on what it measures."""

    def evaluate(self, training, server_round, arrays):
        self.seen = server_round
        return MetricRecord({"seen": server_round})

    def should_stop(self, training, server_round):
        return self.seen == 2


def test_callback_ends_a_training_with_the_model_it_has_measured():
    strategy, result = trained(Stops())
    assert strategy.ended == "it was asked to end"
    assert len(strategy.history) == 2
    whole, _ = trained()
    assert len(whole.history) == ROUNDS
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]


def test_metrics_of_several_callbacks_come_together():
    class Other(Callback):
        def evaluate(self, training, server_round, arrays):
            return MetricRecord({"other": -server_round})

    _, result = trained(Diary(), Other())
    assert set(result.evaluate_metrics_serverapp[ROUNDS]) == {"largest", "other"}


def test_callbacks_change_no_bit_of_a_model():
    (_, with_one), (_, without) = trained(Diary()), trained()
    assert with_one.arrays.to_numpy_ndarrays()[0].tobytes() == without.arrays.to_numpy_ndarrays()[0].tobytes()


def test_callback_that_handles_no_progress_keeps_the_result():
    class Patient(Callback):
        handles_no_progress = True

    with pytest.raises(NothingAggregatedError):
        trained(lost=1.0)
    strategy, _ = trained(Patient(), lost=1.0)
    assert [report.aggregated for report in strategy.history] == [0] * ROUNDS


@pytest.mark.parametrize("callbacks", [Callback(), [print], [Callback]])
def test_what_is_no_list_of_callbacks_is_refused(callbacks):
    with raises(ConfigurationError, "wrong-type", "callbacks"):
        CorrelatedFedAvg(callbacks=callbacks)
