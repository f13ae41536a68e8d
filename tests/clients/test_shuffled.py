"""The client's half of shuffled gradients: the paper's steps, what it refuses, and its measured privacy."""

import math

import numpy as np
import pytest
from murmurfl.clients import Cohort, PrivateClient, ShuffledClient
from murmurfl.clients.shuffled_client import check_amplified
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    RefusedError,
    ShuffledPolicy,
    SimulatedKeys,
    SQLiteLedger,
    SystemKeys,
    protocol,
    read_ledger,
    row_key,
)
from murmurfl.privacy.audit import audit_client
from murmurfl.privacy.release.shuffled_privatizer import step_noise

from tests.harness.clients import DurableLedger, Labelled, point_request
from tests.harness.errors import raises
from tests.harness.models import Ridge, Undeclared

D, N = 4, 8
rng = np.random.Generator(np.random.Philox(key=71))


def samples(count=N, seed=1):
    generator = np.random.Generator(np.random.Philox(key=seed))
    return Labelled(generator.normal(size=(count, D)), generator.normal(size=count))


def client(model=None, own=None, public=None, keys=None, learning_rate=0.01, order="RR", **changes):
    policy = {"clip_norm": 1e3, "batch_size": N, "max_participations": 3, "mu": 1.0, "delta": 1e-5}
    return ShuffledClient(
        Ridge(D, 5.0) if model is None else model,
        samples() if own is None else own,
        ShuffledPolicy(**{**policy, **changes}),
        DurableLedger(),
        SimulatedKeys(1, "7") if keys is None else keys,
        name="7",
        learning_rate=learning_rate,
        public=public,
        order=order,
        order_seed=5,
    )


@pytest.mark.parametrize("order", ["IG", "SO", "RR"])
def test_without_noise_an_epoch_is_plain_shuffled_gradient_descent(order):
    """The paper's algorithm 2: each sample once an epoch, in the epoch's order, step for step."""
    data, eta = samples(), 0.01
    subject = client(order=order, learning_rate=eta, trust="trusted-server")
    x, orders = rng.normal(size=D), []
    for release in (1, 2, 3):
        arrays, _, metrics = subject.fit(*point_request(x, release))
        orders.append(order_of(subject, release))
        z = x.copy()
        for j in orders[-1]:
            z = z - eta * 2 * (z @ data.features[j] - data.labels[j]) * data.features[j]
        assert x - eta * arrays[0] == pytest.approx(z, abs=1e-6)
        assert metrics[protocol.RELEASE] == release
        x = z
    assert (orders[0] == list(range(N))) == (order == "IG")
    assert (orders[0] == orders[1] == orders[2]) == (order != "RR")
    assert all(sorted(permutation) == list(range(N)) for permutation in orders)


def order_of(subject, release):
    """The order an epoch really takes, from the samples the model is asked for."""
    seen = []
    features = subject.samples.features.tolist()

    class Recorder:
        shapes = subject.gradients.shapes

        def __call__(self, parameters, chosen):
            seen.append(features.index(chosen[0][0].tolist()))
            return np.zeros((1, D))

    other = client(model=Recorder(), order=subject.order, trust="trusted-server")
    for earlier in range(1, release + 1):
        seen.clear()
        other.fit(*point_request(np.zeros(D), earlier))
    return seen


def test_an_interleaved_epoch_takes_private_samples_first():
    public, eta = samples(20, seed=2), 0.01
    subject = client(public=public, learning_rate=eta, order="IG", private_steps=3, public_steps=5)
    arrays, _, _ = subject.fit(*point_request(np.ones(D)))
    keys, plan = SimulatedKeys(1, "7"), subject.privatizer.plan
    key = row_key(keys.secret_key, keys.nonce("s", 1))
    noise = list(step_noise(key, 8, D, plan.noise_std, "exact"))
    z, own = np.ones(D), samples()
    for i in range(8):
        source, j = (own, i) if i < 3 else (public, i - 3)
        z = z - eta * (2 * (z @ source.features[j] - source.labels[j]) * source.features[j] + noise[i])
    assert np.ones(D) - eta * arrays[0] == pytest.approx(z, abs=1e-4 * eta * plan.noise_std)
    statement = subject.statement("s")
    assert (statement["private-steps"], statement["public-steps"]) == (3, 5)
    assert (statement["releases"], statement["samples-used"]) == (1, N)


