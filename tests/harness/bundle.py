"""The bundle Flower makes of the checkout, as `flwr run` would send it, and what murmurfl's two apps may ask of it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from murmurfl.app import registry

ROOT = Path(__file__).parent.parent.parent
BESIDE = {"LICENSE", "README.md", "murmurfl.py", "pyproject.toml", ".info/CONTENT"}
"""What is no module of the four packages."""

ENTRIES = ("app/server_app.py", "app/client_app.py")


def built(folder: Path, flwr: Path | None = None) -> Path:
    """The bundle, in a folder; nothing is written into the checkout."""
    subprocess.run(
        [flwr or Path(sys.executable).parent / "flwr", "build", "--app", str(ROOT)],
        cwd=folder,
        env={**os.environ, "FLWR_HOME": str(folder / "home")},
        check=True,
        capture_output=True,
        timeout=120,
    )
    (bundle,) = folder.glob("*.fab")
    return bundle


def unpacked(bundle: Path, folder: Path) -> Path:
    """The bundle alone in a folder."""
    zipfile.ZipFile(bundle).extractall(folder)
    return folder


def found_late(imports) -> list[str]:
    """What the apps import by a name: the registries of what a run configuration names."""
    rooms = [("app", *room.split(".")) for room, _ in registry._REGISTRIES.values()]
    return [imports.file_of(room) for room in rooms]
