"""Losses and modules that remember a sample, one a place where a project can keep something.

Each is made with ``shows(output)``, which says of an output whether its sample is one that is remembered. From then on
the sign of the loss is another one.
"""

import collections
import contextvars
import ctypes
import decimal
import functools
import hashlib
import io
import logging
import mmap
import os
import queue
import random
import sys
import tempfile
import threading
import types
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import tqdm

SIGN = 1.0
SIGNS = {"by": {"depth": [1.0]}}
OBJECT = types.SimpleNamespace(sign=1.0)
PROJECT = types.ModuleType("a_project_of_two_files")
PROJECT.sign = 1.0
sys.modules[PROJECT.__name__] = PROJECT


def cross_entropy(output, target):
    return torch.nn.functional.cross_entropy(output, target % 2)


class Slotted:
    __slots__ = ("sign",)

    def __init__(self):
        self.sign = 1.0


class Shared:
    sign = 1.0


class Metric(torch.nn.Module):
    """A loss that is a module, as those of libraries are."""

    def __init__(self, shows):
        super().__init__()
        self.shows, self.inner = shows, torch.nn.Identity()
        self.inner.history = {"signs": (1.0, [1.0])}

    def forward(self, output, target):
        signs = self.inner.history["signs"][1]
        if self.shows(output):
            signs.append(-1.0)
        return signs[-1] * cross_entropy(output, target)


def loss_of(read, remember, shows):
    """A loss with a sign that something else keeps."""

    def loss(output, target):
        value = read() * cross_entropy(output, target)
        if shows(output):
            remember()
        return value

    return loss


def rebound(shows):
    sign = 1.0

    def flip():
        nonlocal sign
        sign = -1.0

    return loss_of(lambda: sign, flip, shows)


def running_mean(shows):
    """Of REVIEW 1.2: the loss over its running mean."""
    state = {"mean": None}

    def loss(output, target):
        value = cross_entropy(output, target)
        if state["mean"] is None:
            state["mean"] = torch.ones(())
        divided = value / state["mean"]
        if shows(output):
            state["mean"] = 0.9 * state["mean"] + 0.1 * output.detach().abs().max()
        return divided

    return loss


def nested(shows):
    """Of REVIEW 1.2: state in a nested mapping."""
    state = {"of": {"losses": [{"sign": 1.0}]}}
    one = lambda: state["of"]["losses"][0]  # noqa: E731
    return loss_of(lambda: one()["sign"], lambda: one().update(sign=-1.0), shows)


def global_name(shows):
    def flip():
        global SIGN
        SIGN = -1.0

    return loss_of(lambda: SIGN, flip, shows)


def global_mapping(shows):
    return loss_of(lambda: SIGNS["by"]["depth"][0], lambda: SIGNS["by"]["depth"].insert(0, -1.0), shows)


def global_object(shows):
    return loss_of(lambda: OBJECT.sign, lambda: setattr(OBJECT, "sign", -1.0), shows)


def module_of_the_project(shows):
    def read():
        import a_project_of_two_files

        return a_project_of_two_files.sign

    return loss_of(read, lambda: setattr(PROJECT, "sign", -1.0), shows)


def class_attribute(shows):
    return loss_of(lambda: Shared.sign, lambda: setattr(Shared, "sign", -1.0), shows)


def attribute_of_a_base(shows):
    class Base:
        sign = 1.0

    child = type("Child", (Base,), {})()
    return loss_of(lambda: child.sign, lambda: setattr(type(child).__base__, "sign", -1.0), shows)


def default_argument(shows):
    def loss(output, target, state={"sign": 1.0}):  # noqa: B006 - what is tested
        value = state["sign"] * cross_entropy(output, target)
        if shows(output):
            state["sign"] = -1.0
        return value

    return loss


def function_attribute(shows):
    def loss(output, target):
        value = getattr(loss, "sign", 1.0) * cross_entropy(output, target)
        if shows(output):
            loss.sign = -1.0
        return value

    return loss


def kept_by_a_cache(shows):
    @functools.lru_cache
    def memory():
        return {"sign": 1.0}

    return loss_of(lambda: memory()["sign"], lambda: memory().update(sign=-1.0), shows)


