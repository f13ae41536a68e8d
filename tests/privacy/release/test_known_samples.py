"""Rows of data by owner: who is where, what is kept of whom, and that nobody changes another's row or place.

Which release a sample is in: drawn once, from the key, for one session; only sums show anything of it.
The ledger knows its data: rows used up must be the same rows at every start, in the same session and the next.
"""

import hashlib
import json
import sqlite3
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from murmurfl.privacy import (
    Account,
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    Owners,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    StreamRecord,
    SystemKeys,
    accept_rollback,
    any_data,
    person_loss,
    policy_guarantee,
    protocol,
    read_ledger,
    rotate_key,
    row_bytes,
)
from murmurfl.privacy.release import known_samples
from murmurfl.privacy.release.known_samples import DataDigest, OwnersDigest, slots_of, weights_of, weights_of_owners
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock
from scipy.stats import chisquare

from tests.harness.errors import raises
from tests.privacy.clients import DATA, D, DurableLedger, client, contribution, refused, zero

pytestmark = pytest.mark.usefixtures("quick_disk")

NAMES = np.array(["ann", "bob", "ann", "cy", "ann", "bob", "ann"])
SECRET = bytes(range(32))


def grouped(names, most=3, places=50, secret=SECRET):
    return Owners.of(names, most, secret=secret, places=places)


def rows_of(owners):
    """What is kept of each owner."""
    kept = zip(*owners.padded_rows(slice(0, len(owners))), strict=True)
    return [sorted(set(row[there].tolist())) for row, there in kept]


def where(names, owners):
    """Each owner's place."""
    ends = owners.ends.tolist()
    return {names[owners.rows[end - 1]]: place for end, place in zip(ends, owners._place.tolist(), strict=True)}


def test_the_first_rows_of_each_owner_are_kept():
    assert sorted(rows_of(grouped(NAMES, 2))) == [[0, 2], [1, 5], [3]]
    assert sorted(rows_of(grouped(NAMES, 9))) == [[0, 2, 4, 6], [1, 5], [3]]


@pytest.mark.parametrize("most", [0, -1, 2.0, True, None])
@pytest.mark.parametrize(
    "made",
    [
        lambda most: Owners.of(NAMES, most, secret=SECRET),
        lambda most: Owners.one_each(NAMES, most, secret=SECRET),
        lambda most: Owners.in_turn(5, most),
    ],
    ids=["of", "one each", "in turn"],
)
def test_no_number_of_samples_an_owner_but_a_count_is_taken(made, most):
    with raises(ConfigurationError, "out-of-range", "most"):
        made(most)


def test_a_place_is_the_names_and_the_secrets_alone():
    """Whatever the order of rows, whoever else is there, and however many rows anybody has."""
    chance = np.random.Generator(np.random.Philox(key=1))
    names = np.array([f"patient {i}" for i in range(200)])
    known = where(names, grouped(names))
    for _ in range(100):
        some = chance.choice(names, size=int(chance.integers(1, 300)))
        assert where(some, grouped(some)).items() <= known.items()
    assert where(names, grouped(names, secret=bytes(32))) != known
    assert where(names, grouped(names, places=51)) != known


def test_places_are_as_good_as_drawn():
    counts = np.bincount(grouped(np.arange(10_000), places=100)._place, minlength=100)
    assert (counts > 60).all()  # of a fixed secret; at random in all but 1 of 1,000 secrets
    assert (counts < 145).all()
    alone = grouped(np.arange(1000), places=1000)
    assert 330 < 1000 - len(set(alone._place.tolist())) < 410  # 1000 / e places have nobody


