"""The order of the test files, those that start servers first, so that no worker is left alone with one; garbage;
loggers; a disk nobody waits for.
"""

import functools
import gc
import importlib
import logging
import os
from collections import defaultdict

import hypothesis
import pytest
import typer.testing
from murmurfl.privacy.ledger import store
from murmurfl.privacy.release import prefix_sums as noise_stream
from threadpoolctl import threadpool_limits

# Two workers share the cores, and threads that wait for small matrices spin. The variables are for what is loaded later
# and for child processes.
threadpool_limits(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# By default hypothesis draws other examples each time, and fails where a loaded machine needs long for one.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fixed")

# Typer makes all thirty commands again, a tenth of a second, for each command that a test invokes.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Operators' files are refused where their group may write to them, which is how some systems make every file.
os.umask(0o022)

SLOW = ("test_readme.py", "test_deployment.py", "test_ray.py", "test_launch.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among what is imported: a million objects that stay, at a second a look."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is marked
def pytest_collection_modifyitems(config, items):
    """Mark what ``few_cases`` leaves to another command, evenly spread; a test that is named has all its cases."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))
    if any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if (few := item.get_closest_marker("few_cases")) and not item.get_closest_marker("long"):
            cases[item.path, item.originalname].append((item, few))
    for found in cases.values():
        few = found[0][1]
        (most,), others = few.args, few.kwargs.get("others", "more_cases")
        kept = {i * len(found) // most for i in range(most)}
        for i, (item, _) in enumerate(found):
            if len(found) > most and i not in kept:
                item.add_marker(getattr(pytest.mark, others))


def shrink_rehearsals(patch):
    """Rehearse on fewer made-up data: which way is better shows there too, in a tenth of the time."""
    rehearsal = importlib.import_module("murmurfl.app.planning.rehearsal")
    for name, most in (("MOST_SAMPLES", 500), ("MOST_FEATURES", 48), ("TEST_SAMPLES", 300)):
        patch.setattr(rehearsal, name, most)
    patch.setattr(rehearsal, "FAMILY", rehearsal.USUAL)
    patch.setitem(rehearsal.rehearse.__kwdefaults__, "profiles", rehearsal.USUAL)


@pytest.fixture(scope="module")
def small_rehearsals():
    """Shrink the rehearsals of a file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        shrink_rehearsals(patch)
        yield


@pytest.fixture
def no_forecast(monkeypatch):
    """Start runs without the rehearsal on made-up data before their first round, which takes longer than they do."""
    monkeypatch.setattr("murmurfl.app.runs.training_run.foretold", lambda *_: None)


@pytest.fixture
def no_result_folder(monkeypatch):
    """Let strategies that are started by themselves leave no folder with their result."""
    monkeypatch.setattr("murmurfl.strategies.rounds.loop.default_callbacks", list)


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
    """A thousandth of the noise, to see what a real client sends through it: a mu that large would be refused."""
    real = noise_stream.standard_normals
    monkeypatch.setattr(noise_stream, "standard_normals", lambda *arguments: 1e-3 * real(*arguments))
