"""The files of examples/fleet: units that systemd takes, an image without privileges, and commands that exist."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from dockerfile_parse import DockerfileParser
from flwr.cli.app import app as flwr
from murmurfl.app.commands.main import cli
from murmurfl.app.fleet.servers.gate import SuperLinkOptions
from murmurfl.app.nodes.connection import Connection
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.settings.run_config import RunConfig

from tests.harness import units

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "examples" / "fleet"
UNITS = {path.name: path.read_text() for path in sorted(FLEET.glob("*.service")) + sorted(FLEET.glob("*.timer"))}
OURS = [name for name, text in UNITS.items() if "/opt/murmurfl" in text]
README = (FLEET / "README.md").read_text()
CONTAINERFILE = (FLEET / "Containerfile").read_text()
VOLUME = "/var/lib/murmurfl"
APPS = "murmurfl-apps.service"
SYSTEM = {"useradd", "install", "cp", "systemctl", "openssl"}
PROGRAMS = {"murmurfl": cli, "flwr": flwr}


def check_command(words):
    """Fail unless a program of ours or of Flower's would take these words; its parameters, of the last subcommand."""
    name = Path(words[0]).name
    if name == "python":
        assert words[1:5] == ["-P", "-m", "murmurfl.app.fleet.servers.superlink_process", "superexec"]
        told = importlib.import_module("flwr.supercore.cli.flower_superexec")._parse_args().parse_args(words[5:])
        assert told.superexec_auth_secret_file
        return vars(told)
    command = typer.main.get_command(PROGRAMS[name])
    context = command.make_context(name, words[1:])
    while hasattr(context.command, "commands"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(rest), parent=context)
    if name == "server":  # what is left is for Flower's SuperLink
        module = importlib.import_module("flwr.superlink.cli.flower_superlink")
        assert context.args
        module._parse_args_run_superlink().parse_args(context.args)
        assert context.params["owners"]
        SuperLinkOptions.read(context.args).check()
    return context.params


def commands(page):
    """The commands of a page's shell blocks, as words."""
    text = "".join(re.findall(r"^ *```sh\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE))
    return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


# Units.


def check_unit(name, text):
    """Fail unless a unit is whole, starts something that exists, and gives a program of ours no more than it needs."""
    unit = units.parsed(text)
    assert unit.one("Unit", "Description")
    if name.endswith(".timer"):
        assert unit.one("Timer", "OnCalendar")
        started = (unit.all("Timer", "Unit") or [name.replace(".timer", ".service")])[-1]
        assert started in UNITS
        assert unit.one("Install", "WantedBy") == "timers.target"
        return
    words = unit.command
    if words[:2] == ["/bin/sh", "-c"]:
        words = shlex.split(words[2].replace("$(date +%F)", "2026-01-03"))[1:]
    if name not in OURS:
        assert words == ["/usr/bin/systemctl", "stop", "murmurfl-node.service"]
        return
    assert words[0].startswith("/opt/murmurfl/bin/")
    check_command(words)
    user = Path(name).stem if name == APPS else "murmurfl"
    assert unit.one("Service", "User") == user
    assert unit.one("Service", "ReadWritePaths") == f"/var/lib/{user}"
    wanted = {"ProtectSystem": "strict", "NoNewPrivileges": "true", "CapabilityBoundingSet": ""}
    wanted["UMask"] = "0027" if name == APPS else "0077"  # the server reads the figures
    wanted["LimitCORE"] = "0"  # there are keys in its memory
    assert {key: unit.one("Service", key) for key in wanted} == wanted
    if "server" in words:
        assert int(unit.one("Service", "LimitNOFILE")) >= 1024
    if unit.all("Service", "Type") != ["oneshot"]:
        assert unit.one("Service", "Restart") == "always"
        assert 0 < int(unit.one("Service", "MemoryMax").removesuffix("%")) < 100
        assert unit.one("Install", "WantedBy") == "multi-user.target"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_what_exists_with_no_more_rights_than_it_needs(name):
    check_unit(name, UNITS[name])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("murmurfl-node.service", "murmurfl node ", "murmurfl nod "),
        ("murmurfl-node.service", "User=murmurfl", "User=root"),
        ("murmurfl-node.service", "ProtectSystem=strict\n", ""),
        ("murmurfl-node.service", f"ReadWritePaths={VOLUME}", f"ReadWritePaths={VOLUME} /etc"),
        ("murmurfl-helper.service", "Restart=always", "Restart=no"),
        ("murmurfl-server.service", "--host 0.0.0.0", "--hosts 0.0.0.0"),
        ("murmurfl-server.service", "LimitNOFILE=65536", "LimitNOFILE=256"),
        ("murmurfl-node.service", "LimitCORE=0\n", ""),
        ("murmurfl-helper.service", "MemoryMax=75%\n", ""),
        ("murmurfl-server.service", "--owners /etc/murmurfl/owners ", ""),
        ("murmurfl-server.service", "--superexec-auth-secret-file /etc/murmurfl/apps.secret", ""),
        ("murmurfl-server.service", "--ssl-certfile /etc/murmurfl/server.pem", "--insecure"),
        (APPS, "User=murmurfl-apps", "User=murmurfl"),
        (APPS, "--superexec-auth-secret-file", "--secret-file"),
        ("murmurfl-node.timer", "Unit=murmurfl-node.service", "Unit=murmurfl.service"),
        ("murmurfl-run.service", "--stream", "--steam"),
        ("murmurfl-run.service", "[Service]", "[Service"),
    ],
)
def test_a_wrong_unit_would_be_noticed(name, right, wrong):
    assert right in UNITS[name]
    with pytest.raises((Exception, SystemExit)):
        check_unit(name, UNITS[name].replace(right, wrong))