def test_owners_in_a_slice_of_places_stand_together():
    owners = grouped(np.arange(90), places=30)
    found = [owners.in_places(slice(start, start + 5)) for start in range(0, 30, 5)]
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, 90)
    for number, part in enumerate(found):
        assert set((owners._place[part] // 5).tolist()) <= {number}


@pytest.mark.parametrize("names", [np.arange(7) - 3, np.array([f"{i}".encode() for i in range(7)]), NAMES])
def test_integers_and_texts_name_owners(names):
    assert len(grouped(names)) == len(set(names.tolist()))


def test_a_name_is_the_same_however_it_is_stored():
    kinds = [
        np.array([3, 12]),
        np.array([3, 12], np.uint8),
        np.array(["3", "12"]),
        np.array([b"3", b"12"]),
        np.array([3, "12"], object),
    ]
    assert len({grouped(names).marks.tobytes() for names in kinds}) == 1


def test_rows_without_a_name_are_nobodys_and_no_row_is_refused():
    owners = grouped(np.array(["ann", None, "", "bob", 2.5, float("nan"), 10**5000, b"\xff", True, [1], "ann"], object))
    assert sorted(rows_of(owners)) == [[0, 10], [3], [7]]
    assert len(grouped(np.array([None, None], object))) == 0
    assert Owners.of(np.array([""]), 1, secret=SECRET).num_places == 1


def test_as_many_owners_as_a_sum_can_count_are_taken_and_one_more_is_not(monkeypatch):
    monkeypatch.setattr(known_samples, "MOST_ROWS", 3)
    assert len(Owners.of(["a", "b", "b", "c"], 1, secret=SECRET)) == 3
    with pytest.raises(ConfigurationError) as refusal:
        Owners.of(["a", "b", "b", "c", "d"], 1, secret=SECRET)
    assert refusal.value.kind == "out-of-range"


@pytest.mark.parametrize("names", ["ann", b"ann", {"ann": 1}])
def test_one_text_or_a_mapping_is_no_list_of_owners(names):
    with raises(ConfigurationError, "wrong-type", "names"):
        grouped(names)


@pytest.mark.parametrize("names", [np.array([0.5, 0.5]), np.zeros((2, 2), int), np.array([], int)])
def test_anything_else_is_refused_without_a_word_of_any_row(names):
    with pytest.raises(ConfigurationError, match="Expected one owner a row, integers or texts") as refused:
        grouped(names)
    assert "0.5" not in str(refused.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ann", "ann\0"),
        ("ann\0", "ann\0\0"),
        ("\ud800", "\udfff"),
        ("e\u0301", "\xe9"),
        (b"\xff", b"\xfe"),
        ("1", "1\0"),
    ],
)
def test_names_that_differ_in_any_character_are_two_owners(one, other):
    assert sorted(rows_of(grouped([one, other, one]))) == [[0, 2], [1]]
    assert sorted(rows_of(grouped(np.array([one, other, one], object)))) == [[0, 2], [1]]


def test_a_long_name_costs_no_other_row_memory():
    """In NumPy's own array of texts every row would be as wide: 520 MB here."""
    names = [f"patient {i}" for i in range(2_000)]
    peaks = []
    for long in ("ann", "x" * 65_000):
        tracemalloc.start()
        assert len(grouped([long, *names])) == 2_001
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4 * 65_000
    assert peaks[0] < 2_001 * 500


def test_secrets_and_places_must_be_possible():
    for secret in (b"short", bytes(65)):
        with raises(ConfigurationError, "wrong-shape", "secret", match="16 to 64"):
            grouped(NAMES, secret=secret)
    for places in (0, 1.5):
        with raises(ConfigurationError, "out-of-range", "places"):
            grouped(NAMES, places=places)


def test_a_row_is_as_wide_for_one_sample_as_for_the_most():
    rows, present = grouped(NAMES).padded_rows(slice(0, 3))
    assert sorted(rows.tolist()) == [[0, 2, 4], [1, 5, 1], [3, 3, 3]]
    assert sorted(present.sum(axis=1).tolist()) == [1, 2, 3]


def test_rows_that_are_added_move_nobody():
    more = np.append(NAMES, ["dee", "ann", "dee"])
    before, after = where(NAMES, grouped(NAMES)), where(more, grouped(more))
    assert before.items() < after.items()
    assert sorted(rows_of(grouped(more))) == [*sorted(rows_of(grouped(NAMES))), [7, 9]]  # of ann there were three


def test_simulated_owners_have_places_of_their_own_in_secret_order():
    names = np.repeat(np.arange(40), 2)
    orders = [Owners.one_each(names, 2, secret=secret) for secret in (SECRET, bytes(32), SECRET)]
    assert [one.num_places for one in orders] == [40, 40, 40]
    assert orders[0].in_places(slice(3, 9)) == slice(3, 9)
    assert sorted(rows_of(orders[0])) == [[2 * i, 2 * i + 1] for i in range(40)]
    assert orders[0].rows.tolist() == orders[2].rows.tolist() != orders[1].rows.tolist()
    assert orders[0].rows.tolist() != list(range(80))


def test_stand_ins_and_parts_of_a_table():
    assert rows_of(Owners.in_turn(5, 2)) == [[0, 1], [2, 3], [4]]
    assert rows_of(Owners.in_turn(3, 2).taken_from(np.array([40, 7, 9]))) == [[7, 40], [9]]


def test_owners_secret_release_follows_from_the_name():
    def slots(names):
        owners = grouped(names)
        drawn = [weights_of_owners(bytes(32), bytes(16), owners.mark_bytes, 7, k) for k in range(1, 8)]
        assert (np.sum(drawn, axis=0) == 1).all()
        return dict(zip(owners.mark_bytes, np.argmax(drawn, axis=0).tolist(), strict=True))

    many, few = slots(np.arange(700)), slots(np.arange(0, 700, 3))
    assert few.items() < many.items()
    assert (np.bincount(list(many.values()), minlength=7) > 60).all()  # of a fixed key


def digest(names, key=b"k", **options):
    return OwnersDigest(key, grouped(names, **options))


def test_a_ledger_without_a_digest_goes_on_with_owners():
    digest(NAMES).check(3, "", 50)
    with pytest.raises(LedgerError):
        digest(NAMES).check(3, "samples", 50)


def test_owners_are_known_by_a_digest_that_has_no_other_use():
    known = hashlib.blake2b(b"ann", key=SECRET, digest_size=16, person=b"murmurfl owner").digest()
    assert known in grouped(np.array(["ann"])).mark_bytes


def test_a_ledger_knows_owners_by_their_names_wherever_their_rows_are():
    names = np.repeat(np.arange(60), 3)
    known = digest(names).of(20)
    moved = np.random.Generator(np.random.Philox(key=2)).permutation(np.append(names, [5, 5, 61, 62, 63]))
    digest(moved).check(20, known, 50)
    digest(names[::3]).check(20, known, 50)  # fewer rows of everybody
    assert digest(moved[moved < 60]).of(20) == known
    assert digest(names).of(0) == ""


@pytest.mark.parametrize(
    "changed",
    [
        digest(np.arange(60) + 1000),
        digest(np.array([f"{i:03}" for i in range(60)])),  # the same numbers, written in another way
        digest(np.arange(60), places=51),
        digest(np.arange(60), most=4),
        digest(np.arange(60), secret=bytes(32)),
        digest(np.arange(60), key=b"another"),
        DataDigest(b"k", row_bytes(range(60))),
    ],
    ids=["new names", "written anew", "places", "most", "secret", "key", "samples"],
)
def test_other_names_places_and_keys_are_found(changed):
    owners = digest(np.arange(60))
    with pytest.raises(LedgerError, match="Nothing was released"):
        changed.check(50, owners.of(50), 50)
    owners.check(50, owners.of(50), 50)
    with raises(LedgerError, "mismatch", "owners"):
        owners.check(50, changed.of(50), 50)


def test_only_owners_of_unused_places_may_go():
    names = np.arange(60)
    places = where(names, grouped(names))
    known = digest(names).of(20)
    digest(np.array([name for name in names if places[name] < 20])).check(20, known, 50)
    with pytest.raises(LedgerError):
        digest(np.delete(names, [name for name in names if places[name] < 20][3])).check(20, known, 50)


def test_what_is_kept_of_very_many_owners_is_short():
    many = digest(np.arange(9000))
    assert len(many.of(50)) < 33_000
    many.check(50, many.of(50), 50)
    with pytest.raises(LedgerError):
        digest(np.arange(9000) + 9000).check(50, many.of(50), 50)


def test_places_and_used_owners_outlive_the_noise_key(tmp_path):
    """Keys are the system's: of 400 owners none is in the two places used with probability 0.9^400, under 1e-18."""
    path, names = tmp_path / "ledger.sqlite", np.repeat(np.arange(400), 2)
    ledger = SQLiteLedger.create(path, budget_mu=3.0, delta=1e-5)
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, budget_mu=3.0, mechanism="independent", samples_per_owner=2)

    def client(names=names):
        ledger = SQLiteLedger(path)
        keys = ledger.keys()
        owners = Owners.of(names, 2, secret=ledger.secret_of_owners(keys), places=20)
        return Privatizer(policy, 1, 20, ledger, keys, data=owners), owners

    one, owners = client()
    seen = []
    one.release("s", 0, lambda rows: seen.append(rows) or np.ones((1, 1)))
    assert {row for part in seen for row in range(part.start, part.stop)} == set(range(owners.in_places(slice(2)).stop))
    key, secret = ledger.keys().secret_key, ledger.secret_of_owners(ledger.keys())
    rotate_key(path, one.row_bytes, one.num_rows)
    again, same = client(np.random.Generator(np.random.Philox(key=2)).permutation(names))
    assert (same.marks == owners.marks).all()
    assert SQLiteLedger(path).keys().secret_key != key
    assert SQLiteLedger(path).secret_of_owners(SystemKeys.generate()) == secret
    again.check_data()
    with raises(LedgerError, "mismatch", "owners"):
        client(names + 1000)[0].check_data()
    keys = SystemKeys.generate()
    assert MemoryLedger().secret_of_owners(keys) == MemoryLedger().secret_of_owners(keys) != keys.secret_key


