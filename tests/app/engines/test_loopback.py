"""Which processes belong to a run: those with its marker, their descendants, and those that were seen before."""

import os
import secrets
import signal
import subprocess
import sys

import pytest
from murmurfl.app.engines.loopback import Processes

NAME = "MURMURFL_TEST_LOOPBACK"
FAMILY = f"""
import os, subprocess, sys, time
bare = {{name: value for name, value in os.environ.items() if name != {NAME!r}}}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=bare, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family():
    """A marked process and its child, which dropped the mark."""
    value = secrets.token_hex(8)
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], env={**os.environ, NAME: value}, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        yield value, parent, child
        parent.kill()
    if child in Processes(f"{NAME}=another").living({child}):
        os.kill(child, signal.SIGKILL)


def test_a_childs_own_environment_does_not_hide_it(family):
    value, parent, child = family
    processes = Processes(f"{NAME}={value}")
    assert processes.living(set()) == sorted([parent.pid, child])


def test_orphans_that_were_seen_are_remembered_and_the_dead_are_not_living(family):
    value, parent, child = family
    processes = Processes(f"{NAME}={value}")
    unseen = Processes(f"{NAME}={value}")
    processes.living(set())
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
    assert processes.living(set()) == [child]
    assert not unseen.living(set())
    assert unseen.living({child}) == [child]


def test_other_processes_are_not_those_of_a_marker(family):
    _, parent, child = family
    assert not Processes(f"{NAME}=another").living(set())
    assert not Processes(f"{NAME}2=").living(set())
    assert os.getpid() not in Processes(f"{NAME}=another").living({parent.pid, child})
