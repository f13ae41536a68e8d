"""Which runs a node takes: owners' permits, bundles and hours of its operator's file."""

import hashlib
import logging
import os
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from murmurfl.app.nodes import node_config as nodes
from murmurfl.app.nodes import run_admission as module
from murmurfl.app.nodes.journal import Journal, noting
from murmurfl.app.nodes.node_app import read_node
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig, configured_client
from murmurfl.app.nodes.run_admission import REFUSAL, Hours, ReceivedContext, RunAdmissionPolicy, taking
from murmurfl.app.nodes.supernode import repeating_the_last_answer
from murmurfl.clients import CorrelatedNoiseMod, UpdateNode, helper_app, numpy_client_app
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.clients.nodes.operators_file import NODE_CONFIG_VARIABLE
from murmurfl.privacy import ConfigurationError, MemoryOpeningRecord, SQLiteLedger, protocol, read_ledger
from murmurfl.privacy.permits import OwnerKey

from tests.harness.errors import raises
from tests.harness.grid import claim_identity
from tests.harness.masked_releases import opener_of, round_of
from tests.harness.schemas import write_samples

OWNER, STRANGER = OwnerKey(bytes(range(32))), OwnerKey(bytes(range(1, 33)))
BUNDLE = b"the bytes of a bundle"
DIGEST = hashlib.sha256(BUNDLE).hexdigest()
NOW = 1_795_400_000.0  # 2026-11-23, 02:13 UTC
RUNS = RunAdmissionPolicy(owners=(OWNER.public,))


def permit(*sessions, owner=OWNER, begins=-60, ends=60, bundle=""):
    return owner.permit(sessions or ["night1"], not_before=int(NOW) + begins, until=int(NOW) + ends, bundle=bundle)


def message(kind="train", run=7, **records):
    claim_identity()
    content = {name.replace("_", "-"): record for name, record in records.items()}
    made = Message(RecordDict(content), dst_node_id=5, message_type=kind)
    made.metadata.__dict__["_message_id"] = "m"
    made.metadata.__dict__["_run_id"] = run
    return made


def entries(session="night1", text=None, **more):
    said = {protocol.VERSION: 1, protocol.SESSION: session, **more, protocol.PERMIT: permit() if text is None else text}
    return ConfigRecord({key: value for key, value in said.items() if value is not None and value != ""})


def context(bundle=BUNDLE):
    return ReceivedContext(Context(7, 5, {}, RecordDict(), {"mu": 1e9}), bundle)


