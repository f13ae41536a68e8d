"""What a run over real machines does differently, on the in-process grid; the real thing is in tests/deployment."""

import json
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid, InMemoryGrid
from murmurfl.app import client_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.methods import METHODS
from murmurfl.app.nodes.node_config import node_strategies
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import CHECKPOINT_NAME, FAILURE_NAME
from murmurfl.app.runs.result import END_NAME, ask_to_end, write_failure, write_record
from murmurfl.app.runs.training_run import NoReleasesError, run_experiment
from murmurfl.app.server_app import is_deployed, run_folder
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, MemoryLedger, RefusedError, SimulatedKeys, SystemKeys, protocol
from murmurfl.strategies import Mu2
from murmurfl.strategies.rounds.known_machines import NodesUnavailableError

CONFIG = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4)


def refusing(code, hello=None):
    """Machines that answer a hello, or not, and refuse everything else."""
    app = ClientApp()

    def refuse(message, context):
        return Message(Error(code, "no"), reply_to=message)

    @app.query()
    def query(message, context):
        if message.content["config"][protocol.ASK] != protocol.ASK_HELLO or hello is None:
            return refuse(message, context)
        names = {protocol.MACHINES: str(context.node_config["partition-id"]), protocol.VERSION: hello}
        return Message(RecordDict({protocol.CONFIG: ConfigRecord(names)}), reply_to=message)

    app.train()(refuse)
    return app


def grid_of(app, config=CONFIG):
    return InProcessGrid(app, config.num_clients, config.to_mapping())


def test_each_training_has_its_own_session_and_guarantee():
    first, second = (run_experiment(grid_of(client_app.app), CONFIG, deployed=True) for _ in range(2))
    assert first.strategy.session != second.strategy.session
    assert first.mu == max(statement["mu-guaranteed"] for statement in first.statements.values())
    assert "Real machines: the figure is what 2 of 2 machines say" in first.guarantee.sentence


def test_an_unknown_grid_counts_as_real_machines():
    """Seeded keys and sessions must not depend on recognising every way to reach a real node."""

    class SomeNewGrid(Grid):
        pass

    for kind in (HttpGrid, InProcessGrid, SomeNewGrid):
        assert is_deployed(kind.__new__(kind) if not kind.__abstractmethods__ else object())
    assert not is_deployed(InMemoryGrid.__new__(InMemoryGrid))


def test_only_simulated_nodes_may_have_several_names():
    for deployed in (False, True):
        strategy = run_experiment(grid_of(client_app.app), CONFIG, deployed=deployed).strategy
        assert strategy.machines.several_on_a_node == (not deployed)


@pytest.mark.parametrize("strategy", ["trusted-mu2", "tree-momentum"])
def test_a_trusted_servers_noise_on_real_machines_is_not_seeded(strategy):
    """No fixed or short seed: the key is 32 bytes of the operating system, another one every time."""
    experiment = prepare(RunConfig(strategy=strategy, num_rounds=2))
    assert isinstance(experiment.strategy().trust._keys, SimulatedKeys)
    keys = [experiment.strategy(deployed=True).trust._keys for _ in range(2)]
    assert all(isinstance(key, SystemKeys) for key in keys)
    assert keys[0].secret_key != keys[1].secret_key


def test_machines_that_all_refuse_end_the_run_after_as_many_rounds_as_configured():
    app = refusing(protocol.BUDGET_EXHAUSTED, hello=protocol.PROTOCOL_VERSION)
    reports = []
    with pytest.raises(NoReleasesError, match=r"none in 3 rounds in a row.*round 3: machines refused with budget-exh"):
        run_experiment(grid_of(app), CONFIG, deployed=True, on_progress=reports.append)
    with pytest.raises(NoReleasesError, match="none in 3 rounds in a row"):
        run_experiment(grid_of(app), CONFIG)
    with pytest.raises(ConfigurationError, match="none in 4 rounds"):
        run_experiment(grid_of(app), replace(CONFIG, give_up_after=0))  # goes to its end


def test_another_version_is_named_whoever_notices_it():
    config = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4, node_deadline_s=0.5)
    expected = (
        r"2 answered with protocol-mismatch \(they speak version 2 of murmurfl's protocol, this server version 1\)"
    )
    with pytest.raises(NodesUnavailableError, match=expected):
        run_experiment(grid_of(refusing(1, hello=2)), config, deployed=True)

    older = ClientApp()

    @older.query()
    def query(message, context):
        reason = "this machine speaks murmurfl's protocol version 2, the request states version 1"
        return Message(Error(protocol.PROTOCOL_MISMATCH, reason), reply_to=message)

    with pytest.raises(NodesUnavailableError, match=expected):
        run_experiment(grid_of(older), config, deployed=True)


def test_what_a_node_says_of_itself_does_not_reach_the_servers_words():
    config = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4, node_deadline_s=0.5)
    app = ClientApp()

    @app.query()
    def query(message, context):
        return Message(Error(protocol.PROTOCOL_MISMATCH, "\x1b[31mrm -rf\nprotocol version eleven"), reply_to=message)

    with pytest.raises(NodesUnavailableError) as caught:
        run_experiment(grid_of(app), config, deployed=True)
    assert "rm" not in str(caught.value)


