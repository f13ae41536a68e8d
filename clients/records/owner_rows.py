"""A machine whose rows are owners: all samples of one owner make one row, which is clipped once.

:class:`OwnedSamples` takes the place of a machine's samples and has as many rows as owners, :class:`OwnerGradients`
that of a model's gradients. Nothing else changes: a batch of b samples becomes one of b owners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from ...privacy.machine.known_samples import Owners
from ..adapters.per_sample_gradients import PerSampleGradients

if TYPE_CHECKING:
    from .schema import Schema

_MOST_VALUES = 1 << 22
"""Values of gradients of single samples that are in memory together."""


class OwnedSamples:
    """A machine's samples by owner: row i is everything that is used of owner i's.

    Its length is the number of places for owners, which is public; how many rows there are is not.

    Parameters
    ----------
    arrays : sequence of ndarray
        Arrays such as features and labels, with the samples along the first axis.
    owners : Owners
        Which of these rows are whose (:meth:`~murmurfl.privacy.Owners.of`).
    fits : ndarray of shape (rows,), bool, optional
        Which rows the model can use. The others are among the first j of their owner all the same, and count as zero in
        the owner's mean.
    schema : Schema, optional
        The schema of the records.

    Notes
    -----
    **Formal guarantees.** For two files with the same set of owners' names, of which one owner's rows are any others
    anywhere in the file, one row differs. A row depends on one owner's samples alone, and has the shape of every other.
    Proof: docs/proofs/owners.md.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        owners: Owners,
        fits: NDArray[np.bool_] | None = None,
        *,
        schema: Schema | None = None,
        record_kind: str = "",
    ) -> None:
        needed = int(owners.rows.max()) + 1 if len(owners.rows) else 0
        given = [*arrays, *([] if fits is None else [fits])]
        if not arrays or any(len(array) < needed for array in given):
            raise ConfigurationError(
                f"Expected arrays of at least {needed} rows, got {[np.shape(array) for array in given]}."
            )
        self.schema, self.record_kind = schema, record_kind
        self._arrays = tuple(arrays)
        self._fits = None if fits is None else np.asarray(fits, dtype=bool)
        self.owners = owners

    @property
    def samples_per_owner(self) -> int:
        """How many samples of an owner are used, at most."""
        return self.owners.most

    def __len__(self) -> int:
        return self.owners.num_places

    def __getitem__(self, owners: slice, /) -> tuple[NDArray[Any], ...]:
        """Some owners' samples, shape (owners, most, ...), and which of them count: no repetitions (owners, most)."""
        rows, present = self.owners.padded_rows(owners)
        if self._fits is not None:
            present = present & self._fits[rows]
        return (*(array[rows] for array in self._arrays), present)


class OwnerGradients:
    """One row an owner: the mean of the gradients of that owner's samples, before it is clipped; zero without any.

    It takes the place of a model's :class:`~murmurfl.clients.PerSampleGradients` where a machine's samples are
    :class:`OwnedSamples`. An owner of few samples counts as much as one of many. With ``one_by_one`` each sample's
    gradient is computed by itself: on a real machine, for a model that might remember others.

    Notes
    -----
    **Formal guarantees.** Row i depends on owner i's samples alone if a row of ``gradients`` depends on its sample
    alone; the machine clips it, whatever it is. As many gradients are computed for an owner of one sample as for one of
    the most, so the shapes of a computation tell nothing.
    """

    def __init__(self, gradients: PerSampleGradients, *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self.shapes = [tuple(shape) for shape in gradients.shapes]
        self._size = sum(map(math.prod, self.shapes))
        self._gradients = gradients

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        """Means of gradients at ``parameters``, shape (owners, d)."""
        *parts, present = samples
        owners, most = present.shape
        together = max(_MOST_VALUES // (most * self._size), 1)
        made = np.zeros((owners, self._size))
        for start in range(0, owners, together):
            chosen = slice(start, start + together)
            self._add(made[chosen], parameters, [part[chosen] for part in parts], present[chosen])
        made /= np.maximum(present.sum(axis=1), 1)[:, None]
        return made

    def _add(
        self,
        total: NDArray[np.float64],
        parameters: Sequence[NDArray[Any]],
        parts: Sequence[NDArray[Any]],
        present: NDArray[np.bool_],
    ) -> None:
        """Add the gradients of some owners' samples to a row for each."""
        owners, most = present.shape
        flat = tuple(part.reshape(owners * most, *part.shape[2:]) for part in parts)
        if self._one_by_one:
            each = [tuple(part[i : i + 1] for part in flat) for i in range(owners * most)]
            rows = np.concatenate([np.asarray(self._gradients(parameters, one)) for one in each])
        else:
            rows = np.asarray(self._gradients(parameters, flat))
        if rows.shape != (owners * most, self._size):
            raise ConfigurationError(f"Expected gradients of shape {(owners * most, self._size)}, got {rows.shape}.")
        rows = rows.reshape(owners, most, self._size)
        for number in range(most):  # one after the other, so that a row is the same whoever stands beside it
            chosen = present[:, number]
            total[chosen] += rows[chosen, number]
