"""The opening rule: what a helper opens, and everything it must not, whatever the server, clients and helpers do."""

import contextlib
import logging
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flwr.app import RecordDict
from murmurfl.clients import ContextOpeningRecord
from murmurfl.privacy import (
    ConfigurationError,
    Header,
    HelperKey,
    Masking,
    MemoryLedger,
    MemoryOpeningRecord,
    Opener,
    Opening,
    OpeningRecordError,
    OpeningRefusedError,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    Roster,
    SimulatedKeys,
    SQLiteLedger,
    SQLiteOpeningRecord,
    SumAssumption,
    is_opening,
    protocol,
    row_bytes,
    set_digest,
)
from murmurfl.privacy.sums import masking
from murmurfl.privacy.sums import opening_rule as opening
from murmurfl.privacy.sums import opening_rule as opening_record
from murmurfl.privacy.sums.opening_rule import SignedOpening, is_view

from tests.harness.errors import raises
from tests.harness.masked_releases import (
    ATTACKS,
    CLIENTS,
    HELPERS,
    ROSTER,
    SEED,
    D,
    allowed,
    key_of,
    mask_of,
    opener_of,
    release_of,
    round_of,
    signed,
)

pytestmark = pytest.mark.usefixtures("quick_disk")
LEFT = HelperKey.simulated(SEED, "left")


@pytest.fixture(params=["memory", "context", "file"])
def opener(request, tmp_path):
    if request.param == "memory":
        return opener_of(MemoryOpeningRecord())
    if request.param == "context":
        return opener_of(ContextOpeningRecord(RecordDict(), "left"))
    return opener_of(SQLiteOpeningRecord.create(tmp_path / "opened.db", helper=LEFT.entry("left")))


def sum_of_masks(releases, helper="left"):
    return sum((mask_of(one, helper) for one in releases), np.zeros(D, np.uint64))


def test_the_answer_is_the_sum_of_the_helpers_masks_signed(opener):
    releases = round_of()
    answer = opener.open("s", "1", releases)
    assert (answer.total == sum_of_masks(releases)).all()
    assert (answer.helper, answer.opening) == ("left", "1")
    assert answer.set_digest == set_digest("s", "1", releases)
    assert is_opening(ROSTER.helpers[0], "s", answer)


def test_rounds_follow_each_other_with_any_clients(opener):
    opener.open("s", "1", round_of("abcd"))
    opener.open("s", "2", [*round_of("ef"), *round_of("ab", 2, 1)])
    opener.open("s", "3", [*round_of("ab", 7, 2), *round_of("cdef", 2, 1)])
    opener.open("s", "last-one", [*round_of("ab", 8, 7), *round_of("cdef", 3, 2)])


def test_releases_that_stand_alone_follow_each_other_whatever_was_opened(opener):
    for k in (1, 2, 5):
        opener.open("s", str(k), round_of(release=k, release_mode="independent"))
    with pytest.raises(OpeningRefusedError):
        opener.open("s", "6", round_of(release=5, release_mode="independent"))


def test_the_same_set_gets_the_same_answer_at_any_later_time(opener):
    first, second = round_of(), round_of(release=2, ack=1)
    before = opener.open("s", "1", first)
    opener.open("s", "2", second)
    opener.open("t", "1", round_of(session="t"))
    after = opener.open("s", "1", first)
    assert (after.total == before.total).all()
    assert (after.set_digest, after.signature) == (before.set_digest, before.signature)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_leaves_no_trace(opener, name):
    attack = ATTACKS[name]
    assert not allowed(opener, attack)
    for opened, releases in attack.before:
        opener.open("s", opened, releases)  # what was opened is answered again
    if attack.opening not in dict(attack.before):
        last = len(attack.before)
        ack = max(
            (Header.from_bytes(one.header).release for _, releases in attack.before for one in releases), default=0
        )
        assert opener.open("s", f"{last + 1}", round_of(release=ack + 1, ack=ack)), "its name was not used up"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_view_is_what_opening_would_do_and_leaves_no_trace(opener, name):
    """Of every attack and of the round before it: whoever asks first learns no more than who asks at once."""
    attack = ATTACKS[name]
    for opened, releases in attack.before:
        view = opener.view("s", opened, releases)
        assert (view.would_open, view.disputed) == ("yes", ())
        assert is_view(ROSTER.helpers[0], "s", view)
        opener.open("s", opened, releases)
        assert opener.view("s", opened, releases).would_open == "opened"
    for _ in range(2):
        try:
            view = opener.view(attack.session, attack.opening, attack.releases)
        except OpeningRefusedError:
            continue  # as a server can see for itself
        assert view.would_open == "no"
    with pytest.raises(OpeningRefusedError):
        opener.open(attack.session, attack.opening, attack.releases)


