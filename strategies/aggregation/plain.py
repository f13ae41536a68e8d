"""Aggregation: how the releases of a round become a sum that the update rule may see.

:class:`Plain` adds up releases in which clients have put their noise. :class:`~.masked.Masked` has helpers open sums of
masked releases. A :class:`~.noisy.Noisy` server is sent contributions without noise and adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from flwr.serverapp import Grid

from ...privacy.accounting.noise_forecast import StatedNoise
from ..rounds.known_machines import Awaited, MachineDirectory
from ..rounds.replies import Reply, RoundReport, Vector


class Aggregator:
    """How the releases of a round become a sum; a base class, which adds no noise and keeps nothing."""

    adds_noise: ClassVar[bool] = False
    least_releases: int = 0
    """The fewest releases that a round can do with."""
    left_out: Sequence[str] = ()
    """Machines that are not asked for now."""

    def settings(self) -> dict[str, Any]:
        """Settings that a checkpoint must agree on, plain values."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Further values that a checkpoint must agree on, which are not logged."""
        return {}

    def read_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        """The noise of each machine's releases by its own statement, which a server cannot check."""
        read = (StatedNoise.read(statement) for statement in statements.values())
        return [one for one in read if one is not None]

    # Before the first round.

    def join(self, session: str) -> None:
        """Note the name of the training."""

    def settle(self, asked: int, needed: int) -> None:
        """Note how many machines a round asks, and for how many it waits."""

    def shape(self, num_parameters: int, release_size: int) -> None:
        """Note how many values the model and a release have."""

    def meet(self, machines: MachineDirectory, grid: Grid, awaited: Awaited) -> None:
        """Wait for machines, and for helpers where they are needed."""
        machines.meet(grid, awaited)

    # A round.

    def before_asking(self, save: Callable[[], None]) -> bool:
        """Save what must be on disk before a machine is asked; returns whether the server keeps any such thing."""
        return False

    def asked(self, names: Iterable[str]) -> None:
        """Note the machines that are asked."""

    def believes(self, reply: Reply, *, current: bool) -> bool:
        """Whether a reply can come from a machine that keeps to its policy."""
        return True

    def heard(self, participation: Mapping[str, int | None]) -> None:
        """Note the machines whose releases count."""

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""

    def check_pause(self) -> None:
        """Raise if a person must look before the next round."""

    def over(self, history: Sequence[RoundReport], noise: float | None) -> str:
        """Why the training ends now with the model it has, or an empty string."""
        return ""

    def noisy(self, total: Vector, server_round: int) -> Vector:
        """A sum as it may be published."""
        return total

    def noise_on(self, total: Vector, server_round: int) -> Vector | float:
        """What :meth:`noisy` adds to a sum."""
        return 0.0

    def own_noise_std(self, num_parameters: int) -> float:
        """Standard deviation of the server's noise on each value of the only sum of a training."""
        return 0.0

    # The checkpoint.

    def keep_beside(self, checkpoint: Path | None) -> None:
        """Note where the checkpoint is; None for none."""

    def look_for(self) -> None:
        """Refuse to begin where a checkpoint should be."""

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that can be read but must not be resumed from."""

    @contextmanager
    def saving(self, server_round: int) -> Iterator[None]:
        """Surround the writing of a checkpoint."""
        yield

    def kept(self) -> dict[str, Any]:
        """Contents of a checkpoint for :meth:`restore`, plain values or arrays."""
        return {}

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        """Take back what :meth:`kept` returned."""


class Plain(Aggregator):
    """Sum of releases in which clients have put their own noise; the server has no state and need not be trusted."""