class App:
    """What stands behind the gate, and what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, message, context):
        self.seen.append(message)
        return Message(RecordDict(), reply_to=message)


def answered(sent, runs=RUNS, now=NOW, bundle=BUNDLE):
    """Whether a request gets through; whatever does not has the one fixed text, and was seen by nobody."""
    app = App()
    reply = taking(app, runs, lambda: now)(sent, context(bundle))
    if not reply.has_error():
        assert len(app.seen) == 1
        return True
    assert app.seen == []
    assert (reply.error.code, reply.error.reason) == (protocol.RUN_NOT_ALLOWED, REFUSAL)
    return False


KINDS = ["train", "evaluate", "query", protocol.QUERY_OPEN, "train.other"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_needs_a_permit(kind):
    assert answered(message(kind, config=entries()))
    assert answered(message(kind, config=entries(session=None)))  # a greeting names no session
    assert not answered(message(kind, config=entries(text="")))
    assert not answered(message(kind, config=entries(session=None, text="")))
    assert not answered(message(kind))
    assert not answered(message(kind, arrays=ArrayRecord([np.zeros(2)]), metrics=MetricRecord({protocol.PERMIT: 1})))


ATTACKS = {
    "another session": {"session": "night2"},
    "a longer session": {"session": "night11"},
    "a session that is no text": {"session": 1},
    "a list of sessions": {"session": ["night1"]},
    "a session in capitals": {"session": "NIGHT1"},
    "a permit for another session": {"text": permit("night2")},
    "a permit that has ended": {"text": permit(ends=0)},
    "a permit that has not begun": {"text": permit(begins=1)},
    "a permit for another bundle": {"text": permit(bundle="ab" * 32)},
    "a stranger's permit": {"text": permit(owner=STRANGER)},
    "a changed permit": {"text": permit()[:-4] + "AAAA"},
    "no text": {"text": 1},
    "bytes": {"text": permit().encode()},
    "several": {"text": [permit()]},
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_server_gets_one_text_whatever_it_tries(attack):
    assert not answered(message(config=entries(**ATTACKS[attack])))


def test_a_session_is_compared_in_whatever_record_it_stands():
    """Clients read the record that speaks the protocol, under any name: a second one must not differ."""
    other = ConfigRecord({protocol.VERSION: 1, protocol.SESSION: "night2"})
    same = ConfigRecord({protocol.VERSION: 1, protocol.SESSION: "night1"})
    for name in ("config", "aaa", "zzz"):
        carried = {"mine": entries()}
        assert not answered(message(**{**carried, name: other}))
        assert answered(message(**{**carried, name: same}))
    unnamed = ConfigRecord({protocol.PERMIT: permit()})
    assert not answered(message(config=other, mine=unnamed))
    assert answered(message(config=same, mine=unnamed))
    # Which of two permits counts would be for two readers to disagree about.
    assert not answered(message(config=entries(), mine=entries(text=permit("night2"))))


def test_a_permit_names_every_session_of_a_run():
    both = permit("night1", "night1mean")
    assert answered(message(config=entries("night1", both)))
    assert answered(message(config=entries("night1mean", both)))
    assert not answered(message(config=entries("night1evaluation", both)))


def test_a_bundle_is_known_by_its_bytes():
    runs = RunAdmissionPolicy(bundles=frozenset([DIGEST]))
    sent = message(config=entries(text="", **{"bundle": DIGEST, "fab-hash": DIGEST}))
    assert answered(sent, runs)
    for bundle in (b"", BUNDLE + b" ", b"other"):
        assert not answered(message(config=entries(bundle=DIGEST)), runs, bundle=bundle)
        assert not answered(message(config=entries(text=permit(bundle=DIGEST))), bundle=bundle)
    assert answered(message(config=entries(text=permit(bundle=DIGEST))))
    app = App()
    plain = Context(7, 5, {}, RecordDict(), {})  # as of an executor that gives no bundle
    assert taking(app, runs, lambda: NOW)(message(config=entries()), plain).has_error()


def test_hours_hold_beside_everything_else():
    early = Hours("02:00-03:00", time_zone="UTC")
    runs = RunAdmissionPolicy(owners=(OWNER.public,), bundles=frozenset([DIGEST]), hours=early)
    text = OWNER.permit(["night1"], not_before=0, until=2**40)
    assert answered(message(config=entries(text=text)), runs)
    assert not answered(message(config=entries(text=text)), runs, now=NOW + 3600)
    assert not answered(message(config=entries(text=text)), runs, bundle=b"other")
    assert not answered(message(config=entries("night2", text)), runs)


def test_a_message_that_cannot_be_read_is_refused(monkeypatch, caplog):
    claim_identity()
    asked = message(config=entries())
    broken = Message(Error(0, "broken"), reply_to=asked)
    broken.metadata.__dict__["_message_id"] = "b"
    assert not answered(broken)
    monkeypatch.setattr(module, "verified_permit", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR):
        assert not answered(message(config=entries()))
    assert "could not be told" in caplog.text


def test_the_operators_log_says_why_and_the_server_is_not_told(caplog):
    runs = RunAdmissionPolicy(owners=(OWNER.public,), hours=Hours("02:00-03:00", time_zone="UTC"))
    said = {
        "runs are taken from 02:00 to 03:00, UTC": (message(config=entries()), NOW + 3600),
        "it carries no permit": (message(), NOW),
        "none of [runs] owners signed its permit": (message(config=entries(**ATTACKS["a stranger's permit"])), NOW),
        "this computer's clock says 2026-11-23 02:14 UTC": (message(config=entries()), NOW + 60),
        "for other sessions (night1)": (message(config=entries("night2")), NOW),
        "for another bundle than the one with": (message(config=entries(text=permit(bundle="ab" * 32))), NOW),
    }
    for text, (sent, now) in said.items():
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert not answered(sent, runs, now)
        assert text in caplog.text
        assert "Run 7 is not taken: " in caplog.text
        assert STRANGER.public.hex() not in caplog.text


def test_a_refusal_is_noted_under_its_name():
    journal, noted = Journal(), []
    journal.listen(noted.append)
    noting(taking(App(), RUNS, lambda: NOW), journal)(message(config=entries("night2")), context())
    assert [dict(entry.facts)["reason"] for entry in noted] == ["run-not-allowed"]


def test_permits_stay_hidden_from_apps_and_renewals_keep_requests():
    """A server that resumes asks its round again, under a new run and with another permit: the same release, once."""
    seen = []

    def client(message, context):
        seen.append(message.content)
        return Message(RecordDict({"made": MetricRecord({"release": len(seen)})}), reply_to=message)

    repeat = repeating_the_last_answer()
    for runs in (RUNS, None):
        seen.clear()
        gate = taking(lambda message, context: repeat(message, context, client), runs, lambda: NOW)
        said = {protocol.SERVER_ROUND: 3 + (runs is None)}
        for text in (permit(), permit(ends=90)):
            reply = gate(message(config=entries(text=text, **said), arrays=ArrayRecord([np.ones(2)])), context())
            assert reply.content["made"]["release"] == 1
        assert [protocol.PERMIT in content["config"] for content in seen] == [False]
        assert dict(seen[0]["config"]) == {protocol.VERSION: 1, protocol.SESSION: "night1", **said}


# The operator's file.

FILE = """
client = "clinic"
ledger = "ledger.sqlite"
clip-norm = 1.0
batch-size = 2
mu = 1.0
samples = "samples.npz"
schema = "schema.toml"
num-records = 8
max-participations = 2
strategy = "noisy-sgd"
"""
TABLE = f'[runs]\nowners = ["{OWNER.public.hex()}"]\n'


def write(folder, table=TABLE, file=FILE):
    path = folder / "node.toml"
    path.write_text(f"{file}\n{table}")
    path.chmod(0o600)
    return path


def test_the_table_is_read_and_said(tmp_path):
    owners = f'owners = ["{OWNER.public.hex()}", "{STRANGER.public.hex()}"]'
    path = write(tmp_path, f'[runs]\n{owners}\nbundles = ["{DIGEST}"]\nhours = "22:00-06:00"\ntime-zone = "UTC"\n')
    runs = RunAdmissionPolicy.read(path)
    assert runs == RunAdmissionPolicy(
        (OWNER.public, STRANGER.public), frozenset([DIGEST]), Hours("22:00-06:00", time_zone="UTC")
    )
    assert runs.sentence() == (
        "Takes runs with a permit of one of 2 listed owners, with the listed bundle, from 22:00 to 06:00, UTC."
    )
    assert RunAdmissionPolicy.read(write(tmp_path, "")) is None
    assert RunAdmissionPolicy.read(write(tmp_path, TABLE)).hours is None
    assert RunAdmissionPolicy.read(write(tmp_path, '[runs]\ndays = ["sat"]')).hours == Hours(days=("sat",))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("[runs]\n", "Expected owners, bundles, hours or days, got {}"),
        ("[[runs]]\n", "Expected owners, bundles, hours or days"),
        ("[runs]\nowners = []", "Expected owners to be a list of one or more texts"),
        ('[runs]\nowners = "ab"', "Expected owners to be a list of one or more texts"),
        ('[runs]\nowners = ["ab"]', "an owner's public key"),
        ('[runs]\nbundles = ["ab"]', "a bundle's SHA-256"),
        ('[runs]\nhours = "22-6"', "hours as HH:MM-HH:MM"),
        ("[runs]\nhours = 22", "hours as HH:MM-HH:MM"),
        ('[runs]\ndays = ["monday"]', "days among mon"),
        ('[runs]\nhours = "22:00-06:00"\ntime-zone = "CET"', "'local'"),
        ('[runs]\nowner = ["ab"]', "perhaps owner for owners"),
    ],
)
def test_a_table_that_cannot_be_kept_is_refused_with_one_line(tmp_path, table, complaint):
    with pytest.raises(ConfigurationError) as refused:
        RunAdmissionPolicy.read(write(tmp_path, table))
    assert complaint in str(refused.value)
    assert "[runs]" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("read", [NodeConfig.read, UpdateNode.read, SampleNode.read, HelperConfig.read, read_node])
def test_a_runs_table_is_read_only_where_it_is_enforced(tmp_path, read):
    with raises(ConfigurationError, "conflict", match=r"no table \[runs\] where nothing keeps it.*murmurfl node FILE"):
        read(write(tmp_path))


def test_a_plain_supernode_refuses_the_file_as_not_configured(tmp_path, monkeypatch):
    """Its bundle is the server's, which would be asked whether it may run."""
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, str(write(tmp_path)))
    configured_client.cache_clear()
    app = numpy_client_app(lambda context: nodes.configured_client(tmp_path / "node.toml"))
    reply = app(message(config=entries()), Context(7, 5, {}, RecordDict(), {}))
    assert reply.error.code == protocol.NOT_CONFIGURED
    updates = 'client = "c"\nledger = "l"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'
    write(tmp_path, file=updates)
    reply = CorrelatedNoiseMod()(message(config=entries()), Context(7, 5, {}, RecordDict(), {}), App())
    assert reply.error.code == protocol.NOT_CONFIGURED