def test_a_view_names_whose_seals_do_not_open_and_whose_releases_do_not_follow(opener):
    opener.open("s", "1", round_of())
    client = key_of("b")
    releases = round_of(release=2, ack=1)
    broken = replace(releases[1], seals=(bytes(80), releases[1].seals[1]), signature=b"")
    releases[1] = replace(broken, signature=client.sign(broken.signed))
    releases[3] = round_of(release=2, ack=0)[3]
    view = opener.view("s", "2", releases)
    assert (view.would_open, view.disputed) == ("no", ("b", "d"))
    rest = [*releases[:1], *releases[2:3], *releases[4:]]
    assert not is_view(ROSTER.helpers[1], "s", view)
    assert not is_view(ROSTER.helpers[0], "t", view)
    assert not is_view(ROSTER.helpers[0], "s", replace(view, disputed=("b",)))
    other = opener.view("s", "1", rest) if len(rest) >= 3 else None
    assert other is None or (other.would_open, other.disputed) == ("no", ()), "another set was opened under that name"


def test_a_helper_has_bounds_of_its_own_before_it_takes_memory(monkeypatch):
    """A signed header may name any size: 618 bytes once made a helper take 2 GiB."""
    record = MemoryOpeningRecord()
    small = Opener("left", LEFT, ROSTER, record, max_model_size=D, min_cohort=4)
    small.open("s", "1", round_of("abcd"))
    monkeypatch.setattr(opening.np, "zeros", lambda *_: pytest.fail("took memory"))
    for releases, why in (
        (round_of("abcd", session="t", size=2**32), "max-model-size is"),
        (round_of("abc", session="t"), "min-cohort is 4"),
    ):
        for ask in (small.view, small.open):
            with pytest.raises(OpeningRefusedError) as refusal:
                ask("t", "1", releases)
            assert why in refusal.value.why
    with raises(OpeningRefusedError, "refused", match="does not open this set"):
        small.open("t", "1", [replace(one, header=bytes(2**14 + 1)) for one in round_of("abcd")])


def test_a_bound_by_its_name_of_before_is_refused():
    with raises(ConfigurationError, "unknown-name", "largest_model"):
        Opener("left", LEFT, ROSTER, MemoryOpeningRecord(), largest_model=D)


@pytest.mark.parametrize("opener", ["memory", "file"], indirect=True)  # a simulated helper has no bounds a day
@pytest.mark.parametrize(("bounds", "why"), [((2, 0), "max-sessions-per-day is 2"), ((0, 2), "max-sums-per-day is 2")])
def test_a_helper_bounds_what_it_begins_and_opens_in_a_day(opener, monkeypatch, caplog, bounds, why):
    """A server that asks without end would fill a disk. What was opened is answered again."""
    opener.max_sessions_per_day, opener.max_sums_per_day = bounds
    now = 1e9
    monkeypatch.setattr(opening_record.time, "time", lambda: now)
    begun = [(session, round_of(session=session, terms=digit * 64)) for session, digit in (("s", "5"), ("t", "6"))]
    answers = [opener.open(session, "1", releases) for session, releases in begun]
    third = round_of(session="u", terms="7" * 64)
    now += 86_399
    for releases in (third, third):
        assert opener.view("u", "1", releases).would_open == "no"
        with pytest.raises(OpeningRefusedError) as refusal:
            opener.open("u", "1", releases)
        assert why in refusal.value.why
        assert why in caplog.text
    for (session, releases), before in zip(begun, answers, strict=True):
        assert opener.view(session, "1", releases).would_open == "opened"
        assert opener.open(session, "1", releases).signature == before.signature
    going_on = round_of(release=2, ack=1)
    assert opener.view("s", "2", going_on).would_open == ("yes" if bounds[0] else "no"), "no new session"
    now += 2
    opener.open("u", "1", third)


