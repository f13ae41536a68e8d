"""The cohort engine: clients asked together, their noise, their memory, and those that are asked alone."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.cohort import CohortClients
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.runs.experiment import prepare
from murmurfl.clients import Cohort, Mu2Client, PrivateClient
from murmurfl.clients.adapters.per_sample_gradients import combined_gradients
from murmurfl.clients.simulation import cohort_clients as cohort
from murmurfl.clients.simulation.cohort_clients import stacked_samples
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    RowCache,
    SimulatedKeys,
    SystemKeys,
    clip_per_sample,
    row_bytes,
)
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

from tests.app.engines.test_engines import ABSOLUTE, FLOAT32, RELATIVE
from tests.app.run_table import BASE
from tests.harness.errors import raises


@pytest.mark.parametrize("mib", [0.0, 0.01, 256.0])
def test_kept_and_remade_rows_give_equal_noise(mib):
    kept = run_cohort(BASE, row_cache_mib=mib).parameters
    assert all((a == b).all() for a, b in zip(kept, run_cohort(BASE).parameters, strict=True))


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    experiment = prepare(BASE)
    clients = CohortClients(experiment)

    def strategy():
        return experiment.strategy(checkpoint=tmp_path / "checkpoint.npz")

    strategy().start(clients, experiment.initial_arrays(), num_rounds=2)
    resumed = strategy().start(clients, experiment.initial_arrays(), num_rounds=6).arrays
    whole = run_cohort(BASE).parameters
    assert all((a == b).all() for a, b in zip(resumed.to_numpy_ndarrays(), whole, strict=True))


class Doubling(Mu2Client):
    def contribution(self, request, samples):
        return 2 * super().contribution(request, samples)


def test_a_client_that_cannot_be_asked_together_is_asked_alone_and_that_is_said(caplog):
    experiment = prepare(BASE)

    def make(name):
        shard = experiment.shards[int(name)]
        keys = SimulatedKeys(1, name)
        return Doubling(experiment.model, shard, experiment.policy(int(name)), MemoryLedger(), keys, name=name)

    cohort, points = Cohort(["0", "1"], make), [experiment.model.initial_parameters(1)] * 2
    with caplog.at_level(logging.WARNING):
        outcomes = dict(cohort.releases(1, "s", {"0": 0, "1": 0}, points))
    assert cohort.one_by_one == ["Doubling"]
    assert "one by one" in caplog.text
    alone = make("0").privatizer.release("s", 0, lambda s: 2 * experiment.model(points[0], experiment.shards[0][s]))
    assert (outcomes["0"].values == alone.values).all()


@pytest.mark.parametrize("model", ["softmax", "mlp"])
def test_delayed_momentum_is_asked_together_whenever_its_clients_took_part_last(model, caplog):
    config = replace(BASE, strategy="delayed-momentum", model=model, batch_size=2, lost_replies=0.2, num_rounds=8)
    with caplog.at_level(logging.WARNING):
        together = run_cohort(config)
    assert "one by one" not in caplog.text
    tolerance = ABSOLUTE if model == "softmax" else FLOAT32
    for one, other in zip(together.parameters, run_in_process(config).parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=RELATIVE if model == "softmax" else FLOAT32, atol=tolerance)


@pytest.mark.parametrize("written_out", [False, True])
def test_weights_may_differ_from_sample_to_sample(written_out):
    experiment = prepare(BASE)
    model, samples = experiment.model, experiment.shards[0][slice(0, 4)]
    generator = np.random.Generator(np.random.Philox(key=6))
    points = [[generator.standard_normal(shape) for shape in model.shapes] for _ in range(4)]
    weights = [3.0, np.array([-1.0, 0.0, -1.0, 0.0]), np.array([0.0, -2.0, 0.0, 0.0]), np.zeros(4)]
    expected = 3.0 * model(points[0], samples)
    expected[[0, 2]] -= model(points[1], samples)[[0, 2]]
    expected[1] -= 2.0 * model(points[2], samples)[1]
    if written_out:
        rows = combined_gradients(model, points, weights, samples)
        # Also where the first point is not everybody's.
        shifted = combined_gradients(model, points[1:], weights[1:], samples)
        np.testing.assert_allclose(shifted, expected - 3.0 * model(points[0], samples), rtol=1e-12, atol=1e-14)
    else:
        stack, rows = model.stacked(points, weights, samples), np.empty(expected.shape)
        for i, row in enumerate(rows):
            stack.write(i, 1.0, row)
    np.testing.assert_allclose(rows, expected, rtol=1e-12, atol=1e-14)


def test_large_rounds_go_in_blocks_and_give_the_same(monkeypatch):
    whole = run_cohort(BASE).parameters
    monkeypatch.setattr(cohort, "_BLOCK_VALUES", 4000)
    assert all((a == b).all() for a, b in zip(run_cohort(BASE).parameters, whole, strict=True))


def test_memory_of_what_was_sent_is_given_up_once_it_is_aggregated():
    clients = CohortClients(prepare(BASE))
    experiment = prepare(BASE)
    strategy = experiment.strategy()
    strategy.start(clients, experiment.initial_arrays(), num_rounds=3)
    for name in clients.names():
        stream = clients.cohort.client(name).privatizer._ledger.stream(strategy.session)
        assert stream is None or not stream.pending


def test_rows_that_are_not_finite_count_as_zero_as_they_do_alone():
    policy = PrivacyPolicy(1.0, 2, 3, 1.0)
    rows = np.array([[np.nan, 1.0], [3.0, 4.0], [np.inf, 0.0], [1e200, 1e200]])
    together = [Privatizer(policy, 2, 6, MemoryLedger(), SimulatedKeys(1, name)) for name in "ab"]
    block = PrivatizerBlock.of(together)
    made = block.release("s", [0, 1], [0, 0], lambda _, __: DenseContributions(rows))
    for i, name in enumerate("ab"):
        alone = Privatizer(policy, 2, 6, MemoryLedger(), SimulatedKeys(1, name))
        expected = alone.release("s", 0, lambda _, i=i: rows[2 * i : 2 * i + 2])
        assert (block.made(made, i, i).values == expected.values).all()


def test_a_client_that_refuses_does_not_hold_up_the_others():
    policy = PrivacyPolicy(1.0, 1, 3, 1.0)
    clients = [Privatizer(policy, 2, 6, MemoryLedger(), SimulatedKeys(1, name)) for name in "abc"]
    ones = lambda positions, _: DenseContributions(np.ones((len(positions), 2)))  # noqa: E731
    block = PrivatizerBlock.of(clients)
    made = block.release("s", [0, 1, 2], [0, 7, 0], ones)
    assert (made.rows, list(made.refused)) == ([0, 2], [1])
    assert isinstance(made.refused[1], RefusedError)
    again = block.release("s", [0, 1, 2], [1, 0, 1], ones)
    assert again.streams.release.tolist() == [2, 1, 2], "every transaction was closed"


def test_clients_with_real_keys_release_by_themselves():
    class DurableLedger(MemoryLedger):
        durable = True

    policy, data = PrivacyPolicy(1.0, 1, 3, 1.0), row_bytes(range(6))
    real = Privatizer(policy, 2, 6, DurableLedger(), SystemKeys.generate(), data=data)
    with raises(ConfigurationError, "unsupported", match="real keys"):
        PrivatizerBlock.of([real])


def test_the_closed_form_of_softmax_gradients_is_the_sum_written_out():
    experiment = prepare(BASE)
    samples = stacked_samples([(experiment.shards[0], slice(0, 4)), (experiment.shards[1], slice(2, 3))])
    generator = np.random.Generator(np.random.Philox(key=5))
    points = [[generator.standard_normal(shape) for shape in experiment.model.shapes] for _ in range(2)]
    stack = experiment.model.stacked(points, (7.0, -6.0), samples)
    dense = 7.0 * experiment.model(points[0], samples) - 6.0 * experiment.model(points[1], samples)
    np.testing.assert_allclose(stack.norms(), np.linalg.norm(dense, axis=1), rtol=1e-12)
    row = np.empty(dense.shape[1])
    stack.write(4, 0.5, row)
    np.testing.assert_allclose(row, 0.5 * dense[4], rtol=1e-12, atol=1e-15)
    assert np.linalg.norm(clip_per_sample(dense, 1.0)[4]) <= 1.0


def test_samples_of_other_kinds_are_stacked_or_refused():
    arrays = [(np.arange(6).reshape(3, 2), slice(0, 2)), (np.arange(4).reshape(2, 2), slice(1, 2))]
    assert stacked_samples(arrays).tolist() == [[0, 1], [2, 3], [2, 3]]
    with raises(ConfigurationError, "wrong-type", match="another engine"):
        stacked_samples([(["a", "b"], slice(0, 1))])


class NamedSamples(list):
    """Samples whose inputs have names."""

    def __getitem__(self, chosen):
        numbers = np.arange(4)[chosen]
        return {"words": numbers[:, None], "mask": numbers > 1}, numbers


def test_samples_with_inputs_by_name_are_stacked():
    inputs, labels = stacked_samples([(NamedSamples(), slice(0, 2)), (NamedSamples(), slice(3, 4))])
    assert inputs["words"].tolist() == [[0], [1], [3]]
    assert inputs["mask"].tolist() == [False, False, True]
    assert labels.tolist() == [0, 1, 3]


def test_the_row_cache_keeps_what_fits_and_forgets_the_oldest():
    cache = RowCache(3 * 80)
    rows = [np.full(10, i) for i in range(4)]
    for i, row in enumerate(rows):
        cache.keep(b"key", bytes([i]), row)
    assert cache.take(b"key", b"\x00") is None
    assert cache.take(b"key", b"\x03") is rows[3]
    assert cache.take(b"key", b"\x03") is None
    assert cache.take(b"other", b"\x02") is None


def test_a_subclass_without_a_rule_says_so():
    class Nothing(PrivateClient):
        pass

    experiment = prepare(BASE)
    subject = Nothing(
        experiment.model, experiment.shards[0], experiment.policy(0), MemoryLedger(), SimulatedKeys(1, "0"), name="0"
    )
    with pytest.raises(NotImplementedError, match="point_weights"):
        list(Cohort(["0"], lambda _: subject).releases(1, "s", {"0": 0}, [experiment.model.initial_parameters(1)]))
