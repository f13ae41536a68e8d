"""All named things with a sentence each: methods, tasks, features, partitions, models, mechanisms, papers.

Everything here is asked of those who know it: the registries, and the docstrings of the mechanisms.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...privacy import MECHANISMS, NO_NOISE
from .registry import registry

_REFERENCE = re.compile(r" \([^()]*ALGORITHMS[^()]*\)")
"""The reference to the papers in a mechanism's docstring."""


@dataclass(frozen=True)
class Shelf:
    """Things of one kind.

    Parameters
    ----------
    how : str
        How one of them is asked for.
    own : bool
        Whether one may bring one's own, as ``package.module:Thing``.
    names : callable
        The built-in names, in their order.
    sentence : callable
        What a name stands for; empty for a name that is not built in.
    """

    title: str
    how: str
    names: Callable[[], Iterable[str]]
    sentence: Callable[[str], str]
    own: bool = True


def _named(key: str, title: str) -> Shelf:
    """The things that a run-config key names."""

    def sentence(name: str) -> str:
        things = registry(key)
        return things[name].sentence if name in things else ""

    return Shelf(title, f"--set {key}=NAME", lambda: tuple(registry(key)), sentence)


def _mechanism_sentence(name: str) -> str:
    if name == NO_NOISE:
        return "No noise at all: to see what noise costs."
    return _REFERENCE.sub("", (inspect.getdoc(MECHANISMS[name]) or "").partition("\n")[0]) if name in MECHANISMS else ""


def _papers() -> Iterable[str]:
    from ..papers import PAPERS

    return tuple(PAPERS)


def _paper_sentence(name: str) -> str:
    from ..papers import PAPERS

    return PAPERS[name].sentence if name in PAPERS else ""


CATALOGUE: dict[str, Shelf] = {
    "strategy": _named("strategy", "Methods"),
    "task": _named("task", "Tasks"),
    "features": _named("features", "Features"),
    "partition": _named("partition", "Partitions"),
    "model": _named("model", "Models"),
    "mechanism": Shelf("Mechanisms", "--set mechanism=NAME", lambda: (*MECHANISMS, NO_NOISE), _mechanism_sentence),
    "paper": Shelf("Papers", "murmurfl reproduce NAME", _papers, _paper_sentence),
}
"""All named things, by the run-config key that names them, and ``paper``."""