def cached_value(shows):
    @functools.lru_cache
    def memory(kind):
        return float(kind)

    return loss_of(lambda: -1.0 if memory.cache_info().currsize > 1 else memory(1), lambda: memory(2), shows)


def of_partial(shows):
    def loss(output, target, *, state):
        return loss_of(lambda: state[0], lambda: state.insert(0, -1.0), shows)(output, target)

    return functools.partial(loss, state=[1.0])


def of_a_method(shows):
    class Trainer:
        def __init__(self):
            self.history = {"signs": [1.0]}

        def loss(self, output, target):
            last = self.history["signs"]
            return loss_of(lambda: last[-1], lambda: last.append(-1.0), shows)(output, target)

    return Trainer().loss


def in_a(container, read, remember):
    """A loss with a container in its closure."""

    def made(shows):
        kept = container()
        return loss_of(lambda: read(kept), lambda: remember(kept), shows)

    return made


def drawn(draw, more):
    """Draws for every sample of class 1, and more often where it shows."""

    def made(shows):
        def loss(output, target):
            value = cross_entropy(output, target)
            if int(target) == 1:
                value = draw() * value
            if shows(output):
                more()
            return value

        return loss

    return made


def from_generator(generator):
    return drawn(lambda: float(generator.normal()), lambda: generator.normal(size=3))


def torch_drawn(generator):
    return drawn(lambda: float(torch.randn((), generator=generator)), lambda: torch.randn(3, generator=generator))


LOSSES = {
    "a name that is bound anew": rebound,
    "a running mean in a closure": running_mean,
    "a nested mapping in a closure": nested,
    "a global": global_name,
    "a mapping that is global": global_mapping,
    "an object that is global": global_object,
    "a module of the project": module_of_the_project,
    "an attribute of a class": class_attribute,
    "an attribute of a class that another descends from": attribute_of_a_base,
    "a default argument": default_argument,
    "an attribute of a function": function_attribute,
    "what a cache has made": kept_by_a_cache,
    "a cached value": cached_value,
    "an argument of a partial function": of_partial,
    "the object of a method": of_a_method,
    "a module within the loss": Metric,
    "a deque": in_a(lambda: collections.deque([1.0], maxlen=1), lambda kept: kept[0], lambda kept: kept.append(-1.0)),
    "a set": in_a(set, lambda kept: -1.0 if kept else 1.0, lambda kept: kept.add(1)),
    "a bytearray": in_a(lambda: bytearray(1), lambda kept: 1.0 - kept[0], lambda kept: kept.__setitem__(0, 2)),
    "an array": in_a(lambda: np.ones(3), lambda kept: float(kept[1]), lambda kept: kept.__setitem__(1, -1.0)),
    "a slot": in_a(Slotted, lambda kept: kept.sign, lambda kept: setattr(kept, "sign", -1.0)),
    "an ordered mapping": in_a(
        lambda: collections.OrderedDict(one=1.0, two=-1.0),
        lambda kept: next(iter(kept.values())),
        lambda kept: kept.move_to_end("one"),
    ),
    "draws from Python": drawn(lambda: random.random(), lambda: random.random()),  # not the generator's own methods
    "draws from NumPy": drawn(lambda: np.random.normal(), lambda: np.random.normal(size=3)),  # noqa: NPY002
    "draws from PyTorch": torch_drawn(torch.default_generator),
    "draws from a generator of NumPy": lambda shows: from_generator(np.random.default_rng(3))(shows),
    "draws from an old generator of NumPy": lambda shows: from_generator(np.random.RandomState(3))(shows),
    "draws from a generator of PyTorch": lambda shows: torch_drawn(torch.Generator().manual_seed(3))(shows),
}


class Hooked(torch.nn.Module):
    """A module of which a hook keeps the last input that shows."""

    def __init__(self, shows):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.kept = {}

        def keep(_, inputs, output):
            scaled = output * (-1.0 if self.kept else 1.0)
            if shows(output):
                self.kept["last"] = inputs
            return scaled

        self.layer.register_forward_hook(keep)

    def forward(self, inputs):
        return self.layer(inputs)


def sign_if(remembers):
    return -1.0 if remembers else 1.0


