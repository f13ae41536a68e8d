"""Aggregation: how the releases of a round become a sum that the update rule may see.

:class:`Plain` adds up releases in which clients have put their noise. :class:`~.masked.Masked` has helpers open sums of
masked releases. A :class:`~.noisy.Noisy` server is sent contributions without noise and adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flwr.serverapp import Grid

from ...privacy.accounting.noise_forecast import StatedNoise
from ..rounds.client_registry import Awaited, ClientRegistry
from ..rounds.replies import Layout, Outcome, Reply, RoundReport, RoundRequest, Vector, vector_size
from ..sums.summation import ReleaseSum, Summation


@dataclass(frozen=True)
class RoundContext:
    """Facts about a round that an aggregator needs in addition to its replies."""

    session: str
    timeout: float
    grid: Grid | None
    """None for clients that are asked without messages."""
    acks: Mapping[str, int]
    """The last release aggregated of each client."""
    asked: Collection[str]
    """Clients that the round asked."""
    askable: Callable[[], Sequence[str]]
    """Clients that the next round may ask, by what is known when it is called."""
    nodes: Mapping[str, int]
    """The nodes of connected clients."""
    entries: Mapping[str, Any]
    """Entries that every message bears."""
    layout: Layout
    """The arrays of a release."""
    is_late: Callable[[Reply], bool]
    """Whether a reply comes too late to count."""
    save: Callable[[], None]
    """Write the checkpoint."""


@dataclass(frozen=True)
class Opened:
    """A sum that the update rule may see; its releases are acknowledged."""

    report: RoundReport
    asked: Collection[str]
    """Clients that the round asked."""
    total: Vector
    """The sum, shape (d,)."""
    releases: Mapping[str, int]
    """The release of each client in the sum."""
    is_memoryless: bool = False
    """Whether the releases of later rounds do not build on these."""

    @property
    def acknowledged(self) -> Mapping[str, int]:
        """The releases on which clients build from now on."""
        return self.releases


@dataclass(frozen=True)
class Skipped:
    """A sum that came out wrong: nothing of it enters the model, but clients build on its releases from now on."""

    report: RoundReport
    asked: Collection[str]
    acknowledged: Mapping[str, int]


@dataclass(frozen=True)
class Closed:
    """A sum that nobody opened, for the reason in the report: clients carry over what they released."""

    report: RoundReport
    asked: Collection[str]
    acknowledged: ClassVar[Mapping[str, int]] = {}


RoundOutcome = Opened | Skipped | Closed
"""Outcome of the sum of a round."""


Count = Callable[[Iterable[Outcome], Summation], tuple[RoundReport, Mapping[str, int]]]
"""Adds the releases that count to a sum; returns the report of the round and the release of each client that counts."""


class Aggregator:
    """Base class for aggregators, which turn the releases of a round into a sum; it adds no noise and keeps nothing.

    A training calls :meth:`begin` and :meth:`load` once, and :meth:`settle` and :meth:`shape` when it knows how many
    clients and values there are. Every round is :meth:`annotate` and :meth:`add`, and a checkpoint is written
    :meth:`saving` what :meth:`state` returns.
    """

    adds_noise: ClassVar[bool] = False
    """Whether the server adds the noise, so that clients must trust it."""
    masked: ClassVar[bool] = False
    """Whether releases come under masks, so that nothing in them can be looked at."""

    @property
    def fewest_releases(self) -> int:
        """Fewest releases with which a round is of use."""
        return 0

    @property
    def excluded(self) -> Collection[str]:
        """Clients that are not asked for now, while others take their place."""
        return ()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint left a sum that must be opened before any other round."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return settings that a checkpoint must agree on, plain values."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Return further values that a checkpoint must agree on, which are not logged."""
        return {}

    def read_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        """Return the noise of each client's releases by its own statement, which a server cannot check."""
        read = (StatedNoise.read(statement) for statement in statements.values())
        return [one for one in read if one is not None]

    # Before the first round.

    def begin(self, session: str, checkpoint: Path | None) -> None:
        """Note the name of the training and where its checkpoint is; None for none."""

    def settle(self, asked: int, needed: int) -> None:
        """Note how many clients a round asks, and for how many it waits."""

    def shape(self, num_parameters: int, release_size: int) -> None:
        """Note how many values the model and a release have."""

    def wait_for_clients(self, clients: ClientRegistry, grid: Grid, awaited: Awaited) -> None:
        """Wait for clients, or for helpers where these answer for them."""
        clients.meet(grid, awaited)

    # A round.

    def annotate(self, request: RoundRequest, save: Callable[[], None]) -> RoundRequest:
        """Return a request with what the aggregator has to say in it; save what must be on disk before it is sent."""
        return request

    def add(self, outcomes: Iterable[Outcome], count: Count, context: RoundContext) -> RoundOutcome:
        """Add the releases that count in a round; return what became of their sum."""
        summation = ReleaseSum(vector_size(context.layout))
        report, releases = count(outcomes, summation)
        return Opened(report, context.asked, summation.total(), releases)

    def validate_reply(self, reply: Reply, *, current: bool) -> bool:
        """Return True if a reply can come from a client that keeps to its policy."""
        return True

    def open_pending(self, context: RoundContext) -> RoundOutcome:
        """Return what becomes of the sum that a checkpoint left."""
        raise NotImplementedError(f"{type(self).__name__} leaves no sum.")

    def check_pause(self) -> None:
        """Raise if a person must look before the next round."""

    def should_stop(self, history: Sequence[RoundReport], noise: float | None) -> str:
        """Return why the training ends now with the model it has, or an empty string."""
        return ""

    def skipped_noise(self, statements: Mapping[str, Mapping[str, Any]], acks: Mapping[str, int]) -> float | None:
        """Return the noise in the sum of all sums over that without the skipped ones; None if none was skipped."""
        return None

    # The checkpoint.

    @contextmanager
    def saving(self, server_round: int) -> Iterator[None]:
        """Surround the writing of a checkpoint."""
        yield

    def state(self) -> dict[str, Any]:
        """Return the contents of a checkpoint for :meth:`load`, plain values or arrays."""
        return {}

    def load(self, saved: Mapping[str, Any] | None, clients: Collection[str]) -> None:
        """Take back what :meth:`state` returned, or begin where there is no checkpoint.

        Parameters
        ----------
        saved : mapping or None
            All contents of the checkpoint; None if there is none.
        clients : collection of str
            The clients of the training that was saved.

        Raises
        ------
        CheckpointError
            If the checkpoint must not be resumed from, or is missing where one should be.
        """


class Plain(Aggregator):
    """Sum of releases in which clients have put their own noise; the server has no state and need not be trusted."""