def verified(folder, texts):
    """What ``systemd-analyze verify`` says of units in a root of their own; nothing if they are in order."""
    there = folder / "etc" / "systemd" / "system"
    there.mkdir(parents=True)
    for program in (*re.findall(r"^ExecStart=(\S+)", "\n".join(texts.values()), re.MULTILINE),):
        path = folder / program.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    for name, text in texts.items():
        (there / name).write_text(text)
    said = ""
    for name in texts:
        command = ["systemd-analyze", "verify", f"--root={folder}", "--man=no", "--recursive-errors=no", name]
        command[-1] = f"/etc/systemd/system/{name}"
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said += ended.stdout + ended.stderr + (f"{name}: exit {ended.returncode}\n" if ended.returncode else "")
    return "\n".join(line for line in said.splitlines() if "murmurfl" in line)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path):
    assert verified(tmp_path / "ours", UNITS) == ""
    wrong = {"murmurfl-node.service": UNITS["murmurfl-node.service"].replace("Restart=always", "Restart=for-ever")}
    assert "murmurfl-node.service" in verified(tmp_path / "wrong", wrong)
    late = {**UNITS, "murmurfl-node.timer": UNITS["murmurfl-node.timer"].replace("22..23", "22..33")}
    assert "murmurfl-node.timer" in verified(tmp_path / "late", late)


def test_the_nightly_run_has_a_configuration_that_is_taken():
    unit = units.parsed(UNITS["murmurfl-run.service"])
    told = check_command(shlex.split(unit.command[2])[1:])
    (override,) = told["run_config_overrides"]
    pairs = re.findall(r"""[\w-]+=(?:'[^']*'|\S+)""", override)
    assert len(pairs) == override.count("=")
    RunConfig.from_mapping(tomllib.loads("\n".join(pairs)))


def test_the_operators_file_is_read(tmp_path):
    path = tmp_path / "node.toml"
    text = (FLEET / "node.toml").read_text()
    path.write_text(re.sub(r'^(root-certificates|private-key) = ".*/', r'\1 = "', text, flags=re.MULTILINE))
    path.chmod(0o600)
    assert NodeConfig.read(path).client == "clinic-0"
    (tmp_path / "ca.crt").touch()
    (tmp_path / "clinic-0").touch()
    connection = Connection.needed(path, {})
    assert connection.superlink == "fl.example.org:8000"
    assert (connection.root_certificates, connection.private_key) == (tmp_path / "ca.crt", tmp_path / "clinic-0")


# The image.


