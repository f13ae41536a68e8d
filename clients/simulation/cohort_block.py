"""Machines of a simulation that are asked together: their gradients in one piece, their releases by policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, RefusedError, Release
from ...privacy.machine.contributions import ChosenContributions, StackedContributions
from ...privacy.machine.machine_block import BlockAdmission, BlockReleases, MachineBlock
from ..adapters.per_sample_gradients import PerSampleGradients, Samples
from ..messages.requests import Request
from ..private_client import PrivateClient
from .together import Together

Placed = tuple[int, int, slice, bool]
"""Of a machine that may release: its place among those asked, its part, its fresh samples, and whether it is computed
here."""


class StackableGradients(PerSampleGradients, Protocol):
    """Gradients that can combine several points in closed form, without a row for every sample. Not required.

    Notes
    -----
    **Formal guarantees.** The combination must be that of rows of which row i depends on sample i alone: every
    guarantee for one sample rests on it.
    """

    def stacked(
        self,
        points: Sequence[Sequence[NDArray[Any]]],
        weights: Sequence[float | NDArray[np.float64]],
        samples: Any,
    ) -> StackedContributions:
        """``combined_gradients``, without a row for every sample."""
        ...


class StackableSamples(Samples, Protocol):
    """Samples of many machines that come from one place. Not required."""

    @classmethod
    def stack(cls, parts: Sequence[tuple[Any, slice]]) -> Any:
        """The batch of all parts, one after the other; a part is a machine's samples and a slice of them."""
        ...


@dataclass(frozen=True)
class Part:
    """Those of the machines asked together that have one policy.

    Parameters
    ----------
    block : MachineBlock
    names : list of str
    places : list of int
        Among all that are asked.
    rows : list of int
        In the block.
    acks : list of int
    here : list of bool
        Which of them are computed here.
    """

    block: MachineBlock
    names: list[str]
    places: list[int]
    rows: list[int]
    acks: list[int]
    here: list[bool]


@dataclass(frozen=True)
class PartAnswer:
    """What the machines of a part answered.

    Parameters
    ----------
    part : Part
    releases : BlockReleases
    """

    part: Part
    releases: BlockReleases

    def released(self) -> Iterator[tuple[int, str]]:
        """The place among the releases, and the name, of each machine that has released and is computed here."""
        for i, place in enumerate(self.releases.rows):
            if self.part.here[place]:
                yield i, self.part.names[place]

    def refused(self) -> Iterator[tuple[str, RefusedError]]:
        """The name of each machine that has refused, and why."""
        for place, refusal in self.releases.refused.items():
            if self.part.here[place]:
                yield self.part.names[place], refusal

    def acknowledge(self, session: str, told: Sequence[tuple[int, int]]) -> None:
        """Tell machines, by their places among the releases, which release of theirs was aggregated."""
        rows = [self.part.rows[self.releases.rows[i]] for i, _ in told]
        self.part.block.acknowledge(session, rows, [ack for _, ack in told])

    def release(self, i: int) -> Release:
        """A machine's release, by its place among the releases."""
        return self.part.block.made(self.releases, i, self.part.rows[self.releases.rows[i]])


@dataclass(frozen=True)
class BlockAnswer:
    """What machines that were asked together answered.

    Parameters
    ----------
    names : list of str
        Of those that were asked, in order.
    client : PrivateClient
        One of them.
    parts : list of PartAnswer
    """

    names: list[str]
    client: PrivateClient
    parts: list[PartAnswer]

    def __iter__(self) -> Iterator[tuple[str, Release | RefusedError]]:
        outcomes: dict[str, Release | RefusedError] = {}
        for part in self.parts:
            outcomes |= {name: part.release(i) for i, name in part.released()}
            outcomes |= dict(part.refused())
        return ((name, outcomes[name]) for name in self.names if name in outcomes)