def test_a_real_client_has_no_owners_in_an_order_of_their_own():
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    for data in (Owners.in_turn(80, 2), Owners.one_each(np.arange(40), 2, secret=SECRET), row_bytes(range(40))):
        with raises(ConfigurationError, "mismatch", "data"):
            Privatizer(policy, 1, 40, DurableLedger(), SystemKeys.generate(), data=data)
    placed = grouped(np.arange(40), 2)
    Privatizer(policy, 1, 40, DurableLedger(), SystemKeys.generate(), data=placed)  # the places behind are set aside
    with raises(ConfigurationError, "mismatch", "num_samples", match="50, the places of owners, got 51"):
        Privatizer(policy, 1, 51, DurableLedger(), SystemKeys.generate(), data=placed)


def test_clients_of_owners_in_places_are_in_no_block():
    """Whose clients have as many rows each; a simulation's owners have a place each."""
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    names = np.arange(40)

    def client(owners):
        return Privatizer(policy, 1, 40, MemoryLedger(), SimulatedKeys(1, "m"), data=owners)

    alone, placed = client(Owners.one_each(names, 2, secret=SECRET)), client(grouped(names, 2, places=40))
    PrivatizerBlock.of([alone, alone.alike(40, MemoryLedger(), SimulatedKeys(1, "n"))])
    for attempt in (
        lambda: PrivatizerBlock.of([placed]),
        lambda: placed.alike(40, MemoryLedger(), SimulatedKeys(1, "n")),
    ):
        with raises(ConfigurationError, "mismatch", match="Expected owners with a place each"):
            attempt()


