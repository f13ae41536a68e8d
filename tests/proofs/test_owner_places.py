"""docs/proofs/owners.md, steps 5 to 7: what all rows of one owner show, exactly, wherever in a file they are.

"Exact" is the norm of C (G - G'), of the contributions of two files, in units of the noise: the mu of everything that a
client sends if the server acknowledges each release. It is divided by the mu that is claimed, so that 1 is the bound.
"""

import math
from itertools import product

import numpy as np
import pytest
from murmurfl.clients import Evaluation, FullBatchClient, OwnedSamples, OwnerGradients
from murmurfl.privacy import (
    MECHANISMS,
    EvaluationRows,
    Measured,
    Owners,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SystemKeys,
    evaluation_policy,
    make_mechanism,
    protocol,
)

from tests.harness.clients import DurableLedger, training_config

OWNERS, PLACES, BATCH, MOST, D = 60, 48, 2, 3, 2
BATCHES = PLACES // BATCH
RELEASES = 2 * BATCHES
SECRET = bytes(range(32))
PAIRS = 3_000
ROUNDING = 1 + 1e-9
RETURNING = {"num_participations": 2, "min_separation": BATCHES, "pattern": "epochs"}
ENCODERS = {name: make_mechanism(name, RELEASES) for name in MECHANISMS}
NAMES = [f"patient {i}" for i in range(OWNERS)]


def chance(key):
    return np.random.Generator(np.random.Philox(key=key))


def by_place(names, most):
    return Owners.of(names, most, secret=SECRET, places=PLACES)


def by_first_row(names, most):
    """Planted: owners in the order of their first rows, each in a place of its own."""
    _, first, owner = np.unique(names, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[owner]
    rows = np.argsort(number, kind="stable")
    counts = np.bincount(number)
    kept = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) < most
    return Owners(rows[kept], np.cumsum(np.minimum(counts, most)), most, len(counts))


def file(generator):
    """Names and values of a file sorted by date, with one to five rows of each owner."""
    names = generator.permutation(np.repeat(NAMES, generator.integers(1, 6, OWNERS)))
    values = generator.normal(size=(len(names), D)) * generator.choice([0.1, 1.0, 100.0], size=(len(names), 1))
    return names, values


def re_dated(generator, names, values, owner):
    """The same file, with any other rows of one owner, fewer or more of them, anywhere in it."""
    others = np.flatnonzero(names != owner)
    count = int(generator.integers(1, 9))
    spots = generator.integers(0, len(others) + 1, count)
    own = generator.normal(size=(count, D)) * generator.choice([0.1, 1.0, 1e6])
    return np.insert(names[others], spots, owner), np.insert(values[others], spots, own, axis=0)


def rows_of(owners, values):
    """Each owner's bounded contribution: the mean of the owner's values, clipped to 1."""
    rows, present = owners.padded_rows(slice(0, len(owners)))
    means = (values[rows] * present[:, :, None]).sum(axis=1) / present.sum(axis=1)[:, None]
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1.0)


def divided_by_b(made, batches):
    total = np.zeros((BATCHES, D))
    used = batches < BATCHES  # the places behind the last batch are not used
    np.add.at(total, batches[used], made[used])
    return total / BATCH


