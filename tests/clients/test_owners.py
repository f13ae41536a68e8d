"""Clients whose rows are owners: what one owner can move, what an observer sees, and what the ledger knows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient, Mu2Client, NoisySGDClient, OwnedSamples, OwnerGradients
from murmurfl.clients.messages import statement_entries
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    Owners,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    SystemKeys,
)
from murmurfl.privacy.audit import audit_client

from tests.clients.test_known_data import Mean
from tests.harness.clients import DurableLedger, training_config
from tests.harness.errors import raises

D, MOST = 3, 4
SECRET = b"a machine's own secret"
COMMON = {
    "clip_norm": 1.0,
    "max_participations": 5,
    "mu": 1.0,
    "mechanism": "independent",
    "samples_per_owner": MOST,
}
ALL = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}


def rows(count, key=3):
    return np.random.Generator(np.random.Philox(key=key)).normal(size=(count, D)) * 5


class Data:
    """Ten owners of 1 to 7 samples in ten places; what is owner 3's may be anything, and anywhere in the file."""

    def __init__(self, replaced=None):
        self.names = np.repeat(np.arange(10), 1 + np.arange(10) % 7)
        self.values = rows(len(self.names))
        if replaced is not None:
            others = self.names != 3
            names, values = [self.names[others], self.values[others]]
            places = np.random.Generator(np.random.Philox(key=9)).integers(0, len(names) + 1, len(replaced))
            self.names = np.insert(names, places, np.full(len(replaced), 3))
            self.values = np.insert(values, places, replaced, axis=0)

    def owned(self, most=MOST, secret=SECRET, places=10):
        return OwnedSamples((self.values,), Owners.of(self.names, most, secret=secret, places=places))

    def means(self, most=MOST, at=0.25):
        """What each owner contributes, by name: of half the squared distance, clipped to 1."""
        made = np.array([at - self.values[self.names == owner][:most].mean(axis=0) for owner in range(10)])
        return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1.0)


def places_of(samples, names):
    """Each owner's place, by name."""
    owners = samples.owners
    return dict(zip(names[owners.rows[owners.ends - 1]].tolist(), owners._place.tolist(), strict=True))


REPLACED = {
    "one sample": rows(1, key=4),
    "as many as are used": rows(MOST, key=5) * 1e6,
    "far more than are used": rows(50, key=6),
    "samples that fail": np.full((9, D), np.nan),
    "all in one direction": np.full((MOST, D), -1e200),
}


def gradients():
    """Half the squared distance to the sample, of owners."""

    class Pairs(Mean):
        def __call__(self, parameters, samples):
            return super().__call__(parameters, samples[0])

    return OwnerGradients(Pairs())


def make_client(kind, samples, policy, ledger=None, keys=None):
    ledger, keys = ledger or MemoryLedger(), keys or SimulatedKeys(1, "m")
    return kind(gradients(), samples, policy, ledger, keys, name="m")


def contributions(samples, kind=NoisySGDClient, **changes):
    """What a client releases where nothing is added to it, release after release."""
    policy = PrivacyPolicy(**{**COMMON, "batch_size": 2, "mechanism": "none", **changes})
    client, made = make_client(kind, samples, policy), []
    points = [np.full(D, 0.25)] * kind.query_points
    for k in range(1, policy.max_participations + 1):
        entries = training_config(k, k - 1 if policy.release_rule == "acknowledged" else 0)
        made.append(client.fit(points, entries)[0][0])
    return np.array(made), policy


