r"""One shot, the server's half: ridge regression on the classes from one noisy release of second moments.

With A the noisy sum of x x^T and B that of x (onehot(y) - 1 / C)^T, of N samples,

    W = A_floor^-1 B,    floor = ridge x sqrt(m) sigma,

where A_floor is A with every eigenvalue below the floor raised to it, and sigma the noise on a value of each of m
releases. The floor is public, so choosing it costs nothing; it does not grow with the number of features, though noise
alone has eigenvalues of up to sqrt(2 k m) sigma, because classes lie in few directions. W x are least squares' scores.
Published are C W x, which predict the same and are as long as a linear discriminant's logits where classes are hard to
tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.accounting.gdp import check_positive
from ..privacy.errors import ConfigurationError
from ..privacy.release.clipping import Moments
from .callbacks.callback import Callback
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers, Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

LEAST_RIDGE = 1e-6
"""The floor without noise, for a sample and relative to the clip's square."""


@dataclass(frozen=True)
class OneShotState:
    """The model, shape (d,): the initial one before the release.

    Examples
    --------
    >>> import numpy as np
    >>> OneShotState(np.zeros(3)).model.tolist()
    [0.0, 0.0, 0.0]
    """

    model: Vector


def ridge_scores(gram: NDArray[np.float64], targets: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """Return A_floor^-1 B, shape (k, C), for A = ``gram`` (k, k) and B = ``targets`` (k, C): a pure function.

    Eigenvalues of A below ``floor`` are raised to it.

    Examples
    --------
    >>> ridge_scores(np.diag([4.0, 0.0]), np.array([[2.0], [1.0]]), floor=1.0).tolist()
    [[0.5], [1.0]]
    """
    values, vectors = np.linalg.eigh(gram)
    return (vectors / np.maximum(values, floor)) @ (vectors.T @ targets)


@dataclass(frozen=True)
class OneShotRule(Rule[OneShotState]):
    """The linear model from the sum of moments of one round; parameters as in :class:`OneShot`."""

    state_type: ClassVar[type[OneShotState]] = OneShotState
    divides_by_cohort: ClassVar[bool] = False

    clip_norm: float
    class_weight: float
    noise_std: float
    ridge: float
    constant: float

    def __post_init__(self) -> None:
        check_positive("clip_norm", self.clip_norm)
        check_positive("ridge", self.ridge)
        for name, value in (("noise_std", self.noise_std), ("constant", self.constant)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(
                    f"Expected {name} >= 0 and finite, got {value!r}.", kind="out-of-range", setting=name, got=value
                )
        Moments(2, self.class_weight)  # refuses a weight that is impossible

    def init(self, start: Vector, layout: Layout) -> OneShotState:
        shapes = [shape for _, shape, _ in layout]
        weight = shapes[0]
        expected = [weight, (weight[0],)] if self.constant else [weight]
        if shapes != expected or not (len(weight) == 2 or (len(weight) == 1 and not self.constant)):
            raise ConfigurationError(
                "Expected a model of a weight of shape (C, k), with a bias of shape (C,) if there is a constant, or of "
                f"shape (k,) for two classes without one, got shapes {shapes} and constant {self.constant:g}.",
                kind="wrong-shape",
            )
        return OneShotState(start)

    def points(self, state: OneShotState) -> tuple[Vector, ...]:
        return ()

    def update(self, state: OneShotState, total: Vector, turn: Turn) -> OneShotState:
        if turn.number > 1:
            raise ConfigurationError(f"Expected one round of one shot, got round {turn.number}.", kind="exhausted")
        if not turn.aggregated:
            return state  # nothing came: the initial model
        moments = self.moments(turn.layout)
        gram, targets = moments.read(total, self.clip_norm)
        noise = math.sqrt(turn.aggregated) * self.noise_std
        floor = max(self.ridge * noise, LEAST_RIDGE * self.clip_norm**2 * max(turn.samples, 1))
        return OneShotState(self._arranged(moments.classes * ridge_scores(gram, targets, floor), turn.layout))

    def model(self, state: OneShotState) -> Vector:
        return state.model

    def moments(self, layout: Layout) -> Moments:
        """Return how moments for a model of these arrays are laid out."""
        shape = layout[0][1]
        return Moments(shape[0] if len(shape) == 2 else 2, self.class_weight)

    def width(self, layout: Layout) -> int:
        """Return the number of features of a sample, the constant among them."""
        return layout[0][1][-1] + (self.constant > 0)

    def _arranged(self, scores: NDArray[np.float64], layout: Layout) -> Vector:
        """Scores of shape (k, C) as the model's values."""
        if self.constant:
            return np.concatenate([scores[:-1].T.ravel(), self.constant * scores[-1]])
        if len(layout[0][1]) == 1:
            return scores[:, 1] - scores[:, 0]
        return scores.T.ravel()


class OneShot(ReleaseStrategy[OneShotState]):
    """Linear model from one release of second moments of each client, for :class:`~murmurfl.clients.OneShotClient`.

    Parameters
    ----------
    clip_norm : float
        S, the clients' bound on features.
    class_weight : float
        A, the weight of classes in their releases.
    noise_std : float
        Sigma of the noise on each value of one client's release; 0 without noise.
    ridge : float
        The floor, in units of the noise on a value of the sum; > 0.
    constant : float
        Value that clients append to features, where the model has a bias; 0 for none.
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
    The model is a weight, of shape (C, k) or for two classes (k,), and where clients append a constant a bias of shape
    (C,) behind it.

    Examples
    --------
    >>> strategy = OneShot(clip_norm=1.0, ridge=11.0, num_clients=10)
    >>> type(strategy.rule).__name__
    'OneShotRule'
    """

    late_answers: ClassVar[LateAnswers] = "refused"  # there is one round

    def __init__(
        self,
        *,
        clip_norm: float,
        class_weight: float = 1.0,
        noise_std: float = 0.0,
        ridge: float = 11.0,
        constant: float = 0.0,
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
        rule = OneShotRule(float(clip_norm), float(class_weight), float(noise_std), float(ridge), float(constant))
        super().__init__(options, rule)
        self._one_shot = rule

    @property
    def release_layout(self) -> Layout:
        size = self._one_shot.moments(self._layout).num_values(self._one_shot.width(self._layout))
        return [("moments", (size,), np.dtype(np.float64))]
