"""Side releases: what a machine may release beside a training, each in a session of its own.

Each is one file, such as the mean of its features, which comes first (:mod:`.centring_client`), or how good a model is
on its samples, which comes last (:mod:`.evaluation_client`). All share the machine's ledger, and so its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from ...privacy import ConfigurationError, Ledger, LedgeredMachine, NoiseKeys, PrivacyPolicy, PrivateMachine, Release
from ...privacy.machine.known_samples import Owners, RowBytes
from ..adapters.per_sample_gradients import Samples
from ..messages import Request

Shapes = list[tuple[int, ...]]


class MachineTerms(TypedDict, total=False):
    """Options that all machines of one ledger share."""

    data: RowBytes | Owners
    roster: str


@dataclass(frozen=True)
class PartTerms:
    """Arguments from which a part of a machine is made."""

    machine: LedgeredMachine
    """The machine of everything else."""
    samples: Samples
    ledger: Ledger
    keys: NoiseKeys
    known: MachineTerms
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the model's arrays."""

    def private_machine(self, policy: PrivacyPolicy, num_values: int, num_samples: int) -> PrivateMachine:
        """A machine of releases of so many values, on the ledger and keys of everything else."""
        return PrivateMachine(policy, num_values, num_samples, self.ledger, self.keys, **self.known)


class SidePart:
    """The part of a machine that makes one side release."""

    asked_at: Shapes | None = None
    """Shapes of the model that a request brings; None where it brings none."""

    def __init__(self, machine: PrivateMachine) -> None:
        self.machine = machine
        self.shapes: Shapes = [(machine.num_parameters,)]
        """Shapes of the arrays of a release."""

    @property
    def entries(self) -> dict[str, Any]:
        """Further entries of a reply; independent of data."""
        return {}

    def answer(self, request: Request, batch: Callable[[slice], Any]) -> Release:
        """The only release of a session; ``batch`` gives a slice of the samples as the model sees them."""
        raise NotImplementedError


class SideRelease:
    """Configures a client to make a side release."""

    of: ClassVar[str]
    """Name of the release in requests."""
    option: ClassVar[str]
    """Name of the client's option."""
    ability: ClassVar[str]
    """The attribute of a kind of client that says whether it can make the release."""
    unable: ClassVar[str]
    """Why a kind of client cannot."""
    not_configured: ClassVar[str]
    """The refusal of a machine that is asked for it and is not configured for it; depends on the request alone."""

    def trained_on(self, samples: int) -> int:
        """How many of a machine's samples, the first ones, are left to be trained on."""
        return samples

    def part(self, terms: PartTerms) -> SidePart:
        """The part of a machine that makes the release."""
        raise NotImplementedError


def refuse_sides(kind: type, sides: Iterable[SideRelease], *, per_owner: bool) -> None:
    """Refuse side releases that a kind of client cannot have."""
    for side in sides:
        if per_owner:
            raise ConfigurationError(
                f"Expected no {side.option} beside samples_per_owner, got one, which counts samples."
            )
        if not getattr(kind, side.ability):
            raise ConfigurationError(f"Expected no {side.option} for {kind.__name__}, got one: {side.unable}.")


_IN_COMMON = ("budget_mu", "delta", "noise_quality", "trust", "min_honest", "min_cohort", "budget_local_mu")


def check_beside(own: PrivacyPolicy, policy: PrivacyPolicy, *, beside: str, release: str) -> None:
    """Refuse a policy with which a release of all samples cannot share samples or a budget.

    ``own`` is the policy of that release, ``policy`` that of everything else. In errors ``beside`` says what the
    release is for ("centring") and ``release`` what it is ("the mean of features").
    """
    short = release.split(" of ")[0]
    if policy.order == "in-turn" and policy.sample_participations == 1:
        raise ConfigurationError(
            f"Expected order 'again' beside {beside}, got 'in-turn': {short} takes every sample, and none would be "
            "left that no session has used."
        )
    if policy.order == "secret":
        raise ConfigurationError(
            f"Expected another order than 'secret' beside {beside}, got it: what a secret order is worth is counted "
            f"for samples that show nowhere else, and {short} is of all of them."
        )
    for name in _IN_COMMON:
        ours, theirs = getattr(own, name), getattr(policy, name)
        if ours != theirs:
            raise ConfigurationError(
                f"Expected one {name} for {release} and for everything else on this machine, got {ours!r} and "
                f"{theirs!r}."
            )
    if own.adds_noise != policy.adds_noise:
        raise ConfigurationError(
            f"Expected noise on {release} and on everything else, or on neither, got mechanism {own.mechanism!r} and "
            f"{policy.mechanism!r}."
        )
