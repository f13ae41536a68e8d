"""Trust as a part of a strategy: whose noise is in what is published, and which words, checks and files follow.

A strategy has one such part. :class:`UntrustedServer` adds no noise and keeps nothing, for machines that noise what
they send. :class:`~murmurfl.strategies.sums.secure_rounds.SecureRounds` is the same for sums of masked releases. A
:class:`TrustedServer` is sent contributions without noise and adds it: the same sum must never be published under two
different noises, and what is kept on disk to make sure of that stands in :mod:`.trusted_checkpoint`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid as FlowerGrid
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
from ...privacy.mechanisms import IndependentNoise
from ...privacy.noise.grid import power_of_two_at_most
from ...privacy.noise.keyed_noise import standard_normal_rows
from ...privacy.noise.normals import FINEST_GRID, ideal_mu, range_problem
from ..rounds.checkpoint import CheckpointError
from ..rounds.known_machines import MachineDirectory
from ..rounds.layout import Vector
from ..rounds.replies import Reply
from .trusted_checkpoint import CheckpointMark, TrustedCheckpoint


class UntrustedServer:
    """A server that adds no noise, and of which machines expect nothing; it has no state."""

    adds_noise: ClassVar[bool] = False
    least_releases: int = 0
    """The fewest releases that a round can do with."""

    # Its words.

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on, plain values."""
        return {}

    def identity(self) -> dict[str, Any]:
        """The same, for what is said to nobody but the checkpoint."""
        return {}

    def read_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        """The noise of each machine's releases in all, by its own words, which a server cannot check."""
        read = (StatedNoise.read(statement) for statement in statements.values())
        return [one for one in read if one is not None]

    # Its training.

    def join(self, session: str) -> None:
        """Take note of the name of the training."""

    def settle(self, asked: int, needed: int) -> None:
        """Take note of how many machines a round asks, and for how many it waits."""

    def shape(self, num_parameters: int, release_size: int) -> None:
        """Take note of how many values the model has, and a release."""

    def meet(self, machines: MachineDirectory, grid: FlowerGrid, needed: int) -> None:
        """Wait for so many machines, and for whoever else is needed."""
        machines.meet(grid, needed)

    # A round.

    def before_asking(self, save: Callable[[], None]) -> bool:
        """Write what must be known before a machine is asked; whether there was a reason to."""
        return False

    def asked(self, names: Iterable[str]) -> None:
        """Take note of the machines that are asked."""

    def believes(self, reply: Reply, *, current: bool) -> bool:
        """Whether a reply can come from a machine that does what its policy says."""
        return True

    def heard(self, participation: Mapping[str, int | None]) -> None:
        """Take note of the machines whose releases count."""

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""

    def noisy(self, total: Vector, server_round: int) -> Vector:
        """A sum as it may be published."""
        return total

    def noise_on(self, total: Vector, server_round: int) -> Vector | float:
        """What :meth:`noisy` adds to a sum."""
        return 0.0

    def own_noise_std(self, num_parameters: int) -> float:
        """The standard deviation of the noise that the server adds to each value of the only sum of a training."""
        return 0.0

    # Its checkpoint.

    def keep_beside(self, checkpoint: Path | None) -> None:
        """Take note of where the checkpoint is; None for none."""

    def look_for(self) -> None:
        """Refuse to begin where a checkpoint should be."""

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that can be read but must not be resumed from."""

    @contextmanager
    def saving(self, server_round: int) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        yield

    def kept(self) -> dict[str, Any]:
        """What a checkpoint holds of this part, plain values or arrays; :meth:`restore` takes it back."""
        return {}

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        """Take back what :meth:`kept` gave."""


UNTRUSTED = UntrustedServer()


def could_be_honest(policy: PrivacyPolicy, reply: Reply, *, most_releases: int) -> bool:
    """Whether a machine under this policy, which adds no noise, can have sent this.

    Parameters
    ----------
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


