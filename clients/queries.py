"""Queries on a client: what it releases beside its training, each once a session, in a session of its own.

All share the client's ledger, and so its budget. What a query releases and how it is bounded stands in
:mod:`murmurfl.privacy.queries`, one file each. Here stands how a client measures its samples for one
(:class:`ClientQuery`), and the one part of a client that answers (:class:`QueryPart`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.errors import ConfigurationError, RefusedError
from ..privacy.ledger.ledger_records import Ledger
from ..privacy.noise import NoiseKeys
from ..privacy.queries import QUERIES
from ..privacy.queries.evaluation import EVALUATION_SHARE, SCORES_SHARE, EvaluationRows, Measured, evaluation_policy
from ..privacy.queries.knots import KnotRows
from ..privacy.queries.mean_of_features import CENTRING_CONSTANT, MeanRows, centred
from ..privacy.queries.query import Query, divided_mu
from ..privacy.queries.statistics import StatisticsRows
from ..privacy.release.known_samples import Owners, RowBytes
from ..privacy.release.ledgered_privatizer import LedgeredPrivatizer, Release
from ..privacy.release.policy import PrivacyPolicy, check_owned
from ..privacy.release.prefix_sums import Privatizer
from .adapters.per_sample_gradients import Samples
from .messages import GRADIENTS, Request, malformed
from .records.places import RecordPlaces, statistics_columns
from .records.schema import Schema

Measure = Callable[[Sequence[NDArray[Any]], Any], Measured]
"""Function of a model's arrays and a batch of samples that returns how right the model is about each of them."""
PublicInput = NDArray[np.floating]
"""Values in later requests that come from the answer to a query, such as a centre."""


class ClientTerms(TypedDict, total=False):
    """Options that all clients of one ledger share."""

    data: RowBytes | Owners
    roster: str


@dataclass(frozen=True)
class QueryContext:
    """Context that the queries of a client share."""

    privatizer: LedgeredPrivatizer
    """The client of everything else."""
    samples: Samples
    ledger: Ledger
    keys: NoiseKeys
    known: ClientTerms
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the model's arrays."""


class ClientQuery:
    """Configures a client to answer a query: by which policy, and what it measures of a sample.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the answer is mu-GDP for replacement of one sample (of all
    samples of one owner by others, where the policy has samples_per_owner), whatever is measured, provided what is
    measured of sample i depends on sample i alone. The number of samples it is of is public.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.clients import Centring
    >>> from murmurfl.privacy import centring_policy
    >>> query = Centring(centring_policy(clip_norm=1.0, nonnegative=True, mu=0.3), num_features=64)
    >>> isinstance(query, ClientQuery), query.query.name, query.trained_on(100)
    (True, 'mean', 100)
    """

    policy: PrivacyPolicy
    held_out: int = 0
    """Number of samples, the last ones, set aside for this query: only these have a row."""
    shapes: Sequence[tuple[int, ...]] | None = None
    """Shapes of the model that a request brings; None for those of the client's gradients."""
    option: ClassVar[str] = "query"
    """Name of it in configuration."""
    unable: ClassVar[str] = "it releases nothing beside its training"
    """Reason for which some kinds of clients cannot answer."""
    releases: bool = True
    """Whether it is answered; otherwise later requests bring something that is public anyway, and nothing is spent."""
    rows_unmixed: ClassVar[bool] = False
    """Whether no bit of a sample that :meth:`seen` returns depends on the others of its batch, and it never fails."""
    counts_invalid_records: ClassVar[bool] = False
    """Whether records that do not fit the model have a row all the same."""

    @property
    def query(self) -> Query[Any]:
        """Query that is asked."""
        raise NotImplementedError(f"{type(self).__name__} must define query.")

    def measured(self, model: Sequence[NDArray[Any]], batch: Any) -> Any:
        """Return the arguments of :meth:`Query.rows` for a model (no arrays without one) and a batch of samples."""
        return batch

    def batch(self, samples: Samples, chosen: slice) -> Any:
        """Return a slice of the samples, for a query that is at no model."""
        return samples[chosen]

    def trained_on(self, samples: int) -> int:
        """Return how many of a client's samples, the first ones, are left to be trained on."""
        if self.held_out and self.held_out >= samples:
            raise ConfigurationError(
                f"Expected held_out below the client's {samples} samples, got {self.held_out}: none would be left to "
                "train on.",
                kind="out-of-range",
                setting="held_out",
                got=self.held_out,
            )
        return samples - self.held_out

    @property
    def input_width(self) -> int:
        """Number of values in later requests that come from the answer."""
        return self.query.width

    def made_up_input(self, normals: NDArray[np.float64]) -> PublicInput:
        """Make up values that a later request may bring, from normal draws, for a client that is tried out."""
        return normals

    def read_input(self, content: Any) -> PublicInput:
        """Read what a later request brings of the answer (:attr:`Query.gives`), or refuse it."""
        width, name, kind = self.input_width, self.query.gives, np.dtype(self.query.gives_type)
        if not isinstance(content, bytes) or len(content) != kind.itemsize * width:
            raise malformed(f"expected {name} to be {width} {kind.name} values, little endian")
        values = np.frombuffer(content, dtype=kind).astype(kind.newbyteorder("="))
        if not np.isfinite(values).all():
            raise malformed(f"expected {name} to be finite")
        return values

    def seen(self, batch: Any, public: PublicInput) -> Any:
        """Return a batch of samples as everything else sees it, given what was made of the answer."""
        return batch

    def check_beside(self, policy: PrivacyPolicy) -> None:
        """Raise if a policy of everything else cannot share samples or a budget with the query."""
        check_beside(self.policy, policy, beside=self.query.setting, release=self.query.what)

    def part(self, context: QueryContext) -> QueryPart:
        """Return the part of a client that answers."""
        return QueryPart(self, context)