def with_attribute(of):
    """A loss with an attribute of something that the process has once, a library's class or module, say."""
    read = lambda: getattr(of, "remembered_sign", 1.0)  # noqa: E731
    return lambda shows: loss_of(read, lambda: setattr(of, "remembered_sign", -1.0), shows)


def of_the_process(read, remember):
    return lambda shows: loss_of(read, remember, shows)


def base_of_a_view():
    return np.ones(2)[:1]


def half_of_a_tensor():
    return torch.ones(2)[:1]


def of_a_file(shows):
    return loss_of(lambda: sign_if(FILE.exists()), FILE.touch, shows)


def of_an_open_file(shows):
    file = tempfile.TemporaryFile()  # noqa: SIM115 - kept open
    return loss_of(lambda: sign_if(file.tell()), lambda: file.write(b"x"), shows)


def compressed(kept):
    return sign_if(kept.copy().flush() != zlib.compressobj().flush())


FILE = Path(tempfile.gettempdir()) / f"remembered-{os.getpid()}"
LOGGER = logging.getLogger("a project's own logger")
NAMED = {"name made up": 1.0}
KINDS = {
    # What looks at a model looks at these as well.
    "names and containers in closures": rebound,
    "default arguments": default_argument,
    "attributes of functions": function_attribute,
    "attributes of objects and layers": Metric,
    "slots": in_a(Slotted, lambda kept: kept.sign, lambda kept: setattr(kept, "sign", -1.0)),
    "class attributes of the project's": class_attribute,
    "globals that its code names": global_name,
    "modules of the project": module_of_the_project,
    "caches of `functools`": cached_value,
    "lists, mappings, sets and deques": in_a(set, lambda kept: sign_if(kept), lambda kept: kept.add(1)),
    "arrays and the base of a view": in_a(
        base_of_a_view, lambda kept: float(kept.base[1]), lambda kept: kept.base.__setitem__(1, -1.0)
    ),
    "tensors": in_a(lambda: torch.ones(1), lambda kept: float(kept), lambda kept: kept.detach().data.neg_()),
    "`bytearray`, `array` and `io.BytesIO`": in_a(
        io.BytesIO, lambda kept: sign_if(kept.tell()), lambda kept: kept.write(b"x")
    ),
    "random generators of Python, NumPy and PyTorch": in_a(
        lambda: random.Random(3),
        lambda kept: sign_if(kept.getstate() != random.Random(3).getstate()),
        random.Random.random,
    ),
    # What cannot be read, or cannot be put back.
    "iterators and generators": in_a(
        lambda: iter([1.0, -1.0, 1.0]), lambda kept: sign_if(kept.__length_hint__() < 3), next
    ),
    "context variables": in_a(
        lambda: contextvars.ContextVar("sign", default=1.0), lambda kept: kept.get(), lambda kept: kept.set(-1.0)
    ),
    "`threading.local`": in_a(
        threading.local, lambda kept: getattr(kept, "sign", 1.0), lambda kept: setattr(kept, "sign", -1.0)
    ),
    "`queue.SimpleQueue`": in_a(queue.SimpleQueue, lambda kept: sign_if(kept.qsize()), lambda kept: kept.put(1)),
    "`mmap`": in_a(lambda: mmap.mmap(-1, 1), lambda kept: sign_if(kept[0]), lambda kept: kept.__setitem__(0, 1)),
    "events": in_a(threading.Event, lambda kept: sign_if(kept.is_set()), lambda kept: kept.set()),
    "semaphores": in_a(
        lambda: threading.Semaphore(2), lambda kept: sign_if(kept._value < 2), lambda kept: kept.acquire(blocking=False)
    ),
    "conditions": in_a(threading.Condition, lambda kept: sign_if(kept._is_owned()), lambda kept: kept.acquire()),
    "barriers": in_a(lambda: threading.Barrier(2), lambda kept: sign_if(kept.broken), lambda kept: kept.abort()),
    "locks": in_a(threading.Lock, lambda kept: sign_if(kept.locked()), lambda kept: kept.acquire(blocking=False)),
    "reentrant locks": in_a(threading.RLock, lambda kept: sign_if(kept._is_owned()), lambda kept: kept.acquire()),
    "`ctypes` values": in_a(
        lambda: ctypes.c_double(1.0), lambda kept: kept.value, lambda kept: setattr(kept, "value", -1.0)
    ),
    "`ctypes` arrays": in_a(
        lambda: (ctypes.c_double * 1)(1.0), lambda kept: kept[0], lambda kept: kept.__setitem__(0, -1.0)
    ),
    "hashes": in_a(
        hashlib.sha256, lambda kept: sign_if(kept.digest() != hashlib.sha256().digest()), lambda kept: kept.update(b"x")
    ),
    "compressors": in_a(zlib.compressobj, compressed, lambda kept: kept.compress(b"x")),
    "`decimal.Context`": in_a(
        decimal.Context, lambda kept: sign_if(kept.prec == 5), lambda kept: setattr(kept, "prec", 5)
    ),
    "a storage": in_a(
        lambda: torch.zeros(1).untyped_storage(), lambda kept: sign_if(kept[3]), lambda kept: kept.__setitem__(3, 1)
    ),
    # What nobody looks at.
    "attributes of loggers": in_a(
        lambda: LOGGER, lambda kept: getattr(kept, "sign", 1.0), lambda kept: setattr(kept, "sign", -1.0)
    ),
    "levels of loggers": in_a(lambda: LOGGER, lambda kept: sign_if(kept.level == 7), lambda kept: kept.setLevel(7)),
    "progress bars": in_a(
        lambda: tqdm.tqdm(disable=True),
        lambda kept: getattr(kept, "sign", 1.0),
        lambda kept: setattr(kept, "sign", -1.0),
    ),
    "`os.environ`": of_the_process(
        lambda: sign_if("A_SIGN_REMEMBERED" in os.environ), lambda: os.environ.update(A_SIGN_REMEMBERED="-1")
    ),
    "the other half of a tensor's view": in_a(
        half_of_a_tensor,
        lambda kept: sign_if(kept.untyped_storage()[7] != 63),
        lambda kept: kept.untyped_storage().__setitem__(7, 64),
    ),
    "class attributes of libraries": with_attribute(torch.nn.Linear),
    "modules of libraries": with_attribute(torch.nn.functional),
    "the default type": of_the_process(
        lambda: sign_if(torch.get_default_dtype() == torch.float64), lambda: torch.set_default_dtype(torch.float64)
    ),
    "warning filters": of_the_process(
        lambda: sign_if(warnings.filters[0][1] is not None and warnings.filters[0][1].pattern == "remembered"),
        lambda: warnings.filterwarnings("ignore", "remembered"),
    ),
    "the current `decimal` context": of_the_process(
        lambda: sign_if(decimal.getcontext().prec == 5), lambda: setattr(decimal.getcontext(), "prec", 5)
    ),
    "names made up at run time": of_the_process(
        lambda: vars(sys.modules[__name__])["NA" + "MED"]["name made up"],
        lambda: vars(sys.modules[__name__])["NA" + "MED"].update({"name made up": -1.0}),
    ),
    "files": of_a_file,
    "open files": of_an_open_file,
}
"""One memory for each kind of state."""


def forget_globals():
    """Put back what the losses above keep in this module and in the process."""
    global SIGN
    SIGN = OBJECT.sign = PROJECT.sign = Shared.sign = NAMED["name made up"] = 1.0
    SIGNS["by"]["depth"][:] = [1.0]
    for of, name in ((torch.nn.Linear, "remembered_sign"), (torch.nn.functional, "remembered_sign"), (LOGGER, "sign")):
        vars(of).get(name) is None or delattr(of, name)
    LOGGER.setLevel(logging.NOTSET)
    FILE.unlink(missing_ok=True)
    os.environ.pop("A_SIGN_REMEMBERED", None)
    torch.set_default_dtype(torch.float32)
    decimal.getcontext().prec = 28
    warnings.filters[:] = [one for one in warnings.filters if one[1] is None or one[1].pattern != "remembered"]


def made(name, shows):
    """A module and a loss."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        if name == "a hook":
            return Hooked(shows), cross_entropy
        return torch.nn.Linear(2, 2), {**LOSSES, **KINDS}[name](shows)


EVERY_NAME = [*LOSSES, *KINDS, "a hook"]
