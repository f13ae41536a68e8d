"""Operators' files that the application writes and reads."""

import os

import pytest
from murmurfl.app.nodes.node_app import read_node
from murmurfl.clients import UpdateNode
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.files import write_private

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")
TEXT = 'machine = "clinic-0"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'


def test_our_own_writers_make_files_that_pass_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write_private(tmp_path / "node.toml", TEXT)
        write_private(tmp_path / "node.toml", TEXT)
    finally:
        os.umask(before)
    assert (tmp_path / "node.toml").stat().st_mode & 0o777 == 0o600
    assert UpdateNode.read(tmp_path / "node.toml").machine == "clinic-0"


def test_a_file_of_somebody_else_is_not_read(tmp_path, monkeypatch):
    write_private(tmp_path / "node.toml", TEXT)
    owner = (tmp_path / "node.toml").stat().st_uid
    if owner == 0:
        os.chown(tmp_path / "node.toml", 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match=f"belongs to user {owner or 4711}"):
        read_node(tmp_path / "node.toml")
