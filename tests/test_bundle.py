"""The bundle that Flower sends to whoever takes part in a run: what the two apps import, all of it and nothing else."""

import os
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from murmurfl.app import registry

from tests.harness import packages
from tests.harness.imports import Imports

APPS = ("app/server_app.py", "app/client_app.py")
MOST_BYTES = 880_000
"""Of its modules. Every byte goes to every node that takes part, and every module is one to read for whoever has to
trust it. What the methods, tasks and models of a run need takes 864 kB; this is that, and little more."""


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
