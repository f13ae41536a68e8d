"""What is made of the checkout: the bundle that `flwr run` would send, and the wheel that pip installs.

Tests of examples find here their folder, and the last line of their logs.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.imports import FOLDERS

ROOT = Path(__file__).parent.parent.parent


def bundle(folder: Path, flwr: Path | None = None) -> Path:
    """The bundle, in a folder; nothing is written into the checkout."""
    subprocess.run(
        [flwr or Path(sys.executable).parent / "flwr", "build", "--app", str(ROOT)],
        cwd=folder,
        env={**os.environ, "FLWR_HOME": str(folder / "home")},
        check=True,
        capture_output=True,
        timeout=120,
    )
    (path,) = folder.glob("*.fab")
    return path


def unpacked(archive: Path, folder: Path) -> Path:
    """A bundle or a wheel alone in a folder."""
    zipfile.ZipFile(archive).extractall(folder)
    return folder


def checkout(folder: Path) -> Path:
    """What is shipped of the checkout, in a new folder: `flwr run` looks at every file beside it, for seconds."""
    folder.mkdir(parents=True)
    for name in (*FOLDERS, "murmurfl.py", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder / name)
    return folder


def wheel(folder: Path) -> Path:
    """The wheel, by the project's own build backend, from a copy in a folder; what that says is in ``build.log``."""
    source = checkout(folder / "source")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "always", "-c", build, str(folder)]
    with (folder / "build.log").open("w") as log:
        subprocess.run(command, cwd=source, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def accuracy(lines: Sequence[str]) -> float:
    """The test accuracy that a run's log ends with."""
    (line,) = [line for line in lines if "Test accuracy" in line]
    return float(line.split()[-1])