def test_sums_are_exact_if_all_owners_are_in_one_batch():
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    assert policy.plan(3).largest_value > 2**20 / 2 > PrivacyPolicy(1.0, 2, 5, mu=1.0).plan(3).largest_value


def test_a_policy_of_owners_says_so_and_clips_rows_of_gradients():
    policy = PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4)
    said = policy_guarantee(policy, policy.plan(5).mu)
    assert said.unit == "owner"
    assert "for replacement of all samples of one owner on one client" in said.sentence
    assert "up to 4 samples of an owner clipped together" in said.sentence
    assert "whether one owner's samples on a client were used" in said.meaning
    assert policy_guarantee(PrivacyPolicy(1.0, 2, 3, mu=1.0), 1.0).unit == "sample"
    with raises(ConfigurationError, "conflict", "clip_unit", got="update"):
        PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4, clip_unit="update")
    for wrong in (-1, True, 1.5):
        with raises(ConfigurationError, "out-of-range", "samples_per_owner"):
            PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=wrong)


def test_a_session_keeps_its_samples_per_owner():
    plain, owned = (PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=most) for most in (0, 4))
    assert plain.plan(5).fingerprint != owned.plan(5).fingerprint
    assert "samples_per_owner" not in plain.terms(5)  # as in the terms of sessions that were begun without owners
    assert '"samples_per_owner": 4' in owned.terms(5)


