"""The rule of admission: nothing spent twice, nothing beyond cap and budget, no stream that is another's.

Which samples a release is made from: all of them, or each session's own from the first one.
"""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    Account,
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    RefusedError,
    SimulatedKeys,
    StreamRecord,
    SystemKeys,
    protocol,
)

from tests.harness.errors import raises
from tests.privacy.clients import DATA, D, DurableLedger, client, contribution, refused, zero

RETURNING = {"batch_size": 2, "max_participations": 12, "sample_participations": 3, "min_separation": 4}


def test_every_sample_is_used_once_and_in_order():
    seen = []
    subject = client()

    def record(samples):
        seen.extend(range(samples.start, samples.stop))
        return DATA[samples]

    for k in range(20):
        subject.release("s", k, record)
    assert seen == list(range(40))


def used(subject, session, releases, ack=0):
    """Samples of each release."""
    seen = []
    for release in range(ack, ack + releases):
        subject.release(session, release, lambda samples: (seen.append(samples), DATA[samples])[1])
        if len(seen) <= release - ack:
            seen.append(slice(0, 0))
    return [list(range(samples.start, samples.stop)) for samples in seen]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(("num_samples", "batch", "releases"), [(1, 8, 5), (3, 2, 7), (5, 8, 1), (13, 3, 5), (9, 2, 5)])
def test_few_samples_are_dealt_evenly_and_each_is_in_one_release(num_samples, batch, releases, real):
    keys = SystemKeys.generate() if real else None
    few = {"num_samples": num_samples, "batch_size": batch, "max_participations": releases, "mechanism": "independent"}
    subject = client(keys=keys, **few)
    if not real:
        made = used(subject, "s", releases)
        assert list(chain(*made)) == list(range(num_samples))
        assert max(map(len, made)) <= batch
        assert max(map(len, made)) - min(map(len, made)) <= 1
    else:  # computes each sample by itself
        seen = []
        for release in range(releases):
            subject.release("s", release, lambda samples: (seen.append(samples.start), DATA[samples])[1])
        assert seen == list(range(num_samples))
    refused(protocol.CAP_REACHED, subject, "s", releases)
    refused(protocol.SAMPLES_USED_UP, client(subject.ledger, keys, budget_mu=9.0, **few), "t", 0)


def test_few_samples_of_several_sessions_are_used_once():
    few = {"num_samples": 7, "batch_size": 2, "max_participations": 6, "mechanism": "independent", "budget_mu": 9.0}
    ledger = DurableLedger()
    first = used(client(ledger, **few), "a", 3)
    second = used(client(ledger, **{**few, "max_participations": 12}), "b", 12)
    assert list(chain(*first, *second)) == list(range(7))
    assert client(ledger, **few).statement("a").releases_left == 3
    assert client(ledger, **few).statement("c").releases_left == 0


def test_few_samples_that_return_are_in_one_release_of_each_pass():
    subject = client(num_samples=5, batch_size=2, max_participations=8, sample_participations=2, min_separation=4)
    made = used(subject, "s", 8)
    assert list(chain(*made[:4])) == list(chain(*made[4:])) == list(range(5))
    assert made[:4] == made[4:]


@pytest.mark.parametrize("changed", [3, 6, 7])
@pytest.mark.parametrize(("passes", "selection"), [(1, "once"), (1, "cyclic"), (3, "once")])
def test_few_samples_of_another_number_by_now_return_no_sooner_than_is_charged(changed, passes, selection):
    """An operator changes the number of records in the middle of a session: a sample keeps its place in a pass."""
    shared = {"batch_size": 2, "mechanism": "independent", "batch_selection": selection, "budget_mu": 9.0}
    shared |= {
        "max_participations": 4 * passes,
        "sample_participations": passes,
        "min_separation": 4 if passes > 1 else 1,
    }
    ledger = DurableLedger()
    made = used(client(ledger, num_samples=5, **shared), "s", 2)
    later = client(ledger, num_samples=changed, **shared)
    for release in range(2, 4 * passes):
        try:
            made += used(later, "s", 1, ack=release)
        except RefusedError:
            break
    for sample in range(7):
        releases = [release for release, samples in enumerate(made) if sample in samples]
        assert len(releases) <= passes
        assert all(after - before >= 4 for before, after in pairwise(releases))


