"""docs/proofs/secure-aggregation.md, the steps about helpers: whatever a server asks for, what one honest helper opens
tells no more than mu.

Real clients make real masked releases, the server asks at random and keeps, mixes, repeats and forges what it likes.
It has the keys of all other helpers and of the colluding clients, so what it learns is the sums that the honest helper
opened; their exact mu comes from their headers.
"""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, RefusedError, SimulatedKeys, SumAssumption
from murmurfl.privacy.release.ledgered_privatizer import Release
from murmurfl.privacy.sums import opening_rule as opening
from murmurfl.privacy.sums import opening_rule as opening_record
from murmurfl.privacy.sums.masking import NOTHING_OPENED, Header, Masking, add_mask, checked_header, opened_seal
from murmurfl.privacy.sums.opening_rule import MemoryOpeningRecord, Opener, OpeningRefusedError
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster

from tests.harness.transcripts import ROUNDING, Stream, Transcript, generator, opened_sets

CLIENTS, COLLUDERS, HELPERS = ("a", "b", "c", "d"), ("e", "f"), ("honest", "corrupt")
SESSIONS, K = ("s", "t"), 12
ROSTER = Roster.simulated(1, (*CLIENTS, *COLLUDERS), HELPERS)


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("murmurfl.privacy")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def policy(min_cohort=4, **changes):
    options = {"trust": "secure-aggregation", "sums": SumAssumption(2, min_cohort), "budget_mu": 3.0, **changes}
    return PrivacyPolicy(1.0, 1, K, 1.5, **options)


class HostileServer:
    """Asks clients and one helper at random, remembers all it has got, and opens what it may at the end of a round.

    Parameters
    ----------
    chosen : PrivacyPolicy
        Of all clients.
    told_zero : collection of str
        Clients that are told for ever that nothing of theirs was opened.
    """

    def __init__(self, chosen, *, key=1, record=MemoryOpeningRecord, told_zero=()):
        self.policy, self.chance, self.told_zero = chosen, generator(key), told_zero
        self.clients = {
            name: Privatizer(chosen, 2, 2 * K * len(SESSIONS), MemoryLedger(), SimulatedKeys(1, name))
            for name in CLIENTS
        }
        self.masking = {name: Masking(name, ClientKey.simulated(1, name), ROSTER) for name in (*CLIENTS, *COLLUDERS)}
        self.opener = Opener("honest", HelperKey.simulated(1, "honest"), ROSTER, record())
        self.releases, self.last, self.opened, self.refused, self.requests = [], {}, {}, 0, 0

    def pick(self, values):
        return values[int(self.chance.integers(len(values)))]

    def opened_last(self, session, name):
        if name in self.told_zero:
            return 0, NOTHING_OPENED
        return self.last.get((session, name), (0, NOTHING_OPENED))

    def ask_a_client(self, session, name):
        """With an ack that is true; now and then with an older one, and d's with any."""
        ack, _ = self.opened_last(session, name)
        if self.chance.random() < 0.1:
            ack = int(self.chance.integers(0, K if name == "d" else ack + 1))
        self.requests += 1
        try:
            release = self.clients[name].release(session, ack, lambda chosen: np.zeros((1, 2)))
        except RefusedError:
            self.refused += 1
            return
        self.keep(name, session, release)

    def forge(self, session, name):
        """A release of a colluder: as it should be, or with any number and any ids."""
        number, identity = self.last.get((session, name), (0, NOTHING_OPENED))
        identity = NOTHING_OPENED if name in self.told_zero else identity
        if self.chance.random() < 0.1:
            number = int(self.chance.integers(0, 200))
            identity = self.pick([NOTHING_OPENED, *(bytes.fromhex(header.release_id) for _, header in self.releases)])
        spacing = self.policy.plan(2).grid.spacing
        forged = Release(np.zeros(2, np.int64), spacing, number + 1, 0, self.chance.bytes(16), identity)
        self.keep(name, session, forged)

    def keep(self, name, session, release):
        sealed = self.masking[name].mask(release, session, self.policy).sealed
        self.releases.append((sealed, checked_header(sealed, ROSTER)))

    def ask_the_helper(self, session, name, chosen):
        self.requests += 1
        try:
            self.opener.open(session, name, [one for one, _ in chosen])
        except OpeningRefusedError:
            self.refused += 1
            return
        if (session, name) in self.opened:
            return  # the same set again, and the same answer
        self.opened[session, name] = chosen
        for _, header in chosen:
            self.last[session, header.client] = header.release, bytes.fromhex(header.release_id)

    def latest(self, session):
        """The latest release of everybody."""
        found = {header.client: (sealed, header) for sealed, header in self.releases if header.session == session}
        return [found[name] for name in sorted(found)]

    def fitting(self, session):
        """Of the latest, those that an honest server might open; of them as few honest ones as may be."""
        good = []
        for sealed, header in self.latest(session):
            last, identity = self.last.get((session, header.client), (0, NOTHING_OPENED))
            if header.release > last and header.ack_id == identity.hex():
                good.append((sealed, header))
        bad = [one for one in good if one[1].client in COLLUDERS]
        honest = [one for one in good if one[1].client in CLIENTS]
        return [*honest[: max(1, self.policy.sums.min_cohort - len(bad))], *bad]

    def anything(self, session):
        return [self.pick(self.releases) for _ in range(int(self.chance.integers(1, 7)))]

    def known(self, session):
        """A set that was opened, for another name or in the other session."""
        return list(self.pick(list(self.opened.values())[-3:])) if self.opened else []

    def known_but_one(self, session):
        return self.known(session)[1:]

    def swapped(self, session):
        """A set that fits, with an earlier release of one client in the place of its latest."""
        chosen = self.fitting(session)
        if not chosen:
            return []
        wanted = session, chosen[0][1].client
        earlier = [one for one in self.releases if (one[1].session, one[1].client) == wanted]
        return [self.pick(earlier), *chosen[1:]]

    def run(self, attacks=30):
        """Rounds of both sessions, in turns, until no client has a release left."""
        for number in range(K):
            for session in SESSIONS:
                for name in CLIENTS:
                    self.ask_a_client(session, name)
                for name in COLLUDERS:
                    self.forge(session, name)
                for attack in range(attacks):
                    kinds = [self.anything, self.known, self.known_but_one, self.swapped]
                    name = self.pick([f"{number}-{attack}", str(number), "0"])
                    self.ask_the_helper(self.pick([session, session, *SESSIONS]), name, self.pick(kinds)(session))
                chosen = self.latest(session) if self.told_zero else self.fitting(session)
                self.ask_the_helper(session, f"last-{number}", chosen)
        return self

    def worst(self):
        """The exact mu of the worst sample in all that was opened, colluders' noise known."""
        made = [header for _, header in self.releases]
        sets = opened_sets([[header for _, header in chosen] for chosen in self.opened.values()], made)
        plan = self.policy.plan(2)
        honest = [[one for one in members if one.client in CLIENTS] for members in sets]
        return Transcript(Stream.of_plan(plan), honest).worst().mu


