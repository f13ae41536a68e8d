"""The base of every private client, and the ClientApp that hands it Flower's messages.

A request comes from a server that is not trusted. The whole request is checked before anything is computed, and is
refused with a fixed text if it is malformed. It decides nothing about privacy: clip, noise, cap, budget and batch are
the client's own (:class:`~murmurfl.privacy.PrivacyPolicy`). The client makes a release and answers with nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.errors import ConfigurationError, RefusedError
from ..privacy.ledger.ledger_records import Ledger
from ..privacy.mechanisms import State
from ..privacy.noise import NoiseKeys
from ..privacy.protocol import read_array
from ..privacy.release.clipping import StackedContributions, observing
from ..privacy.release.known_samples import known_by
from ..privacy.release.ledgered_privatizer import LedgeredPrivatizer, Release
from ..privacy.release.policy import PrivacyPolicy, check_owned
from ..privacy.release.prefix_sums import Privatizer, RowCache
from ..privacy.sums.masking import Masking
from .adapters.per_sample_gradients import (
    PerSampleGradients,
    Samples,
    combined_gradients,
    isolate,
    pick,
    rows_unmixed,
    stacked_gradients,
)
from .messages import (
    GRADIENTS,
    Request,
    answer,
    array_record,
    check_addressed,
    check_can_send,
    check_masking,
    check_version,
    entry_records,
    integer_entry,
    log_own_forecast,
    malformed,
    name_shown,
    outgoing_reply,
    read_points,
    reply_content,
    session_entry,
    skipped_entry,
    statement_entries,
    training_entries,
)
from .queries import ClientQuery, ClientTerms, QueryContext, QueryPart, read_query, refuse_queries


@dataclass(frozen=True)
class BatchedContribution:
    """Computation of several simulated clients of one kind and one model at once.

    ``contributions`` takes positions of clients and one batch of their samples, client after client. It gives, in
    the same order and up to rounding, each client's unclipped :meth:`PrivateClient.contribution`. ``note`` are public
    values that each client remembers with its release (:meth:`~murmurfl.privacy.Privatizer.noted`).
    """

    contributions: Callable[[Sequence[int], Any], StackedContributions]
    note: State | None = None


def _check_kind(kind: type[PrivateClient], name: str, policy: PrivacyPolicy) -> None:
    """Refuse an impossible name, and sums of releases where a class does not say that it serves them."""
    if not 0 < len(name) <= protocol.LONGEST_CLIENT_NAME:
        raise ConfigurationError(
            f"Expected a name of 1 to {protocol.LONGEST_CLIENT_NAME} characters, got {name!r}.",
            kind="malformed",
            setting="name",
            got=name,
        )
    # Not in check_policy: a subclass that overrides it without super() must not lose this.
    if policy.trust == "secure-aggregation" and not vars(kind).get("summable", False):
        raise ConfigurationError(
            f"Expected a kind of client that serves trust 'secure-aggregation', got {kind.__name__}: its "
            "server needs more than sums of releases, or nobody has said otherwise (summable = True in the class).",
            kind="conflict",
            setting="trust",
        )


class PrivateClient(NumPyClient):
    """A client that answers with private releases and nothing else.

    Parameters
    ----------
    gradients : PerSampleGradients
        The model's per-sample gradients.
    samples : Samples
        The client's data; used in order, each sample once.
    policy : PrivacyPolicy
        The client's own decisions.
    ledger : Ledger
        Where releases are recorded before they leave.
    keys : NoiseKeys
        The client's noise key.
    name : str
        The client's public name, such as its partition id.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.Privatizer`).
    masking : Masking, optional
        The client's masks; required under ``trust="secure-aggregation"``, and refused otherwise.
    queries : sequence of ClientQuery
        What it answers beside the training, each once a session, from one budget: :class:`~murmurfl.clients.Centring`,
        after which everything else is computed around a centre, :class:`~murmurfl.clients.Evaluation`,
        :class:`~murmurfl.clients.Counting`, or a :class:`~murmurfl.clients.RecordQuery` of one's own.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy everything it returns or refuses with is, per session, mu-GDP
    and over all sessions budget_mu-GDP for replacement of one sample (of all samples of one owner by others of that
    owner, where the policy has samples_per_owner), which is a row of a file where the client's samples are
    :class:`~murmurfl.clients.records.client_records.Records` of one, and an item as it was handed over elsewhere,
    against any server that does not choose the code the client runs, provided row i of ``gradients`` depends on sample
    i alone. The number of samples, the batch, the cap and the number of releases are public. Timing is not protected.
    Under secure aggregation nothing is sent without masks, simulated or not: what :meth:`release` gives has only the
    client's share of the noise, and is for :meth:`fit` to hide. Under a trusted server nothing is guaranteed against
    the server, and with mechanism ``none`` nothing at all. Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import Request
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> class LeastSquares:
    ...     shapes = [(3,)]
    ...     def __call__(self, parameters, samples):
    ...         features, targets = samples
    ...         return (features @ parameters[0] - targets)[:, None] * features
    >>> class Rows:
    ...     def __len__(self):
    ...         return 20
    ...     def __getitem__(self, samples):
    ...         return np.eye(20, 3)[samples], np.ones(20)[samples]
    >>> class SignClient(PrivateClient):
    ...     def contribution(self, request, samples):
    ...         return np.sign(self.gradients(request.query_points[0], samples))
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=4, max_participations=5, mu=1.0)
    >>> client = SignClient(LeastSquares(), Rows(), policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> release = client.release(Request(server_round=1, session="s", ack=0, query_points=([np.zeros(3)],)))
    >>> release.values.shape, release.samples
    ((3,), 4)
    """

    query_points: ClassVar[int] = 1
    """Number of points of the model's shape that a request carries."""
    privatizer_type: ClassVar[type[Privatizer]] = Privatizer
    summable: ClassVar[bool] = False
    """Whether this class serves secure aggregation: all its server needs is sums of releases, each acknowledged or
    standing alone. A subclass does not inherit it."""
    takes_inputs: ClassVar[bool] = True
    """Whether this kind of client can see its samples by a public input that a query gave, such as a centre."""
    answers_queries: ClassVar[bool] = True
    """Whether this kind of client can answer queries of all its samples beside its training."""

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        rows: RowCache | None = None,
        masking: Masking | None = None,
        queries: Sequence[ClientQuery] = (),
    ) -> None:
        super().__init__()
        _check_kind(type(self), name, policy)
        self.check_policy(policy)
        check_owned(policy, samples)
        check_masking(policy, masking, name, simulated=keys.simulated)
        self.check_model(gradients, policy)
        if not keys.simulated:
            isolate(gradients)
        self.name = name
        self.masking = masking
        self.gradients = gradients
        self.samples = samples
        self._shapes = [tuple(shape) for shape in gradients.shapes]
        size = sum(map(math.prod, self._shapes))
        refuse_queries(type(self), queries, per_owner=policy.samples_per_owner > 0)
        known: ClientTerms = {"data": known_by(samples)}
        if masking is not None:
            known["roster"] = masking.roster.digest  # under another one a helper may not know what was opened
        held = len(samples)  # asked once: it may fail, or change
        count = min((one.trained_on(held) for one in queries), default=held)
        self.privatizer = self.privatizer_type(policy, size, count, ledger, keys, rows, **known)
        self.privatizer.num_rows = held
        shapes = getattr(gradients, "model_shapes", self._shapes)
        context = QueryContext(self.privatizer, samples, ledger, keys, known, shapes)
        self.parts: dict[str, QueryPart] = {one.query.name: one.part(context) for one in queries}
        """The parts that answer queries beside the training, by the names of these in requests."""
        self.beside: list[LedgeredPrivatizer] = [part.privatizer for part in self.parts.values() if part.asked.releases]
        """Privatizers of the parts that release something."""
        self.giver = next((part for part in self.parts.values() if part.query.gives), None)
        """The part whose answer later requests bring back, such as a centre."""
        self._set_fits(policy, keys)

    def _set_fits(self, policy: PrivacyPolicy, keys: NoiseKeys) -> None:
        """Tell clients which records fit, where they may leave out the others."""
        samples, owners = self.samples, policy.samples_per_owner
        fits = getattr(samples, "fits", None)
        if policy.sums_samples and not owners and self._is_plain:
            self.privatizer.unwritten = bool(getattr(self.gradients, "sums_unwritten", False))
        vouched = rows_unmixed(self.gradients) and type(self).contribution is PrivateClient.contribution
        vouched = vouched and (self.giver is None or self.giver.asked.rows_unmixed)
        if vouched and getattr(samples, "stands_in", False) and not owners:
            self.privatizer.fits, self.privatizer.together = fits, True
            if self.giver is not None:
                self.giver.privatizer.fits, self.giver.privatizer.together = fits, True
        if keys.simulated and fits is not None and not owners and not fits.all():
            fitting = [part.privatizer for part in self.parts.values() if not part.asked.counts_invalid_records]
            for privatizer in (self.privatizer, *fitting):
                if isinstance(privatizer, Privatizer):
                    privatizer.fits = fits

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        """Refuse a policy whose guarantee this kind of client could not keep."""

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        """Refuse a model with which this kind of client could not keep what the policy guarantees."""

    def point_weights(self, server_round: int) -> tuple[float, ...] | None:
        """Return the public weights lambda_j of a contribution sum_j lambda_j grad f(point_j; z) in round t, from 1.

        None if the contribution is something else: then :meth:`contribution` says what.
        """
        return None

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """Per-sample contributions of a batch, shape (b, d), row i from sample i alone; unclipped.

        The rule is :meth:`point_weights`; a subclass without one overrides this.
        """
        weights = self.point_weights(request.server_round)
        if weights is None:
            raise NotImplementedError(f"{type(self).__name__} must define point_weights or contribution.")
        return combined_gradients(self.gradients, request.query_points, weights, samples)

    @classmethod
    def together(
        cls,
        clients: Sequence[PrivateClient],
        server_round: int,
        session: str,  # noqa: ARG003 - for kinds that remember something of it
        points: Sequence[Sequence[NDArray[Any]]],
    ) -> BatchedContribution | None:
        """Return how several simulated clients of this class and one model are computed at once; None if one by one."""
        # A subclass that overrides the contribution does not follow the weights.
        if cls.contribution is not PrivateClient.contribution:
            return None
        weights = clients[0].point_weights(server_round)
        if weights is None:
            raise NotImplementedError(f"{cls.__name__} must define point_weights or contribution.")
        gradients = clients[0].gradients
        return BatchedContribution(lambda _, samples: stacked_gradients(gradients, points, weights, samples))

    def fit(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[list[NDArray[np.float64]], int, dict[str, Any]]:
        """Answer a training request with P_k - P_ack.

        Parameters
        ----------
        parameters : sequence of ndarray
            The query points' arrays, one point after the other.
        config : mapping
            The request's entries (:mod:`murmurfl.privacy.protocol`).

        Returns
        -------
        tuple
            The release in the model's shapes, the samples it counts for (a public number), and the entries of the
            reply: none of them but the release depends on data. Simulated clients in another process add entries that
            do (:mod:`murmurfl.privacy.release.clipping`). Under secure aggregation the release is masked, in
            uint64, and its header, seals and signature are among the entries.

        Raises
        ------
        RefusedError
            If the request is malformed or the client's policy forbids it; nothing was released or spent.
        """
        policy = self.privatizer.policy
        check_can_send(policy, self.masking)
        if config.get(protocol.ASK) == protocol.ASK_SEAL:
            return self._sealed_again(config)
        request = self._read(parameters, config)
        figures = None
        if self.privatizer.simulated:  # figures depend on the data: a real client does not even collect them
            with observing() as observer:
                release = self.released(request)
            figures = observer.figures()
        else:
            release = self.released(request)
            if release.release == 1 and request.of == GRADIENTS:
                log_own_forecast(self.name, self.privatizer)
        # The release is recorded. If masking fails, nothing is sent and the next release carries this one's part.
        return self._sent(release, request.session, request.of, training_entries(self.name, figures))

    def _sealed_again(self, config: Mapping[str, Any]) -> tuple[list[NDArray[np.float64]], int, dict[str, Any]]:
        """Send the last release once more under fresh masks: a helper could not open what was sealed for it."""
        check_addressed(config, self.name)
        session, ack = session_entry(config), integer_entry(config, protocol.ACK, 0, protocol.LARGEST_ROUND)
        number = integer_entry(config, protocol.RELEASE, 1, protocol.LARGEST_ROUND)
        return self._sent(self.privatizer.last_release(session, ack, number), session, GRADIENTS, {})

    def _sent(
        self, release: Release, session: str, of: str, others: Mapping[str, Any]
    ) -> tuple[list[NDArray[np.float64]], int, dict[str, Any]]:
        part = self.parts.get(of)
        privatizer, shapes = (self.privatizer, self._shapes) if part is None else (part.privatizer, part.shapes)
        sent, entries = outgoing_reply(release, shapes, masking=self.masking, session=session, policy=privatizer.policy)
        metrics = {
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.RELEASE: release.release,
            protocol.ACK: release.ack,
            protocol.CLIENT: self.name,
            **self.public_entries(of),
            **entries,
            **({protocol.RECOVERED: 1} if release.recovered else {}),
            **others,
        }
        return sent, release.samples, metrics

    def released(self, request: Request) -> Release:
        """Return the release that a checked request asks for: :meth:`release`, or the answer to a query beside it."""
        part = self.parts.get(request.of)
        return self.release(request) if part is None else part.answer(request, partial(self.batch, request))

    def public_entries(self, of: str) -> dict[str, Any]:
        """Entries of a reply about its kind of release; independent of data."""
        part = self.parts.get(of)
        privatizer, entries = (self.privatizer, {}) if part is None else (part.privatizer, part.entries)
        rate = privatizer.policy.sampling_rate
        sampling = {protocol.SAMPLING_RATE: rate} if rate else {}
        return {protocol.SENSITIVITY: privatizer.plan.sensitivity, **sampling, **entries}

    def batch(self, request: Request, samples: slice) -> Any:
        """Return samples for a request: as they are, or as its public input has them seen."""
        if self.giver is None or request.public_input is None:
            return self.samples[samples]
        return self.giver.seen(samples, request.public_input)

    def release(self, request: Request) -> Release:
        """Return the client's next release, for a request that has passed every check.

        Notes
        -----
        **Formal guarantees.** Under secure aggregation the release has only the client's share of the noise and must
        stay on the client: by itself it guarantees the plan's ``loss.worst_case``, not what is assumed.
        Proof: docs/proofs/secure-aggregation.md.
        """
        return self.privatizer.release(
            request.session,
            request.ack,
            lambda samples: self._contribution_of(request, samples),
            skipped=request.skipped,
        )

    def _contribution_of(self, request: Request, samples: slice) -> NDArray[np.floating] | StackedContributions:
        """Return the contribution to a release; called where a failure to load or to compute it does not show."""
        if self.privatizer.unwritten:
            summed = self._summed(request, samples)
            if summed is not None:
                return summed
        batch = self.batch(request, samples)
        # A subclass that overrides the contribution does not follow the weights.
        follows_weights = type(self).contribution is PrivateClient.contribution
        # A hostile query point may make this overflow. The result is clipped or zeroed: nothing to warn about.
        with np.errstate(all="ignore"):
            if self.privatizer.simulated and self.privatizer.policy.sums_samples and follows_weights:
                weights = self.point_weights(request.server_round)
                if weights is not None:
                    return stacked_gradients(self.gradients, request.query_points, weights, batch)
            return self.contribution(request, batch)

    @property
    def _is_plain(self) -> bool:
        """Whether what it releases are clipped gradients at one point, and nothing else of them is looked at."""
        own, bound = type(self), self.privatizer.policy.bound
        names = ("contribution", "_contribution_of", "release")
        is_plain = all(getattr(own, name) is getattr(PrivateClient, name) for name in names)
        return is_plain and self.query_points == 1 and not bound.nonnegative and bound.moments is None

    def _summed(self, request: Request, samples: slice) -> StackedContributions | None:
        """Return gradients that are clipped and summed without being written out; None if the model has none."""
        (weight,) = self.point_weights(request.server_round) or (1.0,)
        whole = self.batch(request, samples) if self.privatizer.simulated else None

        def read(place: int) -> Any:
            if whole is not None:
                return pick(whole, slice(place, place + 1))
            return self.batch(request, slice(samples.start + place, samples.start + place + 1))

        gradients: Any = self.gradients
        return gradients.summed(request.query_points, weight, read, samples.stop - samples.start)

    def evaluate(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Refused: a loss or an accuracy on private data has no noise, so it does not leave the client."""
        raise RefusedError(
            protocol.EVALUATION_BLOCKED, "this client does not evaluate: the result would not be private"
        )

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a query: the client's name, or what it has spent; none of it depends on data."""
        check_version(config)
        ask = config.get(protocol.ASK)
        if ask == protocol.ASK_HELLO:
            name = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: self.name}
            return {**name, **self._schema, **name_shown(self.masking, config)}
        if ask == protocol.ASK_PRIVACY:
            return {protocol.CLIENTS: self.name, **self.statement(session_entry(config))}
        raise malformed("the query is not one this client answers")

    def statement(self, session: str) -> dict[str, Any]:
        """Return the client's figures of a session, spent and guaranteed, as plain values."""
        kind = self.record_kind
        schema_entries = {protocol.RECORD: kind, **self._schema} if kind else {}
        return {**statement_entries(self.privatizer, session, self.beside), **schema_entries}

    @property
    def record_kind(self) -> str:
        """``row`` if a sample is one of a file, ``item`` if it was handed over; empty where samples do not say."""
        return str(getattr(self.samples, "record_kind", ""))

    @property
    def _schema(self) -> dict[str, str]:
        """The public digest of the samples' schema, if they have one."""
        schema = getattr(self.samples, "schema", None)
        return {} if schema is None else {protocol.SCHEMA: schema.digest}

    def _read(self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]) -> Request:
        check_addressed(config, self.name)
        server_round = integer_entry(config, protocol.SERVER_ROUND, 1, protocol.LARGEST_ROUND)
        if protocol.WEIGHED_AS in config:
            server_round = integer_entry(config, protocol.WEIGHED_AS, 1, protocol.LARGEST_ROUND)
        ack = integer_entry(config, protocol.ACK, 0, protocol.LARGEST_ROUND)
        session = session_entry(config)
        of, public = read_query(config, self.parts)
        part = self.parts.get(of)
        shapes, count = self._shapes, self.query_points
        if part is not None:
            shapes, count = part.asked_at or self._shapes, 0 if part.asked_at is None else 1
        points = read_points(parameters, shapes, count)
        return Request(server_round, session, ack, points, of, public, skipped_entry(config))


