"""A clip that follows the gradients, the server's half: it finds the quantile, whatever it starts from."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, protocol
from murmurfl.privacy.side.clipped_share import CountedRows
from murmurfl.strategies import FullBatch, Reply
from murmurfl.strategies.full_batch import next_clip

D, N, SHARE = 4, 2000, 0.1
OPTIONS = {"num_clients": 1, "clients_per_round": 1, "learning_rate": 1e-6, "seed": 1, "session": "s"}
GENERATOR = np.random.Generator(np.random.Philox(key=12))
GRADIENTS = GENERATOR.normal(size=(N, D)) * np.exp(GENERATOR.normal(size=N))[:, None]
NORMS = np.linalg.norm(GRADIENTS, axis=1)


class Machine:
    """A machine whose gradients are the same everywhere, with noise of so much on a sum."""

    def __init__(self, noise=0.0, silent=()):
        self.noise, self.silent, self.points = noise, silent, []

    def names(self):
        return ["0"]

    def statements(self, session):
        return {}

    def answer(self, request):
        point, rows = request.points[0], CountedRows(SHARE)
        self.points.append(point)
        if request.server_round in self.silent:
            return
        assert point.shape == (D + 1,)
        total = np.append(rows.scales(NORMS, point[-1]) @ GRADIENTS, rows.marks(NORMS, point[-1]).sum())
        total += self.noise * np.random.Generator(np.random.Philox(key=request.server_round)).normal(size=D + 1)
        yield Reply("0", request.server_round, request.acks["0"], total, {protocol.NUM_EXAMPLES: N})


def trained(machine, rounds=40, **options):
    strategy = FullBatch(**{**OPTIONS, "quantile": 0.3, "quantile_share": SHARE, "first_clip": 1.0, **options})
    strategy.start(machine, ArrayRecord([np.zeros(D)]), num_rounds=rounds)
    return strategy


def within(strategy):
    return (float(strategy.state.clip) >= NORMS).mean()


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("first_clip", [0.3, 1.0, 20.0])
def test_the_clip_comes_to_the_quantile_that_is_wanted(quantile, first_clip):
    """Noise of 5 on a sum of 2000 marks of 0.32: on a share 0.4 %."""
    strategy = trained(Machine(noise=5.0), quantile=quantile, first_clip=first_clip)
    assert within(strategy) == pytest.approx(quantile, abs=0.05)


def test_a_share_that_is_misread_leads_the_clip_elsewhere(monkeypatch):
    """The planted bug: marks are read as if they were 0 or 1."""
    read = CountedRows.read

    def misread(self, mean, clip):
        gradient, _ = read(self, mean, clip)
        return gradient, float(mean[-1]) / math.sqrt(self.share)

    monkeypatch.setattr(CountedRows, "read", misread)
    assert abs(within(trained(Machine())) - 0.3) > 0.2


def test_a_step_follows_the_clipped_mean_and_shortens_with_it():
    for first_clip in (0.1, 100.0):
        strategy = trained(Machine(), rounds=1, learning_rate=1.0, first_clip=first_clip)
        mean = (GRADIENTS * np.minimum(1.0, first_clip / NORMS)[:, None]).mean(axis=0)
        share = (first_clip >= NORMS).mean()
        clip = next_clip(first_clip, share, quantile=0.3, rate=4.0)
        assert float(strategy.state.clip) == pytest.approx(clip)
        assert strategy.state.w == pytest.approx(-mean * min(1.0, clip / first_clip))


def test_rounds_in_which_nothing_came_leave_the_clip_where_it_was():
    machine = Machine(silent=(2, 3))
    trained(machine, rounds=4)
    assert machine.points[1].tobytes() == machine.points[2].tobytes() == machine.points[3].tobytes()


def test_a_run_that_was_interrupted_goes_on_with_its_clip(tmp_path):
    whole, half = Machine(noise=5.0), Machine(noise=5.0)
    trained(whole, rounds=6)
    trained(half, rounds=3, checkpoint=tmp_path / "c.npz")
    trained(half, rounds=6, checkpoint=tmp_path / "c.npz")
    assert [point.tobytes() for point in half.points] == [point.tobytes() for point in whole.points]


@pytest.mark.parametrize(
    "options",
    [
        {"quantile": 1.0},
        {"quantile": -0.1},
        {"quantile": math.nan},
        {"quantile_rate": 0.0},
        {"quantile_rate": math.inf},
        {"first_clip": 0.0},
        {"first_clip": math.inf},
        {"first_clip": math.nan},
        {"quantile": 0.0},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigurationError, match=r"Expected (quantile|first_clip|quantile_rate)"):
        trained(Machine(), **options)