def check_image(folder, text):
    """Fail unless an image has no privileges, one volume, nothing secret, a Python of ours and a known command."""
    (folder / "Dockerfile").write_text(text)
    parsed = DockerfileParser(str(folder))
    instructions = [(one["instruction"], one["value"]) for one in parsed.structure if one["instruction"] != "COMMENT"]
    last = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
    final = instructions[last:]
    values = {name: [value for found, value in final if found == name] for name, _ in instructions}
    user, group = values["USER"][-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert [json.loads(value) for value in values["VOLUME"]] == [[VOLUME]]
    words = json.loads(values["ENTRYPOINT"][0]) + json.loads(values["CMD"][0])
    assert str(check_command(words)["config"]) == f"{VOLUME}/node.toml"
    minors = {re.fullmatch(r"docker\.io/library/python:(3\.\d+)-slim", image)[1] for image in parsed.parent_images}
    assert minors <= declared()
    assert len(minors) == 1
    assert not {"ADD", "ARG", "EXPOSE"} & {name for name, _ in instructions}
    listed = [word for name, value in instructions[:last] if name == "COPY" for word in value.split()[:-1]]
    assert set(listed) == {"pyproject.toml", "README.md", "LICENSE", "app", "clients", "privacy", "strategies"}
    assert [value for name, value in final if name == "COPY"] == ["--from=build /opt/murmurfl /opt/murmurfl"]


def declared():
    """The versions of Python that the project declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), flags=re.MULTILINE))


def test_the_image_has_no_privileges_one_volume_and_a_command_that_exists(tmp_path):
    check_image(tmp_path, CONTAINERFILE)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("USER 10001:10001", "USER 0:0"),
        ("USER 10001:10001\n", ""),
        (f'VOLUME ["{VOLUME}"]', f'VOLUME ["{VOLUME}", "/etc"]'),
        ('CMD ["node"', 'CMD ["nodes"'),
        ("python:3.13-slim AS", "python:3.14-slim AS"),
        ("COPY app /source/app", "COPY . /source"),
        ("USER", "ADD https://example.org/x /x\nUSER"),
    ],
)
def test_a_wrong_image_would_be_noticed(tmp_path, right, wrong):
    assert right in CONTAINERFILE
    with pytest.raises((Exception, SystemExit)):
        check_image(tmp_path, CONTAINERFILE.replace(right, wrong))


def test_what_the_image_is_made_from_is_all_that_the_wheel_has():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {folder.split("/")[0] for folder in tools["package-dir"].values()}
    assert {line.split()[1] for line in CONTAINERFILE.splitlines() if line.startswith("COPY") and "=" not in line} == {
        *folders,
        "pyproject.toml",
    }


# The page.


def test_the_commands_of_the_page_are_ones():
    for words in commands(README):
        if words[0] == "docker" and words[1] == "run":
            check_container(words)
        else:
            assert words[0] in SYSTEM or words[:2] == ["docker", "build"]
            for word in words:
                if word.startswith("examples/"):
                    assert (ROOT / word).exists()
                if word.endswith((".timer", ".service")):
                    assert Path(word).name in UNITS


def check_container(words):
    """A container without privileges, whose command is one of murmurfl."""
    assert {"--read-only", "--tmpfs", "--cap-drop", "no-new-privileges"} <= set(words)
    rest = words[words.index("murmurfl") + 1 :]
    if "--entrypoint" in words:
        assert words[words.index("--user") + 1] not in ("0:0", "10001:10001")
        check_command([words[words.index("--entrypoint") + 1], *rest])
        return
    command = rest or json.loads(re.search(r"^CMD (.*)$", CONTAINERFILE, re.M)[1])
    check_command(["murmurfl", *command])


def test_a_container_with_a_root_that_can_be_written_would_be_noticed():
    (words, *_) = [words for words in commands(README) if words[:2] == ["docker", "run"]]
    with pytest.raises(AssertionError):
        check_container([word for word in words if word != "--read-only"])


def test_the_page_names_every_file():
    named = {Path(name).name for name in re.findall(r"`([\w.-]+)`", README)}
    assert {path.name for path in FLEET.iterdir()} - {"README.md"} <= named
