r"""Online federated learning with local steps, the client's half (zhang-2025, algorithm 1; ALGORITHMS 3.1).

A client gets x^r, takes tau samples it has never used before, and makes one local step with each:

    z^{r,0} = x^r,    z^{r,t+1} = z^{r,t} - eta grad f^{r,t}(z^{r,t}),    g = (1 / tau) sum_t grad f^{r,t}(z^{r,t})

and releases g through the release rule. Replacing one sample moves its own gradient and, through the iterates, every
later gradient of the round. The paper's sensitivity 2 B / tau (lemma IV.8) leaves the second part out. That is right
only where steps never move two iterates apart. So there are two kinds of clipping, of which a policy for this client
should have the first unless the second is known to hold:

``update``
    The whole g is clipped to S: Delta = 2 S, for any model without state of its own from round to round.
``contractive``
    Every local gradient is clipped to S: Delta = 2 S / tau. Refused unless the model declares itself convex and smooth,
    eta <= 2 / L, and clipping either keeps the step non-expansive or never changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError
from ..privacy.ledger.ledger_records import Ledger
from ..privacy.noise import NoiseKeys
from ..privacy.release.clipping import DenseContributions, StackedContributions, clip_contributions
from ..privacy.release.ledgered_privatizer import Release
from ..privacy.release.policy import CONTRACTIVE_ROUNDING, PrivacyPolicy
from ..privacy.release.prefix_sums import RowCache
from ..privacy.sums.masking import Masking
from .adapters.per_sample_gradients import CarefulGradients, PerSampleGradients, Samples, flat_point, gradients_at, pick
from .messages import malformed
from .private_client import BatchedContribution, PrivateClient, Request
from .queries import ClientQuery

LARGEST_POINT = 1e100
"""A query point beyond this could overflow a margin, and a map that meets NaN is no longer monotone."""

UNIT_ROUNDOFF = 2.0**-53
FURTHER_ROUNDINGS = 8
"""Roundings of a value besides those of a sum over the parameters: clipping, a slope, a label, one step."""


@runtime_checkable
class ConvexSmoothGradients(PerSampleGradients, Protocol):
    """Gradients of losses that are convex and smooth whatever the sample: a declaration the guarantee rests on.

    An attribute ``convex`` that is False takes it back. Gradients must be computed in float64, with no error larger
    than that of sums of at most d terms: how far away a query point may be follows from it
    (:func:`~murmurfl.clients.online_client.farthest_point`).

    Attributes
    ----------
    smoothness : float
        L: no sample's gradient changes faster, from a public bound on the samples that the model itself enforces.
    gradient_bound : float
        No sample's gradient is longer.
    clips_contractively : bool
        Whether a step along a clipped gradient still moves no two iterates apart. True for scalar generalised linear
        models (a clipped monotone function is monotone), not for softmax.

    Notes
    -----
    **Formal guarantees.** Accounts of several local steps rest on the declaration being true for every sample, whatever
    the data; nothing here can check it.

    Examples
    --------
    >>> import numpy as np
    >>> class Logistic:
    ...     shapes = [(2,)]
    ...     smoothness, gradient_bound = 0.25, 1.0  # the rows of features are no longer than 1
    ...     clips_contractively = True
    ...     def __call__(self, parameters, samples):
    ...         features, labels = samples
    ...         return (1 / (1 + np.exp(-features @ parameters[0])) - labels)[:, None] * features
    >>> isinstance(Logistic(), ConvexSmoothGradients)
    True
    """

    @property
    def smoothness(self) -> float: ...

    @property
    def gradient_bound(self) -> float: ...

    @property
    def clips_contractively(self) -> bool: ...


def declares_itself_convex(gradients: PerSampleGradients) -> TypeGuard[ConvexSmoothGradients]:
    """Whether a model is :class:`ConvexSmoothGradients` and does not take it back."""
    return isinstance(gradients, ConvexSmoothGradients) and getattr(gradients, "convex", True) is True


def longest_gradient(gradients: PerSampleGradients, clip_norm: float) -> float:
    """Return the length that the rounding of a gradient is relative to: its bound, or S where it has none."""
    bound = float(getattr(gradients, "gradient_bound", math.inf))
    return max(clip_norm, bound) if math.isfinite(bound) else clip_norm


def check_steps(
    gradients: PerSampleGradients, learning_rate: float, clip_norm: float, *, most: float, of: str, instead: str
) -> ConvexSmoothGradients:
    """Return a model whose clipped steps move no two iterates apart; refuse any other.

    The model must declare itself convex and smooth, the step be at most ``most`` / L, and clipping move no iterates
    apart. Errors say what this is needed for and what to use ``instead``.

    Notes
    -----
    **Formal guarantees.** With ``most`` <= 2 a step of the model, clipped or not, moves no two iterates apart, if its
    declaration is true (:func:`~murmurfl.clients.online_client.check_contractive`).
    """
    if not declares_itself_convex(gradients):
        raise ConfigurationError(
            f"Expected a model that declares itself convex and smooth for {of}, got {type(gradients).__name__}: use "
            f"{instead}, which needs no such thing.",
            kind="unsupported",
            setting="gradients",
        )
    if not (gradients.smoothness > 0 and learning_rate * gradients.smoothness <= most):
        raise ConfigurationError(
            f"Expected learning_rate <= {most:g} / L = {most / gradients.smoothness:g} for {of}, got "
            f"{learning_rate:g}: lower it, or use {instead}.",
            kind="out-of-range",
            setting="learning_rate",
            got=learning_rate,
        )
    if clip_norm < gradients.gradient_bound and not gradients.clips_contractively:
        raise ConfigurationError(
            f"Expected clip_norm >= {gradients.gradient_bound:g}, the model's gradient bound, for {of}, got "
            f"{clip_norm:g}: a clipped step of this model can move iterates apart; use {instead}.",
            kind="out-of-range",
            setting="clip_norm",
            got=clip_norm,
        )
    return gradients


class LocalStepsClient(PrivateClient):
    """A client that takes steps of its own; a base class.

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
    learning_rate : float
        eta of the local steps: the client's own, for a server that chose it could void the guarantee.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.Privatizer`).
    masking : Masking, optional
        The client's masks; required under ``trust="secure-aggregation"``, and refused otherwise.
    queries : sequence of ClientQuery
        What it answers in addition to the training (:class:`~murmurfl.clients.PrivateClient`).

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP for replacement
    of one sample, if a subclass charges how far its steps let one sample move a release. Steps are computed in float64,
    whose rounding grows with the distance from the origin; a subclass says from how far away it still answers.
    Proof: docs/proofs/sensitivities.md.
    """

    query_points: ClassVar[int] = 1
    takes_inputs: ClassVar[bool] = False

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        learning_rate: float,
        rows: RowCache | None = None,
        masking: Masking | None = None,
        queries: Sequence[ClientQuery] = (),
    ) -> None:
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ConfigurationError(
                f"Expected learning_rate > 0 and finite, got {learning_rate!r}.",
                kind="out-of-range",
                setting="learning_rate",
                got=learning_rate,
            )
        # Before the rest: a subclass's check of its model needs them.
        self.learning_rate = float(learning_rate)
        self._farthest = LARGEST_POINT
        super().__init__(
            gradients,
            samples,
            policy,
            ledger,
            keys,
            name=name,
            rows=rows,
            masking=masking,
            queries=queries,
        )

    def _start_of(self, request: Request, called: str) -> NDArray[np.float64]:
        """Return the query point as one vector, or a refusal if it is too far away."""
        start = flat_point(request.query_points[0])
        if not self._reaches(start):
            raise malformed(f"the {called} is too far away")
        return start

    def _reaches(self, start: NDArray[np.float64]) -> bool:
        """Return True if a point is near enough for rounding to stay within what is charged."""
        with np.errstate(over="ignore"):
            return bool(np.linalg.norm(start) <= self._farthest)


# How many values the iterates of clients computed together may have, to stay in a processor's cache.
_VALUES_TOGETHER = 1 << 16


def local_updates(
    gradients: PerSampleGradients,
    start: NDArray[np.floating],
    samples: Any,
    learning_rates: NDArray[np.float64],
    *,
    clip_norm: float | None = None,
) -> NDArray[np.float64]:
    """Return the mean gradient g along tau local steps of each of several clients, shape (clients, d): a pure function.

    It is accumulated as a sum of gradients, not as a difference of iterates.

    Parameters
    ----------
    gradients : PerSampleGradients
    start : ndarray of shape (d,)
        x^r.
    samples : Any
        tau samples of each client, client after client.
    learning_rates : ndarray of shape (clients, tau)
        eta of every step.
    clip_norm : float, optional
        Clip every local gradient to this norm; one that is not finite becomes zero.

    Examples
    --------
    >>> import numpy as np
    >>> class LeastSquares:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples[:, None]
    >>> samples = np.array([2.0, 2.0])  # two local steps of one client
    >>> local_updates(LeastSquares(), np.zeros(1), samples, learning_rates=np.array([[0.5, 0.5]])).tolist()
    [[-1.5]]
    """
    clients, steps = learning_rates.shape
    start = np.asarray(start, dtype=np.float64)
    means = np.zeros((clients, start.size))
    together = max(_VALUES_TOGETHER // max(start.size, 1), 1)
    for first in range(0, clients, together):
        total, rates = means[first : first + together], learning_rates[first : first + together]
        iterates = np.tile(start, (len(total), 1))
        step = np.empty_like(iterates)
        for t in range(steps):
            chosen = slice(first * steps + t, (first + len(total)) * steps, steps)
            rows = gradients_at(gradients, iterates, pick(samples, chosen))
            if clip_norm is not None:
                rows = clip_contributions(rows, clip_norm)
            total += rows
            if t + 1 < steps:
                iterates -= np.multiply(rates[:, t, None], rows, out=step)
        total /= steps
    return means


class OnlineClient(LocalStepsClient):
    """A client of locally private online FL, for :class:`~murmurfl.strategies.OnlineFedSGD`.

    Parameters
    ----------
    gradients : PerSampleGradients
        The model's per-sample gradients.
    samples : Samples
        The client's data; used in order, each sample once.
    policy : PrivacyPolicy
        The client's own decisions. Its batch_size is tau and its clip_unit ``update`` or ``contractive``.
    ledger : Ledger
        Where releases are recorded before they leave.
    keys : NoiseKeys
        The client's noise key.
    name : str
        The client's public name, such as its partition id.
    learning_rate : float
        eta of the local steps: the client's own, for a server that chose it could void the guarantee.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.Privatizer`).
    masking : Masking, optional
        The client's masks; required under ``trust="secure-aggregation"``, and refused otherwise.
    queries : sequence of ClientQuery
        What it answers in addition to the training (:class:`~murmurfl.clients.PrivateClient`).

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP for replacement
    of one sample. With ``update``: provided nothing but the samples of the round and the query point goes into the
    gradients. With ``contractive``: provided also that the model's declaration is true (:class:`ConvexSmoothGradients`)
    and that a gradient that cannot be computed is the fault of its sample alone. A query point so far away that
    rounding of the local iterates could move g by more than is charged is refused (:func:`farthest_point`). On a real
    client a sample that cannot be loaded, or whose gradient cannot be computed, has gradient zero, and the other steps
    are made.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, clip_unit="update")
    >>> ledger, keys = MemoryLedger(), SimulatedKeys(1, "3")
    >>> client = OnlineClient(gradients, samples, policy, ledger, keys, name="3", learning_rate=0.1)
    >>> client.statement("session")["mu-guaranteed"]
    1.0
    """

    summable: ClassVar[bool] = True

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        learning_rate: float,
        rows: RowCache | None = None,
        masking: Masking | None = None,
        queries: Sequence[ClientQuery] = (),
    ) -> None:
        super().__init__(
            gradients,
            samples,
            policy,
            ledger,
            keys,
            name=name,
            learning_rate=learning_rate,
            rows=rows,
            masking=masking,
            queries=queries,
        )
        # Not in the hooks: a subclass that overrides one without super() must not lose these.
        if policy.clip_unit == "contractive":
            if type(self).contribution is not OnlineClient.contribution:
                raise ConfigurationError(
                    f"Expected clip_unit 'update' for {type(self).__name__}, which has a contribution of its own, got "
                    "'contractive': that is the sensitivity of local steps as OnlineClient makes them.",
                    kind="conflict",
                    setting="clip_unit",
                )
            declared = check_contractive(gradients, self.learning_rate, policy.clip_norm)
            self._farthest = farthest_point(declared, self.learning_rate, policy.clip_norm, policy.batch_size)

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.clip_unit not in ("update", "contractive"):
            raise ConfigurationError(
                f"Expected clip_unit 'update' or 'contractive' for local steps, got {policy.clip_unit!r}.",
                kind="conflict",
                setting="clip_unit",
                got=policy.clip_unit,
            )

    def release(self, request: Request) -> Release:
        """Return the client's next release; refused if rounding at the query point could undo the guarantee."""
        self._start_of(request, "query point")
        return super().release(request)

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """Return the mean gradient g of this round, shape (1, d)."""
        return _updates([self], self.gradients, flat_point(request.query_points[0]), samples)

    def _contribution_of(self, request: Request, samples: slice) -> NDArray[np.floating] | StackedContributions:
        if self.privatizer.simulated or type(self).contribution is not OnlineClient.contribution:
            return super()._contribution_of(request, samples)
        # A real client loads each sample when its step comes: one that fails does not spoil the other steps.
        start, numbers = flat_point(request.query_points[0]), np.arange(samples.start, samples.stop)
        with np.errstate(all="ignore"):
            return _updates([self], CarefulGradients(self.gradients, self.samples), start, numbers)

    @classmethod
    def together(
        cls,
        clients: Sequence[PrivateClient],
        server_round: int,  # noqa: ARG003 - local steps are the same in every round
        session: str,  # noqa: ARG003
        points: Sequence[Sequence[NDArray[Any]]],
    ) -> BatchedContribution | None:
        if cls.contribution is not OnlineClient.contribution:
            return None
        start = flat_point(points[0])
        clients = [client for client in clients if isinstance(client, OnlineClient)]
        if not all(client._reaches(start) for client in clients):
            return None  # one by one: each client that does not reach so far refuses by itself

        def contributions(positions: Sequence[int], samples: Any) -> StackedContributions:
            with np.errstate(all="ignore"):
                return DenseContributions(
                    _updates([clients[i] for i in positions], clients[0].gradients, start, samples)
                )

        return BatchedContribution(contributions)


