"""Which release a sample is in: drawn once, from the key, for one session; only sums show anything of it."""

import numpy as np
import pytest
from murmurfl.privacy import (
    Account,
    ConfigurationError,
    LedgerError,
    PrivacyPolicy,
    PrivateMachine,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    SystemKeys,
    protocol,
    row_bytes,
)
from murmurfl.privacy.machine.known_samples import slots_of, weights_of
from scipy.stats import chisquare

from tests.privacy.machines import DATA, D, DurableLedger, contribution, machine, refused, zero

SLOTS = 10
SECRET = {"order": "secret", "mechanism": "independent", "max_participations": SLOTS, "batch_size": 20, "mu": 2.0}
KEY, NONCE = b"k" * 32, b"n" * 16
ROWS = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA


def without_noise(mechanism="independent", **changes):
    """What the releases of a simulated machine are made of: the same keys on data that are all zero take noise out."""
    subject, empty = (machine(**{**SECRET, "mechanism": mechanism, **changes}) for _ in range(2))
    pairs = [(subject.release("s", k, contribution), empty.release("s", k, zero)) for k in range(SLOTS)]
    return np.array([made.values - noise.values for made, noise in pairs])


def test_every_sample_is_in_one_bounded_release():
    slots = slots_of(SimulatedKeys(1, "m").secret_key, SimulatedKeys(1, "m").nonce("s", 0), len(DATA), SLOTS)
    expected = np.array([ROWS[slots == k].sum(axis=0) / 20 for k in range(1, SLOTS + 1)])
    assert without_noise() == pytest.approx(expected, abs=1e-5)
    assert without_noise("cancelling") == pytest.approx(expected, abs=1e-5)
    assert without_noise(release_rule="paper") == pytest.approx(expected, abs=1e-5)


def test_releases_are_drawn_uniformly_and_independently_of_each_other():
    """Fails for one key in 10^4, each of the two."""
    slots = slots_of(KEY, NONCE, 40_000, SLOTS)
    assert not slots.flags.writeable
    assert chisquare(np.bincount(slots, minlength=SLOTS + 1)[1:]).pvalue > 1e-4
    pairs = SLOTS * (slots[::2] - 1) + slots[1::2] - 1
    assert chisquare(np.bincount(pairs, minlength=SLOTS**2)).pvalue > 1e-4


def test_how_many_samples_a_release_holds_is_left_to_chance():
    counts = np.bincount(slots_of(KEY, NONCE, 200, SLOTS), minlength=SLOTS + 1)[1:]
    assert len(set(counts)) > 3, "no permutation with a fixed number"


def test_a_samples_release_depends_on_key_nonce_and_row_only():
    slots = slots_of(KEY, NONCE, 50, SLOTS)
    assert (slots_of(KEY, NONCE, 80, SLOTS)[:50] == slots).all()
    assert (slots_of(KEY, b"m" * 16, 50, SLOTS) != slots).any()
    assert (slots_of(b"j" * 32, NONCE, 50, SLOTS) != slots).any()
    weights = [weights_of(KEY, NONCE, 50, SLOTS, k) for k in range(1, SLOTS + 1)]
    assert (np.sum(weights, axis=0) == 1).all()


@pytest.mark.parametrize(("key", "nonce"), [(KEY[1:], NONCE), (KEY + b"k", NONCE), (KEY, b""), (KEY, NONCE + b"n")])
def test_no_order_is_drawn_from_a_key_or_nonce_of_another_length(key, nonce):
    with pytest.raises(ConfigurationError, match=f"got {len(key)} and {len(nonce)}"):
        slots_of(key, nonce, 50, SLOTS)


def test_all_samples_are_computed_for_every_release_whichever_are_in_it():
    asked = []

    def counting(samples):
        asked.append((samples.start, samples.stop))
        return contribution(samples)

    subject = machine(ledger=DurableLedger(), keys=SystemKeys(KEY), **SECRET)
    for k in range(2):
        asked.clear()
        assert subject.release("s", k, counting).samples == 20, "the constant b, whatever is in it"
        assert asked == [(i, i + 1) for i in range(200)]


def test_a_failing_sample_shows_in_no_secret_release():
    def failing(samples):
        if samples.start in (3, 7):
            raise ValueError("of this sample")
        return contribution(samples)

    subject = machine(ledger=DurableLedger(), keys=SystemKeys(KEY), **SECRET)
    assert [subject.release("s", k, failing).release for k in range(SLOTS)] == list(range(1, SLOTS + 1))


def test_the_order_is_drawn_with_the_first_release_and_stays_after_a_restart():
    ledger = DurableLedger()
    machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET).admits("s", 0)
    assert ledger.stream("s") is None, "nothing is recorded before a release"
    machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET).release("s", 0, contribution)
    drawn = ledger.stream("s").order
    assert len(drawn) == 16
    machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET).release("s", 1, contribution)
    assert ledger.stream("s").order == drawn


def test_two_machines_and_two_sessions_never_share_an_order():
    def drawn(session, key):
        ledger = DurableLedger()
        machine(ledger=ledger, keys=SystemKeys(key), **SECRET).release(session, 0, contribution)
        return ledger.stream(session).order

    assert len({drawn("s", KEY), drawn("s", KEY), drawn("t", KEY)}) == 3
    simulated = [SimulatedKeys(1, "m").nonce(session, 0) for session in "st"]
    assert simulated[0] != simulated[1]
    assert SimulatedKeys(1, "m").nonce("s", 1) not in simulated, "no release has the order's nonce"


