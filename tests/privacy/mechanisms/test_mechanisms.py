"""Every mechanism against dense linear algebra: one suite, one table.

Mechanisms of other people's: what is registered does what its matrices say, and every lie is found.
Mechanisms of somebody's own, of every kind of memory: the same releases with a cache, without one, and together.
"""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    Mechanism,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    RowCache,
    SimulatedKeys,
    SumAssumption,
    check_mechanism,
    make_mechanism,
    register_mechanism,
    row_key,
    standard_normals,
)
from murmurfl.privacy.mechanisms import (
    CancellingNoise,
    Increment,
    IndependentNoise,
    noise_is_memoryless,
)
from murmurfl.privacy.mechanisms.mechanism import gram_sensitivity, pattern_bound, worst_pattern
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

from tests.harness.errors import raises

CASES = {
    "independent": ("independent", {}),
    "independent, average": ("independent", {"shares": "average"}),
    "independent, late": ("independent", {"shares": "late"}),
    "uniform": ("cancelling", {"schedule": "uniform"}),
    "harmonic": ("cancelling", {"schedule": "harmonic"}),
    "paper": ("cancelling", {"schedule": "paper"}),
    "paper, more rounds than releases": ("cancelling", {"schedule": "paper", "num_rounds": 100}),
    "decay": ("decay", {}),
    "decay, prefix sums": ("decay", {"workload": "prefix-sum"}),
    "decay, given": ("decay", {"decay": 0.7}),
    "decay, none": ("decay", {"decay": 0}),
    "decay, all": ("decay", {"decay": 1}),
    "tree, least squares": ("tree", {}),
    "tree, dyadic": ("tree", {"decoder": "dyadic"}),
    "sqrt_toeplitz": ("sqrt_toeplitz", {}),
    "sqrt_normalised": ("sqrt_normalised", {}),
    "bisr": ("bisr", {}),
    "bisr, few": ("bisr", {"bands": 4}),
    "bisr, one": ("bisr", {"bands": 1}),
    "banded": ("banded", {"bands": 4}),
    "banded, cut": ("banded", {"bands": 4, "optimised": False}),
    "blt": ("blt", {}),
    "blt, given": ("blt", {"theta": [0.9, 0.3], "omega": [0.2, 0.3]}),
    "optimal": ("optimal", {}),
    "optimal, mu2": ("optimal", {"workload": "mu2"}),
}
mechanisms = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(case, releases):
    name, options = case
    return make_mechanism(name, releases, **options)


@mechanisms
def test_more_releases_than_arrays_are_made_for_are_refused(case):
    for releases in (2**63, 2**100):
        with raises(ConfigurationError, "out-of-range", "num_releases"):
            make(case, releases)


@pytest.mark.few_cases(6)
@mechanisms
@pytest.mark.parametrize("n", [1, 2, 5, 12, 33])
def test_decoder_times_encoder_is_the_prefix_sum(case, n):
    mechanism = make(case, n)
    assert mechanism.decoder() @ mechanism.materialize() == pytest.approx(np.tri(n))
    used = np.cumsum([mechanism.draws(k) for k in range(1, n + 1)])
    for row, drawn in zip(mechanism.decoder(), used, strict=True):
        assert not row[drawn:].any(), "row k may use only noise up to k"


@pytest.mark.few_cases(6)
@mechanisms
@pytest.mark.parametrize("n", [1, 7, 71])
def test_streamed_increments_add_up_to_the_rows_of_dense_b_z(case, n):
    mechanism = make(case, n)
    draws = [mechanism.draws(k) for k in range(1, n + 1)]
    normals = np.random.Generator(np.random.Philox(key=5)).normal(size=(sum(draws), 11))
    dense = mechanism.decoder() @ normals
    assert mechanism.inverse() @ normals == pytest.approx(np.diff(dense, axis=0, prepend=0))
    state, row, first = mechanism.initial_state(11), np.zeros(11), 0
    for k in range(1, n + 1):
        own = normals[first : first + draws[k - 1]]
        first += len(own)
        if state is None:
            state = mechanism.state_after(k - 1, lambda releases: normals[np.array(releases) - 1])
        before = [values.copy() for values in state]
        increment = mechanism.increment(state, k, own.ravel())
        assert all((old == values).all() for old, values in zip(before, state, strict=True)), "a pure function"
        added = np.abs(increment.added).max() / np.abs(normals).max()
        assert (bound := mechanism.increment_bound(k)) is None or added <= bound * (1 + 1e-12)
        row = row + increment.added - (0 if increment.removed is None else increment.removed)
        assert row == pytest.approx(dense[k - 1])
        assert mechanism.row_std(k) == pytest.approx(np.linalg.norm(mechanism.decoder()[k - 1]))
        state = increment.state
    stds = [mechanism.row_std(k) for k in range(1, n + 1)]
    assert mechanism.row_std_range() == pytest.approx((min(stds), max(stds)))


