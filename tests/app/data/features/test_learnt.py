"""Learnt features, and a folder that keeps features."""

import stat

import numpy as np
import pytest
from murmurfl.app.data.features import FEATURES
from murmurfl.app.data.features import learnt as weights
from murmurfl.app.data.features.feature_map import KEPT_VARIABLE, kept
from murmurfl.app.data.features.learnt import (
    LEARNT,
    SHA256,
    framed,
    frozen_net,
    morlet,
    quantised,
    read_weights,
    restored,
    scattering,
    unpacked_weights,
)
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

NAMES = [features.name for features in LEARNT]


def images(*shape, seed=1):
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_norm_one_and_depend_on_their_image_alone(name):
    some = images(5, 28, 28)
    some[1] = 0
    features = FEATURES[name]
    rows = features(some, 255)
    assert features.norm_bound == 1.0
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    assert str(rows.shape[1]) in features.sentence.replace(",", "")
    others = images(5, 28, 28, seed=2)
    others[3] = some[3]
    assert features(others, 255)[3] == pytest.approx(rows[3], abs=1e-6)
    assert features(some[:0], 255).shape == (0, rows.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_images_of_another_size_are_laid_in_a_frame(name):
    assert FEATURES[name](images(2, 8, 8) // 16, 16).shape == FEATURES[name](images(2, 28, 28), 255).shape
    assert RunConfig(features=name).features == name


def test_a_frame_leaves_28_x_28_alone_and_puts_others_in_its_middle():
    some = images(2, 28, 28)
    assert framed(some, 255) == pytest.approx(some / np.float32(255))
    small = framed(np.full((1, 8, 8), 16, np.uint8), 16)[0]
    assert small[14, 14] == pytest.approx(1.0)
    assert small[:3].max() == small[:, 25:].max() == 0.0
    assert small == pytest.approx(small[::-1, ::-1])
    large = framed(np.full((1, 100, 50), 255, np.uint8), 255)[0]
    assert large[14, 14] == pytest.approx(1.0)
    assert large.sum() == pytest.approx(20 * 10, rel=0.02)


def test_scattering_is_convolution_modulus_and_blur():
    """The strongest of its steps, by definition: one direction of the fine wavelets at one point."""
    values = images(1, 28, 28) / np.float64(255)
    maps = scattering(values)
    assert maps.shape == (1, 81, 7, 7)
    wavelet = morlet(3, 0.8, np.pi / 4, 0.75 * np.pi)
    padded = np.pad(values[0], 3)
    answers = np.array([[abs((padded[r : r + 7, c : c + 7] * wavelet).sum()) for c in range(28)] for r in range(28)])
    away = np.arange(-6, 7)
    blur = np.exp(-(away**2) / (2 * 3.2**2))
    around = answers[14 - 6 : 14 + 7, 10 - 6 : 10 + 7]
    assert maps[0, 1 + 2, 3, 2] == pytest.approx(blur @ around @ blur / blur.sum() ** 2)


def test_scattering_has_the_maps_of_a_sum_only_where_it_is_linear():
    one, other = images(2, 1, 28, 28) / np.float64(255)
    both = scattering(one + other)
    assert both[:, 0] == pytest.approx(scattering(one)[:, 0] + scattering(other)[:, 0])
    assert np.abs(both[:, 1:] - scattering(one)[:, 1:] - scattering(other)[:, 1:]).max() > 0.01


def test_a_frozen_net_is_the_same_net_in_pytorch():
    torch = pytest.importorskip("torch")
    arrays = read_weights("strokes-1.npz")
    matrices = [restored(arrays[f"weight{layer}"], arrays[f"step{layer}"]) for layer in range(4)]
    values = images(3, 28, 28) / np.float32(255)
    ours = frozen_net(values, matrices, [arrays[f"bias{layer}"] for layer in range(4)])
    maps = torch.from_numpy(values)[:, None]
    for layer in range(3):
        weight, bias = torch.from_numpy(matrices[layer]), torch.from_numpy(arrays[f"bias{layer}"])
        maps = torch.relu(torch.nn.functional.conv2d(maps, weight, bias, padding=1))
        maps = torch.nn.functional.max_pool2d(maps, 2) if layer < 2 else maps
    dense = maps.permute(0, 2, 3, 1).flatten(1) @ torch.from_numpy(matrices[3]).T + torch.from_numpy(arrays["bias3"])
    assert ours == pytest.approx(torch.relu(dense).numpy(), rel=1e-4, abs=1e-4)


def test_every_weights_file_is_small_and_has_its_checksum():
    assert {path.name for path in weights.FOLDER.iterdir()} == SHA256.keys()
    for name in SHA256:
        assert (weights.FOLDER / name).stat().st_size < 1_000_000
        assert read_weights(name)


def test_a_weights_file_that_was_changed_is_refused():
    content = (weights.FOLDER / "scattering.npz").read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    with raises(ConfigurationError, "damaged"):
        unpacked_weights(changed, SHA256["scattering.npz"], "scattering.npz")


def test_weights_that_stayed_at_home_are_looked_for_where_it_is_said(monkeypatch, tmp_path):
    """As in a bundle, which has none."""
    home = weights.FOLDER
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    monkeypatch.setattr(weights.sys, "path", [])
    monkeypatch.setattr(weights, "distribution", lambda name: (_ for _ in ()).throw(weights.PackageNotFoundError(name)))
    read_weights.cache_clear()
    with raises(ConfigurationError, "not-found"):
        read_weights("scattering.npz")
    monkeypatch.setenv(weights.WEIGHTS_VARIABLE, str(home))
    assert read_weights("scattering.npz")
    read_weights.cache_clear()


def test_weights_in_eight_bits_are_off_by_half_a_step_at_most():
    exact = np.random.Generator(np.random.Philox(key=4)).standard_normal((5, 2, 3, 3))
    whole, step = quantised(exact)
    assert whole.dtype == np.int8
    assert (np.abs(restored(whole, step) - exact).reshape(5, -1).max(1) <= 0.501 * step).all()


IMAGES = np.arange(3 * 16, dtype=np.uint8).reshape(3, 4, 4)


class Counted:
    """A map that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, images, white):
        self.calls += 1
        return images.reshape(len(images), -1).astype(np.float32) / white


def test_nothing_is_kept_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv(KEPT_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    make = Counted()
    for _ in range(2):
        kept(["a"], IMAGES, 255, make)
    assert make.calls == 2
    assert not list(tmp_path.rglob("*"))


def test_what_is_kept_is_made_once_for_each_recipe_and_image(monkeypatch, tmp_path):
    monkeypatch.setenv(KEPT_VARIABLE, str(tmp_path / "kept"))
    make, changed = Counted(), IMAGES.copy()
    changed[1, 2, 3] += 1
    for _ in range(2):
        rows = [kept(*one, make) for one in ((["a"], IMAGES, 255), (["b"], IMAGES, 255), (["a"], IMAGES, 16))]
        rows.append(kept(["a"], changed, 255, make))
    assert make.calls == 4
    assert (rows[0] == Counted()(IMAGES, 255)).all()
    assert (rows[3] != rows[0]).sum() == 1
    (tmp_path / "kept" / "strange").touch()
    files = list((tmp_path / "kept").glob("*.npy"))
    assert len(files) == 4
    assert not list((tmp_path / "kept").glob("*.part"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}  # as private as the images


def test_half_a_file_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv(KEPT_VARIABLE, str(tmp_path))
    make = Counted()
    rows = kept(["a"], IMAGES, 255, make)
    (path,) = tmp_path.glob("*.npy")
    path.write_bytes(path.read_bytes()[:60])
    assert (kept(["a"], IMAGES, 255, make) == rows).all()
    assert make.calls == 2
    kept(["a"], IMAGES, 255, make)
    assert make.calls == 2


def test_a_folder_that_cannot_be_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(KEPT_VARIABLE, str(tmp_path / "file"))
    with raises(ConfigurationError, "failed", "MURMURFL_KEPT_FEATURES"):
        kept(["a"], IMAGES, 255, Counted())
