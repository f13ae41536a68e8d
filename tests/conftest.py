"""The order of the test files, those that start servers first, so that no worker is left alone with one; loggers; a
disk nobody waits for.
"""

import functools
import importlib
import logging
import os
from collections import defaultdict

import pytest
import typer.testing
from murmurfl.privacy.ledger import store
from murmurfl.privacy.machine import prefix_sums as noise_stream
from threadpoolctl import threadpool_limits

# Two workers share the cores, and threads that wait for small matrices spin. The variables are for what is loaded later
# and for child processes.
threadpool_limits(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Typer makes all thirty commands again, a tenth of a second, for each command that a test invokes.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Operators' files are refused where their group may write to them, which is how some systems make every file.
os.umask(0o022)

SLOW = ("test_readme.py", "test_deployment.py", "test_ray.py", "test_launch.py")
CASES, TRAININGS = 6, 2
TRAIN_FOR_EACH = (
    "test_differential.py",
    "test_errors_page.py",
    "test_fitting.py",
    "test_forecast.py",
    "test_killed_nodes.py",
    "test_liars.py",
    "test_masked_updates.py",
    "test_no_noise.py",
    "test_opening_record.py",
    "test_own_mechanisms.py",
    "test_real_fit.py",
    "test_rehearsal.py",
    "test_resumed_rounds.py",
    "test_secure_aggregation.py",
    "test_secure_resume.py",
    "test_secure_screen.py",
    "test_trusted_resume.py",
)
"""Files whose tests train once for each of many cases."""
OWN_COMMANDS = {"base", "deployment", "docs", "examples", "frameworks"}
"""Marks of tests that have a `make` target of their own, which runs all their cases."""


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is marked
def pytest_collection_modifyitems(config, items):
    """Of a test with many cases some, evenly spread, are for ``make test``; one that is named has all of them."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))
    if any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and OWN_COMMANDS.isdisjoint(mark.name for mark in item.iter_markers()):
            cases[item.path, item.originalname].append(item)
    for (path, _), found in cases.items():
        most = TRAININGS if path.name in TRAIN_FOR_EACH else CASES
        kept = {i * len(found) // most for i in range(most)}
        for i, item in enumerate(found):
            if len(found) > most and i not in kept:
                item.add_marker(pytest.mark.more_cases)


@pytest.fixture(scope="module", autouse=True)
def _small_rehearsals(request):
    """Which way is better shows on fewer made-up data too, in a tenth of the time."""
    rehearsal = importlib.import_module("murmurfl.app.planning.rehearsal")
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in ("test_rehearsal.py", "test_readme.py"):
            for name, most in (("MOST_SAMPLES", 500), ("MOST_FEATURES", 48), ("TEST_SAMPLES", 300)):
                patch.setattr(rehearsal, name, most)
            patch.setitem(rehearsal.rehearse.__kwdefaults__, "members", rehearsal.USUAL)
        yield


@pytest.fixture(autouse=True)
def _not_rehearsed(request, monkeypatch):
    """Runs of this process are not rehearsed on made-up data first, which takes longer than they do themselves."""
    if request.path.name != "test_rehearsal.py":
        monkeypatch.setattr("murmurfl.app.runs.training_run.foretold", lambda *_: None)


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch):
    """Trainings leave no folder with their result in the one that the tests were started in."""
    monkeypatch.setattr("murmurfl.strategies.rounds.strategy.default_callbacks", list)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    """The terminal these tests were started in, or what another test set, is not the one they speak of."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """A command that quietens Flower does so for its process, which here is everybody's."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def quick_disk(request, monkeypatch):
    """Waiting for the disk takes long, and a killed process loses nothing it has written, waited for or not."""
    if "real_disk" not in request.fixturenames:
        real = store.connect

        def connect(*arguments):
            connection = real(*arguments)
            connection.execute("PRAGMA synchronous = OFF")
            return connection

        monkeypatch.setattr(store, "connect", connect)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def real_disk():
    """Asks for the disk to be waited for all the same."""


@pytest.fixture
def hushed_noise(monkeypatch):
    """A thousandth of the noise, to see what a real machine sends through it: a mu that large would be refused."""
    real = noise_stream.standard_normals
    monkeypatch.setattr(noise_stream, "standard_normals", lambda *arguments: 1e-3 * real(*arguments))
