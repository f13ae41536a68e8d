"""Every engine gives the models of the in-process engine, for every run of the table that names it."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines.pool import HerePool
from murmurfl.app.engines.start import num_nodes, ray_environment, ray_overrides, run_cohort, run_in_process
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.engines.workers import WorkerClients
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.clients import OnlineClient, PrivateClient
from murmurfl.clients.simulation.simulated_clients import TravellingLedger
from murmurfl.privacy import MurmurflError
from murmurfl.privacy.sums.masking import Masking

from tests.app.engines.travelling_grid import TravellingGrid
from tests.app.run_table import BASE, RUNS, SECURE, cases

# Contributions may differ by rounding in float64, which moves a value to a neighbouring point of the grid now and then:
# about 2^-20 of the noise's standard deviation. PyTorch models are float32.
RELATIVE, ABSOLUTE, FLOAT32 = 1e-6, 1e-8, 1e-4
ROOT = Path(__file__).parents[3]


@cache
def in_process(name):
    return run_in_process(RUNS[name].config)


@cache
def cohort(name):
    return run_cohort(RUNS[name].config)


def over_workers(config, size, **options):
    """A cohort over workers that are this process."""
    return run_experiment(WorkerClients(prepare(config), HerePool(size), **options), config, engine="cohort")


def same_bits(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def close(one, other):
    return all(
        np.allclose(a, b, RELATIVE, ABSOLUTE) if a.dtype == np.float64 else np.allclose(a, b, FLOAT32, FLOAT32)
        for a, b in zip(one, other, strict=True)
    )


def assert_same_run(one, other):
    """Rounds, statements and guarantee of two runs are the same; of models the caller says how much."""
    assert [asdict(report) for report in one.strategy.history] == [asdict(report) for report in other.strategy.history]
    assert one.statements == other.statements
    assert (one.mu, one.epsilon) == (other.mu, other.epsilon)


def assert_same_result(one, other):
    """Two runs have the same result, to the last letter of what is written of it."""
    assert same_bits(one.parameters, other.parameters)
    assert_same_run(one, other)
    assert one.training == other.training
    assert list(one.statements.items()) == list(other.statements.items())
    assert [dict(progress.clients) for progress in one.progress] == [dict(p.clients) for p in other.progress]
    assert one.evaluation == other.evaluation
    documents = [result.outcome.document() for result in (one, other)]
    for document in documents:
        for key in ("seconds", "date"):
            document.pop(key, None)
    assert json.dumps(documents[0]) == json.dumps(documents[1])


def check_cohort(name, monkeypatch, folder):
    together, alone = cohort(name), in_process(name)
    # Sums over all samples are equal to the last bit.
    same = same_bits if "full-batch" in RUNS[name].config.strategy else close
    assert same(together.parameters, alone.parameters)
    assert_same_run(together, alone)
    return together


def check_alone(name, monkeypatch, folder):
    """No masks, and clients that are not computed together: then even their gradients' rounding is the same."""
    ask_alone(monkeypatch)
    masked, unmasked = in_process(name), run_cohort(RUNS[name].config)
    assert same_bits(masked.parameters, unmasked.parameters)
    assert_same_run(masked, unmasked)
    opened = [report for report in masked.strategy.history if not report.closed]
    assert opened
    assert all(report.aggregated >= 4 for report in opened)
    return masked


def check_workers(name, monkeypatch, folder):
    result = over_workers(RUNS[name].config, 3)
    assert_same_result(cohort(name), result)
    return result


def check_travelling(name, monkeypatch, folder):
    config = RUNS[name].config
    grid = TravellingGrid(monkeypatch, config)
    travelled = run_experiment(grid, config, engine="ray")
    assert same_bits(travelled.parameters, in_process(name).parameters)
    assert_same_run(travelled, in_process(name))
    assert all(worker.nodes for worker in grid.workers), "both had something to do"
    return travelled


def check_ray(name, monkeypatch, folder):
    run = RUNS[name]
    config = replace(run.config, out_dir=str(folder), run_name="run")
    run_flower_app(
        ROOT,
        run_config=ray_overrides(config),
        num_supernodes=run.nodes or num_nodes(config),
        environment=ray_environment(config),
        timeout_s=400,
    )
    expected = in_process(name)
    with np.load(folder / "run" / "model.npz") as model:
        assert same_bits([model[part] for part in expected.experiment.model.names], expected.parameters)
    return expected


CHECKS = {
    "cohort": check_cohort,
    "alone": check_alone,
    "workers": check_workers,
    "travelling": check_travelling,
    "ray": check_ray,
}


def ask_alone(monkeypatch):
    for kind in (PrivateClient, OnlineClient):
        monkeypatch.setattr(kind, "together", classmethod(lambda *_: None))


@pytest.mark.few_cases(32)
@pytest.mark.parametrize(("engine", "name"), cases())
def test_engine_gives_the_model_of_the_in_process_engine(engine, name, monkeypatch, tmp_path):
    result = CHECKS[engine](name, monkeypatch, tmp_path)
    config, history = result.experiment.config, result.strategy.history
    if config.lost_replies:
        assert sum(report.lost for report in history) > 0
    if config.max_participations:
        assert sum(report.refusals for report in history) > 0
    if "closed" in name:
        assert any(report.closed for report in history)


def test_masked_runs_lose_replies_and_close_rounds():
    closed = [report for report in run_cohort(SECURE).strategy.history if report.closed]
    assert closed
    assert all(report.unopened < 4 and report.lost > 1 for report in closed)
    assert all(report.aggregated == 0 for report in closed)


def test_another_seed_is_outside_the_tolerance():
    other = run_cohort(replace(BASE, seed=2)).parameters
    assert not any(close([a], [b]) for a, b in zip(cohort("mu2").parameters, other, strict=True))


def test_noise_alone_is_the_same_to_the_last_bit():
    """With a clip of almost nothing a release is its noise: no contribution is left to be rounded differently."""
    config = replace(BASE, clip_norm=1e-150, learning_rate=1.0, projection_radius=5e8)
    together, alone = run_cohort(config), run_in_process(config)
    assert same_bits(together.parameters, alone.parameters)
    assert np.abs(together.parameters[0]).max() > 0


def test_one_count_of_one_release_is_noticed(monkeypatch):
    """The sibling of the comparison above: one count, of one release, in one round."""
    whole = Masking.mask
    ask_alone(monkeypatch)

    def off_by_one(self, release, session, policy):
        masked = whole(self, release, session, policy)
        if (self.name, release.release) == ("2", 1):
            masked.counts[7] += np.uint64(1)
        return masked

    monkeypatch.setattr(Masking, "mask", off_by_one)
    assert not same_bits(run_in_process(SECURE).parameters, run_cohort(SECURE).parameters)


def stays_with_its_first_state(self, state, arrive=TravellingLedger.arrive):
    vars(self).setdefault("arrivals", []).append(state)
    if len(self.arrivals) <= 2:  # the first is that of its making
        arrive(self, state)


@pytest.mark.parametrize("bug", ["arrive", "leave"])
def test_a_worker_that_went_by_the_ledger_it_kept_would_be_noticed(bug, monkeypatch, tmp_path):
    """The planted bugs: a kept client's ledger reads the state of an earlier message, or gives back none."""
    planted = stays_with_its_first_state if bug == "arrive" else lambda self, reply: None
    monkeypatch.setattr(TravellingLedger, bug, planted)
    with pytest.raises((AssertionError, MurmurflError)):
        check_travelling("few, losses", monkeypatch, tmp_path)
