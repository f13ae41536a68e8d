"""Who takes part in a simulation, and who was asked in a round, in a few bytes a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ..settings.run_config import RunConfig
from ..settings.trust_settings import helper_names

_NOTHING = -1


class Participation(Mapping[str, "int | None"]):
    """The machines asked in a round, and the number of the release aggregated of each, or None.

    Parameters
    ----------
    numbers : ndarray of int
        Of the machines, ascending.
    releases : ndarray of int
        As many; -1 for None.
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
        """All of it as a dict."""
        releases = (None if release == _NOTHING else release for release in self._releases.tolist())
        return dict(zip(self, releases, strict=True))


def compact(asked: Mapping[str, int | None]) -> Mapping[str, int | None]:
    """The same in two arrays, where names are numbers in their order; anything else as it is."""
    if not all(name.isascii() and name.isdigit() for name in asked):
        return asked
    try:
        numbers = np.array([int(name) for name in asked], dtype=np.int32)
        releases = np.array([_NOTHING if release is None else release for release in asked.values()], dtype=np.int32)
    except (OverflowError, ValueError):
        return asked
    made = Participation(numbers, releases)
    plain = bool((np.diff(numbers) > 0).all()) and all(map(str.__eq__, made, asked))
    return made if plain else asked


def participant_names(config: RunConfig) -> list[str]:
    """All of them in order, machines first; each is on a node of its own where there are enough nodes."""
    helpers = helper_names(config.helpers) if config.secure else ()
    return [*map(str, range(config.num_clients)), *helpers]
