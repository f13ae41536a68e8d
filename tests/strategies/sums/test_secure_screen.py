"""Which releases can stand in one sum, so that a broken client costs its own reply and no sum; helpers and rosters."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from murmurfl.privacy import ConfigurationError, OpeningRefusedError, RefusedError, protocol
from murmurfl.privacy.sums import opening_rule
from murmurfl.privacy.sums.masking import MaskedRelease, Masking
from murmurfl.privacy.sums.opening_rule import MemoryOpeningRecord, Opener
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from murmurfl.strategies import HelpersDisagreeError, HelperUnavailableError, Reply, RoundReport
from murmurfl.strategies.aggregation.agreement import CohortAgreement
from murmurfl.strategies.rounds.client_registry import Handshake
from murmurfl.strategies.sums import summation
from murmurfl.strategies.sums.summation import CohortSet, CohortSum, ReplyScreen

from tests.harness.callbacks import AfterRound
from tests.harness.errors import raises
from tests.harness.secure import (
    HELPERS,
    SEED,
    SecureGrid,
    build,
    clients,
    closed_rounds,
    other_header,
    state_bytes,
    trained,
    trained_in_vain,
)

pytestmark = pytest.mark.usefixtures("no_result_folder")


def broken(change, train=trained, **options):
    """A training of six clients, of which "2" does what ``change`` says to its masked releases."""
    made = clients(**options)
    real = made.mask

    def mask(name, release, session):
        masked = real(name, release, session)
        return change(masked) if name == "2" else masked

    made.mask = mask
    grid = SecureGrid(made)
    return train(build(clients_per_round=6, secure={}), grid, rounds=4), grid


def header(**changes):
    return lambda masked: other_header(masked, ClientKey.simulated(SEED, "2"), **changes)


def sealed(**changes):
    return lambda masked: replace(masked, sealed=replace(masked.sealed, **changes))


def short_seals(masked):
    return resealed(masked, (masked.sealed.seals[0], masked.sealed.seals[1][:-1]))


def reformatted(masked):
    """The same header, written in another way."""
    content = json.dumps(json.loads(masked.sealed.header)).encode()
    return replace(masked, sealed=replace(masked.sealed, header=content))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (sealed(signature=bytes(64)), "signed by a client of the roster"),
        (lambda masked: other_header(masked, ClientKey.simulated(SEED, "1")), "signed by a client of the roster"),
        (header(client="5"), "signed by a client of the roster"),
        (sealed(header=b"{}"), "the header of a masked release"),
        (reformatted, "the header of a masked release"),
        (header(roster="0" * 64), "for this roster and its helpers"),
        (header(helpers=["helper-0"]), "for this roster and its helpers"),
        (short_seals, "seal"),
        (header(session="another"), "of another session"),
        (header(release=17), "another client or release"),
        (header(size=11), "another size"),
        (header(terms="1" * 64), "its noise has other terms"),
        (header(spacing=2.0), "its grid has the spacing 2"),
        (header(spacing=0.3), "power of two"),
        (header(builds_on="nothing", ack_id="0" * 32), "build on something else"),
        (header(ack_id="7" * 32), "not built on the last one that was opened"),
        (header(min_cohort=7), "insists on sums of at least 7 releases, and a round has at most 6"),
    ],
)
def test_an_unfit_client_is_named_and_the_rest_opened(change, said, caplog):
    strategy, _ = broken(change)
    assert [(report.aggregated, report.malformed) for report in strategy.history] == [(5, 1)] * 4
    assert "2" not in strategy.acks
    assert "Client '2' cannot be summed with the others: " in caplog.text
    assert said in caplog.text
    assert caplog.text.count("cannot be summed with the others") == 1, "said once, not in every round"
    # And the sum is that of the others: as if the client had never answered.
    assert (strategy.state.x == without_it()).all()


@cache
def without_it():
    """The model of a training in which client "2" never answers."""
    grid = SecureGrid(clients())
    grid.tamper = lambda replies: [reply for reply in replies if reply.metadata.src_node_id != grid.first_node + 2]
    return trained(build(clients_per_round=6, secure={}), grid, rounds=4).state.x


@pytest.mark.parametrize("asks", [True, False])
def test_helpers_would_refuse_every_sum_with_such_a_client_in_it(asks, monkeypatch):
    """What the screening is for: without it, and if helpers were not asked before, one client closes all rounds."""
    monkeypatch.setattr(ReplyScreen, "_problem", lambda *arguments: "")
    if asks:
        strategy, _ = broken(header(ack_id="7" * 32))
        assert [(report.aggregated, report.malformed) for report in strategy.history] == [(5, 1)] * 4
        return
    monkeypatch.setattr(CohortAgreement, "agree", lambda agreement, context, held, cohort: (held, ""))
    with raises(HelperUnavailableError, "unreachable", match=r"in 3 rounds in a row: .* would not promise to open it"):
        broken(header(ack_id="7" * 32))


def test_a_sum_has_at_most_as_many_releases_as_helpers_open_and_the_rest_is_carried_over(monkeypatch, caplog):
    """Late answers may come beside those of a round."""
    monkeypatch.setattr(summation, "MOST_SUMMED", 4)
    strategy, _ = broken(lambda masked: masked)
    assert [(report.aggregated, report.malformed) for report in strategy.history] == [(4, 2)] * 4
    assert "Client '4' cannot be summed with the others: the sum has 4 releases" in caplog.text


def test_no_round_asks_more_clients_than_a_sum_may_have(monkeypatch):
    monkeypatch.setattr("murmurfl.strategies.aggregation.masked.MOST_SUMMED", 5)
    with raises(
        ConfigurationError, "out-of-range", "clients_per_round", match="5 clients under secure aggregation, got 6"
    ):
        trained(build(clients_per_round=6, secure={}), SecureGrid(clients()))


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_a_client_that_seals_nonsense_is_left_out_before_anybody_opens(bad, caplog):
    """A server cannot see into seals, so helpers say which do not open before one of them records the set."""

    def spoiled(masked):
        return resealed(masked, tuple(bytes(80) if i in bad else seal for i, seal in enumerate(masked.sealed.seals)))

    strategy, grid = broken(spoiled)
    assert [(report.aggregated, report.malformed) for report in strategy.history] == [(5, 1)] * 4
    assert (strategy.state.x == without_it()).all()
    assert caplog.text.count("Client '2' is left out of a round") == 1
    assert sum(kind == "open" for kind, _ in grid.asked) == 8, "no set with it was opened anywhere"


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_a_seal_that_was_spoiled_once_is_made_again_and_costs_nothing(bad, caplog):
    """The same release under fresh seeds: the sums are those of a training without the mishap, to the last bit."""
    made = clients()
    real, seen = made.mask, {}

    def mask(name, release, session):
        masked = real(name, release, session)
        sealings = seen.setdefault((name, release.release), [])
        sealings.append((release.counts.tobytes(), masked))
        if name == "2" and release.release == 2 and len(sealings) == 1:
            return resealed(
                masked, tuple(bytes(80) if i in bad else seal for i, seal in enumerate(masked.sealed.seals))
            )
        return masked

    made.mask = mask
    strategy = trained(build(clients_per_round=6, secure={}), SecureGrid(made))
    whole = trained(build(clients_per_round=6, secure={}), SecureGrid(clients()))
    assert state_bytes(strategy) == state_bytes(whole)
    assert sum(report.malformed for report in strategy.history) == 0
    assert "left out of a round" not in caplog.text
    again = [sealings for sealings in seen.values() if len(sealings) > 1]
    assert len(again) == 1
    for (first, one), (second, other) in again:
        assert first == second, "the same counts"
        assert one.sealed.header == other.sealed.header, "under the same name"
        assert (one.counts != other.counts).all(), "and other masks"
    assert all(made.client(name).statement("s")["releases"] == strategy.acks[name] for name in strategy.acks), (
        "spent once"
    )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("answer", ["silence", "another release", "its next release", "another client's"])
def test_a_client_that_does_not_seal_the_very_release_again_is_left_out(answer):
    made, asked = clients(), []
    real = made._seal

    def seal(name, content):
        asked.append(name)
        if answer == "silence":
            raise RefusedError(protocol.MALFORMED_REQUEST, "no")
        if answer == "another client's":
            return real("3", content)
        if answer == "another release":
            made.mask = lambda *given: other_header(mask(*given), ClientKey.simulated(SEED, name), release_id="7" * 32)
        else:
            made.mask = lambda *given: other_header(mask(*given), ClientKey.simulated(SEED, name), release=99)
        try:
            return real(name, content)
        finally:
            made.mask = mask

    def mask(name, release, session):
        masked = whole(name, release, session)
        return masked if name != "2" else resealed(masked, (bytes(80), masked.sealed.seals[1]))

    whole, made.mask, made._seal = made.mask, mask, seal
    strategy = trained(build(clients_per_round=6, secure={}), SecureGrid(made))
    assert [(report.aggregated, report.malformed) for report in strategy.history] == [(5, 1)] * 6
    assert asked == ["2"] * 3, "no more often than patience allows"


def test_sets_that_helpers_were_not_asked_about_can_be_half_open(monkeypatch):
    """The planted bug: one helper has recorded the set when the other refuses it, which costs every round."""
    monkeypatch.setattr(CohortAgreement, "agree", lambda agreement, context, held, cohort: (held, ""))
    strategy, _ = broken(lambda masked: resealed(masked, (bytes(80), masked.sealed.seals[1])), trained_in_vain)
    assert [(report.aggregated, report.skipped) for report in strategy.history] == [(0, 6)] * 4


@pytest.mark.parametrize("liars", [2, 3])
def test_a_helper_that_disputes_one_client_after_another_is_named_and_they_are_not_left_out(liars):
    """Nobody can say who is right of one helper and one client; of one helper and three clients it is the helper."""
    grid = SecureGrid(clients())
    opener = grid.openers[grid.first_helper]
    real = opener._seed

    def disputes(sealed, header):
        if header.client in ("1", "3", "4")[:liars]:
            raise OpeningRefusedError("a lie")
        return real(sealed, header)

    opener._seed = disputes
    strategy = build(clients_per_round=6, secure={})
    if liars == 2:
        assert [report.aggregated for report in trained(strategy, grid).history] == [4] * 6
        return
    with raises(HelpersDisagreeError, "mismatch", match=r"got 3 of helper 'helper-0' alone \('1', '3', '4'\)"):
        trained(strategy, grid)
    opener._seed = real
    assert [report.aggregated for report in trained(build(clients_per_round=6, secure={}), grid).history] == [6] * 6


def test_a_helper_that_does_not_say_whether_it_would_open_closes_the_round():
    grid, silent = SecureGrid(clients()), iter([None])
    grid.seen = lambda kind, helper, reply: next(silent, reply) if kind == "whether" else reply
    strategy = trained(build(clients_per_round=6, secure={}), grid, rounds=3)
    assert [report.closed for report in strategy.history] == [
        "helper 'helper-0' did not say whether it would open it", "", ""
    ]  # fmt: skip


@pytest.mark.parametrize("lie", [protocol.VIEW_OPENED, protocol.VIEW_NO])
def test_a_helper_that_refuses_without_a_reason_pauses_the_run_before_anything_is_open(lie):
    """It signs what it says: that it has opened a set it was never shown, or that it would not, and names nobody."""
    grid = SecureGrid(clients())
    opener = grid.openers[grid.first_helper]
    real = opener.view

    def lies(session, opening, releases, *, lock=False):
        view = replace(real(session, opening, releases), would_open=lie)
        return replace(view, signature=opener._key.sign(opening_rule._said(view, session)))

    opener.view = lies
    strategy = build(clients_per_round=6, secure={})
    with raises(
        HelperUnavailableError, "unreachable", match=r"in 3 rounds in a row: helper 'helper-0' would not open it"
    ):
        trained(strategy, grid)
    assert not any(kind == "open" for kind, _ in grid.asked)


@pytest.mark.parametrize("entry", [protocol.WOULD_OPEN, protocol.DISPUTED, protocol.SET_DIGEST, protocol.SIGNATURE])
def test_what_a_helper_would_do_counts_only_if_it_signed_it_for_this_set(entry):
    grid = SecureGrid(clients())
    other = {protocol.WOULD_OPEN: "no", protocol.DISPUTED: ["2"], protocol.SIGNATURE: bytes(64)}

    def changed(kind, helper, reply):
        if kind == "whether" and helper == HELPERS[0] and entry != protocol.SET_DIGEST:
            reply.content["config"][entry] = other[entry]
        elif kind == "whether" and helper == HELPERS[0]:  # what it said of another set
            kept.append(reply.content["config"])
            reply.content["config"] = kept[0]
        return reply

    kept, grid.seen = [], changed
    train = trained if entry == protocol.SET_DIGEST else trained_in_vain
    strategy = train(build(clients_per_round=6, secure={}), grid, rounds=2)
    first = 0 if entry == protocol.SET_DIGEST else 1
    assert closed_rounds(strategy) == [1, 2][1 - first :]


def resealed(masked, seals):
    unsigned = replace(masked.sealed, seals=seals, signature=b"")
    return replace(masked, sealed=replace(unsigned, signature=ClientKey.simulated(SEED, "2").sign(unsigned.signed)))


def test_clients_under_two_policies_are_not_summed_and_most_of_them_win(caplog):
    """Different mu, hence different noise and perhaps another grid."""
    made = clients(different={"1": {"mu": 1.0}, "4": {"mu": 1.0}})
    strategy = trained(build(clients_per_round=6, secure={}), SecureGrid(made))
    assert {(report.aggregated, report.malformed) for report in strategy.history} == {(4, 2)}
    assert sorted(strategy.acks) == ["0", "2", "3", "5"]
    for name in ("1", "4"):
        assert f"Client '{name}' cannot be summed" in caplog.text


def test_what_was_opened_once_decides_and_not_who_answers_today():
    """Two deviant clients that are the only ones to answer in a round do not become the training's terms."""
    made = clients(different={"1": {"mu": 1.0, "min_cohort": 2}, "4": {"mu": 1.0, "min_cohort": 2}})
    grid, seen = SecureGrid(made), []
    deviant = {grid.first_node + 1, grid.first_node + 4}

    def only_them(replies):
        seen.append(1)
        return [reply for reply in replies if reply.metadata.src_node_id in deviant] if len(seen) == 3 else replies

    grid.tamper = only_them
    strategy = trained(build(clients_per_round=6, secure={"min_cohort": 2}), grid)
    assert closed_rounds(strategy) == [3]
    assert strategy.history[2].closed == "0 of at least 2 releases"
    assert strategy.history[3].aggregated == 4


