"""The wheel, installed by itself, is the whole library, and so is the bundle that Flower sends to whoever takes part;
what is imported is declared; Flower's version is checked; the public names are listed.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from flwr.common.constant import FAB_MAX_SIZE
from murmurfl.app.data.features.learnt import SHA256
from murmurfl.privacy import MurmurflError, SQLiteLedger, UnsupportedFlowerError, protocol
from murmurfl.privacy import flower_version as flower

from tests.harness import packages
from tests.harness.errors import raises
from tests.harness.imports import FOLDERS, Imports

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return packages.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
def test_the_wheel_holds_every_module_and_its_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS:
        ours = {f"murmurfl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
        ours = {name.replace("murmurfl/app/wheel/", "murmurfl/") for name in ours}
        assert not ours - names
        assert f"murmurfl/{folder}/py.typed" in names
    assert "murmurfl/py.typed" in names
    assert {f"murmurfl/app/data/features/weights/{name}" for name in SHA256} <= names
    assert "murmurfl/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"murmurfl", f"murmurfl-{PROJECT['version']}.dist-info"}


@pytest.mark.long
def test_building_the_wheel_warns_of_nothing(wheel):
    """Pip shows a build's warnings to whoever installs a checkout."""
    said = wheel.with_name("build.log").read_text()
    assert "running build_py" in said
    assert not re.findall(r"^.*(?:Warning|Deprecat|ignored).*$", said, re.MULTILINE)


@pytest.mark.long
def test_the_wheel_works_where_there_is_no_checkout(wheel, tmp_path):
    """Unpacked, as pip would, beside the dependencies; no .pth file of this environment is read."""
    packages.unpacked(wheel, tmp_path)
    code = """
import json, murmurfl
from murmurfl import app, clients, privacy, strategies
from murmurfl.app.commands.main import cli
print(json.dumps([path for module in (murmurfl, app, clients, privacy, strategies) for path in module.__path__]))
"""
    code += f"assert murmurfl.__version__ == {PROJECT['version']!r}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])}
    output = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert all(Path(path).is_relative_to(tmp_path) for path in json.loads(output.splitlines()[-1]))


USED = """
import murmurfl

rows = [{"age": 30.0, "ill": "no"}, {"age": 70.0, "ill": "yes"}]
result = murmurfl.fit(rows, label="ill", epsilon=4, num_rounds=3)
run = murmurfl.simulate(epsilon=2.0, task=(1, 2), mechanism="banded", bands=8)
model = murmurfl.load_model("model")
reveal_type(murmurfl.__version__)
reveal_type(murmurfl.fit)
reveal_type(murmurfl.simulate)
reveal_type(murmurfl.load_model)
reveal_type(result)
reveal_type(result.accuracy)
reveal_type(result.epsilon)
reveal_type(result.guarantee)
reveal_type(run.per_round)
reveal_type(model)
"""
WRONG = ("murmurfl.simulate(epsilonn=2.0)", "murmurfl.simulate(num_rounds='3')", "murmurfl.fit(3)")


@pytest.mark.long
def test_type_checker_knows_what_the_root_of_the_wheel_offers(wheel, tmp_path):
    packages.unpacked(wheel, tmp_path)
    (tmp_path / "used.py").write_text(USED + "\n".join(WRONG))
    checker = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "used.py"]
    told = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    found = json.loads(told)["generalDiagnostics"]
    revealed = [one["message"] for one in found if one["message"].startswith("Type of ")]
    assert len(revealed) == USED.count("reveal_type")
    assert not [one for one in revealed if re.search(r"\b(?:Any|Unknown)\b", one)]
    lines = {one["range"]["start"]["line"] for one in found if one["severity"] == "error"}
    assert lines == {USED.count("\n") + number for number in range(len(WRONG))}