def test_a_persons_figure_says_what_it_needs():
    assert person_loss(0.0, clients=3).mu == 0.0
    for wrong, complaint in (
        ({"clients": 0}, "clients"),
        ({"samples": 1.5}, "samples"),
        ({"trust": "secure-aggregation"}, "Expected a worst case under secure aggregation"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            person_loss(1.0, **wrong)
    with raises(ConfigurationError, "out-of-range", "mu"):
        person_loss(-1.0)


SLOTS = 10
HIDDEN = {
    "batch_selection": "shuffled",
    "mechanism": "independent",
    "max_participations": SLOTS,
    "batch_size": 20,
    "mu": 2.0,
}
KEY, NONCE = b"k" * 32, b"n" * 16
CLIPPED = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA


def without_noise(mechanism="independent", **changes):
    """What the releases of a simulated client are made of: the same keys on data that are all zero take noise out."""
    subject, empty = (client(**{**HIDDEN, "mechanism": mechanism, **changes}) for _ in range(2))
    pairs = [(subject.release("s", k, contribution), empty.release("s", k, zero)) for k in range(SLOTS)]
    return np.array([made.values - noise.values for made, noise in pairs])


def test_every_sample_is_in_one_bounded_release():
    slots = slots_of(SimulatedKeys(1, "m").secret_key, SimulatedKeys(1, "m").nonce("s", 0), len(DATA), SLOTS)
    expected = np.array([CLIPPED[slots == k].sum(axis=0) / 20 for k in range(1, SLOTS + 1)])
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
    with raises(ConfigurationError, "wrong-shape", "secret_key", match=f"got {len(key)} and {len(nonce)}"):
        slots_of(key, nonce, 50, SLOTS)


def test_every_release_computes_all_samples():
    asked = []

    def counting(samples):
        asked.append((samples.start, samples.stop))
        return contribution(samples)

    subject = client(ledger=DurableLedger(), keys=SystemKeys(KEY), **HIDDEN)
    for k in range(2):
        asked.clear()
        assert subject.release("s", k, counting).samples == 20, "the constant b, whatever is in it"
        assert asked == [(i, i + 1) for i in range(200)]


def test_a_failing_sample_shows_in_no_secret_release():
    def failing(samples):
        if samples.start in (3, 7):
            raise ValueError("of this sample")
        return contribution(samples)

    subject = client(ledger=DurableLedger(), keys=SystemKeys(KEY), **HIDDEN)
    assert [subject.release("s", k, failing).release for k in range(SLOTS)] == list(range(1, SLOTS + 1))


def test_secret_order_outlives_a_restart():
    ledger = DurableLedger()
    client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN).admits("s", 0)
    assert ledger.stream("s") is None, "nothing is recorded before a release"
    client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN).release("s", 0, contribution)
    drawn = ledger.stream("s").order
    assert len(drawn) == 16
    client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN).release("s", 1, contribution)
    assert ledger.stream("s").order == drawn


def test_two_clients_and_two_sessions_never_share_an_order():
    def drawn(session, key):
        ledger = DurableLedger()
        client(ledger=ledger, keys=SystemKeys(key), **HIDDEN).release(session, 0, contribution)
        return ledger.stream(session).order

    assert len({drawn("s", KEY), drawn("s", KEY), drawn("t", KEY)}) == 3
    simulated = [SimulatedKeys(1, "m").nonce(session, 0) for session in "st"]
    assert simulated[0] != simulated[1]
    assert SimulatedKeys(1, "m").nonce("s", 1) not in simulated, "no release has the order's nonce"


class Watched(Privatizer):
    """Notes the order that each contribution is computed for."""

    def _weights(self, admission):
        self.computed = [*getattr(self, "computed", []), admission.streams.order[0]]
        return super()._weights(admission)


def test_gradients_are_recorded_for_the_order_they_had():
    """A request is admitted before the gradients are computed and again when they are recorded."""
    ledger, policy = DurableLedger(), client(**HIDDEN).policy
    subject = Watched(policy, D, len(DATA), ledger, SystemKeys(KEY), data=row_bytes(DATA))
    for k in range(3):
        subject.release("s", k, contribution)
    assert set(subject.computed) == {ledger.stream("s").order}


def test_an_order_lies_on_the_disk_and_is_found_there_again(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=2.0, delta=1e-5)
    policy = client(**HIDDEN).policy
    rows = row_bytes(DATA)
    Privatizer(policy, D, len(DATA), ledger, ledger.keys(), data=rows).release("s", 0, contribution)
    with SQLiteLedger(tmp_path / "ledger.sqlite").exclusive() as page:
        drawn = page.stream("s").order
    assert len(drawn) == 16
    again = SQLiteLedger(tmp_path / "ledger.sqlite")
    Privatizer(policy, D, len(DATA), again, again.keys(), data=rows).release("s", 1, contribution)
    with again.exclusive() as page:
        assert page.stream("s").order == drawn


