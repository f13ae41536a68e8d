"""Releases of many simulated machines at once: the same rule as one by one, with their gradients computed together.

Every machine admits, adds its noise and records by itself, by the code of :mod:`.machine` and :mod:`.release`; only the
contributions, and normals where all machines have the same kind, are computed in one piece.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from .admission import Admission
from .contributions import StackedContributions
from .errors import ConfigurationError, RefusedError
from .mechanisms import State
from .noise import NoiseQuality, each_normal_row
from .outgoing import Release
from .release import PrivateMachine
from .training import observe

Admitted = tuple[int, PrivateMachine, Admission]
Contributions = Callable[[list[int], list[slice]], StackedContributions]
"""Given positions of machines and a slice of samples of each: their per-sample contributions, one after the other."""


def release_together(
    machines: Sequence[PrivateMachine],
    session: str,
    acks: Sequence[int],
    contributions: Contributions,
    *,
    note: State | None = None,
) -> Iterator[Release | RefusedError]:
    """The next release of each of several simulated machines.

    Parameters
    ----------
    machines : sequence of PrivateMachine
        With simulated keys, no machine twice.
    session : str
    acks : sequence of int
        One a machine.
    contributions : callable
        Given the positions of the machines that may release and the slice of fresh samples of each, their per-sample
        contributions, machine after machine; unclipped.
    note : tuple of floating-point arrays, optional
        As for :meth:`PrivateMachine.release_noting`; the same for all.

    Yields
    ------
    Release or RefusedError
        One a machine, in order: exactly what :meth:`PrivateMachine.release` would return or raise, up to rounding of
        the contributions.

    Raises
    ------
    ConfigurationError
        If a machine has real keys: a real machine releases by itself, and its failures must not show.

    Notes
    -----
    **Formal guarantees.** Those of :meth:`PrivateMachine.release` for each machine, in simulation.
    """
    if not all(machine.simulated for machine in machines):
        raise ConfigurationError("Expected simulated machines, got one with real keys: it must release by itself.")
    open_transactions: dict[int, AbstractContextManager[Admission]] = {}
    try:
        admissions: list[Admission | RefusedError] = []
        for i, (machine, ack) in enumerate(zip(machines, acks, strict=True)):
            transaction = machine.admitted(session, ack)
            try:
                admissions.append(transaction.__enter__())
            except RefusedError as refusal:
                admissions.append(refusal)
            else:
                open_transactions[i] = transaction
        admitted = [
            (i, machine, admission)
            for i, (machine, admission) in enumerate(zip(machines, admissions, strict=True))
            if isinstance(admission, Admission)
        ]
        rows, noise = _clipped_rows(admitted, contributions), _normals(admitted)
        for i, (machine, admission) in enumerate(zip(machines, admissions, strict=True)):
            if isinstance(admission, RefusedError):
                yield admission
                continue
            release = machine.finish(admission, next(rows), normals=next(noise), note=note)
            open_transactions.pop(i).__exit__(None, None, None)
            yield release
    finally:
        for transaction in open_transactions.values():
            transaction.__exit__(*sys.exc_info())


def _clipped_rows(admitted: Sequence[Admitted], contributions: Contributions) -> Iterator[NDArray[np.int64]]:
    """The contribution of each admitted machine, clipped and on the grid, one at a time."""
    if not admitted:
        return
    stack = contributions([i for i, _, _ in admitted], [admission.samples for _, _, admission in admitted])
    batches = [machine.policy.rows_per_release for _, machine, _ in admitted]
    norms = stack.norms()
    row = 0
    for (_, machine, _), batch in zip(admitted, batches, strict=True):
        yield _counts(machine, stack, row, norms[row : row + batch])
        row += batch


def _normals(admitted: Sequence[Admitted]) -> Iterator[NDArray[np.floating] | None]:
    """The normals of each admitted machine's release; None: the machine draws its own."""
    qualities: set[NoiseQuality] = {machine.policy.noise_quality for _, machine, _ in admitted}
    sizes = {machine.num_parameters for _, machine, _ in admitted}
    keys = [machine.normals_key(admission) for _, machine, admission in admitted]
    known = [key for key in keys if key is not None]
    if len(known) == len(keys) and len(qualities) == len(sizes) == 1:
        yield from each_normal_row(known, sizes.pop(), qualities.pop())
    else:
        yield from (None for _ in keys)


def _counts(
    machine: PrivateMachine,
    stack: StackedContributions,
    first: int,
    norms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """The mean of one machine's bounded rows, on the grid; each is rounded by itself."""
    bound = machine.policy.bound
    grid, clip_norm, share = machine.plan.grid, bound.clip_norm, 1.0 / len(norms)
    scales = [math.nan] if bound.nonnegative else bound.scales(norms).tolist()
    # Negative entries, a row that is not finite, or one too large to square: the careful way.
    if not all(map(math.isfinite, scales)):
        rows = np.empty((len(norms), machine.num_parameters))
        with np.errstate(all="ignore"):
            for i, row in enumerate(rows):
                stack.write(first + i, 1.0, row)
        return grid.counts(bound.rows(rows), scale=share, bound=clip_norm).sum(axis=0)
    if bound.observed:
        observe(norms, clip_norm)
    factor = share / grid.spacing
    total: NDArray[np.int64] | None = None
    for i, scale in enumerate(scales):
        row = np.empty(machine.num_parameters)
        stack.write(first + i, scale * factor, row)
        counts = grid.rounded(row, clip_norm * share)
        total = counts if total is None else total.__iadd__(counts)
    if total is None:
        raise ConfigurationError("Expected at least one sample in a release.")
    return total
