"""``murmurfl owner``: keys that are made once, permits of one line, and the hash of what `flwr run` sends."""

import hashlib
import json
import os
import re
import shlex
import time
import tomllib
from functools import reduce
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from murmurfl.app.commands.main import cli
from murmurfl.app.nodes.federation.keys_and_cards import read_owner_key
from murmurfl.app.nodes.taken_runs import RunsTable, TakenRuns
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.nodes.operators_file import named_values
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.permits import OwnerKey, read_permit, verified_permit
from typer.testing import CliRunner


def owner(*arguments):
    result = CliRunner().invoke(cli, ["owner", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def key(tmp_path):
    made = owner("key", tmp_path / "night.key")
    assert made.exit_code == 0, made.output
    return tmp_path / "night.key"


def signed(*arguments):
    made = owner("permit", *arguments)
    assert made.exit_code == 0, made.output
    (text,) = made.stdout.splitlines()
    return text


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_key_is_its_owners_alone_says_its_public_half_and_is_never_overwritten(tmp_path):
    before = os.umask(0)
    try:
        said = owner("key", tmp_path / "night.key").output
    finally:
        os.umask(before)
    made, content = read_owner_key(tmp_path / "night.key"), (tmp_path / "night.key").read_bytes()
    assert (tmp_path / "night.key").stat().st_mode & 0o777 == 0o600
    assert made.public.hex() in said
    assert made.secret.hex() not in said
    again = owner("key", tmp_path / "night.key")
    assert again.exit_code == 1
    assert "Expected nothing at" in again.stderr
    assert (tmp_path / "night.key").read_bytes() == content


def test_a_permit_is_one_line_of_a_fresh_session(key):
    public, now = read_owner_key(key).public, time.time()
    first, second = (verified_permit(signed(key), [public]) for _ in range(2))
    assert first.sessions != second.sessions
    assert len(first.sessions) == 1
    assert first.is_for(now)
    assert first.is_for(now - 200), "another clock may be a little behind"
    assert not first.is_for(now + 7 * 24 * 3600 + 5)
    assert first.bundle == ""


def test_a_permit_says_what_it_is_asked_to(key):
    digest = "ab" * 32
    chosen = ("--session", "night", "--mean", "--evaluation", "--bundle", digest, "--days", 0.5)
    permit = verified_permit(signed(key, *chosen, "--from", "2030-01-02T03:04"), [read_owner_key(key).public])
    assert permit.sessions == ("night", "nightmean", "nightevaluation")
    assert permit.bundle == digest
    assert permit.until - permit.not_before == 12 * 3600
    assert time.localtime(permit.not_before)[:5] == (2030, 1, 2, 3, 4)


def test_a_permit_is_renewed_for_the_same_sessions_and_only_by_its_own_key(key):
    old = signed(key, "--session", "night", "--mean", "--bundle", "ab" * 32)
    new = read_permit(signed(key, "--renew", old, "--days", 30))
    assert (new.sessions, new.bundle) == (read_permit(old).sessions, read_permit(old).bundle)
    assert new.until > read_permit(old).until
    # A server may hand over anything as what is to be renewed.
    made_up = OwnerKey.generate().permit(["another"], not_before=0, until=2**40)
    for text in (made_up, old[:-4] + "AAAA", "night"):
        said = owner("permit", key, "--renew", text)
        assert said.exit_code == 1
        assert said.stdout == ""
    assert "Expected --renew alone" in owner("permit", key, "--renew", old, "--session", "other").stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--session", "a b"), "Expected a session of 1 to 64 letters and digits"),
        (("--days", 0), "Expected --days to be a number > 0"),
        (("--from", "tonight"), "Expected --from as YYYY-MM-DDTHH:MM"),
        (("--bundle", "ab"), "Expected a bundle's SHA-256"),
    ],
)
def test_an_impossible_permit_is_refused_with_one_line(key, arguments, complaint):
    said = owner("permit", key, *arguments)
    assert said.exit_code == 1
    assert complaint in said.stderr
    assert said.stdout == ""


def test_a_permit_is_shown_and_a_forged_one_is_called_that(key):
    text = signed(key, "--session", "night")
    said = owner("show", text)
    assert said.exit_code == 0
    for shown in (read_owner_key(key).public.hex(), "night", "any", "UTC"):
        assert shown in said.stdout
    document = json.loads(owner("show", text, "--json").stdout)
    assert document["signed"] is True
    assert document["sessions"] == ["night"]
    forged = OwnerKey.generate().permit(["night"], not_before=0, until=2**40).rsplit(".", 1)[1]
    said = owner("show", f"{text.rsplit('.', 1)[0]}.{forged}")
    assert said.exit_code == 1
    assert "do not use it" in said.stderr
    assert owner("show", "night").exit_code == 1


def test_a_file_that_is_no_key_or_that_others_may_read_is_refused(tmp_path, key):
    (tmp_path / "other").write_text("{}")
    (tmp_path / "other").chmod(0o600)
    (tmp_path / "newer").write_text(key.read_text().replace(": 1", ": 2"))
    (tmp_path / "newer").chmod(0o600)
    key.chmod(0o640)
    for path, complaint in (
        (tmp_path / "other", "got something else"),
        (tmp_path / "newer", "of format 1, got one of format 2"),
        (key, "mode 640"),
        (tmp_path / "no", "no file"),
    ):
        with pytest.raises(ConfigurationError, match=complaint) as refused:
            read_owner_key(path)
        assert refused.value.__cause__ is None or complaint == "no file"


def test_the_hash_of_a_bundle_is_that_of_what_flower_builds(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "server.py").write_text("app = None\n")
    (tmp_path / "app" / "client.py").write_text("app = None\n")
    (tmp_path / "app" / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n[tool.flwr.app]\npublisher = "tests"\n'
        '[tool.flwr.app.components]\nserverapp = "server:app"\nclientapp = "client:app"\n'
    )
    said = owner("bundle", tmp_path / "app")
    assert said.exit_code == 0, said.output
    assert said.stdout.strip() == hashlib.sha256(build_fab_from_disk(tmp_path / "app")).hexdigest()
    (tmp_path / "app" / "server.py").write_text("app = 1\n")
    assert owner("bundle", tmp_path / "app").stdout != said.stdout
    assert "without pyproject.toml" in owner("bundle", tmp_path).stderr


def test_the_commands_of_the_page_are_followed(tmp_path, monkeypatch):
    """As they stand there, with what a shell makes of them; `flwr run` as Flower reads its run configuration."""
    page = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text()
    section = page.partition("## Which runs a node takes")[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", "")
    monkeypatch.chdir(tmp_path)
    read = {"$(murmurfl owner bundle .)": "ab" * 32}
    ran = []
    for line in lines.splitlines():
        for file in tmp_path.glob("*.permit"):
            read[f"$(cat {file.name})"] = file.read_text().strip()
        words = [reduce(lambda word, item: word.replace(*item), read.items(), word) for word in shlex.split(line)]
        ran.append(words[:3])
        if words[0] == "murmurfl":
            said = CliRunner().invoke(cli, words[1:])
            assert said.exit_code == 0, said.output
        else:
            given = [words[i + 1] for i, word in enumerate(words) if word == "-c"]
            permit = RunConfig.from_mapping(parse_config_args(given)).permit
            assert read_permit(permit).bundle == "ab" * 32
    assert [words[-1] for words in ran] == ["key", "permit", "show", ".", "permit"]
    table = tomllib.loads(next(iter(re.findall(r"^```toml\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE))))
    assert TakenRuns._of(RunsTable(**named_values(RunsTable, table["runs"]))).hours is not None