ClientFunction = Callable[[Context], NumPyClient | Client]


def numpy_client_app(client_fn: ClientFunction, mods: list[Mod] | None = None) -> ClientApp:
    """Return a Message-API ``ClientApp`` from a function that makes a ``NumPyClient``.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context) -> NumPyClient`` (or its ``.to_client()``), as in Flower's legacy API.
    mods : list of Mod, optional
        Flower mods around every message.

    Returns
    -------
    ClientApp
        Train messages call ``fit``, evaluate messages ``evaluate`` and queries ``get_properties``, with the arrays of
        the message and its config. A reply has one ArrayRecord ``arrays``, under the message's names where there are
        as many, and one MetricRecord ``metrics`` with ``num-examples``; entries that are no numbers go to a
        ConfigRecord ``config``.

    Notes
    -----
    What leaves is what the client returns, as it returns it. With this package's clients that is private. An exception
    never leaves the client: a refusal sends its fixed text, anything else one fixed sentence, with the details in the
    client's own log.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.clients import NoisySGDClient, simulated_client
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import NoisySGD, ResultFolder
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> def client_fn(context):
    ...     return NoisySGDClient(Mean(), np.ones((20, 1)), policy, **simulated_client(context))
    >>> grid = InProcessGrid(numpy_client_app(client_fn), 4, {})
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=4, callbacks=[ResultFolder(None)])
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=2)
    >>> [(report.server_round, report.aggregated) for report in strategy.history]
    [(1, 4), (2, 4)]
    """
    return serving(ClientApp(mods=mods or []), client_fn)


