"""Secure aggregation around somebody else's ClientApp: the model of bare releases, and nothing sent without masks."""

import logging
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdateNode, UpdatePolicy
from murmurfl.clients.adapters.per_sample_gradients import unflatten
from murmurfl.clients.adapters.update_policy import update_guarantee
from murmurfl.clients.nodes.roster_files import write_client_key, write_roster
from murmurfl.clients.simulation.simulated_clients import answer_simulated_helper
from murmurfl.privacy import MECHANISMS, ConfigurationError, SQLiteLedger, SumAssumption, protocol, read_ledger
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.sums.masking import Masking
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from murmurfl.strategies import CorrelatedFedAvg, NodesUnavailableError, NothingAggregatedError, SecureAggregation

from tests.harness.clients import concatenated, noise_of, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, ask_real_node
from tests.harness.secure import roster_of, unmasked

pytestmark = pytest.mark.usefixtures("no_result_folder")

SHAPES = {"block.0/weight": (2, 3), "block.0/bias": (), "head.weight": (3,)}
D = 10
START = ArrayRecord({name: Array(np.zeros(shape)) for name, shape in SHAPES.items()})
CLIENTS, HELPERS, ROUNDS = 5, 2, 10


def policy(**changes):
    """Each sample is in one release and noise cancels itself, so what is left of the noise can be written down."""
    changes = {"mechanism": "cancelling", "releases_per_pass": 30, "sums": SumAssumption(2, 3), **changes}
    fields = {"clip_norm": 1.0, "mu": 2.0, "max_participations": 30, "trust": "secure-aggregation", **changes}
    return UpdatePolicy(**fields)


def adding(update, **options):
    """A project that knows train messages and nothing else; it adds ``update(partition, round)`` to the model."""
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)])

    @app.train()
    def train(message, context):
        assert context.node_config["num-partitions"] == CLIENTS, "helpers are not told of"
        (record,) = message.content.array_records.values()
        (config,) = message.content.config_records.values()
        values = update(int(context.node_config["partition-id"]), config["server-round"])
        arrays = ArrayRecord({name: Array(np.asarray(array.numpy() + values)) for name, array in record.items()})
        return Message(RecordDict({"arrays": arrays, "m": MetricRecord({"n": 317})}), reply_to=message)

    return app


def train(app, *, lost=0.0, min_cohort=3, secure=True, nodes=CLIENTS + HELPERS, grid=NodesGrid, rounds=ROUNDS):
    sums = SecureAggregation(min_cohort=min_cohort, helpers=HELPERS) if secure else None
    strategy = CorrelatedFedAvg(
        num_clients=CLIENTS,
        clients_per_round=4,
        node_deadline_s=1.0,
        seed=1,
        session="s",
        secure_aggregation=sums,
        allow_exhaustion=not secure,  # or clients would be asked first, and theirs is a policy of masked releases
    )
    strategy.start(grid(app, nodes, lost=lost, seed=2), START, num_rounds=rounds)
    return strategy


def wandering(partition, server_round):
    return 0.05 * partition + 0.01 * server_round


def bare(monkeypatch):
    """The same clients, without masks: what nothing but a test may do."""
    sends_bare = lambda release, shapes, **_: (unflatten(release.values, shapes), {})  # noqa: E731
    monkeypatch.setattr("murmurfl.clients.adapters.noise_mod.outgoing_reply", sends_bare)


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_the_model_is_that_of_bare_releases_to_the_last_bit(lost, monkeypatch):
    chosen = policy(sums=SumAssumption(1, 1))
    masked = train(adding(wandering, simulation=chosen), lost=lost, min_cohort=1)
    bare(monkeypatch)
    plain = train(adding(wandering, simulation=chosen), lost=lost, secure=False)
    assert not any(report.closed for report in masked.history)
    assert (masked.state.x == plain.state.x).all()
    assert (sum(report.lost for report in masked.history) > 0) == (lost > 0)
    assert np.abs(masked.state.x).max() > 0.1


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("lost", [0.0, 0.2, 0.4])
def test_rounds_that_stay_closed_leave_no_noise_behind(lost):
    strategy = train(adding(lambda *_: 0.0, simulation=policy()), lost=lost, rounds=20)
    last = sum(noise_of(name, k, policy().privacy_policy(), D, seed=0) for name, k in strategy.acks.items())
    assert (strategy.state.x - last / 4 == 0.0).all(), "to the last bit"
    assert any(report.closed for report in strategy.history) == (lost > 0)
    assert strategy.history[-1].aggregated > 0 or strategy.history[-2].aggregated > 0


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "releases_per_pass"), [*((name, 12) for name in MECHANISMS), ("independent", 1), ("blt", 1)]
)
def test_every_mechanism_gives_the_model_of_bare_releases(name, releases_per_pass, monkeypatch):
    chosen = policy(
        mechanism=name, releases_per_pass=releases_per_pass, max_participations=12, sums=SumAssumption(1, 1)
    )
    masked = train(adding(wandering, simulation=chosen), min_cohort=1, rounds=5)
    bare(monkeypatch)
    plain = train(adding(wandering, simulation=chosen), secure=False, rounds=5)
    assert (masked.state.x == plain.state.x).all()
    assert not any(report.closed for report in masked.history)


