"""Native code of the loops over the values of a block of releases: made once, kept in files, called without numba.

numba takes a quarter of a second to start, also where its own cache has all it needs. So what it makes of a loop of
:mod:`.kernels` is kept as an object file, next to this file or in the user's cache folder (or in ``NUMBA_CACHE_DIR``),
which llvmlite alone reads in a tenth of the time. Where no folder can be written, every process compiles its loops.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.noise import MARK, ROUNDER, fast_pairs

ARGUMENTS = {
    "cancelling": "rnnnnnddbrqq",
    "decaying": "rnnnnnssbrqq",
    "independent": "rnnnnndq",
    "buffered": "rnnnsnrrprrq",
    "add_outer": "rnrnnnnnnqq",
    "add_dense": "rrnnnnnqq",
    "word_pairs": "rwnn",
}
"""The arguments of each loop, a letter each.

``r`` points to values of the type for which a loop is compiled, ``p`` to pointers to them, and ``s`` is one. ``d``,
``q``, ``b`` and ``w`` point to float64, int64, bool and uint32, and ``n`` is an int64.
"""
_POINTED = {"d": np.dtype(np.float64), "q": np.dtype(np.int64), "b": np.dtype(bool), "w": np.dtype(np.uint32)}
_POINTED["p"] = _POINTED["q"]


class Loop:
    """A loop of :mod:`.kernels`, as a function of arrays and numbers; the first array has the type that ``r`` is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._functions: dict[np.dtype[Any], tuple[Callable[..., None], list[np.dtype[Any] | None]]] = {}

    def __call__(self, *arguments: Any) -> None:
        kind = arguments[0].dtype
        function, pointed = self._functions.get(kind) or self._loaded(kind)
        given = zip(arguments, pointed, strict=True)
        function(*[one if wanted is None else address(one, wanted) for one, wanted in given])

    def _loaded(self, kind: np.dtype[Any]) -> tuple[Callable[..., None], list[np.dtype[Any] | None]]:
        letters = ARGUMENTS[self._name]
        where = _loaded(self._name, letters, kind.name)
        types = {"n": ctypes.c_int64, "s": ctypes.c_float if kind == np.float32 else ctypes.c_double}
        function = ctypes.CFUNCTYPE(None, *(types.get(letter, ctypes.c_void_p) for letter in letters))(where)
        pointed = [kind if letter == "r" else _POINTED.get(letter) for letter in letters]
        self._functions[kind] = function, pointed
        return function, pointed


def address(array: NDArray[Any], kind: np.dtype[Any]) -> int:
    """Return where the memory of an array of this type begins; it must be contiguous, and may be written to."""
    if array.dtype is not kind and array.dtype != kind:  # native code would read it as that type
        raise TypeError(f"Expected an array of {kind}, got one of {array.dtype}.")
    # In a quarter of the time of array.ctypes.
    return _addressof(_from_buffer(array))  # type: ignore[arg-type]


_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer


class Loops:
    """All loops, each compiled or read when it is first called."""

    def __init__(self) -> None:
        self.cancelling, self.decaying, self.independent = Loop("cancelling"), Loop("decaying"), Loop("independent")
        self.buffered, self.add_outer, self.add_dense = Loop("buffered"), Loop("add_outer"), Loop("add_dense")
        self.word_pairs = Loop("word_pairs")

    def make_normals(self, words: NDArray[np.uint32], normals: NDArray[np.float32]) -> None:
        """Write the normals that words become (:data:`~murmurfl.privacy.noise.WordPairs`)."""
        self.word_pairs(normals, words, len(words), words.shape[1] // 2)

    def equals_numpy(self) -> bool:
        """Return True if :meth:`make_normals` makes NumPy's normals on this computer, as 3 x 2^15 words tell.

        They are evenly spread, and some are those at which a quarter of a turn ends. Two ways to approximate a
        logarithm or a sine differ in the last bit of a tenth of all values or more.
        """
        steps = np.arange(1 << 15, dtype=np.uint32)
        even, half = steps << np.uint32(17), len(steps) // 2
        words = np.stack([even, even[::-1], even + steps * np.uint32(3)])
        made, expected = np.empty(words.shape, np.float32), np.empty(words.shape, np.float32)
        self.make_normals(words, made)
        fast_pairs(words[:, :half], words[:, half:], lambda *_: words[0], expected[:, :half], expected[:, half:])
        return made.tobytes() == expected.tobytes()


@cache
def loops() -> Loops:
    """Return the loops of this process."""
    return Loops()


def are_kept() -> bool:
    """Return True if earlier processes have kept native code, so that loops need not be compiled."""
    return _kept("word_pairs", "float32") is not None


def _loaded(name: str, letters: str, kind: str) -> int:
    """Return the address of a loop for values of a type, in native code that was kept, or that is made and kept."""
    from llvmlite import binding

    code = _kept(name, kind)
    if code is None:
        compiled, code = _made(name, letters, kind)
        if code is None:
            _OWNERS.append(compiled)
            return compiled.address
        for folder in _folders():
            with suppress(OSError):
                _keep(folder / _file(name, kind), code)
                break
    target = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _OWNERS.append(engine)
    return engine.get_function_address(name)


_OWNERS: list[Any] = []
"""Owners of native code that is used until the process ends."""


def _made(name: str, letters: str, kind: str) -> tuple[Any, bytes | None]:
    """Return a loop that numba has compiled, and its code if it can be kept.

    Garbage is not collected meanwhile, for among numba's many objects there is none.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        from .kernels import compiled, native_code

        loop = compiled(name, letters, kind)
        return loop, native_code(loop, name)
    finally:
        if collects:
            gc.enable()


@cache
def _digest() -> str:
    """Return what native code depends on, as a part of a file's name."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), binding.get_default_triple()
    source = Path(__file__).with_name("kernels.py").read_bytes()
    constants = sorted(ARGUMENTS.items()), int(MARK), float(ROUNDER)
    parts = source, constants, version("numba"), version("llvmlite"), processor
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Yield the folders in which native code may be kept, the best first."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(folder)
        return
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home
        cache = os.environ.get("XDG_CACHE_HOME")
        yield (Path(cache) if cache else Path.home() / ".cache") / "murmurfl"


def _file(name: str, kind: str) -> str:
    return f"{name}-{kind}-{_digest()}.o"


def _kept(name: str, kind: str) -> bytes | None:
    """Return what :func:`_keep` wrote, or None if it is not there or damaged."""
    for folder in _folders():
        with suppress(OSError):
            content = (folder / _file(name, kind)).read_bytes()
            if hashlib.sha256(content[:-32]).digest() == content[-32:]:
                return content[:-32]
    return None


def _keep(path: Path, code: bytes) -> None:
    """Write a file that other processes see as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code + hashlib.sha256(code).digest())
    Path(file.name).replace(path)