def test_unproved_amplification_is_refused_for_plain_composition():
    public = samples(20, seed=2)
    mixed = {"public": public, "private_steps": 3, "public_steps": 5}
    with raises(ConfigurationError, "out-of-range", "learning_rate", match="1 / L"):
        client(learning_rate=0.021, **mixed)  # L* = 2 R^2 = 50
    with raises(ConfigurationError, "unsupported", "gradients"):
        client(model=Undeclared(D), **mixed)

    class Softmax:
        shapes, smoothness, gradient_bound, clips_contractively = ((D,),), 1.0, 50.0, False

        def __call__(self, parameters, chosen):
            return np.zeros((1, D))

    with raises(ConfigurationError, "out-of-range", "clip_norm"):
        check_amplified(Softmax(), 0.1, 1.0)
    assert check_amplified(Softmax(), 0.1, 50.0) == 1.0
    amplified, composed = client(**mixed), client(learning_rate=0.5, accounting="composed", **mixed)
    ratio = composed.privatizer.plan.noise_std / amplified.privatizer.plan.noise_std
    assert ratio == pytest.approx(math.sqrt(6))
    assert composed.privatizer.plan.mu == pytest.approx(amplified.privatizer.plan.mu)
    assert composed.statement("s")["accounting"] == "composed"
    assert client(learning_rate=0.5).privatizer.plan.mu == pytest.approx(1.0), "DP-ShuffleG needs no condition"


def test_what_cannot_be_is_refused():
    with raises(ConfigurationError, "mismatch", "public"):
        client(public_steps=5)
    with raises(ConfigurationError, "mismatch", "batch_size"):
        client(batch_size=N - 1)
    with raises(ConfigurationError, "unknown-name", "order"):
        client(order="random")
    with raises(ConfigurationError, "out-of-range", "learning_rate"):
        client(learning_rate=math.nan)
    with raises(ConfigurationError, "unsupported", match="release_epoch"):
        client().privatizer.release("s", 0, lambda chosen: np.zeros((1, D)))
    subject = client(public=samples(20, seed=2), private_steps=3, public_steps=5)
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="too far"):
        subject.fit(*point_request(np.full(D, 1e15)))
    assert subject.statement("s")["releases"] == 0
    subject.fit(*point_request(np.full(D, 1e3)))


def test_a_gradient_that_fails_on_a_real_client_counts_as_zero_and_shows_nothing():
    class Broken:
        shapes = ((D,),)

        def __call__(self, parameters, chosen):
            raise ValueError("bad sample")

    subject = client(model=Broken(), keys=SystemKeys.generate(), mu=2.0, clip_norm=1e-3)
    arrays, _, _ = subject.fit(*point_request(np.ones(D)))
    assert np.abs(arrays[0]).max() < 1.0


def test_a_real_clients_ledger_says_how_private_and_public_steps_were_mixed(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "ledger", budget_mu=1.5, delta=1e-5)
    policy = {"clip_norm": 10.0, "batch_size": N, "max_participations": 2, "budget_mu": 1.5, "delta": 1e-5}
    model, public = Ridge(D, 5.0), samples(20, seed=2)
    mixed = ShuffledPolicy(**policy, mu=1.0, private_steps=3, public_steps=5)
    pure = ShuffledPolicy(**policy, mu=1.0)
    for session, terms in (("s", mixed), ("t", pure)):
        keys = ledger.keys()
        subject = ShuffledClient(model, samples(), terms, ledger, keys, name="7", learning_rate=0.01, public=public)
        for release in (1, 2):
            subject.fit(*point_request(np.ones(D), release, session))
    sessions = {entry.session: entry for entry in read_ledger(tmp_path / "ledger").sessions}
    steps = {name: (entry.terms["private_steps"], entry.terms["public_steps"]) for name, entry in sessions.items()}
    assert steps == {"s": (3, 5), "t": (N, 0)}
    assert all((entry.loss.mu, entry.releases) == (pytest.approx(1.0), 2) for entry in sessions.values())
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        subject.fit(*point_request(np.ones(D), session="u"))


class Overtaken:
    """Gradients of a model; something else happens before the first of them."""

    def __init__(self, model, then):
        self.model, self.then, self.calls = model, then, 0
        self.shapes, self.smoothness = model.shapes, model.smoothness

    def __call__(self, parameters, chosen):
        self.calls += 1
        then, self.then = self.then, None
        if then is not None:
            then()
        return self.model(parameters, chosen)


def real_client(ledger, model):
    policy = ShuffledPolicy(
        clip_norm=10.0, batch_size=N, max_participations=3, budget_mu=1.5, delta=1e-5, mu=1.0, public_steps=0
    )
    return ShuffledClient(model, samples(), policy, ledger, ledger.keys(), name="7", learning_rate=0.01)


