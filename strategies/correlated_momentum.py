r"""Momentum of gradients with correlated noise; noisy SGD as the case without momentum (ALGORITHMS 3 and 4).

With g_t the mean of the clients' clipped gradients and row t of B Z the noise on their prefix sums,

    g^_t    = g_t + (row t - row t-1 of B Z)
    m^_t    = (1 - alpha) m^_{t-1} + alpha g^_t
    w_{t+1} = w_t - eta m^_t / ||m^_t||,  or  w_t - eta m^_t  without normalisation

This is the momentum of tran-cutkosky-2022 with noise from another factorisation than its trees. With alpha = 1,
independent noise and no normalisation it is noisy SGD. With Poisson batches, which clients draw and keep secret, that
is DP-SGD (Abadi et al. 2016): g_t is the sum divided by the expected number of samples, which is public. With samples
in a fixed order it is not, and has the noise of plain composition.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.accounting.amplification import Amplification
from ..privacy.accounting.poisson import sampling_amplification
from ..privacy.errors import ConfigurationError
from ..privacy.mechanisms import IndependentNoise, Mechanism, State, make_mechanism
from ..privacy.noise import NONCE_BYTES, NoiseKeys, resolution_mu
from ..privacy.release.policy import PrivacyPolicy
from .callbacks.callback import Callback
from .rounds.options import RoundOptions
from .rounds.participation import Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Turn
from .sums.secure_aggregation import SecureAggregation
from .tree_momentum import MomentumRule, MomentumStream, TrustedMomentum, normalised_step

MOMENTUM_MECHANISMS = (
    "independent", "decay", "sqrt_toeplitz", "sqrt_normalised", "bisr", "banded", "blt", "optimal",
)  # fmt: skip
"""The mechanisms with a square C: one row of Z a round."""


@dataclass(frozen=True)
class CorrelatedMomentumState:
    """State after round t.

    Parameters
    ----------
    w, momentum : ndarray of shape (d,)
        w_{t+1} and m^_t.
    noise : ndarray of shape (rows, d)
        The mechanism's state, where it keeps one.
    nonces : ndarray of shape (T, 16), uint8
        The nonces of the rows drawn so far. A mechanism that keeps no state makes it again from these rows.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import CorrelatedMomentum
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0, trust="trusted-server", release_rule="paper"
    ... )
    >>> strategy = CorrelatedMomentum(policy=policy, num_rounds=5, alpha=0.1, learning_rate=0.1, num_clients=10)
    >>> state = strategy.rule.init(np.zeros(3), [])
    >>> state.w.shape, state.momentum.shape, state.nonces.shape
    ((3,), (3,), (5, 16))
    """

    w: Vector
    momentum: Vector
    noise: NDArray[np.floating]
    nonces: NDArray[np.uint8]


class Momentum(MomentumStream):
    """The momentum of gradients, under the noise of a mechanism on the clients' sums.

    Parameters
    ----------
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    mechanism : Mechanism
        One of :data:`MOMENTUM_MECHANISMS`, for as many releases as there are rounds.

    Notes
    -----
    **Formal guarantees.** All noisy sums together are mu-GDP for replacement of one sample that takes part in rounds
    c, c + N, ... only. Sums and noise are rounded to the clients' grid, which is charged.
    Proof: docs/proofs/returning-samples.md.
    """

    def __init__(self, alpha: float, mechanism: Mechanism) -> None:
        super().__init__(alpha)
        self.mechanism = mechanism

    takes_samples: ClassVar[bool] = True

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        super().bind(policy, num_rounds, keys)
        if policy.batch_selection == "poisson" and not self._is_fresh:
            raise ConfigurationError(
                f"Expected mechanism 'independent' with equal shares under batch_selection 'poisson', got "
                f"{self.mechanism.name!r}: what other noise hides of a secret batch is not accounted for.",
                kind="conflict",
                setting="mechanism",
                got=self.mechanism.name,
            )

    @property
    def _is_fresh(self) -> bool:
        """Whether every round has independent noise of one standard deviation."""
        return type(self.mechanism) is IndependentNoise and self.mechanism.shares == "uniform"

    def largest_shift(self) -> float:
        if not self._is_fresh:
            return super().largest_shift()
        return self.mu / self.mechanism.sensitivity(**self.policy.pattern)  # what it moves in one round

    def amplification(self, num_parameters: int) -> Amplification | None:
        """Return the epsilon of Poisson batches; None for other ones, and where nothing is guaranteed."""
        policy = self.policy
        if policy.batch_selection != "poisson" or math.isinf(self.guaranteed_mu(num_parameters)):
            return None
        std, hint = self.sum_noise_std(num_parameters), 0.0
        if policy.noise_quality == "exact":
            spacing = self.noise_grid(num_parameters).spacing
            hint = resolution_mu(num_parameters * self.num_rounds, spacing / std)
        return sampling_amplification(
            *(policy, num_parameters),
            rounds=self.num_rounds,
            noise_std=std,
            rounding=self.rounding_charge(num_parameters),
            resolution_mu=hint,
        )

    def noise_std(self, num_parameters: int) -> float:
        """Return the standard deviation in front of Z, for the mean of the gradients."""
        return self.sum_noise_std(num_parameters) / self.clients_per_round

    def sum_noise_std(self, num_parameters: int) -> float:
        """Return the standard deviation in front of Z, for the sum of the clients' releases."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        mean_std, _ = self.mechanism.rounded_std()
        std = self.mechanism.noise_std(change, self.mu, **self.policy.pattern)
        ideal = self.ideal_mu(num_parameters, std * mean_std)
        return self.mechanism.noise_std(change, ideal, **self.policy.pattern)

    def unrounded_noise_std(self, num_parameters: int) -> float:
        change, (_, largest_std) = self.policy.plan(num_parameters).sensitivity, self.mechanism.rounded_std()
        return self.mechanism.noise_std(change, self.mu, **self.policy.pattern) * largest_std

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def noisy_sum(
        self, state: CorrelatedMomentumState, release_sum: Vector, server_round: int
    ) -> tuple[Vector, NDArray[np.floating], NDArray[np.uint8]]:
        """Return a round's sum with its noise, the mechanism's next state as rows, and the nonces with the round's."""
        self.check_round(server_round)
        grid, size = self.noise_grid(len(release_sum)), len(release_sum)
        scale = self.sum_noise_std(size)
        nonces = self.with_nonce(state.nonces, server_round)
        before = self._unpacked(state, server_round, scale)
        increment = self.mechanism.increment(before, server_round, self._row(nonces, server_round, size), scale)
        # Sum and noise are on one grid, so that what is published is a rounded Gaussian release
        # (privacy/noise.py).
        counts = grid.counts(release_sum) + grid.counts(np.asarray(increment.added, np.float64))
        if increment.removed is not None:
            counts -= grid.counts(np.asarray(increment.removed, np.float64))
        rows = np.zeros((0, size)) if increment.state is None else _packed(increment.state, size)
        return grid.values(counts), rows, nonces

    def _row(self, nonces: NDArray[np.uint8], server_round: int, size: int) -> NDArray[np.floating]:
        return self.normals_of(nonces[server_round - 1].tobytes(), size)

    def _unpacked(self, state: CorrelatedMomentumState, server_round: int, scale: float) -> State:
        """Return the mechanism's state before a round."""
        if self.mechanism.memory == "nothing":
            return ()
        if self.mechanism.memory != "all":
            return tuple(state.noise)
        if len(state.noise):
            return (state.noise,)
        size = len(state.w)

        def draw(rounds: range) -> NDArray[np.floating]:
            return np.stack([self._row(state.nonces, k, size) for k in rounds])

        return self.mechanism.state_after(server_round - 1, draw, scale)