def test_a_client_of_few_samples_that_gets_many_goes_on_in_a_new_session():
    shared = {"batch_size": 2, "max_participations": 8, "mechanism": "independent", "budget_mu": 9.0}
    ledger = DurableLedger()
    first = used(client(ledger, num_samples=5, **shared), "a", 4)
    many = client(ledger, num_samples=40, **shared)
    with raises(LedgerError, "damaged", match="Begin a new session"):
        many.release("a", 4, zero)
    assert list(chain(*first, *used(many, "b", 8))) == list(range(len(list(chain(*first))) + 16))


@pytest.mark.parametrize("mechanism", ["independent", "cancelling"])
def test_a_release_of_few_samples_is_divided_by_the_constant_b_and_moves_by_no_more_than_is_charged(mechanism):
    """Missing samples count as zero: a mean of those that are there would move further."""
    few = {"num_samples": 3, "batch_size": 4, "max_participations": 6, "mechanism": mechanism}
    totals = []
    for sign in (1.0, -1.0):
        subject = client(**few)

        def rows(samples, sign=sign):
            rows = np.zeros((samples.stop - samples.start, D))
            rows[:, 0] = sign * np.isin(np.arange(samples.start, samples.stop), 1) * 10.0
            return rows

        made = [subject.release("s", release, rows) for release in range(6)]
        totals.append(np.cumsum([one.counts * one.spacing for one in made], axis=0))
    moved = np.diff(totals[0] - totals[1], axis=0, prepend=0.0)
    lengths = np.linalg.norm(moved, axis=1)
    assert (lengths > 0).sum() == 1, "one release has the sample"
    assert lengths.max() == pytest.approx(2.0 / 4, rel=1e-3)
    assert lengths.max() <= subject.plan.sensitivity


def test_the_cap_the_samples_and_the_budget_end_a_client():
    subject = client()
    for k in range(20):
        subject.release("s", k, contribution)
    refused(protocol.CAP_REACHED, subject, "s", 20)
    refused(protocol.BUDGET_EXHAUSTED, subject, "another", 0)

    ledger = MemoryLedger()
    subject = client(ledger, num_samples=40, budget_mu=2.0 * math.sqrt(3))
    for session in ("a", "b"):
        for k in range(10):
            subject.release(session, k, contribution)
    refused(protocol.SAMPLES_USED_UP, subject, "a", 10)
    refused(protocol.SAMPLES_USED_UP, subject, "c", 0)
    with ledger.exclusive() as page:
        assert page.account().samples_used == 40
        assert set(page.account().reserved) == {"a", "b"}, "a refusal reserves nothing"


def test_mus_of_sessions_add_in_squares():
    subject = client(budget_mu=2.0 * math.sqrt(5))
    for number in range(5):
        subject.release(f"session{number}", 0, contribution)
    refused(protocol.BUDGET_EXHAUSTED, subject, "one more", 0)


def test_a_session_reserves_what_its_noise_guarantees_and_not_what_was_asked():
    ledger = MemoryLedger()
    subject = client(ledger, schedule="paper")
    subject.release("s", 0, contribution)
    assert ledger.account().reserved == {"s": subject.plan.mu}
    assert subject.plan.mu < 0.99 * subject.policy.mu


@pytest.mark.parametrize("rule", ["acknowledged", "paper"])
def test_acknowledgements_only_move_forward_to_a_release_that_exists(rule):
    """Under the papers' rule as well, where nothing is taken back: a server that goes backwards is none of ours."""
    subject = client(release_rule=rule)
    for k in range(3):
        subject.release("s", k, contribution)
    for ack in (0, 1, 4, -1):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    assert subject.release("s", 3, contribution).ack == 3
    for ack in (0, 1, 2, 5):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="backwards"):
        subject.acknowledge("s", 2)
    refused(protocol.BAD_ACKNOWLEDGEMENT, client(release_rule=rule), "s", 1)
    assert subject.release("s", 4, contribution).ack == 4, "nothing of that was taken note of"


@pytest.mark.parametrize("noting", [False, True], ids=["release", "release_with_state"])
def test_samples_are_fresh_over_all_sessions_however_they_are_mixed(noting):
    """Each sample once, whichever session took the others and whether it notes something: the ledger counts for all."""
    ledger, seen, acks = DurableLedger(), [], {"a": 0, "b": 0, "c": 0}
    for session in "abbacabcc":
        subject = client(ledger, budget_mu=10.0)  # made again each time: nothing is remembered but the ledger

        def record(samples):
            seen.append((samples.start, samples.stop))
            return DATA[samples]

        note = (np.array([float(acks[session])]),)
        if noting:
            release = subject.release_with_state(session, acks[session], lambda *_, record=record: record, note)
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
    subject, whole = client(), client()
    first = subject.release("s", 0, contribution)
    subject.release("s", 0, contribution)
    third = subject.release("s", first.release, contribution)
    expected = sum(whole.release("s", k, contribution).values for k in range(3))
    assert (first.values + third.values == expected).all()


