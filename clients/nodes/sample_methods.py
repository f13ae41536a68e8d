"""The methods of a machine with per-sample gradients: client, policy, and how requests are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from ...privacy import ConfigurationError, PrivacyPolicy, RefusedError, Trust, protocol
from ..adapters.gradient_updates import GradientUpdateClient
from ..full_batch_client import FullBatchClient
from ..messages.requests import malformed
from ..mu2_client import Mu2Client
from ..noisy_sgd_client import NoisySGDClient
from ..private_client import PrivateClient
from ..table_statistics_client import StatisticsClient

_EVERY_SAMPLE: Mapping[str, Any] = {"order": "all", "mechanism": "independent", "release_rule": "paper"}
_COUNTED: Mapping[str, Any] = {"clip_unit": "nonnegative", "max_participations": 1}
_TRUSTS: tuple[Trust, ...] = ("untrusted-server", "secure-aggregation")


@dataclass(frozen=True)
class Scale:
    """Constants without dimension: they hold for any data whose records have a known bound R (docs/tuning.md).

    Parameters
    ----------
    clip : float
        S / R.
    travel : float
        eta S R: how far one unclipped step moves the scores of the longest record.
    """

    clip: float
    travel: float

    def step(self, clip_norm: float, bound: float, *, slower: float = 1.0) -> float:
        """Eta for records of length R and a clip, divided by ``slower``."""
        return self.travel / (clip_norm * bound * slower)


FULL_BATCH = Scale(0.1, 120.0)
"""For full batches with a momentum of :data:`MOMENTUM`; the travel is that of all rounds together."""
MOMENTUM = 0.9
MU2 = Scale(0.15, 10.0)
"""For mu^2-SGD, in up to eight rounds."""
MU2_ROUNDS = 8
SGD = Scale(0.4, 6.0)
"""For steps along one round's mean gradient."""


@dataclass(frozen=True)
class SampleMethod:
    """One way of training on per-sample gradients."""

    name: str
    """Value of the setting ``method``."""
    client: type[PrivateClient]
    strategy: str
    """The server's strategy in :mod:`murmurfl.strategies`."""
    scale: Scale | None = None
    """Of its clip and steps; None if it takes no steps, and its rows are 1 long."""
    batched: Mapping[str, Any] | None = None
    """Policy fields for batches of samples that are each used once; None if the method has none."""
    whole: Mapping[str, Any] | None = None
    """Policy fields for releases of all samples; None if the method has none."""

    @property
    def updates(self) -> bool:
        """Whether the server takes releases as updates of its model, and not as gradients."""
        return issubclass(self.client, GradientUpdateClient)

    def policy(self, *, batch_size: int | None, **chosen: Any) -> PrivacyPolicy:
        """A machine's policy, with None for releases of all samples; ``chosen`` fields win over the method's."""
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

    def steps(self, clip_norm: float, bound: float, rounds: int) -> dict[str, float]:
        """Options of its strategy for records of length R and a clip."""
        if self.scale is None:
            return {}
        slower = {MU2: max(rounds / MU2_ROUNDS, 1.0) ** 2, FULL_BATCH: float(rounds)}.get(self.scale, 1.0)
        step = self.scale.step(clip_norm, bound, slower=slower)
        return {"learning_rate": step, "momentum": MOMENTUM} if self.scale is FULL_BATCH else {"learning_rate": step}

    def check(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy that this method's machines cannot keep, or under which they would add no noise."""
        if policy.trust not in _TRUSTS:
            raise ConfigurationError(
                f"Expected trust one of {_TRUSTS}, got {policy.trust!r}: this machine's noise is its own."
            )
        self.client.check_policy(policy)


_KNOWN = (
    SampleMethod("full-batch", FullBatchClient, "FullBatch", FULL_BATCH, whole=_EVERY_SAMPLE),
    SampleMethod("mu2", Mu2Client, "Mu2", MU2, batched={"mechanism": "cancelling"}),
    SampleMethod("noisy-sgd", NoisySGDClient, "NoisySGD", SGD, batched={"mechanism": "independent"}),
    SampleMethod(
        "fedavg", GradientUpdateClient, "CorrelatedFedAvg", SGD, batched={"mechanism": "blt"}, whole=_EVERY_SAMPLE
    ),
    SampleMethod("statistics", StatisticsClient, "Statistics", whole={**_EVERY_SAMPLE, **_COUNTED}),
)
SAMPLE_METHODS: Mapping[str, SampleMethod] = {method.name: method for method in _KNOWN}


def sample_method(name: str) -> SampleMethod:
    """The method of a name."""
    found = SAMPLE_METHODS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigurationError(f"Expected method one of {', '.join(map(repr, SAMPLE_METHODS))}, got {name!r}.")
    return found


_RECORDS = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)
Layout = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a model's arrays, in order."""


def read_request(message: Message, method: SampleMethod, layout: Layout) -> tuple[str, RecordDict]:
    """The kind of a request ("train", "evaluate" or "query") and its content under the protocol's record keys.

    Refuses a request of another method's strategy or about another model; the texts depend on the request alone.
    """
    kind = message.metadata.message_type.split(".")[0]
    if kind == MessageType.EVALUATE:
        return kind, message.content
    entries = _entries(message.content, method)
    if kind == MessageType.TRAIN and entries.get(protocol.ASK) == protocol.ASK_SEAL:
        return kind, RecordDict({protocol.CONFIG: entries})
    if kind == MessageType.TRAIN and protocol.ASK in entries:
        _check_asked_as(method, updates=True)
        return MessageType.QUERY, RecordDict({protocol.CONFIG: entries})
    if kind == MessageType.QUERY:
        _check_asked_as(method, updates=False)
        return kind, RecordDict({protocol.CONFIG: entries})
    records = [record for record in message.content.array_records.values() if len(record)]
    if protocol.RELEASE_OF not in entries and len(records) != method.client.query_points:
        raise malformed(
            f"expected {method.client.query_points} models, got {len(records)}: this machine is for {method.strategy}"
        )
    numbered = [(str(i), shape) for i, (_, shape) in enumerate(layout)]
    for record in records:
        if [(name, tuple(array.shape)) for name, array in record.items()] not in (list(layout), numbered):
            raise malformed(
                "expected the arrays of what is trained: start the strategy with "
                "murmurfl.clients.trainable_arrays(module), not with a whole state_dict, or with initial_arrays() of a "
                "LinearEstimator"
            )
    content: dict[str, Any] = dict(zip(_RECORDS, records, strict=False))
    return kind, RecordDict({**content, protocol.CONFIG: entries})


def _entries(content: RecordDict, method: SampleMethod) -> ConfigRecord:
    """The record in murmurfl's protocol, under whatever key."""
    found = [record for record in content.config_records.values() if protocol.VERSION in record]
    if len(found) != 1:
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this machine speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states "
            f"{'several versions' if found else 'no version'}: the server must use murmurfl's {method.strategy}",
        )
    return found[0]


def _check_asked_as(method: SampleMethod, *, updates: bool) -> None:
    """CorrelatedFedAvg asks in messages of training, the other strategies in queries: a machine answers its own."""
    if method.updates != updates:
        evaluation = ", or PrivateEvaluation(of_updates=True)" if method.updates else ""
        raise malformed(f"this machine is for {method.strategy}{evaluation}, and another strategy asks")
