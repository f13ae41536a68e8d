"""Restore the memory of a model before every sample of a real client.

A model that remembers a sample carries its data into all later gradients: one sample would move all of them.
"""

from __future__ import annotations

import array
import builtins
import collections
import ctypes
import dis
import functools
import gc
import io
import itertools
import operator
import pickle
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...privacy.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_THREADED = """
    _io _thread asyncio concurrent contextlib datetime enum flwr grpc logging matplotlib mlflow multiprocessing murmurfl
    os pathlib pybind11_builtins ray re select socket ssl subprocess tensorboard tensorboardX threading tqdm wandb
"""
_WELL_KNOWN = """
    PIL accelerate bitsandbytes cv2 datasets diffusers einops functorch google h5py hypothesis huggingface_hub jax
    jaxlib joblib keras lightning llvmlite ml_dtypes monai networkx numba numexpr numpy opacus opt_einsum packaging
    pandas peft pluggy polars pyarrow pydantic pydantic_core pytest pytorch_lightning _pytest regex safetensors scipy
    sentence_transformers sentencepiece sklearn sympy tensorflow timm tokenizers torch torch_geometric torchaudio
    torchmetrics torchtext torchvision transformers triton typing_extensions xgboost yaml
"""
_NOT_ENTERED = frozenset(_THREADED.split())
"""Packages whose objects are left alone: files, locks, logs and clientry, which other threads may write to."""
_LIBRARIES = sys.stdlib_module_names | _NOT_ENTERED | frozenset(_WELL_KNOWN.split())
"""Packages whose modules, functions and classes are not read: only their instances remember a sample."""
_CLIENTRY = "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.jit"
_PLAIN = frozenset(
    (
        *(int, float, complex, str, bytes, bool, range, slice, random.SystemRandom),
        *(types.NoneType, types.CodeType, types.EllipsisType, types.NotImplementedType),
        *(types.FrameType, types.TracebackType, types.GenericAlias),
    )
)
_LOST = (
    *("contextvars.ContextVar", "_contextvars.ContextVar", "_queue.SimpleQueue", "_thread._local", "mmap.mmap"),
    *("threading.Barrier", "threading.BoundedSemaphore", "threading.Condition", "threading.Event"),
    *("threading.Semaphore", "decimal.Context", "zlib.Compress", "zlib.Decompress"),
    "torch.storage.UntypedStorage",
)
"""Kinds with state that cannot be read or cannot be restored."""
_VALUES_IN_C = ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._Pointer
_OF_GLOBALS = "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"
_OF_A_DICT = types.MappingProxyType, functools.partial
_MISSING: Any = object()
_MT19937_BYTES = 4 * 624 + 4