def test_an_overtaken_real_client_discards_its_epoch(tmp_path):
    """The ledger is free while an epoch is computed, so nobody waits for it; no release is made twice."""
    ledger = SQLiteLedger.create(tmp_path / "ledger", budget_mu=1.5, delta=1e-5)
    model, numbers = Ridge(D, 5.0), []
    fast = real_client(ledger, model)
    slow_model = Overtaken(model, lambda: numbers.append(fast.fit(*point_request(np.ones(D)))[2][protocol.RELEASE]))
    slow = real_client(SQLiteLedger(tmp_path / "ledger"), slow_model)
    numbers.append(slow.fit(*point_request(np.ones(D)))[2][protocol.RELEASE])
    assert numbers == [1, 2]
    assert slow_model.calls == 2 * N, "the overtaken epoch, and another with noise of its own"
    (session,) = read_ledger(tmp_path / "ledger").sessions
    assert session.releases == 2


def test_a_real_client_that_is_overtaken_to_its_cap_releases_nothing(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "ledger", budget_mu=1.5, delta=1e-5)
    model = Ridge(D, 5.0)
    fast = real_client(ledger, model)

    def all_of_them():
        for release in (1, 2, 3):
            fast.fit(*point_request(np.ones(D), release))

    slow = real_client(SQLiteLedger(tmp_path / "ledger"), Overtaken(model, all_of_them))
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        slow.fit(*point_request(np.ones(D)))
    (session,) = read_ledger(tmp_path / "ledger").sessions
    assert session.releases == 3


PUBLIC = 15
DIRECTION = np.array([0.6, 0.8])


class Linear:
    """A linear loss: the gradient is the sample wherever it is asked. Steps keep all distances, the worst case."""

    shapes, smoothness, gradient_bound, clips_contractively = ((2,),), 1e-6, 1.0, True

    def __call__(self, parameters, chosen):
        return np.asarray(chosen, dtype=np.float64)


def audited(plant=lambda client: None, runs=1200):
    """Two epochs of one private step, with the canary, and 15 public ones: the worst position a sample can have."""
    policy = ShuffledPolicy(
        clip_norm=1.0, batch_size=1, max_participations=2, mu=1.0, delta=0.05, private_steps=1, public_steps=PUBLIC
    )

    def start(canary, numbers):
        rows = DIRECTION[None] * (1.0 if canary else -1.0)

        def make(name):
            keys = SimulatedKeys(3, f"{canary} {name}")
            public = np.zeros((PUBLIC, 2))
            parts = (Linear(), rows, policy, MemoryLedger(), keys)
            client = ShuffledClient(*parts, name=name, learning_rate=0.1, public=public)
            plant(client)
            return client

        cohort = Cohort([str(run) for run in numbers], make)

        def answers(k, acks):
            releases = cohort.releases(k, "s", dict(zip(cohort.names(), acks, strict=True)), [[np.zeros(2)]])
            return (release for _, release in releases)

        return answers

    shifts = {"the sample": 2.0 * DIRECTION * np.arange(1, 3)[:, None]}
    return audit_client(policy, start, shifts, runs=runs)


@pytest.mark.long
def test_interleaved_is_measured_close_below_its_claim():
    result = audited()
    assert not result.violated
    assert result.claimed_mu == pytest.approx(1.0)
    assert 0.5 < result.measured_mu <= result.claimed_mu
    assert result.measured_epsilon <= result.claimed_epsilon
    assert result.estimated_mu == pytest.approx(1.0, abs=0.12)


def quiet_public_steps(client):
    """The planted bug: noise on private steps alone."""
    privatizer = client.privatizer
    honest = privatizer.release_epoch

    def release_epoch(session, ack, epoch):
        def mostly_quiet(release, noise):
            rows = list(noise)
            return epoch(release, iter(rows[:1] + [np.zeros_like(row) for row in rows[1:]]))

        return honest(session, ack, mostly_quiet)

    privatizer.release_epoch = release_epoch


@pytest.mark.long
def test_noise_left_off_the_public_steps_is_caught():
    result = audited(quiet_public_steps)
    assert result.violated
    assert result.measured_mu > 2.0 * result.claimed_mu
    assert result.estimated_mu == pytest.approx(4.0, abs=0.4)


def test_a_shuffled_client_is_a_private_client_that_is_asked_alone():
    assert issubclass(ShuffledClient, PrivateClient)
    assert ShuffledClient.together([], 1, "s", []) is None