def test_a_client_that_lost_its_ledger_is_left_out_and_the_rest_goes_on():
    """It begins again with its first release, built on nothing, under a number that was opened long ago."""
    made = clients()
    loses = AfterRound(lambda report, _: made._clients.pop("2") if report.server_round == 3 else None)
    grid, strategy = SecureGrid(made), build(clients_per_round=6, secure={}, callbacks=[loses])
    trained(strategy, grid)
    assert [report.aggregated for report in strategy.history] == [6, 6, 6, 5, 5, 5]
    assert strategy.acks["2"] == 3
    assert not closed_rounds(strategy)


class OtherRoster(SecureGrid):
    """A grid whose second helper has another roster, from the start or from a round on."""

    def other(self):
        unknown_node = ClientKey.simulated(9, "stranger").public
        roster = Roster({**self.roster.clients, "stranger": unknown_node}, self.roster.helpers)
        self.openers[self.first_helper + 1] = Opener(
            HELPERS[1], HelperKey.simulated(SEED, HELPERS[1]), roster, MemoryOpeningRecord()
        )
        return roster


def test_helpers_with_different_rosters_end_the_run_before_anybody_is_asked():
    made = clients()
    grid = OtherRoster(made)
    grid.other()
    with raises(
        ConfigurationError, "mismatch", match=r"one roster at all helpers, got several: 'helper-0' has .*'helper-1'"
    ):
        trained(build(secure={}), grid)
    assert all(made.client(name).statement("s")["releases"] == 0 for name in made.masks)


