"""docs/proofs/secure-aggregation.md, its steps 1 to 8, 18 and 19 at once: trainings on two neighbouring data sets.

Real clients, helpers and a real server, which is killed at any message and resumed from its checkpoint. Replies and
answers are lost, helpers open sets that others never answer, which become void, seals do not open and are made again,
two clients send garbage, and what their sums lost is mended. In the end a hostile server asks each helper once more
for every set that it ever heard of. Everything is drawn from one seed, so that the same happens with both data sets:
what differs is what the victim's sample moves. Whatever one honest helper has answered is a transcript, whose exact mu
is at most the claim.
"""

import logging
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord
from murmurfl.privacy import Header, Opener, OpeningRefusedError, SumAssumption, protocol
from murmurfl.privacy.release.prefix_sums import ReleaseRule
from murmurfl.privacy.sums import opening_rule
from murmurfl.strategies import NothingAggregatedError, OpeningError

from tests.harness.secure import HELPERS, SHAPES, Clients, D, SecureGrid, build, some, trained
from tests.harness.transcripts import ROUNDING, Opened, Stream, Transcript, generator

pytestmark = pytest.mark.usefixtures("no_result_folder")

LIARS, VICTIM, ROUNDS = ("1", "4"), "2", 12
CLIENTS, MIN_COHORT = 8, 4
TERMS = {"sums": SumAssumption(MIN_COHORT - len(LIARS), MIN_COHORT), "max_participations": ROUNDS + 2}


