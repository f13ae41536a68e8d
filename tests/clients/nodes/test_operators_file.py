"""Who may have written an operator's file: what is in it decides what leaves the client."""

import os
import re

import pytest
from murmurfl.clients import UpdateNode
from murmurfl.clients.nodes.operators_file import operators_values
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")
TEXT = 'client = "clinic-0"\nledger = "ledger.sqlite"\nclip-norm = 1.0\nmu = 1.0\nmax-participations = 3\n'


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "etc" / "murmurfl"
    folder.mkdir(parents=True)
    (folder / "node.toml").write_text(TEXT)
    (folder / "node.toml").chmod(0o600)
    return folder / "node.toml"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o644])
def test_a_file_that_only_its_operator_may_write_is_read(path, mode):
    path.chmod(mode)
    assert UpdateNode.read(path).client == "clinic-0"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("mode", [0o620, 0o660, 0o664, 0o602, 0o606, 0o666, 0o777])
def test_a_file_its_group_or_others_may_write_is_refused_with_the_way_out(path, mode):
    path.chmod(mode)
    with raises(ConfigurationError, "insecure", match=f"with mode {mode:o}") as refused:
        UpdateNode.read(path)
    path.chmod(mode & ~0o022)
    assert f"chmod go-w {path}" in str(refused.value)
    assert UpdateNode.read(path).client == "clinic-0"


def test_a_file_of_somebody_else_is_refused(path, monkeypatch):
    owner = path.stat().st_uid
    if owner == 0:
        os.chown(path, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for read in (UpdateNode.read, operators_values):
        with raises(ConfigurationError, "insecure", match=f"belongs to user {owner or 4711}: .* chown {os.geteuid()} "):
            read(path)


@pytest.mark.parametrize("which", [0, 1], ids=["its own folder", "one above"])
def test_a_folder_where_anybody_may_put_another_file_is_refused(path, which):
    folder = path.parents[which]
    folder.chmod(0o777)
    with raises(ConfigurationError, "insecure", match=re.escape(f"chmod o-w {folder}")):
        UpdateNode.read(path)
    folder.chmod(0o1777)
    assert UpdateNode.read(path).client == "clinic-0", "as /tmp: nobody may take another's file away"
    folder.chmod(0o775)
    assert UpdateNode.read(path).client == "clinic-0", "as everywhere on systems whose umask is 002"


def test_a_link_in_a_folder_where_anybody_may_change_it_is_refused(path, tmp_path):
    (tmp_path / "open").mkdir()
    link = tmp_path / "open" / "node.toml"
    link.symlink_to(path)
    assert UpdateNode.read(link).ledger == str(path.parent / "ledger.sqlite")
    (tmp_path / "open").chmod(0o777)
    with raises(ConfigurationError, "insecure", match="put another in its place"):
        UpdateNode.read(link)
