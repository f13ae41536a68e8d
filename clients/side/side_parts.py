"""What a machine may release beside its contributions to a training, each in a session of its own.

The mean of its features comes first (:mod:`.centring_client`), and how good a model is on its samples comes last
(:mod:`.evaluation_client`). Both share the machine's ledger, and so its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...privacy import ConfigurationError, Ledger, LedgeredMachine, NoiseKeys, PrivacyPolicy, PrivateMachine
from ..adapters.per_sample_gradients import Samples
from ..messages.requests import ReleaseOf
from .centring_client import Centred, Centring
from .evaluation_client import Evaluated, Evaluation, MachineTerms

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Parts:
    """The parts of a machine that release something else than contributions to a training.

    Parameters
    ----------
    centred : Centred, optional
    evaluated : Evaluated, optional
    """

    centred: Centred | None = None
    evaluated: Evaluated | None = None

    @property
    def machines(self) -> list[LedgeredMachine]:
        """Of each part."""
        return [part.machine for part in (self.centred, self.evaluated) if part is not None]

    def of(self, of: ReleaseOf) -> Centred | Evaluated | None:
        """The part that a request is for; None for contributions to a training."""
        return {"mean": self.centred, "evaluation": self.evaluated}.get(of)


def make_parts(
    machine: LedgeredMachine,
    num_rows: int,
    samples: Samples,
    ledger: Ledger,
    keys: NoiseKeys,
    terms: MachineTerms,
    *,
    shapes: Sequence[tuple[int, ...]],
    beside: PrivacyPolicy,
    centring: Centring | None,
    evaluation: Evaluation | None,
) -> Parts:
    """The parts that a machine is configured for.

    Parameters
    ----------
    machine : LedgeredMachine
        Of everything else.
    num_rows : int
        Of its samples, those that are held out among them.
    samples, ledger, keys, terms
        The machine's; ``samples`` with those that are held out.
    shapes : sequence of tuple of int
        Of the model's arrays.
    beside : PrivacyPolicy
        Of everything else.
    centring : Centring or None
    evaluation : Evaluation or None

    Raises
    ------
    ConfigurationError
        If policies do not go together.

    Notes
    -----
    The mean is of the samples that are trained on.
    """
    machine.num_rows = num_rows
    centred = evaluated = None
    if centring is not None:
        mean = PrivateMachine(centring.policy, centring.num_features, machine.num_samples, ledger, keys, **terms)
        mean.num_rows = num_rows
        centred = Centred(centring, samples, mean, beside=beside)
    if evaluation is not None:
        own = PrivateMachine(evaluation.policy, evaluation.rows.width, num_rows, ledger, keys, **terms)
        evaluated = Evaluated(evaluation, shapes, own, beside=beside)
    return Parts(centred, evaluated)


def refuse_parts(
    kind: str,
    *,
    centres: bool,
    evaluates: bool,
    centring: Centring | None,
    evaluation: Evaluation | None,
    per_owner: bool = False,
) -> None:
    """Refuse parts that a kind of machine cannot have.

    Raises
    ------
    ConfigurationError
    """
    if per_owner and (centring is not None or evaluation is not None):
        what = "centring" if centring is not None else "evaluation"
        raise ConfigurationError(f"Expected no {what} beside samples_per_owner, got one, which counts samples.")
    if centring is not None and not centres:
        raise ConfigurationError(f"Expected no centring for {kind}, got one: its samples are not seen from a centre.")
    if evaluation is not None and not evaluates:
        raise ConfigurationError(
            f"Expected no evaluation for {kind}, got one: an epoch goes through all of its samples, and none can be "
            "set aside."
        )