def test_a_server_that_insists_on_a_roster_names_the_helper_that_has_another():
    grid = OtherRoster(clients())
    right = grid.roster.digest
    trained(build(secure={"roster": right}), SecureGrid(clients()), rounds=1)
    other = grid.other()
    with raises(ConfigurationError, "mismatch", match=rf"roster {right}, got helper 'helper-1' with {other.digest}"):
        trained(build(secure={"roster": right}), grid)


def test_a_helper_that_comes_back_with_another_roster_is_not_asked(tmp_path):
    grid = OtherRoster(clients())
    comes_back = AfterRound(lambda report, _: grid.other() if report.server_round == 2 else None)
    strategy = build(secure={"patience": 2}, callbacks=[comes_back])
    with raises(HelperUnavailableError, "unreachable", match="helper 'helper-1' has another roster"):
        trained(strategy, grid)
    assert strategy.history[2].closed == "helper 'helper-1' has another roster"
    assert sum(kind == "open" for kind, _ in grid.asked) == 4


@pytest.mark.parametrize("helpers", [1, 3])
def test_a_roster_of_more_or_fewer_helpers_than_were_said_is_refused(helpers):
    grid = SecureGrid(clients())
    said = "Expected 1 helpers, those of their roster"
    if helpers == 3:  # a stranger that says it is a helper
        opener = grid.openers[grid.first_helper]
        other = Opener(HELPERS[0], HelperKey.simulated(SEED, HELPERS[0]), opener.roster, MemoryOpeningRecord())
        other.name = "stranger"
        grid.openers[grid.first_helper + 7] = other
        said = "a roster of 3 helpers, got 'helper-0' with one of 2"
    with raises(ConfigurationError, "mismatch", "helpers", match=said):
        trained(build(secure={"helpers": helpers}), grid)


