"""Statements of clients, each kept once for all clients that say the same.

Of a million clients most say what thousands of others say: samples, policy and the number of releases settle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Statement = Mapping[str, Any]

MOST_NAMED = 10_000
"""Clients of which each has a statement of its own in a result and its files."""

_DIGITS = 19
"""Digits of a number that is surely below 2^63."""


@dataclass(frozen=True)
class StatementGroup:
    """Clients that say the same: what each says, how many they are, and the name of the first."""

    statement: Statement
    count: int
    first: str


class GroupedStatements(Mapping[str, dict[str, Any]]):
    """The statements of simulated clients, by name, in the order of their names.

    Made of pairs of a statement and the numbers of clients whose it is; a client is in one of them at most, and a
    statement may come several times.
    """

    def __init__(self, parts: Iterable[tuple[Statement, NDArray[np.integer]]]) -> None:
        found: dict[tuple[Any, ...], tuple[Statement, list[NDArray[np.integer]]]] = {}
        for statement, clients in parts:
            if len(clients):
                found.setdefault(tuple(statement.items()), (statement, []))[1].append(np.asarray(clients))
        joined = [(statement, np.sort(np.concatenate(numbers))) for statement, numbers in found.values()]
        self._parts = sorted(joined, key=lambda part: part[1][0])

    @property
    def parts(self) -> list[tuple[Statement, NDArray[np.integer]]]:
        """The distinct statements, and the numbers of the clients of each, ascending."""
        return self._parts

    @property
    def groups(self) -> list[StatementGroup]:
        """The distinct statements, in the order of the first client of each."""
        return [StatementGroup(statement, len(clients), str(clients[0])) for statement, clients in self._parts]

    @cached_property
    def _whose(self) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """The numbers of all clients, ascending, and the place of each one's statement."""
        if not self._parts:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        numbers = np.concatenate([clients for _, clients in self._parts])
        places = np.repeat(np.arange(len(self._parts), dtype=np.int32), [len(clients) for _, clients in self._parts])
        order = np.argsort(numbers, kind="stable")
        return numbers[order], places[order]

    def __len__(self) -> int:
        return sum(len(clients) for _, clients in self._parts)

    def __iter__(self) -> Iterator[str]:
        return map(str, self._whose[0].tolist())

    def __getitem__(self, name: str) -> dict[str, Any]:
        numbers, places = self._whose
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < _DIGITS:
            place = int(np.searchsorted(numbers, int(name)))
            if place < len(numbers) and str(numbers[place]) == name:
                return dict(self._parts[places[place]][0])
        raise KeyError(name)


def said_alike(
    numbers: NDArray[np.integer], columns: Iterable[NDArray[Any]], statement_of: Callable[[int], Statement]
) -> GroupedStatements:
    """Return the statements of clients, of which one is asked for all that say the same.

    Clients that agree in all ``columns``, arrays as long as ``numbers``, say the same; ``said`` gives what the client
    of a number says.
    """
    group = np.zeros(len(numbers), np.int64)
    for column in columns:
        if not len(column) or (column == column[0]).all():
            continue
        distinct, place = np.unique(column, return_inverse=True)
        group = np.unique(group * len(distinct) + place, return_inverse=True)[1]
    order = np.argsort(group, kind="stable")
    parts = np.split(numbers[order], np.flatnonzero(np.diff(group[order])) + 1)
    return GroupedStatements((statement_of(int(part[0])), part) for part in parts if len(part))


def statement_groups(statements: Mapping[str, Statement]) -> list[StatementGroup]:
    """Return the distinct statements of clients, in the order of the first client of each."""
    if isinstance(statements, GroupedStatements):
        return statements.groups
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, statement in statements.items():
        names.setdefault(tuple(statement.items()), []).append(name)
    return [StatementGroup(statements[found[0]], len(found), found[0]) for found in names.values()]


def is_named(statements: Mapping[str, Statement]) -> bool:
    """Return True if so few clients stated something that a result names each of them."""
    return len(statements) <= MOST_NAMED


def listed(statements: Mapping[str, Statement]) -> Mapping[str, Statement]:
    """Statements as a plain dict, unless they are very many."""
    return dict(statements) if is_named(statements) else statements


def stated(statements: Mapping[str, Statement]) -> dict[str, Any]:
    """``clients`` and ``client_groups`` of ``result.json``: each client by name, or groups that say the same."""
    if is_named(statements):
        return {"clients": {name: dict(statement) for name, statement in statements.items()}, "client_groups": None}
    groups = [
        {"clients": group.count, "first": group.first, "statement": dict(group.statement)}
        for group in statement_groups(statements)
    ]
    return {"clients": None, "client_groups": groups}


def releases_made(statements: Mapping[str, Statement]) -> int:
    """Return the releases that all clients together say they made."""
    return sum(group.count * int(group.statement["releases"]) for group in statement_groups(statements))


_NOTHING = -1


class Participation(Mapping[str, "int | None"]):
    """The clients asked in a round, and the number of the release aggregated of each, or None.

    Held as two arrays: clients' numbers, ascending, and as many releases, -1 for None.
    """

    def __init__(self, numbers: NDArray[np.integer], releases: NDArray[np.integer]) -> None:
        self._numbers, self._releases = numbers, releases

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(str, self._numbers.tolist())

    def __getitem__(self, name: str) -> int | None:
        place = int(np.searchsorted(self._numbers, int(name))) if name.isascii() and name.isdigit() else len(self)
        if place == len(self) or str(self._numbers[place]) != name:
            raise KeyError(name)
        release = int(self._releases[place])
        return None if release == _NOTHING else release

    def plain(self) -> dict[str, int | None]:
        """Return the mapping as a dict."""
        releases = (None if release == _NOTHING else release for release in self._releases.tolist())
        return dict(zip(self, releases, strict=True))


def compact(asked: Mapping[str, int | None]) -> Mapping[str, int | None]:
    """Return a mapping as two arrays where its names are ascending numbers; otherwise as it is."""
    digits = "".join(asked)
    if asked and not (digits.isascii() and digits.isdigit()):
        return asked
    try:
        numbers = np.fromiter(map(int, asked), np.int32, len(asked))
        values = asked.values()
        values = [_NOTHING if release is None else release for release in values] if None in values else values
        releases = np.fromiter(values, np.int32, len(asked))
    except (OverflowError, ValueError):
        return asked
    made = Participation(numbers, releases)
    plain = bool((np.diff(numbers) > 0).all()) and all(map(str.__eq__, made, asked))
    return made if plain else asked