# Real clients with ledgers, behind the gate.


@pytest.fixture
def client(tmp_path, quick_disk):
    generator = np.random.Generator(np.random.Philox(key=5))
    write_samples(tmp_path, generator.normal(size=(8, 3)), np.arange(8) % 2)
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=10.0, delta=1e-5)
    client = NodeConfig.read(write(tmp_path), runs_kept=True).make_client()
    return numpy_client_app(lambda context: client)


def attack(app, sessions, text):
    """Ask for a release of each session, in every place where a session may stand; how many came."""
    releases = 0
    for number, session in enumerate(sessions, 1):
        said = {protocol.SERVER_ROUND: number, protocol.ACK: 0}
        for records in (
            {"config": entries(session, text, **said)},
            {"config": entries(session, "", **said), "other": entries("night1", text)},
        ):
            points = ArrayRecord([np.zeros((2, 3)), np.zeros(2)])
            reply = app(message(arrays=points, **records), context())
            releases += not reply.has_error()
    return releases


def test_a_server_with_one_permit_begins_one_session_on_a_real_client(tmp_path, client):
    text = permit()
    attack(taking(client, RUNS, lambda: NOW), ["night2", "night1", "night3", "x" * 64, "night1"], text)
    assert [session.session for session in read_ledger(tmp_path / "ledger.sqlite").sessions] == ["night1"]


