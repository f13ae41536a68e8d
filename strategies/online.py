"""Online federated learning, the server's half (zhang-2025, algorithm 1; ALGORITHMS 3.1).

    x^{r+1} = x^r - eta~ (1 / m) sum of the releases,    eta~ = eta eta_g tau

So x is one step along the prefix sums of what the clients release, and the noise in it is theirs: a row of B Z.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.accounting.gdp import check_count
from .callbacks.callback import Callback
from .rounds.options import RoundOptions, positive
from .rounds.participation import Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation


@dataclass(frozen=True)
class OnlineState:
    """State of online federated SGD: the global model, shape (d,).

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import online_step
    >>> state = online_step(OnlineState(np.zeros(2)), np.array([4.0, 0.0]), clients_per_round=4, step=0.5)
    >>> state.x.tolist()
    [-0.5, 0.0]
    """

    x: Vector


def online_step(state: OnlineState, release_sum: Vector, *, clients_per_round: int, step: float) -> OnlineState:
    """One round with m = ``clients_per_round`` and eta~ = ``step``: a pure function.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import OnlineState
    >>> online_step(OnlineState(np.zeros(2)), np.array([4.0, 0.0]), clients_per_round=4, step=0.5).x.tolist()
    [-0.5, 0.0]
    """
    return OnlineState(state.x - step / clients_per_round * release_sum)


@dataclass(frozen=True)
class OnlineRule(Rule[OnlineState]):
    """Online federated SGD (:func:`online_step`).

    Parameters
    ----------
    step_size : float
        eta~ > 0.
    """

    state_type: ClassVar[type[OnlineState]] = OnlineState

    step_size: float

    def init(self, start: Vector, layout: Layout) -> OnlineState:
        return OnlineState(start)

    def points(self, state: OnlineState) -> tuple[Vector, ...]:
        return (state.x,)

    def update(self, state: OnlineState, total: Vector, turn: Turn) -> OnlineState:
        return online_step(state, total, clients_per_round=turn.clients_per_round, step=self.step_size)

    def model(self, state: OnlineState) -> Vector:
        return state.x


class OnlineFedSGD(ReleaseStrategy[OnlineState]):
    """Locally private online federated learning, for :class:`~murmurfl.clients.OnlineClient`.

    Parameters
    ----------
    learning_rate : float
        eta of the clients' local steps, which have their own setting; this one only scales the server's step.
    local_steps : int
        tau.
    global_learning_rate : float
        eta_g > 0.
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
    The paper asks all clients in every round.

    Examples
    --------
    >>> strategy = OnlineFedSGD(learning_rate=0.1, local_steps=4, num_clients=10, clients_per_round=5)
    >>> type(strategy.rule).__name__
    'OnlineRule'
    """

    def __init__(
        self,
        *,
        learning_rate: float,
        local_steps: int,
        global_learning_rate: float = 1.0,
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
        rate, global_rate = (
            positive("learning_rate", learning_rate),
            positive("global_learning_rate", global_learning_rate),
        )
        check_count("local_steps", local_steps)
        super().__init__(options, OnlineRule(rate * global_rate * local_steps))
