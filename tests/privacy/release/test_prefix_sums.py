"""The release rule: exact prefixes, no residual noise, and releases as far apart as mu says.

The noise of a stream by itself: the rows of B Z, made again from nonces, gone to the last bit where they cancel.
"""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    RowCache,
    SimulatedKeys,
    StreamRecord,
    SumAssumption,
    SystemKeys,
    make_mechanism,
    row_bytes,
    row_key,
    standard_normals,
)
from murmurfl.privacy.release.prefix_sums import NoiseStream

from tests.harness.clients import FixedNonces, stream_noise
from tests.harness.errors import raises
from tests.privacy.clients import DATA, D, DurableLedger, client, contribution, mechanisms, zero


def dense_prefixes(subject, releases, options, data=DATA):
    """P_1 .. P_releases from the definition: prefix sums of contributions plus dense B Z, each on the grid."""
    policy, plan, keys = subject.policy, subject.plan, SimulatedKeys(1, "m")
    names = {key: value for key, value in options.items() if key != "mechanism"}
    mechanism = make_mechanism(options["mechanism"], policy.max_participations, **names)
    normals = np.concatenate(
        [
            standard_normals(
                row_key(keys.secret_key, keys.nonce("s", k)), mechanism.draws(k) * D, policy.noise_quality
            ).reshape(-1, D)
            for k in range(1, releases + 1)
        ]
    )
    noise = plan.noise_std * mechanism.decoder(releases) @ normals
    rows = data[: 2 * releases].reshape(releases, 2, D)
    norms = np.linalg.norm(rows, axis=2, keepdims=True)
    means = (rows * np.minimum(1, 1 / norms)).mean(axis=1)
    return np.cumsum(means, axis=0) + noise


@mechanisms
@pytest.mark.parametrize("quality", ["exact", "fast"])
def test_releases_add_up_to_the_dense_noisy_prefixes(options, quality):
    subject = client(noise_quality=quality, **options)
    total = np.zeros(D)
    expected = dense_prefixes(subject, 15, options)
    for k in range(1, 16):
        release = subject.release("s", k - 1, contribution)
        assert (release.release, release.ack) == (k, k - 1)
        total += release.values
        # Each of two contributions, and each noise row, is rounded once.
        assert total == pytest.approx(expected[k - 1], abs=4 * k * subject.plan.grid.spacing)


@pytest.mark.few_cases(6)
@mechanisms
@settings(max_examples=15)
@given(lost=st.lists(st.booleans(), min_size=1, max_size=20))
def test_what_was_lost_is_carried_over_to_the_last_bit(options, lost):
    """Whatever is lost, once the client is heard again the sum is P_k: exactly what it is without losses."""
    with_losses, without = client(**options), client(**options)
    heard, whole, ack = np.zeros(D), np.zeros(D), 0
    for k, is_lost in enumerate(lost, start=1):
        release = with_losses.release("s", ack, contribution)
        whole += without.release("s", k - 1, contribution).values
        if not is_lost:
            heard += release.values
            ack = release.release
            assert (heard == whole).all()


def test_lost_reply_leaves_no_residual_noise_and_the_papers_rule_does():
    """Zero data: the sum of what arrived is the noise in it."""
    sums = {}
    for rule in ("acknowledged", "paper"):
        subject = client(release_rule=rule)
        heard, ack = np.zeros(D), 0
        for k in range(1, 21):
            release = subject.release("s", ack, zero)
            if k not in (5, 11):
                heard += release.values
                ack = release.release
        keys = SimulatedKeys(1, "m")
        last = standard_normals(row_key(keys.secret_key, keys.nonce("s", 20)), D, "exact")
        counts = subject.plan.grid.counts(last * subject.plan.noise_std * subject.plan.mechanism.sigmas[19])
        sums[rule] = heard - subject.plan.grid.values(counts)
    assert (sums["acknowledged"] == 0).all()
    sigma = subject.plan.noise_std * subject.plan.mechanism.sigmas[0]
    assert np.linalg.norm(sums["paper"]) > sigma  # four of its noises never go away


