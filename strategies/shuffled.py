r"""Private shuffled gradients with public data, the server's half (jiang-2026, algorithm 1; ALGORITHMS section 5).

The end of an epoch is the mean of the clients' ends, and the regulariser is applied there, once an epoch:

    x_end = x - eta (1 / m) sum of the releases v,    x <- argmin_x n psi(x) + ||x - x_end||^2 / (2 eta)

An epoch on public samples alone is the server's own: nobody is asked and nothing is spent. The paper has one client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..privacy.accounting.gdp import check_positive
from ..privacy.errors import ConfigurationError
from ..privacy.release.shuffled_privatizer import noisy_epoch
from .callbacks.callback import Callback
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers, Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

Regularizer = Literal["none", "l2", "l1", "ball"]
REGULARIZERS: tuple[Regularizer, ...] = get_args(Regularizer)
Variant = Literal["dp-shuffleg", "priv-pub", "pub-priv", "interleaved", "public-only"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class ShuffledState:
    """State of shuffled gradients: where the next epoch starts, shape (d,).

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import ShuffledAvg
    >>> strategy = ShuffledAvg(learning_rate=0.1, steps_per_epoch=20, num_clients=10)
    >>> strategy.rule.init(np.zeros(2), []).x.tolist()
    [0.0, 0.0]
    """

    x: Vector


def private_rounds(variant: Variant, num_rounds: int, private_share: float) -> range:
    """Return the rounds, from 1, in which clients are asked (the paper's table 2): ``private_share`` of K, rounded.

    Examples
    --------
    >>> private_rounds("priv-pub", 10, 0.3)
    range(1, 4)
    """
    if variant not in VARIANTS or not 0 < private_share <= 1:
        raise ConfigurationError(
            f"Expected a variant of {VARIANTS} and 0 < private_share <= 1, got {variant!r} and {private_share!r}.",
            kind="out-of-range",
            setting="variant",
            got=variant,
        )
    some = min(max(round(private_share * num_rounds), 1), num_rounds)
    if variant == "public-only":
        return range(0)
    if variant == "priv-pub":
        return range(1, some + 1)
    return range(num_rounds - some + 1 if variant == "pub-priv" else 1, num_rounds + 1)


def proximal(kind: Regularizer, x: NDArray[np.float64], strength: float, weight: float) -> NDArray[np.float64]:
    """Return argmin_z weight psi(z) + ||z - x||^2 / 2, for points along the last axis: pure.

    Parameters
    ----------
    kind : {"none", "l2", "l1", "ball"}
        psi: 0; strength / 2 ||.||^2; strength ||.||_1; the indicator of a ball of radius ``strength`` around 0.
    x : ndarray of shape (..., d)
    strength : float
        lambda, or the radius.
    weight : float or ndarray that broadcasts
        eta n.

    Examples
    --------
    >>> proximal("l1", np.array([3.0, -0.5]), strength=1.0, weight=1.0) + 0.0
    array([2., 0.])
    """
    if kind == "l2":
        return x / (1.0 + weight * strength)
    if kind == "l1":
        return np.sign(x) * np.maximum(np.abs(x) - weight * strength, 0.0)
    if kind == "ball":
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return x * np.minimum(1.0, strength / np.maximum(norms, 1e-300))
    return x


def penalty(kind: Regularizer, x: NDArray[np.float64], strength: float) -> NDArray[np.float64]:
    """Return the value of psi at points along the last axis; 0 in the ball, where every epoch ends."""
    if kind == "l2":
        return strength / 2 * np.square(x).sum(axis=-1)
    if kind == "l1":
        return strength * np.abs(x).sum(axis=-1)
    return np.zeros(np.shape(x)[:-1])


@dataclass(frozen=True)
class PublicEpochs:
    """Public samples for the server's own epochs.

    Parameters
    ----------
    gradient : callable
        The gradient at a point, shape (d,), on public sample i, from 0.
    steps : int
        n.
    clip_norm : float
        S. The paper clips public gradients too; no guarantee needs it.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import ShuffledAvg
    >>> targets = np.array([[1.0], [3.0]])  # two public samples
    >>> public = PublicEpochs(gradient=lambda point, i: point - targets[i], steps=2, clip_norm=10.0)
    >>> public.gradient(np.zeros(1), 1).tolist()
    [-3.0]
    >>> strategy = ShuffledAvg(learning_rate=0.1, steps_per_epoch=20, public=public, num_clients=10)
    """

    gradient: Callable[[Vector, int], NDArray[np.floating]]
    steps: int
    clip_norm: float


@dataclass(frozen=True)
class ShuffledRule(Rule[ShuffledState]):
    """The end of an epoch, private or public; parameters as in :class:`ShuffledAvg`."""

    state_type: ClassVar[type[ShuffledState]] = ShuffledState

    learning_rate: float
    steps_per_epoch: int
    regularizer: Regularizer = "none"
    strength: float = 0.0
    rounds: range | None = None
    public: PublicEpochs | None = None

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        if self.steps_per_epoch < 1:
            raise ConfigurationError(
                f"Expected steps_per_epoch >= 1, got {self.steps_per_epoch!r}.",
                kind="out-of-range",
                setting="steps_per_epoch",
                got=self.steps_per_epoch,
            )
        if self.regularizer not in REGULARIZERS or (self.regularizer != "none" and not self.strength > 0):
            raise ConfigurationError(
                f"Expected regularizer one of {REGULARIZERS} with strength > 0, got {self.regularizer!r}, "
                f"{self.strength!r}.",
                kind="unknown-name",
                setting="regularizer",
                got=self.regularizer,
            )

    def init(self, start: Vector, layout: Layout) -> ShuffledState:
        return ShuffledState(start)

    def points(self, state: ShuffledState) -> tuple[Vector, ...]:
        return (state.x,)

    def update(self, state: ShuffledState, total: Vector, turn: Turn) -> ShuffledState:
        if self.rounds is None or turn.number in self.rounds:
            if not total.any():  # nobody answered: there was no epoch
                return state
            total = total / turn.clients_per_round
        elif self.public is None:
            raise ConfigurationError(
                f"Expected public samples for round {turn.number}, which asks no silo; got none.", kind="missing"
            )
        else:
            public, rate = self.public, self.learning_rate
            total = noisy_epoch(public.gradient, state.x, public.steps, learning_rate=rate, clip_norm=public.clip_norm)
        end = state.x - self.learning_rate * total
        weight = self.learning_rate * self.steps_per_epoch
        return ShuffledState(proximal(self.regularizer, end, self.strength, weight))

    def model(self, state: ShuffledState) -> Vector:
        return state.x

    def settings(self) -> dict[str, Any]:
        names = ("learning_rate", "steps_per_epoch", "regularizer", "strength")
        rounds = [] if self.rounds is None else [self.rounds.start, self.rounds.stop]
        return {**{name: getattr(self, name) for name in names}, "private_rounds": rounds}


class ShuffledAvg(ReleaseStrategy[ShuffledState]):
    """Shuffled gradients over clients, for :class:`~murmurfl.clients.ShuffledClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0, that of the clients.
    steps_per_epoch : int
        n, steps of a client's epoch.
    regularizer : {"none", "l2", "l1", "ball"}
        psi, applied once an epoch (:func:`proximal`).
    strength : float
        lambda of the regulariser, or the ball's radius; > 0 unless there is none.
    rounds : range, optional
        The rounds, from 1, in which clients are asked; default all (:func:`private_rounds`).
    public : PublicEpochs, optional
        For all other rounds.
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
    The proximal step and the epochs on public samples are post-processing of what clients released.

    Examples
    --------
    >>> strategy = ShuffledAvg(learning_rate=0.1, steps_per_epoch=20, num_clients=10)
    >>> strategy.rule.learning_rate
    0.1
    """

    sums_suffice: ClassVar[bool] = False  # an epoch is built on no release before
    late_answers: ClassVar[LateAnswers] = "refused"  # the next epoch goes on from all of this one

    def __init__(
        self,
        *,
        learning_rate: float,
        steps_per_epoch: int,
        regularizer: Regularizer = "none",
        strength: float = 0.0,
        rounds: range | None = None,
        public: PublicEpochs | None = None,
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
        rule = ShuffledRule(
            float(learning_rate), steps_per_epoch, regularizer, float(strength), rounds=rounds, public=public
        )
        super().__init__(options, rule)
        self._rounds = rounds

    def asks_clients(self, server_round: int) -> bool:
        return self._rounds is None or server_round in self._rounds
