"""Every command of the README is run: here, or (make run, make test) by CI. Its words are few."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import Processes
from murmurfl.app.settings.run_config import SECURE
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def commands(document):
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
        for line in block.strip().replace("\\\n", " ").splitlines()
        if not line.startswith("#")
    ]


MAKE_RUN, FLWR_RUN = commands("README.md")[-2:]


def begun(document, *beginnings):
    """The first commands of a page that begin so."""
    found = commands(document)
    return [next(line for line in found if line.removeprefix(".venv/bin/").startswith(one)) for one in beginnings]


RUN, REPORT, PLAN, AUDIT = begun("docs/start.md", "murmurfl run", "murmurfl report", "murmurfl plan", "murmurfl audit")
(REPRODUCE,) = begun("docs/running.md", "murmurfl reproduce reshef-levy-2025 --set")


def test_links_and_the_picture_work_on_pypi():
    """PyPI shows this page under an address of its own; that the files are there tests/test_house.py sees."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / project["readme"]).read_text())
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / project["readme"]).read_text())
    assert picture.startswith(project["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com"))


def test_ci_runs_the_two_commands():
    assert commands("README.md")[:3] == ["make run", "make test", "pip install ."]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make run" in script
    assert "make test" in script


@pytest.mark.long  # the script of every change has `make run`
def test_make_run_with_settings(tmp_path):
    """The command line `make` would run; make itself is CI's."""
    settings = re.fullmatch(r'make run ARGS="(.*)"', MAKE_RUN).group(1)
    recipe = (ROOT / "Makefile").read_text()
    assert "$(BIN)/murmurfl run $(ARGS)" in recipe
    subprocess.run(
        [BIN / "murmurfl", "run", *shlex.split(settings), "--out", tmp_path, "--name", "x"],
        cwd=ROOT, check=True, timeout=200, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    document = json.loads((tmp_path / "x" / "result.json").read_text())
    assert (round(document["epsilon"], 3), document["num_clients"]) == (2.0, 20)
    assert {path.name for path in (tmp_path / "x").iterdir()} >= {"result.json", "model.npz"}


@pytest.mark.long
def test_plain_flwr_run_does_what_the_overrides_say(tmp_path):
    """With Flower's own daemon and its two virtual nodes; stopped by its marker afterwards."""
    environment = launch.launch_environment(tmp_path / "home", {})
    marker = environment[launch.MARKER]
    environment |= {
        f"FLWR_LOCAL_{name}_PORT": str(launch.free_port()) for name in ("SUPERLINK_HTTP_API", "CONTROL_API")
    }
    # Sockets in Ray's folder want a short path; the daemon is Flower's own and knows nothing of ours.
    environment["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="murmurfl-", dir="/tmp")
    command = shlex.split(FLWR_RUN)
    assert command[0] == ".venv/bin/flwr"
    assert command[-2] == "-c"
    # The README's command, its results written where this test may.
    command = [str(BIN / "flwr"), *command[1:-1], f'{command[-1]} out-dir="{tmp_path}" run-name="x"']
    try:
        project = (ROOT / "pyproject.toml").read_bytes()
        log = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=True
        )
        assert (ROOT / "pyproject.toml").read_bytes() == project
        result = tmp_path / "x" / "result.json"
        assert result.exists(), log.stdout[-3000:]
        document = json.loads(result.read_text())
    finally:
        for process in Processes(f"{launch.MARKER}={marker}").living(set()):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert (round(document["epsilon"], 3), document["num_clients"]) == (2.0, 20)
    config = document["config"]
    assert (config["strategy"], config["trust"], config["features"]) == ("full-batch", SECURE, "soft-gradients")
    assert "epsilon 2 or " in log.stdout


@pytest.mark.long
def test_run_and_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (RUN, REPORT):
        command = shlex.split(line)
        assert command[0].removeprefix(".venv/bin/") == "murmurfl"
        assert CliRunner().invoke(cli, command[1:]).exit_code == 0
    assert "<svg" in (tmp_path / "runs" / "first" / "report" / "index.html").read_text()


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")
def test_reproduce_a_cell(tmp_path):
    command = shlex.split(REPRODUCE)
    assert command[0].removeprefix(".venv/bin/") == "murmurfl"
    output = subprocess.run(
        [BIN / "murmurfl", *command[1:], "--out", tmp_path, "--json"],
        cwd=ROOT, check=True, timeout=250, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (cell,) = json.loads(output)["cells"]
    assert cell["algorithms"]["mu2"]["accuracy"]["mean"] > 0.82
    assert cell["algorithms"]["mu2"]["mu"]["mean"] == pytest.approx(1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "said"),
    [(PLAN, "Take full-batch: 48 rounds"), (AUDIT, "The claim stands")],
)
def test_plan_and_audit(line, said):
    command = shlex.split(line)
    assert command[0].removeprefix(".venv/bin/") == "murmurfl"
    output = subprocess.run(
        [BIN / "murmurfl", *command[1:]], check=True, timeout=250, capture_output=True, text=True
    ).stdout
    assert said in output
