"""The optimal factorisation: near its dual bound, the best there is, and C^T C = X, not C C^T.

The cache of optimisers' results: what it believes, and what it does where it cannot write.
"""

import numpy as np
import pytest
from murmurfl.privacy import MECHANISMS, ConfigurationError, make_mechanism
from murmurfl.privacy.mechanisms import optimal as cache
from murmurfl.privacy.mechanisms import optimal_encoder
from murmurfl.privacy.mechanisms.optimal import forget

from tests.harness.errors import raises


def error(mechanism, workload=None):
    """RMSE of the prefix sums, or of another workload of them, for sensitivity 1."""
    rows = mechanism.decoder() if workload is None else workload @ mechanism.decoder()
    return np.linalg.norm(rows) / np.sqrt(len(rows)) * mechanism.sensitivity()


@pytest.mark.parametrize(("n", "figure"), [(16, 1.689), (64, 2.100), (256, 2.524)])
def test_the_error_is_the_least_possible(n, figure):
    """The dual bound of the module, from its own solution; figures seen with a gap of 1e-8."""
    assert error(make_mechanism("optimal", n)) == pytest.approx(figure, rel=1e-3)


@pytest.mark.parametrize(("name", "most"), [("prefix-sum", 4096), ("mu2", 1024)])
def test_too_many_releases_are_refused_with_the_next_best(name, most):
    """Of all mechanisms with their usual options the one that is named has the least error after ``optimal``."""
    refusal = refused(lambda: make_mechanism("optimal", most + 1, workload=name))
    assert (refusal.kind, refusal.setting) == ("out-of-range", "num_releases")
    assert f"<= {most} " in str(refusal)
    n = 128
    of_workload = np.tri(n) if name == "mu2" else np.eye(n)
    others = {}
    for other in MECHANISMS.keys() - {"optimal"}:
        options = {"workload": name} if other == "decay" else {}
        others[other] = error(make_mechanism(other, n, **options), of_workload)
    assert f"Use {min(others, key=others.__getitem__)!r}" in str(refusal)
    assert min(others.values()) < 1.02 * error(make_mechanism("optimal", n, workload=name), of_workload)


def refused(make):
    with pytest.raises(ConfigurationError) as refusal:
        make()
    return refusal.value


def test_a_smaller_gap_gives_hardly_less():
    prefix = np.tri(50)
    loose, tight = (optimal_encoder(prefix, tolerance) for tolerance in (1e-3, 1e-9))
    errors = [np.linalg.norm(prefix @ np.linalg.inv(encoder)) ** 2 for encoder in (loose, tight)]
    assert errors[1] <= errors[0] <= errors[1] * 1.0011
    with raises(ConfigurationError, "failed", match="gap"):
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


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path / "cache"))
    cache.forget()


class Counted:
    """A computation that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"values": np.arange(3.0)}


def sound(arrays):
    return arrays["values"].shape == (3,)


def ask(compute, size=3, name="arange"):
    return cache.cached(name, {"size": size, "step": 1.0}, compute, sound)["values"]


def only_file():
    (file,) = cache.folder().iterdir()
    return file


def test_a_result_is_computed_once_and_read_only():
    compute = Counted()
    first, second = ask(compute), ask(compute)
    assert compute.calls == 1
    assert second.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 5


def test_a_new_process_reads_the_file():
    compute = Counted()
    ask(compute)
    cache.forget()
    values = ask(compute)
    assert compute.calls == 1
    assert values.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 5


def test_another_name_or_input_is_another_result():
    compute = Counted()
    ask(compute)
    ask(compute, size=4)
    ask(compute, name="another")
    assert compute.calls == 3
    assert len(list(cache.folder().iterdir())) == 3


def test_no_temporary_file_is_left():
    ask(Counted())
    assert only_file().suffix == ".npz"


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no archive"),
        lambda file: file.write_bytes(file.read_bytes()[:-40]),
        lambda file: file.write_bytes(file.read_bytes().replace(b"\x00\x00\xf0\x3f", b"\x00\x00\xf0\x40")),
        lambda file: np.savez(file, values=np.arange(4.0)),
        lambda file: np.savez(file, values=np.arange(3)),
        lambda file: np.savez(file, values=np.array([0.0, np.nan, 1.0])),
        lambda file: np.savez(file, values=np.array([0.0, None, 1.0])),
        lambda file: np.savez(file, others=np.arange(3.0)),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["empty", "text", "short", "flipped", "shape", "integers", "nan", "objects", "names", "folder"],
)
def test_a_damaged_or_foreign_file_is_computed_again(damage):
    compute = Counted()
    ask(compute)
    damage(only_file())
    cache.forget()
    assert ask(compute).tolist() == [0, 1, 2]
    assert compute.calls == 2


def test_a_damaged_file_is_replaced():
    compute = Counted()
    ask(compute)
    only_file().write_bytes(b"no archive")
    for _ in range(2):
        cache.forget()
        ask(compute)
    assert compute.calls == 2


def test_a_folder_that_cannot_be_written_is_no_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path / "file" / "cache"))
    compute = Counted()
    assert ask(compute).tolist() == [0, 1, 2]
    cache.forget()
    ask(compute)
    assert compute.calls == 2


def test_memory_holds_the_results_used_last():
    computes = [Counted() for _ in range(20)]
    ask(computes[0], size=0)
    for size, compute in enumerate(computes):
        ask(compute, size=size)
        ask(computes[0], size=0)
    for file in cache.folder().iterdir():
        file.unlink()
    ask(computes[0], size=0)
    ask(computes[1], size=1)
    assert (computes[0].calls, computes[1].calls) == (1, 2)


def test_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv("MURMURFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "murmurfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "murmurfl"