def test_bounds_a_day_need_a_record_that_keeps_times():
    state = MemoryOpeningRecord()
    state.times = lambda *given: opening_record.OpeningTransaction.times(state, *given)
    opener = opener_of(state)
    opener.open("s", "1", round_of())
    opener.max_sums_per_day = 10
    with raises(OpeningRecordError, "unsupported", match="Expected a record that keeps times"):
        opener.open("s", "2", round_of(release=2, ack=1))


def test_every_refusal_has_the_same_text(caplog):
    texts, reasons = set(), set()
    for attack in ATTACKS.values():
        opener = opener_of(MemoryOpeningRecord())
        for opened, releases in attack.before:
            opener.open("s", opened, releases)
        with pytest.raises(OpeningRefusedError) as refusal:
            opener.open(attack.session, attack.opening, attack.releases)
        texts.add((refusal.value.code, refusal.value.reason, str(refusal.value)))
        reasons.add(refusal.value.why)
    text = "this helper does not open this set of releases; its own log says why"
    assert texts == {(protocol.OPENING_REFUSED, text, text)}
    assert len(reasons) > 15
    assert all(reason in caplog.text for reason in reasons), "the helper's own log says which it was"


def test_what_was_sent_cannot_write_its_own_lines_into_the_log(caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(OpeningRefusedError):
        opener_of(MemoryOpeningRecord()).open("s", "1\nAll is well." + "x" * 10_000, round_of())
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize("strange", [None, 7, b"1", ["1"], "\ud800", "x" * 100_000])
def test_names_of_another_kind_are_refused(strange):
    opener = opener_of(MemoryOpeningRecord())
    with pytest.raises(OpeningRefusedError):
        opener.open("s", strange, round_of())
    with pytest.raises(OpeningRefusedError):
        opener.open(strange, "1", round_of())


def test_a_sum_has_at_most_as_many_releases_as_cannot_wrap(monkeypatch):
    monkeypatch.setattr(opening, "MOST_SUMMED", 5)
    opener = opener_of(MemoryOpeningRecord())
    with pytest.raises(OpeningRefusedError) as refusal:
        opener.open("s", "1", round_of())
    assert "1 to 5 releases, got 6" in refusal.value.why
    opener.open("s", "1", round_of("abcde"))


def test_a_set_that_cannot_be_answered_is_not_recorded(opener, monkeypatch):
    """A sum that there is no memory for, say: else its name would be taken and its clients gone."""

    def full(*arguments):
        raise MemoryError

    releases = round_of()
    with monkeypatch.context() as patched:
        patched.setattr(opening.np, "zeros", full)
        with pytest.raises(MemoryError):
            opener.open("s", "1", releases)
    opener.open("s", "1", releases[:4])


def test_two_sessions_know_nothing_of_each_other(opener):
    for k in (1, 2, 3):
        for session in ("s", "t"):
            terms = {"session": session, "terms": ("5" if session == "s" else "6") * 64}
            opener.open(session, str(k), round_of(release=k, ack=k - 1, **terms))


def test_a_helper_that_is_not_in_the_roster_or_under_other_keys_opens_nothing():
    with raises(ConfigurationError, "missing", "roster"):
        Opener("center", LEFT, ROSTER, MemoryOpeningRecord())
    with raises(ConfigurationError, "mismatch", "key"):
        Opener("right", LEFT, ROSTER, MemoryOpeningRecord())
    half = HelperKey(LEFT.sealing_secret, HelperKey.simulated(SEED, "right").signing_secret)
    with raises(ConfigurationError, "mismatch", "key"):
        Opener("left", half, ROSTER, MemoryOpeningRecord())


def test_a_record_serves_one_helper():
    record = MemoryOpeningRecord()
    opener_of(record)
    opener_of(record)
    with raises(OpeningRecordError, "mismatch", match="got another's"):
        opener_of(record, "right")


def test_an_answer_is_signed_with_everything_it_is_about():
    answer = opener_of(MemoryOpeningRecord()).open("s", "1", round_of())
    left, right = ROSTER.helpers
    wrong = [
        replace(answer, helper="right"),
        replace(answer, opening="2"),
        replace(answer, set_digest="0" * 64),
        replace(answer, total=answer.total + np.uint64(1)),
        replace(answer, total=answer.total[:-1]),
        replace(answer, total=answer.total.astype(np.int64)),
        replace(answer, total=answer.total.reshape(2, -1)),
        replace(answer, total=None),
        replace(answer, signature=bytes(64)),
        replace(answer, signature=None),
        replace(answer, opening=None),
    ]
    assert is_opening(left, "s", answer)
    assert not any(is_opening(left, "s", one) for one in wrong)
    assert not is_opening(right, "s", answer)
    assert not is_opening(replace(right, name="left"), "s", answer)
    assert not is_opening(left, "t", answer)


def test_the_digest_of_a_set_is_that_of_every_byte_in_order():
    releases = round_of("abc")
    one = releases[0]
    others = [
        ("t", "1", releases),
        ("s", "2", releases),
        ("s1", "", releases),
        ("s", "1", releases[::-1]),
        ("s", "1", releases[:2]),
        ("s", "1", [replace(one, header=one.header + b" "), *releases[1:]]),
        ("s", "1", [replace(one, signature=one.signature[:-1] + bytes([one.signature[-1] ^ 1])), *releases[1:]]),
        ("s", "1", [replace(one, seals=one.seals[::-1]), *releases[1:]]),
        ("s", "1", [replace(one, seals=(b"".join(one.seals),)), *releases[1:]]),
        ("s", "1", [replace(one, seals=(), signature=b"".join(one.seals) + one.signature), *releases[1:]]),
    ]
    digests = {set_digest(*other) for other in others} | {set_digest("s", "1", releases)}
    assert len(digests) == 1 + len(others)
    assert set_digest("s", "1", releases) == set_digest("s", "1", tuple(releases))


# What is promised, and what is void.


def right_opener(record=None):
    return opener_of(record or MemoryOpeningRecord(), "right")


def opened_by_right(name, releases, opener=None):
    """What the server has of the other helper, which opened a set."""
    return SignedOpening.of((opener or right_opener()).open("s", name, releases))


def refused(ask):
    with pytest.raises(OpeningRefusedError) as refusal:
        ask()
    return refusal.value.why


def test_a_promise_is_kept_whatever_else_is_asked_and_ends_with_the_answer(opener):
    releases = round_of()
    for _ in range(2):
        view = opener.view("s", "1", releases, lock=True)
        assert (view.would_open, view.disputed) == ("locked", ())
        assert is_view(ROSTER.helpers[0], "s", view)
    assert opener.view("s", "1", releases).would_open == "locked"
    for name, others in (("1", releases[:5]), ("2", releases), ("2", releases[:3]), ("2", round_of(release=2))):
        assert "promised" in refused(lambda name=name, others=others: opener.open("s", name, others))
        for lock in (False, True):
            assert opener.view("s", name, others, lock=lock).would_open == "no"
    assert opener.view("t", "1", round_of(session="t"), lock=True).would_open == "locked", "a session of its own"
    assert (opener.open("s", "1", releases).total == sum_of_masks(releases)).all()
    assert opener.view("s", "1", releases, lock=True).would_open == "opened"
    assert opener.view("s", "2", round_of(release=2, ack=1), lock=True).would_open == "locked"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ATTACKS)
