"""The order of the test files, those that start servers first, so that no worker is left alone with one; loggers."""

import logging
import os

import pytest

# Operators' files are refused where their group may write to them, which is how some systems make every file.
os.umask(0o022)

SLOW = ("test_readme.py", "test_deployment.py", "test_ray.py", "test_launch.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """A command that quietens Flower does so for its process, which here is everybody's."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)
