r"""Full-batch gradient descent, the server's half (ALGORITHMS section 8): every sample in every one of few rounds.

With g_t the mean gradient over the samples whose sums came back, noise and all, taken at w_{t-1} + beta v_{t-1},

    v_t = beta v_{t-1} - eta (g_t + lambda (w_{t-1} + beta v_{t-1})),    w_t = w_{t-1} + v_t

which is Nesterov's momentum. Published is w_t; or (w_t + w_{t-1}) / 2, for steps that
go back and forth across a steep direction; or the average of w_1 .. w_t with weights 1 .. t, for much noise.

A round's sum is divided by the samples that it is a sum of, so a client that is lost leaves a mean over fewer samples
and nothing else; nothing is carried over, because a gradient at a model that is gone is no use.

With a target quantile the clip moves as well: clients say beside each gradient whether it was clipped, with the same
noise (:mod:`murmurfl.privacy.queries.clipped_share`), and the next round's clip follows from how many were.

With a trusted server clients send the sums of their clipped gradients without noise. One sample changes the sum of all
clients by at most Delta = 2 S in each of T rounds, so noise of sigma = Delta sqrt(T) / mu, fresh and once a round,
makes all published models together mu-GDP. With shares s_t of the budget it is sigma_t = Delta sqrt(sum s / s_t) / mu.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from ..privacy.accounting.gdp import check_positive
from ..privacy.errors import ConfigurationError
from ..privacy.noise import NoiseKeys
from ..privacy.queries.clipped_share import QUANTILE_SHARE, CountedRows
from ..privacy.release.policy import PrivacyPolicy
from .aggregation.noisy import Noisy
from .aggregation.plain import Aggregator
from .aggregation.streams import Stream, Sum
from .callbacks.callback import Callback
from .mu2 import check_finite
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers, Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Reply, Vector, array_record
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

Average = Literal["last", "last-two", "linear"]
AVERAGES: tuple[Average, ...] = get_args(Average)
QUANTILE_RATE = 4.0
"""Speed with which a clip follows in the first round. There are few rounds, so it must find its place in the first, and
then stay near it: gradients become shorter as a model learns, and a clip that followed them would stop it."""
_SLOWING = 1.5
"""The t-th step of a clip's logarithm is 1 / t^1.5 of the first: together they reach e^3 times a clip that is too short
for any gradient at a quantile of 0.3, and e^-7 times one that is too long."""
_FARTHEST = 1e6
"""Largest ratio of a clip to the first, and of the first to a clip: noise alone must not lead it to 0 or infinity."""


@dataclass(frozen=True)
class FullBatchState:
    """State after a round.

    Parameters
    ----------
    w, velocity : ndarray of shape (d,)
        Iterate, and its last change.
    average : ndarray of shape (d,)
        Of the iterates so far, with weights 1, 2, and so on.
    steps : ndarray of shape ()
        How many steps were taken: rounds in which something came.
    clip : ndarray of shape ()
        C of the next round, where it follows the gradients; else 0.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import full_batch_start, full_batch_step
    >>> state = full_batch_step(full_batch_start(np.zeros(2)), np.array([1.0, -1.0]), learning_rate=0.5, momentum=0.9)
    >>> state.w.tolist(), state.velocity.tolist(), int(state.steps)
    ([-0.5, 0.5], [-0.5, 0.5], 1)
    """

    w: Vector
    velocity: Vector
    average: Vector
    steps: Vector
    clip: Vector = field(default_factory=lambda: np.zeros(()))


def full_batch_start(start: Vector) -> FullBatchState:
    """w_0, at rest.

    Examples
    --------
    >>> import numpy as np
    >>> full_batch_start(np.zeros(2)).velocity.tolist()
    [0.0, 0.0]
    """
    return FullBatchState(start, np.zeros_like(start), start, np.zeros(()))


def query_point(state: FullBatchState, *, momentum: float, nesterov: bool = True) -> Vector:
    """Return where the next gradient is taken: w + beta v, or w without Nesterov's look ahead."""
    return state.w + momentum * state.velocity if nesterov else state.w


