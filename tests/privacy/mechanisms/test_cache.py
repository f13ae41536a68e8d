"""The cache of optimisers' results: what it believes, and what it does where it cannot write."""

import numpy as np
import pytest
from murmurfl.privacy.mechanisms import optimal as cache


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