@mechanisms
def test_scale_multiplies_all_noise_and_keeps_precision(case):
    mechanism = make(case, 20)
    generator = np.random.Generator(np.random.Philox(key=9))
    one = other = small = mechanism.initial_state(5)
    for k in range(1, 10):
        normals = generator.normal(size=5 * mechanism.draws(k))
        first, second = mechanism.increment(one, k, normals), mechanism.increment(other, k, normals, 3.0)
        assert second.added == pytest.approx(3.0 * first.added)
        third = mechanism.increment(small, k, normals.astype(np.float32))
        assert third.added == pytest.approx(first.added, abs=1e-4)
        if mechanism.memory in ("state", "all"):
            assert all(values.dtype == np.float32 for values in third.state)
        one, other, small = first.state, second.state, third.state


@mechanisms
def test_what_a_stream_keeps_is_no_more_than_it_says(case):
    mechanism = make(case, 37)
    if mechanism.memory != "state":
        nonces = {"nothing": 0, "last": 1, "recent": mechanism.remembered, "all": 37}
        assert mechanism.memory_bytes(1000) == 16 * nonces[mechanism.memory]
        return
    state, most = mechanism.initial_state(3), 0
    for k in range(1, 38):
        state = mechanism.increment(state, k, np.ones(3 * mechanism.draws(k))).state
        most = max(most, sum(values.nbytes for values in state))
    assert most <= mechanism.memory_bytes(3)


@mechanisms
def test_the_state_of_a_stream_can_be_regenerated_to_the_last_bit(case):
    mechanism = make(case, 40)
    if mechanism.memory == "state":
        pytest.skip("its state is kept")
    normals = np.random.Generator(np.random.Philox(key=6)).normal(size=(40, 3))
    state = mechanism.initial_state(3)
    for k in range(1, 41):
        state = mechanism.increment(state, k, normals[k - 1]).state
        again = mechanism.state_after(k, lambda releases: normals[np.array(releases) - 1])
        state = again if state is None else state
        assert len(state) == len(again)
        assert all((a == b).all() for a, b in zip(state, again, strict=True))


def allowed(n, participations, separation, pattern):
    """Every non-empty set of releases a sample may take part in."""
    for size in range(1, participations + 1):
        for chosen in combinations(range(n), size):
            steps = [b - a for a, b in pairwise(chosen)]
            if all(step == separation if pattern == "epochs" else step >= separation for step in steps):
                yield list(chosen)


@pytest.mark.few_cases(6)
@mechanisms
@pytest.mark.parametrize("pattern", ["separated", "epochs"])
@pytest.mark.parametrize("n", [1, 3, 8, 12])
def test_sensitivity_is_exact_over_every_allowed_pattern(case, n, pattern):
    """Brute force over all subsets: C^T C is non-negative, so the worst signs are all equal."""
    mechanism = make(case, n)
    encoder = mechanism.materialize()
    gram = encoder.T @ encoder
    assert gram.min() > -1e-12
    squares = {}
    for size in range(1, n + 1):
        for chosen in combinations(range(n), size):
            squares[chosen] = float(gram[np.ix_(chosen, chosen)].sum())
    for participations in {1, 2, 3, n}:
        for separation in {1, 2, 4, n}:
            patterns = allowed(n, participations, separation, pattern)
            worst = max(squares[tuple(chosen)] for chosen in patterns) ** 0.5
            found = mechanism.sensitivity_bound(participations, separation, pattern=pattern)
            assert found.value == pytest.approx(worst)
            assert found.exact
            assert mechanism.sensitivity(participations, separation, pattern=pattern) == found.value


