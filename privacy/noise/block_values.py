"""The values of a block of releases in NumPy, one machine after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..ledger.ledger_block import Counts, StreamBlock
from ..machine.clipping import StackedContributions
from ..machine.clipping_figures import observe_releases
from ..machine.prefix_sums import ReleaseRule
from .keyed_noise import each_normal_row, row_key


class RowByRow:
    """The arithmetic of a block (:class:`BlockArithmetic`) in NumPy, one row after the other."""

    def __init__(self, rule: ReleaseRule) -> None:
        self._rule = rule

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> list[Counts]:
        policy, noise = self._rule.policy, self._rule.noise
        batch = policy.rows_per_release
        norms = contributions.norms().reshape(len(keys), batch)
        normals: Iterator[Any] = repeat(None)
        if all(map(noise.draws_a_row, set((streams.release + 1).tolist()))):
            drawn = [row_key(key, nonce) for key, nonce in zip(keys, nonces, strict=True)]
            normals = each_normal_row(drawn, noise.num_parameters, policy.noise_quality)
        return self._rule.noised(streams, self._counts(contributions, norms), keys, nonces, normals=normals)

    def total(self, counts: Sequence[Counts], places: Sequence[int]) -> Counts:
        total = counts[places[0]].copy()
        for place in places[1:]:
            total += counts[place]
        return total

    def sent(self, counts: Counts) -> Counts:
        return counts

    def _counts(self, stack: StackedContributions, norms: NDArray[np.float64]) -> Iterator[Counts]:
        """The mean of each machine's bounded rows, on the grid; each is rounded by itself."""
        policy, grid, size = self._rule.policy, self._rule.noise.plan.grid, self._rule.noise.num_parameters
        bound, clip_norm, share = policy.bound, policy.clip_norm, 1.0 / norms.shape[1]
        scales: NDArray[np.float64] = np.full_like(norms, math.nan) if bound.nonnegative else bound.scales(norms)
        # Negative entries, a row that is not finite, or one too large to square: the careful way.
        plain = np.atleast_1d(np.isfinite(scales).all(axis=1))
        if bound.observed:
            observe_releases(norms[plain], clip_norm)
        factors = scales * (share / grid.spacing)
        for machine, (simple, theirs) in enumerate(zip(plain.tolist(), factors.tolist(), strict=True)):
            first = machine * norms.shape[1]
            if not simple:
                rows = np.empty((norms.shape[1], size))
                with np.errstate(all="ignore"):
                    for i, row in enumerate(rows):
                        stack.write(first + i, 1.0, row)
                yield grid.counts(bound.rows(rows), scale=share, bound=clip_norm).sum(axis=0)
                continue
            total: Counts | None = None
            for i, factor in enumerate(theirs):
                row = np.empty(size)
                stack.write(first + i, factor, row)
                counts = grid.rounded(row, clip_norm * share)
                total = counts if total is None else total.__iadd__(counts)
            if total is None:
                raise ConfigurationError("Expected at least one sample in a release.")
            yield total
