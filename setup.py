"""What pyproject.toml cannot say of the wheel: the import root of a checkout is the package's ``__init__.py``."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Puts murmurfl.py, which makes the checkout the package ``murmurfl``, into that package."""

    def find_modules(self) -> list[tuple[str, str, str]]:
        """Package, module and file of every module outside the listed packages: that one."""
        return [("murmurfl", "__init__", "murmurfl.py")]


setup(cmdclass={"build_py": BuildPy})
