"""A clean virtual environment with the base dependencies only: its size, and what runs in it without the extras; and
with those that runs on Ray need.

Nothing of the environment of these tests is seen in it. It is made by pip from the wheel, so it needs pip's index.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness import packages

pytestmark = pytest.mark.base

ROOT = packages.ROOT
MOST_BYTES = 450e6  # what Python compiles among them
INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # which every environment may begin with
OPTIONAL = ("torch", "torchvision", "flwr_datasets", "datasets", "nvidia", "triton", "ray", "matplotlib", "jinja2")
NODE = """
client = "clinic"
ledger = "ledger.sqlite"
clip-norm = 2.0
batch-size = 32
mu = 4.0
task = "digits"
num-partitions = 4
partition-id = 1
"""

COHORT = ("run", "--engine", "cohort", "--name", "cohort", "--set", "num-rounds=3")

ALONE = """
import sys
from pathlib import Path
from murmurfl.app.settings.layers import with_defaults
from murmurfl.app.engines.superlink import run_flower_app
overrides = {**with_defaults({"num-rounds": 3}), "out-dir": sys.argv[2], "run-name": "alone"}
run_flower_app(Path(sys.argv[1]), run_config=overrides, num_supernodes=10, timeout_s=300)
"""


class Environment:
    """Its commands, run in a folder where no checkout is found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run([sys.executable, "-m", "venv", str(folder)], folder.parent)

    def __call__(self, command: str, *arguments: object, cwd: Path, **variables: str) -> str:
        return self._run([str(self.folder / "bin" / command), *map(str, arguments)], cwd, **variables)

    @property
    def site(self) -> Path:
        """Where its packages are."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    @property
    def size(self) -> int:
        """Bytes of its packages, what Python compiled among them, without those that install others."""
        counted = [one for one in self.site.iterdir() if one.name.split("-")[0] not in INSTALLERS]
        return sum(path.lstat().st_size for one in counted for path in [one, *one.rglob("*")])

    def _run(self, words: list[str], cwd: Path, **variables: str) -> str:
        unset = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MURMURFL_DATA")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        ran = subprocess.run(words, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True)
        assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """With the wheel, and what its own metadata asks for."""
    folder = tmp_path_factory.mktemp("base")
    environment = Environment(folder / "environment")
    environment("pip", "install", "--quiet", "--disable-pip-version-check", packages.wheel(folder), cwd=folder)
    yield environment
    shutil.rmtree(environment.folder)


def test_it_is_small_and_has_no_torch(base, capsys):
    with capsys.disabled():
        sys.stdout.write(f"\nThe base takes {base.size / 1e6:.0f} MB. ")
    assert base.size < MOST_BYTES
    assert (base.site / "murmurfl").is_dir()
    assert not [name for name in OPTIONAL if (base.site / name).exists()]


def model(folder):
    """The model a run left, to the last bit."""
    with np.load(folder / "model.npz") as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}


def test_plan_and_the_cohort_engine(base, tmp_path):
    assert "mu" in base("murmurfl", "plan", "--set", "num-rounds=3", cwd=tmp_path)
    base("murmurfl", *COHORT, cwd=tmp_path)
    assert (tmp_path / "runs" / "cohort" / "result.json").exists()


FIT = """
import murmurfl
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer()
rows = [{**dict(zip(map(str, data.feature_names), map(float, row))), "target": str(label)}
        for row, label in zip(data.data, data.target)]
result = murmurfl.fit(rows, label="target", clients=4, epsilon=4)
assert len(result.predict(rows[:3])) == 3
"""


def test_fit_and_predict(base, tmp_path):
    base("python", "-c", FIT, cwd=tmp_path)


def test_a_nodes_file_is_checked_with_its_ledger(base, tmp_path):
    (tmp_path / "node.toml").write_text(NODE)
    base("murmurfl", "ledger", "create", "ledger.sqlite", "--mu", 4, "--delta", 1e-5, cwd=tmp_path)
    assert "clinic" in base("murmurfl", "node", "node.toml", "--check", cwd=tmp_path)


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("torch", (*COHORT, "--set", "model=mlp")),
        ("simulation", ("run", "--engine", "ray", "--set", "num-rounds=3")),
        ("reports", ("report", "runs/cohort", "--out", "page")),
    ],
)
def test_what_needs_an_extra_names_it(base, tmp_path, extra, command):
    if extra == "reports":
        base("murmurfl", *COHORT, cwd=tmp_path)
    with pytest.raises(AssertionError, match=rf"pip install 'murmurfl\[{extra}\]'"):
        base("murmurfl", *command, cwd=tmp_path)


@pytest.fixture(scope="module")
def with_ray(base):
    """The same environment with the extras of runs on Ray; its tests come last."""
    base("pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[simulation,reports]", cwd=base.folder)
    return base


def test_the_bundle_alone_in_an_empty_folder_runs_on_ray(with_ray, tmp_path):
    """Flower puts it before the installed murmurfl."""
    alone = packages.unpacked(packages.bundle(tmp_path, with_ray.folder / "bin" / "flwr"), tmp_path / "alone")
    with_ray("python", "-c", ALONE, alone, tmp_path / "runs", cwd=tmp_path)
    result = json.loads((tmp_path / "runs" / "alone" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"]) == (3, 150)
    (tmp_path / "here").mkdir()
    with_ray("murmurfl", *COHORT, cwd=tmp_path / "here")
    assert model(tmp_path / "runs" / "alone") == model(tmp_path / "here" / "runs" / "cohort")


def test_the_default_app_runs_from_a_checkout_by_plain_flwr_run(with_ray, tmp_path):
    with_ray(
        "murmurfl",
        "run",
        "--engine",
        "ray",
        "--set",
        "num-rounds=3",
        "--name",
        "default",
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )
    result = json.loads((tmp_path / "runs" / "default" / "result.json").read_text())
    assert result["engine"] == "ray"
    assert (result["rounds"], result["num_clients"]) == (3, 50)


def test_a_report(with_ray, tmp_path):
    with_ray("murmurfl", *COHORT, cwd=tmp_path)
    assert with_ray("murmurfl", "report", "runs/cohort", "--out", "page", cwd=tmp_path)
    assert "<svg" in (tmp_path / "page" / "index.html").read_text()