@mechanisms
def test_sensitivity_of_the_first_releases_is_that_of_the_leading_block(case):
    mechanism = make(case, 9)
    for n in range(1, 10):
        leading = mechanism.materialize(n)
        assert mechanism.sensitivity(n=n) == pytest.approx(np.linalg.norm(leading, axis=0).max())
        assert (leading == mechanism.materialize()[: len(leading), :n]).all()
        assert mechanism.decoder(n) == pytest.approx(mechanism.decoder()[:n, : len(leading)])


def test_the_plain_search_agrees_with_the_closed_formula():
    mechanism = make_mechanism("cancelling", 10, schedule="harmonic")
    gram = mechanism.materialize().T @ mechanism.materialize()
    for participations, separation in [(2, 1), (3, 2), (4, 3), (9, 5)]:
        assert np.sqrt(worst_pattern(gram, participations, separation)) == pytest.approx(
            mechanism.sensitivity(participations, separation)
        )


class Alternating(Mechanism):
    """C with negative entries in C^T C: a made-up mechanism to see what is said of it."""

    name = "alternating"
    memory = "nothing"

    def materialize(self, n=None):
        n = self._check_n(n)
        return np.eye(n) - 0.8 * np.eye(n, k=-1)

    def decoder(self, n=None):
        return np.tri(self._check_n(n)) @ np.linalg.inv(self.materialize(n))

    initial_state = increment = row_std = memory_bytes = None


def test_negative_overlaps_give_a_bound_not_a_sum():
    mechanism = type("Concrete", (Alternating,), {"__abstractmethods__": frozenset()})(8)
    encoder = mechanism.materialize()
    generator = np.random.Generator(np.random.Philox(key=13))
    for participations, separation, pattern in [(2, 1, "separated"), (3, 1, "epochs"), (8, 1, "separated")]:
        found = mechanism.sensitivity_bound(participations, separation, pattern=pattern)
        assert not found.exact
        assert "negative" in found.method
        plain = worst = 0.0
        for chosen in allowed(8, participations, separation, pattern):
            plain = max(plain, np.linalg.norm(encoder[:, chosen].sum(axis=1)))
            for _ in range(20):
                units = generator.normal(size=(len(chosen), 3))
                units /= np.linalg.norm(units, axis=1, keepdims=True)
                worst = max(worst, np.linalg.norm(encoder[:, chosen] @ units))
            signs = (-1.0) ** np.arange(len(chosen))
            worst = max(worst, np.linalg.norm(encoder[:, chosen] @ signs))
        assert plain < 0.9 * worst, "the plain sum would be too little noise"
        assert worst <= found.value * (1 + 1e-12)
    assert mechanism.sensitivity_bound(1).exact


def test_the_bound_for_too_many_patterns_is_one_and_is_not_loose():
    generator = np.random.Generator(np.random.Philox(key=14))
    for _ in range(30):
        n = int(generator.integers(2, 11))
        encoder = np.abs(generator.normal(size=(n, n))) * generator.uniform(0.2, 3.0, size=n)
        gram = encoder.T @ encoder
        for participations, separation in [(1, 1), (2, 1), (2, 3), (3, 2), (n, 1)]:
            exact, bound = (
                worst_pattern(gram, participations, separation),
                pattern_bound(gram, participations, separation),
            )
            assert exact <= bound * (1 + 1e-12)
            assert bound <= 1.35 * exact
    large = make_mechanism("optimal", 200)
    found = large.sensitivity_bound(20, 3)
    assert not found.exact
    assert large.sensitivity(20, 3, pattern="epochs") <= found.value


