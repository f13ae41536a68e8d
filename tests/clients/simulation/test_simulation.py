"""Seeded keys and forgetful ledgers exist in a simulation, and nowhere else."""

import threading

import pytest
from flwr.app import Context, RecordDict
from murmurfl.clients import ContextLedger, simulated_machine
from murmurfl.clients.messages import in_simulation, simulated_in_process
from murmurfl.privacy import ConfigurationError, SimulatedKeys


def context(**node_config):
    return Context(run_id=1, node_id=5, node_config=node_config, state=RecordDict(), run_config={})


def test_a_simulated_machine_is_named_by_its_partition():
    with simulated_in_process():
        machine = simulated_machine(context(**{"partition-id": 3}), seed=7)
        assert simulated_machine(context())["name"] == "5"
    assert machine["name"] == "3"
    assert isinstance(machine["ledger"], ContextLedger)
    assert machine["keys"] == SimulatedKeys(7, "3")


def test_a_real_node_gets_none():
    assert not in_simulation()
    with pytest.raises(ConfigurationError, match="SQLiteLedger"):
        simulated_machine(context(**{"partition-id": 3}))


def test_a_simulation_ends_with_its_message_and_is_its_threads_own():
    seen = []
    with simulated_in_process():
        thread = threading.Thread(target=lambda: seen.append(in_simulation()))
        thread.start()
        thread.join()
        assert in_simulation()
    assert seen == [False]
    assert not in_simulation()