def test_a_server_that_never_acknowledges_costs_the_client_bounded_memory():
    ledger = MemoryLedger()
    subject = client(ledger)
    for _ in range(20):
        subject.release("s", 0, contribution)
    with ledger.exclusive() as page:
        assert len(page.stream("s").pending) <= 4


@mechanisms
def test_a_ledger_holds_no_more_nonces_than_the_noise_is_made_again_from(options):
    ledger = MemoryLedger()
    subject = client(ledger, **options)
    for k in range(9):
        subject.release("s", k, contribution)
    mechanism = subject.plan.mechanism
    kept = {"recent": mechanism.remembered, "all": 9}.get(mechanism.memory, 1)
    assert len(ledger.stream("s").nonces) == 16 * kept


def test_the_ledger_of_an_untrusted_servers_client_holds_only_what_was_sent():
    ledger = MemoryLedger()
    subject = client(ledger)
    sent = {}
    for _ in range(3):
        release = subject.release("s", 0, contribution)
        sent[release.release] = release.values
    with ledger.exclusive() as page:
        stream = page.stream("s")
    assert stream.noise_state == ()
    for k, counts in stream.pending.items():
        assert (subject.plan.grid.values(counts) == sent[k]).all()


def test_a_real_client_does_not_show_that_its_contribution_failed():
    """Whether a gradient can be computed may depend on the data; a failure looks like a zero under noise."""
    failing, keys = client(keys=SystemKeys(bytes(32))), SystemKeys(bytes(32))
    assert not keys.simulated
    release = failing.release("s", 0, lambda samples: 1 // 0)
    assert release.release == 1
    assert np.isfinite(release.values).all()
    assert (release.values != 0).any()


def test_a_real_client_never_repeats_a_noise_row_even_from_a_restored_ledger():
    keys = SystemKeys.generate()
    first = client(DurableLedger(), keys).release("s", 0, zero)
    again = client(DurableLedger(), keys).release("s", 0, zero)  # the ledger as it was before the first release
    assert (first.values != again.values).all()


@pytest.mark.long
@pytest.mark.parametrize("planted", [None, "half the noise", "no cancelling", "sensitivity of one sample"])
def test_two_neighbouring_data_sets_are_as_far_apart_as_mu_says(planted):
    """The likelihood ratio of P_1 .. P_K under worst-case neighbours has standard deviation mu, as N(0,1) and N(mu,1).

    2,000 runs: the standard deviation of the estimate is mu / sqrt(4,000); tolerance 5 of them, false alarm 6e-7.
    """
    releases, runs, mu = 6, 2000, 2.0
    direction = np.zeros(D)
    direction[0] = 1.0
    statistics = {}
    for sign in (+1, -1):
        values = []
        for run in range(runs):
            subject = client(keys=SimulatedKeys(run, str(sign)), batch_size=1, max_participations=releases, mu=mu)
            prefix, prefixes = 0.0, []
            for k in range(releases):
                first = sign if k == 0 else 0.0
                release = subject.release("s", k, lambda samples, first=first: first * direction[None, :])
                prefix = (0.0 if planted == "no cancelling" else prefix) + release.values[0]
                prefixes.append(prefix)
            sigma = subject.plan.noise_std * subject.plan.mechanism.sigmas[0]
            centre = sign if planted != "sensitivity of one sample" else max(sign, 0)
            noise = np.array(prefixes) - sign
            noise = noise / 2 if planted == "half the noise" else noise
            values.append(np.sum(noise + centre) * 2.0 / sigma**2)
        statistics[sign] = np.array(values)
    separation = statistics[+1].mean() - statistics[-1].mean()
    spread = (statistics[+1].std() + statistics[-1].std()) / 2
    measured = separation / spread
    matches = abs(measured - mu) < 5 * mu / math.sqrt(2 * runs)
    assert matches == (planted is None), f"measured mu {measured:.3f}, claimed {mu}"


def test_one_bad_sample_moves_a_release_by_no_more_than_is_charged():
    """A sample the gradient fails on must not take its batch with it: that would move the release by S, not 2 S / b."""

    def rows(samples, bad=None):
        if bad is not None and samples.start <= bad < samples.stop:
            raise IndexError("label out of range")
        return np.ones((samples.stop - samples.start, D))

    batch = 50
    shifts = []
    for bad in (None, 3):
        subject = client(keys=FixedNonces(), batch_size=batch, max_participations=1)
        shifts.append(subject.release("s", 0, lambda samples, bad=bad: rows(samples, bad)).values)
    shift = np.linalg.norm(shifts[0] - shifts[1])
    assert 0 < shift <= subject.plan.sensitivity
    assert shift < 1.0 / 10, "far from the whole clip norm"


def test_a_real_client_computes_every_sample_by_itself():
    asked = []

    def rows(samples):
        asked.append((samples.start, samples.stop))
        return DATA[samples]

    client(keys=SystemKeys(bytes(32))).release("s", 0, rows)
    assert asked == [(0, 1), (1, 2)]


def test_a_real_client_holds_no_more_for_a_larger_batch():
    """A few vectors of d values, one row of the batch among them, however many rows there are."""

    def peak(batch, parameters=20_000):
        policy = PrivacyPolicy(clip_norm=1.0, batch_size=batch, max_participations=2, mu=2.0)
        subject = Privatizer(policy, parameters, 2 * batch, DurableLedger(), SystemKeys(bytes(32)), data=row_bytes([0]))
        tracemalloc.start()
        subject.release("s", 0, lambda samples: np.ones((samples.stop - samples.start, parameters)))
        try:
            return tracemalloc.get_traced_memory()[1] / (8 * parameters)
        finally:
            tracemalloc.stop()

    few, many = peak(1), peak(64)
    assert many < few + 1.0
    assert many < 16


def test_whole_numbers_and_floats_are_the_same_policy():
    assert client(mu=2).plan.fingerprint == client(mu=2.0).plan.fingerprint


@pytest.mark.few_cases(6)
@mechanisms
def test_a_stream_interrupted_at_any_release_goes_on_to_the_last_bit(options):
    """Another process with the same ledger: what it remembers is all a client needs."""
    ledger, whole = DurableLedger(), client(max_participations=40, **options)
    for k in range(1, 41):
        resumed = client(ledger=ledger, max_participations=40, **options)
        ours, theirs = resumed.release("s", k - 1, contribution), whole.release("s", k - 1, contribution)
        assert (ours.values == theirs.values).all()


def test_an_audit_would_see_noise_that_is_not_correlated_as_claimed():
    """The planted bug of the test above: a resumed stream that forgets its state adds other noise."""
    ledger, whole = DurableLedger(), client(mechanism="blt")
    for k in range(1, 6):
        whole.release("s", k - 1, contribution)
        resumed = client(ledger=ledger, mechanism="blt")
        with ledger.exclusive() as page:
            if (stream := page.stream("s")) is not None:
                state = tuple(np.zeros_like(values) for values in stream.noise_state)
                page.commit("s", replace(stream, noise_state=state), page.account())
        resumed.release("s", k - 1, contribution)
    ours, theirs = client(ledger=ledger, mechanism="blt").release("s", 5, zero), whole.release("s", 5, zero)
    assert not np.allclose(ours.values, theirs.values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_participations": 2, "min_separation": 5}, "max_participations <= sample_participations"),
        ({"min_separation": 5}, "only with sample_participations > 1"),
        ({"sample_participations": 0}, "sample_participations"),
        ({"clip_unit": "batch"}, "clip_unit"),
    ],
)
def test_patterns_that_cannot_hold_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        client(**changes)