@dataclass(frozen=True)
class RecordQuery(ClientQuery):
    """Configures a client to answer a query about its samples as they are.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the answer (:meth:`murmurfl.privacy.Query.policy`), on the same budget as the client's other policy.
    asked : Query
        What is asked. Its rows are made from a batch of the client's samples; of those of an owner, where samples are
        grouped by owner, from each by itself.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the answer is mu-GDP for replacement of one sample (of all
    samples of one owner by others, where the policy has samples_per_owner), provided row i of the query depends on
    sample i alone.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import EvaluationRows, evaluation_policy
    >>> query = RecordQuery(evaluation_policy(mu=0.5), EvaluationRows())
    >>> query.asked.name
    'evaluation'
    """

    policy: PrivacyPolicy
    asked: Query[Any]

    def __post_init__(self) -> None:
        self.asked.check_policy(self.policy)

    @property
    def query(self) -> Query[Any]:
        """Query that is asked."""
        return self.asked


@dataclass(frozen=True)
class Centring(ClientQuery):
    """Configures a client to release the mean of its features, and to see its samples from a centre that it is sent.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the mean's release (:func:`~murmurfl.privacy.centring_policy`), on the same budget as the client's
        other policy.
    num_features : int
        k, values of one sample's features.
    constant : float
        Value appended to them: the model has k + 1 inputs, the last of which is a bias.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release of the mean is mu-GDP for replacement of one
    sample. What a client computes around a centre depends on one sample and the centre alone, whoever made the centre.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import centring_policy
    >>> query = Centring(centring_policy(clip_norm=1.0, nonnegative=True, mu=0.5), num_features=64)
    >>> query.num_features
    64
    """

    option: ClassVar[str] = "centring"
    unable: ClassVar[str] = "its samples are not seen from a centre"

    policy: PrivacyPolicy
    num_features: int
    constant: float = CENTRING_CONSTANT

    def __post_init__(self) -> None:
        self.query.check_policy(self.policy)
        if not (math.isfinite(self.constant) and self.constant > 0):
            raise ConfigurationError(
                f"Expected a constant > 0 and finite, got {self.constant!r}.",
                kind="out-of-range",
                setting="constant",
                got=self.constant,
            )

    @property
    def query(self) -> MeanRows:
        """Query that is asked."""
        return MeanRows(self.num_features)

    def seen(self, batch: Any, public: PublicInput) -> Any:
        """Return a batch of samples, an array or a tuple that begins with their features, seen from a centre.

        Notes
        -----
        **Formal guarantees.** Sample i of it depends on sample i of the batch and on the centre alone.
        """
        if isinstance(batch, tuple):
            return (centred(batch[0], public, self.constant), *batch[1:])
        return centred(batch, public, self.constant)