@pytest.mark.parametrize("selection", ["cyclic", "full_batch", "shuffled"])
def test_samples_of_a_secret_order_are_in_no_other_session(selection):
    ledger = DurableLedger()
    client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN, budget_mu=9.0).release("s", 0, contribution)
    other = {**HIDDEN, "batch_selection": selection, "batch_size": 1, "max_participations": 2}
    subject = client(ledger=ledger, keys=SystemKeys(KEY), **other, budget_mu=9.0)
    refused(protocol.SAMPLES_USED_UP, subject, "t", 0)
    with ledger.exclusive() as transaction:  # a damaged ledger, which no longer tells what the order was
        transaction.commit("s", StreamRecord(""), transaction.account())
    refused(protocol.SAMPLES_USED_UP, subject, "t", 0)


def test_used_samples_join_no_secret_order():
    ledger = DurableLedger()
    with ledger.exclusive() as transaction:
        transaction.commit("s", StreamRecord(""), Account(samples_used=1))
    refused(protocol.SAMPLES_USED_UP, client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN), "s", 0)


def test_other_orders_are_refused_after_a_secret_order():
    ledger = DurableLedger()
    client(ledger=ledger, keys=SystemKeys(KEY), **HIDDEN, budget_mu=9.0).release("s", 0, contribution)
    turn = client(ledger=ledger, keys=SystemKeys(KEY), budget_mu=9.0)
    refused(protocol.SAMPLES_USED_UP, turn, "t", 0)
    passes = {"sample_participations": 2, "min_separation": 10}
    refused(protocol.SAMPLES_USED_UP, client(ledger=ledger, keys=SystemKeys(KEY), budget_mu=9.0, **passes), "u", 0)


def test_added_rows_used_elsewhere_join_no_secret_order():
    ledger, seen = DurableLedger(), []

    def watched(samples):
        seen.append(samples.stop)
        return DATA[samples]

    def started(rows, **policy):
        return client(ledger=ledger, keys=SystemKeys(KEY), num_samples=rows, budget_mu=9.0, **policy)

    started(100, **HIDDEN).release("s", 0, contribution)
    started(150, **HIDDEN).release("s", 1, watched)
    assert max(seen) == 150, "added rows join the order while they are in no other session"
    started(200).release("t", 0, contribution)  # in turn, of rows that were added
    refused(protocol.SAMPLES_USED_UP, started(200, **HIDDEN), "s", 2)


def test_stopping_early_and_asking_too_often_change_nothing():
    subject = client(**HIDDEN)
    for k in range(SLOTS):
        subject.release("s", k, contribution)
    assert subject.statement("s").mu_spent == subject.statement("s").guaranteed.mu
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.release("s", SLOTS, contribution)


def test_a_ledger_that_lost_an_order_is_damaged():
    class Forgetful(DurableLedger):
        def stream(self, session):
            stream = super().stream(session)
            if stream is not None:
                object.__setattr__(stream, "order", b"")
            return stream

    subject = client(ledger=Forgetful(), keys=SystemKeys(KEY), **HIDDEN)
    subject.release("s", 0, contribution)
    with raises(LedgerError, "damaged", match="secret order"):
        subject.release("s", 1, contribution)


def test_a_trusted_server_and_samples_that_return_have_no_secret_order():
    policy = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 3, "mu": 1.0, "batch_selection": "shuffled"}
    with raises(ConfigurationError, "conflict", "batch_selection", match="trusted server"):
        PrivacyPolicy(**policy, trust="trusted-server")
    with raises(ConfigurationError, "conflict", "sample_participations", match="sample_participations 1"):
        PrivacyPolicy(**policy, sample_participations=2, min_separation=2)
    with raises(ConfigurationError, "conflict", "clip_unit"):
        PrivacyPolicy(**policy, clip_unit="update")
    with raises(ConfigurationError, "wrong-shape", "secret_key", match="32 bytes"):
        slots_of(b"short", NONCE, 5, 2)
    assert D == 6


WIDTH, NUM_ROWS = 3, 40
TABLE = np.arange(2.0 * NUM_ROWS).reshape(NUM_ROWS, 2)


@pytest.fixture
def path(tmp_path):
    SQLiteLedger.create(tmp_path / "ledger", budget_mu=3.0, delta=1e-5)
    return tmp_path / "ledger"


def start(path, data=TABLE, known=None, **changes):
    """A client as after a start of its node."""
    settings = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 4, "mu": 1.0, "budget_mu": 3.0, **changes}
    ledger = SQLiteLedger(path)
    known = row_bytes(data) if known is None else known
    return Privatizer(PrivacyPolicy(**settings), WIDTH, len(data), ledger, ledger.keys(), data=known)


