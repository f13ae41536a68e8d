"""The release rule: exact prefixes, no residual noise, nothing spent twice, nothing released beyond the budget."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    PrivacyPolicy,
    PrivateMachine,
    RefusedError,
    SimulatedKeys,
    SystemKeys,
    make_mechanism,
    protocol,
    row_bytes,
    row_key,
    standard_normals,
)
from murmurfl.privacy.ledger import StreamRecord

D = 6
DATA = np.random.Generator(np.random.Philox(key=3)).normal(size=(200, D))
MECHANISMS = [
    {"mechanism": "cancelling", "schedule": "uniform"},
    {"mechanism": "cancelling", "schedule": "harmonic"},
    {"mechanism": "cancelling", "schedule": "paper"},
    {"mechanism": "independent"},
    {"mechanism": "sqrt_toeplitz"},
    {"mechanism": "banded", "bands": 4},
    {"mechanism": "blt"},
    {"mechanism": "tree"},
    {"mechanism": "tree", "decoder": "dyadic"},
    {"mechanism": "optimal"},
]
MECHANISM_OPTIONS = ("bands", "buffers", "decoder", "workload")
mechanisms = pytest.mark.parametrize("options", MECHANISMS, ids=lambda options: "-".join(map(str, options.values())))


class DurableLedger(MemoryLedger):
    """Stands in for a ledger on disk: the tests keep it as long as it must last."""

    durable = True


def machine(ledger=None, keys=None, num_samples=200, **changes):
    changes["mechanism_options"] = {k: changes.pop(k) for k in list(changes) if k in MECHANISM_OPTIONS}
    policy = PrivacyPolicy(**{"clip_norm": 1.0, "batch_size": 2, "max_participations": 20, "mu": 2.0, **changes})
    keys = SimulatedKeys(1, "m") if keys is None else keys
    ledger = DurableLedger() if ledger is None else ledger
    return PrivateMachine(policy, D, num_samples, ledger, keys, data=row_bytes(DATA))


def contribution(samples):
    return DATA[samples]


def zero(samples):
    return np.zeros((samples.stop - samples.start, D))


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
    subject = machine(noise_quality=quality, **options)
    total = np.zeros(D)
    expected = dense_prefixes(subject, 15, options)
    for k in range(1, 16):
        release = subject.release("s", k - 1, contribution)
        assert (release.release, release.ack) == (k, k - 1)
        total += release.values
        # Each of two contributions, and each noise row, is rounded once.
        assert total == pytest.approx(expected[k - 1], abs=4 * k * subject.plan.grid.spacing)


@mechanisms
@settings(max_examples=60, deadline=None)
@given(lost=st.lists(st.booleans(), min_size=1, max_size=20))
def test_what_was_lost_is_carried_over_to_the_last_bit(options, lost):
    """Whatever is lost, once the machine is heard again the sum is P_k: exactly what it is without losses."""
    with_losses, without = machine(**options), machine(**options)
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
        subject = machine(release_rule=rule)
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


def test_every_sample_is_used_once_and_in_order():
    seen = []
    subject = machine()

    def record(samples):
        seen.extend(range(samples.start, samples.stop))
        return DATA[samples]

    for k in range(20):
        subject.release("s", k, record)
    assert seen == list(range(40))


def test_the_cap_the_samples_and_the_budget_end_a_machine():
    subject = machine()
    for k in range(20):
        subject.release("s", k, contribution)
    refused(protocol.CAP_REACHED, subject, "s", 20)
    refused(protocol.BUDGET_EXHAUSTED, subject, "another", 0)

    ledger = MemoryLedger()
    subject = machine(ledger, num_samples=40, budget_mu=2.0 * math.sqrt(3))
    for session in ("a", "b"):
        for k in range(10):
            subject.release(session, k, contribution)
    refused(protocol.SAMPLES_USED_UP, subject, "a", 10)
    refused(protocol.SAMPLES_USED_UP, subject, "c", 0)
    with ledger.exclusive() as page:
        assert page.account().samples_used == 40
        assert set(page.account().reserved) == {"a", "b"}, "a refusal reserves nothing"


def refused(code, subject, session, ack):
    before = subject.statement(session)
    with pytest.raises(RefusedError) as refusal:
        subject.release(session, ack, contribution)
    assert refusal.value.code == code
    assert subject.statement(session) == before


def test_mus_of_sessions_add_in_squares():
    subject = machine(budget_mu=2.0 * math.sqrt(5))
    for number in range(5):
        subject.release(f"session{number}", 0, contribution)
    refused(protocol.BUDGET_EXHAUSTED, subject, "one more", 0)


@pytest.mark.parametrize("rule", ["acknowledged", "paper"])
def test_acknowledgements_only_move_forward_to_a_release_that_exists(rule):
    """Under the papers' rule as well, where nothing is taken back: a server that goes backwards is none of ours."""
    subject = machine(release_rule=rule)
    for k in range(3):
        subject.release("s", k, contribution)
    for ack in (0, 1, 4, -1):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    assert subject.release("s", 3, contribution).ack == 3
    for ack in (0, 1, 2, 5):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    with pytest.raises(RefusedError, match="backwards"):
        subject.acknowledge("s", 2)
    refused(protocol.BAD_ACKNOWLEDGEMENT, machine(release_rule=rule), "s", 1)
    assert subject.release("s", 4, contribution).ack == 4, "nothing of that was taken note of"