def test_what_would_not_be_opened_is_not_promised_and_leaves_no_trace(opener, name):
    attack = ATTACKS[name]
    for opened, releases in attack.before:
        opener.open("s", opened, releases)
    with contextlib.suppress(OpeningRefusedError):
        assert opener.view(attack.session, attack.opening, attack.releases, lock=True).would_open == "no"
    with opener._record.exclusive() as page:
        assert page.lock(attack.session) is None


def test_a_set_that_only_another_helper_opened_is_void_for_good_and_releases_build_on_it(opener):
    first, right = round_of(), right_opener()
    seen = opened_by_right("1", first, right)
    for _ in range(2):
        view = opener.void("s", "1", first, seen)
        assert (view.would_open, view.disputed) == ("void", ())
        assert is_view(ROSTER.helpers[0], "s", view)
    again = [("1", first), ("1", round_of()), ("1", round_of(release=2, ack=1)), ("2", first), ("2", first[:4])]
    for name, others in (*again, ("2", round_of(release=2))):
        assert refused(lambda name=name, others=others: opener.open("s", name, others))
        assert opener.view("s", name, others, lock=True).would_open in ("no", "void")
    second = round_of(release=2, ack=1)
    assert (opener.open("s", "2", second).total == sum_of_masks(second)).all()
    assert right.open("s", "2", second)