@dataclass(frozen=True)
class Knots(ClientQuery):
    """Configures a client to release counts for the knots of its columns, and to make additive features of knots.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the release (:func:`~murmurfl.privacy.statistics_policy`), on the same budget as the client's other
        policy.
    asked : KnotRows
        What is counted (:func:`~murmurfl.clients.records.places.additive_rows`). The client's samples are values of
        records as :meth:`~murmurfl.clients.Schema.of_values` reads them.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release is mu-GDP for replacement of one sample (of all
    samples of one owner by others, where the policy has samples_per_owner). Features that a client makes depend on one
    sample and the knots alone, whoever made the knots.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import CountedColumn, KnotRows, statistics_policy
    >>> asked = KnotRows((CountedColumn("age", bounds=(0.0, 120.0)),), knots=4)
    >>> Knots(statistics_policy(mu=0.5), asked).input_width
    5
    """

    option: ClassVar[str] = "knots"
    unable: ClassVar[str] = "it cannot make features of knots"
    rows_unmixed: ClassVar[bool] = True

    policy: PrivacyPolicy
    asked: KnotRows

    def __post_init__(self) -> None:
        self.query.check_policy(self.policy)

    @property
    def query(self) -> KnotRows:
        """Query that is asked."""
        return self.asked

    @property
    def releases(self) -> bool:  # type: ignore[override]
        """Whether the client releases counts: not where its schema has knots."""
        return not self.asked.given

    @property
    def input_width(self) -> int:
        """Number of values in later requests: the rank share and the knots."""
        return self.asked.input_width

    def made_up_input(self, normals: NDArray[np.float64]) -> PublicInput:
        """Make up knots that are spread evenly between the public bounds, under a share of the rank."""
        return np.concatenate([[np.exp(-(normals[0] ** 2))], self.asked.even[1:]])

    def read_input(self, content: Any) -> PublicInput:
        """Read the knots of a later request, or refuse them."""
        values = super().read_input(content)
        try:
            return self.asked.checked(values)
        except ConfigurationError as error:
            raise malformed(f"knots: {error}") from None

    def seen(self, batch: Any, public: PublicInput) -> Any:
        """Return a batch of samples, an array or a tuple that begins with their values, as additive features.

        Notes
        -----
        **Formal guarantees.** Sample i of it depends on sample i of the batch and on the knots alone.
        """
        if not isinstance(batch, tuple):
            return self.asked.features(batch, public)
        values, labels, *rest = batch
        return (self.asked.features(values, public), self.asked.scaled(labels, public), *rest)


