"""The bundle that Flower sends to whoever takes part in a run: what the two apps import, all of it and nothing else."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from murmurfl.app import registry
from murmurfl.privacy import SQLiteLedger, protocol

from tests.harness import packages
from tests.harness.imports import Imports

APPS = ("app/server_app.py", "app/client_app.py")
MOST_BYTES = 10 << 20
"""Of its modules: what Flower takes."""


@pytest.fixture(scope="module")
def imports():
    return Imports(packages.ROOT)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return packages.bundle(tmp_path_factory.mktemp("bundle"))


def found_late(imports) -> list[str]:
    """What the apps import by a name: the registries of what a run configuration names."""
    rooms = [("app", *room.split(".")) for room, _ in registry._REGISTRIES.values()]
    return [imports.file_of(room) for room in rooms]


def test_the_bundle_is_the_import_closure_of_the_two_apps(imports, built):
    names = set(zipfile.ZipFile(built).namelist())
    modules = {name for name in names if name.endswith(".py")} - packages.BESIDE
    assert names - modules == packages.BESIDE
    needed = imports.closure([*APPS, *found_late(imports)])
    assert needed - modules == set(), "the apps import this: add it to fab-include in pyproject.toml"
    assert modules - needed == set(), "neither app imports this: take it out of fab-include in pyproject.toml"


def test_the_bundle_is_small(built):
    sizes = {entry.filename: entry.file_size for entry in zipfile.ZipFile(built).infolist()}
    modules = sum(size for name, size in sizes.items() if name not in packages.BESIDE)
    assert modules <= MOST_BYTES


def test_every_module_of_the_bundle_imports_in_an_empty_folder(built, tmp_path):
    """Beside the dependencies, with no checkout of this environment: nothing of what stayed at home is missed."""
    packages.unpacked(built, tmp_path)
    code = """
import importlib, json, sys
from pathlib import Path
import murmurfl
for path in sorted(Path.cwd().rglob("*.py")):
    parts = path.relative_to(Path.cwd()).with_suffix("").parts
    if parts != ("murmurfl",):
        importlib.import_module(".".join(("murmurfl", *(part for part in parts if part != "__init__"))))
from murmurfl.app import registry
for key in registry._REGISTRIES:
    assert len(registry.registry(key)) > 1
print(*murmurfl.__path__)
"""
    # -S: an editable installation of the checkout would stand in for whatever is missing.
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().split() == [str(tmp_path)]


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
    """And where none is installed it refuses: the bundle has no code for a ledger or an operator's file."""
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


CHECKED = {
    "app/__init__.py": "",
    "app/server_app.py": "from .registry import registry\n",
    "app/client_app.py": "def late():\n    from ..clients import Late, Soon\n",
    "app/registry.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .at_home import Thing\n",
    "app/at_home.py": "from .server_app import app\n",
    "clients/__init__.py": "from .soon import Soon\n_LATE = {'Late': 'late', 'AtHome': 'at_home'}\n",
    "clients/soon.py": "import numpy\n",
    "clients/late.py": "from . import soon\n",
    "clients/at_home.py": "",
}


def test_the_closure_has_what_is_imported_late_or_in_a_function_and_not_what_only_a_type_checker_reads(tmp_path):
    for name, text in CHECKED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    closure = Imports(tmp_path).closure(APPS)
    assert closure == CHECKED.keys() - {"app/at_home.py", "clients/at_home.py"}