def full_batch_step(
    state: FullBatchState,
    gradient: Vector,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = True,
    l2: float = 0.0,
) -> FullBatchState:
    """One step: a pure function.

    Parameters
    ----------
    gradient : ndarray of shape (d,)
        The mean over samples, taken at :func:`query_point`.
    learning_rate, momentum, l2 : float
        eta, beta and lambda.
    nesterov : bool
        Whether the gradient was taken ahead of w.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import full_batch_start
    >>> full_batch_step(full_batch_start(np.zeros(2)), np.array([1.0, -1.0]), learning_rate=0.5).w.tolist()
    [-0.5, 0.5]
    """
    point = query_point(state, momentum=momentum, nesterov=nesterov)
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        velocity = momentum * state.velocity - learning_rate * (gradient + l2 * point)
        w = state.w + velocity
    check_finite(w)
    steps = state.steps + 1.0
    average = state.average + (2.0 / (float(steps) + 1.0)) * (w - state.average)  # k is 2 / (k + 1) of 1 + .. + k
    return replace(state, w=w, velocity=velocity, average=average, steps=np.asarray(steps))


def next_clip(clip: float, within: float, *, quantile: float, rate: float) -> float:
    """Return the clip after one at which the share ``within`` was not cut, where it should be ``quantile``: pure."""
    return clip * math.exp(-rate * (within - quantile))


@dataclass(frozen=True)
class FullBatchRule(Rule[FullBatchState]):
    """Full-batch gradient descent, and a clip that follows the gradients; parameters as in :class:`FullBatch`."""

    state_type: ClassVar[type[FullBatchState]] = FullBatchState
    divides_by_cohort: ClassVar[bool] = False

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = True
    average: Average = "last"
    l2: float = 0.0
    quantile: float = 0.0
    quantile_share: float = QUANTILE_SHARE
    quantile_rate: float = QUANTILE_RATE
    first_clip: float = 0.0
    relative_steps: bool = False

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_positive("quantile_rate", self.quantile_rate)
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"Expected 0 <= momentum < 1, got {self.momentum!r}.",
                kind="out-of-range",
                setting="momentum",
                got=self.momentum,
            )
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise ConfigurationError(
                f"Expected l2 >= 0 and finite, got {self.l2!r}.", kind="out-of-range", setting="l2", got=self.l2
            )
        if self.average not in AVERAGES:
            raise ConfigurationError(
                f"Expected average one of {AVERAGES}, got {self.average!r}.",
                kind="unknown-name",
                setting="average",
                got=self.average,
            )
        if not 0 <= self.quantile < 1:
            raise ConfigurationError(
                f"Expected quantile above 0 and below 1, or 0 for none, got {self.quantile!r}.",
                kind="out-of-range",
                setting="quantile",
                got=self.quantile,
            )
        if not math.isfinite(self.first_clip) or (self.first_clip > 0) != (self.quantile > 0):
            expected = "> 0 and finite with a quantile" if self.quantile else "left at 0 without a quantile"
            raise ConfigurationError(
                f"Expected first_clip {expected}, got {self.first_clip!r}.",
                kind="out-of-range",
                setting="first_clip",
                got=self.first_clip,
            )

    def init(self, start: Vector, layout: Layout) -> FullBatchState:
        return replace(full_batch_start(start), clip=np.asarray(self.first_clip))

    def points(self, state: FullBatchState) -> tuple[Vector, ...]:
        point = query_point(state, momentum=self.momentum, nesterov=self.nesterov)
        return (np.append(point, state.clip),) if self.quantile else (point,)

    def update(self, state: FullBatchState, total: Vector, turn: Turn) -> FullBatchState:
        """Return the state after a step along the mean gradient, or the mean of counted rows."""
        if not turn.samples:
            return state  # nothing came
        mean = total / turn.samples
        if self.quantile:
            clip = float(state.clip)
            mean, within = CountedRows(self.quantile_share).read(mean, clip)
            rate = self.quantile_rate / (1.0 + float(state.steps)) ** _SLOWING
            following = next_clip(clip, within, quantile=self.quantile, rate=rate)
            farthest = 1.0 if self.relative_steps else _FARTHEST
            following = min(max(following, self.first_clip / _FARTHEST), self.first_clip * farthest)
            # A clip that was too long let in more noise than there need be: the step is as short as the next one says.
            mean *= self.first_clip / clip if self.relative_steps else min(1.0, following / clip)
            state = replace(state, clip=np.asarray(following))
        return full_batch_step(
            state,
            mean,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            l2=self.l2,
        )

    def model(self, state: FullBatchState) -> Vector:
        if self.average == "linear":
            return state.average
        return state.w - state.velocity / 2.0 if self.average == "last-two" else state.w

    def settings(self) -> dict[str, Any]:
        names = ["learning_rate", "momentum", "nesterov", "average", "l2"]
        if self.quantile:
            names += ["quantile", "quantile_share", "quantile_rate", "first_clip", "relative_steps"]
        return {name: getattr(self, name) for name in names}