class _Live(Protocol):
    """A container that yields its present contents at each iteration."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class _Kept(NamedTuple):
    """A snapshot of a container or other object that refers to objects."""

    place: str
    live: tuple[_Live, ...]  # present references; a mapping's keys, then its values
    before: tuple[Any, ...]
    put_back: Callable[[], Any]

    def now(self) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(self.live))

    def changed(self) -> str | None:
        """Return the place that refers to another value than before; None if there is none."""
        now, values = self.now(), len(self.before) // 2
        if len(now) != len(self.before):
            known = {name for name in self.before if isinstance(name, str)}
            new = [name for name in now if isinstance(name, str) and name not in known]
            return _at(self.place, new[0]) if new else self.place
        for number, (one, other) in enumerate(zip(now, self.before, strict=True)):
            if not _is_equal(one, other):
                return self.place if len(self.live) == 1 else _at(self.place, self.before[number % values])
        return None


class _Value(NamedTuple):
    """A snapshot of a value that is written in place and refers to nothing."""

    place: str
    read: Callable[[], Any]
    before: Any
    put_back: Callable[[], Any]


class NotedDraws(NamedTuple):
    """States of the random generators that all threads of a process share."""

    torch: tuple[torch.Tensor, ...]
    python: Any
    numpy: dict[str, Any]
    numpy_bits: bytes


class _Names:
    """The values of some of a module's names."""

    def __init__(self, of: dict[str, Any], names: list[str]) -> None:
        self._of, self._names = of, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return map(self._of.get, self._names, itertools.repeat(_MISSING))

    def put_back(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(self._names, values, strict=True):
            if value is _MISSING:
                self._of.pop(name, None)
            else:
                self._of[name] = value


class _Slot:
    """The value in an object's slot or a closure's cell."""

    def __init__(self, holder: Any, slot: Any) -> None:
        self._holder, self._slot = holder, slot

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        try:
            yield self._slot.__get__(self._holder)
        except (AttributeError, ValueError):
            yield _MISSING

    def put_back(self, value: Any) -> None:
        if value is _MISSING:
            self._slot.__delete__(self._holder)
        else:
            self._slot.__set__(self._holder, value)


class ModuleState:
    """A snapshot of all that a module and its loss can write to, and the way back to it.

    Notes
    -----
    The snapshot covers whatever the two can reach: attributes, slots, nested containers, arrays and tensors; and of the
    project's own functions and classes closures, defaults, class attributes and the globals that their code names.
    Modules, functions and classes of well-known libraries are not read.

    :meth:`restore` puts all of it back, and the random generators of PyTorch, NumPy and Python, because how much is
    drawn may depend on a sample. :meth:`keep` raises for what it finds and cannot put back: iterators, context
    variables, thread-local values, queues, events, semaphores, conditions, barriers, C values, hashes,
    compressors, decimal contexts, storages and maps of memory.

    It does not find, and so **neither restores nor refuses**: attributes and levels of loggers, progress bars,
    locks, files, ``os.environ``, the current decimal context, warning filters, PyTorch's default type, a
    tensor's storage beyond the tensor, attributes of libraries' modules and classes, their C code, and names made up at
    run time. What a sample leaves there reaches the next ones, and no guarantee covers it.
    """

    def __init__(self, module: torch.nn.Module, loss: Any) -> None:
        import torch

        self._module = module
        self._roots: list[tuple[str, Any]] = [("model", module), ("loss", loss)]
        self._written = self._versions()
        self._generators = [torch.default_generator]
        device = next((one.device for one in module.parameters()), None)
        if device is not None and device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.is_kept = False
        """Whether :meth:`keep` was called."""
        self.note_draws()  # before any sample is read: reading may draw as well

    def add(self, name: str, root: Any) -> None:
        """Add another object to the snapshot, with all that it can reach."""
        self._roots.append((name, root))
        if self.is_kept:
            self._walk(root, name)

    def keep(self) -> None:
        """Take the snapshot; raise if something can remember and cannot be restored."""
        self._seen: dict[Any, Any] = {}
        self._kept: list[_Kept] = []
        self._live: list[_Live] = []
        self._before: list[Any] = []
        self._lengths: list[int] = []
        self._values: list[_Value] = []
        self._cached: list[tuple[Any, int]] = []
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._tensor_versions: list[int] = []
        self._trained = {id(one) for one in self._module.parameters() if one.requires_grad}
        self._named: set[str] = set()
        self._stored: set[str] = set()
        self._modules: dict[str, tuple[types.ModuleType, str]] = {}
        self.is_kept = True
        for name, root in self._roots:
            self._walk(root, name)

    def note_draws(self) -> None:
        """Note the states of the random generators that :meth:`restore` puts back."""
        drawn = np.random.get_state(legacy=False)  # noqa: NPY002 - what others draw from
        # Without the stored normal, whose use would leave no trace in the bits.
        drawn = {**drawn, "has_gauss": 0, "gauss": 0.0}
        np.random.set_state(drawn)  # noqa: NPY002
        states = tuple(one.get_state() for one in self._generators)
        self.noted = NotedDraws(states, random.getstate(), drawn, _numpy_bits())

    def has_drawn(self) -> bool:
        """Return True if this thread or another drew from a random generator since :meth:`note_draws`."""
        import torch

        states = zip(self._generators, self.noted.torch, strict=True)
        return (
            any(not torch.equal(one.get_state(), state) for one, state in states)
            or _numpy_bits() != self.noted.numpy_bits
            or random.getstate() != self.noted.python
        )

    def written_constants(self) -> list[str] | None:
        """Names of buffers and frozen parameters that were written to or replaced; None if none were."""
        now = self._versions()
        if now == self._written:
            return None
        return [name for name, state in self._written.items() if now.get(name) != state]

    def changed(self) -> str | None:
        """Return the first place whose value differs from the snapshot; None if there is none."""
        found = (kept.changed() for kept in self._kept)
        values = (one.place for one in self._values if one.read() != one.before)
        tensors = (place for place, tensor, copy in self._tensors if not _is_same(tensor, copy))
        place = next(filter(None, itertools.chain(found, values, tensors)), None)
        return None if place is None else _readable(place)

    def restore(self, *, values: bool) -> None:
        """Put the snapshot back, or take it if there is none.

        With ``values`` tensors are compared too: outside of ``torch.func.grad`` a write may escape PyTorch's count of
        writes.
        """
        if not self.is_kept:
            self.keep()
        as_long = list(map(len, self._live)) == self._lengths
        if not (as_long and all(map(operator.is_, itertools.chain.from_iterable(self._live), self._before))):
            for kept in self._kept:
                now = kept.now()
                if len(now) != len(kept.before) or not all(map(operator.is_, now, kept.before)):
                    kept.put_back()
        for value in self._values:
            if value.read() != value.before:
                value.put_back()
        for function, misses in self._cached:
            if function.cache_info().misses != misses:
                function.cache_clear()
        self._restore_tensors(values=values)
        self.restore_draws()
        self._written = self._versions()

    def restore_draws(self) -> None:
        """Put the random generators back to their noted states (:meth:`note_draws`)."""
        for generator, state in zip(self._generators, self.noted.torch, strict=True):
            generator.set_state(state)
        random.setstate(self.noted.python)
        if _numpy_bits() != self.noted.numpy_bits:
            np.random.set_state(self.noted.numpy)  # noqa: NPY002

    def _restore_tensors(self, *, values: bool) -> None:
        import torch

        versions = [tensor._version for _, tensor, _ in self._tensors]
        if versions == self._tensor_versions and not values:
            return
        for number, (_, tensor, copy) in enumerate(self._tensors):
            if versions[number] != self._tensor_versions[number] or not _is_same(tensor, copy):
                with torch.no_grad():
                    tensor.copy_(copy)
                self._tensor_versions[number] = tensor._version

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Identity and write count of every tensor that is not trained."""
        frozen = {name: values for name, values in self._module.named_parameters() if not values.requires_grad}
        return {
            name: (id(values), values._version)  # PyTorch's own count of writes, which autograd relies on
            for name, values in {**frozen, **dict(self._module.named_buffers())}.items()
        }

    def _walk(self, root: Any, name: str) -> None:
        """Add all that an object can reach to the snapshot."""
        left = [(root, name)]
        while left:
            while left:
                found, place = left.pop()
                if type(found) not in _PLAIN and id(found) not in self._seen:
                    self._seen[id(found)] = found
                    left += reversed(list(self._visit(found, place)))
            for module, place in self._modules.values():  # their names are known only once all code was found
                names = (self._named & vars(module).keys()) | self._stored
                left += self._keep_names(vars(module), names, place)

    def _visit(self, found: Any, place: str) -> Iterator[tuple[Any, str]]:
        """Add an object to the snapshot, and yield what it refers to with the place."""
        import torch

        kind = type(found)
        if any(found is one for one in (*self._generators, *_shared_generators())):
            return  # other threads draw from it: has_drawn and restore_draws see to it
        if issubclass(kind, types.ModuleType):
            if not _is_library(found.__name__):
                self._modules[found.__name__] = found, place
        elif kind is types.FunctionType:
            yield from self._visit_function(found, place)
        elif issubclass(kind, type):
            yield from self._visit_class(found, place)
        elif issubclass(kind, weakref.ref):
            yield found(), place
        elif kind is types.CellType:
            yield self._keep_slot(found, types.CellType.cell_contents, place)
        elif kind in (types.BuiltinMethodType, types.MethodWrapperType):
            yield (None if isinstance(found.__self__, types.ModuleType) else found.__self__), place
        elif issubclass(kind, functools._lru_cache_wrapper):
            self._cached.append((found, found.cache_info().misses))
            yield found.__wrapped__, place
            yield found.__dict__, f"{place}."
            yield from ((one, f"{place}.<cache>") for one in _results(found))
        elif (access := _access(found)) is not None:
            yield from self._visit_value(found, place, *access)
        elif issubclass(kind, torch.nn.Module) or not _is_left_alone(kind) or _is_lost(found):
            if issubclass(kind, torch.Tensor) and id(found) not in self._trained and not found.is_inference():
                # Trained parameters are handed in anew for every sample; inference tensors cannot be written to.
                self._tensors.append((place, found, found.detach().clone()))
                self._tensor_versions.append(found._version)
            yield from self._visit_object(found, place)

    def _visit_value(
        self, found: Any, place: str, read: Callable[[], Any], write: Callable[[Any], Any]
    ) -> Iterator[tuple[Any, str]]:
        """Visit what can be read and written as a whole, such as an array."""
        import torch

        before = read()
        self._values.append(_Value(place, read, before, functools.partial(write, before)))
        if isinstance(found, np.ndarray):
            if found.dtype.hasobject:
                yield found.ravel().tolist(), place
            if isinstance(found.base, np.ndarray | torch.Tensor | bytearray | array.array):
                yield found.base, f"{place}.base"

    def _visit_object(self, found: Any, place: str) -> Iterator[tuple[Any, str]]:
        """Visit an object with attributes or items, or an opaque one."""
        kind = type(found)
        attributes, slots = getattr(found, "__dict__", None), list(_slots(kind))
        if type(attributes) is dict:
            yield attributes, f"{place}."
        for slot in slots:
            yield self._keep_slot(found, slot, f"{place}.{slot.__name__}")
        if issubclass(kind, dict):
            yield from self._visit_mapping(found, place)
        elif (refill := next((fill for base, fill in _REFILLED.items() if issubclass(kind, base)), None)) is not None:
            refill(found, tuple(found))  # a set's order depends on its history: from now on on this
            before = tuple(found)
            self._note(place, (found,), before, functools.partial(refill, found, before))
            yield from ((one, f"{place}[{number}]") for number, one in enumerate(before))
        elif issubclass(kind, tuple | frozenset):
            yield from ((one, f"{place}[{number}]") for number, one in enumerate(found))
        else:
            if _is_lost(found) or (type(attributes) is not dict and not slots):
                _check_put_back(found, place)
            yield from ((one, place) for one in _referents(found))
        yield kind, f"{place}.<class {kind.__name__}>"

    def _visit_mapping(self, found: dict[Any, Any], place: str) -> Iterator[tuple[Any, str]]:
        base: Any = collections.OrderedDict if isinstance(found, collections.OrderedDict) else dict
        keys, values = tuple(base.keys(found)), tuple(base.values(found))

        def put_back() -> None:
            base.clear(found)
            base.update(found, zip(keys, values, strict=True))

        live = (base.keys(found), base.values(found)) if keys else (base.keys(found),)  # most hook dicts are empty
        self._note(place, live, keys + values, put_back)
        yield from ((key, place) for key in keys)
        yield from ((value, _at(place, key)) for key, value in zip(keys, values, strict=True))

    def _visit_class(self, found: type, place: str) -> Iterator[tuple[Any, str]]:
        """Visit a class: attributes and methods if it is the project's, and its bases."""
        if not _is_library(found.__module__):
            attributes = vars(found)
            before = dict(attributes)

            def put_back() -> None:
                for name in set(attributes) - set(before):
                    type.__delattr__(found, name)
                for name, value in before.items():
                    if attributes.get(name, _MISSING) is not value:
                        type.__setattr__(found, name, value)

            live = attributes.keys(), attributes.values()
            self._note(f"{place}.", live, (*before, *before.values()), put_back)
            yield from ((value, f"{place}.{name}") for name, value in before.items())
        yield from ((base, f"{place}.<class {base.__name__}>") for base in (*found.__mro__[1:], type(found)))

    def _visit_function(self, found: types.FunctionType, place: str) -> Iterator[tuple[Any, str]]:
        """Visit a function: closure, defaults, attributes, and the globals that its code names."""
        module = str(found.__globals__.get("__name__"))
        if _top(module) in _NOT_ENTERED:
            return
        for name, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            yield cell, f"{place}.<closure {name}>"
        yield from ((value, f"{place}.<default>") for value in found.__defaults__ or ())
        yield found.__kwdefaults__, f"{place}.<default>"
        if _is_library(module):  # a library's wrapper may wrap a function of the project
            yield found.__dict__.get("__wrapped__"), place
        else:
            yield found.__dict__, f"{place}."
            yield from self._visit_code(found.__code__, found.__globals__, place)

    def _visit_code(self, code: types.CodeType, scope: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
        """Visit the globals that code names and the modules that it imports."""
        by_step: dict[str, set[str]] = collections.defaultdict(set)
        for step in dis.get_instructions(code):
            if isinstance(step.argval, str):
                by_step[step.opname].add(step.argval)
        self._named.update(code.co_names)
        self._stored.update(by_step["STORE_ATTR"])
        named = set().union(*(by_step[step] for step in _OF_GLOBALS))
        if "globals" in named:
            named |= {text for text in code.co_consts if isinstance(text, str) and text in scope}
        names = {name for name in named if name in scope or not hasattr(builtins, name)}
        yield from self._keep_names(scope, names, place)
        parents = str(scope.get("__package__") or "").split(".")
        for imported in by_step["IMPORT_NAME"]:  # a relative import does not name its parent
            absolute = {".".join([*parents[:depth], imported]).strip(".") for depth in range(len(parents) + 1)}
            yield from ((sys.modules.get(name), name) for name in absolute)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from self._visit_code(inner, scope, place)

    def _keep_names(self, of: dict[str, Any], names: set[str], place: str) -> list[tuple[Any, str]]:
        """Add the values of a module's names to the snapshot, and return them."""
        new = sorted(name for name in names if (id(of), name) not in self._seen)
        if not new:
            return []
        self._seen.update({(id(of), name): of for name in new})
        live, place = _Names(of, new), f"{place}.<global>"
        before = tuple(live)
        self._note(place, (new, live), (*new, *before), functools.partial(live.put_back, before))
        return [(value, _at(place, name)) for name, value in zip(new, before, strict=True)]

    def _keep_slot(self, holder: Any, slot: Any, place: str) -> tuple[Any, str]:
        live = _Slot(holder, slot)
        before = next(iter(live))
        self._note(place, (live,), (before,), functools.partial(live.put_back, before))
        return before, place

    def _note(self, place: str, live: tuple[_Live, ...], before: tuple[Any, ...], put_back: Callable[[], Any]) -> None:
        self._kept.append(_Kept(place, live, before, put_back))
        self._live += live
        self._before += before
        self._lengths += map(len, live)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _is_library(module: Any) -> bool:
    return _top(str(module)) in _LIBRARIES


def _is_left_alone(kind: type) -> bool:
    return _top(str(kind.__module__)) in _NOT_ENTERED or str(kind.__module__).startswith(_CLIENTRY)


def _is_lost(found: Any) -> bool:
    """Return True if an object's state cannot be read or restored: those of the kinds above, hashes and C values."""
    kind = type(found)
    return _name(kind) in _LOST or hasattr(kind, "hexdigest") or isinstance(found, _VALUES_IN_C)


def _slots(kind: type) -> Iterator[Any]:
    """Slots declared by classes written in Python."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (one for one in vars(base).values() if type(one) is types.MemberDescriptorType)


def _check_put_back(found: Any, place: str) -> None:
    """Raise if an object has state in C, which cannot be restored."""
    kind = type(found)
    name = _name(kind)
    unknown = not _is_library(kind.__module__) and not any("__slots__" in vars(base) for base in kind.__mro__)
    if unknown or _is_lost(found) or hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
        raise ConfigurationError(
            f"Expected a model and a loss whose memory can be put back, got {name} at {_readable(place)}: one sample's "
            "data could reach the next there. Make it anew in every call, or leave it out.",
            kind="unsupported",
        )


def _results(cached: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """Results in a function's cache, without the cache's own mapping, which breaks when written to."""
    if not cached.cache_info().currsize:
        return []
    found = gc.get_referents(cached)
    if cached.cache_parameters()["maxsize"] is None:
        return list(next(one for one in found if type(one) is dict).values())
    links = "_lru_list_elem"
    return [one for one in found if type(one) is not dict or all(type(e).__name__ != links for e in one.values())]


def _referents(found: Any) -> Iterator[Any]:
    """Yield what an opaque object refers to, and the values of dicts internal to C code, which writing may break."""
    for one in gc.get_referents(found):
        if type(one) is not dict or (type(found) in _OF_A_DICT and "__module__" not in one):
            yield one
        else:
            yield from one.values()


def _access(found: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Reader and writer of an object's contents; None if it may refer to other objects."""
    import torch

    if isinstance(found, np.ndarray):
        if not found.flags.writeable:
            return (lambda: None), (lambda _: None)
        copy = found.copy()
        bits = (lambda: list(map(id, found.ravel().tolist()))) if found.dtype.hasobject else found.tobytes
        return bits, lambda _: np.copyto(found, copy)
    if isinstance(found, bytearray | array.array):
        return (lambda: found[:]), lambda before: operator.setitem(found, slice(None), before)
    if isinstance(found, np.random.Generator | np.random.RandomState):
        found = getattr(found, "bit_generator", None) or found
    if isinstance(found, np.random.RandomState):
        legacy = found.get_state(legacy=False)
        return (lambda: pickle.dumps(found.get_state(legacy=False))), lambda _: found.set_state(legacy)
    if isinstance(found, np.random.BitGenerator):
        state = found.state
        return (lambda: pickle.dumps(found.state)), lambda _: setattr(found, "state", state)
    if isinstance(found, torch.Generator):
        tensor = found.get_state()
        return (lambda: found.get_state().numpy().tobytes()), lambda _: found.set_state(tensor)
    if isinstance(found, random.Random) and not isinstance(found, random.SystemRandom):
        return found.getstate, found.setstate
    if isinstance(found, io.StringIO | io.BytesIO):
        return found.__getstate__, found.__setstate__  # type: ignore[attr-defined]
    return None


def _shared_generators() -> tuple[Any, ...]:
    """Return the generators of Python and NumPy that all threads share."""
    shared = np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(random.random, "__self__", None), shared, shared._bit_generator


def _numpy_bits() -> bytes:
    """Return the bits of NumPy's global generator, faster than its whole state (50 microseconds)."""
    generator = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(generator.state)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return True if two tensors are equal to the last bit; kinds without readable bits count as equal."""
    import torch

    try:
        return tensor.shape == copy.shape and torch.equal(_bits(tensor), _bits(copy))
    except (RuntimeError, NotImplementedError):
        return True


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if a replaced object has an equal value: a shape noted in every call is no memory."""
    import torch

    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and _is_same(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, tuple | list | dict):
        parts = (list(each.items() if isinstance(each, dict) else each) for each in (one, other))
        return len(one) == len(other) and all(itertools.starmap(_is_equal, zip(*parts, strict=True)))
    if isinstance(one, weakref.ref):
        return True  # something else holds its referent, or it is gone
    return type(one) in _PLAIN and repr(one) == repr(other)


def _refill_deque(found: collections.deque[Any], before: tuple[Any, ...]) -> None:
    found.clear()
    found.extend(before)


def _refill_set(found: set[Any], before: tuple[Any, ...]) -> None:
    found.clear()
    found.update(before)


_REFILLED: dict[type, Callable[[Any, tuple[Any, ...]], None]] = {
    list: lambda found, before: operator.setitem(found, slice(None), before),
    collections.deque: _refill_deque,
    set: _refill_set,
}


def _at(place: str, key: Any) -> str:
    """Return the place of a key, or of an attribute if ``place`` ends with a dot."""
    return f"{place}{key}" if place.endswith(".") else f"{place}[{str(key)[:40]!r}]"


def _readable(place: str) -> str:
    """Return a place as people write it, with a module's layers and buffers as attributes."""
    return re.sub(r"\._(?:modules|buffers|parameters)\['([^']*)'\]", r".\1", place).rstrip(".")
