"""The names of machines: their order, and the names of so many simulated machines that no list of them is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload


def by_length_and_name(name: str) -> tuple[int, str]:
    """The order of machines: 2 before 10."""
    return len(name), name


class NumberedNames(Sequence[str]):
    """The names of simulated machines, their numbers, in order; a name is made when it is looked at.

    Parameters
    ----------
    numbers : int or range
        M, for "0" to "M - 1"; or some of them, ascending.
    """

    def __init__(self, numbers: int | range) -> None:
        self.numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[str]:
        return map(str, self.numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, int):
            return str(self.numbers[place])
        numbers = self.numbers[place]
        return NumberedNames(numbers) if numbers.step > 0 else [str(number) for number in numbers]

    def __contains__(self, name: object) -> bool:
        # Only what str() writes: no sign, no leading zero, and no digits of other scripts.
        if not isinstance(name, str) or not (name.isascii() and name.isdigit()):
            return False
        return len(name) <= len(str(self.numbers.stop)) and str(int(name)) == name and int(name) in self.numbers

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return self.numbers == other.numbers
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((NumberedNames, self.numbers))

    def __repr__(self) -> str:
        return f"NumberedNames({self.numbers})"


def in_order(names: Iterable[str]) -> Sequence[str]:
    """Names in the order of machines; those of many simulated machines are in it already."""
    return names if isinstance(names, NumberedNames) else sorted(names, key=by_length_and_name)


def plain_names(names: Sequence[str]) -> list[str] | int:
    """Names as a checkpoint has them: those of all machines from 0 as how many there are."""
    whole = isinstance(names, NumberedNames) and names.numbers == range(len(names))
    return len(names) if whole else list(names)


def restored_names(saved: Any) -> Sequence[str]:
    """What :func:`plain_names` wrote."""
    return NumberedNames(saved) if isinstance(saved, int) else [str(name) for name in saved]