class TrustedServer(UntrustedServer):
    """A server that is trusted to add the noise; a base class, whose subclasses say how much.

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
    accumulates : bool
        Whether what is published is a mean over machines of all that they released, and a reply may hold several
        releases.

    Notes
    -----
    **Formal guarantees.** With real keys a training is resumed only from its newest checkpoint and with the key it was
    begun with, so that no sum is published under two different noises, however often it is interrupted
    (:mod:`.trusted_checkpoint`: what is written when, and what cannot be noticed). With seeded keys nothing is kept
    beside the checkpoint: they protect nobody. A session must be a fresh one for every new training.
    """

    adds_noise: ClassVar[bool] = True

    def __init__(
        self, policy: PrivacyPolicy, num_rounds: int, noise_keys: NoiseKeys | None = None, *, accumulates: bool = False
    ) -> None:
        if policy.trust != "trusted-server":
            raise ConfigurationError(f"Expected a policy with trust 'trusted-server', got {policy.trust!r}.")
        if num_rounds < 1:
            raise ConfigurationError(f"Expected num_rounds >= 1, got {num_rounds}.")
        self.policy = policy
        self.num_rounds = num_rounds
        self.accumulates = accumulates
        self.clients_per_round = 0  # until it is settled
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        if not self._keys.simulated:
            _check_for_real_keys(policy)
        self._keeps_key = noise_keys is None
        self._checkpoint: Path | None = None
        self._files: TrustedCheckpoint | None = None
        self._mark: CheckpointMark | None = None
        self._new = False
        self._session = ""
        self._size = self._release_size = 0  # until there is a model
        self._grids: dict[int, Grid] = {}
        self._unheard: Counter[str] = Counter()
        """How often each machine was asked, at most, since its last release that was aggregated."""

    # How much noise.

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together; infinite without noise."""
        return math.inf if self.policy.mechanism == NO_NOISE else self.policy.mu

    def guaranteed_mu(self, num_parameters: int) -> float:
        """:attr:`mu`, or infinite where the range of the normals cannot serve it, which only a simulation allows."""
        return math.inf if self._range_problem(num_parameters) else self.mu

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        mu = self.guaranteed_mu(self._size) if self._size else self.mu
        return gdp_epsilon(mu, self.policy.delta if delta is None else delta)

    def largest_shift(self) -> float:
        """The most standard deviations by which one sample moves one value; :attr:`mu`, for no more is possible."""
        return self.mu

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

    def _range_problem(self, num_parameters: int) -> str:
        if math.isinf(self.mu) or self.policy.noise_quality != "exact":
            return ""
        return range_problem(self.largest_shift(), num_parameters * self.num_rounds, self.policy.delta, self.mu)

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

    # The noise.

    def fresh_normals(self, server_round: int, size: int) -> NDArray[np.floating]:
        """Standard normals for a round, under a nonce of its own; with real keys never the same ones again."""
        return self.normals_of(self._keys.nonce(self._session, server_round), size)

    def normals_of(self, nonce: bytes, size: int) -> NDArray[np.floating]:
        """The standard normals that belong to a nonce under the server's key."""
        return standard_normals(row_key(self._keys.secret_key, nonce), size, self.policy.noise_quality)

    def rows_of(self, nonces: Sequence[bytes], size: int) -> NDArray[np.floating]:
        """The same of several nonces, one row each."""
        keys = [row_key(self._keys.secret_key, nonce) for nonce in nonces]
        return standard_normal_rows(keys, size, self.policy.noise_quality)

    def with_nonce(self, nonces: NDArray[np.uint8], server_round: int) -> NDArray[np.uint8]:
        """The nonces of the rounds so far, one a row, and a new one for this round."""
        longer = nonces.copy()
        longer[server_round - 1] = np.frombuffer(self._keys.nonce(self._session, server_round), np.uint8)
        return longer

    def noisy(self, total: Vector, server_round: int) -> Vector:
        raise NotImplementedError(f"{type(self).__name__} has no noise for a sum by itself.")

    def noise_on(self, total: Vector, server_round: int) -> Vector:
        return self.noisy(total, server_round) - total

    def rounded(self, total: NDArray[np.floating], noise: NDArray[np.floating]) -> Vector:
        """A sum with noise, both on one grid, so that it is a rounded Gaussian release (privacy/noise/grid.py)."""
        grid = self.noise_grid(len(total))
        return grid.values(grid.counts(total) + grid.counts(noise))

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}."
            )

    # Its words.

    def settings(self) -> dict[str, Any]:
        policy = self.policy
        own = {"num_rounds": self.num_rounds, "mu": self.mu, "clip_norm": policy.clip_norm}
        return {**own, "batch_size": policy.batch_size}

    def identity(self) -> dict[str, Any]:
        # All of the policy: with noise calibrated to another policy, a resumed training would not keep its claim.
        policy = {f"policy.{name}": value for name, value in asdict(self.policy).items()}
        return {**policy, "noise": self.policy.plan(self._size).fingerprint}

    def read_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        # One noise for all machines of a round: that of one machine by itself, of which each has its part.
        policy = replace(self.policy, trust="untrusted-server")
        own = stated_noise(policy, policy.plan(self._release_size), 1)
        part = float(own[protocol.NOISE_IN_ALL]) / math.sqrt(self.clients_per_round)
        said = {"mechanism": policy.mechanism, "mu-guaranteed": self.mu, "trust": self.policy.trust}
        changed = {**said, protocol.NOISE_IN_ALL: part}
        return super().read_noise({name: {**statement, **changed} for name, statement in statements.items()})

    # Its training and its rounds.

    def join(self, session: str) -> None:
        self._session = session

    def settle(self, asked: int, needed: int) -> None:
        self.clients_per_round = asked

    def shape(self, num_parameters: int, release_size: int) -> None:
        self._size, self._release_size = num_parameters, release_size

    def before_asking(self, save: Callable[[], None]) -> bool:
        if self._new:
            self.calibrate(self._release_size)
            # Saved before anybody is asked: machines count the session against their budgets from the first request on,
            # so it must be found again after a crash.
            self._new = False
            if self._files is not None:
                self._files.begin(self._keys.secret_key)
                save()
        return True

    def asked(self, names: Iterable[str]) -> None:
        self._unheard.update(list(names))

    def believes(self, reply: Reply, *, current: bool) -> bool:
        if not self.accumulates:
            return could_be_honest(self.policy, reply, most_releases=1)
        # Only a reply built on the acknowledgement this server gave is aggregated; any other is late.
        most = self._unheard[reply.machine] if current else self.policy.max_participations
        return could_be_honest(self.policy, reply, most_releases=most)

    def heard(self, participation: Mapping[str, int | None]) -> None:
        for name, release in participation.items():
            if release is not None:
                del self._unheard[name]

    # What is kept, in which order.

    def keep_beside(self, checkpoint: Path | None) -> None:
        self._checkpoint = checkpoint
        if checkpoint is not None and not self._keys.simulated:
            self._files = TrustedCheckpoint(checkpoint, keeps_key=self._keeps_key)

    def look_for(self) -> None:
        self._new = self._checkpoint is None or not self._checkpoint.exists()
        if self._new and self._files is not None:
            self._files.check_new()

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        if self._files is not None:
            self._files.resume(saved["mark"])
            if self._keeps_key:
                self._keys = SystemKeys(self._files.key())
            self._files.check_key(saved["key_check"] == self._key_check())
        elif saved["key_check"] != self._key_check():
            raise CheckpointError(
                f"Expected the noise keys that the training in {self._checkpoint} was begun with, got others; give it "
                "the same, or remove the checkpoint to start anew."
            )

    @contextmanager
    def saving(self, server_round: int) -> Iterator[None]:
        if self._files is None:
            yield
            return
        self._mark = self._files.next_mark(server_round)
        yield
        self._files.saved(self._mark)

    def kept(self) -> dict[str, Any]:
        mark = None if self._mark is None else asdict(self._mark)
        unheard = {"unheard": dict(self._unheard)} if self.accumulates else {}
        return {"key_check": self._key_check(), "mark": mark, **unheard}

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        if self.accumulates:
            self._unheard = Counter({str(name): int(times) for name, times in saved["unheard"].items()})
            # The round that was cut off may have been asked, and answered, after the checkpoint.
            self._unheard.update(machines)

    def _key_check(self) -> str:
        """By what the key is recognised, though it is not written down here."""
        return hmac.digest(self._keys.secret_key, b"murmurfl server's noise key", hashlib.sha256)[:16].hex()