@dataclass(frozen=True)
class Evaluation(ClientQuery):
    """Configures a client to say, privately, how good a model is on its samples.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the evaluation's release (:func:`~murmurfl.privacy.evaluation_policy`), on the same budget as the
        client's other policy.
    measure : callable
        ``measure(arrays, samples)`` gives a :class:`~murmurfl.privacy.Measured`: how right the model is about each
        sample of a batch, and scores where there are ``bins``.
    bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none.
    scores_share : float
        Share of the evaluation's mu^2 spent on the scores.
    held_out : int
        How many of the client's samples, the last ones, are set aside: they are evaluated on, and nothing else is
        made from them. 0: the evaluation is of all samples, those that the model was trained on. On a client of owners
        these are places for owners, each of whom is trained on or set aside with all samples.
    shapes : sequence of tuple of int, optional
        Shapes of the model's arrays; by default those of the client's gradients.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release is mu-GDP for replacement of one sample (of all
    samples of one owner by others, where the policy has samples_per_owner), whatever model a server sends and whatever
    ``measure`` makes of it, provided row i of it depends on sample i alone. The number of samples it is of, or of
    places for owners, is public.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import Measured, evaluation_policy
    >>> def measure(arrays, samples):
    ...     features, labels = samples
    ...     return Measured(right=(features @ arrays[0] > 0) == labels)
    >>> evaluation = Evaluation(evaluation_policy(mu=0.3), measure, held_out=20)
    >>> evaluation.trained_on(100)
    80
    >>> evaluation.measured([np.ones(2)], (np.eye(2), np.array([True, False]))).right.tolist()
    [True, False]
    """

    option: ClassVar[str] = "evaluation"
    unable: ClassVar[str] = "an epoch goes through all of its samples, and none can be set aside"

    policy: PrivacyPolicy
    measure: Measure
    bins: int = 0
    scores_share: float = SCORES_SHARE
    held_out: int = 0
    shapes: Sequence[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        self.query.check_policy(self.policy)
        if not callable(self.measure):
            raise ConfigurationError(
                f"Expected measure to be a function, got {type(self.measure).__name__}.",
                kind="wrong-type",
                setting="measure",
            )
        if isinstance(self.held_out, bool) or not isinstance(self.held_out, int) or self.held_out < 0:
            raise ConfigurationError(
                f"Expected held_out to be an integer >= 0, got {self.held_out!r}.",
                kind="out-of-range",
                setting="held_out",
                got=self.held_out,
            )

    @property
    def query(self) -> EvaluationRows:
        """Query that is asked."""
        return EvaluationRows(self.bins, self.scores_share, of_owners=self.policy.samples_per_owner > 0)

    def measured(self, model: Sequence[NDArray[Any]], batch: Any) -> Measured:
        """Return what the model makes of each sample."""
        return self.measure(model, batch)


@dataclass(frozen=True)
class Counting(ClientQuery):
    """Configures a client to release statistics of its records beside a training.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the release (:func:`~murmurfl.privacy.statistics_policy`), on the same budget as the client's other
        policy.
    schema : Schema
        The table's; the client's samples are :class:`~murmurfl.clients.records.client_records.Records` of it, or
        places that were read by it (:class:`~murmurfl.clients.records.places.RecordPlaces`).

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release is mu-GDP for replacement of one record, whatever
    stands in the record's cells. The number of records is public.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.clients import Column, Label, Schema
    >>> from murmurfl.privacy import statistics_policy
    >>> age = Column(kind="integer", bounds=(0, 120))
    >>> schema = Schema(label=Label(column="ill", classes=("no", "yes")), columns={"age": age})
    >>> query = Counting(statistics_policy(mu=0.5), schema)
    >>> len(query.schema.columns)
    1
    """

    option: ClassVar[str] = "statistics"
    unable: ClassVar[str] = "its epochs leave no budget to a release of all records"
    counts_invalid_records: ClassVar[bool] = True  # what a model cannot take has its places all the same

    policy: PrivacyPolicy
    schema: Schema

    def __post_init__(self) -> None:
        statistics_columns(self.schema)
        self.query.check_policy(self.policy)

    @property
    def query(self) -> StatisticsRows:
        """Query that is asked."""
        return StatisticsRows(self._places.columns)

    def batch(self, samples: Samples, chosen: slice) -> NDArray[np.float64]:
        """Return the places of a slice of the records."""
        return self._places.batch(samples, chosen)

    @cached_property
    def _places(self) -> RecordPlaces:
        return RecordPlaces(self.schema)


class QueryPart:
    """The part of a client that answers one query, on the ledger and keys of everything else that it releases.

    It has all samples, those that are trained on too, because the ledger knows rows by their place.

    Notes
    -----
    **Formal guarantees.** The ledger counts the sessions of the query and all others together, so that they stay within
    one budget for replacement of one sample. The budget counts a query of samples that were set aside in full, though
    no training used them.
    """

    def __init__(self, asked: ClientQuery, context: QueryContext) -> None:
        beside, query = context.privatizer.policy, asked.query
        asked.check_beside(beside)
        check_owned(asked.policy, context.samples)
        self.asked = asked
        self.query = query
        self._samples = context.samples
        count = context.privatizer.num_samples if query.of_trained else context.privatizer.num_rows
        self.privatizer = Privatizer(asked.policy, query.width, count, context.ledger, context.keys, **context.known)
        self.privatizer.num_rows = context.privatizer.num_rows
        self.shapes: list[tuple[int, ...]] = [(query.width,)]
        """Shapes of the arrays of a release."""
        model = context.shapes if asked.shapes is None else asked.shapes
        self.asked_at: list[tuple[int, ...]] | None = [tuple(one) for one in model] if query.at_a_model else None
        """Shapes of the model that a request brings; None where it brings none."""
        self.first = count - asked.held_out if asked.held_out else 0
        """The first sample, or place for owners, that has a row."""
        # A simulation whose releases are from all samples asks for the same ones again and again.
        self._keeps = self.privatizer.simulated and beside.sums_samples
        self._public: PublicInput | None = None
        self._batches: dict[tuple[int, int], Any] = {}

    @property
    def samples(self) -> int:
        """Number of samples, or of places for owners, that the answer is of, a public number."""
        return self.privatizer.num_samples - self.first

    @property
    def entries(self) -> dict[str, Any]:
        """Further entries of a reply; independent of data."""
        return self.query.entries(float(self.privatizer.plan.noise_std), held_out=self.asked.held_out > 0)

    def answer(self, request: Request, batch: Callable[[slice], Any]) -> Release:
        """Return the sum of the samples' rows, bounded and with noise; the only release of its session.

        ``batch`` gives a slice of the samples as the model of the request sees them.
        """
        model = request.query_points[0] if self.query.at_a_model else []
        seen = batch if self.query.at_a_model else self._batch
        first = self.privatizer.rows_before(self.first)

        def rows(chosen: slice) -> NDArray[np.float64]:
            if not first:
                return self._rows(model, seen(chosen))
            found = np.zeros((chosen.stop - chosen.start, self.query.width))
            start = max(chosen.start, first)
            if start < chosen.stop:
                found[start - chosen.start :] = self._rows(model, seen(slice(start, chosen.stop)))
            return found

        return replace(self.privatizer.release(request.session, request.ack, rows), samples=self.samples)

    def seen(self, samples: slice, public: PublicInput) -> Any:
        """Return a slice of the samples as everything else sees it, given what was made of the answer."""
        if not self._keeps:
            return self.asked.seen(self._samples[samples], public)
        if self._public is None or not np.array_equal(self._public, public):
            self._public, self._batches = public, {}
        key = samples.start, samples.stop
        if key not in self._batches:
            self._batches[key] = self.asked.seen(self._samples[samples], public)
        return self._batches[key]

    def _batch(self, chosen: slice) -> Any:
        return self.asked.batch(self._samples, chosen)

    def _rows(self, model: Sequence[NDArray[Any]], batch: Any) -> NDArray[np.float64]:
        """Return the rows of a batch of samples, or of owners."""
        with np.errstate(all="ignore"):  # a hostile model may make this overflow; the client bounds what comes
            if not self.privatizer.policy.samples_per_owner:
                return self.query.rows(self.asked.measured(model, batch))
            *parts, present = batch
            owners, most = present.shape
            flat = tuple(part.reshape(owners * most, *part.shape[2:]) for part in parts)
            rows = self.query.rows(self.asked.measured(model, flat))
            return self.query.rows_of_owners(rows.reshape(owners, most, self.query.width), present)


def refuse_queries(kind: type, asked: Sequence[ClientQuery], *, per_owner: bool) -> None:
    """Raise if a kind of client cannot answer a query, by its ``takes_inputs`` and ``answers_queries``.

    A request names what it is for, so two queries may not share a name, nor have that of the training.
    """
    names = [one.query.name for one in asked]
    if len({GRADIENTS, *names}) <= len(names):
        raise ConfigurationError(
            f"Expected queries with names of their own, other than {GRADIENTS!r}, got {', '.join(map(repr, names))}.",
            kind="duplicate",
            setting="queries",
        )
    for one in asked:
        if per_owner and not one.query.per_owner:
            raise ConfigurationError(
                f"Expected no {one.option} beside samples_per_owner, got one, which counts samples.",
                kind="conflict",
                setting="samples_per_owner",
            )
        if not getattr(kind, "takes_inputs" if one.query.gives else "answers_queries"):
            raise ConfigurationError(
                f"Expected no {one.option} for {kind.__name__}, got one: {one.unable}.",
                kind="conflict",
                setting=one.option,
            )


_IN_COMMON = (*("budget_mu", "delta", "noise_quality", "trust", "sums", "budget_local_mu", "samples_per_owner"),)


def check_beside(own: PrivacyPolicy, policy: PrivacyPolicy, *, beside: str, release: str) -> None:
    """Refuse a policy with which a release of all samples cannot share samples or a budget.

    ``own`` is the policy of that release, ``policy`` that of everything else. In errors ``beside`` says what the
    release is for ("centring") and ``release`` what it is ("the mean of features").
    """
    short = release.split(" of ")[0]
    if policy.batch_selection == "once" and policy.sample_participations == 1:
        raise ConfigurationError(
            f"Expected batch_selection 'cyclic' beside {beside}, got 'once': {short} takes every sample, and none "
            "would be left that no session has used.",
            kind="conflict",
            setting="batch_selection",
        )
    if policy.batch_selection == "shuffled":
        raise ConfigurationError(
            f"Expected another batch_selection than 'shuffled' beside {beside}, got it: what a secret order is worth "
            f"is counted for samples that show nowhere else, and {short} is of all of them.",
            kind="conflict",
            setting="batch_selection",
        )
    for name in _IN_COMMON:
        ours, theirs = getattr(own, name), getattr(policy, name)
        if ours != theirs:
            raise ConfigurationError(
                f"Expected one {name} for {release} and for everything else on this client, got {ours!r} and "
                f"{theirs!r}.",
                kind="mismatch",
                setting=name,
            )
    if own.adds_noise != policy.adds_noise:
        raise ConfigurationError(
            f"Expected noise on {release} and on everything else, or on neither, got mechanism {own.mechanism!r} and "
            f"{policy.mechanism!r}.",
            kind="conflict",
            setting="mechanism",
        )


def read_query(config: Mapping[str, Any], parts: Mapping[str, QueryPart]) -> tuple[str, PublicInput | None]:
    """Read what a training request is for and the public input it brings; refuse what the client does not answer.

    Answer and refusal depend on the request and on what is public of the client; the texts are fixed.
    """
    of = _read_name(config, parts)
    giver = _read_giver(config, parts)
    if giver is None:
        return of, None
    name, entry = giver.query.name, giver.query.gives
    content = config.get(entry)
    if of == name:
        if content is not None:
            raise malformed(f"a request for the {name} brings no {entry}")
        return of, None
    if content is None:
        text = f"this client is configured for {giver.query.setting}: a request for gradients must bring a {entry}"
        raise RefusedError(protocol.NOT_CONFIGURED, text)
    return of, giver.asked.read_input(content)


def _read_name(config: Mapping[str, Any], parts: Mapping[str, QueryPart]) -> str:
    """Return the name of what a training request is for; refuse what the client does not release."""
    name = config.get(protocol.RELEASE_OF)
    if name is not None and (not isinstance(name, str) or (name not in QUERIES and name not in parts)):
        raise malformed(f"{protocol.RELEASE_OF} is something this client does not release")
    if name is not None and (name not in parts or not parts[name].asked.releases):
        raise RefusedError(protocol.NOT_CONFIGURED, QUERIES[name].not_configured)
    return name or GRADIENTS


def _read_giver(config: Mapping[str, Any], parts: Mapping[str, QueryPart]) -> QueryPart | None:
    """Return the part whose answer requests bring back, if there is one; refuse another's answer."""
    giver = next((part for part in parts.values() if part.query.gives), None)
    for kind in QUERIES.values():
        if kind.gives and kind.gives in config and (giver is None or giver.query.gives != kind.gives):
            raise RefusedError(protocol.NOT_CONFIGURED, kind.not_configured)
    return giver


def held_out_samples(samples: int, share: float) -> int:
    """Return how many samples a share of them is: at least one of two, and never all."""
    if not 0 < share < 1:
        raise ConfigurationError(
            f"Expected a share of samples above 0 and below 1 to hold out, got {share!r}.",
            kind="out-of-range",
            setting="share",
            got=share,
        )
    return min(max(math.floor(share * samples), 1), samples - 1)


_KEPT = (
    *("budget_mu", "delta", "mechanism", "noise_quality", "trust", "sums", "budget_local_mu", "samples_per_owner"),
)


@dataclass(frozen=True)
class EvaluationShare:
    """The shares of a client's mu^2 and of its samples that are for a private evaluation of the model.

    Parameters
    ----------
    share : float
        Share of mu^2, above 0 and below 1. The training has the rest, so that both together are what was asked for.
    held_out : float
        Share of a client's samples, the last ones, that is set aside and never trained on. 0: the evaluation is of the
        samples that were trained on.
    score_bins : int
        Bins of scores for each of two classes, for the area under the ROC curve; 0 for none. The server's
        :class:`~murmurfl.strategies.PrivateEvaluation` needs the same number.
    right : callable, optional
        Where the model is no classifier of the usual kind: how right a batch of its predictions is, from 0 to 1 for
        each sample. Of a module ``right(output, target)``. It must not mix samples.

    Notes
    -----
    **Formal guarantees.** With it a client's training and its evaluation together are as private as the training alone
    would be without: everything is mu-GDP for replacement of one sample, for the mu that was asked for, since mus add
    in squares.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> EvaluationShare(share=0.1, held_out=0.2).held_out
    0.2
    """

    share: float = EVALUATION_SHARE
    held_out: float = 0.1
    score_bins: int = 0
    right: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, low in (("share", False), ("held_out", True)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not (number and (0 <= value < 1 if low else 0 < value < 1)):
                raise ConfigurationError(
                    f"Expected {name} of an evaluation {'>= 0' if low else '> 0'} and < 1, got {value!r}.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )
        EvaluationRows(self.score_bins)
        if self.right is not None and not callable(self.right):
            raise ConfigurationError(
                f"Expected right to be a function, got {type(self.right).__name__}.", kind="wrong-type", setting="right"
            )

    @classmethod
    def of(cls, evaluation: float | EvaluationShare | None) -> EvaluationShare | None:
        """Return an evaluation share from what a project wrote: a share of mu^2, an object of this class, or None."""
        if evaluation is None or isinstance(evaluation, EvaluationShare):
            return evaluation
        return cls(evaluation)

    def training(self, policy: PrivacyPolicy) -> PrivacyPolicy:
        """Return the policy of the training, with what the evaluation leaves of the mu of a policy of both.

        The evaluation takes samples that a training may have used, so an order that uses each once, ever, becomes one
        in which the budget counts sessions together.
        """
        once = policy.batch_selection == "once" and policy.sample_participations == 1
        return replace(
            policy,
            mu=divided_mu(policy.mu, self.share)[1],
            batch_selection="cyclic" if once else policy.batch_selection,
        )

    def evaluation(self, policy: PrivacyPolicy, measure: Measure | None, samples: Samples) -> Evaluation:
        """Return a client's evaluation, from the policy of a training and an evaluation together."""
        if measure is None:
            raise ConfigurationError(
                "Expected a model whose predictions can be right or wrong, got one that does not say: leave evaluation "
                "out.",
                kind="unsupported",
            )
        known = {one.name for one in fields(policy)}
        kept = {name: getattr(policy, name) for name in _KEPT if name in known}
        own = evaluation_policy(divided_mu(policy.mu, self.share)[0], **kept)
        held_out = held_out_samples(len(samples), self.held_out) if self.held_out else 0
        return Evaluation(own, measure, bins=self.score_bins, held_out=held_out)