@dataclass(frozen=True)
class Computing:
    """How the contributions of a block are computed.

    Parameters
    ----------
    names : list of str
        Of the machines that are asked.
    client : PrivateClient
        One of them.
    request : Request
        Alike for all, but for the acknowledgement.
    together : Together
    batch : callable
        Given names and slices of samples, one batch of them.
    all_answer : bool
        Whether it is known that nobody refuses: parts then have none of the machines that are computed elsewhere.
    """

    names: list[str]
    client: PrivateClient
    request: Request
    together: Together
    batch: Callable[[list[tuple[str, slice]]], Any]
    all_answer: bool = False

    def answer(self, parts: Sequence[Part]) -> BlockAnswer:
        """The answers of all of them, recorded."""
        session = self.request.session
        with ExitStack() as transactions:
            admissions = [
                transactions.enter_context(part.block.admitted(session, part.rows, part.acks, part.here))
                for part in parts
            ]
            stacks = self._contributions(parts, admissions)
            made = [
                PartAnswer(part, admission.release(stack, self.together.note))
                for part, admission, stack in zip(parts, admissions, stacks, strict=True)
            ]
        return BlockAnswer(self.names, self.client, made)

    def _contributions(
        self, parts: Sequence[Part], admissions: Sequence[BlockAdmission]
    ) -> list[StackedContributions | None]:
        """The contributions of each part's machines, computed with those of all others."""
        placed: list[Placed] = [
            (part.places[place], number, samples, here)
            for number, (part, admission) in enumerate(zip(parts, admissions, strict=True))
            for place, samples, here in zip(admission.places, admission.slices, admission.here, strict=True)
        ]
        if not any(here for *_, here in placed):
            return [None] * len(parts)
        if self.all_answer:
            placed += self._elsewhere(placed, parts)
        # Whatever their policies are, they stand in the order in which they were asked, with zeros in the place of
        # those that are computed elsewhere: products of matrices of another shape differ in their last bits.
        placed.sort(key=lambda entry: entry[0])
        here = np.array([here for *_, here in placed])
        samples = self.batch([(self.names[i], chosen) for i, _, chosen, here in placed if here])
        if self.client.centring is not None and self.request.centre is not None:
            samples = self.client.centring.batch(samples, self.request.centre)
        if not here.all():
            sampled = np.repeat(here, self.client.machine.policy.batch_size)
            samples = spread_samples(samples, np.flatnonzero(sampled), len(sampled))
        stack = self.together.contributions([i for i, *_ in placed], samples)
        if len(parts) == 1 and here.all():
            return [stack]
        number = np.array([number for _, number, *_ in placed])
        share = self.client.machine.policy.rows_per_release
        chosen = [np.flatnonzero(np.repeat(here & (number == part), share)) for part in range(len(parts))]
        pick = getattr(stack, "chosen", partial(ChosenContributions, stack))
        return [pick(rows) if rows.size else None for rows in chosen]

    def _elsewhere(self, placed: Sequence[Placed], parts: Sequence[Part]) -> list[Placed]:
        """The machines that are computed elsewhere, of which nothing is known but their places."""
        if len(placed) < sum(len(part.rows) for part in parts):
            raise ConfigurationError(
                "Expected every machine to answer, as its cap and its samples allow, but one refused: use one worker."
            )
        known = {place for place, *_ in placed}
        return [(place, -1, slice(0), False) for place in range(len(self.names)) if place not in known]


def stacked_samples(parts: Sequence[tuple[Any, slice]]) -> Any:
    """One batch of several machines' samples.

    Parameters
    ----------
    parts : sequence of (samples, slice)
        Batches that are arrays, or tuples of arrays, with the samples along the first axis.

    Raises
    ------
    ConfigurationError
        If the batches are of another kind.
    """
    kinds = {type(samples) for samples, _ in parts}
    stack = getattr(parts[0][0], "stack", None)
    if len(kinds) == 1 and stack is not None:
        return stack(parts)
    batches = [samples[chosen] for samples, chosen in parts]
    if all(isinstance(batch, np.ndarray) for batch in batches):
        return np.concatenate(batches)
    if all(isinstance(batch, tuple) for batch in batches):
        return tuple(np.concatenate([np.asarray(part) for part in column]) for column in zip(*batches, strict=True))
    raise ConfigurationError(
        f"Expected batches that are arrays or tuples of arrays, got {type(batches[0]).__name__}; use another engine."
    )


def spread_samples(samples: Any, places: NDArray[np.intp], count: int) -> Any:
    """A batch of ``count`` samples with the given ones in their places and zeros in all others.

    Raises
    ------
    ConfigurationError
        If the batch is neither an array nor a tuple of arrays.
    """
    if isinstance(samples, tuple):
        return tuple(spread_samples(part, places, count) for part in samples)
    if not isinstance(samples, np.ndarray):
        raise ConfigurationError(
            f"Expected a batch that is an array or a tuple of arrays, got {type(samples).__name__}; use one worker."
        )
    spread = np.zeros((count, *samples.shape[1:]), samples.dtype)
    spread[places] = samples
    return spread
