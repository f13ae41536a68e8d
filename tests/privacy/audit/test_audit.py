"""The audit: no client's measured privacy loss is above its claim, and every planted bug's is.

Every audit here has confidence 95 %, so an honest client would be accused in at most one of 20 seeds; the seeds are
fixed, and the bounds are conservative (the two of mu and the two of epsilon share the 5 %).

What an audit sees of samples in a secret order: no more than is claimed, and more of an order that is no secret.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from murmurfl.clients import Cohort, FullBatchClient, Mu2Client, NoisySGDClient, OnlineClient
from murmurfl.privacy import (
    MECHANISMS,
    SCHEDULES,
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    gdp_epsilon,
    gdp_mu,
)
from murmurfl.privacy.accounting.amplification import amplification_of
from murmurfl.privacy.audit import (
    audit_client,
    audit_one_run,
    audit_secret_order,
    canary_scores,
    epsilon_bound,
    error_bound,
    mu_bound,
    one_run_epsilon,
    one_run_p_value,
    prefix_sums,
)
from murmurfl.privacy.mechanisms import DECODERS, WORKLOADS, CancellingNoise, Increment, OptimalNoise, TreeNoise
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.known_samples import slots_of
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock
from scipy.linalg import cholesky
from scipy.stats import binom

from tests.harness.errors import raises

RELEASES, RUNS = 6, 1200
DIRECTION = np.array([0.6, 0.8])
VARIANTS = {"cancelling": ("schedule", SCHEDULES), "tree": ("decoder", DECODERS), "optimal": ("workload", WORKLOADS)}
CASES = [
    (name, {option: value})
    for name in MECHANISMS
    for option, values in [VARIANTS.get(name, ("", ("",)))]
    for value in values
]
LOST = (False, True, False, True, True, False)


def policy_of(mechanism="cancelling", releases=RELEASES, kind=PrivacyPolicy, **changes):
    """Mu = 1 and a large delta: epsilon is then small enough to be measured with few runs."""
    common = {"clip_norm": 1.0, "batch_size": 1, "max_participations": releases, "mu": 1.0, "delta": 0.05}
    return kind(mechanism=mechanism, **{**common, **changes})


def shift(canary, releases=RELEASES):
    """What a canary in these releases moves: the prefix sums from each on, by 2 S."""
    return 2.0 * DIRECTION * sum(np.arange(1, releases + 1) >= int(k) for k in canary.split())[:, None]


def streams(policy, plant=lambda client: None, keys=SimulatedKeys):
    """Clients whose samples are all -S; a canary, named by the releases it takes part in, is +S."""

    def start(canary, runs):
        clients = []
        for run in runs:
            own = keys(run, f"canary {canary}")
            clients.append(Privatizer(policy, 2, policy.max_participations, MemoryLedger(), own))
            plant(clients[-1])

        def answers(k, acks):
            row = DIRECTION if str(k) in (canary or "").split() else -DIRECTION
            block, rows = PrivatizerBlock.of(clients), range(len(clients))
            made = block.release("s", rows, acks, lambda p, s: DenseContributions(np.tile(row, (len(p), 1))))
            places = {row: place for place, row in enumerate(made.rows)}
            return (block.made(made, places[i], i) if i in places else made.refused[i] for i in rows)

        return answers

    return start


def audit(policy, canaries=("1", "2"), lost=(), runs=RUNS, **options):
    shifts = {canary: shift(canary, policy.max_participations) for canary in canaries}
    return audit_client(policy, streams(policy, **options), shifts, runs=runs, lost=lost)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_no_mechanism_is_measured_above_its_claim(name, options):
    options = {option: value for option, value in options.items() if option}
    rounds = {"num_rounds": RELEASES} if options.get("schedule") == "paper" else {}
    result = audit(policy_of(name, mechanism_options={**options, **rounds}), lost=LOST)
    assert not result.violated
    assert result.claimed_epsilon == gdp_epsilon(result.claimed_mu, 0.05)
    # The bounds are not empty: they come close to the claim, and what they come from is the claim itself.
    assert 0.6 * result.claimed_mu < result.measured_mu <= result.claimed_mu
    assert result.measured_epsilon > 0.3 * result.claimed_epsilon
    assert result.estimated_mu == pytest.approx(result.claimed_mu, abs=0.15)


def also_long(*values):
    """Cases that only `make test-long` tries."""
    return (pytest.param(value, marks=pytest.mark.long) for value in values)


def half_the_noise(privatizer):
    privatizer.plan = replace(privatizer.plan, noise_std=privatizer.plan.noise_std / 2)


class TakesOutItsOwnNoise(CancellingNoise):
    """From the second release on, what is taken out is what was just added, not what the release before added."""

    def increment(self, state, release, normals, scale=1.0):
        row = self._row(release, normals, scale)
        return Increment(row, row if release > 1 else None, (row,))


class TakesOutOlderNoise(CancellingNoise):
    """What is taken out is not what the release before added, but what the one before that did."""

    memory = "state"
    removes_last = False

    def increment(self, state, release, normals, scale=1.0):
        row = self._row(release, normals, scale)
        return Increment(row, state[1] if len(state) == 2 else None, (row, *state[:1]))


class RepeatsANonce(SimulatedKeys):
    """After a resume the counter begins again: release 5 has the noise of release 1."""

    def nonce(self, session, release):
        return super().nonce(session, 1 if release == 5 else release)


class ForgetsThatAReplacedSampleAlsoLeaves(PrivacyPolicy):
    """Charges S where S goes and S comes."""

    @property
    def sensitivity(self):
        return self.clip_norm / self.batch_size


class BareLeaf(TreeNoise):
    """Release 3 is a leaf of its own, and goes without noise."""

    def increment(self, state, release, normals, scale=1.0):
        return super().increment(state, release, normals, 0.0 if release == 3 else scale)


class OrdinaryCholesky(OptimalNoise):
    """C C^T = X in place of C^T C = X, with the sensitivity of the right one."""

    @property
    def encoder(self):
        right = super().encoder
        return cholesky(right.T @ right, lower=True)

    def _sensitivity(self, n, num_participations, min_separation):
        return 1.0


def planted(kind):
    def plant(privatizer):
        privatizer.plan = replace(privatizer.plan, mechanism=kind(privatizer.policy.max_participations))

    return plant


@pytest.mark.parametrize("mechanism", ["blt", *also_long("independent", "cancelling", "tree")])
def test_half_the_noise_is_caught(mechanism):
    caught(audit(policy_of(mechanism), plant=half_the_noise), least_mu=1.4)


@pytest.mark.long
def test_a_cancel_that_takes_out_the_noise_just_added_is_caught():
    assert not audit(policy_of(), canaries=["1"], plant=planted(TakesOutItsOwnNoise)).violated, "later ones show it"
    caught(audit(policy_of(), plant=planted(TakesOutItsOwnNoise)), least_mu=math.inf)


@pytest.mark.more_cases
def test_a_cancel_of_older_noise_is_not_accused():
    assert not audit(policy_of(), plant=planted(TakesOutOlderNoise)).violated


@pytest.mark.parametrize("mechanism", ["cancelling", *also_long("independent", "decay", "sqrt_toeplitz", "tree")])
def test_noise_used_twice_after_a_resume_is_caught(mechanism):
    caught(audit(policy_of(mechanism), canaries=["5"], keys=RepeatsANonce), least_mu=math.inf)


@pytest.mark.more_cases
def test_the_sensitivity_of_a_sample_that_only_leaves_is_caught():
    policy = policy_of(kind=ForgetsThatAReplacedSampleAlsoLeaves)
    assert policy.plan(2).mu == 1.0, "consistent with itself"
    caught(audit(policy), least_mu=1.4)


@pytest.mark.more_cases
@pytest.mark.parametrize("decoder", [DECODERS[0], *also_long(*DECODERS[1:])])
def test_a_leaf_without_noise_is_caught(decoder):
    plant = planted(lambda releases: BareLeaf(releases, decoder=decoder))
    caught(audit(policy_of("tree", mechanism_options={"decoder": decoder}), canaries=["3"], plant=plant), math.inf)


@pytest.mark.long
def test_the_ordinary_cholesky_factor_is_caught():
    policy = policy_of("optimal", releases=16)
    assert OrdinaryCholesky(16).sensitivity() == pytest.approx(policy.make_mechanism().sensitivity(), rel=1e-12)
    caught(audit(policy, canaries=["1"], plant=planted(OrdinaryCholesky), runs=1600), least_mu=1.3)


def caught(result, least_mu):
    assert result.violated
    assert result.measured_mu > result.claimed_mu
    assert result.measured_epsilon > result.claimed_epsilon
    assert result.measured_mu >= least_mu


GRADIENT_ROWS = -np.tile(DIRECTION, (2 * RELEASES, 1))


class Rows:
    """A model whose gradient is the sample, wherever it is asked."""

    shapes = ((2,),)

    def __call__(self, parameters, samples):
        return np.asarray(samples)


def client_streams(kind, policy, half=False, **options):
    """Clients whose canary is the first sample of release 2, asked together."""

    def start(canary, runs):
        rows = GRADIENT_ROWS.copy()
        if canary:
            rows[policy.batch_size] *= -1

        def make(name):
            keys = SimulatedKeys(7, f"{canary} {name}")
            client = kind(Rows(), rows, policy, MemoryLedger(), keys, name=name, **options)
            if half:
                half_the_noise(client.privatizer)
            return client

        cohort = Cohort([str(run) for run in runs], make)

        def answers(k, acks):
            points = [[np.full(2, 0.1 * k)]] * kind.query_points
            releases = cohort.releases(k, "s", dict(zip(cohort.names(), acks, strict=True)), points)
            return (release for _, release in releases)

        return answers

    return start


CLIENTS = {
    "mu2": (Mu2Client, policy_of("blt", batch_size=2), {}),
    "full batches": (FullBatchClient, policy_of("independent", release_rule="paper", batch_selection="full_batch"), {}),
    "noisy sgd": (NoisySGDClient, policy_of("independent", release_rule="paper"), {}),
    "online": (OnlineClient, policy_of("banded", clip_unit="update"), {"learning_rate": 0.1}),
}


@pytest.mark.long
@pytest.mark.parametrize("half", [False, True], ids=["honest", "half the noise"])
@pytest.mark.parametrize("name", CLIENTS)
def test_clients_are_audited_as_they_are_and_half_their_noise_is_caught(name, half):
    kind, policy, options = CLIENTS[name]
    moves = shift("2") / policy.batch_size
    runs = client_streams(kind, policy, half, **options)
    result = audit_client(policy, runs, {"second release": moves}, runs=RUNS, lost=LOST)
    if half:
        caught(result, least_mu=1.4)
    else:
        assert not result.violated
        assert result.measured_mu > 0.6


@pytest.mark.more_cases
def test_samples_that_return_are_audited_with_all_their_releases():
    policy = policy_of("sqrt_toeplitz", sample_participations=2, min_separation=3)
    honest = audit(policy, canaries=["1 4"])
    assert not honest.violated
    assert honest.measured_mu > 0.6
    once = policy_of("sqrt_toeplitz").plan(2).noise_std

    def for_one_participation(privatizer):
        privatizer.plan = replace(privatizer.plan, noise_std=once)

    caught(audit(policy, canaries=["1 4"], plant=for_one_participation), least_mu=1.2)


def test_fewer_releases_are_held_against_the_claim_of_so_many():
    policy = policy_of("cancelling")
    result = audit_client(policy, streams(policy), {"1": shift("1")[:3]}, runs=100)
    assert result.claimed_mu == pytest.approx(math.sqrt(3 / 6))


def test_prefix_sums_are_the_same_whatever_is_lost():
    policy = policy_of("blt")
    whole = prefix_sums(streams(policy)(None, range(3)), 3, RELEASES)
    assert (prefix_sums(streams(policy)(None, range(3)), 3, RELEASES, None, LOST) == whole).all()
    paper = policy_of("blt", release_rule="paper")
    lossy = prefix_sums(streams(paper)(None, range(3)), 3, RELEASES, None, LOST, "paper")
    assert lossy == pytest.approx(whole)


def test_what_cannot_be_audited_is_refused():
    policy = policy_of()
    with raises(ConfigurationError, "conflict", "mechanism", match="trusted"):
        audit_client(policy_of(trust="trusted-server"), streams(policy), {"1": shift("1")})
    with raises(ConfigurationError, "wrong-shape", match="canaries that move"):
        audit_client(policy, streams(policy), {"1": np.zeros((RELEASES, 2))})
    with raises(ConfigurationError, "out-of-range", "runs"):
        audit_client(policy, streams(policy), {"1": shift("1")}, runs=2)
    with raises(ConfigurationError, "wrong-shape", "lost"):
        audit_client(policy, streams(policy), {"1": shift("1")}, runs=20, lost=[True])
    with raises(ConfigurationError, "refused", match="refusal"):
        audit_client(policy_of(releases=7), streams(policy), {"1": shift("1", 7)}, runs=20)


def test_bounds_of_errors_are_those_of_clopper_and_pearson():
    for errors, trials in [(0, 50), (7, 50), (49, 50)]:
        bound = float(error_bound(errors, trials, 0.03))
        assert binom.cdf(errors, trials, bound) == pytest.approx(0.03)
    assert error_bound(50, 50, 0.03) == 1.0
    assert error_bound(np.array([0, 50]), 50, 0.03).tolist() == [float(error_bound(0, 50, 0.03)), 1.0]


@pytest.mark.parametrize("delta", [1e-5, 0.05])
def test_errors_on_a_gdp_curve_give_its_mu_and_epsilon(delta):
    from scipy.special import ndtr

    thresholds = np.linspace(-3, 5, 400)
    false_alarms, misses = ndtr(-thresholds), ndtr(thresholds - 1.3)
    assert mu_bound(false_alarms, misses) == pytest.approx(1.3)
    epsilons = epsilon_bound(false_alarms, misses, delta)
    assert (epsilons <= gdp_epsilon(1.3, delta) * (1 + 1e-9)).all()
    if delta == 0.05:
        assert epsilons.max() == pytest.approx(gdp_epsilon(1.3, delta), rel=1e-3)
    assert mu_bound(0.6, 0.6) == epsilon_bound(0.6, 0.6, delta) == 0.0


CANARIES = 1000


def one_run(noise=1.0, loud=False):
    """One client, three releases of 1,000 samples; those of the first are the canaries, orthogonal to each other."""
    policy = PrivacyPolicy(1.0, CANARIES, 3, gdp_mu(2.0, 1e-6), delta=1e-6, mechanism="sqrt_toeplitz")
    privatizer = Privatizer(policy, CANARIES, 3 * CANARIES, MemoryLedger(), SimulatedKeys(1, "one"))
    privatizer.plan = replace(privatizer.plan, noise_std=privatizer.plan.noise_std * noise)
    present = np.random.Generator(np.random.Philox(key=8)).random(CANARIES) < 0.5
    rows = np.zeros((3 * CANARIES, CANARIES))
    rows[:CANARIES] = np.diag(np.where(present, 1.0, -1.0))
    answers = lambda k, acks: [privatizer.release("s", acks[0], lambda samples: rows[samples])]  # noqa: E731
    sums = prefix_sums(answers, 1, 3)[0]
    scores = canary_scores(policy.make_mechanism(), sums, np.ones(CANARIES, dtype=int))
    return audit_one_run(scores, present, policy.delta), policy.plan(CANARIES).epsilon(policy.delta)


def test_an_audit_of_one_run_catches_a_quarter_noise():
    result, claimed = one_run()
    assert claimed == pytest.approx(2.0)
    assert 0.1 < result.measured_epsilon < claimed
    result, claimed = one_run(noise=0.25)
    assert result.measured_epsilon > claimed


@pytest.mark.more_cases
def test_guesses_of_randomised_response_bound_its_epsilon_from_below():
    """Pure epsilon-DP: 60 audits, each wrong with probability at most 0.05, so 12 of them with 5e-5."""
    generator, epsilon = np.random.Generator(np.random.Philox(key=9)), 1.5
    present = generator.random((60, 500)) < 0.5
    kept = generator.random(present.shape) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(kept == present, 1.0, -1.0)
    bounds = [audit_one_run(s, p, 0.0).measured_epsilon for s, p in zip(scores, present, strict=True)]
    assert sum(bound > epsilon for bound in bounds) < 12
    assert np.median(bounds) > 1.0


def test_the_bound_of_one_run_is_that_of_the_theorem():
    bias = 1 / (1 + math.exp(-0.7))
    at_least = lambda v: binom.sf(v - 1, 40, bias)  # noqa: E731
    gains = [(at_least(33 - i) - at_least(33)) / i for i in range(1, 101)]
    expected = at_least(33) + 2 * 100 * 1e-4 * max(gains)
    assert one_run_p_value(100, 40, 33, 0.7, 1e-4) == pytest.approx(expected)
    assert one_run_epsilon(100, 100, 100, 0.0) == pytest.approx(math.log(1 / (0.05**-0.01 - 1)), rel=1e-6)
    assert one_run_epsilon(100, 40, 33, 1e-4) < one_run_epsilon(100, 40, 33, 0.0)
    assert one_run_epsilon(100, 40, 20, 0.0) == 0.0
    assert one_run_epsilon(100, 40, 40, 0.5) == 0.0, "delta far above 1 / m: nothing can be said"
    with raises(ConfigurationError, "out-of-range", "correct"):
        one_run_p_value(10, 20, 5, 1.0, 0.0)
    with raises(ConfigurationError, "wrong-shape", "scores"):
        audit_one_run(np.zeros(3), np.zeros(2, dtype=bool), 0.0)


SLOTS, BATCH, SECRET_RUNS = 8, 2, 2000
POLICY = PrivacyPolicy(
    clip_norm=1.0,
    batch_size=BATCH,
    max_participations=SLOTS,
    mu=3.0,
    delta=0.2,
    mechanism="independent",
    batch_selection="shuffled",
)


def independent(key, samples):
    """As clients draw it."""
    return slots_of(key, bytes(16), samples, SLOTS)


def known(key, samples):
    """From a seed that anybody knows: the same for every key."""
    return np.random.Generator(np.random.Philox(key=7)).integers(1, SLOTS + 1, size=samples)


def permuted(key, samples):
    """As many samples in every release: the others fill a sample's hole."""
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:8], "little")))
    return generator.permutation(samples) // BATCH + 1


