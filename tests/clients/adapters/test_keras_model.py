"""Keras 3 models on both backends: no gradient is silently zero, and none of an attack suite's models remembers."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

if importlib.util.find_spec("keras") is None:  # without importing it, which chooses a backend
    pytest.skip("needs keras", allow_module_level=True)
ROOT = Path(__file__).parents[3]
BACKENDS = ["jax", "torch"]


@cache
def made(backend):
    """What became of the models of tests/harness/keras_models.py: a process has one backend."""
    pytest.importorskip(backend)
    command = [sys.executable, "-m", "tests.harness.keras_models"]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


OTHER_STEPS, DEPENDS = "takes the same steps", "depend on a record's values"
PENALTY = "unsupported: Expected a Keras model without penalties"
SAID = {
    "values as an array": {"jax": "pure_callback", "torch": "failed"},
    "value as a number": DEPENDS,
    "value as a truth": DEPENDS,
    "counter": "the second time",
    "draws of numpy": "the second time",
    "out of a backward pass": {"jax": "pure_callback", "torch": "failed"},
    "frozen branch": OTHER_STEPS,
    "loop on values": {"jax": "while, which runs for as long", "torch": DEPENDS},
    "penalty": PENALTY,
    "penalty of activations": PENALTY,
    "penalty of its own": PENALTY,
    "not built": "missing",
    "nothing to train": "missing",
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_that_could_remember_or_not_be_trained_are_refused_and_see_no_value(backend):
    found = made(backend)
    assert found["refused"].keys() == SAID.keys()
    for name, text in found["refused"].items():
        expected = SAID[name]
        assert (expected if isinstance(expected, str) else expected[backend]) in text, (name, text)
    assert found["kept"] == []


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_kerass_own_loss_and_no_record_changes_another(backend):
    """By central differences of 1e-2 of Keras's own calls in inference, whose error 1e-3 covers."""
    found = made(backend)["fine"]
    assert {"dropout and batch normalisation", "attention", "keeps it in the library"} <= found.keys()
    for name, one in found.items():
        assert "refused" not in one, (name, one)
        assert one["apart"] < 1e-3, (name, one)
        assert one["alone"] < 1e-4, (name, one)
        assert one["same"], name
        assert min(one["norms"]) > 0.1, name


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_come_back_losses_are_found_and_probabilities_are_scores(backend):
    found = made(backend)["others"]
    assert found["moved"] == pytest.approx([1.0] * 4)
    assert found["names"] == ["0", "1", "2", "3"]
    assert found["compiled"] > 0.1
    assert found["score"] < 1e-6
    assert found["right"]
    assert found["no loss"].startswith("missing: Expected loss=")
    if backend == "torch":
        assert "give the Keras model itself" in found["around"]