def test_a_record_takes_nothing_beside_a_promise_nor_under_a_void_name(opener):
    """Whoever asks it to: a mistaken call must not make a record that nobody can believe."""

    def entry(name, release, kind):
        releases = round_of(release=release, ack=release - 1)
        headers = [Header.from_bytes(one.header) for one in releases]
        return opening._entry(name, set_digest("s", name, releases), headers, kind)

    promise, void = entry("1", 1, "locked"), entry("2", 2, "void")
    steps = [
        (promise, [promise, entry("1", 1, "opened"), entry("2", 1, "opened"), entry("2", 1, "locked")]),
        (void, [void, entry("2", 3, "opened"), entry("2", 3, "locked"), entry("3", 2, "locked")]),
        (entry("3", 3, "opened"), [entry("2", 4, "opened"), entry("3", 4, "locked"), entry("4", 3, "opened")]),
    ]
    for step, wrong in steps:
        with opener._record.exclusive() as page:
            page.commit(step)
        for one in wrong:
            with (
                opener._record.exclusive() as page,
                raises(OpeningRecordError, "mismatch", match="no other that was promised"),
            ):
                page.commit(one)
    for kept in (replace(steps[-1][0], kind="void"), replace(entry("5", 5, "void"), terms=replace(void.terms, size=7))):
        with opener._record.exclusive() as page, raises(OpeningRecordError, "mismatch", match="Nothing was recorded"):
            page.commit(kept)


@pytest.mark.parametrize("promised", ["this set", "another of its name", "another", "none"])
def test_a_promise_ends_where_a_set_is_void(opener, promised):
    first = round_of()
    others = {"this set": ("1", first), "another of its name": ("1", first[:3]), "another": ("x", first[3:])}
    if promised in others:
        assert opener.view("s", *others[promised], lock=True).would_open == "locked"
    assert opener.void("s", "1", first, opened_by_right("1", first)).would_open == "void"
    assert opener.view("s", "2", round_of(release=2, ack=1), lock=True).would_open == "locked"


def test_what_was_opened_here_is_not_void_and_keeps_its_answer(opener):
    first = round_of()
    before = opener.open("s", "1", first)
    assert opener.void("s", "1", first, opened_by_right("1", first)).would_open == "opened"
    assert opener.open("s", "1", first).signature == before.signature


def test_helpers_that_were_shown_different_sets_meet_again(opener):
    """Under one name, under two, and with an earlier and a later release of one client: by what each has signed."""
    right = right_opener()
    mine, theirs = [*round_of("abc", 2, 0), *round_of("d")], [*round_of("bcd", 2, 0), *round_of("e")]
    ours, others = SignedOpening.of(opener.open("s", "1", mine)), opened_by_right("1", theirs, right)
    assert opener.void("s", "1", theirs, others).would_open == "void"
    assert right.void("s", "1", mine, ours).would_open == "void"
    assert opener.open("s", "1", mine), "its own is answered as ever"
    following = [*round_of("abcd", 3, 2), *round_of("e", 2, 1)]
    for helper in (opener, right):
        assert helper.view("s", "2", round_of("d", 3, 1) + following[:3]).disputed == ("d",)
        assert helper.open("s", "2", following)


@cache
def forgeries():
    """What a hostile server may show of a set ``first`` that the helper ``right`` did not open."""
    first, right = round_of(), right_opener()
    seen = opened_by_right("1", first, right)
    elsewhere = right_opener()
    view = elsewhere.view("s", "1", first, lock=True)
    own = SignedOpening.of(opener_of(MemoryOpeningRecord()).open("s", "1", first))
    return {
        "nothing": (first, SignedOpening("right", b"", b"")),
        "a promise": (first, SignedOpening("right", b"", view.signature)),
        "its own word": (first, own),
        "its own word under the other's name": (first, replace(own, helper="right")),
        "a helper of no name": (first, replace(seen, helper="center")),
        "a client": (first, replace(seen, helper="a")),
        "a name of no letters": (first, replace(seen, helper="\ud800")),
        "another sum": (first, replace(seen, total_digest=bytes(32))),
        "a subset": (first[:5], seen),
        "the same releases sealed again": (round_of(), seen),
        "another order": (first[::-1], seen),
        "another name": (first, SignedOpening.of(right_opener().open("s", "2", first))),
        "another session's": (first, SignedOpening.of(right_opener().open("t", "1", round_of(session="t")))),
    }