@pytest.mark.parametrize("key", range(3))
def test_whatever_a_server_asks_an_honest_helper_tells_no_more_than_mu(key):
    """A thousand requests of all kinds, in two sessions, with two colluding clients; much of mu is really there."""
    server, mu = HostileServer(policy(), key=key).run(attacks=40), policy().plan(2).mu
    assert server.requests > 1000
    assert server.refused > 500
    assert 0.55 * mu < server.worst() <= mu * ROUNDING


@pytest.fixture
def unchecked_acks(monkeypatch):
    monkeypatch.setattr(opening, "_check_follows", lambda header, last: None)
    monkeypatch.setattr(opening_record, "check_forward", lambda page, opened: None)


def test_a_helper_that_does_not_look_at_acks_is_caught(unchecked_acks):
    server = HostileServer(policy(), told_zero=("a",)).run(attacks=0)
    assert server.worst() > 1.1 * policy().plan(2).mu
    assert server.worst() <= policy().plan(2).loss.worst_case.mu * ROUNDING


class Forgets(MemoryOpeningRecord):
    """The planted bug: what was opened is known until the next request."""

    def exclusive(self):
        return MemoryOpeningRecord().exclusive()


def test_a_helper_that_forgets_what_it_opened_is_caught():
    """Clients are never told that anything was opened, so everything is built on nothing."""
    server = HostileServer(policy(), record=Forgets, told_zero=(*CLIENTS, *COLLUDERS)).run(attacks=60)
    assert server.worst() > 1.05 * policy().plan(2).mu


def test_clients_that_let_the_server_choose_the_smallest_sum_are_caught():
    """The planted bug: min_cohort comes from a message, and the noise is for the h that was meant."""
    told = policy(min_cohort=2)
    assert told.shared_terms(2) == policy().shared_terms(2)
    assert HostileServer(told).run(attacks=5).worst() > 1.1 * policy().plan(2).mu


