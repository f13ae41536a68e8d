r"""Shuffled gradients whose intermediate iterates stay inside (jiang-2026; ALGORITHMS section 5).

In an epoch a client (a silo, in the paper) takes n_d steps on samples of its own and then n - n_d on public ones, each
with fresh noise,

    x_{i+1} = x_i - eta (clip_S(grad f(x_i; z_i)) + rho_i),    rho_i ~ N(0, sigma^2 I),

and only the end of the epoch leaves. Two accounts of what that costs when one sample is replaced, for one epoch:

``amplified``
    (a, 2 a S^2 / (sigma^2 (n - n_d + 1)))-RDP: privacy amplification by iteration (Feldman, Mironov, Talwar and
    Thakurta 2018, theorem 22; lemma F.2 of the paper), for the replaced sample's step is followed by at least n - n_d
    others. Bok, Su and Altschuler (2024, https://arxiv.org/abs/2403.00278) prove the same as Gaussian DP, which implies
    it and composes and converts without loss: mu = 2 S / (sigma sqrt(n - n_d + 1)). True only if every step after it
    moves no two points apart: convex, smooth, eta <= 1 / L* and a clipping that keeps this.
``composed``
    mu = 2 S / sigma, as if every iterate were published: plain composition, which asks for nothing but the clipping.
    Without public steps both are the same figure, so DP-ShuffleG needs no condition on step or model at all.

K epochs that touch private samples compose to sqrt(K) mu; epochs on public samples alone cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..accounting.noise_plan import NoisePlan, epoch_words
from ..errors import ConfigurationError, formerly
from ..ledger.ledger_records import Ledger
from ..noise import LARGEST_NORMAL, NONCE_BYTES, NoiseKeys, NoiseQuality, derived_seed, row_key, standard_normal_rows
from .admission import Admission
from .clipping import clip_contributions
from .known_samples import RowBytes
from .ledgered_privatizer import LedgeredPrivatizer, Release
from .policy import NO_NOISE, OF_SUMS, PrivacyPolicy
from .prefix_sums import RowCache

Accounting = Literal["amplified", "composed"]
ACCOUNTINGS: tuple[Accounting, ...] = get_args(Accounting)
Order = Literal["IG", "SO", "RR"]
ORDERS: tuple[Order, ...] = get_args(Order)

ITERATION_ROUNDING = 1e-4
"""The most that float64 rounding of an epoch's iterates may add to 2 S, relative; a client refuses more."""

# Normals drawn at a time: few enough to stay in a processor's second-level cache.
_NORMALS_TOGETHER = 1 << 15

Vector = NDArray[np.float64]
Epoch = Callable[[int, Iterator[Vector] | None], Vector]
"""Given the number of the release, from 1, and the noise of its steps (None: none): the sum of :func:`noisy_epoch`."""


def epoch_mu(clip_norm: float, noise_std: float, public_steps: int, accounting: Accounting = "amplified") -> float:
    """Mu of one epoch whose end alone is released.

    ``noise_std`` is sigma of every step, ``public_steps`` n - n_d, the noisy steps after the last private one.

    Notes
    -----
    **Formal guarantees.** For replacement of one sample that is in at most one step of the epoch. ``composed``:
    whatever the model. ``amplified``: if every step after the sample's is non-expansive, which this function cannot
    check (:func:`~murmurfl.clients.shuffled_client.check_amplified` does).
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> epoch_mu(10.0, 5.0, 15)
    1.0
    """
    if not (clip_norm > 0 and noise_std > 0 and math.isfinite(clip_norm)):
        raise ConfigurationError(
            f"Expected clip_norm and noise_std > 0, got {clip_norm!r} and {noise_std!r}.",
            kind="out-of-range",
            setting="clip_norm",
            got=clip_norm,
        )
    if accounting not in ACCOUNTINGS or public_steps < 0:
        raise ConfigurationError(
            f"Expected public_steps >= 0 and accounting one of {ACCOUNTINGS}, got {public_steps!r}, {accounting!r}.",
            kind="out-of-range",
            setting="public_steps",
            got=public_steps,
        )
    steps = public_steps + 1 if accounting == "amplified" else 1
    return 2.0 * clip_norm / (noise_std * math.sqrt(steps))


def noisy_epoch(
    gradient: Callable[[Vector, int], NDArray[np.floating]],
    start: Vector,
    steps: int,
    *,
    learning_rate: float,
    clip_norm: float | None,
    noise: Iterator[Vector] | None = None,
) -> Vector:
    """Return the sum v of an epoch's clipped gradients and their noise (lines 6 to 11 of algorithm 1), a pure function.

    x_{n+1} = x_1 - eta v for x_1 = ``start``: a sum of gradients and not a difference of iterates, which would round it
    away for small steps. ``gradient`` gives the gradient at a point, shape (d,), on the sample of step i, from 0; S =
    ``clip_norm`` None clips nothing; ``noise`` is rho_1, rho_2, ..., by default none.
    """
    total = np.zeros_like(start)
    for i in range(steps):
        row = np.asarray(gradient(start - learning_rate * total, i), dtype=np.float64)
        total += row if clip_norm is None else clip_contributions(row[None], clip_norm)[0]
        if noise is not None:
            total += next(noise)
    return total