def _updates(
    clients: Sequence[OnlineClient], gradients: PerSampleGradients, start: NDArray[np.float64], samples: Any
) -> NDArray[np.float64]:
    policy = clients[0].privatizer.policy
    rates = np.repeat([[client.learning_rate] for client in clients], policy.batch_size, axis=1)
    clip_norm = policy.clip_norm if policy.clip_unit == "contractive" else None
    return local_updates(gradients, start, samples, rates, clip_norm=clip_norm)


def farthest_point(gradients: ConvexSmoothGradients, learning_rate: float, clip_norm: float, steps: int) -> float:
    r"""Return the largest L2 norm, at most 1e100, of a query point for which ``contractive`` holds in float64.

    Parameters
    ----------
    gradients : ConvexSmoothGradients
        A model that has passed :func:`check_contractive`: L, and B, its gradients' bound.
    learning_rate : float
        eta <= 2 / L.
    clip_norm : float
        S.
    steps : int
        tau.

    Notes
    -----
    For query points no farther away, replacing one sample moves g by at most 2 S / tau (1 + r) as it is computed, with
    r = 1e-6 as the policy charges, provided the gradients are computed as :class:`ConvexSmoothGradients` asks. Let u =
    2^-53, d the number of parameters, and R = |x| + tau eta S, which no iterate exceeds.

    * A computed gradient r_t is off by at most D = (d + 8) u (L R + max(S, B)): the margin's rounding, of a sum over d
      terms, moves the gradient as a point (d + 8) u R away would; the rest is relative to the gradient. (Without a
      finite B a gradient is clipped to S and its error with it.)
    * Each iterate is off by at most E = u (R + 2 eta S) from the one before minus eta r_t.
    * A step may be longer than 2 / L by a relative 2 d u, where the model bounds its samples in float64.
    * The running sum of the gradients is off by at most u tau^2 S / 2 in each of both worlds.

    Iterates of two worlds then move apart by 2 eta S at the replaced sample and by at most 2 (eta D + E) in every step.
    Up to its rounding tau g is (x - z_tau) / eta, so tau g moves by at most 2 S + 2 tau D + 2 tau E / eta. For a small
    eta there is a better bound: in t steps rounding adds at most t E to an iterate, and so t E L to its gradient, and E
    enters as tau^2 L E in the place of 2 tau E / eta. The smaller of the two bounds holds. All of it together must stay
    below 2 S r, which is linear in R.
    """
    size = sum(math.prod(shape) for shape in gradients.shapes)
    smoothness, longest = gradients.smoothness, longest_gradient(gradients, clip_norm)
    sums = size + FURTHER_ROUNDINGS
    iterates = min(2.0 * steps / learning_rate, smoothness * steps**2)
    of_distance = UNIT_ROUNDOFF * (2.0 * steps * sums * smoothness + iterates)
    of_clips = UNIT_ROUNDOFF * (2.0 * steps * sums * longest + 2.0 * iterates * learning_rate * clip_norm)
    of_clips += UNIT_ROUNDOFF * clip_norm * steps * (steps + 4.0 * size)
    reach = (2.0 * clip_norm * CONTRACTIVE_ROUNDING - of_clips) / of_distance - steps * learning_rate * clip_norm
    if not reach > 0:
        raise ConfigurationError(
            f"Expected local steps whose rounding stays below {CONTRACTIVE_ROUNDING:g} of what is charged for "
            f"clip_unit 'contractive', got {steps} steps of {size} parameters with clip_norm {clip_norm:g}: use "
            "fewer, or 'update', whose sensitivity rounding does not touch.",
            kind="out-of-range",
            setting="steps",
        )
    return min(reach, LARGEST_POINT)


def check_contractive(gradients: PerSampleGradients, learning_rate: float, clip_norm: float) -> ConvexSmoothGradients:
    """Return a model for which the ``contractive`` sensitivity holds; refuse any other.

    The model must declare itself convex and smooth, the step be at most 2 / L, and clipping move no iterates apart.

    Notes
    -----
    **Formal guarantees.** For a convex loss with L-Lipschitz gradient and eta <= 2 / L, z -> z - eta grad f(z) moves no
    two points apart (Hardt, Recht and Singer 2016, lemma 3.7). So replacing sample t moves the iterate by at most
    2 eta S after its step and no further, and g by at most 2 S / tau.
    Proof: docs/proofs/sensitivities.md.
    """
    return check_steps(gradients, learning_rate, clip_norm, most=2.0, of="clip_unit 'contractive'", instead="'update'")
