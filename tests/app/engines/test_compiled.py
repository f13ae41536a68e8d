"""Compiled loops make the integers that NumPy makes, whatever is lost, kept, repeated or not finite."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines import compiled
from murmurfl.app.engines.compiled import CompiledRows, LastNormals, compiled_rows, worth_compiling
from murmurfl.app.engines.native import loops
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.adapters.per_sample_gradients import OuterProducts
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, RowCache, SimulatedKeys
from murmurfl.privacy.ledger.ledger_records import BlockLedger
from murmurfl.privacy.noise import fast_pairs
from murmurfl.privacy.release.clipping import ChosenContributions, DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")

ROOT = Path(__file__).parents[3]
CLIENTS, CLASSES, FEATURES = 5, 3, 4
D = CLASSES * FEATURES + CLASSES
ACKS = [[0] * CLIENTS, [1, 0, 1, 1, 0], [2, 2, 1, 0, 0], [3, 3, 9, 3, 1], [4, 3, 3, 4, 4]]
MECHANISMS = ["cancelling", "decay", "independent", "blt"]


def block(arithmetic, cache=1 << 20, features=FEATURES, **changes):
    options = {
        "clip_norm": 1.0,
        "batch_size": 1,
        "max_participations": 6,
        "mu": 1.0,
        "mechanism": "cancelling",
        **changes,
    }
    rows, size = RowCache(cache), CLASSES * (features + 1)
    privatizer = Privatizer(PrivacyPolicy(**options), size, 20, MemoryLedger(), SimulatedKeys(1, "0"), rows)
    keys = lambda row: SimulatedKeys(1, str(row))  # noqa: E731
    return PrivatizerBlock(privatizer, BlockLedger(CLIENTS), np.full(CLIENTS, 20), keys, arithmetic=arithmetic)


def contributions(kind, number, rows, *, features=FEATURES, broken=False):
    """Contributions of some of ten samples, as engines have them."""
    generator = np.random.Generator(np.random.Philox(key=number))
    residuals, inputs = generator.normal(size=(2 * CLIENTS, CLASSES)), generator.normal(size=(2 * CLIENTS, features))
    if broken:
        residuals[2] = np.nan  # the sample of the second client
    if kind == "outer":
        return OuterProducts(residuals[rows], inputs[rows])
    outer = np.einsum("ij,ik->ijk", residuals, inputs).reshape(len(residuals), -1)
    dense = np.concatenate([outer, residuals], axis=1)
    if kind == "written":
        return ChosenContributions(DenseContributions(dense), np.asarray(rows, np.intp))
    return DenseContributions(dense[rows].astype(kind))


def transcript(subject, kind, broken=(), features=FEATURES):
    """All counts, and the sums of rounds."""
    heard = []
    for number, acks in enumerate(ACKS):

        def rows(places, slices, number=number):
            chosen = [2 * place + i for place, some in zip(places, slices, strict=True) for i in range(len_of(some))]
            return contributions(kind, number, chosen, features=features, broken=number in broken)

        made = subject.release("s", range(CLIENTS), acks, rows)
        heard += [counts.copy() for counts in made.counts]
        heard += [subject.total(made, list(range(len(made.counts)))), subject.total(made, [0, 2])]
    return np.array(heard)


def len_of(samples):
    return samples.stop - samples.start


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("quality", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["outer", "float32", "float64", "written"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_counts_are_numpys_to_the_last_bit(mechanism, kind, quality, batch):
    options = {"mechanism": mechanism, "noise_quality": quality, "batch_size": batch}
    one, other = transcript(block(None, **options), kind), transcript(block(compiled_rows(), **options), kind)
    assert (one == other).all()
    assert np.abs(one).max() > 1000


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", ["outer", "float32"])
def test_rows_longer_than_a_piece_are_numpys(mechanism, kind):
    options = {"features": 11_000, "mechanism": mechanism, "noise_quality": "fast"}  # 33,003 values
    expected = transcript(block(None, **options), kind, features=11_000)
    assert (transcript(block(compiled_rows(), **options), kind, features=11_000) == expected).all()


@pytest.mark.parametrize(
    "options", [{"schedule": "harmonic"}, {"release_rule": "paper"}, {"clipping": "automatic"}, {"own": True}]
)
def test_settings_make_no_difference(options):
    own = options.pop("own", False)
    expected = transcript(block(None, **options), "outer")
    assert (transcript(block(compiled_rows(own_rows=own), **options), "outer") == expected).all()


def test_counts_of_a_lost_reply_hold_no_memory_of_others():
    made = block(compiled_rows(own_rows=True)).release(
        "s", range(CLIENTS), [0] * CLIENTS, lambda places, _: contributions("outer", 0, [2 * place for place in places])
    )
    assert all(counts.base is None for counts in made.counts)


def test_a_sum_that_was_kept_is_only_of_the_counts_that_were_made():
    subject = block(compiled_rows())
    made = subject.release(
        "s", range(CLIENTS), [0] * CLIENTS, lambda *_: contributions("float64", 0, list(range(CLIENTS)))
    )
    other = np.full(D, 7)
    for counts in (made.counts, made.counts[:-1], [*made.counts, other], [*made.counts[:-1], other]):
        total = subject.total(replace(made, counts=counts), list(range(len(counts))))
        assert (total == np.sum(counts, axis=0)).all()


@pytest.mark.parametrize("mechanism", ["cancelling", "decay"])
@pytest.mark.parametrize("rows", [0, 2, 3, 5])
def test_rows_of_noise_that_were_not_kept_are_drawn_again(rows, mechanism):
    """Clients share nonces, so a row that took another client's place must not pass for its own."""
    heard, kept = [], LastNormals()
    for arithmetic in (None, lambda rule: CompiledRows(rule, kept)):
        subject = block(arithmetic, cache=rows * 4 * D, mechanism=mechanism, noise_quality="fast")
        for pair in ([0, 1], [2, 3], [0, 4], [1, 2], [3, 0], [4, 1]):
            made = subject.release("s", pair, [0, 0], lambda *_: contributions("outer", 3, [0, 1]))
            heard.append([counts.copy() for counts in made.counts])
    assert (np.array(heard[:6]) == np.array(heard[6:])).all()
    assert len(kept.table) == (rows if rows > 1 else 0)


