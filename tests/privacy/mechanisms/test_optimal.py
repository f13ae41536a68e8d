"""The optimal factorisation: near its dual bound, the best there is, and C^T C = X, not C C^T."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, make_mechanism
from murmurfl.privacy.mechanisms import optimal_encoder
from murmurfl.privacy.mechanisms.optimal import forget


def error(mechanism, workload=None):
    """RMSE of the prefix sums, or of another workload of them, for sensitivity 1."""
    rows = mechanism.decoder() if workload is None else workload @ mechanism.decoder()
    return np.linalg.norm(rows) / np.sqrt(len(rows)) * mechanism.sensitivity()


@pytest.mark.parametrize(("n", "figure"), [(16, 1.689), (64, 2.100), (256, 2.524)])
def test_the_error_is_the_least_possible(n, figure):
    """The dual bound of the module, from its own solution; figures seen with a gap of 1e-8."""
    assert error(make_mechanism("optimal", n)) == pytest.approx(figure, rel=1e-3)


def test_a_smaller_gap_gives_hardly_less():
    prefix = np.tri(50)
    loose, tight = (optimal_encoder(prefix, tolerance) for tolerance in (1e-3, 1e-9))
    errors = [np.linalg.norm(prefix @ np.linalg.inv(encoder)) ** 2 for encoder in (loose, tight)]
    assert errors[1] <= errors[0] <= errors[1] * 1.0011
    with pytest.raises(ConfigurationError, match="gap"):
        optimal_encoder(prefix, -1.0)


def test_no_other_mechanism_is_better():
    best = error(make_mechanism("optimal", 64))
    others = [
        ("independent", {}), ("cancelling", {}), ("tree", {}), ("tree", {"decoder": "dyadic"}), ("sqrt_toeplitz", {}),
        ("banded", {"bands": 16}), ("blt", {}), ("optimal", {"workload": "mu2"}), ("decay", {}),
        ("decay", {"workload": "prefix-sum"}), ("bisr", {}), ("sqrt_normalised", {}),
    ]  # fmt: skip
    for name, options in others:
        assert best < error(make_mechanism(name, 64, **options))


@pytest.mark.parametrize("workload", ["prefix-sum", "mu2"])
def test_columns_have_norm_one_and_c_is_causal(workload):
    encoder = make_mechanism("optimal", 40, workload=workload).materialize()
    assert np.linalg.norm(encoder, axis=0) == pytest.approx(np.ones(40), abs=1e-12)
    assert (encoder == np.tril(encoder)).all()


def test_the_ordinary_cholesky_factor_would_be_too_little_noise():
    """The planted bug (a public library has it): C C^T = X in place of C^T C = X, taken to have columns of norm 1."""
    encoder = make_mechanism("optimal", 64).materialize()
    wrong = np.linalg.cholesky(encoder.T @ encoder)
    assert np.linalg.norm(wrong, axis=1) == pytest.approx(np.ones(64)), "its rows have norm 1, not its columns"
    assert np.linalg.norm(wrong, axis=0).max() > 2.5, "true sensitivity"


@pytest.mark.parametrize("n", [16, 64])
def test_for_the_quadratic_workload_cancelling_is_nearly_optimal(n):
    """ALGORITHMS section 3: within 1.16 to 1.18, harmonic 1.3 to 1.7, independent 2 to 8."""
    prefix = np.tri(n)
    best = error(make_mechanism("optimal", n, workload="mu2"), prefix)
    ratios = {
        name: error(make_mechanism(kind, n, **options), prefix) / best
        for name, kind, options in [
            ("uniform", "cancelling", {}),
            ("harmonic", "cancelling", {"schedule": "harmonic"}),
            ("independent", "independent", {}),
        ]
    }
    assert 1.16 <= ratios["uniform"] <= 1.18
    assert 1.3 <= ratios["harmonic"] <= 1.7
    assert 2 <= ratios["independent"] <= 8


def test_a_changed_file_in_the_cache_changes_the_noise_and_not_the_privacy(tmp_path, monkeypatch):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path))
    forget()
    make_mechanism("optimal", 12).materialize()
    (path,) = tmp_path.glob("*.npz")
    with np.load(path) as file:
        encoder = file["encoder"]
    np.savez(path, encoder=3.0 * encoder + np.eye(12))
    forget()
    changed = make_mechanism("optimal", 12)
    assert changed.materialize() != pytest.approx(encoder, abs=1e-3)
    assert changed.sensitivity() == pytest.approx(1.0)
    assert changed.decoder() @ changed.materialize() == pytest.approx(np.tri(12))
    np.savez(path, encoder=encoder[:5])
    forget()
    assert make_mechanism("optimal", 12).materialize() == pytest.approx(encoder)
    forget()