def test_an_update_is_clipped_as_a_whole_and_charged_as_one():
    subject = client(clip_unit="update", batch_size=5, trust="trusted-server")
    release = subject.release("s", 0, lambda samples: 7.0 * np.ones((1, D)))
    assert np.linalg.norm(release.values) == pytest.approx(1.0, abs=1e-5)
    assert subject.policy.sensitivity == 2.0
    assert client(clip_unit="contractive", batch_size=5).policy.sensitivity == pytest.approx(0.4, rel=1e-5)
    assert client(clip_unit="contractive", batch_size=5).policy.sensitivity > 0.4
    with raises(ConfigurationError, "wrong-shape", "contribution"):
        client(clip_unit="update").release("s", 0, contribution)


def test_an_update_that_cannot_be_computed_on_a_real_client_counts_as_zero():
    def failing(samples):
        raise ValueError("the third sample is 7")

    subject = client(clip_unit="update", keys=SystemKeys.generate(), trust="trusted-server")
    assert (subject.release("s", 0, failing).values == 0).all()


K = 12
KEYS = SimulatedKeys(1, "m")


def noise_of(subject, rows=None):
    return NoiseStream(subject.plan, D, subject.policy.noise_quality, rows)


def increments(noise, releases=K):
    """What each release of one session carries beside its contribution, and the last record."""
    stream, carried = StreamRecord("f"), []
    for k in range(1, releases + 1):
        counts = np.zeros(D, dtype=np.int64)
        nonces, state = noise.add_to(counts, stream, KEYS.secret_key, KEYS.nonce("s", k))
        stream = replace(stream, release=k, nonces=nonces, noise_state=state)
        carried.append(counts)
    return np.array(carried), stream


