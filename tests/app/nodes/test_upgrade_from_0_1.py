"""What murmurfl 0.1 left on a node and on a server is read, or refused with the way out; nothing of it is lost."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.config import RunConfig
from murmurfl.app.experiment import prepare
from murmurfl.app.nodes.config import NodeConfig
from murmurfl.privacy import LedgerError, RefusedError, SQLiteLedger, protocol, read_ledger
from murmurfl.strategies.checkpoint import CheckpointError
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("quick_disk")

LEFT = Path(__file__).parent / "of_0_1"


@pytest.fixture(params=["mu2", "trusted-mu2"])
def left(request, tmp_path):
    """A node's folder and a run's checkpoint, with the modes that 0.1 gave them."""
    return copied(request.param, tmp_path)


@pytest.fixture
def node(tmp_path):
    return copied("mu2", tmp_path) / "node-0"


def copied(strategy, tmp_path):
    shutil.copytree(LEFT / strategy, tmp_path / strategy)
    for file in (tmp_path / strategy).rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    return tmp_path / strategy


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def command(*words):
    result = CliRunner().invoke(cli, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


def test_an_operators_file_of_0_1_says_what_it_said(left):
    config = NodeConfig.read(left / "node-0" / "node.toml")
    assert (config.strategy, config.machine) == (left.name, "node-0")
    assert (config.clip_norm, config.mu, config.budget_mu, config.max_participations) == (2.0, 2.0, 4.0, 6)


def test_a_ledger_of_0_1_is_refused_with_the_way_out_and_left_alone(left):
    before = contents(left / "node-0")
    path = left / "node-0" / "ledger.sqlite"
    for attempt in (lambda: SQLiteLedger(path), lambda: read_ledger(path)):
        with pytest.raises(LedgerError, match=re.escape(f"`murmurfl ledger upgrade {path}`")):
            attempt()
    code, said = command("node", left / "node-0" / "node.toml", "--check")
    assert code == 1
    assert "ledger upgrade" in said
    assert contents(left / "node-0") == before


def test_the_upgrade_loses_nothing_that_was_spent(node):
    path = node / "ledger.sqlite"
    assert command("ledger", "upgrade", path, "--yes")[0] == 0
    ledger = read_ledger(path)
    (session,) = ledger.sessions
    assert (ledger.budget_mu, ledger.reserved_mu, ledger.samples_used, ledger.mark_problem) == (4.0, 2.0, 48, "")
    assert (session.releases, session.ack, session.mu) == (3, 2, 2.0)
    assert session.first_release < session.last_release


def test_the_node_then_goes_on_with_samples_that_were_never_used_and_not_with_its_old_session(node):
    command("ledger", "upgrade", node / "ledger.sqlite", "--yes")
    machine = NodeConfig.read(node / "node.toml").client().machine
    (session,) = read_ledger(node / "ledger.sqlite").sessions
    with pytest.raises(RefusedError) as refusal:
        machine.admits(session.session, 3)
    assert refusal.value.code == protocol.POLICY_CHANGED
    assert machine.admits("new", 0) == slice(48, 64)
    machine.release("new", 0, lambda rows: np.zeros((rows.stop - rows.start, machine.num_parameters)))
    after = read_ledger(node / "ledger.sqlite")
    assert after.reserved_mu == pytest.approx(2.0 * 2**0.5)
    assert after.samples_used == 64
    assert command("node", node / "node.toml", "--check")[0] == 0


def test_a_ledger_of_0_1_may_get_another_noise_key_once_it_is_upgraded(node):
    assert command("ledger", "rotate-key", node / "node.toml", "--yes")[0] == 1
    command("ledger", "upgrade", node / "ledger.sqlite", "--yes")
    code, said = command("ledger", "rotate-key", node / "node.toml", "--yes")
    assert (code, "1 sessions are closed" in said) == (0, True)
    assert NodeConfig.read(node / "node.toml").client().machine.admits("new", 0) == slice(48, 64)


def test_a_trusted_servers_ledger_of_0_1_allows_no_further_run(tmp_path):
    node = copied("trusted-mu2", tmp_path) / "node-0"
    command("ledger", "upgrade", node / "ledger.sqlite", "--yes")
    with pytest.raises(RefusedError) as refusal:
        NodeConfig.read(node / "node.toml").client().machine.admits("new", 0)
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED


class Nobody:
    """A grid on which no machine ever is."""

    def get_node_ids(self):
        raise EOFError


def strategy_of(left, **changes):
    settings = {"num-clients": 2, "clients-per-round": 2, "num-rounds": 3, "batch-size": 16, "mu": 2.0, **changes}
    experiment = prepare(RunConfig.from_mapping({"strategy": left.name, **settings}))
    strategy = experiment.strategy(deployed=True, checkpoint=left / "checkpoint.npz")
    return strategy, experiment.initial_arrays()


# The step that 0.1 took: this version would take a smaller one.
STEP = {"learning-rate": 12.88888888888889}


def test_a_checkpoint_of_0_1_is_read_with_the_step_that_0_1_took(tmp_path):
    """Its session cannot go on all the same: the machines refuse. What was trained is there."""
    left = copied("mu2", tmp_path)
    before = (left / "checkpoint.npz").read_bytes()
    strategy, arrays = strategy_of(left, **STEP, **{"num-rounds": 5})
    with pytest.raises(EOFError):
        strategy.start(Nobody(), arrays, num_rounds=5)
    assert [report.aggregated for report in strategy.history] == [2, 2, 2]
    assert strategy.acks == {"node-0": 3, "node-1": 3}
    assert (left / "checkpoint.npz").read_bytes() == before


@pytest.mark.parametrize("changes", [{}, STEP], ids=["other step", "same step"])
def test_a_trusted_servers_checkpoint_of_0_1_is_refused_with_the_way_out_and_left_alone(tmp_path, changes):
    left = copied("trusted-mu2", tmp_path)
    before = (left / "checkpoint.npz").read_bytes()
    strategy, arrays = strategy_of(left, **changes)
    with pytest.raises(CheckpointError, match="remove it to start anew"):
        strategy.start(Nobody(), arrays, num_rounds=3)
    assert (left / "checkpoint.npz").read_bytes() == before