def test_two_helpers_that_are_shown_different_sets_open_only_sums_of_both():
    """What the two give away fits together where the sets do: in the sum over all of them."""
    chosen = policy()
    server = HostileServer(chosen)
    counts, hidden, sealed = {}, {}, {}
    for name in (*CLIENTS, *COLLUDERS):
        privatizer = Privatizer(chosen, 2, K, MemoryLedger(), SimulatedKeys(1, name))
        for number in (1, 2):
            release = privatizer.release("s", number - 1, lambda chosen: np.zeros((1, 2)))
            masked = server.masking[name].mask(release, "s", chosen)
            counts[name, number], hidden[name, number] = release.counts.astype(np.uint64), masked.counts
            sealed[name, number] = masked.sealed
    one = [[(name, 1) for name in "abcd"], [(name, 2) for name in "abcd"]]
    other = [[("a", 1), ("b", 1), ("c", 2), ("d", 2)], [("a", 2), ("b", 2), ("c", 1), ("d", 1)]]
    total = np.sum([hidden[place] for members in one for place in members], axis=0)
    for helper, sets in zip(HELPERS, (one, other), strict=True):
        for members in sets:
            total -= seeds_of(helper, [sealed[place] for place in members])
    assert (total == np.sum([counts[place] for members in one for place in members], axis=0)).all()
    first = np.sum([hidden[place] for place in one[0]], axis=0)
    first -= seeds_of("honest", [sealed[place] for place in one[0]])
    for members in (*other, *one):
        guess = first - seeds_of("corrupt", [sealed[place] for place in members])
        right = np.sum([counts[place] for place in one[0]], axis=0)
        assert (guess == right).all() == (members == one[0])


def seeds_of(helper, releases):
    """The sum of a helper's keystreams, whatever its rule says."""
    total = np.zeros(2, np.uint64)
    for sealed in releases:
        header = Header.from_bytes(sealed.header)
        add_mask(total, opened_seal(sealed, header, helper, HelperKey.simulated(1, helper)))
    return total


@pytest.mark.parametrize(
    "attack",
    ["one client", "too few", "one many times", "a header edited", "a stranger", "a stranger under a known name",
     "another session's", "a subset in the same round", "a subset in the next round", "P_2 - P_0 after P_1"],
)  # fmt: skip
def test_each_attack_of_the_list_is_refused_and_leaves_no_trace(attack):
    chosen, clients = policy(), {}
    helper = Opener("honest", HelperKey.simulated(1, "honest"), ROSTER, MemoryOpeningRecord())
    masking = {name: Masking(name, ClientKey.simulated(1, name), ROSTER) for name in CLIENTS}
    for name in CLIENTS:
        clients[name] = Privatizer(chosen, 2, 2 * K, MemoryLedger(), SimulatedKeys(1, name))

    def made(name, ack, session="s"):
        release = clients[name].release(session, ack, lambda samples: np.zeros((1, 2)))
        return masking[name].mask(release, session, chosen).sealed

    first, second = [made(name, 0) for name in CLIENTS], [made(name, 0) for name in CLIENTS]
    strange = Roster.simulated(9, (*CLIENTS, "g"), HELPERS)
    unknown_node = Masking(
        "g" if attack == "a stranger" else "a", ClientKey.simulated(9, "g" if attack == "a stranger" else "a"), strange
    )
    forged = unknown_node.mask(
        Release(np.zeros(2, np.int64), chosen.plan(2).grid.spacing, 1, 0, bytes(16), bytes(16)), "s", chosen
    )
    edited = replace(Header.from_bytes(first[0].header), min_cohort=1).to_bytes()
    sets = {
        "one client": first[:1],
        "too few": first[:3],
        "one many times": [first[0]] * 4,
        "a header edited": [replace(first[0], header=edited), *first[1:]],
        "a stranger": [*first[1:], forged.sealed],
        "a stranger under a known name": [*first[1:], forged.sealed],
        "another session's": [*first[1:], made("a", 0, "t")],
        "a subset in the same round": first[:3],
        "a subset in the next round": first[:3],
        "P_2 - P_0 after P_1": second,
    }
    after = attack.startswith(("a subset", "P_2"))
    if after:
        helper.open("s", "1", first)
    name = "1" if attack.endswith("same round") or not after else "2"
    with pytest.raises(OpeningRefusedError) as refusal:
        helper.open("s", name, sets[attack])
    assert str(refusal.value).endswith("its own log says why")
    follow = [made(name, 1) for name in CLIENTS] if after else first
    assert helper.open("s", "3", follow).total.any(), "an honest set is opened all the same"


def test_a_helper_that_ignores_acks_leaves_the_local_mu():
    """P_2 - P_0 for one client beside P_2 - P_1 of the others: their own noise is what is left in the difference."""
    assert math.sqrt(2) * policy().plan(2).mu == pytest.approx(policy().plan(2).loss.worst_case.mu, rel=1e-3)
