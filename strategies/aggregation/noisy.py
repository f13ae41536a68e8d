"""Noise of a trusted server: it is sent contributions without noise and adds it to what it publishes.

It must never publish one sum under two noises; :class:`~murmurfl.strategies.rounds.checkpoint.TrustedCheckpoint` makes
sure of that.
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
from ...privacy.noise import FINEST_GRID, ideal_mu, power_of_two_at_most, range_problem, standard_normal_rows
from ..rounds.checkpoint import CheckpointError, CheckpointMark, TrustedCheckpoint
from ..rounds.replies import Reply, RoundReport, Vector
from ..sums.summation import Summation
from .plain import Aggregator, Opened, RoundContext, RoundOutcome


def is_well_formed(policy: PrivacyPolicy, reply: Reply, *, most_releases: int) -> bool:
    """Whether a machine under this policy, which adds no noise, can have sent this reply.

    The machine states how many releases are in the reply, which decides how large values may be; so that number is
    bounded by ``most_releases``, those it can have made since the last one acknowledged to it, and by the policy's cap.
    Under the ``paper`` rule a reply is one release, whatever was acknowledged.

    Notes
    -----
    A reply that passes moves the sum by at most min(most_releases, cap) times the clip (and the charge of the grid),
    and is a multiple of the grid's spacing. Where batches were charged, a reply of another number of samples does not
    pass. Nobody else's privacy rests on it.
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


