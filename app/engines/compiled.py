"""Compiled loops for the values of a block of releases: the same integers as NumPy's, in one pass over each row.

NumPy takes nine passes to round a contribution and a row of noise, to add the row and to remove the last one; a loop
compiled by numba takes one. It replaces arithmetic only
(:class:`~murmurfl.privacy.machine.machine_block.BlockArithmetic`): normals, admission, what is carried over and what is
recorded stay where they are, and NumPy does what the loop cannot, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import OuterProducts
from ...privacy.ledger.ledger_block import Counts, StreamBlock
from ...privacy.machine.clipping import StackedContributions
from ...privacy.machine.clipping_figures import observe_releases
from ...privacy.machine.prefix_sums import ReleaseRule
from ...privacy.mechanisms import CancellingNoise
from ...privacy.noise.block_values import RowByRow
from ...privacy.noise.grid import MARK
from ...privacy.noise.keyed_noise import KEY_BYTES, NoiseQuality, each_normal_row, row_key, standard_normal_rows
from ...privacy.noise.noise_stream import Past
from ..runs.experiment import Experiment

WORTH_COMPILING = 1 << 28
"""Values of a run's releases from which compiling, which takes a second or two, pays off."""


def worth_compiling(experiment: Experiment) -> bool:
    """Whether numba is installed and the run is long enough for compiling to pay off."""
    config = experiment.config
    values = experiment.num_rounds * config.asked_per_round * experiment.model.num_parameters
    return values >= WORTH_COMPILING and find_spec("numba") is not None


def compiled_rows(quality: NoiseQuality) -> Callable[[ReleaseRule], CompiledRows]:
    """The maker of a block's arithmetic, compiled already for normals of this quality."""
    dense, outer = _loops()
    for normals in standard_normal_rows([bytes(KEY_BYTES)], 2, quality):
        for again in (False, True):
            dense(np.zeros(2), normals, 1.0, again, *np.zeros((3, 2), np.int64))
            outer(np.zeros(1), np.zeros(1), True, normals, 1.0, again, *np.zeros((3, 2), np.int64))
    return CompiledRows


class CompiledRows(RowByRow):
    """Compiled arithmetic of a block, for cancelling noise and one gradient a machine.

    Notes
    -----
    Its counts equal those of :class:`~murmurfl.privacy.noise.block_values.RowByRow` to the bit.
    """

    def __init__(self, rule: ReleaseRule) -> None:
        super().__init__(rule)
        self._last: tuple[list[Counts], Counts, bool] = ([], np.empty(0, np.int64), False)

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> list[Counts]:
        policy, noise = self._rule.policy, self._rule.noise
        # A subclass may override what a noise row is made of.
        simple = type(noise.plan.mechanism) is CancellingNoise and noise.plan.noise_std > 0.0
        if not simple or policy.rows_per_release != 1 or policy.bound.nonnegative:
            return super().noised(streams, contributions, keys, nonces)
        norms = contributions.norms()
        scales = policy.bound.scales(norms)
        if not np.isfinite(scales).all():
            return super().noised(streams, contributions, keys, nonces)
        if policy.bound.observed:
            observe_releases(norms[:, None], policy.clip_norm)
        noise.plan.grid.marked(np.empty(0), policy.clip_norm)  # raises if clipped values do not fit the grid
        made: list[Counts] = []
        total = np.zeros(noise.num_parameters, np.int64)
        write = _writer(contributions, scales * (1.0 / noise.plan.grid.spacing), noise.num_parameters)
        drawn = [row_key(key, nonce) for key, nonce in zip(keys, nonces, strict=True)]
        normals = each_normal_row(drawn, noise.num_parameters, policy.noise_quality)
        past = zip(streams.release.tolist(), streams.nonces, streams.noise_state, strict=True)
        for row, (before, key, nonce, values) in enumerate(zip(past, keys, nonces, normals, strict=True)):
            factor, last = noise.last_row(Past(*before), key)
            counts = np.empty(noise.num_parameters, np.int64)
            write(row, values, factor, last is not None, noise.kept(key, nonce, last), counts, total)
            made.append(counts)
        streams.nonces, streams.noise_state = list(nonces), [()] * len(made)
        self._last = made, total, (streams.release == streams.ack).all()
        return made

    def total(self, counts: Sequence[Counts], places: Sequence[int]) -> Counts:
        made, total, nothing_carried = self._last
        # Otherwise what was carried over was added to the rows since.
        if nothing_carried and len(places) == len(counts) == len(made) and all(map(is_, counts, made)):
            return total
        return super().total(counts, places)


Write = Callable[[int, NDArray[np.floating], float, bool, Counts, Counts, Counts], None]
"""Writes one row: its number, normals, their factor, whether there is a last row, that row, an output, and a sum."""


def _writer(contributions: StackedContributions, factors: NDArray[np.float64], size: int) -> Write:
    """Return a function that writes one machine's counts and replaces its last noise row."""
    dense, outer = _loops()
    if type(contributions) is OuterProducts:
        residuals = contributions.residuals * factors[:, None]
        features, bias = contributions.features, contributions.bias

        def write_outer(row: int, *noise_and_counts: Any) -> None:
            outer(residuals[row], features[row], bias, *noise_and_counts)

        return write_outer
    scratch = np.empty(size)

    def write_dense(row: int, *noise_and_counts: Any) -> None:
        contributions.write(row, float(factors[row]), scratch)
        dense(scratch, *noise_and_counts)

    return write_dense


@cache
def _loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """The compiled loops, without ``fastmath``: everything is rounded as in NumPy."""
    from numba import njit

    mark = MARK  # noise rows are kept as NumPy keeps them, so that either can continue after the other

    @njit
    def dense(values, normals, factor, again, last, made, total):
        for i in range(values.size):
            added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
            made[i] = np.int64(np.rint(values[i])) + added - (last[i] if again else mark)
            last[i] = added
            total[i] += made[i]

    @njit
    def outer(residuals, features, bias, normals, factor, again, last, made, total):
        size = features.size
        for c in range(residuals.size):
            start = c * size
            for j in range(size):
                i = start + j
                added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
                made[i] = np.int64(np.rint(residuals[c] * features[j])) + added - (last[i] if again else mark)
                last[i] = added
                total[i] += made[i]
        if bias:
            start = residuals.size * size
            for c in range(residuals.size):
                i = start + c
                added = np.int64(np.rint(np.float64(normals[i]) * factor)) + mark
                made[i] = np.int64(np.rint(residuals[c])) + added - (last[i] if again else mark)
                last[i] = added
                total[i] += made[i]

    return dense, outer