def test_a_block_that_failed_half_way_is_made_again(monkeypatch):
    heard, add_outer = [], loops().add_outer
    for arithmetic, fails in ((None, False), (compiled_rows(), True)):
        subject = block(arithmetic)
        for number in range(4):
            asked = "s", [0, 1], [0, 0], lambda *_, n=number: contributions("outer", n, [0, 1])
            if fails and number == 2:
                monkeypatch.setattr(loops(), "add_outer", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    subject.release(*asked)
                monkeypatch.setattr(loops(), "add_outer", add_outer)
            heard.append([counts.copy() for counts in subject.release(*asked).counts])
    assert (np.array(heard[:4]) == np.array(heard[4:])).all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_numpy_goes_on_where_a_loop_cannot_and_the_other_way_round(mechanism):
    """A row that is not finite is left to NumPy."""
    expected = transcript(block(None, mechanism=mechanism), "outer", broken=(1, 3))
    assert (transcript(block(compiled_rows(), mechanism=mechanism), "outer", broken=(1, 3)) == expected).all()


@pytest.mark.parametrize("options", [{"mechanism": "banded"}, {"mechanism": "bisr"}, {"mechanism": "none"}])
def test_other_mechanisms_are_left_to_numpy(options):
    expected = transcript(block(None, **options), "float64")
    assert (transcript(block(compiled_rows(), **options), "float64") == expected).all()


def test_a_loop_that_rounded_otherwise_would_be_noticed(monkeypatch):
    add_dense = loops().add_dense

    def truncating(rows, factors, *others):
        add_dense(np.trunc(rows * factors[:, None]), np.ones_like(factors), *others)

    monkeypatch.setattr(loops(), "add_dense", truncating)
    assert (transcript(block(compiled_rows()), "float64") != transcript(block(None), "float64")).any()


def test_a_run_is_the_same_with_and_without(monkeypatch):
    config = RunConfig(num_rounds=6, clients_per_round=7, preset="paper", lost_replies=0.2, checkpoint=False)
    made, used = [], []
    for least in (1 << 62, 1):
        monkeypatch.setattr(compiled, "WORTH_COMPILING", least)
        monkeypatch.setattr(compiled, "WORTH_LOADING", least)
        used.append(worth_compiling(prepare(config)))
        made.append(run_cohort(config))
    assert used == [False, True]
    assert all((a == b).all() for a, b in zip(made[0].parameters, made[1].parameters, strict=True))
    assert made[0].strategy.history == made[1].strategy.history


def test_only_long_runs_are_worth_it(monkeypatch):
    experiment = prepare(RunConfig(num_rounds=6))
    for is_kept in (False, True):
        monkeypatch.setattr(compiled, "are_kept", lambda is_kept=is_kept: is_kept)
        worth = [worth_compiling(replace(experiment, num_rounds=rounds)) for rounds in (6, 1 << 12, 1 << 20)]
        assert worth == [False, is_kept, True]


def spread_words(step):
    """Words that become every ``step``-th of the float32 that words of 32 bits become, and both ends."""
    low = np.arange(0, 1 << 24, step, dtype=np.uint64)
    high = np.arange(1 << 23, 1 << 24, step, dtype=np.uint64)
    words = np.concatenate([low, *(high << np.uint64(shift) for shift in range(1, 9)), [0, 2**32 - 1]])
    return words.astype(np.uint32)


def test_compiled_normals_are_numpys():
    """All 84 million pairs of equal words were compared once, with NumPy's loops for AVX2 and for AVX-512."""
    if compiled.compiled_pairs() is None:
        pytest.skip("NumPy has other loops on this computer.")
    words = spread_words(61)
    rows = np.concatenate([words, words[::-1]])[None]
    made, expected, pairs = np.empty(rows.shape, np.float32), np.empty(rows.shape, np.float32), len(words)
    loops().make_normals(rows, made)
    fast_pairs(rows[:, :pairs], rows[:, pairs:], lambda *_: words, expected[:, :pairs], expected[:, pairs:])
    assert made.tobytes() == expected.tobytes()


def test_a_loop_refuses_arrays_that_it_would_read_as_others():
    normals, factors, made = np.ones((1, 3), np.float32), np.ones(1), np.zeros((1, 3), np.int64)
    for wrong in (
        (normals, 3, 1, 0, 3, 3, factors.astype(np.float32), made),
        (normals, 3, 1, 0, 3, 3, factors, made.astype(np.int32)),
    ):
        with pytest.raises(TypeError, match="Expected an array of"):
            loops().independent(*wrong)
    with pytest.raises(TypeError, match="contiguous"):
        loops().independent(normals, 3, 1, 0, 3, 3, factors, np.zeros((3, 2), np.int64).T)


def test_kept_code_needs_no_numba_and_damaged_code_is_made_anew(tmp_path):
    code = (
        "import sys; import numpy as np; from murmurfl.app.engines.native import loops; made = np.zeros(3, np.int64); "
        "loops().independent(np.full(3, 1.4, np.float32), 3, 1, 0, 3, 3, np.full(1, 5.0), made); "
        "print(*made, 'numba' in sys.modules)"
    )

    def run():
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert [run(), run()] == ["7 7 7 True\n", "7 7 7 False\n"]
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert [run(), run()] == ["7 7 7 True\n", "7 7 7 False\n"]


def test_compiled_normals_that_are_not_numpys_are_not_used(monkeypatch):
    word_pairs = loops().word_pairs

    def unfused(normals, words, rows, pairs):
        """Differ in the last bit where five eighths of a turn end, as without a fused product."""
        word_pairs(normals, words, rows, pairs)
        at_end = words[:, pairs:] == 5 << 29
        normals[:, :pairs][at_end] = np.nextafter(normals[:, :pairs][at_end], np.float32(0))

    monkeypatch.setattr(loops(), "word_pairs", unfused)
    compiled.compiled_pairs.cache_clear()
    try:
        assert compiled.compiled_pairs() is None
        options = {"noise_quality": "fast"}
        expected = transcript(block(None, **options), "outer")
        assert (transcript(block(compiled_rows(), **options), "outer") == expected).all()
    finally:
        compiled.compiled_pairs.cache_clear()