def serving(app: ClientApp, client_fn: ClientFunction) -> ClientApp:
    """Return the app, with the functions of :func:`numpy_client_app` for its messages."""
    for kind, register in (("train", app.train), ("evaluate", app.evaluate), ("query", app.query)):
        register()(_handler(client_fn, kind))
    return app


def handled(client_fn: ClientFunction, kind: str, content: RecordDict, context: Context) -> RecordDict:
    """Return the content of a reply to a message of a kind.

    Train, evaluate or query; raises what the client refuses with.
    """
    return {"train": _train, "evaluate": _evaluate, "query": _query}[kind](_client(client_fn, context), content)


def _handler(client_fn: ClientFunction, kind: str) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        return answer(message, lambda: handled(client_fn, kind, message.content, context))

    return handle


def _client(client_fn: ClientFunction, context: Context) -> NumPyClient:
    client = client_fn(context)
    # `NumPyClient.to_client()` keeps the client it wraps; the wrapper itself speaks the legacy messages only.
    inner = getattr(client, "numpy_client", client)
    if not isinstance(inner, NumPyClient):
        raise ConfigurationError(
            f"Expected client_fn to return a NumPyClient, got {type(client).__name__}.",
            kind="wrong-type",
            setting="client_fn",
        )
    return inner


def _request(content: RecordDict) -> tuple[list[Any], dict[str, Any]]:
    arrays: list[Any] = []
    for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS):
        record = content.get(key, None)
        if isinstance(record, ArrayRecord):
            try:
                arrays += [read_array(array.dtype, array.shape, array.data) for array in record.values()]
            except (TypeError, ValueError) as error:
                raise RefusedError(
                    protocol.MALFORMED_REQUEST, "malformed request: the arrays cannot be read"
                ) from error
    config = content.get(protocol.CONFIG, None)
    return arrays, dict(config.items()) if isinstance(config, ConfigRecord) else {}


def _train(client: NumPyClient, content: RecordDict) -> RecordDict:
    arrays, config = _request(content)
    if config.get(protocol.ASK) == protocol.ASK_HELLO and not isinstance(client, PrivateClient):
        return RecordDict()  # no mod is around this client: who greets it finds that out from an answer without a name
    results, num_examples, metrics = client.fit(arrays, config)
    records = entry_records({**metrics, protocol.NUM_EXAMPLES: num_examples})
    names = list(content[protocol.ARRAYS]) if isinstance(content.get(protocol.ARRAYS, None), ArrayRecord) else []
    names = names if len(names) == len(results) else [str(i) for i in range(len(results))]
    return reply_content({**records, protocol.ARRAYS: array_record(names, results)})


def _evaluate(client: NumPyClient, content: RecordDict) -> RecordDict:
    arrays, config = _request(content)
    loss, num_examples, metrics = client.evaluate(arrays, config)
    return RecordDict(entry_records({**metrics, "loss": float(loss), protocol.NUM_EXAMPLES: num_examples}))


def _query(client: NumPyClient, content: RecordDict) -> RecordDict:
    _, config = _request(content)
    return RecordDict({protocol.CONFIG: ConfigRecord(dict(client.get_properties(config)))})