@pytest.mark.parametrize("noting", [False, True], ids=["release", "release_noting"])
def test_samples_are_fresh_over_all_sessions_however_they_are_mixed(noting):
    """Each sample once, whichever session took the others and whether it notes something: the ledger counts for all."""
    ledger, seen, acks = DurableLedger(), [], {"a": 0, "b": 0, "c": 0}
    for session in "abbacabcc":
        subject = machine(ledger, budget_mu=10.0)  # made again each time: nothing is remembered but the ledger

        def record(samples):
            seen.append((samples.start, samples.stop))
            return DATA[samples]

        note = (np.array([float(acks[session])]),)
        if noting:
            release = subject.release_noting(session, acks[session], lambda *_, record=record: record, note)
            assert subject.noted(session)[1][0] == note[0]
        else:
            release = subject.release(session, acks[session], record)
        acks[session] = release.release
        with ledger.exclusive() as page:
            assert page.account().samples_used == 2 * len(seen)
    assert seen == [(2 * k, 2 * k + 2) for k in range(9)]
    assert acks == {"a": 3, "b": 3, "c": 3}


def test_an_unacknowledged_release_can_be_acknowledged_later():
    """Two replies under way: the server names the first after it has asked for the second."""
    subject, whole = machine(), machine()
    first = subject.release("s", 0, contribution)
    subject.release("s", 0, contribution)
    third = subject.release("s", first.release, contribution)
    expected = sum(whole.release("s", k, contribution).values for k in range(3))
    assert (first.values + third.values == expected).all()


def test_a_release_that_was_given_up_cannot_be_acknowledged_any_more():
    """What it was is forgotten: a later release could not be told apart from it."""
    subject, whole, heard = machine(), machine(), {}
    for k in range(1, 7):
        heard[k] = subject.release("s", 0, contribution).values
    for ack in (1, 2):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    expected = sum(whole.release("s", k, contribution).values for k in range(7))
    assert (heard[3] + subject.release("s", 3, contribution).values == expected).all(), "the last four still can be"


def test_a_server_that_never_acknowledges_costs_the_machine_bounded_memory():
    ledger = MemoryLedger()
    subject = machine(ledger)
    for _ in range(20):
        subject.release("s", 0, contribution)
    with ledger.exclusive() as page:
        assert len(page.stream("s").pending) <= 4


def test_the_ledger_of_an_untrusted_servers_machine_holds_only_what_was_sent():
    ledger = MemoryLedger()
    subject = machine(ledger)
    sent = {}
    for _ in range(3):
        release = subject.release("s", 0, contribution)
        sent[release.release] = release.values
    with ledger.exclusive() as page:
        stream = page.stream("s")
    assert stream.noise_state == ()
    for k, counts in stream.pending.items():
        assert (subject.plan.grid.values(counts) == sent[k]).all()