def release(privatizer, session="s", times=1):
    for _ in range(times):
        privatizer.release(session, privatizer.statement(session).releases, lambda samples: np.ones((1, WIDTH)))


def changed(rows, value=-1.0):
    data = TABLE.copy()
    data[rows] = value
    return data


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("session", ["s", "another"])
@pytest.mark.parametrize(
    "data",
    [
        changed(0),
        changed(3),
        TABLE[::-1],
        np.roll(TABLE, 1, axis=0),
        TABLE[[1, 0, *range(2, NUM_ROWS)]],
        TABLE.astype(np.float32),
        TABLE[:, :1],
        TABLE + 1e-12,
    ],
    ids=["first", "last used", "reversed", "moved by one", "two exchanged", "narrower", "fewer columns", "a little"],
)
def test_changed_or_moved_used_rows_are_refused(path, data, session):
    release(start(path), times=2)
    before = read_ledger(path)
    with raises(LedgerError, "mismatch", "data", match="Put the data back") as refused:
        release(start(path, data), session)
    assert "4 rows" in str(refused.value)
    assert "ledger create" in str(refused.value)
    assert read_ledger(path) == before, "nothing was spent"
    release(start(path), session)  # put back, it goes on


def test_unused_rows_may_change_and_new_ones_come(path):
    release(start(path), times=2)
    release(start(path, changed(slice(4, NUM_ROWS))), times=1)
    with raises(LedgerError, "mismatch", "data", match="6 rows"):
        release(start(path))  # rows 4 and 5 were used as they were then
    grown = np.concatenate([changed(slice(4, NUM_ROWS)), TABLE])
    release(start(path, grown), times=1)


def test_data_with_fewer_rows_than_were_used_are_refused(path):
    release(start(path), times=4)
    with raises(LedgerError, "wrong-shape", "data", match="8 rows .* got data of 6"):
        release(start(path, TABLE[:6], max_participations=3), "another")


def test_other_data_of_another_process_are_noticed(path):
    """Two processes on one ledger, one of them with a rewritten file: the other refuses from then on."""
    ours, theirs = start(path), start(path, changed(slice(2, 4)))
    release(ours)
    release(theirs)
    with raises(LedgerError, "mismatch", "data", match="4 rows"):
        release(ours)


def test_samples_that_return_are_known_as_well(path):
    passes = {"sample_participations": 2, "min_separation": 2, "max_participations": 4}
    release(start(path, **passes), times=3)
    with raises(LedgerError, "mismatch", "data", match="Put the data back"):
        release(start(path, changed(3), **passes))
    release(start(path, changed(4), **passes))


def test_a_used_row_is_hashed_once(path):
    seen = []

    def counted(data):
        known = row_bytes(data)
        return lambda row: seen.append(row) or known(row)

    ledger = SQLiteLedger(path)
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=4, mu=1.0, budget_mu=3.0)
    privatizer = Privatizer(policy, WIDTH, NUM_ROWS, ledger, ledger.keys(), data=counted(TABLE))
    release(privatizer, times=4)
    assert seen == [0, *range(8)], "the first one is looked at when the client is made"
    seen.clear()
    again = Privatizer(policy, WIDTH, NUM_ROWS, ledger, ledger.keys(), data=counted(TABLE))
    again.check_data()
    release(again, "t", times=2)
    assert seen == [0, *range(12)]


def test_the_digest_of_rows_is_the_one_it_was():
    """Another one would make every ledger refuse the data that it was used with."""
    digest = DataDigest(bytes(32), row_bytes(TABLE))
    assert [digest.of(0), digest.of(2)] == ["", "b3a1fc4a234d1fcfa5ae7ac5ff098c0c"]


def test_ledger_holds_only_a_keyed_digest_of_data(path):
    release(start(path))
    with closing(sqlite3.connect(path)) as connection:
        ((digest,),) = connection.execute("SELECT data FROM state").fetchall()
    keys = SQLiteLedger(path).keys()
    assert DataDigest(keys.secret_key, row_bytes(TABLE)).of(2) == digest
    assert DataDigest(bytes(32), row_bytes(TABLE)).of(2) != digest
    assert json.loads((path.parent / "ledger.mark").read_text())["data"] == digest