class Noisy(Aggregator):
    """A server that is trusted to add the noise; a base class, whose subclasses say how much.

    Parameters
    ----------
    policy : PrivacyPolicy
        What all machines were configured with: ``trust="trusted-server"``; its clip and batch give Delta, and its mu is
        the guarantee. With mechanism ``none`` the server adds no noise either.
    num_rounds : int
        T, the most rounds this server will ever publish a model of.
    noise_keys : NoiseKeys, optional
        The server's noise key; default one from the operating system, kept in a file beside the checkpoint. Whoever
        gives keys keeps them, and gives them again when the training is resumed.
    accumulates : bool
        Whether the mean of all releases so far is published, and a reply may hold several releases.

    Notes
    -----
    **Formal guarantees.** All that is published is mu-GDP for replacement of one sample of one machine, against
    everybody but the server itself, which sees contributions without noise, provided machines are honest, links are
    private, and nothing else computed from un-noised sums is published; the checkpoint may hold them and must be kept
    like the data. Replies that state a larger sensitivity or another grid than the policy's are dropped. With mechanism
    ``none``, which is refused unless the keys are simulated, nothing is guaranteed.
    Proof: docs/proofs/sensitivities.md.

    A run that is interrupted and resumed has the same guarantee: with real keys a training is resumed only from its
    newest checkpoint and with the key it was begun with, so that no sum is published under two different noises,
    however often it is interrupted (:mod:`.checkpoint`: what is written when, and what cannot be noticed). With
    seeded keys nothing is kept beside the checkpoint: they protect nobody. A session must be a fresh one for every
    new training.
    """

    adds_noise: ClassVar[bool] = True

    def __init__(
        self,
        policy: PrivacyPolicy,
        *,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        accumulates: bool = False,
    ) -> None:
        if policy.trust != "trusted-server":
            raise ConfigurationError(
                f"Expected a policy with trust 'trusted-server', got {policy.trust!r}.",
                kind="conflict",
                setting="trust",
                got=policy.trust,
            )
        if num_rounds < 1:
            raise ConfigurationError(
                f"Expected num_rounds >= 1, got {num_rounds}.",
                kind="out-of-range",
                setting="num_rounds",
                got=num_rounds,
            )
        self.policy = policy
        self.num_rounds = num_rounds
        self.accumulates = accumulates
        self.clients_per_round = 0  # until it is settled
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        if not self._keys.simulated and policy.noise_quality != "exact":
            raise ConfigurationError(
                "Expected noise_quality 'exact' with real keys: 'fast' noise is for simulation only.",
                kind="conflict",
                setting="noise_quality",
            )
        if not self._keys.simulated and policy.mechanism == NO_NOISE:
            raise ConfigurationError(
                f"Expected a noise mechanism with real keys, got {NO_NOISE!r}: runs without noise are for simulation "
                "only.",
                kind="conflict",
                setting="mechanism",
                got=NO_NOISE,
            )
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
        """:attr:`mu`, or infinite where the range of the normals is too small for it (in simulation only)."""
        return math.inf if self._range_problem(num_parameters) else self.mu

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        mu = self.guaranteed_mu(self._size) if self._size else self.mu
        return gdp_epsilon(mu, self.policy.delta if delta is None else delta)

    def largest_shift(self) -> float:
        """The most standard deviations by which one sample moves one value: at most :attr:`mu`."""
        return self.mu

    def unrounded_noise_std(self, num_parameters: int) -> float:
        """Largest standard deviation of the noise on one rounded value, before anything is charged for rounding."""
        raise NotImplementedError(f"{type(self).__name__} must define unrounded_noise_std.")

    def calibrate(self, num_parameters: int) -> None:
        """Compute the noise, or refuse to, before any machine is asked for what has no noise."""
        raise NotImplementedError(f"{type(self).__name__} must define calibrate.")

    def _range_problem(self, num_parameters: int) -> str:
        if math.isinf(self.mu) or self.policy.noise_quality != "exact":
            return ""
        return range_problem(self.largest_shift(), num_parameters * self.num_rounds, self.policy.delta, self.mu)

    def ideal_mu(self, num_parameters: int, noise_std: float) -> float:
        """The mu to which ideal normals are calibrated, so that with ours the models are mu-GDP.

        ``noise_std`` is the standard deviation of the noise on one rounded value, were it calibrated to :attr:`mu`; the
        root mean square where values have different ones.

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
                "resolution of the normals alone tells as much. Raise mu, or lower num_rounds or the model's size.",
                kind="out-of-range",
                setting="mu",
                got=self.mu,
            )
        return ideal

    def noise_grid(self, num_parameters: int) -> Grid:
        """The grid to which sums and noise are rounded, and on which rounding is charged.

        It is the machines' own, or a coarser one where that is finer than large noise can be rounded to without showing
        (:mod:`murmurfl.privacy.noise`).
        """
        if num_parameters not in self._grids:
            spacing = self.policy.plan(num_parameters).grid.spacing
            if self.policy.noise_quality == "exact" and math.isfinite(self.mu):
                finest = power_of_two_at_most(4 * FINEST_GRID * self.unrounded_noise_std(num_parameters))
                spacing = max(spacing, finest)
            self._grids[num_parameters] = Grid(spacing)
        return self._grids[num_parameters]

    def rounding_charge(self, num_parameters: int) -> float:
        """What rounding a sum to :meth:`noise_grid` adds to its sensitivity; 0 on the machines' own grid."""
        grid = self.noise_grid(num_parameters)
        return 0.0 if grid == self.policy.plan(num_parameters).grid else grid.charge(num_parameters)

    # The noise.

    def fresh_normals(self, server_round: int, size: int) -> NDArray[np.floating]:
        """Standard normals of a round's own nonce; with real keys never the same ones again."""
        return self.normals_of(self._keys.nonce(self._session, server_round), size)

    def normals_of(self, nonce: bytes, size: int) -> NDArray[np.floating]:
        """Standard normals of a nonce under the server's key."""
        return standard_normals(row_key(self._keys.secret_key, nonce), size, self.policy.noise_quality)

    def rows_of(self, nonces: Sequence[bytes], size: int) -> NDArray[np.floating]:
        """Standard normals of several nonces, one row each."""
        keys = [row_key(self._keys.secret_key, nonce) for nonce in nonces]
        return standard_normal_rows(keys, size, self.policy.noise_quality)

    def with_nonce(self, nonces: NDArray[np.uint8], server_round: int) -> NDArray[np.uint8]:
        """The nonces of the rounds so far, one a row, with a new one for this round."""
        longer = nonces.copy()
        longer[server_round - 1] = np.frombuffer(self._keys.nonce(self._session, server_round), np.uint8)
        return longer

    def rounded(self, total: NDArray[np.floating], noise: NDArray[np.floating]) -> Vector:
        """A sum with noise, both on one grid, so that it is a rounded Gaussian release (privacy/noise.py)."""
        grid = self.noise_grid(len(total))
        return grid.values(grid.counts(total) + grid.counts(noise))

    def check_round(self, server_round: int) -> None:
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}.",
                kind="exhausted",
                setting="num_rounds",
                got=server_round,
            )

    # Settings and forecast.

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

    # Rounds.

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

    def validate_reply(self, reply: Reply, *, current: bool) -> bool:
        if not self.accumulates:
            return is_well_formed(self.policy, reply, most_releases=1)
        # Only a reply built on the acknowledgement this server gave is aggregated; any other is late.
        most = self._unheard[reply.machine] if current else self.policy.max_participations
        return is_well_formed(self.policy, reply, most_releases=most)

    def record_participation(self, participation: Mapping[str, int | None]) -> None:
        for name, release in participation.items():
            if release is not None:
                del self._unheard[name]

    # The checkpoint.

    def attach_checkpoint(self, checkpoint: Path | None) -> None:
        self._checkpoint = checkpoint
        if checkpoint is not None and not self._keys.simulated:
            self._files = TrustedCheckpoint(checkpoint, keeps_key=self._keeps_key)

    def look_for_checkpoint(self) -> None:
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
                "the same, or remove the checkpoint to start anew.",
                kind="mismatch",
            )

    @contextmanager
    def saving(self, server_round: int) -> Iterator[None]:
        if self._files is None:
            yield
            return
        self._mark = self._files.next_mark(server_round)
        yield
        self._files.saved(self._mark)

    def state(self) -> dict[str, Any]:
        mark = None if self._mark is None else asdict(self._mark)
        unheard = {"unheard": dict(self._unheard)} if self.accumulates else {}
        return {"key_check": self._key_check(), "mark": mark, **unheard}

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        if self.accumulates:
            self._unheard = Counter({str(name): int(times) for name, times in saved["unheard"].items()})
            # The round that was cut off may have been asked, and answered, after the checkpoint.
            self._unheard.update(machines)

    def _key_check(self) -> str:
        """A digest that recognises the key without telling it."""
        return hmac.digest(self._keys.secret_key, b"murmurfl server's noise key", hashlib.sha256)[:16].hex()