@mechanisms
def test_summed_it_is_the_mechanisms_matrix_times_the_normals(options):
    subject = client(**options)
    mechanism, plan = subject.plan.mechanism, subject.plan
    normals = np.concatenate(
        [
            standard_normals(row_key(KEYS.secret_key, KEYS.nonce("s", k)), mechanism.draws(k) * D, "exact").reshape(
                -1, D
            )
            for k in range(1, K + 1)
        ]
    )
    dense = plan.noise_std * mechanism.decoder(K) @ normals
    carried, _ = increments(noise_of(subject))
    summed = plan.grid.values(carried.cumsum(axis=0))
    assert summed == pytest.approx(dense, abs=2 * K * plan.grid.spacing)
    assert np.abs(summed).max() > 1e3 * K * plan.grid.spacing, "noise, and not its rounding, was compared"


@mechanisms
def test_it_is_the_same_whatever_is_kept(options):
    subject = client(**options)
    alone, record = increments(noise_of(subject))
    for cache in (RowCache(0), RowCache(3 * 8 * D), RowCache(1 << 20)):
        kept, same = increments(noise_of(subject, cache))
        assert (kept == alone).all()
        assert same.nonces == record.nonces


@pytest.mark.parametrize("schedule", ["uniform", "harmonic"])
def test_what_cancels_cancels_to_the_last_bit(schedule):
    """Of cancelling noise a sum of releases carries the last row and nothing of the others."""
    subject = client(schedule=schedule)
    carried, record = increments(noise_of(subject))
    last = noise_of(subject)
    row = standard_normals(row_key(KEYS.secret_key, record.nonces), D, "exact")
    expected = np.rint(row * last.plan.grid.factor(last.plan.noise_std) * subject.plan.mechanism.decoder(K)[-1, -1])
    assert np.abs(carried.sum(axis=0) - expected).max() <= 1, "one rounding"


@pytest.mark.parametrize("changes", [{"mechanism": "none"}, {"trust": "trusted-server"}])
def test_a_client_without_noise_adds_none_and_remembers_its_nonce(changes):
    noise = noise_of(client(**changes))
    counts, stream = np.arange(D), StreamRecord("f")
    assert noise.add_to(counts, stream, KEYS.secret_key, b"n" * 16) == (b"n" * 16, ())
    assert (counts == np.arange(D)).all()
    assert not noise.draws_a_row(1)


