"""Noise that skipped sums leave behind in the sum of all sums.

Helpers have recorded the set of a skipped sum, so its releases are never opened again, and what clients say from now
on is built on them: of a stream, their part is missing from the sum of all. So is its noise, unless a client's next
release mends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ...privacy.accounting.noise_forecast import lasting_noise
from ...privacy.mechanisms import MECHANISMS, make_mechanism
from ...privacy.release.policy import ReleaseMode
from .summation import CohortSet

_MOST_RELEASES = 2048  # for which a mechanism's matrix is made, to say what skipped sums left behind


class LostNoise:
    """The releases whose noise skipped sums have taken out of the sum of all sums, by client."""

    def __init__(self) -> None:
        self.lost: dict[str, list[list[int]]] = {}
        """Intervals of lost noise of each client that was ever in a skipped sum."""
        self.skipped: dict[str, int] = {}
        """Clients whose last sum was skipped, and after which release noise is lost."""

    def opened(self, held: CohortSet, acks: Mapping[str, int]) -> None:
        """Note that a sum of releases built on ``acks`` enters the model."""
        for name in held.releases:
            self._noise_begins(held, name, acks)
            self.skipped.pop(name, None)

    def skip(self, held: CohortSet, acks: Mapping[str, int]) -> None:
        """Note that nothing of a sum of releases built on ``acks`` enters the model."""
        for name in held.releases:
            self.lost.setdefault(name, [])
            self.skipped[name] = self._noise_begins(held, name, acks)

    def _noise_begins(self, held: CohortSet, name: str, acks: Mapping[str, int]) -> int:
        """After which release the noise in one of a set begins; what was skipped before and is not mended is lost."""
        ack = acks.get(name, 0)
        begins = self.skipped.get(name, ack)
        if begins == ack or name in held.recovered:
            return begins
        lost = self.lost[name]
        if lost and lost[-1][1] == begins:
            lost[-1][1] = ack
        else:
            lost.append([begins, ack])
        return ack

    def is_none(self, liars: int) -> bool:
        """Return True if skipped sums have left no noise behind, but for what so many liars say."""
        return sum(map(bool, self.lost.values())) <= liars

    def variance(
        self, release_mode: ReleaseMode | Literal[""], statements: Iterable[Mapping[str, Any]], acks: Mapping[str, int]
    ) -> float | None:
        """Return the variance of the noise in the sum of all sums over that of one in which no sum was wrong.

        By what clients state; None without any skipped sum, or where clients state no mechanism that is known.
        """
        if not self.lost:
            return None
        if release_mode == "independent":
            return 1.0
        claims = {(one.get("mechanism"), one.get("max-participations")) for one in statements}
        mechanism, releases = claims.pop() if len(claims) == 1 else (None, None)
        if mechanism not in MECHANISMS or not isinstance(releases, int):
            return None
        if not max(acks.values(), default=1) <= releases <= _MOST_RELEASES:
            return None
        used = {name: self.skipped.get(name, last) for name, last in acks.items()}
        streams = [(last, self.lost.get(name, [])) for name, last in used.items() if last]
        return lasting_noise(make_mechanism(str(mechanism), releases), streams) if streams else 1.0

    def plain(self) -> dict[str, Any]:
        """Everything as plain values, for a checkpoint."""
        return {"lost": self.lost, "skipped": self.skipped}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what :meth:`plain` gave."""
        self.lost = {str(name): list(found) for name, found in saved.get("lost", {}).items()}
        self.skipped = {str(name): int(base) for name, base in saved.get("skipped", {}).items()}