def data(canary, others):
    """Samples at one place; the first one at -S or, with the canary, at +S."""
    places = np.full(SLOTS * BATCH, others)
    places[0] = 1.0 if canary else -1.0
    return places


def arithmetic(order, others=-1.0):
    """What clients with this order would send, without their other parts; with independent noise."""
    noise_std = POLICY.plan(2).noise_std

    def start(canary, runs):
        keys = [SimulatedKeys(run, f"canary {canary}").secret_key for run in runs]
        slots = np.array([order(key, SLOTS * BATCH) for key in keys])
        generator = np.random.Generator(np.random.Philox(key=[runs.start, bool(canary)]))
        noise = noise_std * generator.standard_normal((SLOTS, len(keys), 2))

        def answers(k, acks):
            sums = (slots == k) @ data(canary, others) / BATCH
            return [SimpleNamespace(values=row) for row in np.outer(sums, DIRECTION) + noise[k - 1]]

        return answers

    return start


class KnownOrder(Privatizer):
    def _weights(self, admission):
        return (known(b"", self.num_samples) == admission.release).astype(float)


class Permutation(Privatizer):
    def _weights(self, admission):
        return (permuted(self._keys.secret_key, self.num_samples) == admission.release).astype(float)


def clients(kind, policy=POLICY, others=-1.0):
    """Clients themselves."""

    def start(canary, runs):
        rows = np.outer(data(canary, others), DIRECTION)
        keys = [SimulatedKeys(run, f"canary {canary}") for run in runs]
        made = [kind(policy, 2, len(rows), MemoryLedger(), key) for key in keys]
        return lambda k, acks: [
            client.release("s", ack, lambda samples: rows[samples]) for client, ack in zip(made, acks, strict=True)
        ]

    return start