def test_nothing_is_recorded_or_released_when_the_contribution_fails_in_simulation():
    subject = machine()
    before = subject.statement("s")
    with pytest.raises(ZeroDivisionError):
        subject.release("s", 0, lambda samples: 1 // 0)
    assert subject.statement("s") == before


def test_a_real_machine_does_not_show_that_its_contribution_failed():
    """Whether a gradient can be computed may depend on the data; a failure looks like a zero under noise."""
    failing, keys = machine(keys=SystemKeys(bytes(32))), SystemKeys(bytes(32))
    assert not keys.simulated
    release = failing.release("s", 0, lambda samples: 1 // 0)
    assert release.release == 1
    assert np.isfinite(release.values).all()
    assert (release.values != 0).any()


def test_nothing_is_returned_before_it_is_committed():
    class BrokenLedger(MemoryLedger):
        def exclusive(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        machine(BrokenLedger()).release("s", 0, contribution)


def test_a_session_belongs_to_the_policy_it_was_opened_with():
    ledger = MemoryLedger()
    machine(ledger, budget_mu=10.0).release("s", 0, contribution)
    refused(protocol.POLICY_CHANGED, machine(ledger, clip_norm=0.5, budget_mu=10.0), "s", 1)


@pytest.mark.parametrize("changes", [{"max_participations": 2}, {"clip_norm": 0.5}, {"mu": 1.0}, {"mechanism": "blt"}])
def test_of_a_session_of_another_policy_a_machine_states_what_it_reserved(changes):
    """A cap lowered later must not make it an error, nor another noise level a figure that is not true."""
    ledger = DurableLedger()
    opened = machine(ledger, budget_mu=10.0)
    for k in range(3):
        opened.release("s", k, contribution)
    later = machine(ledger, budget_mu=10.0, **changes)
    statement = later.statement("s")
    assert statement.releases == 3
    assert statement.mu_spent == statement.mu_guaranteed == opened.plan.mu
    assert later.statement("new").mu_guaranteed == later.plan.mu


def test_a_real_machine_never_repeats_a_noise_row_even_from_a_restored_ledger():
    keys = SystemKeys.generate()
    first = machine(DurableLedger(), keys).release("s", 0, zero)
    again = machine(DurableLedger(), keys).release("s", 0, zero)  # the ledger as it was before the first release
    assert (first.values != again.values).all()


def test_real_machines_accept_only_exact_noise_and_no_machine_more_releases_than_samples():
    with pytest.raises(ConfigurationError, match="exact"):
        machine(keys=SystemKeys.generate(), noise_quality="fast")
    with pytest.raises(ConfigurationError, match="each is used once"):
        machine(num_samples=39)
    with pytest.raises(ConfigurationError, match="shape"):
        machine().release("s", 0, lambda samples: np.zeros((2, D + 1)))


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
            subject = machine(keys=SimulatedKeys(run, str(sign)), batch_size=1, max_participations=releases, mu=mu)
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
        subject = machine(keys=FixedNonces(), batch_size=batch, max_participations=1)
        shifts.append(subject.release("s", 0, lambda samples, bad=bad: rows(samples, bad)).values)
    shift = np.linalg.norm(shifts[0] - shifts[1])
    assert 0 < shift <= subject.plan.sensitivity
    assert shift < 1.0 / 10, "far from the whole clip norm"


class FixedNonces(SystemKeys):
    """Real keys with a nonce that repeats, for tests that compare two runs."""

    def __init__(self):
        super().__init__(bytes(32))

    def nonce(self, session, release):
        return release.to_bytes(16, "little")


def test_a_real_machine_computes_every_sample_by_itself():
    asked = []

    def rows(samples):
        asked.append((samples.start, samples.stop))
        return DATA[samples]

    machine(keys=SystemKeys(bytes(32))).release("s", 0, rows)
    assert asked == [(0, 1), (1, 2)]


def test_a_real_machine_holds_no_more_for_a_larger_batch():
    """A few vectors of d values, one row of the batch among them, however many rows there are."""

    def peak(batch, parameters=20_000):
        policy = PrivacyPolicy(clip_norm=1.0, batch_size=batch, max_participations=2, mu=2.0)
        subject = PrivateMachine(
            policy, parameters, 2 * batch, DurableLedger(), SystemKeys(bytes(32)), data=row_bytes([0])
        )
        tracemalloc.start()
        subject.release("s", 0, lambda samples: np.ones((samples.stop - samples.start, parameters)))
        try:
            return tracemalloc.get_traced_memory()[1] / (8 * parameters)
        finally:
            tracemalloc.stop()

    few, many = peak(1), peak(64)
    assert many < few + 1.0
    assert many < 16


def test_a_real_machine_insists_on_a_ledger_that_lasts():
    with pytest.raises(ConfigurationError, match="durable"):
        machine(MemoryLedger(), SystemKeys(bytes(32)))


def test_a_session_belongs_to_the_key_it_was_opened_with():
    ledger = DurableLedger()
    machine(ledger, SystemKeys(bytes(32))).release("s", 0, contribution)
    with pytest.raises(LedgerError, match="or the noise key is"):
        machine(ledger, SystemKeys(bytes(31) + b"x")).release("s", 1, contribution)
    simulated = MemoryLedger()
    machine(simulated, SimulatedKeys(1, "m")).release("s", 0, contribution)
    refused(protocol.POLICY_CHANGED, machine(simulated, SimulatedKeys(2, "m")), "s", 1)


@pytest.mark.parametrize("lost", ["stream", "account", "samples"])
def test_a_ledger_with_a_part_missing_is_not_believed(lost):
    ledger = MemoryLedger()
    subject = machine(ledger)
    subject.release("s", 0, contribution)
    if lost == "stream":
        ledger._streams.clear()
    elif lost == "account":
        ledger._account = type(ledger._account)()
    else:
        ledger._account = type(ledger._account)(0, ledger._account.reserved)
    with pytest.raises(LedgerError, match="damaged"):
        subject.release("s", 1, contribution)


def test_trusted_sessions_are_within_the_budget():
    """2^2 + 2^2 + 1 <= 9 < 9 + 1, with one session before them whose machine added noise of its own."""
    ledger, budget = MemoryLedger(), {"budget_mu": 3.0}
    machine(ledger, mu=1.0, **budget).release("own noise", 0, contribution)
    trusted = machine(ledger, trust="trusted-server", **budget)
    for session in ("a", "b"):
        trusted.release(session, 0, contribution)
    refused(protocol.BUDGET_EXHAUSTED, trusted, "c", 0)
    refused(protocol.BUDGET_EXHAUSTED, machine(ledger, mu=0.1, trust="trusted-server", **budget), "c", 0)
    trusted.release("a", 1, contribution)
    assert ledger.account().reserved_mu == pytest.approx(3.0)


def test_a_machine_that_has_trusted_a_server_states_no_bound_against_servers_and_opens_no_session_for_others():
    ledger = MemoryLedger()
    trusted = machine(ledger, trust="trusted-server", budget_mu=100.0)
    own = machine(ledger, budget_mu=100.0)
    own.release("own noise", 0, contribution)
    assert own.statement("own noise").mu_budget == 100.0
    trusted.release("t", 0, contribution)
    for statement in (trusted.statement("t"), own.statement("t"), own.statement("new")):
        assert statement.mu_budget == math.inf
    for statement in (trusted.statement("t"), own.statement("t")):
        assert statement.mu_spent == statement.mu_guaranteed == math.inf, "its mu is not the machine's to state"
    assert own.statement("own noise").mu_guaranteed == own.plan.mu, "its own noise is still there"
    own.release("own noise", 1, contribution)
    refused(protocol.BUDGET_EXHAUSTED, own, "u", 0)


def test_a_delta_the_noise_cannot_deliver_is_refused():
    with pytest.raises(ConfigurationError, match="delta"):
        machine(keys=SystemKeys(bytes(32)), delta=1e-100)
    assert math.isinf(machine(delta=1e-100).plan.mu), "in simulation nothing is guaranteed"


def test_whole_numbers_and_floats_are_the_same_policy():
    assert machine(mu=2).plan.fingerprint == machine(mu=2.0).plan.fingerprint


@mechanisms
def test_a_stream_interrupted_at_any_release_goes_on_to_the_last_bit(options):
    """Another process with the same ledger: what it remembers is all a machine needs."""
    ledger, whole = DurableLedger(), machine(max_participations=40, **options)
    for k in range(1, 41):
        resumed = machine(ledger=ledger, max_participations=40, **options)
        ours, theirs = resumed.release("s", k - 1, contribution), whole.release("s", k - 1, contribution)
        assert (ours.values == theirs.values).all()


def test_an_audit_would_see_noise_that_is_not_correlated_as_claimed():
    """The planted bug of the test above: a resumed stream that forgets its state adds other noise."""
    ledger, whole = DurableLedger(), machine(mechanism="blt")
    for k in range(1, 6):
        whole.release("s", k - 1, contribution)
        resumed = machine(ledger=ledger, mechanism="blt")
        with ledger.exclusive() as page:
            if (stream := page.stream("s")) is not None:
                state = tuple(np.zeros_like(values) for values in stream.noise_state)
                page.commit("s", replace(stream, noise_state=state), page.account())
        resumed.release("s", k - 1, contribution)
    ours, theirs = machine(ledger=ledger, mechanism="blt").release("s", 5, zero), whole.release("s", 5, zero)
    assert not np.allclose(ours.values, theirs.values)


RETURNING = {"batch_size": 2, "max_participations": 12, "sample_participations": 3, "min_separation": 4}


@pytest.mark.parametrize("name", ["independent", "cancelling", "sqrt_toeplitz", "banded", "blt", "tree", "optimal"])
def test_samples_that_return_keep_their_declared_pattern_and_the_noise_covers_it(name):
    subject, asked = machine(mechanism=name, **RETURNING), []
    for k in range(1, 13):
        subject.release("s", k - 1, lambda samples: asked.append(samples) or contribution(samples))
    assert [(s.start, s.stop) for s in asked] == [(2 * (k % 4), 2 * (k % 4) + 2) for k in range(12)]
    with pytest.raises(RefusedError, match="cap"):
        subject.release("s", 12, contribution)
    once = machine(mechanism=name, batch_size=2, max_participations=12).plan
    encoder = subject.plan.mechanism.materialize()
    worst = max(np.linalg.norm(encoder[:, j::4].sum(axis=1)) for j in range(4))
    assert subject.plan.noise_std == pytest.approx(subject.plan.sensitivity * worst / 2.0)
    assert subject.plan.noise_std > 1.3 * once.noise_std
    assert subject.plan.mu == pytest.approx(2.0)
    assert subject.plan.spent_mu(12) == pytest.approx(2.0)


def test_a_second_session_of_returning_samples_spends_its_own_budget():
    subject = machine(mechanism="blt", budget_mu=3.0, **RETURNING)
    for session in ("a", "b"):
        for k in range(1, 13):
            subject.release(session, k - 1, contribution)
    with pytest.raises(RefusedError, match="budget"):  # three times mu = 2 is more than 3
        subject.release("c", 0, contribution)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_participations": 2, "min_separation": 5}, "max_participations <= sample_participations"),
        ({"min_separation": 5}, "only with sample_participations > 1"),
        ({"sample_participations": 0}, "sample_participations"),
        ({"clip_unit": "batch"}, "clip_unit"),
        ({"sample_participations": 2, "min_separation": 150, "max_participations": 200}, "min_separation <="),
    ],
)
def test_patterns_that_cannot_hold_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        machine(**changes)


def test_an_update_is_clipped_as_a_whole_and_charged_as_one():
    subject = machine(clip_unit="update", batch_size=5, trust="trusted-server")
    release = subject.release("s", 0, lambda samples: 7.0 * np.ones((1, D)))
    assert np.linalg.norm(release.values) == pytest.approx(1.0, abs=1e-5)
    assert subject.policy.sensitivity == 2.0
    assert machine(clip_unit="contractive", batch_size=5).policy.sensitivity == pytest.approx(0.4, rel=1e-5)
    assert machine(clip_unit="contractive", batch_size=5).policy.sensitivity > 0.4
    with pytest.raises(ConfigurationError, match="shape"):
        machine(clip_unit="update").release("s", 0, contribution)


def test_an_update_that_cannot_be_computed_on_a_real_machine_counts_as_zero():
    def failing(samples):
        raise ValueError("the third sample is 7")

    subject = machine(clip_unit="update", keys=SystemKeys.generate(), trust="trusted-server")
    assert (subject.release("s", 0, failing).values == 0).all()


def test_a_streams_next_state_is_the_record_with_those_fields_replaced():
    counts = np.arange(3)
    before = StreamRecord("f", 4, 2, b"n" * 16, {3: counts, 4: counts}, (counts,), "terms", (counts,))
    after = before.acknowledged(3, {4: counts})
    assert after == replace(before, ack=3, pending={4: counts})
    assert after.released(b"m" * 16, {5: counts}, ()) == replace(
        after, release=5, nonces=b"m" * 16, pending={5: counts}, noise_state=()
    )
    assert (before.ack, before.release, list(before.pending)) == (2, 4, [3, 4])


def test_what_is_left_of_a_session_is_stated():
    """Of 20 samples in batches of 3: its own cap, then the samples that another session has used up."""
    ledger = MemoryLedger()
    subject = machine(batch_size=3, max_participations=4, budget_mu=9.0, num_samples=20, ledger=ledger)
    assert subject.statement("s").releases_left == 4
    for left in (3, 2, 1, 0):
        subject.release("s", 0, contribution)
        assert subject.statement("s").releases_left == left
    assert subject.statement("t").releases_left == 2
    for _ in range(2):
        subject.release("t", 0, contribution)
    assert subject.statement("t").releases_left == 0
    with pytest.raises(RefusedError):
        subject.release("t", 0, contribution)
