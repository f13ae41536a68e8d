"""Rows of data by owner: who is where, what is kept of whom, and that nobody changes another's row or place."""

import hashlib

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    Owners,
    PrivacyPolicy,
    PrivateMachine,
    SimulatedKeys,
    SQLiteLedger,
    SystemKeys,
    person_mu,
    policy_guarantee,
    rotate_key,
    row_bytes,
)
from murmurfl.privacy.machine.known_samples import DataDigest, OwnersDigest, weights_of_owners
from murmurfl.privacy.machine.machine_block import MachineBlock

from tests.harness.machines import DurableLedger

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
    with pytest.raises(ConfigurationError, match="most"):
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


@pytest.mark.parametrize("names", [np.array([0.5, 0.5]), np.zeros((2, 2), int), np.array([], int)])
def test_anything_else_is_refused_without_a_word_of_any_row(names):
    with pytest.raises(ConfigurationError, match="Expected one owner a row, integers or texts") as refused:
        grouped(names)
    assert "0.5" not in str(refused.value)


def test_secrets_and_places_must_be_possible():
    for secret in (b"short", bytes(65)):
        with pytest.raises(ConfigurationError, match="Expected a secret of 16 to 64 bytes"):
            grouped(NAMES, secret=secret)
    for places in (0, 1.5):
        with pytest.raises(ConfigurationError, match="places"):
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


def test_the_release_of_an_owner_in_a_secret_order_is_the_names_alone():
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
    with pytest.raises(LedgerError, match="these were samples"):
        owners.check(50, changed.of(50), 50)


def test_who_is_in_places_that_were_not_used_may_go_and_nobody_else():
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


@pytest.mark.usefixtures("quick_disk")
def test_places_and_used_owners_outlive_the_noise_key(tmp_path):
    """Keys are the system's: of 400 owners none is in the two places used with probability 0.9^400, under 1e-18."""
    path, names = tmp_path / "ledger.sqlite", np.repeat(np.arange(400), 2)
    ledger = SQLiteLedger.create(path, budget_mu=3.0, delta=1e-5)
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, budget_mu=3.0, mechanism="independent", samples_per_owner=2)

    def machine(names=names):
        ledger = SQLiteLedger(path)
        keys = ledger.keys()
        owners = Owners.of(names, 2, secret=ledger.secret_of_owners(keys), places=20)
        return PrivateMachine(policy, 1, 20, ledger, keys, data=owners), owners

    one, owners = machine()
    seen = []
    one.release("s", 0, lambda rows: seen.append(rows) or np.ones((1, 1)))
    assert {row for part in seen for row in range(part.start, part.stop)} == set(range(owners.in_places(slice(2)).stop))
    key, secret = ledger.keys().secret_key, ledger.secret_of_owners(ledger.keys())
    rotate_key(path, one.row_bytes, one.num_rows)
    again, same = machine(np.random.Generator(np.random.Philox(key=2)).permutation(names))
    assert (same.marks == owners.marks).all()
    assert SQLiteLedger(path).keys().secret_key != key
    assert SQLiteLedger(path).secret_of_owners(SystemKeys.generate()) == secret
    again.check_data()
    with pytest.raises(LedgerError, match="in them everybody who was used"):
        machine(names + 1000)[0].check_data()
    keys = SystemKeys.generate()
    assert MemoryLedger().secret_of_owners(keys) == MemoryLedger().secret_of_owners(keys) != keys.secret_key


def test_a_real_machine_has_no_owners_in_an_order_of_their_own():
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    for data in (Owners.in_turn(80, 2), Owners.one_each(np.arange(40), 2, secret=SECRET), row_bytes(range(40))):
        with pytest.raises(ConfigurationError, match="Expected the owners' places on a real machine to follow from"):
            PrivateMachine(policy, 1, 40, DurableLedger(), SystemKeys.generate(), data=data)
    with pytest.raises(ConfigurationError, match="Expected num_samples = 50, the places of owners, got 40"):
        PrivateMachine(policy, 1, 40, DurableLedger(), SystemKeys.generate(), data=grouped(np.arange(40), 2))


def test_machines_of_owners_in_places_are_in_no_block():
    """Whose machines have as many rows each; a simulation's owners have a place each."""
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    names = np.arange(40)

    def machine(owners):
        return PrivateMachine(policy, 1, 40, MemoryLedger(), SimulatedKeys(1, "m"), data=owners)

    alone, placed = machine(Owners.one_each(names, 2, secret=SECRET)), machine(grouped(names, 2, places=40))
    MachineBlock.of([alone, alone.alike(40, MemoryLedger(), SimulatedKeys(1, "n"))])
    for attempt in (lambda: MachineBlock.of([placed]), lambda: placed.alike(40, MemoryLedger(), SimulatedKeys(1, "n"))):
        with pytest.raises(ConfigurationError, match="Expected owners with a place each"):
            attempt()


def test_sums_are_exact_if_all_owners_are_in_one_batch():
    policy = PrivacyPolicy(1.0, 2, 5, mu=1.0, mechanism="independent", samples_per_owner=2)
    assert policy.plan(3).largest_value > 2**20 / 2 > PrivacyPolicy(1.0, 2, 5, mu=1.0).plan(3).largest_value


def test_a_policy_of_owners_says_so_and_clips_rows_of_gradients():
    policy = PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4)
    said = policy_guarantee(policy, policy.plan(5).mu)
    assert said.unit == "owner"
    assert "for replacement of all samples of one owner on one machine" in said.sentence
    assert "up to 4 samples of an owner clipped together" in said.sentence
    assert "whether one owner's samples on a machine were used" in said.meaning
    assert policy_guarantee(PrivacyPolicy(1.0, 2, 3, mu=1.0), 1.0).unit == "sample"
    with pytest.raises(ConfigurationError, match="Expected clip_unit 'sample' with samples_per_owner, got 'update'"):
        PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4, clip_unit="update")
    for wrong in (-1, True, 1.5):
        with pytest.raises(ConfigurationError, match="Expected samples_per_owner to be an integer >= 0"):
            PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=wrong)


def test_a_session_keeps_its_samples_per_owner():
    plain, owned = (PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=most) for most in (0, 4))
    assert plain.plan(5).fingerprint != owned.plan(5).fingerprint
    assert "samples_per_owner" not in plain.terms(5)  # as in the terms of sessions that were begun without owners
    assert '"samples_per_owner": 4' in owned.terms(5)


def test_a_persons_figure_says_what_it_needs():
    assert person_mu(0.0, machines=3) == 0.0
    for wrong, complaint in (
        ({"machines": 0}, "machines"),
        ({"samples": 1.5}, "samples"),
        ({"trust": "secure-aggregation"}, "Expected mu_local under secure aggregation"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            person_mu(1.0, **wrong)
    with pytest.raises(ConfigurationError, match="Expected mu >= 0"):
        person_mu(-1.0)