def contributions(names, values, group=by_place, share=divided_by_b):
    """What goes into the releases of one pass, shape (batches, d)."""
    owners = group(names, MOST)
    return share(rows_of(owners, values), owners._place // BATCH)


def exact(moves, name, passes=1):
    """The largest mu of some moves, shape (pairs, batches, d), over the mu that is claimed of a move of 2 S / b."""
    encoder = ENCODERS[name].materialize()
    claimed = ENCODERS[name].sensitivity(**(RETURNING if passes > 1 else {})) * 2 / BATCH
    moved = np.concatenate([moves] * passes, axis=1)
    seen = encoder[:, : moved.shape[1]] @ moved
    return float(np.sqrt((seen**2).sum(axis=(1, 2))).max() / claimed)


@pytest.fixture(scope="module")
def moves():
    """How random re-datings of one owner move the releases of a client."""
    generator, made = chance(1), []
    for pair in range(PAIRS):
        if pair % 50 == 0:
            names, values = file(generator)
            before = contributions(names, values)
        owner = NAMES[int(generator.integers(OWNERS))]
        made.append(before - contributions(*re_dated(generator, names, values, owner)))
    return np.array(made)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_re_dating_of_an_owner_shows_more_than_is_claimed(moves, name):
    assert (np.abs(moves).any(axis=2).sum(axis=1) <= 1).all()  # one release a pass
    worst = exact(moves, name)
    assert 0.99 < worst <= ROUNDING
    assert exact(moves, name, passes=2) <= ROUNDING


def test_in_every_small_file_nobody_else_is_moved_by_an_owners_rows():
    """All files of up to six rows of three owners: those with the same rows of the two others are neighbours."""
    found = {}
    for length, most in product(range(3, 7), (1, 2)):
        for names in product("abc", repeat=length):
            if set(names) == set("abc"):
                number = [names[:i].count(name) for i, name in enumerate(names)]
                owners = Owners.of(np.array(names), most, secret=SECRET, places=2)
                rows, present = owners.padded_rows(slice(0, 3))
                seen = {
                    (names[own[0]], place, *(number[i] for i in own[there]))
                    for own, there, place in zip(rows, present, owners._place.tolist(), strict=True)
                }
                others = tuple(name for name in names if name != "a"), most
                found.setdefault(others, set()).add(frozenset(one for one in seen if one[0] != "a"))
                found.setdefault("a", set()).add(next(one[1] for one in seen if one[0] == "a"))
    assert {len(outcomes) for outcomes in found.values()} == {1}


def test_the_worst_re_dating_of_independent_noise_attains_the_claim():
    names, values = np.array(NAMES), np.tile([1.0, 0.0], (OWNERS, 1))
    other = np.where((names == NAMES[0])[:, None], -values, values)
    assert exact((contributions(names, values) - contributions(names[::-1], other[::-1]))[None], "independent") == (
        pytest.approx(1.0)
    )


def test_owners_in_the_order_of_their_first_rows_show_more_than_is_claimed():
    """Planted, as it was: in a file sorted by date everybody between the two dates is in another release."""
    names, values = np.array([f"{i}" for i in range(OWNERS)]), np.ones((OWNERS, D)) / math.sqrt(D)
    values[2::4] *= -1
    values[3::4] *= -1
    moved = np.append(np.arange(1, OWNERS), 0)  # the first owner's row comes last
    found = contributions(names, values, by_first_row) - contributions(names[moved], values[moved], by_first_row)
    assert np.abs(found).any(axis=1).sum() == BATCHES
    assert exact(found[None], "independent") == pytest.approx(math.sqrt(BATCHES), rel=0.05)
    honest = contributions(names, values) - contributions(names[moved], values[moved])
    assert not honest.any()
    generator, worst = chance(3), []
    for _ in range(300):
        names, values = file(generator)
        pair = re_dated(generator, names, values, NAMES[0])
        worst.append(contributions(names, values, by_first_row) - contributions(*pair, by_first_row))
    for name in set(MECHANISMS) - {"cancelling", "decay"}:  # which let changes of one sign cancel
        assert exact(np.array(worst), name) > 1.8


def test_the_figure_of_the_review_is_seen():
    """Fifty releases, of which one owner's later date moves thirty: mu 5.48 where 1 is claimed."""
    batches, first, last = 50, 10, 40
    values = np.tile([1.0, 1.0, -1.0, -1.0], batches // 2)
    order = np.arange(2 * batches)
    moved = np.insert(np.delete(order, first * 2), last * 2 - 1, first * 2)
    difference = (values[order] - values[moved]).reshape(batches, 2).sum(axis=1) / 2
    encoder = make_mechanism("independent", batches).materialize()
    assert np.flatnonzero(difference).size == 30
    assert np.linalg.norm(encoder @ difference) == pytest.approx(5.48, rel=0.01)  # 2 S / b is 1 here


def capped(made, batches):
    """Planted: of each batch no more than b owners, the first of them."""
    kept = np.array([i - np.searchsorted(batches, batch) < BATCH for i, batch in enumerate(batches)])
    return divided_by_b(made[kept], batches[kept])


def divided_by_presence(made, batches):
    """Planted: the mean over who is there, instead of the sum over a public number."""
    there = np.bincount(batches, minlength=BATCHES)[:BATCHES]
    return divided_by_b(made, batches) * BATCH / np.maximum(there, 1)[:, None]


def capped_by_rows(names, values):
    """Planted: of each batch the owners until they have so many rows."""
    owners = by_place(names, MOST)
    batches, kept = owners._place // BATCH, []
    held = np.minimum(np.diff(owners.ends, prepend=0), MOST)
    for i, batch in enumerate(batches):
        kept.append(held[: i + 1][batches[: i + 1] == batch].sum() <= 4)
    kept = np.array(kept)
    return divided_by_b(rows_of(owners, values)[kept], batches[kept])


def test_caps_and_numbers_that_depend_on_owners_are_caught():
    generator = chance(4)
    pairs = []
    for _ in range(400):
        names, values = file(generator)
        pairs.append(((names, values), re_dated(generator, names, values, NAMES[int(generator.integers(OWNERS))])))
    rows = np.array([capped_by_rows(*one) - capped_by_rows(*other) for one, other in pairs])
    assert exact(rows, "independent") > 1.2
    means = [[contributions(*part, share=divided_by_presence) for part in pair] for pair in pairs]
    assert exact(np.array([one - other for one, other in means]), "independent") > 1.2
    # Of the same names a cap by number keeps the same owners. With one owner more, somebody else falls out.
    more = []
    for _ in range(400):
        names, values = file(generator)
        others = names != NAMES[int(generator.integers(OWNERS))]
        with_and_without = [(names, values), (names[others], values[others])]
        more.append(np.subtract(*(contributions(*part, share=capped) for part in with_and_without)))
    assert exact(np.array(more), "independent") > 0.9


@pytest.fixture(scope="module")
def more_and_renamed():
    """How a client's releases move if an owner is added, and if one is replaced by another name."""
    generator, added, renamed = chance(5), [], []
    for pair in range(500):
        if pair % 25 == 0:
            names, values = file(generator)
            before = contributions(names, values)
        others = names != NAMES[int(generator.integers(OWNERS))]
        added.append(before - contributions(names[others], values[others]))
        others, others_values = np.append(names[others], f"new {pair}"), np.append(values[others], [[9.0, 9.0]], axis=0)
        renamed.append(before - contributions(others, others_values))
    return np.array(added), np.array(renamed)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", MECHANISMS)
def test_an_owner_more_shows_half_and_another_name_no_more_than_is_claimed(name, passes, more_and_renamed):
    """With the same N and b: the second is the first twice, in two places or in one."""
    added, renamed = more_and_renamed
    assert exact(added, name, passes) <= 0.5 * ROUNDING
    assert exact(renamed, name, passes) <= ROUNDING
    assert np.abs(renamed).any(axis=2).sum(axis=1).max() == 2
    assert exact(renamed, name, passes) > 0.5 * exact(added, name, passes)


VALUES = -3.0, -1.0, 1.0, 3.0
"""Of rows whose means, cut to 1, can turn round when a row comes or goes."""


def made_of(file, most, places):
    """What a file's rows, pairs of a name and a value, make of each place, as a release of its own with b = 1."""
    names, values = zip(*file, strict=True)
    owners = Owners.of(names, most, secret=SECRET, places=places)
    total = np.zeros(places)
    if len(owners):
        np.add.at(total, owners._place, rows_of(owners, np.array(values)[:, None])[:, 0])
    return total


def without(file, owner):
    return tuple(row for row in file if row[0] != owner)


def renamed_rows(file, owner, name):
    """The rows of an owner under another name, with each choice of values."""
    own = [place for place, row in enumerate(file) if row[0] == owner]
    for values in product(VALUES, repeat=len(own)):
        change = {place: (name, value) for place, value in zip(own, values, strict=True)}
        yield tuple(change.get(place, row) for place, row in enumerate(file))


def replaced_record(file, *, other):
    """A file with one record replaced, whose owner stays or is an ``other`` one, or nobody."""
    for place, (owner, _) in enumerate(file):
        for name, value in product(["a", "b", "c", ""], VALUES):
            if (name != owner) == other:
                yield (*file[:place], (name, value), *file[place + 1 :])


RELATIONS = {
    "an owner more": (0.5, 0.5, lambda file: [without(file, "a")] if without(file, "a") else []),
    "a new name": (1.0, math.sqrt(0.5), lambda file: renamed_rows(file, "a", "d")),
    "a name that exists": (1.5, math.sqrt(1.25), lambda file: renamed_rows(file, "a", "b")),
    "a record of one owner": (1.0, 1.0, lambda file: replaced_record(file, other=False)),
    "a record and its owner": (2.0, math.sqrt(2.0), lambda file: replaced_record(file, other=True)),
}
"""The mu of each relation over that of the claim: in one release, in two of independent noise, and the neighbours."""
APART = next(
    n for n in range(4, 40) if len(set(Owners.of(list("abcd"), 1, secret=SECRET, places=n)._place.tolist())) == 4
)
FILES = [
    tuple(zip(names, values, strict=True)) for names in product("abc", repeat=3) for values in product(VALUES, repeat=3)
]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("relation", RELATIONS)
def test_each_relation_of_two_files_has_its_own_constant_and_attains_it(relation, most):
    """All files of three rows of three owners and four values, and all their neighbours, in units of 2 S / b."""
    together, apart, neighbours = RELATIONS[relation]
    for places, constant in ((1, together), (APART, apart)):
        known = {}

        def contribution(file, places=places, known=known):
            if file not in known:
                known[file] = made_of(file, most, places)
            return known[file]

        pairs = [(file, other) for file in FILES for other in neighbours(file)]
        moves = np.array([contribution(file) - contribution(other) for file, other in pairs]) / 2
        assert np.linalg.norm(moves, axis=1).max() == pytest.approx(constant)
        for name in ("cancelling", "decay", "blt"):
            made = make_mechanism(name, places)
            shown = np.linalg.norm(made.materialize() @ moves.T, axis=0).max()
            assert shown <= together * made.sensitivity() * ROUNDING


def test_a_place_with_everybody_moves_no_further():
    """N = 1, and one batch of one place: all owners are in it, and one of them moves it by 2 S / b."""
    names, values = file(chance(6))
    both = []
    for part in ((names, values), re_dated(chance(7), names, values, NAMES[0])):
        owners = Owners.of(part[0], MOST, secret=SECRET, places=1)
        both.append(rows_of(owners, part[1]).sum(axis=0))
    assert 0 < np.linalg.norm(both[0] - both[1]) <= 2 * ROUNDING


def means(owners, values):
    """A contribution: the mean of each owner's rows."""

    def contribution(chosen):
        rows, present = owners.padded_rows(chosen)
        return (values[rows] * present[:, :, None]).sum(axis=1) / present.sum(axis=1)[:, None]

    return contribution


@pytest.mark.parametrize("keys", [SystemKeys.generate(), SimulatedKeys(1, "m")], ids=["real", "simulated"])
def test_in_a_sum_over_all_owners_each_is_rounded_alone(keys):
    """Then an owner more or less moves one rounding, and nobody to another block."""
    names, values = file(chance(8))
    owners = by_place(names, MOST)
    policy = PrivacyPolicy(
        1.0, 1, 3, mu=1.0, batch_selection="full_batch", mechanism="independent", samples_per_owner=MOST
    )
    privatizer = Privatizer(policy, D, PLACES, DurableLedger(), keys, data=owners)
    rows = policy.bound.rows(means(owners, values)(slice(0, len(owners))))
    alone = np.sum([privatizer.plan.grid.counts(row) for row in rows], axis=0)
    assert (privatizer._contribution_counts(means(owners, values), slice(0, PLACES)) == alone).all()


@pytest.mark.parametrize("clipping", ["clip", "automatic"])
def test_real_clients_move_as_far_as_that_and_no_further(clipping):
    """Clients with keys of their own: what they make before noise, of two files, on their grid."""
    own = {"mechanism": "decay", "mu": 1.0, "samples_per_owner": MOST, "noise_quality": "exact", "clipping": clipping}
    policy = PrivacyPolicy(1.0, BATCH, BATCHES, **own)
    generator, worst = chance(8), 0.0
    names, values = file(generator)

    def made(names, values):
        owners = by_place(names, MOST)
        privatizer = Privatizer(policy, D, PLACES, DurableLedger(), SystemKeys.generate(), data=owners)
        parts = [slice(start, start + BATCH) for start in range(0, PLACES, BATCH)]
        counts = np.array([privatizer._contribution_counts(means(owners, values), part) for part in parts])
        return privatizer.plan.grid.values(counts), privatizer.plan

    before, plan = made(names, values)
    if clipping == "clip":
        assert np.allclose(before, contributions(names, values), atol=1e-5)
    for _ in range(30):
        owner = NAMES[int(generator.integers(OWNERS))]
        moved = before - made(*re_dated(generator, names, values, owner))[0]
        assert np.flatnonzero(moved.any(axis=1)).tolist() in ([], [moved.any(axis=1).argmax()])
        worst = max(worst, float(np.linalg.norm(plan.mechanism.materialize() @ moved)) / plan.noise_std)
    assert 0.5 * plan.mu < worst <= plan.mu * ROUNDING


AHEAD, HELD = 3, 5
"""Places that are trained on, and places behind them that are set aside."""


class _Values:
    """The gradient is the value itself; a model is right where the value is positive."""

    shapes = ((1,),)

    def __call__(self, parameters, samples):
        return np.asarray(samples[0], dtype=np.float64)


def _measured(parameters, samples):
    values = np.asarray(samples[0])[:, 0]
    return Measured(values > 0, np.abs(values) / 4, np.sign(values) > 0)


def evaluated(file, most, keys):
    """What a client makes of a file before noise: its training and its evaluation, and the owners' places."""
    names, values = zip(*file, strict=True)
    owners = Owners.of(names, most, secret=SECRET, places=AHEAD + HELD)
    samples = OwnedSamples((np.array(values)[:, None], np.zeros(len(values))), owners)
    own = {"mu": 1.0, "budget_mu": 2.0, "samples_per_owner": most, "noise_quality": "exact"}
    full = {"batch_selection": "full_batch", "mechanism": "independent", "release_rule": "paper"}
    training = PrivacyPolicy(1.0, 1, 3, **own, **full)
    asked = [Evaluation(evaluation_policy(**own), _measured, bins=2, held_out=HELD)]
    client = FullBatchClient(
        OwnerGradients(_Values(), one_by_one=True), samples, training, DurableLedger(), keys, name="m", queries=asked
    )
    part, found = client.parts["evaluation"], {}
    for name, privatizer in (("training", client.privatizer), ("evaluation", part.privatizer)):
        whole = privatizer._contribution_counts

        def kept(*arguments, name=name, whole=whole):
            found[name] = whole(*arguments)
            return found[name].copy()  # noise is added to it

        privatizer._contribution_counts = kept
    client.fit([np.zeros(1)], training_config())
    entries = training_config(session="e", **{protocol.RELEASE_OF: protocol.OF_EVALUATION})
    _, count, metrics = client.fit([np.zeros(1)], entries)
    assert (count, metrics[protocol.OF_OWNERS]) == (HELD, 1)
    made = {
        name: privatizer.plan.grid.values(found[name])
        for name, privatizer in (("training", client.privatizer), ("evaluation", part.privatizer))
    }
    place = dict(zip(sorted(set(names)), (_place_of(name) for name in sorted(set(names))), strict=True))
    return made, place, part.privatizer.plan


def _place_of(name):
    return int(Owners.of([name], 1, secret=SECRET, places=AHEAD + HELD)._place[0])


NAMED = sorted("abcdefghijklmnop", key=_place_of)
TRAINED = [name for name in NAMED if _place_of(name) < AHEAD]
ASIDE = [name for name in NAMED if _place_of(name) >= AHEAD]


@pytest.mark.parametrize("keys", [SystemKeys(b"k" * 32), SimulatedKeys(1, "m")], ids=["real", "simulated"])
@pytest.mark.parametrize("whose", ["trained on", "set aside"])
def test_an_owner_shows_in_the_training_or_in_the_evaluation_and_in_no_more_than_one_row(whose, keys):
    """All files of up to three rows of one owner among those of others: one release moves, by 2 at the very most."""
    strange, other = (TRAINED[0], ASIDE[0]) if whose == "trained on" else (ASIDE[1], TRAINED[0])
    others = ((other, 3.0), (ASIDE[0], -1.0), (TRAINED[1], 1.0), (ASIDE[0], 3.0))
    still, moves, plan = ("evaluation", "training") if whose == "trained on" else ("training", "evaluation"), [], None
    for most, count in product((1, 2), range(1, 4)):
        for values in product((*VALUES, math.nan), repeat=count):
            own = tuple((strange, value) for value in values)
            made, place, plan = evaluated(own[:1] + others + own[1:], most, keys)
            assert place[strange] < AHEAD if whose == "trained on" else place[strange] >= AHEAD
            moves.append((made[still[0]], made[still[1]], most))
    for most in (1, 2):
        assert len({one.tobytes() for one, _, used in moves if used == most}) == 1
        seen = np.array([row for _, row, one in moves if one == most])
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2).max()
        expected = 2.0 if whose == "trained on" else math.sqrt(2.0)  # rows of an evaluation have no negative entry
        assert apart == pytest.approx(expected, abs=1e-3)
    assert plan.sensitivity == pytest.approx(2.0, rel=3e-3)


def test_places_that_are_set_aside_hold_the_owners_behind_them():
    """The evaluation is the sum of mean rows of exactly the owners in the last places, wherever their rows are."""
    generator = chance(9)
    file = tuple((NAMED[int(one)], float(generator.choice(VALUES))) for one in generator.integers(0, len(NAMED), 60))
    made, place, _ = evaluated(file, 3, SystemKeys(b"k" * 32))
    expected = np.zeros(6)
    for name in ASIDE:
        first = np.array([value for owner, value in file if owner == name][:3])
        expected += EvaluationRows(2).rows(_measured([], (first[:, None],))).mean(axis=0)
    assert made["evaluation"] == pytest.approx(expected, abs=1e-3)
    assert made["training"] == pytest.approx(
        sum(np.clip(np.mean([v for o, v in file if o == name][:3]), -1, 1) for name in TRAINED), abs=1e-3
    )
    assert min(place.values()) < AHEAD <= max(place.values())
