"""A server under secure aggregation that wants single releases: it may ask clients and helpers anything, in any order.

It adapts. It tells clients acknowledgements that are true, old, forged or of another session; it keeps every masked
release it ever got, and asks helpers for sets of them that are right, too small, mixed, repeated, renamed, altered or
padded with releases of colluding clients, whose keys it has. All that helpers ever opened is handed on.
"""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from murmurfl.privacy import Header, Release, Sealed, SumAssumption, protocol

from tests.harness.grid import ask_real_node

SESSIONS = ("one", "two", "three", "four", "five")
# A client that was told of an opening that never was is of no more use in its session: in the first the server lies
# rarely, in the third often.
LIES = dict(zip(SESSIONS, (0.01, 0.03, 0.3, 0.1, 0.1), strict=True))
WEAKER = {
    "mu": 1e9, "trust": "untrusted-server", "trust.min-cohort": 1, "trust.min-honest": 1,
    "roster": "{}", "roster-digest": "0" * 64,
    "trust.helpers": [], "noise-quality": "fast", "mechanism": "none", "max-participations": 10**6,
}  # fmt: skip


class SumsAttack:
    """Requests to clients of a softmax model with two classes, and to helpers.

    Parameters
    ----------
    clients : dict of str to app
        What answers for each client.
    helpers : dict of str to app
    policy : PrivacyPolicy
        The clients'.
    colluders : dict of str to Masking
        Clients whose keys the server has.
    features, seed : int
    """

    def __init__(self, clients, helpers, policy, colluders, features, seed):
        self.clients, self.helpers, self.policy, self.colluders = clients, helpers, policy, colluders
        self.honest = [name for name in clients if name not in colluders]
        self.shapes = [(2, features), (2,)]
        self.generator = np.random.Generator(np.random.Philox(key=seed))
        self.pool = defaultdict(lambda: defaultdict(list))  # session, client: all masked releases, in order
        self.last = defaultdict(dict)  # session and helper, client: the header of what it opened last
        self.opened = defaultdict(list)  # helper: the sets it opened
        self.asked = []  # sets as they were asked for
        self.codes = Counter()
        self.names = 0

    def on(self, requests):
        """So many requests, each of a kind that is drawn."""
        while requests > 0:
            if self.generator.random() < 0.3:
                requests -= self.planned_round(self.one_of(SESSIONS))
            elif self.generator.random() < 0.2:
                requests -= self.ask_client()
            else:
                requests -= self.ask_helper()

    def favourite(self, session):
        """The helper that the server gets most of a session's sets opened by; the others are asked now and then."""
        helpers = sorted(self.helpers)
        return (
            helpers[SESSIONS.index(session) % len(helpers)] if self.generator.random() < 0.9 else self.one_of(helpers)
        )

    def one_of(self, things):
        things = list(things)
        return things[int(self.generator.integers(len(things)))]

    # Clients.

    def planned_round(self, session):
        """What the server thinks is best for it in a session; what the helper then refuses is still not shown."""
        helper = sorted(self.helpers)[SESSIONS.index(session) % len(self.helpers)]
        return PLANS[session](self, session, helper)

    def honest_round(self, session, helper):
        """As an honest server would, but for the helpers, of which one alone is asked; a client is away."""
        absent = self.one_of(self.clients)
        asked = [name for name in self.clients if name != absent]
        for name in asked:
            self.train(name, session, self.known_release(session, helper, name))
        self.open(helper, session, self.new_name(), self.all_fitting(session, helper, asked))
        return len(asked) + 1

    def lean_round(self, session, helper):
        """Sums as small as they may be, always of the same clients: nobody else's noise is in them.

        Colluders fill them up with releases of their own make. Before that they try it with one honest client alone,
        and say that they are content with few.
        """
        asked = self.honest[: self.policy.sums.min_cohort - len(self.colluders)]
        for name in asked:
            self.train(name, session, self.known_release(session, helper, name))
        for modest, honest in ((True, asked[:1]), (False, asked)):
            forged = [self.forged(session, helper, name, modest=modest) for name in self.colluders]
            self.open(helper, session, self.new_name(), [*forged, *self.all_fitting(session, helper, honest)])
        return len(asked) + 2

    def deaf_round(self, session, helper):
        """One client is told that nothing of its was ever opened, the others what is true: it is added up again."""
        victim, *others = self.clients
        self.train(victim, session, 0)
        for name in others:
            self.train(name, session, self.known_release(session, helper, name))
        members = [*self.pool[session][victim][-1:], *self.all_fitting(session, helper, others)]
        self.open(helper, session, self.new_name(), members)
        return len(others) + 2

    def subsets_round(self, session, helper):
        """All are told that nothing was opened, and two sums of different clients are asked for: their difference."""
        for name in self.clients:
            self.train(name, session, 0)
        newest = [self.pool[session][name][-1] for name in self.clients if self.pool[session][name]]
        for _ in range(2):
            self.generator.shuffle(newest)
            self.open(helper, session, self.new_name(), newest[: self.policy.sums.min_cohort])
        return len(self.clients) + 2

    def all_fitting(self, session, helper, names):
        members = [self.fitting(session, helper, name) for name in names]
        return [one for one in members if one is not None]

    def ask_client(self):
        session, name = self.one_of(SESSIONS), self.one_of(self.clients)
        told = self.known_release(session, self.favourite(session), name)
        if self.generator.random() < 0.1:
            kind = self.one_of(["evaluate", "query", "query.open", "train.other"])
            self.answer(self.clients[name], kind, {protocol.ASK: self.one_of(["privacy", "samples", "hello"])})
        elif self.generator.random() < LIES[session]:  # something of its was opened that was not, or nothing was
            self.train(name, session, self.one_of([0, 0, -1, 1, 2, len(self.pool[session][name]), 7, 2**31 - 1]))
        elif self.generator.random() < 0.3:
            self.train(name, session, told, **WEAKER)
        elif self.generator.random() < 0.3:
            self.train(name, session, 0)
        else:
            self.train(name, session, told)
        return 1

    def known_release(self, session, helper, name):
        header = self.last[session, helper].get(name)
        return header.release if header else 0

    def train(self, name, session, ack, **entries):
        points = [np.zeros(shape) for shape in self.shapes]
        config = {protocol.SERVER_ROUND: 1, protocol.SESSION: session, protocol.ACK: ack, **entries}
        reply = self.answer(self.clients[name], "train", config, points)
        if reply is None or protocol.ARRAYS not in reply:
            return
        arrays = [array.numpy() for array in reply[protocol.ARRAYS].values()]
        assert all(array.dtype == np.uint64 for array in arrays), "a release left without masks"
        config = reply[protocol.CONFIG]
        sealed = Sealed(config[protocol.HEADER], tuple(config[protocol.SEALS]), config[protocol.SIGNATURE])
        self.pool[session][name].append(sealed)

    # Helpers.

    def fitting(self, session, helper, name):
        """A release that the helper could open next: built on the last one of this client that it opened."""
        last = self.last[session, helper].get(name)
        expected = last.release_id if last else "00" * 16
        for sealed in reversed(self.pool[session][name]):
            header = Header.from_bytes(sealed.header)
            if header.ack_id == expected and (last is None or header.release > last.release):
                return sealed
        return None

    def ask_helper(self):
        session = self.one_of(SESSIONS)
        helper = self.favourite(session)
        fitting = [self.fitting(session, helper, name) for name in self.clients]
        members = [one for one in fitting if one is not None]
        self.generator.shuffle(members)
        opening, draw = self.new_name(), self.generator.random()
        if draw < 0.2:  # as few as there may be, or a few less
            members = members[: self.policy.sums.min_cohort - int(self.generator.integers(0, 3))]
        elif draw < 0.35:  # releases of the colluders' own make in the place of most
            modest = self.generator.random() < 0.5
            forged = [self.forged(session, helper, name, modest=modest) for name in self.colluders]
            honest = [one for one in members if Header.from_bytes(one.header).client not in self.colluders]
            members = [
                *forged,
                *honest[: int(self.generator.integers(1, self.policy.sums.min_cohort - len(forged) + 1))],
            ]
        elif draw < 0.5 and self.asked:  # a set of old, less one, or with one that is older or newer
            session, helper, opening, members = self.one_of(self.asked)
            members = list(members)
            members.pop(int(self.generator.integers(len(members))))
            name = self.one_of(self.clients)
            if self.pool[session][name] and self.generator.random() < 0.5:
                members.append(self.one_of(self.pool[session][name]))
            opening = opening if self.generator.random() < 0.5 else self.new_name()
        elif draw < 0.6 and self.asked:  # a set of old under a new name, of another helper, or just once more
            session, helper, opening, members = self.one_of(self.asked)
            opening = opening if self.generator.random() < 0.5 else self.new_name()
            helper = helper if self.generator.random() < 0.8 else self.one_of(self.helpers)
        elif draw < 0.75:  # anything there is: releases that build on nothing, on what was never opened, on old ones
            everything = [one for name in self.clients for one in self.pool[session][name]]
            members = [self.one_of(everything) for _ in range(self.policy.sums.min_cohort)] if everything else []
        elif draw < 0.85 and members:  # a header with another acknowledgement, cohort, number or session
            members = [self.altered(members[0]), *members[1:]]
        elif draw < 0.9 and members:
            members = [*members, members[0]]
        elif draw < 0.95:
            session = self.one_of(SESSIONS)
        self.open(helper, session, opening, members)
        return 1

    def forged(self, session, helper, name, *, modest):
        """A colluder's release that says whatever it must, and, if it is modest, that a small sum will do."""
        last = self.last[session, helper].get(name)
        number = last.release + 1 if last else 1
        ack = bytes.fromhex(last.release_id) if last else bytes(16)
        plan = self.policy.plan(sum(int(np.prod(shape)) for shape in self.shapes))
        counts = np.zeros(sum(int(np.prod(shape)) for shape in self.shapes), np.int64)
        made = Release(counts, plan.grid.spacing, number, number - 1, self.generator.bytes(16), ack)
        fewest = self.policy.sums.min_honest
        policy = replace(self.policy, sums=SumAssumption(fewest, fewest)) if modest else self.policy
        return self.colluders[name].mask(made, session, policy).sealed

    def altered(self, sealed):
        header = Header.from_bytes(sealed.header)
        last = [one for releases in self.pool.values() for of_one in releases.values() for one in of_one]
        other = Header.from_bytes(self.one_of(last).header)
        changed = self.one_of(
            [
                {"ack_id": other.release_id},
                {"min_cohort": 1},
                {"release": header.release + 1},
                {"session": self.one_of(SESSIONS)},
                {"client": other.client},
                {"release_mode": "independent"},
            ]
        )
        return Sealed(replace(header, **changed).to_bytes(), sealed.seals, sealed.signature)

    def new_name(self):
        self.names += 1
        return str(self.names)

    def open(self, helper, session, opening, members):
        config = {
            protocol.SESSION: session,
            protocol.OPENING: opening,
            protocol.HELPER: helper,
            protocol.HEADER: [one.header for one in members],
            protocol.SEALS: [seal for one in members for seal in one.seals],
            protocol.SIGNATURE: [one.signature for one in members],
        }
        reply = self.answer(self.helpers[helper], protocol.QUERY_OPEN, config)
        if members:
            self.asked.append((session, helper, opening, members))
        if reply is None:
            return
        headers = [Header.from_bytes(one.header) for one in members]
        self.opened[helper].append(headers)
        for header in headers:
            before = self.last[session, helper].get(header.client)
            if before is None or header.release > before.release:
                self.last[session, helper][header.client] = header

    # Both.

    def answer(self, app, kind, config, points=()):
        """What comes back, as records; None for a refusal, which is counted."""
        records = {protocol.CONFIG: ConfigRecord({protocol.VERSION: protocol.PROTOCOL_VERSION, **config})}
        if points:
            records |= {key: ArrayRecord(points) for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)}
        try:
            reply = ask_real_node(app, RecordDict(records), kind)
        except ValueError:  # the app knows no such kind of message: a node's executor has an answer of its own to it
            self.codes[protocol.MALFORMED_REQUEST] += 1
            return None
        if reply.has_error():
            self.codes[reply.error.code] += 1
            return None
        return reply.content


PLANS = dict(
    zip(
        SESSIONS,
        (
            SumsAttack.lean_round,
            SumsAttack.honest_round,
            SumsAttack.honest_round,
            SumsAttack.deaf_round,
            SumsAttack.subsets_round,
        ),
        strict=True,
    )
)