class FreshNoise(TrustedServer):
    """A trusted server whose noise is fresh in every round, on the sum of what machines sent.

    Parameters
    ----------
    policy, num_rounds, noise_keys, accumulates
        See :class:`TrustedServer`.
    shares : str
        Which part of mu^2 each round gets (:class:`~murmurfl.privacy.mechanisms.IndependentNoise`).

    Notes
    -----
    **Formal guarantees.** One sample changes each of T sums by at most Delta, so noise of Delta sqrt(T) / mu on each,
    or of Delta sqrt(sum s / s_t) / mu with shares s_t, makes all that is published mu-GDP for replacement of one sample
    of one machine, against everybody but the server itself, provided machines are honest and links are private.
    Proof: docs/proofs/sensitivities.md and docs/proofs/returning-samples.md.
    """

    def __init__(
        self,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        *,
        shares: str = "uniform",
        accumulates: bool = False,
    ) -> None:
        super().__init__(policy, num_rounds, noise_keys, accumulates=accumulates)
        self.rounds_noise = IndependentNoise(num_rounds, shares=shares)
        """The noise of all rounds, in units of that of a sum."""

    def noise_std(self, num_parameters: int, server_round: int = 1) -> float:
        """Standard deviation of the noise on what a round publishes: a sum, or a mean over machines."""
        if math.isinf(self.mu):
            return 0.0
        change = self.policy.plan(num_parameters).sensitivity + self.rounding_charge(num_parameters)
        often = self._often
        ideal = self.ideal_mu(num_parameters, change * often / self.mu * self.rounds_noise.rounded_std()[0])
        return change / self._over * often / ideal * self.rounds_noise.increment_bound(server_round)

    def own_noise_std(self, num_parameters: int) -> float:
        return self.noise_std(num_parameters)

    def unrounded_noise_std(self, num_parameters: int) -> float:
        sensitivity = self.policy.plan(num_parameters).sensitivity
        return sensitivity * self._often / self.mu * self.rounds_noise.rounded_std()[1]

    def calibrate(self, num_parameters: int) -> None:
        self.noise_std(num_parameters)

    def largest_shift(self) -> float:
        return self.mu * self.rounds_noise.largest_entry() / self._often

    def noisy(self, total: Vector, server_round: int) -> Vector:
        self.check_round(server_round)
        std = self.noise_std(len(total), server_round) * self._over
        return self.rounded(total, self.fresh_normals(server_round, len(total)) * std)

    @property
    def _over(self) -> np.float64 | int:
        """By what a sum is divided where it is published."""
        return np.float64(self.clients_per_round) if self.accumulates else 1

    @property
    def _often(self) -> float:
        """What a sample that is in every round counts for in all of them: sqrt(T)."""
        return self.rounds_noise.sensitivity(self.num_rounds, 1)