class Pretending(SecureGrid):
    """Nodes that are met first and report a helper's and a client's name; they answer without those members' keys."""

    def __init__(self, clients, *, signs):
        super().__init__(clients)
        self.roster_text = json.dumps(self.roster.document)
        self.signs, self.heard = signs, []

    def get_node_ids(self):
        return [1, 2, *super().get_node_ids()]

    def handle(self, message, identifier):
        node = message.metadata.dst_node_id
        if node > 2:
            reply = super().handle(message, identifier)
            hello = message.content["config"].get(protocol.ASK) == protocol.ASK_HELLO
            if hello and self.signs and self.first_node <= node < self.first_helper:
                name = str(node - self.first_node)
                mask = Masking(name, ClientKey.simulated(SEED, name), self.roster)
                reply.content["config"][protocol.SIGNATURE] = mask.prove_name(message.content["config"][protocol.NONCE])
            return reply
        self.heard.append((node, message.content["config"].get(protocol.ASK)))
        name = {protocol.HELPERS: HELPERS[0], protocol.ROSTER: self.roster_text} if node == 1 else {"clients": "2"}
        signature = ClientKey.simulated(9, "stranger").sign(message.content["config"][protocol.NONCE].encode())
        said = {protocol.VERSION: protocol.PROTOCOL_VERSION, **name, protocol.SIGNATURE: signature}
        message.metadata.__dict__["_message_id"] = identifier
        reply = Message(RecordDict({"config": ConfigRecord(said)}), reply_to=message)
        reply.metadata.__dict__["_message_id"] = f"reply to {identifier}"
        return reply