def test_schedules_are_those_of_the_papers():
    """ALGORITHMS 2.2, in units of Delta / mu."""
    k = np.arange(1, 51)
    assert make_mechanism("cancelling", 50, schedule="uniform").sigmas ** 2 == pytest.approx(np.full(50, 50.0))
    assert make_mechanism("cancelling", 50, schedule="harmonic").sigmas ** 2 == pytest.approx((1 / k).sum() * k)
    paper = make_mechanism("cancelling", 50, schedule="paper", num_rounds=1200)
    assert paper.sigmas**2 == pytest.approx((1 + np.log(1200)) * k)
    assert paper.sensitivity() == pytest.approx(np.sqrt((1 / k).sum() / (1 + np.log(1200))))
    assert paper.sensitivity() < 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancelled", 4, {}),
        ("cancelling", 0, {}),
        ("cancelling", 2.5, {}),
        ("cancelling", 4, {"schedule": "linear"}),
        ("cancelling", 4, {"schedule": "uniform", "num_rounds": 9}),
        ("cancelling", 4, {"schedule": "paper", "num_rounds": 3}),
        ("independent", 4, {"schedule": "uniform"}),
        ("decay", 4, {"decay": 1.01}),
        ("decay", 4, {"decay": -0.01}),
        ("decay", 4, {"decay": float("nan")}),
        ("decay", 4, {"decay": True}),
        ("decay", 4, {"decay": "half"}),
        ("decay", 4, {"workload": "mu3"}),
        ("bisr", 4, {"bands": 0}),
        ("sqrt_normalised", 4, {"bands": 2}),
        ("tree", 4, {"decoder": "full"}),
        ("optimal", 4, {"workload": "mu3"}),
        ("optimal", 5000, {}),
        ("optimal", 1100, {"workload": "mu2"}),
    ],
)
def test_unknown_names_and_impossible_options_are_refused(arguments):
    name, releases, options = arguments
    with pytest.raises(ConfigurationError, match="Expected"):
        make_mechanism(name, releases, **options)


def test_releases_out_of_range_are_refused():
    mechanism = make_mechanism("cancelling", 3)
    for call in (
        lambda: mechanism.increment((), 4, np.zeros(2)),
        lambda: mechanism.materialize(4),
        lambda: mechanism.sensitivity(0),
        lambda: mechanism.sensitivity(n=0),
        lambda: mechanism.sensitivity(pattern="often"),
    ):
        with pytest.raises(ConfigurationError, match="Expected"):
            call()


def test_samples_that_return_every_epoch_are_not_charged_for_other_returns():
    """Releases 0 and 3 share their noise: a sample in both moves most, and one that returns every second never is."""
    whole = np.eye(5)
    whole[0, 3] = whole[3, 0] = 1.0
    found = [
        gram_sensitivity(lambda chosen: whole[np.ix_(chosen, chosen)], 5, 2, 2, pattern)
        for pattern in ("epochs", "separated")
    ]
    assert [one.value for one in found] == pytest.approx([np.sqrt(2), 2.0])


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("releases", [1, 2, 7])
def test_ours_pass(name, releases):
    check_mechanism(make_mechanism(name, releases))


class HalfTheNoise(IndependentNoise):
    name = "half"

    def increment(self, state, release, normals, scale=1.0):
        return Increment(0.5 * scale * normals, None, ())


class ForgetsToCancel(CancellingNoise):
    name = "forgets"

    def increment(self, state, release, normals, scale=1.0):
        increment = super().increment(state, release, normals, scale)
        return increment._replace(removed=None)


class LooksAhead(IndependentNoise):
    name = "ahead"

    def materialize(self, n=None):
        return super().materialize(n)[::-1]

    def decoder(self, n=None):
        return super().decoder(n)[:, ::-1]


class WrongDecoder(IndependentNoise):
    name = "decoder"

    def decoder(self, n=None):
        return np.eye(n or self.num_releases)


class UnderstatesItsRows(IndependentNoise):
    name = "rows"

    def row_std(self, release):
        return 0.1


class UnderstatesItsBound(IndependentNoise):
    name = "bound"

    def increment_bound(self, release):
        return 0.1


class SaysItRemovesTheLast(IndependentNoise):
    """Rounded by itself, a part of a row would make a message depend on more than the noisy prefixes."""

    name = "a-part"
    memory = "state"
    removes_last = True

    def decoder(self, n=None):
        return np.cumsum(self.inverse(n), axis=0)

    def inverse(self, n=None):
        return np.eye(self._check_n(n)) - 0.3 * np.eye(self._check_n(n), k=-1)

    def materialize(self, n=None):
        return np.linalg.inv(self.inverse(n))

    def increment(self, state, release, normals, scale=1.0):
        return Increment(normals * scale, 0.3 * state[0] if state else None, (normals * scale,))

    def row_std(self, release):
        return float(np.linalg.norm(self.decoder()[release - 1]))

    def _sensitivity(self, n, num_participations, min_separation):
        return None


class SaysItStandsAlone(CancellingNoise):
    """Under secure aggregation such releases are opened without looking at what they are built on."""

    name = "stands-alone"
    is_memoryless = True


