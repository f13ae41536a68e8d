"""Buffered linear Toeplitz noise: its optimiser, and the closed forms it uses."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, make_mechanism
from murmurfl.privacy.mechanisms import BltNoise, SqrtToeplitzNoise, optimise_blt
from murmurfl.privacy.mechanisms import optimal as cache


@pytest.fixture(autouse=True)
def _no_files(monkeypatch, tmp_path):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path))
    cache.forget()


def worst_loss(mechanism, participations, separation):
    """Standard deviation of the last prefix sum at Delta = mu = 1."""
    return mechanism.sensitivity(participations, separation) * mechanism.row_std_range()[1]


def test_column_is_a_sum_of_geometric_ones():
    mechanism = BltNoise(6, theta=[0.9, 0.0], omega=[0.5, 0.25])
    assert mechanism.encoder_column == pytest.approx([1, 0.75, 0.45, 0.405, 0.3645, 0.32805])


@pytest.mark.parametrize(("buffers", "most"), [(2, 9.502), (3, 9.452), (4, 9.431), (5, 9.431)])
def test_optimised_error_beats_the_square_root_over_five_epochs(buffers, most):
    """2000 releases, 5 participations 400 apart: jax_privacy finds 9.451, the square root has 9.883."""
    mechanism = BltNoise(2000, buffers=buffers, num_participations=5, min_separation=400)
    assert worst_loss(mechanism, 5, 400) <= most


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 1000])
def test_three_buffers_come_close_to_the_square_root_for_one_participation(n):
    best = worst_loss(SqrtToeplitzNoise(n), 1, 1)
    assert best * (1 - 1e-9) <= worst_loss(BltNoise(n), 1, 1) <= 1.002 * best


def test_samples_in_every_release_are_left_with_independent_noise():
    """No correlation helps there: the error of independent noise is the number of releases."""
    assert worst_loss(BltNoise(30, num_participations=30), 30, 1) == pytest.approx(30, rel=1e-4)


def test_the_optimum_cannot_be_improved_by_a_small_step():
    theta, omega = optimise_blt(200, 2, 4, 50)
    best = worst_loss(BltNoise(200, theta=theta, omega=omega), 4, 50)
    for step in (*np.eye(4), *-np.eye(4)):
        moved = BltNoise(200, theta=theta * (1 - 1e-3 * step[:2]), omega=omega * (1 + 1e-2 * step[2:]))
        assert worst_loss(moved, 4, 50) > best


def test_separation_is_by_default_as_far_as_the_participations_can_be():
    default = BltNoise(60, num_participations=4)
    assert (default.theta == BltNoise(60, num_participations=4, min_separation=15).theta).all()


def test_the_optimiser_is_deterministic():
    first = optimise_blt(77, 3, 2, 30)
    cache.forget()
    for file in cache.folder().iterdir():
        file.unlink()
    second = optimise_blt(77, 3, 2, 30)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_a_tampered_cache_cannot_make_the_sensitivity_wrong():
    optimise_blt(50, 2, 1, 50)
    (file,) = cache.folder().iterdir()
    np.savez(file, theta=np.array([0.5, 0.9]), omega=np.array([0.5, 0.5]))
    cache.forget()
    changed = BltNoise(50, buffers=2)
    assert changed.theta.tolist() == [0.5, 0.9]
    assert changed.sensitivity() == pytest.approx(np.linalg.norm(changed.materialize()[:, 0]))
    np.savez(file, theta=np.array([0.5, 1.9]), omega=np.array([0.5, 0.5]))
    cache.forget()
    assert BltNoise(50, buffers=2).theta.max() < 1


@pytest.mark.parametrize(
    "options",
    [
        {"buffers": 0},
        {"buffers": 1.5},
        {"num_participations": 0},
        {"min_separation": 0},
        {"theta": [0.5]},
        {"omega": [0.5]},
        {"theta": [0.5], "omega": [0.3, 0.2]},
        {"theta": [], "omega": []},
        {"theta": [1.0], "omega": [0.5]},
        {"theta": [-0.1], "omega": [0.5]},
        {"theta": [0.5], "omega": [-0.1]},
        {"theta": [0.5, 0.6], "omega": [0.6, 0.5]},
        {"theta": [float("nan")], "omega": [0.5]},
        {"theta": ["a"], "omega": [0.5]},
        {"theta": 0.5, "omega": 0.5},
        {"decay": 0.5},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigurationError, match="Expected"):
        make_mechanism("blt", 20, **options)