def test_the_versions_of_flower_are_those_of_the_project():
    (requirement,) = [line for line in PROJECT["dependencies"] if line.startswith("flwr")]
    assert requirement == f"flwr{flower.FLOWER_VERSIONS}"
    assert PROJECT["optional-dependencies"]["simulation"] == [f"flwr[simulation]{flower.FLOWER_VERSIONS}"]
    flower.check_flower_version()
    ends = re.search(
        r"^FLOWERS \?= (\d+)\.(\d+)\.\d+ (\d+)\.(\d+)\.\d+$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert ends is not None
    major, minor, newest_major, newest_minor = map(int, ends.groups())
    assert f">={major}.{minor},<{newest_major}.{newest_minor + 1}" == flower.FLOWER_VERSIONS


@pytest.mark.parametrize("found", ["1.40.3", "1.43.0", "2.0.0", "1.43.0.dev20260101", "0.9", "nonsense"])
def test_another_version_of_flower_is_named(monkeypatch, found):
    monkeypatch.setattr(flower, "version", lambda name: found)
    with raises(
        UnsupportedFlowerError, "unsupported", match=re.escape(f"Expected Flower >=1.41,<1.43, got {found}")
    ) as error:
        flower.check_flower_version()
    assert isinstance(error.value, MurmurflError)
    assert isinstance(error.value, ImportError)


def test_without_flower_that_is_said(monkeypatch):
    def missing(name):
        raise flower.PackageNotFoundError(name)

    monkeypatch.setattr(flower, "version", missing)
    with raises(UnsupportedFlowerError, "unsupported", match="got none"):
        flower.check_flower_version()


def test_a_listing_that_failed_once_is_made_again(monkeypatch):
    """Python takes a folder that it cannot list, for lack of open files say, for an empty one, and remembers it."""
    answers = [flower.PackageNotFoundError("flwr")]

    def listed(name):
        if answers:
            raise answers.pop()
        return "1.42.0"

    monkeypatch.setattr(flower, "version", listed)
    flower.check_flower_version()
    assert answers == []


def test_importing_what_needs_flower_checks_it_first():
    """Before anything of Flower's is imported."""
    code = """
import importlib, importlib.metadata as metadata, sys
real = metadata.version
metadata.version = lambda name: "1.40.0" if name == "flwr" else real(name)
for package in ("clients", "strategies"):
    try:
        importlib.import_module(f"murmurfl.{package}")
    except ImportError as error:
        assert "flwr" not in sys.modules
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert output.count("Expected Flower >=1.41,<1.43, got 1.40.0") == 2


@pytest.mark.parametrize(
    "package", ["murmurfl.app", "murmurfl.testing", "murmurfl.clients", "murmurfl.strategies", "murmurfl.privacy"]
)
def test_the_public_names_are_listed(package):
    """docs/public.json, and nothing else, says what is public and since when; docs/api.md shows it."""
    listed = json.loads((ROOT / "docs" / "public.json").read_text())[package]
    assert f"<!-- generated: {package} -->" in (ROOT / "docs" / "api.md").read_text()
    assert sorted(listed) == sorted(importlib.import_module(package).__all__)
    major, minor = map(int, PROJECT["version"].split(".")[:2])
    # What is not released yet bears the version it will come with.
    assert all(tuple(map(int, since.split("."))) <= (major, minor + 1) for since in listed.values())
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in listed)


def test_root_of_a_wheel_exports_what_that_of_a_checkout_does():
    roots = [ast.parse((ROOT / name).read_text()) for name in ("murmurfl.py", "app/wheel/__init__.py")]
    checkout, wheel = ([ast.unparse(part) for part in root.body if isinstance(part, ast.If)] for root in roots)
    assert checkout == wheel


LAZY = (
    "murmurfl",
    "murmurfl.app",
    "murmurfl.app.engines",
    "murmurfl.clients",
    "murmurfl.privacy",
    "murmurfl.privacy.audit",
    "murmurfl.strategies",
    "murmurfl.testing",
)


@pytest.mark.parametrize("package", LAZY)
def test_names_for_type_checkers_are_the_exports_and_can_be_imported(package):
    module = importlib.import_module(package)
    source = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (block,) = [part for part in source.body if isinstance(part, ast.If)]
    assert sorted(alias.asname for line in block.body for alias in line.names) == module.__all__
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "most", "without"),
    [
        ("import murmurfl.privacy.mechanisms", 16, {"flwr", "sqlite3", "sklearn", "pydantic"}),
        ("from murmurfl.privacy import gdp_epsilon", 6, {"flwr", "sqlite3", "sklearn", "pydantic"}),
        ("import murmurfl.app.nodes.supernode", 175, {"torch", "ray", "matplotlib"}),
    ],
)
def test_an_import_loads_little_else(statement, most, without):
    code = f"import sys; {statement}; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = said.split()
    assert not without & {name.partition(".")[0] for name in loaded}
    assert len([name for name in loaded if name.startswith("murmurfl.")]) <= most


def test_the_version_is_the_projects():
    import murmurfl
    from murmurfl import app

    assert murmurfl.__version__ == app.__version__ == PROJECT["version"]
    with pytest.raises(AttributeError, match="nothing"):
        murmurfl.nothing  # noqa: B018


def distribution(requirement):
    """Its name, without extras, limits and case; Ray's for the extra of Flower's that brings it."""
    if requirement.startswith("flwr[simulation]"):
        return "ray"
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


BASE = {distribution(line) for line in PROJECT["dependencies"]}
QUIETLY_USED = "compiled"  # what nobody is told to install: without it the same is done more slowly
EXTRAS = {
    extra: {distribution(line) for line in PROJECT["optional-dependencies"][extra]}
    for extra in (
        "simulation",
        "reports",
        "torch",
        "images",
        "tables",
        "skops",
        "partitions",
        "jax",
        "keras",
        QUIETLY_USED,
    )
}


distributions = cache(metadata.packages_distributions)  # reads all that is installed: once is enough


def brought_by(package):
    """The distribution of an import name, in the environment of these tests; of its own name if it is not there."""
    (found,) = {name.lower().replace("_", "-") for name in distributions().get(package, [package])}
    return found


KERNELS = "app/engines/kernels.py"


@pytest.mark.long
def test_what_is_imported_is_declared():
    """In the base, or, within a function, in one of its extras: a base without extras imports every module."""
    imports = Imports(ROOT)
    needed = set()
    for name in imports.files:
        at_the_top = {brought_by(package) for package in imports.at_the_top(name) - sys.stdlib_module_names}
        if str(name) == KERNELS:  # numba finds what loops use at the top; who imports the file does not
            at_the_top -= EXTRAS["compiled"]
        assert at_the_top <= BASE, f"{name} imports {at_the_top - BASE} at its top, which the base does not bring"
        anywhere = {brought_by(package) for package in imports.outside[name] - sys.stdlib_module_names}
        undeclared = anywhere - BASE.union(*EXTRAS.values())
        assert not undeclared, f"{name} imports {undeclared}, which pyproject.toml does not declare"
        needed |= anywhere
    assert needed | {"ray"} == BASE.union(*EXTRAS.values()), "what nobody imports need not be declared"


def test_what_says_what_to_install_names_an_extra_that_brings_it():
    said = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        for names, extra in re.findall(r'check_installed\(("\w+"|package), "(\w+)"', text):
            asked = re.search(r"for package in (\(.*\)):", text) if names == "package" else None
            for package in ast.literal_eval(asked[1]) if asked else [names.strip('"')]:
                said.setdefault(extra, set()).add(brought_by(package))
    assert said == {extra: brought for extra, brought in EXTRAS.items() if extra != QUIETLY_USED}


def test_whoever_develops_has_what_all_tests_need():
    (everything,) = [line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("murmurfl[")]
    assert everything == f"murmurfl[{','.join(EXTRAS)}]"


def test_the_import_root_makes_a_checkout_a_package():
    import murmurfl

    assert str(ROOT) in list(murmurfl.__path__)


def test_the_packages_of_the_wheel_are_the_folders_of_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaged = set(project["tool"]["setuptools"]["packages"])
    files = (path for folder in FOLDERS for kind in ("__init__.py", "*.npz") for path in (ROOT / folder).rglob(kind))
    folders = {f"murmurfl.{'.'.join(path.parent.relative_to(ROOT).parts)}" for path in files}
    assert packaged == {"murmurfl" if name == "murmurfl.app.wheel" else name for name in folders}


BESIDE = {"LICENSE", "README.md", "murmurfl.py", "pyproject.toml", ".info/CONTENT"}
"""What of the bundle is no module of the four packages."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return packages.bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def bundle(built, tmp_path_factory):
    """The bundle unpacked: the first process that imports it compiles it for the others."""
    return packages.unpacked(built, tmp_path_factory.mktemp("unpacked"))


@pytest.mark.long
def test_the_bundle_is_the_four_packages_and_flower_takes_it(built):
    files = (path for folder in FOLDERS for path in (packages.ROOT / folder).rglob("*.py"))
    modules = {path.relative_to(packages.ROOT).as_posix() for path in files}
    assert set(zipfile.ZipFile(built).namelist()) == modules | BESIDE
    assert built.stat().st_size <= FAB_MAX_SIZE


@pytest.mark.long
def test_the_bundle_alone_imports_every_module_and_runs_the_default_run(bundle):
    """Beside the dependencies and no installation."""
    code = """
import importlib
from pathlib import Path
import murmurfl
for path in Path.cwd().glob("*/**/[!_]*.py"):
    parts = path.relative_to(Path.cwd()).with_suffix("").parts
    importlib.import_module(".".join(("murmurfl", *(parts[2:] if parts[:2] == ("app", "wheel") else parts))))
result = murmurfl.app.simulate(num_rounds=2, engine="inprocess")
print(*murmurfl.__path__, len(result.progress))
"""
    # -S: an editable installation of the checkout would stand in for whatever is missing.
    path = os.pathsep.join([str(bundle), sysconfig.get_path("purelib")])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=bundle, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().split() == [str(bundle), str(bundle / "app" / "wheel"), "2"]


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
print(reply.error.code if reply.has_error() else reply.content["config"]["clients"])
"""


def ask_real_client(bundle, tmp_path, *options, also=None):
    """What a plain `flower-supernode` would do with the bundle, on a client with an operator's file."""
    (tmp_path / "node.toml").write_text(
        'client = "m1"\nledger = "ledger.sqlite"\ntask = "digits"\nnum-partitions = 4\npartition-id = 1\n'
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


@pytest.mark.long
def test_on_a_real_client_a_bundle_leaves_the_answer_to_the_installed_murmurfl(bundle, tmp_path):
    """And where none is installed it refuses."""
    began, ended, client = ask_real_client(bundle, tmp_path)
    assert Path(began).is_relative_to(bundle)
    assert Path(ended) == packages.ROOT / "app" / "client_app.py"  # that of this environment: the checkout's
    assert client == "m1"
    # -S: no editable installation of the checkout.
    began, ended, code = ask_real_client(bundle, tmp_path, "-S")
    assert began == ended
    assert int(code) == protocol.NOT_CONFIGURED


@pytest.mark.long
def test_a_broken_installation_says_nothing_to_the_server_and_mixes_with_nothing(bundle, tmp_path):
    """Its error would be Flower's reply if it got out of the mod; half of it beside the bundle would be worse."""
    broken = tmp_path / "broken" / "murmurfl"
    for name, text in {
        "__init__": "",
        "app/__init__": "",
        "app/client_app": "from . import half\n",
        "app/half": "1 / 0",
    }.items():
        (broken / name).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (broken / name).with_suffix(".py").write_text(text)
    began, ended, code = ask_real_client(bundle, tmp_path, "-S", also=broken.parent)
    assert began == ended
    assert int(code) == protocol.NOT_CONFIGURED