class UnderstatesItsSensitivity(IndependentNoise):
    """Right for one participation; where samples return it takes them for one."""

    name = "sensitivity"

    def _sensitivity(self, n, num_participations, min_separation):
        return 1.0


@pytest.mark.parametrize(
    "kind",
    [
        HalfTheNoise,
        ForgetsToCancel,
        LooksAhead,
        WrongDecoder,
        UnderstatesItsRows,
        UnderstatesItsBound,
        SaysItRemovesTheLast,
        SaysItStandsAlone,
        UnderstatesItsSensitivity,
    ],
)
def test_a_mechanism_that_is_not_what_it_says_is_not_registered(kind):
    with raises(ConfigurationError, "mismatch", match="Expected of mechanism"):
        register_mechanism(kind)
    assert kind.name not in MECHANISMS


def test_a_name_is_taken_once(monkeypatch):
    monkeypatch.setattr("murmurfl.privacy.mechanisms.MECHANISMS", MECHANISMS)
    with raises(ConfigurationError, "duplicate", "name"):
        register_mechanism(IndependentNoise)

    class Mine(IndependentNoise):
        name = "mine"

    try:
        assert register_mechanism(Mine) is Mine
        assert isinstance(PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="mine").make_mechanism(), Mine)
    finally:
        del MECHANISMS["mine"]


def test_only_a_mechanism_that_says_so_itself_stands_alone(monkeypatch):
    assert [name for name in MECHANISMS if noise_is_memoryless(name)] == ["independent"]
    monkeypatch.setitem(MECHANISMS, "half", HalfTheNoise)
    assert not noise_is_memoryless("half"), "its parent says so"
    assert not noise_is_memoryless("none of them")
    summed = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3), "release_rule": "paper"}
    PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="independent", **summed)
    with raises(ConfigurationError, "conflict", "release_rule"):
        PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="half", **summed)


D, RELEASES, CLIENTS = 5, 7, 3
CACHES = {"none": None, "one": 1 << 20, "too small": 8 * D}


class Fading(Mechanism):
    """Release k removes ``factor`` of what release k - 1 added; its arrays are shared wherever they can be."""

    factor = 0.3

    def materialize(self, n=None):
        rows = np.arange(self._check_n(n))
        return np.tril(self.factor ** np.abs(rows[:, None] - rows))

    def decoder(self, n=None):
        n = self._check_n(n)
        return self.factor * np.eye(n) + (1 - self.factor) * np.tri(n)

    def initial_state(self, size):
        return ()

    def increment(self, state, release, normals, scale=1.0):
        row = scale * np.asarray(normals, dtype=np.float64)
        if self.memory == "nothing":
            return Increment(row, None, ())
        removed = state[0] if state and self.factor == 1 else self.factor * state[0] if state else None
        return Increment(row, removed, (row,))

    def state_after(self, release, draw, scale=1.0):
        if self.memory == "nothing":
            return ()
        return (scale * np.asarray(draw(range(release, release + 1))[0], dtype=np.float64),)

    def row_std(self, release):
        return math.sqrt(1.0 + (release - 1) * (1 - self.factor) ** 2)

    def memory_bytes(self, size):
        return 16


class Unhurried(Fading):
    """Adds the very normals it was given, and keeps them."""

    def increment(self, state, release, normals, scale=1.0):
        if scale != 1.0:
            normals = np.multiply(normals, scale, dtype=np.float64)
        return Increment(normals, self.factor * state[0] if state else None, (normals,))


class NotOurs(CancellingNoise):
    """Inherits from one that hands its arrays over, and shares its own."""

    removes_last = False

    def increment(self, state, release, normals, scale=1.0):
        row = self._row(release, normals, scale)
        return Increment(row, state[0] if state else None, (row,))


KINDS = {
    "nothing": (Fading, {"memory": "nothing", "factor": 0.0}),
    "last": (Fading, {"memory": "last"}),
    "last, cancelling": (Fading, {"memory": "last", "factor": 1}),
    "last, cancelling, said so": (Fading, {"memory": "last", "factor": 1, "removes_last": True}),
    "last, its normals": (Unhurried, {"memory": "last"}),
    "state": (Fading, {"memory": "state"}),
    "state, cancelling, said so": (Fading, {"memory": "state", "factor": 1, "removes_last": True}),
    "state, its normals": (Unhurried, {"memory": "state"}),
    "all": (Fading, {"memory": "all"}),
    "all, cancelling, said so": (Fading, {"memory": "all", "factor": 1, "removes_last": True}),
    "inherited": (NotOurs, {}),
}