def epoch_order(order: Order, count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of a client's ``count`` samples in an epoch (the paper's algorithm 2); it need not be secret.

    Incremental gradient (``IG``): as they lie. Shuffle once (``SO``): one order for all epochs. Random reshuffling
    (``RR``): a new one each. Every account holds for any order that does not depend on data.
    """
    if order not in ORDERS:
        raise ConfigurationError(
            f"Expected order one of {ORDERS}, got {order!r}.", kind="unknown-name", setting="order", got=order
        )
    if order == "IG":
        return np.arange(count)
    parts = (seed,) if order == "SO" else (seed, epoch)
    return np.random.Generator(np.random.Philox(key=derived_seed(f"epoch order {order}", *parts))).permutation(count)


def step_noise(key: bytes, steps: int, size: int, noise_std: float, quality: NoiseQuality) -> Iterator[Vector]:
    """Yield the noise of an epoch's steps: ``noise_std`` times normals, each step with a key of its own."""
    together = max(_NORMALS_TOGETHER // size, 1)
    for first in range(0, steps, together):
        numbers = range(first, min(first + together, steps))
        keys = [row_key(key, step.to_bytes(NONCE_BYTES, "big")) for step in numbers]
        yield from noise_std * standard_normal_rows(keys, size, quality).astype(np.float64)


@formerly(min_honest=OF_SUMS, min_cohort=OF_SUMS)
@dataclass(frozen=True)
class ShuffledPolicy(PrivacyPolicy):
    """A client's own decisions for shuffled gradients.

    Parameters
    ----------
    clip_norm, mu, epsilon, budget_mu, delta, noise_quality, trust
        See :class:`~murmurfl.privacy.PrivacyPolicy`; under ``trusted-server``, and with mechanism ``none``, no step has
        noise.
    batch_size : int
        n, the client's samples. Any of them may be in an epoch, at most once.
    max_participations : int
        K, epochs that touch them. Each counts in full, whichever samples it takes.
    private_steps : int
        n_d <= n; default n.
    public_steps : int
        n - n_d, noisy steps on public samples after the private ones.
    accounting : {"amplified", "composed"}
        ``amplified`` is refused by the client where its conditions do not hold.

    Notes
    -----
    **Formal guarantees.** Everything the client releases in one session is mu-GDP (over all sessions budget_mu-GDP)
    for replacement of one of its samples, against a server that chooses starting points and stopping adaptively; under
    ``amplified`` if every step is non-expansive.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> policy = ShuffledPolicy(clip_norm=1.0, batch_size=20, max_participations=5, mu=1.0, public_steps=10)
    >>> policy.steps, policy.accounting_used
    (30, 'amplified')
    """

    private_steps: int = 0
    public_steps: int = 0
    accounting: Accounting = "amplified"

    def __post_init__(self, epsilon: float | None) -> None:
        fixed = {"clip_unit": "update", "release_rule": "paper"}
        if self.mechanism != NO_NOISE:
            fixed["mechanism"] = "independent"
        fixed["sample_participations"] = self.max_participations  # type: ignore[assignment]
        for name, value in fixed.items():
            object.__setattr__(self, name, value)
        if not self.private_steps:
            object.__setattr__(self, "private_steps", self.batch_size)
        super().__post_init__(epsilon)
        if self.trust == "secure-aggregation":
            raise ConfigurationError(
                "Expected trust 'untrusted-server' or 'trusted-server' for shuffled gradients, got "
                f"{self.trust!r}: their noise is inside an epoch, where no other client's adds to it.",
                kind="conflict",
                setting="trust",
                got=self.trust,
            )
        if not 1 <= self.private_steps <= self.batch_size or self.public_steps < 0:
            raise ConfigurationError(
                f"Expected 1 <= private_steps <= batch_size and public_steps >= 0, got {self.private_steps!r} of "
                f"{self.batch_size!r} and {self.public_steps!r}.",
                kind="out-of-range",
                setting="private_steps",
                got=self.private_steps,
            )
        if self.accounting not in ACCOUNTINGS:
            raise ConfigurationError(
                f"Expected accounting one of {ACCOUNTINGS}, got {self.accounting!r}.",
                kind="unknown-name",
                setting="accounting",
                got=self.accounting,
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.private_steps + self.public_steps

    @property
    def accounting_used(self) -> Accounting:
        """The account behind the guarantee; without public steps both agree, and it is called composed."""
        return self.accounting if self.public_steps else "composed"

    @property
    def words(self) -> str:
        """Words for a sentence about a guarantee: :attr:`murmurfl.privacy.PrivacyPolicy.words`."""
        return epoch_words(self.accounting_used, self.max_participations) if self.adds_noise else super().words

    @property
    def normals_per_parameter(self) -> int:
        """One normal for every step of every epoch."""
        return self.steps * self.max_participations

    @property
    def sensitivity(self) -> float:
        """The sensitivity of one epoch beside the noise of one step: its mu times sigma."""
        return epoch_mu(self.clip_norm, 1.0, self.public_steps, self.accounting) * (1.0 + ITERATION_ROUNDING)

    def plan(self, num_parameters: int) -> NoisePlan:
        """Return the noise of every step, for a model of ``num_parameters`` parameters."""
        plan = super().plan(num_parameters)
        return replace(plan, largest_value=2 * self.steps * (self.clip_norm + LARGEST_NORMAL * plan.noise_std))


class ShuffledPrivatizer(LedgeredPrivatizer):
    """The client of epochs: the noise is inside the epoch, and its end is all that leaves.

    Parameters are those of :class:`~murmurfl.privacy.release.ledgered_privatizer.LedgeredPrivatizer`. ``rows`` is not
    used: the noise of an epoch is never taken back out.

    Notes
    -----
    **Formal guarantees.** Everything :meth:`release_epoch` ever returns is, per session, plan.mu-GDP and over all
    sessions budget_mu-GDP for replacement of one sample of this client, by the account of its
    :class:`ShuffledPolicy`, whatever requests arrive in whatever order, provided the ledger keeps its promise and the
    epoch handed in makes one clipped step with each value of its noise and takes no sample twice. The end is rounded to
    the grid, which is coarse beside the rounding of float64 and fine beside the noise. What a lost reply held is gone:
    it belongs to a model that is gone.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, ShuffledPolicy, SimulatedKeys
    >>> policy = ShuffledPolicy(clip_norm=1.0, batch_size=4, max_participations=5, mu=1.0, accounting="composed")
    >>> privatizer = ShuffledPrivatizer(policy, 2, 4, MemoryLedger(), SimulatedKeys(1, "3"))
    >>> def epoch(number, noises):
    ...     return sum(np.zeros(2) + noise for noise in noises)  # one step of gradient zero for each noise
    >>> release = privatizer.release_epoch("session", 0, epoch)
    >>> release.release, release.values.shape
    (1, (2,))
    """

    policy: ShuffledPolicy

    def __init__(
        self,
        policy: ShuffledPolicy,
        num_parameters: int,
        num_samples: int,
        ledger: Ledger,
        keys: NoiseKeys,
        rows: RowCache | None = None,
        *,
        data: RowBytes | None = None,
    ) -> None:
        if policy.samples_per_owner:
            raise ConfigurationError(
                "Expected samples_per_owner = 0 with epochs, which step on single samples.",
                kind="conflict",
                setting="samples_per_owner",
            )
        super().__init__(policy, num_parameters, num_samples, ledger, keys, data=data)

    def release_epoch(self, session: str, ack: int, epoch: Epoch) -> Release:
        """Make the next epoch of a session and record it before its end is returned.

        ``epoch`` may be called again, with other noise, if another request made this release while it was computing. An
        epoch that is computed and not recorded is thrown away, noise and nonce with it.

        Raises
        ------
        RefusedError
            If the acknowledgement, the cap, the samples or the budget forbid it. Nothing was released or spent.
        LedgerError
            If the ledger cannot be believed.
        """

        def compute(admission: Admission) -> tuple[bytes, NDArray[np.int64]]:
            plan, quality = self.plan, self.policy.noise_quality
            nonce, noise = self._keys.nonce(session, admission.release), None
            if plan.noise_std > 0.0:
                key = row_key(self._keys.secret_key, nonce)
                noise = step_noise(key, self.policy.steps, self.num_parameters, plan.noise_std, quality)
            return nonce, plan.grid.counts(epoch(admission.release, noise), bound=plan.largest_value)

        def record(admission: Admission, made: tuple[bytes, NDArray[np.int64]]) -> Release:
            nonce, counts = made
            admission.streams.release += 1
            admission.streams.nonces[0] = nonce
            return self._record(admission, counts)

        return self._answer(session, ack, compute, record)

    def release(self, session: str, ack: int, contribution: object) -> Release:
        """Raise: an epoch is not made from contributions."""
        raise ConfigurationError(
            "Expected release_epoch, got release: a contribution noised once has less noise than an epoch's steps.",
            kind="unsupported",
        )