class Watched(PrivateMachine):
    """Notes the order that each contribution is computed for."""

    def _weights(self, admission):
        self.computed = [*getattr(self, "computed", []), admission.streams.order[0]]
        return super()._weights(admission)


def test_what_is_computed_for_one_order_is_recorded_for_the_same():
    """A request is admitted before the gradients are computed and again when they are recorded."""
    ledger, policy = DurableLedger(), machine(**SECRET).policy
    subject = Watched(policy, D, len(DATA), ledger, SystemKeys(KEY), data=row_bytes(DATA))
    for k in range(3):
        subject.release("s", k, contribution)
    assert set(subject.computed) == {ledger.stream("s").order}


def test_an_order_lies_on_the_disk_and_is_found_there_again(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=2.0, delta=1e-5)
    policy = machine(**SECRET).policy
    rows = row_bytes(DATA)
    PrivateMachine(policy, D, len(DATA), ledger, ledger.keys(), data=rows).release("s", 0, contribution)
    with SQLiteLedger(tmp_path / "ledger.sqlite").exclusive() as page:
        drawn = page.stream("s").order
    assert len(drawn) == 16
    again = SQLiteLedger(tmp_path / "ledger.sqlite")
    PrivateMachine(policy, D, len(DATA), again, again.keys(), data=rows).release("s", 1, contribution)
    with again.exclusive() as page:
        assert page.stream("s").order == drawn


@pytest.mark.parametrize("order", ["again", "all", "secret"])
def test_samples_of_a_secret_order_are_in_no_other_session(order):
    ledger = DurableLedger()
    machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET, budget_mu=9.0).release("s", 0, contribution)
    other = {**SECRET, "order": order, "batch_size": 1, "max_participations": 2}
    subject = machine(ledger=ledger, keys=SystemKeys(KEY), **other, budget_mu=9.0)
    refused(protocol.SAMPLES_USED_UP, subject, "t", 0)
    ledger._streams.clear()  # a damaged ledger, which no longer tells what the order was
    refused(protocol.SAMPLES_USED_UP, subject, "t", 0)


def test_samples_that_were_used_join_no_secret_order_whoever_used_them():
    ledger = DurableLedger()
    ledger._account = Account(samples_used=1)
    refused(protocol.SAMPLES_USED_UP, machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET), "s", 0)


def test_other_orders_are_refused_after_a_secret_order():
    ledger = DurableLedger()
    machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET, budget_mu=9.0).release("s", 0, contribution)
    turn = machine(ledger=ledger, keys=SystemKeys(KEY), budget_mu=9.0)
    refused(protocol.SAMPLES_USED_UP, turn, "t", 0)
    passes = {"sample_participations": 2, "min_separation": 10}
    refused(protocol.SAMPLES_USED_UP, machine(ledger=ledger, keys=SystemKeys(KEY), budget_mu=9.0, **passes), "u", 0)


def test_rows_that_were_added_and_used_elsewhere_do_not_join_a_secret_order():
    ledger, seen = DurableLedger(), []

    def watched(samples):
        seen.append(samples.stop)
        return DATA[samples]

    def started(rows, **policy):
        return machine(ledger=ledger, keys=SystemKeys(KEY), num_samples=rows, budget_mu=9.0, **policy)

    started(100, **SECRET).release("s", 0, contribution)
    started(150, **SECRET).release("s", 1, watched)
    assert max(seen) == 150, "added rows join the order while they are in no other session"
    started(200).release("t", 0, contribution)  # in turn, of rows that were added
    refused(protocol.SAMPLES_USED_UP, started(200, **SECRET), "s", 2)


def test_samples_that_were_used_cannot_hide_in_a_secret_order():
    ledger = DurableLedger()
    machine(ledger=ledger, keys=SystemKeys(KEY), budget_mu=9.0).release("s", 0, contribution)
    refused(protocol.SAMPLES_USED_UP, machine(ledger=ledger, keys=SystemKeys(KEY), **SECRET, budget_mu=9.0), "t", 0)


def test_stopping_early_and_asking_too_often_change_nothing():
    subject = machine(**SECRET)
    for k in range(SLOTS):
        subject.release("s", k, contribution)
    assert subject.statement("s").mu_spent == subject.statement("s").mu_guaranteed
    with pytest.raises(RefusedError, match="cap"):
        subject.release("s", SLOTS, contribution)


def test_a_ledger_that_lost_an_order_is_damaged():
    class Forgetful(DurableLedger):
        def stream(self, session):
            stream = super().stream(session)
            if stream is not None:
                object.__setattr__(stream, "order", b"")
            return stream

    subject = machine(ledger=Forgetful(), keys=SystemKeys(KEY), **SECRET)
    subject.release("s", 0, contribution)
    with pytest.raises(LedgerError, match="secret order"):
        subject.release("s", 1, contribution)


def test_a_trusted_server_and_samples_that_return_have_no_secret_order():
    policy = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 3, "mu": 1.0, "order": "secret"}
    with pytest.raises(ConfigurationError, match="trusted server"):
        PrivacyPolicy(**policy, trust="trusted-server")
    with pytest.raises(ConfigurationError, match="sample_participations 1"):
        PrivacyPolicy(**policy, sample_participations=2, min_separation=2)
    with pytest.raises(ConfigurationError, match="clip_unit"):
        PrivacyPolicy(**policy, clip_unit="update")
    with pytest.raises(ConfigurationError, match="32 bytes"):
        slots_of(b"short", NONCE, 5, 2)
    assert D == 6