@pytest.fixture(params=KINDS)
def name(request):
    """A mechanism of each kind, registered as a user registers one."""
    base, attributes = KINDS[request.param]
    kind = register_mechanism(type("Own", (base,), {"name": f"own {request.param}", **attributes}))
    yield kind.name
    del MECHANISMS[kind.name]


def rows(samples):
    return np.tile(np.linspace(-0.5, 0.5, D), (samples.stop - samples.start, 1))


def client(name, number=0, cache=None, ledger=None):
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=RELEASES, mu=1.0, mechanism=name)
    return Privatizer(policy, D, 2 * RELEASES, ledger or MemoryLedger(), SimulatedKeys(1, str(number)), cache)


def expected(name, number):
    """Every release of a client that is made anew for each: nothing is remembered but its ledger."""
    ledger = MemoryLedger()
    return [
        client(name, number, ledger=ledger).release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)
    ]


def test_a_stream_without_a_cache_is_the_matrices_times_the_noise(name):
    """The definition, in floating point: prefix k is k contributions and row k of B Z."""
    subject, heard = client(name), np.zeros(D)
    normals = np.stack(
        [
            standard_normals(row_key(subject.keys.secret_key, subject.keys.nonce("s", k)), D, "exact")
            for k in range(1, RELEASES + 1)
        ]
    )
    noise = subject.plan.noise_std * make_mechanism(name, RELEASES).decoder() @ normals
    for k in range(1, RELEASES + 1):
        heard += subject.release("s", k - 1, rows).values
        contributions = k * rows(slice(0, 1))[0] * min(1.0, 1.0 / np.linalg.norm(rows(slice(0, 1))))
        assert heard == pytest.approx(contributions + noise[k - 1], abs=4 * k * subject.plan.grid.spacing)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("size", CACHES.values(), ids=CACHES)
def test_releases_are_the_same_with_any_cache_to_the_last_bit(name, size):
    cache = None if size is None else RowCache(size)
    subject = client(name, cache=cache)
    assert [subject.release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)] == expected(name, 0)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("size", CACHES.values(), ids=CACHES)
def test_clients_released_together_make_the_releases_they_make_alone(name, size):
    cache = None if size is None else RowCache(size)
    clients = [client(name, number, cache) for number in range(CLIENTS)]

    def contributions(positions, slices):
        return DenseContributions(np.concatenate([rows(chosen) for chosen in slices]))

    block, everybody = PrivatizerBlock.of(clients), range(CLIENTS)
    made = [
        [counts.tolist() for counts in block.release("s", everybody, [k - 1] * CLIENTS, contributions).counts]
        for k in range(1, RELEASES + 1)
    ]
    assert [list(stream) for stream in zip(*made, strict=True)] == [expected(name, i) for i in range(CLIENTS)]


def test_releases_are_the_same_with_a_cache_when_replies_are_lost(name):
    acks = [0, 0, 2, 2, 2, 5, 6]
    ledger, subject = MemoryLedger(), client(name, cache=RowCache(1 << 20))
    for ack in acks:
        alone = client(name, ledger=ledger).release("s", ack, rows)
        assert subject.release("s", ack, rows).counts.tolist() == alone.counts.tolist()


def test_rounding_in_memory_that_was_not_handed_over_is_seen():
    """The planted bug: a class that says its arrays are nobody else's and keeps them in its state all the same."""
    kind = type("Careless", (Fading,), {"name": "careless", "memory": "last", "owns_output": True})
    register_mechanism(kind)
    try:
        subject = client("careless", cache=RowCache(1 << 20))
        try:
            made = [subject.release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)]
        except ConfigurationError:
            made = []
        assert made != expected("careless", 0)
    finally:
        del MECHANISMS["careless"]


def test_a_mechanism_that_says_it_removes_what_it_added_is_held_to_it():
    wrong = type("Wrong", (Fading,), {"name": "wrong", "memory": "last", "removes_last": True})
    with raises(ConfigurationError, "mismatch", match="remove what the last one added"):
        check_mechanism(wrong(3))