class FreshNoise(Noisy):
    """A trusted server that adds fresh noise to the sum of every round, with shares of mu^2 by ``shares``.

    With ``accumulates`` the sums are those of all rounds so far, which are kept here: the update rule only sees what is
    published, as increments whose sum is the last noisy prefix sum.

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
        *,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        shares: str = "uniform",
        accumulates: bool = False,
    ) -> None:
        super().__init__(policy, num_rounds=num_rounds, noise_keys=noise_keys, accumulates=accumulates)
        self.rounds_noise = IndependentNoise(self.num_rounds, shares=shares)
        self._prefix = self._published = np.zeros(0)  # until there is a model

    def noise_std(self, num_parameters: int, server_round: int = 1) -> float:
        """Standard deviation of the noise on the sum that a round publishes, or on the mean over machines."""
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

    def aggregate(
        self, summation: Summation, releases: Mapping[str, int], report: RoundReport, context: RoundContext
    ) -> RoundOutcome:
        outcome = super().aggregate(summation, releases, report, context)
        if not isinstance(outcome, Opened) or not (report.aggregated or self.accumulates):
            return outcome  # nothing came, and nothing is published
        return replace(outcome, total=self.released(outcome.total, report.server_round))

    def released(self, total: Vector, server_round: int) -> Vector:
        """Return what a round adds to the sum of all that is published, from the un-noised sum of its releases.

        Without ``accumulates`` that is the sum with noise. With it, prefix sums are published under fresh noise each,
        and the sum of all that this returned is the last of them, exactly: all are multiples of one grid.
        """
        if not self.accumulates:
            return self.noisy(total, server_round)
        self._prefix = self._prefix + total
        before, self._published = self._published, self.noisy(self._prefix, server_round)
        return self._published - before

    def shape(self, num_parameters: int, release_size: int) -> None:
        super().shape(num_parameters, release_size)
        self._prefix = self._published = np.zeros(release_size)

    def state(self) -> dict[str, Any]:
        sums = {"prefix": self._prefix, "published": self._published} if self.accumulates else {}
        return {**super().state(), **sums}

    def restore(self, saved: Mapping[str, Any], machines: Iterable[str]) -> None:
        super().restore(saved, machines)
        if self.accumulates:
            self._prefix, self._published = saved["prefix"], saved["published"]

    def noisy(self, total: Vector, server_round: int) -> Vector:
        """Return a sum with the noise of a round, as it may be published."""
        self.check_round(server_round)
        std = self.noise_std(len(total), server_round) * self._over
        return self.rounded(total, self.fresh_normals(server_round, len(total)) * std)

    @property
    def _over(self) -> np.float64 | int:
        """What a sum is divided by where it is published."""
        return np.float64(self.clients_per_round) if self.accumulates else 1

    @property
    def _often(self) -> float:
        """Sensitivity of all rounds to a sample that is in each of them: sqrt(T)."""
        return self.rounds_noise.sensitivity(self.num_rounds, 1)
