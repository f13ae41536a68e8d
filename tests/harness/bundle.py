"""The bundle Flower makes of the checkout, as `flwr run` would send it, and what murmurfl's two apps may ask of it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BESIDE = {"LICENSE", "README.md", "murmurfl.py", "pyproject.toml", ".info/CONTENT"}
"""What is no module of the four packages."""


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