def test_nobody_takes_the_name_of_a_helper_or_a_client(caplog):
    """Hellos are signed over the server's nonce; whoever came first, and was believed first, is not asked for more."""
    grid = Pretending(clients(), signs=True)
    strategy = trained(build(clients_per_round=6, secure={}), grid)
    assert [report.aggregated for report in strategy.history] == [6] * 6
    assert {ask for _, ask in grid.heard} == {protocol.ASK_HELLO}
    assert "Node 1 says that it is helper 'helper-0' and does not sign with the key" in caplog.text
    assert "Node 2 says that it is client '2' and does not sign with the key" in caplog.text
    assert "Client '2' is reported by two nodes" in caplog.text


def test_an_answer_to_an_earlier_hello_proves_nothing():
    key, roster = ClientKey.simulated(SEED, "2"), clients().roster
    strategy = build(secure={})
    helpers = strategy.aggregator.helpers
    helpers._roster = roster
    mask = Masking("2", key, roster)
    for nonce, right in (("new", True), ("old", False), ("", False)):
        met = Handshake(("2",), nonce="new", signature=mask.prove_name(nonce))
        assert helpers._shows("2", met) is right
    assert not helpers._shows("3", Handshake(("3",), nonce="new", signature=mask.prove_name("new")))
    assert mask.prove_name("x" * 65) == mask.prove_name(7) == b""


def test_what_is_no_roster_is_refused():
    grid = SecureGrid(clients())

    def nonsense(kind, helper, reply):
        if kind == "hello":
            reply.content["config"]["roster"] = '{"clients": 7}'
        return reply

    grid.seen = nonsense
    with raises(ConfigurationError, "mismatch", match="'helper-0' has none"):
        trained(build(secure={}), grid)


def test_a_set_for_a_checkpoint_is_what_it_was():
    made, total = clients(different={"4": {"min_cohort": 5}}), CohortSum(10)
    for name in ("3", "4", "5"):
        release = made.client(name).privatizer.release("s", 0, lambda samples: np.ones((1, 10)))
        masked = made.mask(name, release, "s")
        total.add(Reply(name, 1, 0, MaskedRelease(masked.counts, masked.sealed), {}))
    held = CohortSet(
        server_round=4,
        releases=total.releases,
        terms=total.terms,
        total=total.counts,
        sealed=total.sealed,
        ids={name: header.release_id for name, header in total.headers.items()},
        report=vars(RoundReport(4)),
        asked=("3", "4", "5"),
    )
    plain = json.loads(json.dumps(held.plain()))
    assert plain["terms"] == ["last-opened", *held.terms[1:]], "the words of the format"
    again = CohortSet.from_plain(plain, total.counts)
    assert again == held
    assert again.min_cohort == 5, "the largest of 3, 5 and 3"
    assert replace(again, sealed=()).min_cohort == 1, "without messages"
    assert again.terms[0] == "cumulative"
    assert held.opening == "4"
