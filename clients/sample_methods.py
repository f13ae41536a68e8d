"""What a machine with per-sample gradients can take part in: which client it is, and the policy that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..privacy import ConfigurationError, PrivacyPolicy, Trust
from .base import PrivateClient
from .full_batch import FullBatchClient
from .gradient_updates import GradientUpdateClient
from .mu2 import Mu2Client
from .noisy_sgd import NoisySGDClient

_EVERY_SAMPLE: Mapping[str, Any] = {"order": "all", "mechanism": "independent", "release_rule": "paper"}
_TRUSTS: tuple[Trust, ...] = ("untrusted-server", "secure-aggregation")


@dataclass(frozen=True)
class SampleMethod:
    """One way of training on per-sample gradients.

    Parameters
    ----------
    name : str
        As ``method`` has it.
    client : type of PrivateClient
        The machine.
    strategy : str
        The server's strategy in :mod:`murmurfl.strategies`.
    batched : mapping, optional
        What of the policy belongs to batches of samples that are each used once; None if it has none.
    whole : mapping, optional
        What of the policy belongs to releases of all samples; None if there are none.
    """

    name: str
    client: type[PrivateClient]
    strategy: str
    batched: Mapping[str, Any] | None = None
    whole: Mapping[str, Any] | None = None

    @property
    def updates(self) -> bool:
        """Whether the server takes releases as updates of its model, and not as gradients."""
        return issubclass(self.client, GradientUpdateClient)

    def policy(self, *, batch_size: int | None, **chosen: Any) -> PrivacyPolicy:
        """The policy of a machine.

        Parameters
        ----------
        batch_size : int, optional
            b, samples in a release; None for all of them.
        **chosen
            Fields of :class:`~murmurfl.privacy.PrivacyPolicy`; they win over the method's own.

        Raises
        ------
        ConfigurationError
            If the method has no such releases.
        """
        own = self.whole if batch_size is None else self.batched
        if own is None:
            expected = "left out" if self.batched is None else "set"
            why = "every release is a sum over all samples" if self.batched is None else "samples in a release"
            raise ConfigurationError(
                f"Expected batch_size to be {expected} with method {self.name!r} ({why}), got {batch_size!r}."
            )
        policy = PrivacyPolicy(**{"batch_size": 1 if batch_size is None else batch_size, **own, **chosen})
        self.check(policy)
        return policy

    def check(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy that this method's machines cannot keep, or under which they would add no noise.

        Raises
        ------
        ConfigurationError
        """
        if policy.trust not in _TRUSTS:
            raise ConfigurationError(
                f"Expected trust one of {_TRUSTS}, got {policy.trust!r}: this machine's noise is its own."
            )
        self.client.check_policy(policy)


_KNOWN = (
    SampleMethod("full-batch", FullBatchClient, "FullBatch", whole=_EVERY_SAMPLE),
    SampleMethod("mu2", Mu2Client, "Mu2", batched={"mechanism": "cancelling"}),
    SampleMethod("noisy-sgd", NoisySGDClient, "NoisySGD", batched={"mechanism": "independent"}),
    SampleMethod("fedavg", GradientUpdateClient, "CorrelatedFedAvg", batched={"mechanism": "blt"}, whole=_EVERY_SAMPLE),
)
SAMPLE_METHODS: Mapping[str, SampleMethod] = {method.name: method for method in _KNOWN}
"""By name."""


def sample_method(name: str) -> SampleMethod:
    """A method by its name.

    Raises
    ------
    ConfigurationError
        If there is none of that name.
    """
    found = SAMPLE_METHODS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigurationError(f"Expected method one of {', '.join(map(repr, SAMPLE_METHODS))}, got {name!r}.")
    return found
