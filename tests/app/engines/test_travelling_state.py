"""States that travel between Ray's workers: how large they are, and what goes with them."""

import pickle
from dataclasses import replace

import numpy as np
from murmurfl.app import client_app
from murmurfl.app.runs.training_run import run_experiment

from tests.app.engines.travelling_grid import TravellingGrid
from tests.app.run_table import FEW


def test_a_state_adds_little_to_the_reply_it_goes_back_with(monkeypatch):
    config = replace(FEW, lost_replies=0.0)
    grid = TravellingGrid(monkeypatch, config)
    run_experiment(grid, config, engine="ray")
    together, alone = map(np.median, zip(*grid.sizes, strict=True))
    assert alone > 8 * 10 * 65, "a release in float64"
    assert together < alone + 4_500


def test_the_app_goes_to_a_worker_by_its_name():
    pickled = pickle.dumps(client_app.app)
    assert pickle.loads(pickled) is client_app.app
    assert len(pickled) < 100
