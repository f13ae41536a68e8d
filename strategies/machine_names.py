"""The names of machines: their order, and the names of so many simulated machines that no list of them is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload


def by_length_and_name(name: str) -> tuple[int, str]:
    """The order of machines: 2 before 10."""
    return len(name), name


class NumberedNames(Sequence[str]):
    """The names of simulated machines, "0" to "M - 1", in their order; a name is made when it is looked at.

    Parameters
    ----------
    count : int
        M.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._count))

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, int):
            return str(range(self._count)[place])
        numbers = range(self._count)[place]
        return NumberedNames(len(numbers)) if numbers == range(len(numbers)) else [str(number) for number in numbers]

    def __contains__(self, name: object) -> bool:
        # Only what str() writes: no sign, no leading zero, and no digits of other scripts.
        if not isinstance(name, str) or not (name.isascii() and name.isdigit()):
            return False
        return len(name) <= len(str(self._count)) and str(int(name)) == name and int(name) < self._count

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return len(self) == len(other)
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((NumberedNames, self._count))

    def __repr__(self) -> str:
        return f"NumberedNames({self._count})"


def in_order(names: Iterable[str]) -> Sequence[str]:
    """Names in the order of machines; those of many simulated machines are in it already."""
    return names if isinstance(names, NumberedNames) else sorted(names, key=by_length_and_name)


def plain_names(names: Sequence[str]) -> list[str] | int:
    """Names as a checkpoint has them: numbered ones as how many there are."""
    return len(names) if isinstance(names, NumberedNames) else list(names)


def restored_names(saved: Any) -> Sequence[str]:
    """What :func:`plain_names` wrote."""
    return NumberedNames(saved) if isinstance(saved, int) else [str(name) for name in saved]
