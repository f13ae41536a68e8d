"""Another noise key for a real machine, by its operator's file."""

from __future__ import annotations

from pathlib import Path

from ...clients import UpdateNode
from ...clients.adapters.noise_mod import machine_behind
from ...clients.nodes.sample_node import SampleNode
from ...privacy import rotate_key
from .node_config import NodeConfig
from .own_app import OwnNode, own_client


def rotate_key_of(node: NodeConfig | OwnNode, key_file: Path | None) -> int:
    """Exchange the noise key of a machine's ledger; returns how many sessions it closed.

    Parameters
    ----------
    node : NodeConfig, UpdateNode or SampleNode
        The operator's file: it names the data, whose digest the ledger keeps under the key.
    key_file : Path, optional
        A new file for the new key.

    Raises
    ------
    ConfigurationError, LedgerError
        If the machine cannot be made from its file, or as for :func:`~murmurfl.privacy.rotate_key`.
    """
    if isinstance(node, UpdateNode):
        machine = machine_behind(node)
    elif isinstance(node, SampleNode):
        machine = own_client(node)[1].machine
    else:
        machine = node.client().machine
    return rotate_key(node.ledger, machine.row_bytes, machine.num_rows, key_file=key_file)