def test_normals_made_beforehand_are_those_it_would_draw():
    noise, nonce = noise_of(client(mechanism="blt")), KEYS.nonce("s", 1)
    assert noise.draws_a_row(1)
    one, other = np.zeros(D, dtype=np.int64), np.zeros(D, dtype=np.int64)
    noise.add_to(one, StreamRecord("f"), KEYS.secret_key, nonce)
    made = standard_normals(row_key(KEYS.secret_key, nonce), D, "exact")
    noise.add_to(other, StreamRecord("f"), KEYS.secret_key, nonce, made)
    assert (one == other).all()
    assert one.any()


def test_sessions_and_clients_share_no_noise():
    subject = client(mechanism="independent")
    ours, _ = increments(noise_of(subject))
    counts = np.zeros(D, dtype=np.int64)
    noise_of(subject).add_to(counts, StreamRecord("f"), SimulatedKeys(1, "other").secret_key, KEYS.nonce("s", 1))
    assert not (counts == ours).any()


SUMMED = {"trust": "secure-aggregation", "sums": SumAssumption(2, 2), "budget_local_mu": 9.0}


@pytest.mark.parametrize("options", [{"mechanism": "cancelling"}, {"mechanism": "decay"}, {"mechanism": "independent"}])
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=25)
def test_a_release_takes_out_the_noise_of_those_whose_sums_were_skipped(options, courses):
    """Of each release: does it arrive, and is its sum used? What was used has the noise of one prefix, to the bit."""
    subject, silent = (client(**SUMMED, **options) for _ in range(2))
    plan, keys = subject.plan, SimulatedKeys(1, "m")
    ack, skipped, used, contributions = 0, False, np.zeros(D, np.int64), {0: np.zeros(D, np.int64)}
    last, built_on, whole = 0, 0, True  # whose sum was used; what the acknowledged was built on; is no noise lost
    for k, (arrives, right) in enumerate(courses, start=1):
        release = subject.release("s", ack, contribution, skipped=skipped)
        noise = silent.release("s", ack, zero, skipped=skipped).counts
        made = plan.grid.counts(subject.policy.bound.rows(DATA[2 * k - 2 : 2 * k]), scale=0.5).sum(axis=0)
        contributions[k] = contributions[k - 1] + made
        assert np.array_equal(release.counts - noise, contributions[k] - contributions[ack]), "no sample is in two"
        if ack == k - 1:
            recovers = ack - built_on <= plan.mechanism.recovers
            assert release.recovered == (skipped and recovers)
            whole &= recovers or not skipped
        if arrives:
            if right:
                used, last = used + noise, k
            ack, built_on, skipped = k, ack, not right
    if whole:
        nonces = [keys.nonce("s", k) for k in range(1, last + 1)]
        assert np.array_equal(used, stream_noise(plan, D, keys.secret_key, nonces))


def test_a_client_whose_carried_noise_is_not_known_does_not_mend():
    """Two releases are under way, the first is acknowledged: what the second carries beyond it was not kept apart."""
    subject = client(**SUMMED)
    for ack in (0, 0):
        subject.release("s", ack, contribution)
    assert not subject.release("s", 1, contribution).recovered
    assert not subject.release("s", 1, contribution).recovered
    assert not subject.release("s", 4, contribution, skipped=True).recovered
    assert subject.release("s", 5, contribution, skipped=True).recovered


@pytest.mark.parametrize(("decay", "most"), [(0.5, 1), (0.71, 2), (0.9, 6)])
def test_a_client_mends_as_many_contributions_as_it_may_and_not_one_more(decay, most):
    for carried in (most, most + 1):
        subject = client(**SUMMED, mechanism="decay", decay=decay)
        for ack in (0, *[1] * carried):
            subject.release("s", ack, contribution)
        assert subject.release("s", 1 + carried, contribution, skipped=True).recovered == (carried == most)


def test_a_client_that_is_seen_by_itself_mends_nothing():
    subject = client()
    subject.release("s", 0, contribution)
    assert not subject.release("s", 1, contribution, skipped=True).recovered
    assert subject.release_rule.recovers == 0
