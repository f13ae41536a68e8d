"""Whether every base dependency has a wheel for aarch64: ``python -m benchmarks.wheels`` (``make wheels``).

pip resolves what the project's base asks for, as it would on an edge device with each Python that is declared, and may
take wheels only. Nothing is installed: of most packages their metadata are all that is read.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
ARCHITECTURE = "aarch64"
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28  # of 2.17 and 2.28: CentOS 7, and Debian 10, Ubuntu 20.04, RHEL 8
TIMEOUT_S = 600.0

_AS_THERE = """
import sys
from pip._vendor.packaging import markers
here = markers.default_environment
there = dict(pair.split("=", 1) for pair in sys.argv.pop(1).split(","))
markers.default_environment = lambda: {**here(), **there}
"""
"""pip takes wheels for another computer, but what a dependency's condition is true of it asks its own, without this."""

_PIP = f"{_AS_THERE}from pip._internal.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


@dataclass(frozen=True)
class Wheel:
    """A wheel that pip would install.

    Parameters
    ----------
    name, version, file
        Of the package, and of its wheel.
    """

    name: str
    version: str
    file: str

    @property
    def is_compiled(self) -> bool:
        """Whether it is of one kind of computer."""
        return not self.file.endswith("-any.whl")

    @property
    def glibc(self) -> int:
        """The minor version of glibc that it needs; 0 where it is compiled for none."""
        minors = {int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", self.file)}
        minors |= {OLDEST_GLIBC} if "manylinux2014" in self.file else set()
        return min(minors, default=0)


class NoWheelError(Exception):
    """There is none of some package."""


def base_dependencies() -> list[str]:
    """Return what the project's base asks for."""
    return tomllib.loads(PROJECT.read_text())["project"]["dependencies"]


def pythons() -> list[str]:
    """Return the versions of Python that the project declares."""
    classifiers = "\n".join(tomllib.loads(PROJECT.read_text())["project"]["classifiers"])
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, flags=re.MULTILINE)


def there(python: str) -> str:
    """Return what conditions of dependencies are evaluated with, on that computer."""
    return f"python_version={python},python_full_version={python}.0,platform_machine={ARCHITECTURE}"


def resolved(requirements: Sequence[str], python: str) -> list[Wheel]:
    """Return the wheels that pip would install for one Python on aarch64, transitively.

    Raises
    ------
    NoWheelError
        If there is no set of wheels; the text is pip's.
    """
    platforms = [f"manylinux_2_{minor}_{ARCHITECTURE}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    options = [word for one in (*platforms, f"manylinux2014_{ARCHITECTURE}") for word in ("--platform", one)]
    options += ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    options += ["--python-version", python, "--implementation", "cp", "--target", "nowhere", "--report", "-"]
    command = [sys.executable, "-c", _PIP, there(python), "install", *options, *requirements]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise NoWheelError("\n".join(said) or ended.stderr)
    return wheels(json.loads(ended.stdout))


def wheels(report: Mapping[str, Any]) -> list[Wheel]:
    """Return the wheels of pip's report.

    Raises
    ------
    NoWheelError
        If something in it is no wheel, or one for another computer.
    """
    found = []
    for one in report["install"]:
        told, file = one["metadata"], one["download_info"]["url"].rsplit("/", 1)[-1]
        if not file.endswith(("-any.whl", f"_{ARCHITECTURE}.whl")):
            raise NoWheelError(f"Expected a wheel for {ARCHITECTURE} of {told['name']}, got {file}.")
        found.append(Wheel(told["name"], told["version"], file))
    return sorted(found, key=lambda wheel: wheel.name.lower())


def row(python: str, found: Sequence[Wheel]) -> dict[str, Any]:
    """Return a line of the table."""
    compiled = [wheel for wheel in found if wheel.is_compiled]
    return {
        "Python": python,
        "packages": len(found),
        f"compiled for {ARCHITECTURE}": len(compiled),
        "for any computer": len(found) - len(compiled),
        "needs glibc": f"2.{max((wheel.glibc for wheel in compiled), default=OLDEST_GLIBC)}",
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines as a table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in one.values()] for one in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Ask the registry, print, and end with 1 if a wheel is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wheels", description=__doc__)
    parser.add_argument("--python", action="append", help="a version such as 3.12; default all that are declared")
    parser.add_argument("--verbose", action="store_true", help="also name the wheels")
    arguments = parser.parse_args()
    rows, missing = [], 0
    for python in arguments.python or pythons():
        try:
            found = resolved(base_dependencies(), python)
        except NoWheelError as error:
            missing += 1
            print(f"Python {python}: {error}", file=sys.stderr)
            continue
        rows.append(row(python, found))
        for wheel in found if arguments.verbose else ():
            print(f"{python} {wheel.name} {wheel.version} {wheel.file}")
    if rows:
        print(table(rows))
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
