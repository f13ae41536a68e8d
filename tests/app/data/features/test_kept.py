"""Features that are kept in a folder: only where the user asks for it, and the same rows."""

import stat

import numpy as np
import pytest
from murmurfl.app.data.features.feature_map import KEPT_VARIABLE, kept
from murmurfl.privacy import ConfigurationError

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
    with pytest.raises(ConfigurationError, match=KEPT_VARIABLE):
        kept(["a"], IMAGES, 255, Counted())