FORGERIES = (
    *(
        "nothing",
        "a promise",
        "its own word",
        "its own word under the other's name",
        "a helper of no name",
        "a client",
    ),
    *("a name of no letters", "another sum", "a subset", "the same releases sealed again", "another order"),
    *("another name", "another session's"),
)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", FORGERIES)
def test_without_another_helpers_word_on_this_very_set_nothing_is_void(opener, name):
    assert tuple(forgeries()) == FORGERIES
    releases, seen = forgeries()[name]
    assert opener.view("s", "1", releases, lock=True).would_open == "locked"
    assert "no other helper has signed" in refused(lambda: opener.void("s", "1", releases, seen))
    assert opener.open("s", "1", releases), "nothing was recorded"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.releases])
def test_a_corrupt_helper_cannot_have_clients_moved_on_to_what_they_did_not_sign(name):
    """It signs whatever the server shows: sets that are wrong by themselves are refused, and of the others none goes
    back, nor is any release of theirs opened from then on."""
    attack, record = ATTACKS[name], MemoryOpeningRecord()
    opener = opener_of(record)
    for opened, releases in attack.before:
        opener.open("s", opened, releases)
    digest = set_digest(attack.session, attack.opening, attack.releases)
    signed_by_right = HelperKey.simulated(SEED, "right").sign(
        opening._signed_digest("right", attack.session, attack.opening, digest, bytes(32))
    )
    before = dict(record.session(attack.session).last)
    try:
        opener.void(attack.session, attack.opening, attack.releases, SignedOpening("right", bytes(32), signed_by_right))
    except OpeningRefusedError:
        assert record.session(attack.session).last == before
        return
    now = record.session(attack.session).last
    assert all(now[client].release >= last.release for client, last in before.items())
    headers = [Header.from_bytes(one.header) for one in attack.releases]
    for header in headers:
        assert now[header.client].release >= header.release
    assert refused(lambda: opener.open(attack.session, attack.opening, attack.releases))
    assert refused(lambda: opener.open(attack.session, "77", attack.releases))


def test_a_helpers_own_bounds_do_not_keep_it_from_a_set_that_others_opened():
    small = Opener("left", LEFT, ROSTER, MemoryOpeningRecord(), max_model_size=D - 1, min_cohort=5)
    first = round_of("abc")
    assert small.void("s", "1", first, opened_by_right("1", first)).would_open == "void"


def test_a_helper_that_voids_on_anybodys_word_would_be_noticed(monkeypatch):
    monkeypatch.setattr(SignedOpening, "is_signed", lambda *given: True)
    for releases, seen in forgeries().values():
        if seen.helper == "right":
            assert opener_of(MemoryOpeningRecord()).void("s", "1", releases, seen).would_open == "void"


# What a helper that is built wrongly would open: each bug by the attacks that it lets through.


def let_through(make=lambda: opener_of(MemoryOpeningRecord())):
    return {name for name, attack in ATTACKS.items() if allowed(make(), attack)}


def test_nothing_gets_through():
    assert let_through() == set()


def test_a_helper_that_does_not_look_at_acks_would_be_noticed(monkeypatch):
    real = opening._check_follows

    def unchecked(header, last):
        real(replace(header, release_mode="independent"), last)

    monkeypatch.setattr(opening, "_check_follows", unchecked)
    assert let_through() == {
        "P_2 - P_0 after P_1",
        "P_2 - P_0 of everybody after P_1",
        "P_3 - P_1 after P_2",
        "built on what was never opened",
        "built on something though nothing was opened",
    }


def test_a_helper_that_lets_the_server_say_min_cohort_would_be_noticed(monkeypatch):
    real = opening.checked_header
    monkeypatch.setattr(opening, "checked_header", lambda *given: replace(real(*given), min_cohort=1))
    assert let_through() == {"one client", "too few", "too few for one of them"}


def test_a_helper_that_believes_names_would_be_noticed(monkeypatch):
    monkeypatch.setattr(masking, "is_signed", lambda *given: True)
    assert let_through() >= {"a stranger under a known name", "a client under another's name", "no signature"}