def test_a_release_that_was_given_up_cannot_be_acknowledged_any_more():
    """What it was is forgotten: a later release could not be told apart from it."""
    subject, whole, heard = client(), client(), {}
    for k in range(1, 7):
        heard[k] = subject.release("s", 0, contribution).values
    for ack in (1, 2):
        refused(protocol.BAD_ACKNOWLEDGEMENT, subject, "s", ack)
    expected = sum(whole.release("s", k, contribution).values for k in range(7))
    assert (heard[3] + subject.release("s", 3, contribution).values == expected).all(), "the last four still can be"


def test_a_session_belongs_to_the_policy_it_was_opened_with():
    ledger = MemoryLedger()
    client(ledger, budget_mu=10.0).release("s", 0, contribution)
    other = client(ledger, clip_norm=0.5, budget_mu=10.0)
    refused(protocol.POLICY_CHANGED, other, "s", 1)
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="under another privacy policy or key"):
        other.release("s", 1, contribution)


def test_a_shuffled_session_beyond_the_budget_is_refused_for_the_budget():
    shuffled = {"batch_selection": "shuffled", "mechanism": "independent", "batch_size": 10}
    refused(protocol.BUDGET_EXHAUSTED, client(MemoryLedger(), budget_mu=1.0, **shuffled), "s", 0)


def test_a_session_belongs_to_the_key_it_was_opened_with():
    ledger = DurableLedger()
    client(ledger, SystemKeys(bytes(32))).release("s", 0, contribution)
    with raises(LedgerError, "mismatch", "data"):
        client(ledger, SystemKeys(bytes(31) + b"x")).release("s", 1, contribution)
    simulated = MemoryLedger()
    client(simulated, SimulatedKeys(1, "m")).release("s", 0, contribution)
    refused(protocol.POLICY_CHANGED, client(simulated, SimulatedKeys(2, "m")), "s", 1)


@pytest.mark.parametrize("lost", ["stream", "account", "samples"])
def test_a_ledger_with_a_part_missing_is_not_believed(lost):
    ledger = MemoryLedger()
    subject = client(ledger)
    subject.release("s", 0, contribution)
    with ledger.exclusive() as transaction:
        stream, account = transaction.stream("s"), transaction.account()
        if lost == "stream":
            stream = StreamRecord("")
        else:
            account = Account() if lost == "account" else Account(0, account.reserved)
        transaction.commit("s", stream, account)
    with raises(LedgerError, "damaged", match="damaged"):
        subject.release("s", 1, contribution)


@pytest.mark.parametrize("spent", [0.1, 0.3, 0.7, 1.9])
def test_the_last_session_that_a_budget_is_for_is_admitted_whatever_rounding_makes_of_the_sum(spent):
    for sessions in range(2, 12):
        subject = client(mu=spent, budget_mu=math.sqrt(sessions) * spent, max_participations=1)
        for number in range(sessions):
            subject.release(f"s{number}", 0, contribution)
        refused(protocol.BUDGET_EXHAUSTED, subject, "more", 0)


def test_an_acknowledgement_may_be_repeated():
    subject = client()
    subject.release("s", 0, contribution)
    for _ in range(2):
        subject.acknowledge("s", 1)
    assert subject.release("s", 1, contribution).ack == 1


def test_trusted_sessions_are_within_the_budget():
    """2^2 + 2^2 + 1 <= 9 < 9 + 1, with one session before them whose client added noise of its own."""
    ledger, budget = MemoryLedger(), {"budget_mu": 3.0}
    client(ledger, mu=1.0, **budget).release("own noise", 0, contribution)
    trusted = client(ledger, trust="trusted-server", **budget)
    for session in ("a", "b"):
        trusted.release(session, 0, contribution)
    refused(protocol.BUDGET_EXHAUSTED, trusted, "c", 0)
    refused(protocol.BUDGET_EXHAUSTED, client(ledger, mu=0.1, trust="trusted-server", **budget), "c", 0)
    trusted.release("a", 1, contribution)
    assert ledger.account().spent.mu == pytest.approx(3.0)