def test_unreadable_row_is_known_and_raises_nothing(path):
    class Failing:
        def __init__(self, bad):
            self.bad = bad

        def __len__(self):
            return NUM_ROWS

        def __getitem__(self, rows):
            if rows.start == self.bad:
                raise OSError("bad sector with private words")
            return TABLE[rows]

    release(start(path, Failing(1)), times=2)
    release(start(path, Failing(1)))
    with raises(LedgerError, "mismatch", "data", match="Put the data back"):
        release(start(path))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(1), np.zeros(1, np.int64)),
        (("ab", "c"), ("a", "bc")),
        ((1, "1"), ("1", 1)),
        ([b"x", None], [b"x"]),
        ({"a": 1.0}, {"a": 2.0}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ((np.ones(2), [np.zeros(1)]), (np.ones(2), np.zeros(1))),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (0.0, -0.0),
    ],
)
def test_different_rows_are_known_by_different_bytes(one, other):
    known, different = (row_bytes(_Row(value))(0) for value in (one, other))
    assert known != different
    assert known == row_bytes(_Row(one))(0)


class _Row:
    def __init__(self, value):
        self.value = value

    def __getitem__(self, rows):
        return self.value


def test_torch_tensors_are_known_by_their_values():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    assert row_bytes(_Row(tensor))(0) == row_bytes(_Row(np.ones(2, np.float32)))(0)


def test_only_a_real_client_needs_its_rows_digest(path):
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=4, mu=1.0, budget_mu=3.0)
    ledger = SQLiteLedger(path)
    with raises(ConfigurationError, "missing", "data"):
        Privatizer(policy, WIDTH, NUM_ROWS, ledger, SystemKeys(bytes(32)))
    simulated = Privatizer(policy, WIDTH, NUM_ROWS, ledger, SimulatedKeys(1, "a"), data=None)
    simulated.release("s", 0, lambda samples: np.ones((2, WIDTH)))
    assert simulated.statement("s").releases == 1


def test_a_rollback_that_is_accepted_keeps_the_digest_of_what_was_used(path):
    release(start(path), times=1)
    backup = path.read_bytes()
    release(start(path), times=2)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(backup)
    accept_rollback(path)
    with raises(LedgerError, "mismatch", "data", match="6 rows"):
        release(start(path, changed(5)), "t")
    release(start(path), "t")


def test_ledger_of_any_data_knows_rows_from_the_next_release(path):
    release(start(path, known=any_data), times=2)
    assert read_ledger(path).samples_used == 4
    release(start(path))
    with raises(LedgerError, "mismatch", "data", match="6 rows"):
        release(start(path, changed(0)))


def test_a_session_with_another_versions_noise_is_refused(path):
    release(start(path))
    ledger = SQLiteLedger(path)
    with ledger.exclusive() as page:
        stream, account = page.stream("s"), page.account()
        terms = json.loads(stream.terms)
        terms["noise_version"] += 1
        old = type(stream)("another fingerprint", stream.release, stream.ack, terms=json.dumps(terms))
        page.commit("s", old, account)
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="noise of another version of murmurfl"):
        release(start(path))
    release(start(path), "t")


def test_unrecognisable_rows_are_reported_in_the_clients_log(path, caplog):
    class Unknowable:
        def __len__(self):
            return NUM_ROWS

        def __getitem__(self, rows):
            return (row for row in TABLE[rows])

    release(start(path, Unknowable()))
    assert "nobody will notice" in caplog.text


def test_unreadable_part_leaves_the_others_known(path):
    known = [row_bytes(_Row({"x": np.full(2, value), "how": lambda: None}))(0) for value in (1.0, 2.0)]
    assert known[0] != known[1]


def test_tensors_numpy_has_no_type_for_are_known_by_their_bytes():
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(values) for values in ([1.0, 2.0], [1.0, 3.0])]
    for kind in (lambda tensor: tensor.to(torch.bfloat16), torch.Tensor.to_sparse):
        one, other = (row_bytes(_Row(kind(tensor)))(0) for tensor in tensors)
        assert one != other
    masked = [row_bytes(_Row(np.ma.masked_array([1.0, 2.0], mask=mask)))(0) for mask in ([0, 0], [0, 1])]
    assert masked[0] != masked[1]


def test_a_rollback_before_any_row_keeps_the_marks_digest(path):
    """With samples that return, both know of as many used rows; only the mark has their digest."""
    passes = {"sample_participations": 2, "min_separation": 2, "max_participations": 4}
    release(start(path, known=any_data, **passes), times=2)
    backup = path.read_bytes()
    release(start(path, **passes))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(backup)
    accept_rollback(path)
    with raises(LedgerError, "mismatch", "data", match="Put the data back"):
        release(start(path, changed(0)), "t")
