"""A mechanism of somebody's own on the engines and in the audit: the same model, and a measurement of what it adds."""

import math

import numpy as np
import pytest
from murmurfl.app.auditing import run_audit as audit
from murmurfl.app.auditing import run_audit as scene
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import MECHANISMS, Mechanism, register_mechanism
from murmurfl.privacy.mechanisms import Increment

FACTOR = 0.3


class Fading(Mechanism):
    """Each release takes out 0.3 of what the last one added: docs/own.md's, for any kind of memory."""

    def materialize(self, n=None):
        rows = np.arange(self._check_n(n))
        return np.tril(FACTOR ** np.abs(rows[:, None] - rows))

    def decoder(self, n=None):
        n = self._check_n(n)
        return FACTOR * np.eye(n) + (1 - FACTOR) * np.tri(n)

    def initial_state(self, size):
        return ()

    def increment(self, state, release, normals, scale=1.0):
        row = scale * np.asarray(normals, dtype=np.float64)
        return Increment(row, FACTOR * state[0] if state else None, (row,))

    def state_after(self, release, draw, scale=1.0):
        return (scale * np.asarray(draw(range(release, release + 1))[0], dtype=np.float64),)

    def row_std(self, release):
        return math.sqrt(1.0 + (release - 1) * (1 - FACTOR) ** 2)

    def memory_bytes(self, size):
        return 16


@pytest.fixture(params=["last", "state", "all"])
def fading(request):
    """A mechanism that was registered after the run configuration was imported; its name."""
    name = f"fading, {request.param}"
    register_mechanism(type("Own", (Fading,), {"name": name, "memory": request.param}))
    yield name
    prepare.cache_clear()
    del MECHANISMS[name]


def also_long(*values):
    return (pytest.param(value, marks=pytest.mark.long) for value in values)


def config(**changes):
    return RunConfig(
        **{
            "task": "digits",
            "num_clients": 2,
            "clients_per_round": 2,
            "num_rounds": 5,
            "max_participations": 5,
            "mu": 4.0,
            "checkpoint": False,
            "noise_quality": "exact",
            **changes,
        }
    )


def test_a_mechanism_of_ones_own_gives_one_model_on_the_engines(fading):
    chosen = config(mechanism=fading)
    alone, together = run_in_process(chosen), run_cohort(chosen)
    assert all(np.array_equal(a, b) for a, b in zip(alone.parameters, together.parameters, strict=True))
    assert max(np.abs(values).max() for values in together.parameters) < 1e4


def test_an_audit_asks_clients_whose_releases_do_not_depend_on_its_cache(fading, monkeypatch):
    chosen = config(mechanism=fading, num_rounds=4, max_participations=4)
    seen = []
    for size in (scene._ROW_CACHE_BYTES, 0):
        monkeypatch.setattr(scene, "_ROW_CACHE_BYTES", size)
        answers = scene.CanarySetup(prepare(chosen)).streams(0, range(2), seed=3)
        seen.append([release.counts.tolist() for k in range(1, 5) for release in answers(k, [k - 1] * 2)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("fading", ["last", *also_long("state", "all")], indirect=True)
def test_an_audit_measures_what_a_mechanism_of_ones_own_adds(fading):
    """300 runs measure mu with a standard deviation of about mu / sqrt(600): four of them are tolerated, 6e-5."""
    found = audit.audit_run(config(mechanism=fading, num_rounds=3, max_participations=3, mu=1.0), runs=300)
    assert not found.result.violated
    assert found.result.estimated_mu == pytest.approx(found.canary_mu, rel=4 / math.sqrt(600) + 0.02)