@pytest.mark.parametrize("name", MECHANISMS)
def test_samples_that_return_keep_their_declared_pattern_and_the_noise_covers_it(name):
    subject, asked = client(mechanism=name, **RETURNING), []
    for k in range(1, 13):
        subject.release("s", k - 1, lambda samples: asked.append(samples) or contribution(samples))
    assert [(s.start, s.stop) for s in asked] == [(2 * (k % 4), 2 * (k % 4) + 2) for k in range(12)]
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("s", 12, contribution)
    once = client(mechanism=name, batch_size=2, max_participations=12).plan
    encoder = subject.plan.mechanism.materialize()
    worst = max(np.linalg.norm(encoder[:, j::4].sum(axis=1)) for j in range(4))
    assert subject.plan.noise_std == pytest.approx(subject.plan.sensitivity * worst / 2.0)
    assert subject.plan.noise_std > 1.3 * once.noise_std
    assert subject.plan.mu == pytest.approx(2.0)
    assert subject.plan.spent_mu(12) == pytest.approx(2.0)


def test_a_second_session_of_returning_samples_spends_its_own_budget():
    subject = client(mechanism="blt", budget_mu=3.0, **RETURNING)
    for session in ("a", "b"):
        for k in range(1, 13):
            subject.release(session, k - 1, contribution)
    with raises(
        RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"
    ):  # three times mu = 2 is more than 3
        subject.release("c", 0, contribution)


ALL = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}


def noise_of(subject, session="s"):
    return subject.release(session, 0, zero).values


def test_a_release_of_all_samples_is_the_sum_of_their_bounded_rows():
    release = client(**ALL, max_participations=3).release("s", 0, contribution)
    expected = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA
    found = release.values - noise_of(client(**ALL, max_participations=3))
    assert found == pytest.approx(expected.sum(axis=0), abs=1e-2)
    assert release.samples == len(DATA)


def test_every_sample_returns_in_every_release_until_the_cap():
    subject = client(**ALL, max_participations=3)
    for _ in range(3):
        assert subject.admits("s", 0) == slice(0, len(DATA))
        subject.release("s", 0, contribution)
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("s", 0, contribution)


def test_a_failing_sample_counts_as_zero_in_the_sum():
    def failing(samples):
        assert samples.stop - samples.start == 1
        if samples.start == 5:
            raise ValueError("of this sample")
        return DATA[samples]

    keys = SystemKeys(b"k" * 32)
    subject = client(ledger=DurableLedger(), keys=keys, mu=8.0, **ALL, max_participations=1)
    values = subject.release("s", 0, failing).values
    rows = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA
    rows[5] = 0.0
    # Noise of standard deviation 1/4 in six coordinates: beyond 2.5 with a chance below 1e-20.
    assert np.abs(values - rows.sum(axis=0)).max() < 2.5


def test_a_session_that_begins_again_uses_samples_of_sessions_before_it():
    ledger = DurableLedger()
    again = {
        "batch_selection": "cyclic",
        "mechanism": "independent",
        "budget_mu": 3.0,
        "mu": 2.0,
        "max_participations": 4,
    }
    for session in ("one", "two"):
        subject = client(ledger=ledger, **again)
        assert subject.admits(session, 0) == slice(0, 2)
        subject.release(session, 0, contribution)
        assert subject.admits(session, 0) == slice(2, 4)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        client(ledger=ledger, **again).release("three", 0, contribution)


def test_no_fresh_samples_after_a_release_of_all():
    ledger = DurableLedger()
    client(ledger=ledger, **ALL, max_participations=1, mu=1.0, budget_mu=3.0).release("all", 0, contribution)
    with raises(RefusedError, "refused", code=protocol.SAMPLES_USED_UP):
        client(ledger=ledger, mu=1.0, budget_mu=3.0).release("turn", 0, contribution)
    again = client(ledger=ledger, batch_selection="cyclic", mu=1.0, budget_mu=3.0)
    assert again.release("again", 0, contribution).samples == 2
    assert D == 6


def test_an_admission_is_good_for_one_release_of_its_own_client():
    subject, other = client(MemoryLedger()), client(MemoryLedger())
    with subject.admitted("s", 0) as admission:
        with raises(ConfigurationError, "wrong-order", match="open admission"):
            admission.use(other)
        admission.use(subject)
        with raises(ConfigurationError, "wrong-order", match="open admission"):
            admission.use(subject)
    with subject.admitted("s", 0) as admission:
        pass
    with raises(ConfigurationError, "wrong-order", match="open admission"):
        admission.use(subject)
