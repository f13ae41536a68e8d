"""Files of rosters and private keys: written once, read back, and refused where they are not what was pinned."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from murmurfl.clients.nodes.roster_files import (
    read_client_key,
    read_helper_key,
    read_roster,
    write_client_key,
    write_helper_key,
    write_roster,
)
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster

from tests.harness.errors import raises

KEY = ClientKey.simulated(0, "a")
HELPER = HelperKey.simulated(0, "h")
ROSTER = Roster({"a": KEY.public, "b": ClientKey.simulated(0, "b").public}, (HELPER.entry("h"),))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_client_key(tmp_path / "client.key", KEY)
    write_helper_key(tmp_path / "helper.key", "h", HELPER)
    write_roster(tmp_path / "roster.json", ROSTER)
    assert read_client_key(tmp_path / "client.key") == KEY
    assert read_helper_key(tmp_path / "helper.key") == ("h", HELPER)
    assert read_roster(tmp_path / "roster.json", ROSTER.digest) == ROSTER
    assert read_roster(tmp_path / "roster.json", None) == ROSTER


def test_files_of_keys_are_their_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "client.key"
    write_client_key(file, KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with raises(ConfigurationError, "exists"):
        write_client_key(file, ClientKey.generate())
    with raises(ConfigurationError, "exists"):
        write_helper_key(file, "h", HELPER)
    assert read_client_key(file) == KEY
    file.chmod(0o640)
    with raises(ConfigurationError, "insecure", match="chmod 600"):
        read_client_key(file)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with raises(ConfigurationError, "not-found", match="murmurfl roster key"):
        read_client_key(tmp_path / "client.key")
    with raises(ConfigurationError, "not-found", match="murmurfl roster key"):
        read_helper_key(tmp_path / "helper.key")
    with raises(ConfigurationError, "unreadable", match="murmurfl roster make"):
        read_roster(tmp_path / "roster.json", None)


def test_a_file_of_another_format_is_refused_with_its_number_alone(tmp_path: Path) -> None:
    write_client_key(tmp_path / "client.key", KEY)
    write_helper_key(tmp_path / "helper.key", "h", HELPER)
    write_roster(tmp_path / "roster.json", ROSTER)
    readers = {"client.key": read_client_key, "helper.key": read_helper_key, "roster.json": read_roster}
    for name, read in readers.items():
        file, options = tmp_path / name, (ROSTER.digest,) if read is read_roster else ()
        text = file.read_text().replace('": 1', '": 2', 1)
        file.write_text(text)
        with raises(
            ConfigurationError, "other-format", match=r"of format 1, got one of format 2\. Use the version"
        ) as refused:
            read(file, *options)
        assert "secret" not in str(refused.value)
        assert file.read_text() == text


def test_a_roster_with_one_other_key_is_not_the_pinned_one(tmp_path: Path) -> None:
    document = ROSTER.document
    document["machines"]["b"] = ClientKey.simulated(1, "b").public.hex()
    (tmp_path / "roster.json").write_text(json.dumps(document))
    with raises(ConfigurationError, "mismatch", "roster-digest"):
        read_roster(tmp_path / "roster.json", ROSTER.digest)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"murmurfl-client-key": 2, "secret": "00"}',
        b'{"murmurfl-client-key": 1, "secret": 7}',
        b'{"murmurfl-client-key": 1, "secret": "zz"}',
        b'{"murmurfl-client-key": 1, "secret": "0011"}',
    ],
)
def test_a_file_that_holds_something_else_is_refused_without_its_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some.key"
    file.write_bytes(content)
    file.chmod(0o600)
    for read in (read_client_key, read_helper_key, lambda path: read_roster(path, None)):
        with pytest.raises(ConfigurationError) as caught:
            read(file)
        assert "0011" not in str(caught.value)
        assert not isinstance(caught.value.__cause__, json.JSONDecodeError)


def test_a_clients_key_is_not_taken_for_a_helpers(tmp_path: Path) -> None:
    write_client_key(tmp_path / "client.key", KEY)
    with raises(ConfigurationError, "other-format", match="a helper's keys"):
        read_helper_key(tmp_path / "client.key")
