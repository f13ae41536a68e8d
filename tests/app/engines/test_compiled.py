"""Compiled loops make the integers that NumPy makes, whatever is lost, kept, repeated or not finite."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from murmurfl.app.engines import compiled
from murmurfl.app.engines.compiled import CompiledRows, compiled_rows, worth_compiling
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.adapters.per_sample_gradients import OuterProducts
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, RowCache, SimulatedKeys
from murmurfl.privacy.ledger.ledger_records import BlockLedger
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")

CLIENTS, CLASSES, FEATURES = 5, 3, 4
D = CLASSES * FEATURES + CLASSES
ACKS = [[0] * CLIENTS, [1, 0, 1, 1, 0], [2, 2, 1, 0, 0], [3, 3, 9, 3, 1], [4, 3, 3, 4, 4]]


def block(arithmetic, cache=1 << 20, **changes):
    options = {
        "clip_norm": 1.0,
        "batch_size": 1,
        "max_participations": 6,
        "mu": 1.0,
        "mechanism": "cancelling",
        **changes,
    }
    rows = RowCache(cache)
    privatizer = Privatizer(PrivacyPolicy(**options), D, 20, MemoryLedger(), SimulatedKeys(1, "0"), rows)
    keys = lambda row: SimulatedKeys(1, str(row))  # noqa: E731
    return PrivatizerBlock(privatizer, BlockLedger(CLIENTS), np.full(CLIENTS, 20), keys, arithmetic=arithmetic)


def contributions(kind, number, broken=False):
    generator = np.random.Generator(np.random.Philox(key=number))
    residuals, features = generator.normal(size=(CLIENTS, CLASSES)), generator.normal(size=(CLIENTS, FEATURES))
    if broken:
        residuals[1] = np.nan
    if kind == "dense":
        return DenseContributions(generator.normal(size=(CLIENTS, D)))
    return OuterProducts(residuals, features)


def transcript(subject, kind, broken=()):
    """All counts, and the sums of rounds."""
    heard = []
    for number, acks in enumerate(ACKS):
        made = subject.release(
            "s", range(CLIENTS), acks,
            lambda places, _, n=number: _Some(contributions(kind, n, n in broken), places),
        )  # fmt: skip
        heard += [counts.copy() for counts in made.counts]
        heard += [subject.total(made, list(range(len(made.counts)))), subject.total(made, [0, 2])]
    return np.array(heard)


class _Some:
    """The rows of the clients that may release; as an engine has them where one refuses."""

    def __new__(cls, stack, places):
        if isinstance(stack, OuterProducts):
            return OuterProducts(stack.residuals[places], stack.features[places], bias=stack.bias)
        return DenseContributions(stack.rows[places])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("quality", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["dense", "outer"])
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "harmonic"}, {"release_rule": "paper"}, {"clipping": "automatic"}]
)
def test_the_counts_are_numpys_to_the_last_bit(kind, quality, options):
    one = transcript(block(None, noise_quality=quality, **options), kind)
    other = transcript(block(compiled_rows(), noise_quality=quality, **options), kind)
    assert (one == other).all()
    assert np.abs(one).max() > 1000


def test_a_sum_that_was_kept_is_only_of_the_counts_that_were_made():
    subject = block(compiled_rows())
    made = subject.release("s", range(CLIENTS), [0] * CLIENTS, lambda *_: contributions("dense", 0))
    other = np.full(D, 7)
    for counts in (made.counts, made.counts[:-1], [*made.counts, other], [*made.counts[:-1], other]):
        total = subject.total(replace(made, counts=counts), list(range(len(counts))))
        assert (total == np.sum(counts, axis=0)).all()


@pytest.mark.parametrize("cache", [0, 3 * 8 * D])
def test_rows_of_noise_that_were_not_kept_are_made_again(cache):
    expected = transcript(block(None), "dense")
    assert (transcript(block(compiled_rows(), cache=cache), "dense") == expected).all()


def test_numpy_goes_on_where_a_loop_cannot_and_the_other_way_round():
    """A row that is not finite is left to NumPy; both keep what is to be removed in one place."""
    expected = transcript(block(None), "outer", broken=(1, 3))
    assert (transcript(block(compiled_rows()), "outer", broken=(1, 3)) == expected).all()


@pytest.mark.parametrize("options", [{"mechanism": "blt"}, {"mechanism": "independent"}, {"mechanism": "none"}])
def test_other_mechanisms_are_left_to_numpy(options):
    expected = transcript(block(None, **options), "dense")
    assert (transcript(block(compiled_rows(), **options), "dense") == expected).all()


def test_a_loop_that_rounded_otherwise_would_be_noticed(monkeypatch):
    loops = compiled._loops()

    def truncating(values, *others):
        loops[0](np.trunc(values), *others)

    monkeypatch.setattr(compiled, "_loops", lambda: (truncating, loops[1]))
    assert (transcript(block(CompiledRows), "dense") != transcript(block(None), "dense")).any()


def test_a_run_is_the_same_with_and_without(monkeypatch):
    config = RunConfig(num_rounds=6, clients_per_round=7, preset="paper", lost_replies=0.2, checkpoint=False)
    made, used = [], []
    for least in (1 << 62, 1):
        monkeypatch.setattr(compiled, "WORTH_COMPILING", least)
        used.append(worth_compiling(prepare(config)))
        made.append(run_cohort(config))
    assert used == [False, True]
    assert all((a == b).all() for a, b in zip(made[0].parameters, made[1].parameters, strict=True))
    assert made[0].strategy.history == made[1].strategy.history


def test_only_long_runs_are_worth_it():
    experiment = prepare(RunConfig(num_rounds=6))
    assert not worth_compiling(experiment)
    assert worth_compiling(replace(experiment, num_rounds=1 << 20))