def test_an_owners_row_is_the_mean_over_the_owners_samples_and_clipped_once():
    made, _ = contributions(Data().owned(), release_rule="paper")
    expected = np.zeros((5, D))
    for owner, place in places_of(Data().owned(), Data().names).items():
        expected[place // 2] += Data().means()[owner] / 2  # whoever falls into a batch, over the public b
    assert np.allclose(made, expected, atol=1e-6)
    assert len(set(places_of(Data().owned(), Data().names).values())) < 10  # several in a place, and none in others


@pytest.mark.parametrize("selection", ["once", "full_batch", "shuffled"])
def test_a_real_client_adds_whoever_falls_into_a_batch_over_the_public_number(selection):
    """What is made before noise, of clients with keys of their own and other secrets."""
    data, means = Data(), Data().means()
    for number in range(20):
        samples = data.owned(secret=bytes([number]) * 16, places=8)
        own = {
            "batch_size": 1 if selection == "full_batch" else 2,
            "max_participations": 4,
            "batch_selection": selection,
        }
        own |= {"noise_quality": "exact", "release_rule": "paper" if selection == "shuffled" else "acknowledged"}
        policy = PrivacyPolicy(**{**COMMON, **own})
        privatizer = make_client(NoisySGDClient, samples, policy, DurableLedger(), SystemKeys.generate()).privatizer
        made = []
        whole = privatizer._contribution_counts

        def kept(*arguments, made=made, whole=whole):
            made.append(whole(*arguments))
            return made[-1].copy()  # noise is added to it

        privatizer._contribution_counts = kept

        def contribution(chosen, samples=samples):
            assert chosen.stop - chosen.start == 1
            return gradients()([np.full(D, 0.25)], samples[chosen])

        counted = [privatizer.release("s", k, contribution).samples for k in range(4)]
        assert counted == [8 if selection == "full_batch" else 2] * 4
        found, places = privatizer.plan.grid.values(np.array(made)), places_of(samples, data.names)
        batches = np.zeros((4, D))
        for owner, place in places.items():
            batches[place // 2] += means[owner] / 2
        if selection == "once":
            assert np.allclose(found, batches, atol=1e-4)
        else:
            assert np.allclose(
                found.sum(axis=0), batches.sum(axis=0) * (8 if selection == "full_batch" else 1), atol=1e-4
            )


def test_an_owner_without_fitting_samples_counts_as_zero():
    data, point = Data(), [np.full(D, 0.25)]
    fits = data.names != 3
    fits[np.flatnonzero(data.names == 4)[0]] = False
    samples = data.owned()
    some = OwnedSamples((data.values,), samples.owners, fits)
    made, all_of_them = (gradients()(point, part[0:10]) for part in (some, samples))
    numbers = {name: row for row, name in enumerate(places_of(samples, data.names))}
    assert (made[numbers[3]] == 0).all()
    assert np.allclose(made[numbers[4]], 0.25 - data.values[data.names == 4][1:MOST].mean(axis=0))
    others = [row for name, row in numbers.items() if name not in (3, 4)]
    assert (made[others] == all_of_them[others]).all()
    with raises(ConfigurationError, "out-of-range", "arrays"):
        OwnedSamples((data.values,), samples.owners, fits[:3])


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    samples, point = Data().owned(), [np.full(D, 0.3)]
    together = gradients()(point, samples[0:10])
    assert (together == np.concatenate([gradients()(point, samples[i : i + 1]) for i in range(10)])).all()
    monkeypatch.setattr("murmurfl.clients.records.client_records._MOST_VALUES", 3 * MOST * D)
    assert (together == gradients()(point, samples[0:10])).all()


def moved(kind, replaced, **changes):
    """By how much each release moves when everything of owner 3 is another's, and the bound of one release."""
    one, policy = contributions(Data().owned(), kind, **changes)
    other, _ = contributions(Data(replaced).owned(), kind, **changes)
    return np.linalg.norm(one - other, axis=1), policy.plan(D).sensitivity


@pytest.mark.parametrize("replaced", REPLACED.values(), ids=list(REPLACED))
def test_an_owner_moves_one_release_like_a_sample(replaced):
    distances, bound = moved(NoisySGDClient, replaced, release_rule="paper")
    place = places_of(Data().owned(), Data().names)[3]
    assert np.flatnonzero(distances).tolist() == [place // 2]
    assert distances.max() <= bound


@pytest.mark.parametrize("replaced", REPLACED.values(), ids=list(REPLACED))
def test_an_owner_moves_full_batches_like_a_sample(replaced):
    distances, bound = moved(FullBatchClient, replaced, **{**ALL, "mechanism": "none"})
    assert (distances <= bound).all()


def test_an_owners_samples_that_spill_into_anothers_row_are_caught(monkeypatch):
    """Planted: who has fewer samples than others gets the next rows, which are somebody else's."""

    def spilled(self, owners):
        starts = np.concatenate([[0], self.ends])[:-1][owners]
        numbers = np.minimum(starts[:, None] + np.arange(self.most), len(self.rows) - 1)
        return self.rows[numbers], np.ones(numbers.shape, dtype=bool)

    def changed():
        """How many rows are others if owner 3's samples are, under some secrets."""
        for number in range(8):
            parts = [data.owned(secret=bytes([number]) * 16)[0:10] for data in (Data(), Data(REPLACED["one sample"]))]
            one, other = (gradients()([np.zeros(D)], part) for part in parts)
            yield int((one != other).any(axis=1).sum())

    assert set(changed()) == {1}
    monkeypatch.setattr(Owners, "padded_rows", spilled)
    assert max(changed()) > 1


def test_samples_by_themselves_move_more_releases_and_further_than_is_claimed_of_owners():
    """Planted: the same noise and claim, of samples that nobody has grouped."""
    names = np.repeat(np.arange(10), MOST)
    values, others = rows(len(names)), rows(len(names))
    values[names == 3], others[names == 3] = 9.0, -9.0
    policy = {**COMMON, **ALL, "mechanism": "none", "samples_per_owner": 0}
    plain = [contributions(OneByOne(part), FullBatchClient, **policy)[0] for part in (values, others)]
    bound = PrivacyPolicy(**policy).plan(D).sensitivity
    assert np.linalg.norm(plain[0] - plain[1], axis=1).min() > 0.99 * MOST * bound


class OneByOne(OwnedSamples):
    """Every sample an owner of its own, and a client that does not say so."""

    samples_per_owner = 0

    def __init__(self, values):
        super().__init__((values,), Owners.in_turn(len(values), 1))


KINDS = {
    "batches": (Mu2Client, {"batch_size": 3, "max_participations": 3, "mechanism": "decay"}),
    "full batches": (FullBatchClient, ALL),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def seen(kind, samples, **changes):
    """Everything that an observer sees of a client until nothing is left, but for the values of releases."""
    made, policy = KINDS[kind]
    client, transcript = make_client(made, samples, PrivacyPolicy(**{**COMMON, **policy, **changes})), []
    points = [np.zeros(D), np.ones(D)][: made.query_points]
    for k in range(1, 12):
        try:
            arrays, examples, entries = client.fit(points, training_config(k, k - 1))
            quiet = {name: value for name, value in entries.items() if not name.startswith("training")}
            transcript.append(([array.shape for array in arrays], examples, quiet))
        except RefusedError as refusal:
            transcript.append((refusal.code, str(refusal)))
        transcript.append(statement_entries(client.privatizer, "s"))
    return transcript


@pytest.mark.few_cases(6)
@kinds
@pytest.mark.parametrize("replaced", REPLACED.values(), ids=list(REPLACED))
def test_an_observer_cannot_see_an_owners_sample_count(kind, replaced):
    assert seen(kind, Data(replaced).owned()) == seen(kind, Data().owned())


@kinds
def test_a_reply_is_the_same_however_many_owners_there_are(kind):
    few = Data()
    chosen = few.names < 4
    few.names, few.values = few.names[chosen], few.values[chosen]
    assert seen(kind, few.owned()) == seen(kind, Data().owned())


def test_a_client_that_counts_samples_would_show_how_many_an_owner_has():
    many, few = (OneByOne(data.values) for data in (Data(REPLACED["far more than are used"]), Data()))
    assert seen("full batches", many, samples_per_owner=0) != seen("full batches", few, samples_per_owner=0)


def test_a_policy_of_owners_and_samples_by_themselves_do_not_go_together():
    owned, plain = (
        PrivacyPolicy(**COMMON, batch_size=2),
        PrivacyPolicy(**{**COMMON, "samples_per_owner": 0}, batch_size=2),
    )
    for samples, policy in ((rows(20), owned), (Data().owned(), plain), (Data().owned(most=3), owned)):
        with raises(ConfigurationError, "mismatch", "samples_per_owner"):
            make_client(NoisySGDClient, samples, policy)


def test_a_client_of_owners_states_its_unit():
    entries = statement_entries(
        make_client(NoisySGDClient, Data().owned(), PrivacyPolicy(**COMMON, batch_size=2)).privatizer, "s"
    )
    assert (entries["unit"], entries["samples-per-owner"]) == ("owner", MOST)
    assert entries["samples-used"] == 0


def test_a_mean_of_features_is_refused_beside_owners():
    policy = PrivacyPolicy(**{**COMMON, "budget_mu": 3.0}, batch_size=2)
    mean: Any = SimpleNamespace(option="centring", query=SimpleNamespace(name="mean", per_owner=False))
    with raises(ConfigurationError, "conflict", "samples_per_owner"):
        NoisySGDClient(
            gradients(), Data().owned(), policy, MemoryLedger(), SimulatedKeys(1, "m"), name="m", queries=[mean]
        )


@pytest.mark.usefixtures("quick_disk")
def test_the_ledger_knows_owners_by_their_names(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "l.sqlite", budget_mu=3.0, delta=1e-5)
    policy = PrivacyPolicy(**{**COMMON, "budget_mu": 3.0}, batch_size=2)

    def started(samples, policy=policy):
        return make_client(NoisySGDClient, samples, policy, ledger, ledger.keys()).privatizer

    make_client(NoisySGDClient, Data().owned(), policy, ledger, ledger.keys()).fit([np.zeros(D)], training_config())
    started(Data().owned()).check_data()
    for replaced in REPLACED.values():
        started(Data(replaced).owned()).check_data()  # the same names
    data = Data()
    data.names = data.names + 20
    with raises(LedgerError, "mismatch", "owners", match="Expected the 2 places of owners"):
        started(data.owned()).check_data()
    with raises(LedgerError, "mismatch", "owners", match="Expected the 2 places of owners"):
        started(Data().owned(places=11)).check_data()
    with raises(LedgerError, "mismatch", "owners", match="Expected the 2 places of owners"):
        started(
            Data().owned(most=7), PrivacyPolicy(**{**COMMON, "samples_per_owner": 7, "budget_mu": 3.0}, batch_size=2)
        ).check_data()
    plain = PrivacyPolicy(**{**COMMON, "samples_per_owner": 0, "budget_mu": 3.0}, batch_size=2)
    with raises(LedgerError, "mismatch", "data", match="Expected the 2 rows"):
        started(rows(20), plain).check_data()
    data = Data()
    data.values, data.names = np.append(data.values, rows(3), axis=0), np.append(data.names, [77, 9, 77])
    started(data.owned()).check_data()  # new owners, and more of another


DIRECTION = np.array([1.0, 0.0, 0.0])


def streams(policy, per_owner):
    """Clients of full batches whose canary is all of one owner's samples."""

    def start(canary, numbers):
        values = -np.tile(DIRECTION, (6 * MOST, 1))
        if canary:
            values[MOST : 2 * MOST] *= -1
        samples = OwnedSamples((values,), Owners.in_turn(len(values), MOST)) if per_owner else OneByOne(values)
        clients = [
            make_client(FullBatchClient, samples, policy, keys=SimulatedKeys(9, f"{canary} {run}")) for run in numbers
        ]

        def answers(k, acks):
            for client, ack in zip(clients, acks, strict=True):
                yield client.privatizer.release(
                    "s", ack, lambda part, one=client: one.gradients([np.zeros(D)], one.samples[part])
                )

        return answers

    return start


@pytest.mark.parametrize("per_owner", [True, False], ids=["owners", "samples by themselves"])
def test_owners_are_audited_below_their_claim_and_samples_by_themselves_are_caught(per_owner):
    """An honest client is accused with probability 5 % at most, for keys that are fixed."""
    changes = {**ALL, "max_participations": 2, "samples_per_owner": MOST if per_owner else 0}
    policy = PrivacyPolicy(**{**COMMON, **changes})
    shift = np.cumsum(np.tile((1 if per_owner else MOST) * 2 * DIRECTION, (2, 1)), axis=0)
    found = audit_client(policy, streams(policy, per_owner), {"owner": shift}, runs=200)
    assert found.violated != per_owner
    assert found.estimated_mu == pytest.approx(1.0 if per_owner else MOST, rel=0.25)
