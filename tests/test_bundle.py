"""The bundle that Flower sends to whoever takes part in a run: the four packages, which run alone."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from flwr.common.constant import FAB_MAX_SIZE
from murmurfl.privacy import SQLiteLedger, protocol

from tests.harness import packages
from tests.harness.imports import FOLDERS

BESIDE = {"LICENSE", "README.md", "murmurfl.py", "pyproject.toml", ".info/CONTENT"}
"""What of the bundle is no module of the four packages."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return packages.bundle(tmp_path_factory.mktemp("bundle"))


def test_the_bundle_is_the_four_packages_and_flower_takes_it(built):
    files = (path for folder in FOLDERS for path in (packages.ROOT / folder).rglob("*.py"))
    modules = {path.relative_to(packages.ROOT).as_posix() for path in files}
    assert set(zipfile.ZipFile(built).namelist()) == modules | BESIDE
    assert built.stat().st_size <= FAB_MAX_SIZE


def test_the_bundle_alone_imports_every_module_and_runs_the_default_run(built, tmp_path):
    """In an empty folder, beside the dependencies and no installation."""
    packages.unpacked(built, tmp_path)
    code = """
import importlib
from pathlib import Path
import murmurfl
for path in Path.cwd().glob("*/**/[!_]*.py"):
    importlib.import_module(".".join(("murmurfl", *path.relative_to(Path.cwd()).with_suffix("").parts)))
from murmurfl.app.settings.default_run import started_with
result = murmurfl.app.simulate(started_with({"num-rounds": 2}), engine="inprocess")
print(*murmurfl.__path__, len(result.progress))
"""
    # -S: an editable installation of the checkout would stand in for whatever is missing.
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().split() == [str(tmp_path), "2"]


ASK = """
import sys
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.app import client_app
bundled = client_app.__file__
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
asked = RecordDict({"config": ConfigRecord({"ask": "hello", "protocol-version": 1})})
message = Message(asked, dst_node_id=1, message_type="query")
message.metadata.__dict__["_message_id"] = "1"
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={"task": "server:chosen"})
reply = client_app.app(message, context)
print(bundled)
print(sys.modules["murmurfl.app.client_app"].__file__)
print(reply.error.code if reply.has_error() else reply.content["config"]["machines"])
"""


def ask_real_machine(bundle, tmp_path, *options, also=None):
    """What a plain `flower-supernode` would do with the bundle, on a machine with an operator's file."""
    (tmp_path / "node.toml").write_text(
        'machine = "m1"\nledger = "ledger.sqlite"\ntask = "digits"\nnum-partitions = 4\npartition-id = 1\n'
        "clip-norm = 1.0\nbatch-size = 4\nmu = 1.0\n"
    )
    (tmp_path / "node.toml").chmod(0o600)
    if not (tmp_path / "ledger.sqlite").exists():
        SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=2.0, delta=1e-5)
    more = [also] if also else []
    path = os.pathsep.join(map(str, [bundle, *more, *([sysconfig.get_path("purelib")] if options else [])]))
    environment = {**os.environ, "PYTHONPATH": path, "MURMURFL_NODE_CONFIG": str(tmp_path / "node.toml")}
    ran = subprocess.run(
        [sys.executable, *options, "-c", ASK], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_on_a_real_machine_a_bundle_leaves_the_answer_to_the_installed_murmurfl(built, tmp_path):
    """And where none is installed it refuses."""
    bundle = packages.unpacked(built, tmp_path / "bundle")
    began, ended, machine = ask_real_machine(bundle, tmp_path)
    assert Path(began).is_relative_to(bundle)
    assert Path(ended) == packages.ROOT / "app" / "client_app.py"  # that of this environment: the checkout's
    assert machine == "m1"
    # -S: no editable installation of the checkout.
    began, ended, code = ask_real_machine(bundle, tmp_path, "-S")
    assert began == ended
    assert int(code) == protocol.NOT_CONFIGURED


def test_a_broken_installation_says_nothing_to_the_server_and_mixes_with_nothing(built, tmp_path):
    """Its error would be Flower's reply if it got out of the mod; half of it beside the bundle would be worse."""
    bundle, broken = packages.unpacked(built, tmp_path / "bundle"), tmp_path / "broken" / "murmurfl"
    for name, text in {
        "__init__": "",
        "app/__init__": "",
        "app/client_app": "from . import half\n",
        "app/half": "1 / 0",
    }.items():
        (broken / name).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (broken / name).with_suffix(".py").write_text(text)
    began, ended, code = ask_real_machine(bundle, tmp_path, "-S", also=broken.parent)
    assert began == ended
    assert int(code) == protocol.NOT_CONFIGURED
