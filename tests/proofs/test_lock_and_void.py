"""docs/proofs/secure-aggregation.md, its steps about promises and void sets: all courses of small cases.

The helpers are real ones; a set is one release of each of two clients. *Privacy*: one honest helper is asked by a
server that works with the other helper, which signs whatever it is shown; after every course of answers and void sets
the exact mu of what was answered is at most the claim. *Liveness*: two honest helpers are asked by a server that does
what it likes and then turns honest; from wherever it left them, every promise is kept and both open a next set. A
helper that is built wrongly fails one of the two.
"""

import itertools
import logging
from collections import Counter, deque
from functools import cache

import pytest
from murmurfl.privacy import (
    MemoryOpeningRecord,
    Opener,
    OpeningRecordError,
    OpeningRefusedError,
    PrivacyPolicy,
    SumAssumption,
)
from murmurfl.privacy.sums import opening_rule as rule
from murmurfl.privacy.sums.masking import checked_header, opened_seal
from murmurfl.privacy.sums.opening_rule import OpenedSession, OpenedSet, SignedOpening, set_digest

from tests.harness.masked_releases import HELPERS, ROSTER, opener_of, release_of
from tests.harness.transcripts import ROUNDING, Opened, Stream, Transcript

CLIENTS = ("a", "b")
POLICY = PrivacyPolicy(1.0, 1, 3, 1.5, trust="secure-aggregation", sums=SumAssumption(2, 2), budget_mu=3.0)
MU, STREAM = POLICY.plan(2).mu, Stream.of_plan(POLICY.plan(2))
ACKS = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1), (0, 1, 2)]
"""What each of three releases of a client may be built on: acknowledgements move forward."""
COURSES = list(itertools.combinations_with_replacement(ACKS, 2))
SIGNED = {helper: opener_of(MemoryOpeningRecord(), helper)._key for helper in HELPERS}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The same checks of the same bytes are made once, and nothing is logged."""
    header, seed = (
        cache(lambda sealed: checked_header(sealed, ROSTER)),
        cache(lambda sealed, helper: seed_of(sealed, helper)),
    )
    monkeypatch.setattr(rule, "checked_header", lambda sealed, roster: header(sealed))
    monkeypatch.setattr(rule, "opened_seal", lambda sealed, header, helper, key: seed(sealed, helper))
    monkeypatch.setattr(rule, "is_signed", cache(rule.is_signed))
    monkeypatch.setattr(type(SIGNED["left"]), "sign", cache(type(SIGNED["left"]).sign))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def seed_of(sealed, helper):
    return opened_seal(sealed, rule.Header.from_bytes(sealed.header), helper, SIGNED[helper])


@cache
def sealed(client, release, ack):
    return release_of(client, release, ack, min_cohort=len(CLIENTS))


class Releases(tuple):
    """The releases of a set, known by itself: hashing all their bytes again and again would take long."""

    __slots__ = ()
    __hash__, __eq__ = object.__hash__, object.__eq__


@cache
def made(versions):
    """The set of these releases, one of each client, with what each is built on."""
    return Releases(sealed(name, *version) for name, version in zip(CLIENTS, versions, strict=True))


def members(acks, numbers):
    """The set of releases of these numbers."""
    return made(tuple((k, its[k - 1]) for k, its in zip(numbers, acks, strict=True)))


@cache
def signature(helper, name, releases):
    """A helper's word that it opened a set, whether it did or not."""
    signed = rule._signed_digest(helper, "s", name, digest_of(name, releases), bytes(32))
    return SignedOpening(helper, bytes(32), SIGNED[helper].sign(signed))


@cache
def digest_of(name, releases):
    return set_digest("s", name, releases)


def line_of(opened):
    return opened.to_bytes()


@cache
def set_of(line):
    return OpenedSet.from_bytes(line)