def assert_refused_by_the_record_itself(attack):
    """A record goes forward alone, whoever asks."""
    with raises(OpeningRecordError, "mismatch", match="new name, of releases that each come after"):
        allowed(opener_of(MemoryOpeningRecord()), attack)


def test_a_helper_that_does_not_count_releases_would_be_noticed(monkeypatch):
    def unordered(header, last):
        return None

    monkeypatch.setattr(opening, "_check_follows", unordered)
    assert_refused_by_the_record_itself(ATTACKS["a subset under the next name"])
    monkeypatch.setattr(opening_record, "check_forward", lambda *given: None)
    assert let_through() >= {"a subset under the next name", "the original after its carry-over"}


def test_a_helper_that_knows_sets_by_their_name_alone_would_be_noticed(monkeypatch):
    """A set opened twice with one client less: the difference of its two answers is that client's mask."""
    real = Opener._record_set

    def by_name(page, name, digest, headers):
        if page.set_digest(headers[0].session, name) is None:
            real(page, name, digest, headers)

    monkeypatch.setattr(Opener, "_record_set", staticmethod(by_name))
    assert let_through() >= {"a subset under the same name", "another order under the same name"}
    opener, releases = opener_of(MemoryOpeningRecord()), round_of()
    both = [opener.open("s", "1", part).total for part in (releases, releases[:5])]
    assert (both[0] - both[1] == mask_of(releases[5], "left")).all()


def test_a_helper_that_does_not_look_at_seals_before_it_records_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Opener, "_seed", lambda *given: bytes(32))
    assert let_through() == {"stolen seals", "swapped seals", "a seal that does not open"}


def test_a_helper_that_remembers_in_memory_would_be_noticed():
    """Started again, it has forgotten what it opened: P_2 - P_0 beside P_1 is one release by itself."""
    attack = ATTACKS["P_2 - P_0 of everybody after P_1"]
    (((_, first),), second) = attack.before, attack.releases
    opener_of(MemoryOpeningRecord()).open("s", "1", first)
    opener_of(MemoryOpeningRecord()).open("s", "2", second)


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.before])
def test_a_helper_that_was_started_again_refuses_what_it_refused(tmp_path, name):
    attack, path = ATTACKS[name], tmp_path / "opened.db"
    SQLiteOpeningRecord.create(path, helper=LEFT.entry("left"))
    for opened, releases in attack.before:
        opener_of(SQLiteOpeningRecord(path)).open("s", opened, releases)
    assert not allowed(opener_of(SQLiteOpeningRecord(path)), replace(attack, before=[]))


# Clients, helpers and a server together.


def policy(**changes):
    options = {"trust": "secure-aggregation", "clip_norm": 1.0, "batch_size": 1, "max_participations": 12, "mu": 1.0}
    return PrivacyPolicy(**{**options, "sums": SumAssumption(2, 3), **changes})


class Federation:
    """Clients with ledgers, helpers with records, and a server that adds up."""

    def __init__(self, roster=ROSTER, *, bound=True, ledgers=None, records=None, **changes):
        self.roster, self.policy = roster, policy(**changes)
        self.ledgers = ledgers or {name: MemoryLedger() for name in CLIENTS}
        self.clients = {
            name: Privatizer(
                self.policy, D, 12, self.ledgers[name], SimulatedKeys(1, name), roster=roster.digest if bound else ""
            )
            for name in CLIENTS
        }
        self.masks = {name: Masking(name, key_of(name), roster) for name in CLIENTS}
        self.helpers = [
            Opener(name, HelperKey.simulated(SEED, name), roster, record)
            for name, record in zip(HELPERS, records or [MemoryOpeningRecord(), MemoryOpeningRecord()], strict=True)
        ]
        self.acks = dict.fromkeys(CLIENTS, 0)

    def release(self, name):
        rows = np.random.Generator(np.random.Philox(key=ord(name))).normal(size=(12, D))
        return self.clients[name].release("s", self.acks[name], lambda samples: rows[samples])

    def masked(self, name, release):
        return self.masks[name].mask(release, "s", self.policy)

    def opened(self, name, masked):
        total = sum((one.counts for one in masked), np.zeros(D, np.uint64))
        for helper, entry in zip(self.helpers, self.roster.helpers, strict=True):
            answer = helper.open("s", name, [one.sealed for one in masked])
            assert is_opening(entry, "s", answer)
            total -= answer.total
        return total.astype(np.int64)