class FullBatch(ReleaseStrategy[FullBatchState]):
    """Full batches with an untrusted server, for :class:`~murmurfl.clients.FullBatchClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0, the step along the mean gradient.
    momentum : float
        beta, 0 <= beta < 1.
    nesterov : bool
        Whether gradients are taken at w + beta v; else at w (heavy ball).
    average : {"last", "last-two", "linear"}
        Which model is published: the last iterate, the mean of the last two, or the average of all with weights 1 .. t.
    l2 : float
        lambda >= 0: lambda ||w||^2 / 2 is added to the loss, here and not on the clients.
    quantile : float
        Share of gradients that is not to be clipped, 0 < quantile < 1, for clients with
        :class:`~murmurfl.clients.CountedGradients`; 0 where the clients' clip stays.
    quantile_share : float
        Share of mu^2 spent on counting clipped gradients, as on the clients.
    quantile_rate : float
        How fast the clip follows, > 0: in the t-th round in which something came, rate / t^1.5.
    first_clip : float
        C of the first round, > 0 with a quantile.
    relative_steps : bool
        Whether eta C, and so the noise in a step, stays what it is at the first clip, which is then the longest; else
        eta stays.
    aggregator : Aggregator, optional
        How the releases of a round become a sum. Default: they are added up, as they are or under masks with
        ``secure_aggregation``. One that adds noise must be for sums of single rounds (:class:`TrustedFullBatch` makes
        it).
    num_clients : int, optional
        M, clients of the training. Default: all that are connected when it begins.
    clients_per_round : int, optional
        m, clients that a round asks, sampled without replacement. Default: all.
    fraction_train : float, optional
        Share of the clients that a round asks, in place of ``clients_per_round``.
    min_train_nodes : int, optional
        Fewest clients that a round asks with ``fraction_train``. Default: 2.
    min_available_nodes : int, optional
        Fewest connected clients with which a round begins after ``node_deadline_s``.
    quorum : float
        Share of ``clients_per_round`` whose answers end a round; 1 waits for all.
    over_selection : float
        A round asks this many times ``clients_per_round`` clients; at least 1.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler. Default: from the operating system.
    sampling : {"uniform", "balanced"}
        Whether rounds are drawn independently, or so that all clients take part equally often.
    session : str, optional
        Name of the training, letters and digits. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File written after every round. A training whose file exists is resumed.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    evaluate_every : int
        Rounds between central evaluations of the published model.
    allow_exhaustion : bool
        Whether clients may run out of releases before the last round.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that every request brings, such as ``{"centre": centre}``
        (:class:`~murmurfl.strategies.MeanOfFeatures`).
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    A reply that is lost, refused or malformed leaves a mean over fewer samples, with more noise; a round in which
    nothing came changes nothing.

    The clip of a query point follows from earlier releases. No client's privacy rests on it: a client bounds what it
    releases whatever clip it is sent. The number of samples in a release is public, and the client's own account: a
    lie about it spoils the model, as one about gradients does, and nobody's privacy.

    Examples
    --------
    >>> strategy = FullBatch(learning_rate=0.1, momentum=0.9, num_clients=10)
    >>> strategy.full_batch.momentum
    0.9
    """

    late_answers: ClassVar[LateAnswers] = "dropped"  # a gradient at a model that is gone
    divergence_remedy: ClassVar[str] = "Lower learning_rate, to a third for instance."

    def __init__(
        self,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        nesterov: bool = True,
        average: Average = "last",
        l2: float = 0.0,
        quantile: float = 0.0,
        quantile_share: float = QUANTILE_SHARE,
        quantile_rate: float = QUANTILE_RATE,
        first_clip: float = 0.0,
        relative_steps: bool = False,
        aggregator: Aggregator | None = None,
        num_clients: int | None = None,
        clients_per_round: int | None = None,
        fraction_train: float | None = None,
        min_train_nodes: int | None = None,
        min_available_nodes: int | None = None,
        quorum: float = 1.0,
        over_selection: float = 1.0,
        excluded: Collection[str] = (),
        seed: int | None = None,
        sampling: Sampling = "uniform",
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        evaluate_every: int = 1,
        allow_exhaustion: bool = False,
        secure_aggregation: SecureAggregation | None = None,
        public_inputs: Mapping[str, NDArray[np.floating]] | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        options = RoundOptions(
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
            quorum=quorum,
            over_selection=over_selection,
            excluded=excluded,
            seed=seed,
            sampling=sampling,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            evaluate_every=evaluate_every,
            allow_exhaustion=allow_exhaustion,
            secure_aggregation=secure_aggregation,
            public_inputs=public_inputs,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )
        rule = FullBatchRule(
            float(learning_rate),
            float(momentum),
            nesterov,
            average,
            float(l2),
            float(quantile),
            float(quantile_share),
            float(quantile_rate),
            float(first_clip),
            relative_steps,
        )
        if isinstance(aggregator, Noisy):
            self._check_noise(aggregator, rule)
        super().__init__(options, rule, aggregator=aggregator)
        self.full_batch = rule
        """The rule."""

    def _check_noise(self, noise: Noisy[Stream], rule: FullBatchRule) -> None:
        """Refuse noise that does not cover sums of gradients over all samples, one a round."""
        policy, strategy = noise.policy, type(self).__name__
        if policy.batch_selection != "full_batch" or policy.release_rule != "paper" or noise.stream.accumulates:
            raise ConfigurationError(
                f"Expected a policy with batch_selection 'full_batch' and release_rule 'paper' for {strategy}, got "
                f"{policy.batch_selection!r} and {policy.release_rule!r}: the noise is for sums over all samples, each "
                "of which stands alone.",
                kind="conflict",
                setting="batch_selection",
                got=policy.batch_selection,
            )
        if rule.quantile:
            raise ConfigurationError(
                f"Expected quantile 0 for {strategy}, got {rule.quantile:g}: its noise is for gradients alone.",
                kind="conflict",
                setting="quantile",
                got=rule.quantile,
            )

    @property
    def release_layout(self) -> Layout:
        model = super().release_layout
        return [*model, ("clip", (1,), np.dtype(np.float64))] if self.full_batch.quantile else model

    def _asked_at(self, point: Vector) -> ArrayRecord:
        return array_record(point, self.release_layout)

    def check_reply(self, reply: Reply) -> bool:
        return reply.samples > 0  # nothing can be divided by what it does not say


class TrustedFullBatch(FullBatch):
    """Full batches with a trusted server: :class:`FullBatch` with fresh noise on the sum of every round.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy that all clients were configured with, with ``batch_selection="full_batch"``.
    num_rounds : int
        T, the most rounds of which this server ever publishes a model.
    noise_keys : NoiseKeys, optional
        The server's noise key (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`). Default: one from the operating
        system, kept in a file beside the checkpoint.
    shares : str
        How mu^2 is shared among rounds (:class:`~murmurfl.privacy.mechanisms.IndependentNoise`).
    learning_rate : float
        eta > 0, the step along the mean gradient.
    momentum : float
        beta, 0 <= beta < 1.
    nesterov : bool
        Whether gradients are taken at w + beta v; else at w (heavy ball).
    average : {"last", "last-two", "linear"}
        Which model is published: the last iterate, the mean of the last two, or the average of all with weights 1 .. t.
    l2 : float
        lambda >= 0: lambda ||w||^2 / 2 is added to the loss, here and not on the clients.
    quantile : float
        Share of gradients that is not to be clipped, 0 < quantile < 1, for clients with
        :class:`~murmurfl.clients.CountedGradients`; 0 where the clients' clip stays.
    quantile_share : float
        Share of mu^2 spent on counting clipped gradients, as on the clients.
    quantile_rate : float
        How fast the clip follows, > 0: in the t-th round in which something came, rate / t^1.5.
    first_clip : float
        C of the first round, > 0 with a quantile.
    relative_steps : bool
        Whether eta C, and so the noise in a step, stays what it is at the first clip, which is then the longest; else
        eta stays.
    num_clients : int, optional
        M, clients of the training. Default: all that are connected when it begins.
    clients_per_round : int, optional
        m, clients that a round asks, sampled without replacement. Default: all.
    fraction_train : float, optional
        Share of the clients that a round asks, in place of ``clients_per_round``.
    min_train_nodes : int, optional
        Fewest clients that a round asks with ``fraction_train``. Default: 2.
    min_available_nodes : int, optional
        Fewest connected clients with which a round begins after ``node_deadline_s``.
    quorum : float
        Share of ``clients_per_round`` whose answers end a round; 1 waits for all.
    over_selection : float
        A round asks this many times ``clients_per_round`` clients; at least 1.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler. Default: from the operating system.
    sampling : {"uniform", "balanced"}
        Whether rounds are drawn independently, or so that all clients take part equally often.
    session : str, optional
        Name of the training, letters and digits. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File written after every round. A training whose file exists is resumed.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    evaluate_every : int
        Rounds between central evaluations of the published model.
    allow_exhaustion : bool
        Whether clients may run out of releases before the last round.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that every request brings, such as ``{"centre": centre}``
        (:class:`~murmurfl.strategies.MeanOfFeatures`).
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one client,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.aggregation.noisy.Noisy`. A sample is in at most one sum a round, for a
    client's reply counts once, and every round in which something came has noise of its own. How many samples a sum is
    over is public. Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=1, max_participations=5, mu=1.0, mechanism="independent", release_rule="paper",
    ...     batch_selection="full_batch", trust="trusted-server",
    ... )
    >>> strategy = TrustedFullBatch(policy=policy, num_rounds=5, learning_rate=0.1, momentum=0.9, num_clients=10)
    >>> strategy.full_batch.momentum
    0.9
    """

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        shares: str = "uniform",
        learning_rate: float,
        momentum: float = 0.0,
        nesterov: bool = True,
        average: Average = "last",
        l2: float = 0.0,
        quantile: float = 0.0,
        quantile_share: float = QUANTILE_SHARE,
        quantile_rate: float = QUANTILE_RATE,
        first_clip: float = 0.0,
        relative_steps: bool = False,
        num_clients: int | None = None,
        clients_per_round: int | None = None,
        fraction_train: float | None = None,
        min_train_nodes: int | None = None,
        min_available_nodes: int | None = None,
        quorum: float = 1.0,
        over_selection: float = 1.0,
        excluded: Collection[str] = (),
        seed: int | None = None,
        sampling: Sampling = "uniform",
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        evaluate_every: int = 1,
        allow_exhaustion: bool = False,
        secure_aggregation: SecureAggregation | None = None,
        public_inputs: Mapping[str, NDArray[np.floating]] | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.shares = shares
        super().__init__(
            aggregator=Noisy(policy, Sum(shares), num_rounds=num_rounds, noise_keys=noise_keys),
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            average=average,
            l2=l2,
            quantile=quantile,
            quantile_share=quantile_share,
            quantile_rate=quantile_rate,
            first_clip=first_clip,
            relative_steps=relative_steps,
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
            quorum=quorum,
            over_selection=over_selection,
            excluded=excluded,
            seed=seed,
            sampling=sampling,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            evaluate_every=evaluate_every,
            allow_exhaustion=allow_exhaustion,
            secure_aggregation=secure_aggregation,
            public_inputs=public_inputs,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "shares": self.shares}