@dataclass(frozen=True, eq=False)
class CorrelatedMomentumRule(MomentumRule[CorrelatedMomentumState, Momentum]):
    """Momentum of noisy gradients, with steps that are normalised or not.

    Parameters
    ----------
    normalised : bool
        Whether a step has the length eta or eta times that of the momentum.
    """

    state_type: ClassVar[type[CorrelatedMomentumState]] = CorrelatedMomentumState

    normalised: bool = True

    def init(self, start: Vector, layout: Layout) -> CorrelatedMomentumState:
        noise = _packed(self.stream.mechanism.initial_state(len(start)), len(start))
        nonces = np.zeros((self.stream.num_rounds, NONCE_BYTES), np.uint8)
        return CorrelatedMomentumState(start, np.zeros_like(start), noise, nonces)

    def points(self, state: CorrelatedMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def update(self, state: CorrelatedMomentumState, total: Vector, turn: Turn) -> CorrelatedMomentumState:
        if not self._divisor(turn):
            return state  # nothing came, and nothing is published
        noisy, noise, nonces = self.stream.noisy_sum(state, total, turn.number)
        alpha = self.stream.alpha
        momentum = (1 - alpha) * state.momentum + alpha * (noisy / self._divisor(turn))
        if self.normalised:
            w = normalised_step(state.w, momentum, self.learning_rate)
        else:
            w = state.w - self.learning_rate * momentum
        return CorrelatedMomentumState(w, momentum, noise, nonces)

    def _divisor(self, turn: Turn) -> float:
        """Return what a sum is divided by, which is public: the clients asked, or a Poisson batch's expected size.

        How many samples clients have, of which a share of q is expected in a batch, is public; how many were in one is
        not, and nobody counts them.
        """
        policy = self.stream.policy
        if policy.batch_selection != "poisson":
            return turn.clients_per_round
        return policy.sampling_rate * turn.samples

    def model(self, state: CorrelatedMomentumState) -> Vector:
        return state.w

    def settings(self) -> dict[str, Any]:
        mechanism = self.stream.mechanism
        own = {"mechanism": mechanism.name, "normalised": self.normalised}
        return {**super().settings(), **own, "encoder": mechanism.identity().hex()[:64]}


class CorrelatedMomentum(TrustedMomentum[CorrelatedMomentumState, Momentum]):
    """Momentum with correlated noise, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy that all clients were configured with, with ``release_rule="paper"``, and as many passes
        (``sample_participations``) of ``min_separation`` = N releases as samples are used; or with
        ``batch_selection="poisson"``, for independent noise.
    num_rounds : int
        T, the most rounds of which this server ever publishes a model.
    noise_keys : NoiseKeys, optional
        The server's noise key (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`). Default: one from the operating
        system, kept in a file beside the checkpoint.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    learning_rate : float
        eta > 0.
    mechanism : str
        One of :data:`MOMENTUM_MECHANISMS`.
    mechanism_options : dict, optional
        The mechanism's own options (:func:`~murmurfl.privacy.make_mechanism`).
    normalised : bool
        Whether a step has the length eta or eta times that of the momentum.
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
    :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`; the mechanism's sensitivity is that of samples
    that return every N rounds. Sums and noise are rounded to the clients' grid, which is charged. With Poisson batches
    mu is that of a sample in every round, and as long as nobody but the server learns the batches, epsilon is that of
    ``aggregator.stream.amplification(num_parameters)``.
    Proof: docs/proofs/returning-samples.md, docs/proofs/secret-order.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0, trust="trusted-server", release_rule="paper"
    ... )
    >>> strategy = CorrelatedMomentum(policy=policy, num_rounds=5, alpha=0.1, learning_rate=0.1, num_clients=10)
    >>> strategy.rule.learning_rate
    0.1
    """

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        alpha: float,
        learning_rate: float,
        mechanism: str = "independent",
        mechanism_options: Mapping[str, Any] | None = None,
        normalised: bool = True,
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
        if mechanism not in MOMENTUM_MECHANISMS:
            raise ConfigurationError(
                f"Expected mechanism one of {MOMENTUM_MECHANISMS} for momentum, got {mechanism!r}; TreeMomentum "
                "has the tree.",
                kind="unknown-name",
                setting="mechanism",
                got=mechanism,
            )
        made = make_mechanism(mechanism, num_rounds, **(mechanism_options or {}))
        rule = CorrelatedMomentumRule(Momentum(alpha, made), float(learning_rate), normalised)
        super().__init__(options, rule, policy=policy, num_rounds=num_rounds, noise_keys=noise_keys)


def _packed(state: State, size: int) -> NDArray[np.floating]:
    """Return a mechanism's state as one array of rows."""
    if not state:
        return np.zeros((0, size))
    return np.concatenate([rows.reshape(-1, size) for rows in state])