class Killed(BaseException):
    """What a kill -9 is to a test."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Course:
    """One training with everything that happens to it, and what was seen of it."""

    def __init__(self, seed, mechanism, sample, monkeypatch, folder):
        self.chance, self.answered, self.heard = generator(seed), {name: {} for name in HELPERS}, {}
        self.made, self.begins, self.kills, self.sample = {}, {}, 0, sample
        self.refuses = {str(self.chance.integers(1, ROUNDS)): name for name in HELPERS}  # a round that becomes void
        self.clients = Clients(self._samples, SHAPES, CLIENTS, mechanism=mechanism, **TERMS)
        self._mask, self.clients.mask = self.clients.mask, self.masked
        self.grid = SecureGrid(self.clients, lost=0.05, seed=seed)
        self.grid.watch = self.grid.seen = self.trouble
        with monkeypatch.context() as patch:
            for what in ("open", "view", "void"):
                patch.setattr(Opener, what, self.noted(what, getattr(Opener, what)))
            self._train(folder)
            self._ask_for_everything_again()

    def _samples(self, name):
        samples = some(name)
        samples[3] = self.sample if name == VICTIM else samples[3]
        return samples

    def masked(self, name, release, session):
        """A release under masks, noted; liars and broken seals as the course has them."""
        if release.release_id.hex() not in self.made:  # else it is sealed again
            after = self.begins[name, release.release - 1] if release.recovered else release.ack
            self.begins[name, release.release] = after
            self.made[release.release_id.hex()] = release, after
        masked, drawn = self._mask(name, release, session), self.chance.random(3)
        if name in LIARS and drawn[0] < 0.15:
            return replace(masked, counts=self.chance.integers(0, 2**64, size=masked.counts.shape, dtype=np.uint64))
        if drawn[1] < 0.05:
            seals = (masked.sealed.seals[0], bytes(80))
            unsigned = replace(masked.sealed, seals=seals, signature=b"")
            signed = self.clients.masks[name]._key.sign(unsigned.signed)
            return replace(masked, sealed=replace(unsigned, signature=signed))
        return masked

    def trouble(self, kind, helper, message):
        """What becomes of a message to or from a helper: it is lost, or the server is killed while it is under way."""
        if kind == "hello":  # asked for again as long as a clock says
            return message
        drawn = self.chance.random()
        if drawn < 0.03:
            self.kills += 1
            raise Killed
        config = message.content.get(protocol.CONFIG, {}) if message.has_content() else {}
        if kind == "open" and self.refuses.get(config.get(protocol.OPENING)) == helper:
            message.content[protocol.CONFIG] = ConfigRecord({**config, protocol.OPENING: ""})
            return message
        return None if drawn < 0.06 else message

    def noted(self, what, real):
        def asked(opener, session, name, releases, *others, **options):
            releases = tuple(releases)
            self.heard[name, releases] = session
            answer = real(opener, session, name, releases, *others, **options)
            if what == "open":
                self.answered[opener.name][name, releases] = True
            return answer

        return asked

    def _train(self, folder):
        folder.mkdir(parents=True)
        checkpoint = folder / "checkpoint.npz"
        for _ in range(200):
            option = {"min_cohort": MIN_COHORT, "max_failed_aggregations": 99, "max_noise": 1e9}
            asked = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "allow_exhaustion": True}
            self.strategy = strategy = build(secure=option, checkpoint=checkpoint, **asked)
            strategy.clients.sleep = lambda seconds: None
            with suppress(Killed, OpeningError):
                with suppress(NothingAggregatedError):
                    trained(strategy, self.grid, ROUNDS)
                return
        pytest.fail("the training does not end")

    def _ask_for_everything_again(self):
        for opener in self.grid.openers.values():
            for (name, releases), session in list(self.heard.items()):
                for other in (name, "again"):
                    with suppress(OpeningRefusedError):
                        opener.open(session, other, releases)

    def sets(self, helper):
        """What a helper has answered, in order: the releases of each set."""
        return [[Header.from_bytes(one.header) for one in releases] for _, releases in self.answered[helper]]

    def sums(self, helper):
        """What each of these shows of honest clients."""
        return [
            sum(self.made[one.release_id][0].counts for one in members if one.client not in LIARS)
            for members in self.sets(helper)
        ]

    def mu(self, helper):
        """The exact mu of the worst sample in what a helper has answered, beside liars that tell what they know."""
        plan = self.clients.client(VICTIM).privatizer.plan
        sets = []
        for members in self.sets(helper):
            releases = [(one.client, *self.made[one.release_id]) for one in members]
            sets.append([Opened(name, r.release, r.ack, noise_after=after) for name, r, after in releases])
        return Transcript(Stream.of_plan(plan), sets, LIARS).worst().mu, plan.mu


def neighbours(seed, mechanism, monkeypatch, folder):
    """The same course with two data sets that differ in one sample of the victim."""
    samples = (np.full(D, 3.0), np.full(D, -3.0))
    return [Course(seed, mechanism, one, monkeypatch, folder / str(i)) for i, one in enumerate(samples)]


def seen(courses):
    """Of each helper how many of its sums differ, by how much of the sensitivity, and mu over the claim."""
    plan = courses[0].clients.client(VICTIM).privatizer.plan
    for helper in HELPERS:
        sets = [[[(one.client, one.release) for one in its] for its in course.sets(helper)] for course in courses]
        assert sets[0] == sets[1], "nothing that happens depends on data"
        moves = [a - b for a, b in zip(*(course.sums(helper) for course in courses), strict=True)]
        lengths = [np.linalg.norm(move) * plan.grid.spacing / plan.sensitivity for move in moves if np.any(move)]
        mu, claimed = courses[0].mu(helper)
        yield len(lengths), max(lengths, default=0.0), mu / claimed


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize("mechanism", ["cancelling", "decay"])
@pytest.mark.parametrize("seed", range(4))
def test_of_two_neighbouring_data_sets_resumed_trainings_show_one_moved_sum(mechanism, seed, monkeypatch, tmp_path):
    courses = neighbours(seed, mechanism, monkeypatch, tmp_path)
    for moved, length, told in seen(courses):
        assert moved <= 1
        assert length <= 1.0
        assert 0.0 < told <= ROUNDING
    history = courses[0].strategy.history
    assert courses[0].kills > 0
    assert any("did not answer" in report.closed for report in history)
    assert any(report.skipped and "wrong" in report.closed for report in history)
    assert sum(report.aggregated >= MIN_COHORT for report in history) >= ROUNDS / 3


def caught(seed, monkeypatch, folder):
    """Whether a course of a system with a planted bug shows more than it may; of seeds in which the bug can show."""
    found = seen(neighbours(seed, "cancelling", monkeypatch, folder))
    return any(moved > 1 or length > 1 or told > ROUNDING for moved, length, told in found)


def test_a_client_that_sends_skipped_contributions_again_is_caught(monkeypatch, tmp_path):
    """P_k - P_b of the last release b that was used: its noise telescopes too, and samples are in two sums."""
    real, sent = ReleaseRule.advance_mending, {}

    def rewinding(rule, streams, contribution, key, nonce, *, skipped, note=None):
        before = sent.get(key) if skipped else None
        made, recovered = real(rule, streams, contribution + (0 if before is None else before), key, nonce,
                            skipped=skipped, note=note)  # fmt: skip
        sent[key] = contribution
        return made, recovered

    monkeypatch.setattr(ReleaseRule, "advance_mending", rewinding)
    assert caught(7, monkeypatch, tmp_path)


def test_helpers_that_open_what_is_built_on_anything_are_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(opening_rule, "_check_follows", lambda header, last: None)
    monkeypatch.setattr(opening_rule, "check_forward", lambda page, opened: None)
    assert caught(6, monkeypatch, tmp_path)