class Helper:
    """A real helper whose record can be put back, and the sets that it has answered."""

    def __init__(self, name):
        self.name, self.record = name, MemoryOpeningRecord()
        self.opener, self.answered, self.promised = opener_of(self.record, name), frozenset(), frozenset()

    @property
    def session(self):
        return self.record.session("s")

    @property
    def state(self):
        kept = self.session
        tables = frozenset(kept.sets.items()), frozenset(map(line_of, kept.voids)), frozenset(kept.last.items())
        return *tables, kept.lock and line_of(kept.lock), self.promised, self.answered

    @state.setter
    def state(self, state):
        sets, voids, last, lock, self.promised, self.answered = state
        terms, lock = TERMS if last else None, lock and set_of(lock)
        self.record.sessions["s"] = OpenedSession(terms, lock, dict(sets), list(map(set_of, voids)), dict(last))

    @property
    def last(self):
        return {name: self.session.last.get(name) for name in CLIENTS}

    def lock(self, name, releases):
        try:
            if self.opener.view("s", name, releases, lock=True).would_open == "locked":
                self.promised |= {(name, releases)}
        except OpeningRecordError:
            pytest.fail("the rule asked for what a record refuses")

    def open(self, name, releases):
        try:
            self.opener.open("s", name, releases)
        except OpeningRefusedError:
            return False
        self.answered |= {(name, releases)}
        self.promised -= {(name, releases)}
        return True

    def void(self, name, releases, seen):
        before = len(self.session.voids)
        try:
            said = self.opener.void("s", name, releases, seen).would_open
        except OpeningRefusedError:
            return ""
        self.promised = frozenset() if len(self.session.voids) != before else self.promised
        return said


TERMS = rule.SessionTerms.of(rule.Header.from_bytes(release_of("a", min_cohort=2).header))


def courses(start, steps):
    """Yields every state that is reached by steps, each a function of a state that gives another or the same one."""
    seen, waiting = {start}, deque([start])
    while waiting:
        state = waiting.popleft()
        yield state
        for step in steps:
            after = step(state)
            if after not in seen:
                seen.add(after)
                waiting.append(after)


# Privacy.


def answers(acks, most_void):
    """What one honest helper has answered in every course, as sets of (name, releases), and that it keeps its word."""
    helper, sets = Helper("left"), [members(acks, numbers) for numbers in itertools.product((1, 2, 3), repeat=2)]
    start = helper.state

    def opens(state, releases):
        helper.state = state
        helper.open(str(1 + len(helper.session.sets)), releases)
        return helper.state

    def declares(state, releases, name):
        helper.state = state
        if len(helper.session.voids) < most_void:
            helper.void(name, releases, signature("right", name, releases))
        return helper.state

    def asks_void_sets_again(state):
        helper.state = state
        for void in map(set_of, state[1]):
            for releases in sets:
                if digest_of(void.opening, releases) == void.set_digest:
                    helper.open(void.opening, releases)
        return helper.state

    steps = [lambda state, releases=one: opens(state, releases) for one in sets]
    steps += [lambda state, releases=one, name=name: declares(state, releases, name) for one in sets for name in "1x"]
    return {state[-1] for state in courses(start, [*steps, asks_void_sets_again])}


@cache
def exact_mu(acks, answered):
    """The exact mu of the worst sample in what was answered."""
    sets = [
        [Opened(name, k, its[k - 1]) for name, k, its in zip(CLIENTS, numbers, acks, strict=True)]
        for numbers in sorted(answered)
    ]
    return Transcript(STREAM, sets).worst().mu


def worst(acks, **options):
    """The most mu of all courses, and whether a contribution was ever in two answers."""
    told, twice = 0.0, False
    for one in answers(acks, **options):
        answered = [tuple(rule.Header.from_bytes(its.header).release for its in releases) for _, releases in one]
        told = max(told, exact_mu(acks, frozenset(answered)))
        for place, its in enumerate(acks):
            covered = [k for numbers in answered for k in range(its[numbers[place] - 1] + 1, numbers[place] + 1)]
            twice |= len(covered) > len(set(covered))
    return told, twice


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("acks", "most_void"), [*((acks, 1) for acks in COURSES), (((0, 0, 2), (0, 1, 2)), 2)])
def test_void_sets_never_make_what_is_answered_tell_more(acks, most_void):
    """Every course of three releases of each client, with void sets at any time."""
    told, twice = worst(acks, most_void=most_void)
    assert 0.5 * MU < told <= MU * ROUNDING
    assert not twice, "a sample moves what is answered once"


def test_a_helper_that_answers_a_void_set_is_caught(monkeypatch):
    """P_2 - P_0 of one client beside P_2 - P_1 of the other is void once P_1 was answered, and is answered too."""
    real = Opener._record_set

    def answers_all_the_same(page, opening, digest, headers):
        if digest not in page.voids("s", opening):
            real(page, opening, digest, headers)

    monkeypatch.setattr(Opener, "_record_set", staticmethod(answers_all_the_same))
    told, twice = worst(((0, 0, 2), (0, 1, 2)), most_void=1)
    assert told > 1.15 * MU
    assert twice


