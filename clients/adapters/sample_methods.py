"""The two halves of an app with per-sample gradients: a model of whatever library, and a method.

A method says which client answers, by which policy, and how requests are read. With ``fedavg`` gradients are updates of
a model, for :class:`~murmurfl.strategies.CorrelatedFedAvg`: a release is the sum over all samples, or the mean over a
batch, of minus the clipped gradient. The server adds up releases, divides, and takes a step of its own along them, so
that its optimisers work on gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from ...privacy import ConfigurationError, PrivacyPolicy, RefusedError, Trust, protocol
from ..baseline_clients import NoisySGDClient
from ..full_batch_client import FullBatchClient
from ..messages import malformed
from ..mu2_client import Mu2Client
from ..one_shot_client import StatisticsClient
from ..private_client import PrivateClient
from ..queries import Measure
from ..records.places import TableRows
from ..records.schema import Schema
from .per_sample_gradients import PerSampleGradients


@dataclass(frozen=True)
class MachineModel:
    """What an app needs of a model, whatever library it is of."""

    gradients: PerSampleGradients
    names: tuple[str, ...]  # of the arrays that are trained, in order
    check_schema: Callable[[Schema, Measure | None], None]
    """Refuses a schema that the model cannot take, and a model, or measure, that does not treat each record by itself.
    Both are tried on records made up from the schema, and on no others."""
    measure: Callable[[Callable[..., Any] | None], Measure] | None = None
    """``measure(right)`` says which predictions are right, for a private evaluation; ``right`` is a project's own."""
    bound: Callable[[Schema], float] = field(default=lambda _: math.inf)
    """R of the presets: how long a record is with what stands beside it; infinite where nothing says so."""
    schema: Schema | None = None  # what a record is, where the model says it itself: for simulations


def measured_bound(gradients: PerSampleGradients, start: Sequence[NDArray[Any]], schema: Schema) -> float:
    """R of a model of any kind, from its gradients at the public start for records made up from a schema.

    A linear score's gradient is R / sqrt(2) long where two classes are as likely, so it is sqrt(2) times their median;
    infinite if there is no gradient. No record of any machine is looked at.
    """
    lengths = []
    for example in schema.examples():
        with suppress(Exception):  # of an extreme record, which a machine's own may fail for as well
            lengths.append(float(np.linalg.norm(np.asarray(gradients(start, example), np.float64))))
    found = [length for length in lengths if math.isfinite(length) and length > 0]
    return math.sqrt(2) * float(np.median(found)) if found else math.inf


def statistics_model(schema: Schema) -> MachineModel:
    """The rows of a table's statistics in the place of an app's model."""

    def check_schema(found: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - an app's interface
        if TableRows(found).rows != rows.rows:
            raise ConfigurationError(
                "Expected the columns that the app's statistics are of, got a schema with others: use one schema.toml.",
                kind="mismatch",
            )

    rows = TableRows(schema)
    return MachineModel(rows, ("statistics",), check_schema, schema=schema)


class GradientUpdateClient(PrivateClient):
    """A machine whose updates are minus its clipped per-sample gradients.

    Notes
    -----
    With ``order="all"`` a release is a sum, and says of how many samples; otherwise it is a mean over a batch and
    counts once.

    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner by others of that
    owner, where the policy has samples_per_owner), provided row i of ``gradients`` depends on sample i alone.
    Proof: docs/proofs/release-rule.md.
    """

    summable: ClassVar[bool] = True

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """Weight -1: a step along the release lowers the loss."""
        return (-1.0,)

    def fit(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[list[NDArray[np.float64]], int, dict[str, Any]]:
        """Answer a training request with a release and its guarantee."""
        sent, samples, entries = super().fit(parameters, config)
        policy = self.machine.policy
        loss = self.machine.plan.loss.compose(*(machine.plan.loss for machine in self.beside))
        stated: dict[str, Any] = {**loss.statement(), protocol.DELTA: policy.delta, protocol.CLIENT_LEVEL: 0}
        if policy.trust == "secure-aggregation":
            stated[protocol.MIN_HONEST] = policy.sums.min_honest
        counted = policy.sums_samples or protocol.RELEASE_OF in config
        return sent, samples if counted else 1, {**entries, **stated}

    def statement(self, session: str) -> dict[str, Any]:
        """The machine's privacy statement with its unit."""
        return {**super().statement(session), "unit": "sample", "evaluation-allowed": False}


_EVERY_SAMPLE: Mapping[str, Any] = {"order": "all", "mechanism": "independent", "release_rule": "paper"}
_COUNTED: Mapping[str, Any] = {"clip_unit": "nonnegative", "max_participations": 1}
_TRUSTS: tuple[Trust, ...] = ("untrusted-server", "secure-aggregation")


@dataclass(frozen=True)
class Scale:
    """Constants without dimension: they hold for any data whose records have a known bound R (docs/tuning.md)."""

    clip: float
    """S / R."""
    travel: float
    """eta S R: how far one unclipped step moves the scores of the longest record."""

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
                f"Expected batch_size to be {expected} with method {self.name!r} ({why}), got {batch_size!r}.",
                kind="conflict",
                setting="batch_size",
                got=batch_size,
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
                f"Expected trust one of {_TRUSTS}, got {policy.trust!r}: this machine's noise is its own.",
                kind="unknown-name",
                setting="trust",
                got=policy.trust,
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
        raise ConfigurationError(
            f"Expected method one of {', '.join(map(repr, SAMPLE_METHODS))}, got {name!r}.",
            kind="unknown-name",
            setting="method",
            got=name,
        )
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
