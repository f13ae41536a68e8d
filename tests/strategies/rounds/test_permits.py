"""A permit is carried by every message of a training, changes nothing else, and may be renewed when it is resumed."""

import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import ConfigurationError, protocol
from murmurfl.privacy.permits import OwnerKey
from murmurfl.strategies import CheckpointError, CorrelatedFedAvg, MeanOfFeatures, Mu2, PrivateEvaluation
from murmurfl.strategies.rounds import strategy as rounds

from tests.harness.grid import NodesGrid
from tests.harness.secure import HELPERS, SecureGrid, build, machines, same, trained
from tests.strategies.sums.test_secure_resume import in_round

OWNER = OwnerKey(bytes(range(32)))
NOW = int(time.time())


def permit(*sessions, begins=-60, ends=6 * 3600):
    return OWNER.permit(sessions or ["s"], not_before=NOW + begins, until=NOW + ends)


class Watching:
    """Keeps the kind and the entries of every message that is sent."""

    def push_messages(self, messages):
        messages = list(messages)
        self.sent = [*getattr(self, "sent", []), *((m.metadata.message_type, _entries(m)) for m in messages)]
        return super().push_messages(messages)

    def carried(self):
        return {(kind, entries.get(protocol.PERMIT)) for kind, entries in self.sent}


def _entries(message):
    return {key: value for record in message.content.config_records.values() for key, value in record.items()}


class WatchedSecureGrid(Watching, SecureGrid):
    pass


class WatchedGrid(Watching, NodesGrid):
    pass


def test_every_message_carries_it_greetings_questions_and_openings_too():
    grid, plain, text = WatchedSecureGrid(machines()), WatchedSecureGrid(machines()), permit()
    strategy = trained(build(secure={}, permit=text), grid, rounds=2)
    strategy.ask_privacy(grid)
    assert grid.carried() == {("train", text), ("query", text), (protocol.QUERY_OPEN, text)}
    assert {entries.get(protocol.ASK) for _, entries in grid.sent} == {
        None,
        "hello",
        "privacy",
        "whether",
        "lock",
        "open",
    }
    without = trained(build(secure={}), plain, rounds=2)
    assert {carried for _, carried in plain.carried()} == {None}
    assert same(strategy, without), "it is no part of what is trained"
    assert strategy.settings() == {**without.settings(), "session": None}


def test_the_other_kinds_of_rounds_carry_it_as_well():
    text = permit()
    mod = CorrelatedNoiseMod(
        simulation=UpdatePolicy(clip_norm=1.0, mu=4.0, max_participations=5, allow_evaluation=True)
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    app.evaluate()(train)
    grid = WatchedGrid(app, 2)
    model = ArrayRecord([np.zeros(3)])
    strategy = CorrelatedFedAvg(num_clients=2, permit=text, evaluate_on_machines=True)
    strategy.start(grid, model, num_rounds=1)
    assert strategy.session == "s"
    assert grid.carried() == {("train", text), ("evaluate", text)}
    asked = []
    for strategy in (
        MeanOfFeatures(num_features=2, num_clients=2, permit=text, node_deadline_s=0.05),
        PrivateEvaluation(num_clients=2, permit=text, node_deadline_s=0.05),
    ):
        strategy.state, strategy.machines.names = object(), ["0", "1"]
        strategy.query_points = lambda state: ()
        asked.append(strategy._plan_round(1, None).entries)
    assert [entries[protocol.PERMIT] for entries in asked] == [text, text]
    assert [entries[protocol.RELEASE_OF] for entries in asked] == ["mean", "evaluation"]


def test_a_training_uses_the_permits_sessions_only():
    two = permit("first", "second")
    assert rounds.session_of(None, None) != rounds.session_of(None, None)
    assert build(session=None, permit=two).session == "first"
    assert build(session="second", permit=two).session == "second"
    with pytest.raises(ConfigurationError, match="Expected a permit for session 'third', got one for first, second"):
        build(session="third", permit=two)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("night.permit", "Expected a permit, one line that begins with murmurfl-permit-1"),
        (permit()[:-10] + "?", "got one whose text was changed or cut"),
        (permit(begins=-600, ends=-300), r"that has not ended, got one until .* --renew"),
    ],
)
def test_what_no_machine_would_believe_is_refused_before_any_is_asked(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Mu2(num_clients=2, clients_per_round=2, learning_rate=0.1, permit=text)


class Killed(BaseException):
    """What a kill -9 is to a test."""


class Dying(Watching, NodesGrid):
    """The server is killed when it has the replies of a round."""

    dies_in = 3

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if _entries(messages[0]).get(protocol.SERVER_ROUND) == self.dies_in:
            raise Killed
        return replies


@pytest.mark.parametrize("first", [None, permit("s")])
def test_a_training_continues_with_renewed_and_new_permits(tmp_path, first):
    made, checkpoint, renewed = machines(masked=False), tmp_path / "checkpoint.npz", permit("s", ends=7 * 3600)
    grid = Dying(made.app, 6)
    own = {"run_dry": True, "session": None}  # without a permit its session has a name that nobody chose

    def strategy(**options):
        return build(checkpoint=checkpoint, **{**own, **options})

    begun = strategy(permit=first)
    session = begun.session
    with pytest.raises(Killed):
        trained(begun, grid)
    grid.dies_in = 0
    with pytest.raises(ConfigurationError, match=f"Expected a permit for session '{session}', got one for other.*sign"):
        trained(strategy(permit=permit("other")), grid)
    resumed = trained(strategy(permit=permit(session, ends=7 * 3600) if first is None else renewed), grid)
    assert (resumed.session, len(resumed.history)) == (session, 6)
    assert {entries[protocol.SESSION] for kind, entries in grid.sent if kind == "train"} == {session}


def test_a_checkpoint_is_of_its_settings_still(tmp_path):
    """The sibling: a renewed permit is no way around what a checkpoint must agree on."""
    grid, checkpoint = NodesGrid(machines(masked=False).app, 6), tmp_path / "checkpoint.npz"
    trained(build(checkpoint=checkpoint, run_dry=True, permit=permit()), grid, rounds=1)
    with pytest.raises(CheckpointError, match="learning_rate"):
        trained(build(checkpoint=checkpoint, run_dry=True, permit=permit(ends=7 * 3600), learning_rate=0.5), grid)


def test_a_set_that_may_be_open_is_opened_under_a_renewed_permit(tmp_path):
    """The server is killed after one helper has opened it: the same set under another permit, and the same model."""
    checkpoint, grid = tmp_path / "checkpoint.npz", WatchedSecureGrid(machines())

    def killed(message):
        raise Killed

    in_round(grid, "answers", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint, permit=permit()), grid, rounds=4)
    grid.seen = lambda kind, helper, message: message
    grid.sent = []
    renewed = permit(ends=7 * 3600)
    resumed = trained(build(secure={}, checkpoint=checkpoint, permit=renewed), grid, rounds=4)
    assert {text for _, text in grid.carried()} == {renewed}
    assert same(resumed, trained(build(secure={}), SecureGrid(machines()), rounds=4))
