"""Mechanisms of somebody's own, of every kind of memory: the same releases with a cache, without one, and together."""

import math

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    Mechanism,
    MemoryLedger,
    PrivacyPolicy,
    PrivateMachine,
    RowCache,
    SimulatedKeys,
    make_mechanism,
    register_mechanism,
    row_key,
    standard_normals,
)
from murmurfl.privacy.machine.clipping import DenseContributions
from murmurfl.privacy.machine.machine_block import MachineBlock
from murmurfl.privacy.mechanisms import CancellingNoise, Increment, check_mechanism

D, RELEASES, MACHINES = 5, 7, 3
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


def machine(name, number=0, cache=None, ledger=None):
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=RELEASES, mu=1.0, mechanism=name)
    return PrivateMachine(policy, D, 2 * RELEASES, ledger or MemoryLedger(), SimulatedKeys(1, str(number)), cache)


def expected(name, number):
    """Every release of a machine that is made anew for each: nothing is remembered but its ledger."""
    ledger = MemoryLedger()
    return [
        machine(name, number, ledger=ledger).release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)
    ]


def test_a_stream_without_a_cache_is_the_matrices_times_the_noise(name):
    """The definition, in floating point: prefix k is k contributions and row k of B Z."""
    subject, heard = machine(name), np.zeros(D)
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


@pytest.mark.parametrize("size", CACHES.values(), ids=CACHES)
def test_releases_are_the_same_with_any_cache_to_the_last_bit(name, size):
    cache = None if size is None else RowCache(size)
    subject = machine(name, cache=cache)
    assert [subject.release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)] == expected(name, 0)


@pytest.mark.parametrize("size", CACHES.values(), ids=CACHES)
def test_machines_released_together_make_the_releases_they_make_alone(name, size):
    cache = None if size is None else RowCache(size)
    machines = [machine(name, number, cache) for number in range(MACHINES)]

    def contributions(positions, slices):
        return DenseContributions(np.concatenate([rows(chosen) for chosen in slices]))

    block, everybody = MachineBlock.of(machines), range(MACHINES)
    made = [
        [counts.tolist() for counts in block.release("s", everybody, [k - 1] * MACHINES, contributions).counts]
        for k in range(1, RELEASES + 1)
    ]
    assert [list(stream) for stream in zip(*made, strict=True)] == [expected(name, i) for i in range(MACHINES)]


def test_releases_are_the_same_with_a_cache_when_replies_are_lost(name):
    acks = [0, 0, 2, 2, 2, 5, 6]
    ledger, subject = MemoryLedger(), machine(name, cache=RowCache(1 << 20))
    for ack in acks:
        alone = machine(name, ledger=ledger).release("s", ack, rows)
        assert subject.release("s", ack, rows).counts.tolist() == alone.counts.tolist()


def test_rounding_in_memory_that_was_not_handed_over_is_seen():
    """The planted bug: a class that says its arrays are nobody else's and keeps them in its state all the same."""
    kind = type("Careless", (Fading,), {"name": "careless", "memory": "last", "hands_over": True})
    register_mechanism(kind)
    try:
        subject = machine("careless", cache=RowCache(1 << 20))
        try:
            made = [subject.release("s", k - 1, rows).counts.tolist() for k in range(1, RELEASES + 1)]
        except ConfigurationError:
            made = []
        assert made != expected("careless", 0)
    finally:
        del MECHANISMS["careless"]


def test_a_mechanism_that_says_it_removes_what_it_added_is_held_to_it():
    wrong = type("Wrong", (Fading,), {"name": "wrong", "memory": "last", "removes_last": True})
    with pytest.raises(ConfigurationError, match="remove what the last one added"):
        check_mechanism(wrong(3))
