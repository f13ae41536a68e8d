"""What an operator's file says of how gradients are bounded."""

from __future__ import annotations

from ...privacy.machine.clipping import CLIPPINGS
from ...privacy.side.clipped_share import COUNTED_CLIP_NORM
from ..methods import Method


class BoundedNode:
    """The part of an operator's file that the bounding of gradients is in; its fields are the file's."""

    strategy: str
    clip_norm: float
    clipping: str
    clip_stability: float
    quantile_share: float
    samples_per_owner: int

    @property
    def method(self) -> Method:
        """What the machine takes part in."""
        raise NotImplementedError

    def _check(self, name: str, holds: bool, expected: str) -> None:
        raise NotImplementedError

    def check_bounding(self) -> None:
        """Refuse bounds that the strategy cannot have, and values that cannot be."""
        self._check("clip_stability", self.clip_stability > 0, "a number > 0")
        if self.clipping:
            keys = self.method.keys
            self._check(
                "clipping", self.clipping in CLIPPINGS and "clipping" in keys, "clip, or automatic for gradients"
            )
        if self.quantile_share:
            able = "quantile-share" in self.method.keys and self.clipping != "automatic"
            expected = f"0 with strategy = {self.strategy!r} and clipping = {self.clipping!r}"
            self._check("quantile_share", able, expected)
            self._check("quantile_share", 0 < self.quantile_share < 1, "a number >= 0 and < 1")
            self._check("clip_norm", self.clip_norm == COUNTED_CLIP_NORM, "1 with a quantile-share")