def test_a_mask_that_is_off_by_one_is_seen(monkeypatch):
    """The sibling of the tests above: they would see one count of one release."""
    whole = Masking.mask
    plain = train(adding(wandering, simulation=policy()))

    def off_by_one(self, release, session, chosen):
        masked = whole(self, release, session, chosen)
        masked.counts[0] += np.uint64(1)
        return masked

    monkeypatch.setattr(Masking, "mask", off_by_one)
    assert not (train(adding(wandering, simulation=policy())).state.x == plain.state.x).all()


class Wiretap(NodesGrid):
    """Keeps every training reply as it comes out of its node."""

    heard: ClassVar[list] = []

    def handle(self, message, identifier):
        reply = super().handle(message, identifier)
        config = message.content.get(protocol.CONFIG, {})
        if protocol.ASK not in config and not reply.has_error():
            self.heard.append(reply.content)
        return reply


def test_nothing_leaves_but_masked_releases():
    Wiretap.heard = []
    train(adding(wandering, simulation=policy()), grid=Wiretap, rounds=3)
    roster = roster_of(map(str, range(CLIENTS)))
    assert len(Wiretap.heard) == 12
    for content in Wiretap.heard:
        assert sorted(content["config"]) == ["client", "header", "seals", "signature"]
        figures = {"mu-guaranteed", "mu-local", "min-honest", "delta", "client-level"}
        plain = {"protocol-version", "release", "ack", "sensitivity", "num-examples"}
        assert set(content["metrics"]) == figures | plain
        arrays = [array.numpy() for array in content["arrays"].values()]
        counts, header = unmasked(arrays, dict(content["config"]), roster)
        assert header.client == content["config"]["client"]
        assert np.abs(counts).max() < 2**52
        assert not np.isin(concatenated(arrays) >> np.uint64(56), [0, 255]).all(), "and under masks it is not small"


def test_a_mod_that_sends_without_masks_is_dropped_by_the_server(monkeypatch):
    bare(monkeypatch)
    with raises(NothingAggregatedError, "missing", match="8 replies were malformed"):
        train(adding(wandering, simulation=policy()), rounds=2)


def test_the_log_says_both_figures(caplog):
    with caplog.at_level(logging.DEBUG, logger="flwr"):
        strategy = train(adding(wandering, simulation=policy()), rounds=1)
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "worst case" in text
    assert "Client 1: release 1" in text
    assert strategy.history[0].aggregated == 4
    (rounds,) = [record.getMessage() for record in caplog.records if "updates aggregated" in record.getMessage()]
    assert "mu = 2 " in rounds
    assert "mu = 2.829" in rounds


def test_where_data_return_and_noise_is_independent_releases_stand_alone():
    """Releases that build on each other would cost sqrt(K) times as much in sums."""
    chosen = policy(mechanism="", releases_per_pass=1, max_participations=16).privacy_policy()
    assert (chosen.mechanism, chosen.release_mode) == ("independent", "independent")
    plain = UpdatePolicy(clip_norm=1.0, mu=2.0, max_participations=16).privacy_policy()
    assert chosen.plan(D).noise_std == pytest.approx(plain.plan(D).noise_std / np.sqrt(2), rel=1e-5)
    assert (
        policy(mechanism="", releases_per_pass=16, max_participations=16).privacy_policy().release_mode == "cumulative"
    )
    assert policy(mechanism="independent").privacy_policy().release_mode == "cumulative", (
        "nothing returns: carried over"
    )
    assert UpdatePolicy(clip_norm=1.0, mu=2.0, max_participations=16).privacy_policy().release_mode == "cumulative"


