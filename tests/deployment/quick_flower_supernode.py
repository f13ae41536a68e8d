"""Flower's SuperNode as a node of ours starts it, but one that looks for messages ten times as often: a test's time.

Its clock may be wrong, by the seconds in the file that the environment names.
"""

import datetime
import os
import time
from pathlib import Path
from types import SimpleNamespace

from flwr.supercore.date import now
from flwr.supernode import node_auth_http_interceptor, start_client_internal
from murmurfl.app.nodes.flower_process import main

_LONGEST_S = 0.3
quick = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
start_client_internal.time = SimpleNamespace(**{**quick, "sleep": lambda s: time.sleep(min(s, _LONGEST_S))})

if clock := os.environ.get("MURMURFL_TEST_CLOCK"):
    node_auth_http_interceptor.now = lambda: now() + datetime.timedelta(seconds=float(Path(clock).read_text()))

main()