def audit_of_order(streams, policy=POLICY, runs=SECRET_RUNS):
    found = amplification_of(policy, policy.plan(2))
    epsilon = found.epsilon if found.proved else gdp_epsilon(policy.mu, policy.delta)
    return audit_secret_order(policy, streams, 2.0 * DIRECTION / BATCH, claimed_epsilon=epsilon, runs=runs)


@pytest.mark.parametrize("others", [-1.0, 0.0])
def test_an_independent_order_shows_no_more_than_is_claimed(others):
    result = audit_of_order(arithmetic(independent, others))
    assert not result.violated
    assert result.claimed_epsilon < 0.35 * gdp_epsilon(3.0, 0.2)
    if others == 0.0:  # nothing else hides it: the measure is not empty
        assert result.measured_epsilon > 0.3 * result.claimed_epsilon


def test_an_order_from_a_public_seed_is_caught():
    result = audit_of_order(arithmetic(known))
    assert result.violated
    assert result.measured_epsilon > 1.5 * result.claimed_epsilon
    assert result.statistic == f"release {known(b'', SLOTS * BATCH)[0]} moved"
    assert result.measured_mu <= result.claimed_mu  # which holds whoever knows the order


def test_a_permutation_with_as_many_samples_in_every_release_is_caught():
    result = audit_of_order(arithmetic(permuted))
    assert result.violated
    assert result.measured_epsilon > 1.3 * result.claimed_epsilon
    assert result.statistic == "any release moved"
    assert not audit_of_order(arithmetic(permuted, 0.0)).violated  # it takes others at the opposite to see it


@pytest.mark.long
def test_clients_themselves_show_no_more_and_with_either_bug_more():
    assert not audit_of_order(clients(Privatizer), runs=1000).violated
    assert not audit_of_order(clients(Privatizer, others=0.0), runs=1000).violated
    assert audit_of_order(clients(KnownOrder), runs=1000).violated
    assert audit_of_order(clients(Permutation), runs=1000).violated


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["cancelling", "sqrt_toeplitz"])
def test_in_correlated_noise_an_order_shows_less_than_when_it_is_known(mechanism):
    policy = replace(POLICY, mechanism=mechanism)
    result = audit_of_order(clients(Privatizer, policy, others=0.0), policy, runs=1000)
    assert 0 < result.measured_epsilon < result.claimed_epsilon


def test_what_is_no_secret_order_is_refused():
    with raises(ConfigurationError, "conflict", "batch_selection"):
        audit_secret_order(replace(POLICY, batch_selection="once"), clients(Privatizer), DIRECTION, claimed_epsilon=1.0)
    with raises(ConfigurationError, "out-of-range", "runs"):
        audit_secret_order(POLICY, clients(Privatizer), DIRECTION, claimed_epsilon=1.0, runs=3)