def test_a_gate_that_looks_at_one_record_only_lets_other_sessions_through(tmp_path, client, monkeypatch):
    """The planted bug: permit and session are taken from whichever record carries the permit."""

    def why(self, message, bundle, now):
        (said,) = [r for r in message.content.config_records.values() if protocol.PERMIT in r]
        return "" if said[protocol.SESSION] == "night1" else "other"

    monkeypatch.setattr(RunAdmissionPolicy, "why_not", why)
    attack(taking(client, RUNS, lambda: NOW), ["night2", "night1", "night3"], permit())
    assert len(read_ledger(tmp_path / "ledger.sqlite").sessions) == 3


def test_a_helper_opens_nothing_without_a_permit():
    record = MemoryOpeningRecord()
    record.durable = True
    app, releases = helper_app(opener_of(record, "left")), round_of()

    def opening(text, session="s"):
        said = {
            protocol.OPENING: "1",
            protocol.HELPER: "left",
            protocol.HEADER: [one.header for one in releases],
            protocol.SIGNATURE: [one.signature for one in releases],
            protocol.SEALS: [seal for one in releases for seal in one.seals],
        }
        sent = message(protocol.QUERY_OPEN, config=entries(session, text, **said))
        reply = taking(app, RUNS, lambda: NOW)(sent, context())
        return reply.error.code if reply.has_error() else None

    assert [opening(text) for text in ("", permit("t"), permit("s", owner=STRANGER))] == [protocol.RUN_NOT_ALLOWED] * 3
    # With the permit of another session its releases do not pass for releases of that one.
    assert opening(permit("t"), "t") == protocol.OPENING_REFUSED
    assert opening(permit("s")) is None