def test_a_trusted_server_gets_nothing_from_the_mod():
    with raises(ConfigurationError, "unknown-name", "trust"):
        policy(trust="trusted-server", sums=SumAssumption(1, 1))
    with raises(ConfigurationError, "conflict", "sums"):
        UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=3, sums=SumAssumption(2, 2))


def test_a_simulation_without_a_client_is_refused(caplog):
    for nodes in (1, 2):
        grid = NodesGrid(adding(wandering, simulation=policy()), nodes)
        message = Message(request(), dst_node_id=grid.get_node_ids()[0], message_type="train")
        (reply,) = grid.send_and_receive([message])
        assert reply.error.code == protocol.NOT_CONFIGURED
    assert "more of them than the 2 helpers" in caplog.text
    for helpers in (0, True, 1.5):
        with raises(ConfigurationError, "out-of-range", "helpers"):
            CorrelatedNoiseMod(simulation=policy(), helpers=helpers)


def test_too_few_clients_for_a_sum_say_the_nodes_needed(caplog):
    app = adding(wandering, simulation=policy(sums=SumAssumption(2, 4)), helpers=HELPERS)
    with raises(NodesUnavailableError, "unreachable", match="3 answered with not-configured"):
        train(app, nodes=5, rounds=1)
    assert "Waiting for clients: 0 of 5 connected; 3 answered with not-configured." in caplog.text
    assert "at least min_cohort = 4 clients, got 3: its 5 nodes less 2 helpers" in caplog.text
    assert "Traceback" not in caplog.text  # the sentence says what to do, and would be hidden below one a client


def test_a_helper_trains_nothing_and_a_client_opens_nothing():
    app = adding(wandering, simulation=policy())
    grid = NodesGrid(app, CLIENTS + HELPERS)
    asked = {name: grid.get_node_ids()[index] for name, index in (("client", 0), ("helper", CLIENTS))}

    def reply_to(who, content):
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=asked[who], message_type="train")])
        return reply

    assert reply_to("helper", request()).error.code == protocol.MALFORMED_REQUEST
    opening = RecordDict({"config": ConfigRecord({**training_config(), protocol.ASK: protocol.ASK_OPEN})})
    assert reply_to("client", opening).error.code == protocol.MALFORMED_REQUEST
    hello = RecordDict({"config": ConfigRecord({protocol.VERSION: 1, protocol.ASK: protocol.ASK_HELLO})})
    said = reply_to("helper", hello).content["config"]
    assert said[protocol.HELPERS] == "helper-0"
    assert protocol.CLIENTS not in said
    assert reply_to("client", hello).content["config"][protocol.CLIENTS] == "0"


def test_simulated_helpers_exist_in_simulations_only():
    with raises(ConfigurationError, "unsupported", match="murmurfl helper"):
        answer_simulated_helper(None, RecordDict(), name="helper-0", seed=0, roster=roster_of("01"))  # type: ignore[arg-type]


def request(**config):
    return RecordDict({"arrays": START, "config": ConfigRecord(training_config(**config))})


KEY = ClientKey.simulated(5, "clinic-0")
ROSTER = Roster(
    {
        "clinic-0": KEY.public,
        "clinic-1": ClientKey.simulated(5, "clinic-1").public,
        "c": ClientKey.simulated(5, "c").public,
    },
    (HelperKey.simulated(5, "auditor").entry("auditor"), HelperKey.simulated(5, "cloud").entry("cloud")),
)


@pytest.fixture
def node(tmp_path):
    """A real client's file under secure aggregation, and the node config that names it."""
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=2.0, delta=1e-6)
    write_roster(tmp_path / "roster.json", ROSTER)
    write_client_key(tmp_path / "client.key", KEY)
    path = tmp_path / "node.toml"
    path.write_text(
        'client = "clinic-0"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'
        'trust.kind = "secure-aggregation"\ntrust.min-honest = 2\ntrust.min-cohort = 3\nroster = "roster.json"\n'
        f'roster-digest = "{ROSTER.digest}"\nsigning-key = "client.key"\n'
    )
    path.chmod(0o600)
    return {"murmurfl-config": str(path)}


