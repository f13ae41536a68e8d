"""What `make wheels` makes of pip's report, and that pip is asked as on the other computer; the registry is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import wheels


def report(*files):
    install = []
    for file in files:
        name, version, *_ = file.split("-")
        install.append(
            {
                "metadata": {"name": name, "version": version},
                "download_info": {"url": f"https://files.example.org/a/{file}"},
            }
        )
    return {"install": install}


NUMPY = "numpy-2.4.6-cp313-cp313-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl"
RAY = "ray-2.55.1-cp313-cp313-manylinux2014_aarch64.whl"
HTTPX = "httpx-0.28.1-py3-none-any.whl"


def test_wheels_are_counted_by_kind_with_the_glibc_that_they_need():
    found = wheels.wheels(report(RAY, NUMPY, HTTPX))
    assert [wheel.name for wheel in found] == ["httpx", "numpy", "ray"]
    assert [wheel.glibc for wheel in found] == [0, 27, 17]
    told = wheels.row("3.13", found)
    assert (told["packages"], told["compiled for aarch64"], told["needs glibc"]) == (3, 2, "2.27")
    assert "| 3.13 | 3 | 2 | 1 | 2.27 |" in wheels.table([told])


@pytest.mark.parametrize("file", ["ray-2.55.1.tar.gz", "ray-2.55.1-cp313-cp313-manylinux2014_x86_64.whl"])
def test_what_is_no_wheel_for_that_computer_is_named(file):
    with pytest.raises(wheels.NoWheelError, match="wheel for aarch64 of ray"):
        wheels.wheels(report(HTTPX, file))


ALONE = "from pip._vendor.packaging import markers"
ASKED = """
print(markers.Marker('python_version == "3.99" and platform_machine == "aarch64"').evaluate())
"""


@pytest.mark.parametrize(("code", "answer"), [(wheels._AS_THERE, "True"), (ALONE, "False")])
def test_conditions_are_those_of_the_other_computer(code, answer):
    """pip alone would take this computer's Python and kind, and so leave out or take too much."""
    command = [sys.executable, "-c", code + ASKED, wheels.there("3.99")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == answer


ROOT = Path(__file__).parents[1]


def test_every_declared_python_is_asked_for_and_linted_for():
    assert wheels.pythons() == ["3.11", "3.12", "3.13"]
    linted = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert linted[1].split() == wheels.pythons()
    assert "Python 3.11 to 3.13" in (ROOT / "docs" / "deployment.md").read_text()
    assert any(line.startswith("flwr>") for line in wheels.base_dependencies())
