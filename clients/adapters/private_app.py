"""A ClientApp with sample-level privacy from a model, a loss, samples and an epsilon.

Where :class:`~murmurfl.clients.CorrelatedNoiseMod` protects whole updates of somebody's training, here the client
computes and clips the gradient of each sample itself. Replacing a sample then moves a sum of N gradients by 2 S,
whatever N is, and the noise in their mean is N times smaller.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from ...privacy import protocol
from ...privacy.accounting.loss import NOTHING_ASSUMED, SumAssumption
from ...privacy.errors import ConfigurationError, MurmurflError, RefusedError, formerly, is_interrupt
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.release.policy import OF_SUMS, PrivacyPolicy, Trust
from ...privacy.sums.masking import Masking
from ..algorithms import Algorithm, app_method
from ..messages import SilentFailureError, answer, in_simulation, malformed, records_being_read
from ..nodes.client_file import SampleNode
from ..nodes.operators_file import NODE_CONFIG_KEY, NODE_CONFIG_VARIABLE, operators_file
from ..private_client import PrivateClient, handled
from ..queries import EvaluationShare, Measure
from ..records.client_records import Items, OwnedSamples, OwnerGradients, Records, file_items, items_of
from ..records.drafting import inferred
from ..records.schema import Schema
from ..simulation.simulated_clients import SimulatedSums, simulated_client
from .client_model import ClientModel, median_bound, statistics_model
from .per_sample_gradients import GRADIENT_MEMORY_MIB, PerSampleGradients

if TYPE_CHECKING:
    from .function_model import Gradient

logger = logging.getLogger(__name__)
SamplesOf = Callable[[Context], Any]
"""A function of Flower's context that gives a client its samples."""
_SOME_CLIENTS = 10
"""Clients of a simulation whose number is not known yet."""
_MEASURED = 64
"""Records whose gradients are measured for a step."""
_KEPT_BYTES = 1 << 29
"""Most memory of clients' samples that a worker of a simulation keeps: 512 MiB."""
_MOST_KEPT = 256
"""Most clients whose samples it keeps."""