def test_a_helper_whom_a_void_set_takes_back_is_caught(monkeypatch):
    """P_1 is void after P_2 was answered, and P_3 - P_1 is answered."""
    monkeypatch.setattr(OpenedSet, "moves", lambda self, last: dict(self.clients))
    assert worst(((0, 0, 1), (0, 1, 2)), most_void=1)[1]


# Liveness.

NAMES = ("1", "2")


RELEASES = [((1, 0), (1, 0)), ((2, 0), (1, 0)), ((1, 0), (2, 0)), ((2, 0), (2, 0)), ((2, 1), (2, 1)), ((2, 1), (2, 0))]
SETS = [(name, made(pair)) for name in NAMES for pair in RELEASES]
"""Of each client its release and what that is built on: sets that follow, overlap and exclude each other."""


class Pair:
    """Two honest helpers, and a server that has kept every set and every answer."""

    def __init__(self):
        self.helpers = [Helper(name) for name in HELPERS]

    @property
    def state(self):
        return tuple(helper.state for helper in self.helpers)

    @state.setter
    def state(self, state):
        for helper, its in zip(self.helpers, state, strict=True):
            helper.state = its

    def shown(self, place, name, releases):
        """What the server can show of the other helper: its word, or one that is forged."""
        other = self.helpers[1 - place]
        true = (name, releases) in other.answered
        return signature(other.name, name, releases) if true else SignedOpening(other.name, bytes(32), bytes(64))

    def after(self, state, place, ask, name, releases):
        """The state after a hostile server has asked."""
        self.state = state
        helper = self.helpers[place]
        if ask == "void":
            helper.void(name, releases, self.shown(place, name, releases))
        else:
            getattr(helper, ask)(name, releases)
        return self.state

    def meet(self, state):
        """Why the helpers do not come to open a next set although the server is honest from here on; or nothing."""
        self.state = state
        for helper in self.helpers:
            for name, releases in helper.promised:
                if not helper.open(name, releases):
                    return "a promise is not kept"
        for place, helper in enumerate(self.helpers):
            for name, releases in self.helpers[1 - place].answered:
                if not helper.void(name, releases, self.shown(place, name, releases)):
                    return "a set that is open elsewhere is neither open here nor void"
        last = self.helpers[0].last
        if last != self.helpers[1].last:
            return "clients cannot build on what both helpers take for opened"
        following = made(tuple((3, 0 if last[name] is None else last[name].release) for name in CLIENTS))
        for helper in self.helpers:
            helper.lock("next", following)
        for helper in self.helpers:
            if ("next", following) not in helper.promised or not helper.open("next", following):
                return "the next set is not opened"
        return ""


def ends(sets):
    """Yields how it ends from every state that a hostile server can bring about with these sets, the nearest first."""
    pair = Pair()
    asked = [(place, ask, *one) for place in (0, 1) for ask in ("lock", "open", "void") for one in sets]
    steps = [lambda state, given=given: pair.after(state, *given) for given in asked]
    return (pair.meet(state) for state in courses(pair.state, steps))


def test_wherever_a_hostile_server_left_them_helpers_go_on_with_an_honest_one():
    found = Counter(ends(SETS))
    assert set(found) == {""}
    assert found[""] > 500


def first_dead_end():
    return next(filter(None, ends(SETS)))


APART = "clients cannot build on what both helpers take for opened"


def test_a_helper_that_declares_void_what_nobody_signed_is_caught(monkeypatch):
    """P_2 - P_0 is void at one helper and open nowhere, and the other has opened P_1: nothing can follow both."""
    monkeypatch.setattr(SignedOpening, "is_signed", lambda *given: True)
    assert first_dead_end() == APART


def test_a_helper_that_does_not_move_clients_on_is_caught(monkeypatch):
    real = OpenedSet.moves
    monkeypatch.setattr(OpenedSet, "moves", lambda self, last: {} if self.kind == "void" else real(self, last))
    assert first_dead_end() == APART


def test_a_helper_that_answers_another_set_than_it_promised_is_caught(monkeypatch):
    monkeypatch.setattr(MemoryOpeningRecord, "lock", lambda self, session: None)
    assert first_dead_end() == "a promise is not kept"


def test_helpers_that_declare_nothing_void_end_a_session_at_its_first_half_opened_set(monkeypatch):
    def refuses(*given):
        raise OpeningRefusedError("it knows no such thing")

    monkeypatch.setattr(Opener, "void", refuses)
    assert first_dead_end() == "a set that is open elsewhere is neither open here nor void"