@pytest.fixture
def in_zone(monkeypatch):
    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.delenv("TZ", raising=False)
    os.environ.pop("TZ", None)
    time.tzset()


def at(text):
    """Of a week in November that begins on Monday, the 23rd; in UTC."""
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC).timestamp()


def has(hours, *times):
    return [hours.has(at(text)) for text in times]


def test_hours_past_midnight_belong_to_the_day_on_which_they_begin():
    hours = Hours("22:00-06:00", ("mon", "fri"), "UTC")
    assert has(hours, "23T21:59", "23T22:00", "23T23:59", "24T00:00", "24T05:59", "24T06:00") == [
        *(False, True, True, True, True, False),
    ]
    assert has(hours, "23T03:00", "24T22:30", "28T03:00", "29T03:00") == [False, False, True, False]
    # From Sunday to Monday.
    assert has(Hours("22:00-06:00", ("sun",), "UTC"), "23T05:59", "29T22:00", "30T01:00") == [True, True, True]


def test_hours_of_one_day_have_their_end_outside():
    hours = Hours("09:30-17:00", time_zone="UTC")
    assert has(hours, "23T09:29", "23T09:30", "23T16:59", "23T17:00") == [False, True, True, False]
    assert has(Hours("22:00-24:00", time_zone="UTC"), "23T21:59", "23T23:59", "24T00:00") == [False, True, False]
    assert has(Hours(days=("tue",), time_zone="UTC"), "23T23:59", "24T00:00", "24T23:59", "25T00:00") == [
        *(False, True, True, False),
    ]


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="time zones of a process are POSIX's")
def test_local_hours_are_those_of_the_client(in_zone):
    in_zone("XYZ-5")  # five hours ahead of UTC
    assert has(Hours("22:00-06:00"), "23T16:59", "23T17:00", "24T00:59", "24T01:00") == [False, True, True, False]
    assert has(Hours("22:00-06:00", time_zone="UTC"), "23T17:00", "23T22:00") == [False, True]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"span": "22-6"}, "as HH:MM-HH:MM"),
        ({"span": "24:00-06:00"}, "as HH:MM-HH:MM"),
        ({"span": "22:60-06:00"}, "as HH:MM-HH:MM"),
        ({"span": "22:00-24:01"}, "as HH:MM-HH:MM"),
        ({"span": "22:00-06:00\n"}, "as HH:MM-HH:MM"),
        ({"span": 22}, "as HH:MM-HH:MM"),
        ({"span": "22:00-22:00"}, "do not end when they begin"),
        ({"days": ()}, "days among mon"),
        ({"days": ("monday",)}, "days among mon"),
        ({"time_zone": "Europe/Berlin"}, "'local' .* or 'UTC'"),
    ],
)
def test_hours_that_cannot_be_are_refused(values, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Hours(**values)


def test_hours_can_be_said():
    assert Hours("22:00-06:00").sentence() == "from 22:00 to 06:00, the client's local time"
    assert Hours("22:00-06:00", ("sat", "sun"), "UTC").sentence() == "from 22:00 to 06:00 of sat, sun, UTC"