@pytest.mark.parametrize("mechanism", ["cancelling", "independent", "tree", "blt"])
def test_the_sums_are_those_without_masks_to_the_last_bit_whatever_is_lost(mechanism):
    """Some replies are lost, and in some rounds too few come: nothing is opened and everything is carried over."""
    federation = Federation(mechanism=mechanism)
    generator = np.random.Generator(np.random.Philox(key=12))
    rounds = 0
    for server_round in range(1, 13):
        asked = generator.choice(CLIENTS, size=5, replace=False)
        releases = {name: federation.release(name) for name in asked}
        came = [name for name in asked if generator.random() < 0.7]
        if len(came) < federation.policy.sums.min_cohort:
            continue
        total = federation.opened(str(server_round), [federation.masked(name, releases[name]) for name in came])
        assert (total == sum(releases[name].counts for name in came)).all()
        federation.acks |= {name: releases[name].release for name in came}
        rounds += 1
    assert 4 <= rounds < 12


def test_a_session_does_not_outlive_its_roster():
    """A helper lost its record, got new keys, and a roster was made with them: it knows nothing of what was opened.

    Clients that went on in the old session would send everything so far to whoever was never acknowledged, and the new
    helper would open it.
    """
    ledgers = {name: MemoryLedger() for name in CLIENTS}
    before = Federation(ledgers=ledgers)
    before.opened("1", [before.masked(name, before.release(name)) for name in CLIENTS])
    keys = [HelperKey.simulated(SEED, "left"), HelperKey.simulated(99, "right")]
    roster = Roster(ROSTER.clients, tuple(key.entry(name) for key, name in zip(keys, HELPERS, strict=True)))
    after = Federation.__new__(Federation)
    after.acks, after.roster, after.policy = dict.fromkeys(CLIENTS, 0), roster, before.policy
    after.clients = {
        name: Privatizer(before.policy, D, 12, ledgers[name], SimulatedKeys(1, name), roster=roster.digest)
        for name in CLIENTS
    }
    with pytest.raises(RefusedError) as refusal:
        after.release("a")
    assert refusal.value.code == protocol.POLICY_CHANGED


def test_a_session_that_outlived_its_roster_would_be_noticed():
    """The planted bug, clients that do not know whose roster a session is: one release by itself, P_2 - P_0 - P_1."""
    ledgers = {name: MemoryLedger() for name in CLIENTS}
    before = Federation(ledgers=ledgers, bound=False)
    releases = {name: before.release(name) for name in CLIENTS}
    before.opened("1", [before.masked(name, release) for name, release in releases.items()])
    again = Federation(ledgers=ledgers, bound=False)  # with records that know nothing
    second = {name: again.release(name) for name in CLIENTS}
    total = again.opened("2", [again.masked(name, release) for name, release in second.items()])
    assert (total == sum(release.counts for release in second.values())).all()
    assert all(release.ack == 0 for release in second.values())


def test_a_corrupt_client_cannot_have_anothers_mask_taken_off_twice():
    """It shows the victim's seals as its own: were they to open, its sum would have the victim's mask twice."""
    victim = release_of("a")
    thief = signed(replace(release_of("f"), seals=victim.seals), key_of("f"))
    with pytest.raises(OpeningRefusedError) as refusal:
        opener_of(MemoryOpeningRecord()).open("s", "1", [*round_of("bcde"), thief])
    assert "the seal of client 'f' does not open" in refusal.value.why


def test_an_opening_says_nothing_of_a_single_mask():
    """All there is of data in an answer is one vector of the sum's length."""
    answer = opener_of(MemoryOpeningRecord()).open("s", "1", round_of())
    assert set(vars(answer)) == {"helper", "opening", "set_digest", "total", "signature"}
    assert isinstance(answer, Opening)
    assert answer.total.shape == (D,)


def test_a_real_client_must_know_the_roster_of_its_sessions(tmp_path):
    ledger = SQLiteLedger.create(tmp_path / "ledger.db", budget_mu=2.0, delta=1e-5)
    chosen, options = policy(budget_mu=2.0), {"data": row_bytes(range(12))}
    with raises(ConfigurationError, "missing", "roster"):
        Privatizer(chosen, D, 12, ledger, ledger.keys(), **options)
    Privatizer(chosen, D, 12, ledger, ledger.keys(), roster=ROSTER.digest, **options)