def real(**options):
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    return app


def test_a_real_client_masks_what_its_ledger_recorded(node, tmp_path):
    reply = ask_real_node(real(), request(), **node)
    assert reply.content["config"]["client"] == "clinic-0"
    arrays = [array.numpy() for array in reply.content["arrays"].values()]
    counts, header = unmasked(arrays, dict(reply.content["config"]), ROSTER, seed=5)
    assert (header.min_cohort, header.release, header.roster) == (3, 1, ROSTER.digest)
    assert np.abs(counts).max() < 2**52
    (session,) = read_ledger(tmp_path / "ledger.sqlite").sessions
    assert session.releases == 1


def test_simulated_options_say_nothing_on_a_real_client(node):
    reply = ask_real_node(real(simulation=UpdatePolicy(clip_norm=1.0, mu=9.0, max_participations=3)), request(), **node)
    assert reply.content["metrics"]["mu-guaranteed"] == 1.0
    assert reply.content["metrics"]["min-honest"] == 2


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('trust.kind = "secure-aggregation"\n', "", "only with trust 'secure-aggregation'"),
        ('trust.kind = "secure-aggregation"', 'trust.kind = "trusted-server"', "trust"),
        ('roster = "roster.json"\n', "", "Expected roster to be set"),
        ('signing-key = "client.key"\n', "", "Expected signing-key"),
        (f'roster-digest = "{ROSTER.digest}"\n', "", "Expected roster-digest"),
        ("min-cohort = 3", "min-cohort = 1", "trust.min-honest <= trust.min-cohort"),
        (
            'trust.kind = "secure-aggregation"\ntrust.min-honest = 2\ntrust.min-cohort = 3\n',
            "",
            "Expected roster to be left at",
        ),
    ],
)
def test_an_operators_file_has_all_of_it_or_nothing(node, before, after, words, tmp_path):
    path = tmp_path / "node.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ConfigurationError, match=words):
        UpdateNode.read(path)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "roster.json").unlink(), "murmurfl roster make"),
        (lambda folder: (folder / "client.key").unlink(), "murmurfl roster key"),
        (lambda folder: (folder / "client.key").chmod(0o644), "chmod 600"),
        (lambda folder: other_roster(folder), "which this operator's configuration pins"),
        (lambda folder: other_key(folder), "to be the one in the roster"),
        (lambda folder: edit(folder, "clinic-0", "clinic-9"), "in the roster, got one without it"),
        (lambda folder: edit(folder, "min-cohort = 3", "min-cohort = 4"), "no sum could ever be opened"),
    ],
)
def test_a_wrong_roster_or_key_makes_the_client_refuse_before_it_releases(node, tmp_path, spoil, words):
    spoil(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        CorrelatedNoiseMod(node=UpdateNode.read(tmp_path / "node.toml"))
    reply = ask_real_node(real(), request(), **node)
    assert reply.error.code == protocol.NOT_CONFIGURED
    assert words not in reply.error.reason
    assert not read_ledger(tmp_path / "ledger.sqlite").sessions


def test_a_session_does_not_go_on_under_another_roster(node, tmp_path):
    assert not ask_real_node(real(), request(), **node).has_error()
    other_roster(tmp_path)
    edit(tmp_path, ROSTER.digest, Roster(ROSTER.clients, ROSTER.helpers[:1]).digest)
    assert ask_real_node(real(), request(), **node).error.code == protocol.POLICY_CHANGED


def other_roster(folder):
    (folder / "roster.json").unlink()
    write_roster(folder / "roster.json", Roster(ROSTER.clients, ROSTER.helpers[:1]))


def other_key(folder):
    (folder / "client.key").unlink()
    write_client_key(folder / "client.key", ClientKey.generate())


def edit(folder, before, after):
    path = folder / "node.toml"
    path.write_text(path.read_text().replace(before, after))


def test_the_guarantee_of_masked_updates_has_both_figures():
    sentence = update_guarantee(policy(), 2.0).sentence
    assert "worst case" in sentence
    assert "2 clients of each sum are honest" in sentence
    sample = update_guarantee(policy(), Loss.of(2.0, 3.5)).sentence
    assert "mu = 3.5" in sample