def test_missing_machines_are_named():
    strategy = Mu2(num_clients=2, clients_per_round=2, learning_rate=0.1, node_deadline_s=0.0)
    strategy.machines.restore(["clinic-0", "clinic-1"])
    grid = grid_of(client_app.app)
    grid.get_node_ids = list
    with pytest.raises(NodesUnavailableError, match=r"got 0 \(missing: clinic-0, clinic-1\)"):
        strategy.machines.meet(grid, 2)


def test_a_real_run_resumes_its_checkpoint_but_no_finished_run(tmp_path):
    config = RunConfig(out_dir=str(tmp_path), run_name="run")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CHECKPOINT_NAME).touch()
    assert run_folder(config, 1, deployed=True) == folder
    with pytest.raises(ConfigurationError):
        run_folder(config, 1)
    (folder / "result.json").touch()
    with pytest.raises(ConfigurationError):
        run_folder(config, 1, deployed=True)


def test_a_failure_leaves_its_reason_until_the_run_is_taken_up_and_ends(tmp_path):
    write_failure(ConfigurationError("Expected this, got that."), tmp_path)
    assert json.loads((tmp_path / FAILURE_NAME).read_text()) == {
        "reason": "Expected this, got that.",
        "checkpoint": None,
    }
    write_record(run_experiment(grid_of(client_app.app), CONFIG), tmp_path)
    assert not (tmp_path / FAILURE_NAME).exists()


@pytest.mark.parametrize(("stated", "words"), [({}, "no version"), ({protocol.VERSION: 2}, "version 2")])
def test_a_machine_answers_not_even_a_hello_of_another_version(stated, words):
    client = prepare(CONFIG).client(0, MemoryLedger())
    with pytest.raises(RefusedError, match=f"protocol version 1, the request states {words}") as caught:
        client.get_properties({protocol.ASK: protocol.ASK_HELLO, **stated})
    assert caught.value.code == protocol.PROTOCOL_MISMATCH


def test_a_training_that_is_asked_to_end_completes_with_its_model_so_far(tmp_path):
    checkpoint = tmp_path / CHECKPOINT_NAME

    def ask(progress):
        if progress.report.server_round == 1:
            ask_to_end(tmp_path)  # during the second round, as far as the server is concerned

    result = run_experiment(grid_of(client_app.app), CONFIG, deployed=True, checkpoint=checkpoint, on_progress=ask)
    whole = run_experiment(grid_of(client_app.app), CONFIG, deployed=True)
    assert [len(run.progress) for run in (result, whole)] == [2, 4]
    assert result.progress[-1].accuracy is not None
    assert result.mu == whole.mu  # what the caps allow, whatever was asked
    write_record(result, tmp_path)
    assert not (tmp_path / END_NAME).exists()
    with pytest.raises(ConfigurationError, match="has ended a round and goes on"):
        ask_to_end(tmp_path)


def test_only_a_run_that_goes_on_can_be_asked_to_end(tmp_path):
    with pytest.raises(ConfigurationError, match="OUT-DIR/RUN-NAME"):
        ask_to_end(tmp_path)


def test_a_cap_above_the_rounds_changes_no_round():
    below, above = (replace(CONFIG, max_participations=cap) for cap in (4, 9))
    assert [prepare(config).num_rounds for config in (below, above)] == [4, 4]
    assert prepare(above).policy().max_participations == 9
    assert prepare(above).guaranteed_mu() == pytest.approx(prepare(below).guaranteed_mu(), rel=1e-3)


def test_real_machines_bound_batch_and_cap_by_what_they_state_and_not_by_a_simulated_partition():
    many = replace(CONFIG, num_clients=1000, batch_size=64)
    with pytest.raises(ConfigurationError, match="batch-size <= "):
        prepare(many)
    assert prepare(many, deployed=True).policy().batch_size == 64
    large = replace(CONFIG, max_participations=100)
    with pytest.raises(ConfigurationError, match="batch-size x max-participations <= "):
        prepare(large)
    assert prepare(large, deployed=True).policy().max_participations == 100
    # The machines of this grid state what they have: a round more than their samples last for is refused by that.
    small = replace(CONFIG, num_rounds=30)
    with pytest.raises(ConfigurationError, match="says that it can make"):
        run_experiment(grid_of(client_app.app, CONFIG), small, deployed=True)


@pytest.mark.parametrize("strategy", [name for name in node_strategies() if METHODS[name].takes_steps])
def test_rounds_of_real_machines_are_never_those_of_a_simulated_partition(strategy, monkeypatch):
    config = RunConfig.from_mapping({"strategy": strategy, "num-clients": 2, "clients-per-round": 2})
    assert prepare(config).num_rounds >= 1
    with pytest.raises(ConfigurationError, match="Expected num-rounds for real machines, got none"):
        prepare(config, deployed=True)
    monkeypatch.setattr(METHODS[strategy].__class__, "usual_rounds", lambda *_: pytest.fail("asked for sizes"))
    assert prepare(replace(config, num_rounds=2), deployed=True).num_rounds == 2


def test_a_method_of_one_round_needs_no_rounds_on_real_machines():
    config = RunConfig.from_mapping({"strategy": "one-shot", "num-clients": 2, "clients-per-round": 2})
    assert prepare(config, deployed=True).num_rounds == 1
