"""What every strategy with a trusted server shares: its policy and noise key, and a training that is resumed safely.

Machines send contributions without noise and the server adds it. The same sum must never be published under two
different noises; what a server keeps on disk to make sure of that stands in :mod:`.trusted_checkpoint`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Required, TypeVar, Unpack

import numpy as np
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from ...privacy import (
    NO_NOISE,
    ConfigurationError,
    Grid,
    NoiseKeys,
    PrivacyPolicy,
    SystemKeys,
    gdp_epsilon,
    protocol,
    row_key,
    standard_normals,
)
from ...privacy.accounting.noise_forecast import StatedNoise, stated_noise
from ...privacy.machine.clipping import BLOCK_ROWS
from ...privacy.noise.grid import power_of_two_at_most
from ...privacy.noise.normals import FINEST_GRID, ideal_mu, range_problem
from ..rounds.checkpoint import CheckpointError
from ..rounds.layout import vector_size
from ..rounds.options import ReleaseOptions
from ..rounds.replies import Reply, RoundRequest
from ..rounds.strategy import ReleaseStrategy
from .trusted_checkpoint import CheckpointMark, TrustedCheckpoint

StateT = TypeVar("StateT")


class TrustedOptions(ReleaseOptions, total=False):
    """Options of :class:`TrustedServer`, where they are described."""

    policy: Required[PrivacyPolicy]
    num_rounds: Required[int]
    noise_keys: NoiseKeys | None


def could_be_honest(policy: PrivacyPolicy, reply: Reply, *, most_releases: int) -> bool:
    """Whether a machine under this policy, which adds no noise, can have sent this.

    Parameters
    ----------
    policy : PrivacyPolicy
    reply : Reply
    most_releases : int
        How many releases it can have made since the last one that was acknowledged to it. The machine states how many
        releases are in the reply. That number decides how large the values may be, so it must itself be bounded: by
        this and by the policy's cap. Under the ``paper`` rule a reply is one release, whatever was acknowledged.

    Notes
    -----
    A reply that passes moves the sum by at most min(most_releases, cap) times the clip (and the charge of the grid),
    and is a multiple of the grid's spacing. One that says that it is of other samples than a batch does not pass where
    batches were charged. Nobody else's privacy rests on it.
    """
    numbers = reply.release, reply.ack
    if any(type(number) is not int for number in numbers):  # a bool is an int, and no machine sends one
        return False
    releases = 1 if policy.release_rule == "paper" else reply.release - reply.ack
    if not (0 <= reply.ack < reply.release <= policy.max_participations and releases <= most_releases):
        return False
    # A machine that sums all of its samples uses each of them every time, and another number of times was charged.
    if not policy.sums_samples and reply.samples not in (0, policy.batch_size):
        return False
    plan = policy.plan(len(reply.values))
    stated = reply.metrics.get(protocol.SENSITIVITY)
    if not isinstance(stated, float) or not 0.0 < stated <= plan.sensitivity * (1 + 1e-9):
        return False
    # No longer than what machines send that clip at S and round their mean to the grid, or a sum over so many samples,
    # block by block. NaN fails this test too.
    with np.errstate(over="ignore"):
        length = np.linalg.norm(reply.values)
    rows, rounded = (reply.samples, -(-reply.samples // BLOCK_ROWS)) if policy.sums_samples else (1, 1)
    if not length <= releases * (rows * policy.clip_norm + rounded * plan.grid.charge(len(reply.values))):
        return False
    counts = reply.values / plan.grid.spacing
    return bool((counts == np.rint(counts)).all())


def _check_for_real_keys(policy: PrivacyPolicy) -> None:
    """Refuse a policy that a trusted server may have in simulation only."""
    if policy.noise_quality != "exact":
        raise ConfigurationError("Expected noise_quality 'exact' with real keys: 'fast' noise is for simulation only.")
    if policy.mechanism == NO_NOISE:
        raise ConfigurationError(
            f"Expected a noise mechanism with real keys, got {NO_NOISE!r}: runs without noise are for simulation only."
        )


class TrustedServer(ReleaseStrategy[StateT]):
    """A server that is trusted to add the noise; a base class.

    Parameters
    ----------
    policy : PrivacyPolicy
        What all machines were configured with: ``trust="trusted-server"``, clip and batch that give Delta; its mu is
        the guarantee. With mechanism ``none`` the server adds no noise either.
    num_rounds : int
        T, the most rounds this server will ever publish a model of.
    noise_keys : NoiseKeys, optional
        The server's noise key. Default one from the operating system, kept beside the checkpoint in a file of its own;
        keys that are given here are the caller's to keep, and to give again when the training is resumed.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`. A session that is given must be a fresh one for every
        new training.

    Notes
    -----
    **Formal guarantees.** With real keys a training is resumed only from its newest checkpoint and with the key it was
    begun with, so that no sum is published under two different noises, however often it is interrupted
    (:mod:`.trusted_checkpoint`: what is written when, and what cannot be noticed). With seeded keys nothing is kept
    beside the checkpoint: they protect nobody.
    """

    sums_suffice: ClassVar[bool] = False

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        **options: Unpack[ReleaseOptions],
    ) -> None:
        super().__init__(**options)
        if policy.trust != "trusted-server":
            raise ConfigurationError(f"Expected a policy with trust 'trusted-server', got {policy.trust!r}.")
        if num_rounds < 1:
            raise ConfigurationError(f"Expected num_rounds >= 1, got {num_rounds}.")
        self.policy = policy
        self.num_rounds = num_rounds
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        if not self._keys.simulated:
            _check_for_real_keys(policy)
        self._keeps_key = noise_keys is None
        self._files: TrustedCheckpoint | None = None
        if self.checkpoint is not None and not self._keys.simulated:
            self._files = TrustedCheckpoint(self.checkpoint, keeps_key=self._keeps_key)
        self._mark: CheckpointMark | None = None
        self._grids: dict[int, Grid] = {}
        self._new = False

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together; infinite without noise."""
        return math.inf if self.policy.mechanism == NO_NOISE else self.policy.mu

    def guaranteed_mu(self, num_parameters: int) -> float:
        """:attr:`mu`, or infinite where the range of the normals cannot serve it, which only a simulation allows."""
        return math.inf if self._range_problem(num_parameters) else self.mu

    def largest_shift(self) -> float:
        """The most standard deviations by which one sample moves one value; :attr:`mu`, for no more is possible."""
        return self.mu

    def _range_problem(self, num_parameters: int) -> str:
        if math.isinf(self.mu) or self.policy.noise_quality != "exact":
            return ""
        return range_problem(self.largest_shift(), num_parameters * self.num_rounds, self.policy.delta, self.mu)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        mu = self.guaranteed_mu(vector_size(self._layout)) if self._layout else self.mu
        return gdp_epsilon(mu, self.policy.delta if delta is None else delta)

    def ideal_mu(self, num_parameters: int, noise_std: float) -> float:
        """The mu to which ideal normals are calibrated, so that with ours the models are mu-GDP.

        Parameters
        ----------
        num_parameters : int
            d.
        noise_std : float
            Standard deviation of the noise on one rounded value, were it calibrated to :attr:`mu`; if values have
            different ones, their root mean square.

        Raises
        ------
        ConfigurationError
            If the noise cannot serve this mu for so many values.

        Notes
        -----
        **Formal guarantees.** Models that are mu_i-GDP under ideal normals, for the mu_i that is returned, are mu-GDP
        under the noise that is added, for the same neighbouring relation.
        Proof: docs/proofs/grid-and-noise.md.
        """
        if self.policy.noise_quality != "exact":
            return self.mu
        values = num_parameters * self.num_rounds
        problem = self._range_problem(num_parameters)
        if problem and not self._keys.simulated:
            raise ConfigurationError(problem)
        ideal = ideal_mu(self.mu, values, self.noise_grid(num_parameters).spacing / noise_std)
        if math.isnan(ideal):
            raise ConfigurationError(
                f"Expected a larger mu for {self.num_rounds} rounds of {num_parameters:,} values, got {self.mu:g}: the "
                "resolution of the normals alone tells as much. Raise mu, or lower num_rounds or the model's size."
            )
        return ideal

    def unrounded_noise_std(self, num_parameters: int) -> float:
        """Largest standard deviation of the noise on one rounded value, before anything is charged for rounding."""
        raise NotImplementedError(f"{type(self).__name__} must define unrounded_noise_std.")

    def calibrate(self, num_parameters: int) -> None:
        """Work out the noise, or refuse to: before any machine is asked for what is not noised.

        Raises
        ------
        ConfigurationError
            As for :meth:`ideal_mu`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define calibrate.")

    def noise_grid(self, num_parameters: int) -> Grid:
        """Where sums and noise are rounded before they are published: the machines' grid, or a coarser one.

        Against much noise the machines' grid may be finer than normals can be rounded to without showing
        (:mod:`murmurfl.privacy.noise.normals`). What rounding costs is charged on this grid.
        """
        if num_parameters not in self._grids:
            spacing = self.policy.plan(num_parameters).grid.spacing
            if self.policy.noise_quality == "exact" and math.isfinite(self.mu):
                finest = power_of_two_at_most(4 * FINEST_GRID * self.unrounded_noise_std(num_parameters))
                spacing = max(spacing, finest)
            self._grids[num_parameters] = Grid(spacing)
        return self._grids[num_parameters]

    def rounding_charge(self, num_parameters: int) -> float:
        """What rounding a sum to :meth:`noise_grid` adds to its sensitivity: nothing on the machines' own grid."""
        grid = self.noise_grid(num_parameters)
        return 0.0 if grid == self.policy.plan(num_parameters).grid else grid.charge(num_parameters)

    def fresh_normals(self, server_round: int, size: int) -> NDArray[np.floating]:
        """Standard normals for a round, under a nonce of its own; with real keys never the same ones again."""
        return self.normals_of(self._keys.nonce(self.session, server_round), size)

    def normals_of(self, nonce: bytes, size: int) -> NDArray[np.floating]:
        """The standard normals that belong to a nonce under the server's key."""
        return standard_normals(row_key(self._keys.secret_key, nonce), size, self.policy.noise_quality)

    def with_nonce(self, nonces: NDArray[np.uint8], server_round: int) -> NDArray[np.uint8]:
        """The nonces of the rounds so far, one a row, and a new one for this round."""
        longer = nonces.copy()
        longer[server_round - 1] = np.frombuffer(self._keys.nonce(self.session, server_round), np.uint8)
        return longer

    def _stated_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        # One noise for all machines of a round: that of one machine by itself, of which each has its part.
        size, policy = vector_size(self.release_layout), replace(self.policy, trust="untrusted-server")
        own = stated_noise(policy, policy.plan(size), 1)
        part = float(own[protocol.NOISE_IN_ALL]) / math.sqrt(self.clients_per_round)
        said = {"mechanism": policy.mechanism, "mu-guaranteed": self.mu, "trust": self.policy.trust}
        changed = {**said, protocol.NOISE_IN_ALL: part}
        return super()._stated_noise({name: {**statement, **changed} for name, statement in statements.items()})

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "num_rounds": self.num_rounds,
            "mu": self.mu,
            "clip_norm": self.policy.clip_norm,
            "batch_size": self.policy.batch_size,
        }

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}."
            )

    # What is kept, in which order.

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        request = super()._plan_round(server_round, reachable)
        if self._new:
            self.calibrate(vector_size(self._layout))
            # Saved before anybody is asked: machines count the session against their budgets from the first request on,
            # so it must be found again after a crash.
            self._new = False
            if self._files is not None:
                self._files.begin(self._keys.secret_key)
                self._save()
        return request

    def _save(self) -> None:
        if self._files is None:
            super()._save()
            return
        self._mark = self._files.next_mark(self.history[-1].server_round if self.history else 0)
        super()._save()
        self._files.saved(self._mark)

    def _kept(self) -> dict[str, Any]:
        mark = None if self._mark is None else asdict(self._mark)
        return {**super()._kept(), "key_check": self._key_check(), "mark": mark}

    def _identity(self) -> dict[str, Any]:
        # All of the policy: with noise calibrated to another policy, a resumed training would not keep its claim.
        policy = {f"policy.{name}": value for name, value in asdict(self.policy).items()}
        return {**super()._identity(), **policy, "noise": self.policy.plan(vector_size(self._layout)).fingerprint}

    def _resume(self, result: Result) -> int:
        self._new = self.checkpoint is None or not self.checkpoint.exists()
        if self._new and self._files is not None:
            self._files.check_new()
        done = super()._resume(result)
        if not self._new:
            self._save()  # before anybody is asked: it shows that the file can be written, and stops any other server
        return done

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        super()._check_saved(saved)
        if self._files is not None:
            self._files.resume(saved["mark"])
            if self._keeps_key:
                self._keys = SystemKeys(self._files.key())
            self._files.check_key(saved["key_check"] == self._key_check())
        elif saved["key_check"] != self._key_check():
            raise CheckpointError(
                f"Expected the noise keys that the training in {self.checkpoint} was begun with, got others; give it "
                "the same, or remove the checkpoint to start anew."
            )

    def _key_check(self) -> str:
        """By what the key is recognised, though it is not written down here."""
        return hmac.digest(self._keys.secret_key, b"murmurfl server's noise key", hashlib.sha256)[:16].hex()