class PrivateClientApp(ClientApp):
    """A ClientApp whose clients answer with private sums of per-sample gradients; :func:`private_client_app` makes it.

    ``policy``, ``helpers``, ``seed`` and ``schema`` are those of simulated clients. So is ``evaluation``, but which
    predictions are right it says on every client.

    Notes
    -----
    **Formal guarantees.** Everything a client returns is mu-GDP for replacement of one record, under the policy of its
    node's file or, in simulation, ``policy``; :func:`private_client_app` says of what records, and against whom.
    Proof: docs/proofs/release-rule.md.
    """

    def __init__(
        self,
        model: ClientModel,
        method: Algorithm,
        samples: Any,
        policy: PrivacyPolicy,
        *,
        helpers: int,
        seed: int,
        schema: Schema | None = None,
        evaluation: EvaluationShare | None = None,
        mods: list[Mod] | None = None,
        bound: float = math.inf,
    ) -> None:
        super().__init__(mods=[self._as_participant, *(mods or [])])
        self.model = model
        self.method = method
        self.policy = policy
        self.evaluation = evaluation
        self.schema = schema
        self._bound = bound
        self._tried: set[tuple[str, bool]] = set()
        self._changes: bool | None = None
        self._inferred: Schema | None = None
        self._samples = samples
        self._seed = seed
        self._sums = SimulatedSums(helpers, seed) if policy.trust == "secure-aggregation" else None
        self._kept: OrderedDict[str, Records] = OrderedDict()
        self._real: PrivateClient | None = None
        for register in (self.train, self.evaluate, self.query):
            register()(self._answer)
        # Flower hands an app's mods no message of a kind that the app has no function for, and helpers answer in one.
        self.query("open")(_not_a_helper)
        self._kinds = frozenset(self._registered_funcs)
        self._released: tuple[dict[str, list[Any]], dict[str, Any]] | None = None
        """The last answer's arrays and other records, before the project's own mods saw it."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; nothing that a mod or a lifespan raises reaches a server."""
        category, _, action = message.metadata.message_type.partition(".")
        if f"{category}.{action or 'default'}" not in self._kinds:
            return answer(message, _raising(_foreign_request(self.method)))
        try:
            return super().__call__(message, context)
        except SilentFailureError:
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            return answer(message, _raising(error))

    def train(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Refuse a function of a project's own; see :meth:`query`."""
        self._refuse_functions("train")
        return super().train(action, mods=mods)

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Refuse a function of a project's own; see :meth:`query`."""
        self._refuse_functions("evaluate")
        return super().evaluate(action, mods=mods)

    def query(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Refuse a function of a project's own, whose answers would have no noise and no place in a ledger.

        Raises
        ------
        ConfigurationError
            Always, once the app is made.
        """
        self._refuse_functions("query")
        return super().query(action, mods=mods)

    def _refuse_functions(self, kind: str) -> None:
        if hasattr(self, "_kinds"):
            remedy = {
                "train": "murmurfl.clients.CorrelatedNoiseMod releases updates of a train function",
                "evaluate": "pass evaluation=0.1 for a private one, or evaluate on public data (evaluate_fn)",
                "query": "method='statistics' releases private statistics, and RecordQuery any query",
            }
            raise ConfigurationError(
                f"Expected no function of your own on a private_client_app, got @app.{kind}(...): its answers would "
                f"have no noise, and no ledger would know of them. {remedy[kind][0].upper()}{remedy[kind][1:]}.",
                kind="unsupported",
                setting=kind,
            )

    def steps(self) -> dict[str, float]:
        """Step, and momentum of full batches, for the server's strategy: ``FullBatch(..., **app.steps())``.

        They go with the clip of the app's policy, and follow from the schema and the model as that does
        (docs/tuning.md). Real clients whose operators set other clips need other steps.

        The rule is that of linear models. A network's step has a second limit, a share of the norm of its untrained
        parameters, which was measured for full batches; the other methods have no rule for networks.

        Without a schema with bounds, R is measured on the records of simulated client 0, and the log says so. Where
        ``samples`` gives none in this process, as on the server of a real federation, a schema is needed.

        Raises
        ------
        ConfigurationError
            If there is neither a schema with bounds nor a simulated client, or no rule for the model and the method.
        """
        bound = self.measured_bound() if math.isinf(self._bound) else self._bound
        return self.method.steps(self.policy.clip_norm, bound, self.policy.max_participations, norm=self.model.norm)

    def measured_bound(self) -> float:
        """Return R by the gradients of a simulated client's records, which nothing protects."""
        node_config: dict[str, Any] = {"partition-id": 0, "num-partitions": _SOME_CLIENTS}
        context = Context(run_id=0, node_id=0, node_config=node_config, state=RecordDict(), run_config={})
        found, cause, fitting = math.inf, None, []
        try:
            items = items_of(self._given(context))
            schema = self.schema or self.model.schema or inferred(items)
            records = Records(items, schema, together=True)
            fitting = [number for number in range(len(records)) if records.fits[number]][:_MEASURED]
            found = median_bound(self.model.gradients, self.model.begins(), [records[i : i + 1] for i in fitting])
        except Exception as error:  # a project's own code raises what it likes
            cause = error
        if math.isinf(found):
            why = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
            if cause is None and fitting:
                why = (
                    f" (none of {len(fitting)} records of simulated client 0 has a gradient: is the loss a function of "
                    "the model's output and the target? Else protect whole updates, by CorrelatedNoiseMod)"
                )
            raise ConfigurationError(
                "Expected a schema with bounds of every number, from which steps follow, or samples of a simulated "
                f"client to measure, got neither{why}: pass schema=, or choose a learning_rate.",
                kind="missing",
                setting="schema",
            ) from cause
        logger.warning(
            "Steps follow from the gradients of %d records of simulated client 0, as samples(context) gives them for "
            "partition 0, since there is no schema with bounds. Real clients need a schema; then steps follow from it.",
            len(fitting),
        )
        return found

    def check_schema(self, schema: Schema, *, evaluated: bool) -> None:
        """Refuse a model that cannot take records of a schema, or does not treat each by itself.

        The schema alone decides: the model is tried on records that are made up from it.
        """
        if (schema.digest, evaluated) not in self._tried:
            self.model.check(schema, self._measure if evaluated else None)
            self._tried.add((schema.digest, evaluated))

    def records(self, context: Context, schema: Schema, items: Items | None = None, *, count: int) -> Records:
        """Return the ``count`` records of a real client, from ``items`` or the project's ``samples``.

        No record can be a reason to refuse.
        """
        found = items_of(self._given(context)) if items is None else items
        # With owners a file may have any number of rows: what is fixed is how many places there are for owners.
        made = Records(found, schema, together=True) if schema.owner else Records(found, schema, count=count)
        made.log()
        return made

    def _simulated_records(self, context: Context) -> Records:
        """Return the records of a simulated client, whose schema may be inferred from those of all clients."""
        items = items_of(self._given(context))
        schema = self.schema or self.model.schema or self._inferred_schema(context, items)
        self.check_schema(schema, evaluated=self.evaluation is not None)
        made = Records(items, schema, together=True)
        if not made.fits.any():
            raise ConfigurationError(
                f"Expected records that fit their schema, got none: {made.report()}", kind="missing"
            )
        if not made.fits.all():
            made.log()
        if self._changes is None:  # of the first client in a process, whose samples are read twice
            again = items_of(self._given(context)) if _is_function(self._samples) else None
            self._changes = made.changes(again)
        return made

    def _inferred_schema(self, context: Context, items: Items) -> Schema:
        """Return the schema that all simulated clients' records seem to have; read once in a process."""
        if self._inferred is None:
            logger.warning(
                "What a record is was inferred from all data of simulated clients. A real node needs a schema: "
                "`murmurfl schema FILE` drafts one."
            )
            self._inferred = inferred(*self._items_of_all(context, items))
        return self._inferred

    def _items_of_all(self, context: Context, items: Items) -> list[Items]:
        """Return every simulated client's items, in order; ``items`` are those of the context's own client."""
        own, clients = (context.node_config.get(key) for key in ("partition-id", "num-partitions"))
        if not _is_function(self._samples) or not isinstance(own, int) or not isinstance(clients, int):
            return [items]
        others = (_as_client(context, number) for number in range(clients))
        return [items if number == own else items_of(self._given(one)) for number, one in enumerate(others)]

    @cached_property
    def _measure(self) -> Measure | None:
        right = None if self.evaluation is None else self.evaluation.right
        return None if self.model.measure is None else self.model.measure(right)

    def _given(self, context: Context) -> Any:
        return self._samples(context) if _is_function(self._samples) else self._samples

    def _as_participant(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the last nodes of a simulation of secure aggregation be helpers; clients see the others only."""
        if self._sums is None or not in_simulation():
            return self._through_mods(message, context, call_next)
        return self._sums.answer(message, context, lambda own: self._through_mods(message, own, call_next))

    def _through_mods(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer through the project's own mods, which may neither fail on a greeting nor change a release."""
        if any(protocol.ASK in record for record in message.content.config_records.values()):
            try:
                return call_next(message, context)
            except Exception:
                logger.warning(
                    "A mod of this app failed on a message that asks for no training (a greeting has no model and no "
                    "round); it was answered without the app's mods.",
                    exc_info=True,
                )
                return self._answer(message, context)
        self._released = None
        reply = call_next(message, context)
        return answer(message, lambda: self._unfiltered(reply)) if self._released and not reply.has_error() else reply

    def _unfiltered(self, reply: Message) -> RecordDict:
        """Return the content of a reply that mods have seen, with the records that a server needs to read a release.

        Everything in these records but the release is public.
        """
        if self._released is None:
            return reply.content
        arrays, others = self._released
        for key, made in arrays.items():
            found = reply.content.get(key, None)
            if not isinstance(found, ArrayRecord) or _values(found) != made:
                raise ConfigurationError(
                    "Expected the mods of a private_client_app to leave the arrays of a reply as they are, got others: "
                    "the server could not read the release. Leave out mods that clip, add noise, compress or drop "
                    "arrays (fixedclipping_mod, LocalDpMod, secaggplus_mod); a release is clipped and has its noise.",
                    kind="unsupported",
                    setting="mods",
                )
        content = reply.content.copy()
        for key, record in others.items():
            if key not in content:
                content[key] = record
        return content

    def _answer(self, message: Message, context: Context) -> Message:
        def content() -> RecordDict:
            made = self._content(message, context)
            if made.array_records:
                arrays = {key: _values(record) for key, record in made.array_records.items()}
                self._released = arrays, {key: record.copy() for key, record in made.items() if key not in arrays}
            return made

        return answer(message, content)

    def _content(self, message: Message, context: Context) -> RecordDict:
        layout = list(zip(self.model.names, self.model.gradients.shapes, strict=True))
        kind, content = _read_request(message, self.method, layout)
        reply = handled(self._client, kind, content, context)
        asks = content.config_records.get(protocol.CONFIG, {}).get(protocol.ASK)
        if asks == protocol.ASK_PRIVACY and self._real is None and in_simulation():
            reply.config_records[protocol.CONFIG].update(self._noted(context))
        return reply

    def _noted(self, context: Context) -> dict[str, Any]:
        """Return what a simulated client's records show that no made-up record does; a real client keeps it."""
        records = self._kept_records(context)
        changing = {protocol.CHANGING: 1} if self._changes else {}
        if records.fits.all():
            return changing
        reason = "".join(c for c in records.reasons.most_common(1)[0][0] if c.isprintable())[:_LONGEST_REASON]
        invalid = {protocol.INVALID_RECORDS: int((~records.fits).sum()), protocol.INVALID_REASON: reason}
        return {protocol.RECORDS: len(records), **invalid, **changing}

    def _client(self, context: Context) -> PrivateClient:
        if self._real is not None:
            return self._real
        if not in_simulation():
            return self._of_operators_file(context)
        records = self._kept_records(context)
        masking = None if self._sums is None else self._sums.masking(context, self.policy.sums)
        made = simulated_client(context, seed=self._seed)
        return self.client(records, self.policy, masking=masking, evaluation=self.evaluation, **made)

    def answer_as(self, client: PrivateClient) -> None:
        """Answer every message from now on with one real client."""
        self._real = client

    def _of_operators_file(self, context: Context) -> PrivateClient:
        """Return the real client of a plain ``flower-supernode``, made once."""
        path = operators_file(context.node_config)
        if path is None:
            raise ConfigurationError(
                f"Expected an operator's file on a real node, got none: start it with `murmurfl node FILE`, or name "
                f"the file with the environment variable {NODE_CONFIG_VARIABLE} or --node-config "
                f"'{NODE_CONFIG_KEY}=\"...\"'. What the app says of privacy is for simulation only.",
                kind="missing",
            )
        with configuring():
            setup = self._real_setup(SampleNode.read(path), context.node_config)
        with records_being_read():
            self.answer_as(setup.client())
        return self._client(context)

    def real_client(
        self,
        node: SampleNode,
        node_config: Mapping[str, Any] | None = None,
        *,
        ledger: SQLiteLedger | None = None,
        items: Items | None = None,
    ) -> PrivateClient:
        """Return a real client: this app's model and samples; the policy, ledger and key of an operator's file.

        The ledger outlives the process; key and nonces are the operating system's. Nothing of the app's own policy and
        nothing of a run configuration is looked at. ``node_config`` is the SuperNode's own, from the operator's command
        line. An audit brings a ``ledger``, and ``items`` that it makes up.
        """
        return self._real_setup(node, node_config, ledger=ledger).client(items)

    def check_before_records(self, node: SampleNode) -> None:
        """Raise what keeps a real client from being made whatever its records are; none of them is read."""
        with configuring():
            self._real_setup(node, None)

    def _real_setup(
        self, node: SampleNode, node_config: Mapping[str, Any] | None, *, ledger: SQLiteLedger | None = None
    ) -> RealSetup:
        """Return everything of a real client but its records, of which none is read; refuse what cannot work."""
        if self.method is not app_method(node.method):
            raise ConfigurationError(
                f"Expected method = {self.method.name!r}, which the app is made for, got {node.method!r}.",
                kind="mismatch",
                setting="method",
                got=node.method,
            )
        seen = {**(node_config or {}), **node.node_config}
        context = Context(run_id=0, node_id=0, node_config=seen, state=RecordDict(), run_config=dict(node.run_config))
        schema = Schema.read_file(Path(node.schema))
        schema.check_for_real_nodes()
        self.check_schema(schema, evaluated=node.evaluation is not None)
        # Never made here: a fresh one would have forgotten what was spent.
        ledger = SQLiteLedger(node.ledger) if ledger is None else ledger
        policy = node.policy(ledger)
        _check_owned(schema, policy)
        return RealSetup(self, node, context, schema, ledger, policy, node.masking())

    def client(
        self,
        records: Records,
        policy: PrivacyPolicy,
        *,
        masking: Masking | None,
        evaluation: EvaluationShare | None,
        places: int | None = None,
        **made: Any,
    ) -> PrivateClient:
        """Return the client with these records and this policy, of which an evaluation has its share.

        ``places`` are for a real client's owners (:meth:`Records.by_owner`).
        """
        _check_owned(records.schema, policy)
        samples: Records | OwnedSamples = records
        gradients: PerSampleGradients = self.model.gradients
        if policy.samples_per_owner:
            secret = made["ledger"].secret_of_owners(made["keys"])
            samples = records.by_owner(policy.samples_per_owner, places=places, secret=secret)
            gradients = OwnerGradients(gradients, one_by_one=places is not None)
        if evaluation is not None:
            made["queries"] = [evaluation.evaluation(policy, self._measure, samples)]
            policy = evaluation.training(policy)
        return self.method.client(gradients, samples, policy, masking=masking, **made)

    def _kept_records(self, context: Context) -> Records:
        """Return a simulated client's records, of which a worker keeps the latest."""
        key = repr((sorted(context.node_config.items()), sorted(context.run_config.items())))
        if key not in self._kept:
            self._kept[key] = self._simulated_records(context)
            while len(self._kept) > 1 and (len(self._kept) > _MOST_KEPT or self._bytes_kept() > _KEPT_BYTES):
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _bytes_kept(self) -> int:
        return sum(records.nbytes for records in self._kept.values())


@dataclass(frozen=True)
class RealSetup:
    """A real client before its records are read."""

    app: PrivateClientApp
    node: SampleNode
    context: Context
    schema: Schema
    ledger: SQLiteLedger
    policy: PrivacyPolicy
    masking: Masking | None

    def client(self, items: Items | None = None) -> PrivateClient:
        """Read the records, or ``items`` in their place, and return the client.

        Notes
        -----
        **Formal guarantees.** The client's policy, ledger and key are those of its operator's file. Whether this fails
        may depend on records, so on a plain SuperNode no server is told
        (:func:`~murmurfl.clients.messages.records_being_read`).
        """
        node = self.node
        items = file_items(Path(node.samples), self.schema) if node.samples else items
        records = self.app.records(self.context, self.schema, items, count=node.num_records)
        own: dict[str, Any] = {"ledger": self.ledger, "keys": self.ledger.keys(), "name": node.client}
        own["places"] = node.num_records if node.samples_per_owner else None
        made = self.app.client(records, self.policy, masking=self.masking, evaluation=node.evaluation, **own)
        made.privatizer.check_data()  # before the node says that it is ready
        return made


@contextmanager
def configuring() -> Iterator[None]:
    """Turn what a project's own code raises, before any record is read, into a refusal to be configured."""
    try:
        yield
    except (MurmurflError, SilentFailureError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ConfigurationError(
            f"Expected a model that can be tried on made-up records, got {type(error).__name__}: {error}.",
            kind="failed",
        ) from error


def _check_owned(schema: Schema, policy: PrivacyPolicy) -> None:
    """Refuse a schema that does not belong to a policy, or asks for what an app of one's own has no place for."""
    if bool(schema.owner) != bool(policy.samples_per_owner):
        raise ConfigurationError(
            f"Expected samples_per_owner >= 1 with a schema that names an owner, and 0 with another, got "
            f"{policy.samples_per_owner} and owner = {schema.owner!r}.",
            kind="conflict",
            setting="samples_per_owner",
            got=policy.samples_per_owner,
        )
    if schema.owner and (len(schema.inputs) > 1 or any(part.name for part in schema.inputs)):
        # Said before any record is read: what fails later looks like absence.
        raise ConfigurationError(
            "Expected records of one array with owners, got several or named inputs in the schema: join them.",
            kind="unsupported",
            setting="owner",
        )
    if schema.label.class_weights:
        raise ConfigurationError(
            "Expected a schema without class_weights for your own model, got some: let its loss weigh classes.",
            kind="unsupported",
            setting="class_weights",
        )


def _raising(error: BaseException) -> Callable[[], RecordDict]:
    """Return a function that raises an error, for :func:`~murmurfl.clients.messages.answer`."""

    def fail() -> RecordDict:
        raise error

    return fail


def _foreign_request(method: Algorithm) -> RefusedError:
    """Return the refusal of a request that is none of murmurfl's."""
    return malformed(
        f"this client answers murmurfl's {method.strategy} and no function of a project's own, whose answers would "
        "have no noise: ask public data, or have the client answer a private query"
    )


def _values(record: ArrayRecord) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Return what a record has, which a mod may change in place."""
    return [(name, array.dtype, tuple(array.shape), array.data) for name, array in record.items()]


def _as_client(context: Context, number: int) -> Context:
    """Return the context of another simulated client, without state."""
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={**context.node_config, "partition-id": number},
        state=RecordDict(),
        run_config=context.run_config,
    )


@formerly(min_honest=OF_SUMS, min_cohort=OF_SUMS)
def private_client_app(
    model: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    samples: Any = None,
    *,
    policy: PrivacyPolicy | None = None,
    method: str = "full-batch",
    epsilon: float | None = None,
    mu: float | None = None,
    delta: float = 1e-5,
    clip_norm: float | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    trust: Trust = "untrusted-server",
    sums: SumAssumption = NOTHING_ASSUMED,
    helpers: int = 2,
    seed: int = 0,
    chunk: int | None = None,
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    schema: Schema | None = None,
    samples_per_owner: int = 0,
    evaluation: float | EvaluationShare | None = None,
    mods: list[Mod] | None = None,
    gradients: Gradient | None = None,
) -> PrivateClientApp:
    """Return a ClientApp that trains a model with differential privacy for every single sample.

    Parameters
    ----------
    model : torch.nn.Module, callable, LinearEstimator, JaxModel or Schema
        A module, or a function without arguments that makes one; what has ``requires_grad`` is trained. Or an estimator
        of scikit-learn's, in a :class:`~murmurfl.clients.LinearEstimator`, or a function of JAX's, in a
        :class:`~murmurfl.clients.JaxModel`. For ``statistics`` the table's
        :class:`~murmurfl.clients.Schema`.
    loss : callable, optional
        ``loss(output, target) -> scalar``, as PyTorch's criteria; default the cross-entropy.
    samples : callable, or samples
        ``samples(context)`` gives a client's own: (inputs, targets), a data set of such pairs, a table, or a
        ``DataLoader``, whose data set is taken item by item. Samples that are no function are every client's.
    policy : PrivacyPolicy, optional
        In place of ``epsilon`` to ``sums`` and ``samples_per_owner``.
    method : {"full-batch", "mu2", "noisy-sgd", "fedavg", "statistics"}
        The server's strategy: ``FullBatch``, ``Mu2``, ``NoisySGD``, ``CorrelatedFedAvg`` or ``Statistics``, of 1 round.
    epsilon, mu : float
        Privacy of all releases of one training together; exactly one of them. Epsilon is at ``delta``.
    clip_norm : float, optional
        S, the L2 bound on one sample's gradient. By default the method's share of R, how long a record of ``schema``
        can be; of a module, of its gradients for records made up from it. 1 without such a schema. A real client's
        clip is its operator's.
    rounds : int
        K, the most releases of one training.
    batch_size : int, optional
        b, samples in a release, each used once; left out where every release is a sum over all samples
        (``full-batch``, and ``fedavg`` by default).
    trust : {"untrusted-server", "secure-aggregation"}
    sums : SumAssumption
        Under ``secure-aggregation``: honest clients of every sum, and its fewest releases.
    helpers : int
        How many of a simulation's nodes, the last ones, are helpers, under ``secure-aggregation``.
    seed : int
        Seed of the simulated clients' keys and of the module that ``model`` makes. A simulation repeats if the strategy
        has a ``seed`` and a ``session`` of its own as well.
    chunk : int, optional
        The most samples whose gradients are computed together; default 128.
    gradient_memory_mib : float
        Memory for computing a module's gradients, in MiB, in a simulation: as many samples are computed together as
        fit. A real client computes one sample at a time.
    schema : Schema, optional
        What a record is. The model is tried on records made from it when the app is made. Without one a simulation
        infers it from all of a client's samples and says so; a real node has its operator's.
    samples_per_owner : int
        j, where the schema names an owner: all of an owner's samples are protected as one, and the first j are used.
    evaluation : float or EvaluationShare, optional
        Share of mu^2 for a private evaluation (:class:`~murmurfl.strategies.PrivateEvaluation`) on samples that are set
        aside for it. The training has the rest.
    mods : list of Mod, optional
        Flower mods of your own.
    gradients : callable, optional
        ``gradients(parameters, inputs, target)`` of one record, in NumPy or anything that gives arrays, in the place of
        a loss. ``model`` is then the public parameters with which training begins, by name or in a list. Unlike the
        code of a model, this function sees records (:class:`~.function_model.FunctionGradients`).

    Raises
    ------
    ConfigurationError
        If a value is impossible or contradicts another, or the model mixes samples.

    Notes
    -----
    The policy, or what stands for it, is that of *simulated* clients.

    **Formal guarantees.** Everything a client returns is mu-GDP for replacement of *one record*: a row of a file that
    murmurfl reads, or one item as it was handed over, if whatever made the items treats each by itself; with
    ``samples_per_owner`` all records of one owner. It holds against a server that chooses models, rounds,
    acknowledgements and stopping adaptively; under ``secure-aggregation`` if one helper and ``sums.min_honest``
    clients of each sum are honest, and the plan's ``loss.worst_case`` in the worst case. Simulated keys protect
    nobody's data.
    Proof: docs/proofs/release-rule.md, docs/proofs/records.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.clients import LinearEstimator
    >>> from murmurfl.strategies import FullBatch, ResultFolder
    >>> from sklearn.linear_model import LogisticRegression
    >>> model = LinearEstimator(LogisticRegression(), num_features=3, classes=(0, 1), num_samples=80)
    >>> def load(context):
    ...     features = np.random.default_rng(context.node_config["partition-id"]).normal(size=(20, 3))
    ...     return features, (features.sum(axis=1) > 0).astype(int)
    >>> app = private_client_app(model, samples=load, epsilon=4.0, rounds=5)
    >>> strategy = FullBatch(learning_rate=0.6, num_clients=4, callbacks=[ResultFolder(None)])
    >>> result = strategy.start(InProcessGrid(app, 4, {}), model.initial_arrays(), num_rounds=5)
    >>> model.fitted(result.arrays).coef_.shape
    (1, 3)
    """
    chosen = app_method(method)
    if samples is None:
        raise ConfigurationError(
            "Expected samples, got none: pass a function of Flower's context that gives (inputs, targets).",
            kind="missing",
            setting="samples",
        )
    if policy is None and rounds is None:
        raise ConfigurationError(
            "Expected rounds, the most releases of one training, got none: noise is made for so many.",
            kind="missing",
            setting="rounds",
        )
    share = EvaluationShare.of(evaluation)
    made = _client_model(model, loss, gradients, seed=seed, chunk=chunk, gradient_memory_mib=gradient_memory_mib)
    bound, known = math.inf, schema
    if known is None and not _is_function(samples):
        known = made.schema or inferred(items_of(samples))
    if known is not None:
        made.check(known, None if share is None or made.measure is None else made.measure(share.right))
    if schema is not None and chosen.scale is not None:  # one that was inferred is made from all records
        bound = made.bound(schema)
    settings: dict[str, Any] = {"epsilon": epsilon, "mu": mu, "delta": delta, "clip_norm": clip_norm, "rounds": rounds}
    settings |= {"batch_size": batch_size, "trust": trust, "sums": sums, "samples_per_owner": samples_per_owner}
    if policy is None:
        policy = _policy_of(chosen, bound, **settings)
    else:
        _refuse_beside_policy(settings)
    chosen.check(policy if share is None else share.training(policy))
    of_simulation = {"helpers": helpers, "seed": seed, "schema": known, "bound": bound}
    return PrivateClientApp(made, chosen, samples, policy, evaluation=share, mods=mods, **of_simulation)


def _policy_of(
    chosen: Algorithm, bound: float, *, clip_norm: float | None, mu: float | None, rounds: int | None, **settings: Any
) -> PrivacyPolicy:
    """Return the policy that an app's parameters stand for; the clip is by default the algorithm's share of R."""
    if clip_norm is None:
        clip_norm = 1.0 if chosen.scale is None or math.isinf(bound) else chosen.scale.clip * bound
    return chosen.policy(clip_norm=clip_norm, mu=mu or 0.0, max_participations=rounds, **settings)


def _refuse_beside_policy(settings: Mapping[str, Any]) -> None:
    """Refuse parameters that a policy already says."""
    usual = inspect.signature(private_client_app).parameters
    if named := [name for name, value in settings.items() if value != usual[name].default]:
        raise ConfigurationError(
            f"Expected policy or {', '.join(named)}, got both: a PrivacyPolicy says everything.",
            kind="conflict",
            setting="policy",
        )


def _client_model(
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    gradients: Gradient | None,
    *,
    seed: int,
    **limits: Any,
) -> ClientModel:
    """Return a model of whatever library it is."""
    if gradients is not None:
        from .function_model import function_client_model

        return function_client_model(gradients, model, loss)
    if isinstance(model, Schema):
        return statistics_model(model)
    from .sklearn_model import estimator_model, is_estimator

    if is_estimator(model):
        return estimator_model(model, loss)
    if type(model).__name__ == "JaxModel":
        from .jax_model import jax_client_model

        return jax_client_model(model, loss, **limits)
    from .keras_variables import is_keras

    if is_keras(model):
        from .keras_model import keras_client_model

        return keras_client_model(model, loss, seed=seed, **limits)
    from .torch_checks import torch_client_model

    return torch_client_model(model, loss, seed=seed, **limits)


def _is_function(samples: Any) -> bool:
    return callable(samples) and not hasattr(samples, "__getitem__")


def _not_a_helper(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's interface
    return Message(Error(protocol.OPENING_REFUSED, "this node is no helper"), reply_to=message)


_LONGEST_REASON = 200
_RECORDS = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)
_Layout = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a model's arrays, in order."""


def _read_request(message: Message, method: Algorithm, layout: _Layout) -> tuple[str, RecordDict]:
    """Return the kind of a request ("train", "evaluate" or "query") and its content under the protocol's record keys.

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
            f"expected {method.client.query_points} models, got {len(records)}: this client is for {method.strategy}, "
            "and reads nothing else; leave out other ArrayRecords"
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


def _entries(content: RecordDict, method: Algorithm) -> ConfigRecord:
    """Return the record in murmurfl's protocol, under whatever key."""
    found = [record for record in content.config_records.values() if protocol.VERSION in record]
    if len(found) != 1:
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this client speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states "
            f"{'several versions' if found else 'no version'}: the server must use murmurfl's {method.strategy}",
        )
    return found[0]


def _check_asked_as(method: Algorithm, *, updates: bool) -> None:
    """CorrelatedFedAvg asks in messages of training, the other strategies in queries: a client answers its own."""
    if method.updates != updates:
        evaluation = ", or PrivateEvaluation(of_updates=True)" if method.updates else ""
        raise malformed(f"this client is for {method.strategy}{evaluation}, and another strategy asks")
