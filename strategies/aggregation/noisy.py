"""Noise of a trusted server: it is sent contributions without noise and adds it to what it publishes.

It must never publish one sum under two noises; :class:`~murmurfl.strategies.rounds.checkpoint.TrustedCheckpoint` makes
sure of that.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from ...privacy import protocol
from ...privacy.accounting.noise_forecast import StatedNoise, stated_noise
from ...privacy.errors import ConfigurationError
from ...privacy.noise import NoiseKeys, SystemKeys
from ...privacy.release.clipping import BLOCK_ROWS
from ...privacy.release.policy import NO_NOISE, PrivacyPolicy, recorded_fields
from ..rounds.checkpoint import CheckpointError, CheckpointMark, TrustedCheckpoint
from ..rounds.replies import Outcome, Reply, RoundRequest
from .plain import Aggregator, Count, Opened, RoundContext, RoundOutcome
from .streams import Stream

StreamT = TypeVar("StreamT", bound=Stream)


def is_well_formed(policy: PrivacyPolicy, reply: Reply, *, most_releases: int) -> bool:
    """Return True if a client under this policy, which adds no noise, can have sent this reply.

    The client states how many releases are in the reply, which decides how large values may be; so that number is
    bounded by ``most_releases``, those it can have made since the last one acknowledged to it, and by the policy's cap.
    Under the ``paper`` rule a reply is one release, whatever was acknowledged.

    Notes
    -----
    A reply that passes moves the sum by at most min(most_releases, cap) times the clip (and the charge of the grid),
    and is a multiple of the grid's spacing. Where batches were charged, a reply of another number of samples does not
    pass, nor one of another sampling rate where batches are Poisson. Nobody else's privacy rests on it.
    """
    numbers = reply.release, reply.ack
    if any(type(number) is not int for number in numbers):  # a bool is an int, and no client sends one
        return False
    releases = 1 if policy.release_rule == "paper" else reply.release - reply.ack
    if not (0 <= reply.ack < reply.release <= policy.max_participations and releases <= most_releases):
        return False
    # A client that sums all of its samples uses each of them every time, and another number of times was charged.
    if not policy.sums_samples and reply.samples not in (0, policy.batch_size):
        return False
    # Whose batches are drawn otherwise is not in the account.
    if reply.metrics.get(protocol.SAMPLING_RATE, 0.0) != policy.sampling_rate:
        return False
    plan = policy.plan(len(reply.values))
    claimed = reply.metrics.get(protocol.SENSITIVITY)
    if not isinstance(claimed, float) or not 0.0 < claimed <= plan.sensitivity * (1 + 1e-9):
        return False
    # No longer than what clients send that clip at S and round their mean to the grid, or a sum over so many samples,
    # block by block. NaN fails this test too.
    with np.errstate(over="ignore"):
        length = np.linalg.norm(reply.values)
    rows, rounded = (reply.samples, -(-reply.samples // BLOCK_ROWS)) if policy.sums_samples else (1, 1)
    if not length <= releases * (rows * policy.clip_norm + rounded * plan.grid.charge(len(reply.values))):
        return False
    counts = reply.values / plan.grid.spacing
    return bool((counts == np.rint(counts)).all())


class Noisy(Aggregator, Generic[StreamT]):
    """A server that is trusted to add the noise.

    Parameters
    ----------
    policy : PrivacyPolicy
        What all clients were configured with: ``trust="trusted-server"``; its clip and batch give Delta, and its mu is
        the guarantee. With mechanism ``none`` the server adds no noise either.
    stream : Stream
        What the server releases: :class:`~.streams.Sum`, :class:`~.streams.Prefix`, or a stream of private momentum.
    num_rounds : int
        T, the most rounds this server will ever publish a model of.
    noise_keys : NoiseKeys, optional
        The server's noise key; default one from the operating system, kept in a file beside the checkpoint. Whoever
        gives keys keeps them, and gives them again when the training is resumed.

    Notes
    -----
    **Formal guarantees.** All that is published is mu-GDP for replacement of one sample of one client, against
    everybody but the server itself, which sees contributions without noise, provided clients are honest, links are
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
        self, policy: PrivacyPolicy, stream: StreamT, *, num_rounds: int, noise_keys: NoiseKeys | None = None
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
        keys = SystemKeys.generate() if noise_keys is None else noise_keys
        if not keys.simulated and policy.noise_quality != "exact":
            raise ConfigurationError(
                "Expected noise_quality 'exact' with real keys: 'fast' noise is for simulation only.",
                kind="conflict",
                setting="noise_quality",
            )
        if not keys.simulated and policy.mechanism == NO_NOISE:
            raise ConfigurationError(
                f"Expected a noise mechanism with real keys, got {NO_NOISE!r}: runs without noise are for simulation "
                "only.",
                kind="conflict",
                setting="mechanism",
                got=NO_NOISE,
            )
        stream.bind(policy, num_rounds, keys)
        self.policy = policy
        self.stream = stream
        self._keeps_key = noise_keys is None
        self._checkpoint: Path | None = None
        self._files: TrustedCheckpoint | None = None
        self._mark: CheckpointMark | None = None
        self._new = False
        self._release_size = 0  # until there is a model
        self._unheard: Counter[str] = Counter()
        """Largest number of requests to each client since its last release that was aggregated."""

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all published models together; infinite without noise."""
        return self.stream.mu

    def guaranteed_mu(self, num_parameters: int) -> float:
        """:attr:`mu`, or infinite where the range of the normals is too small for it (in simulation only)."""
        return self.stream.guaranteed_mu(num_parameters)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all published models together."""
        return self.stream.epsilon(delta)

    # Settings and forecast.

    def settings(self) -> dict[str, Any]:
        policy = self.policy
        own = {"num_rounds": self.stream.num_rounds, "mu": self.mu, "clip_norm": policy.clip_norm}
        return {**own, "batch_size": policy.batch_size}

    def identity(self) -> dict[str, Any]:
        # All of the policy: with noise calibrated to another policy, a resumed training would not keep its claim.
        policy = {f"policy.{name}": value for name, value in recorded_fields(self.policy).items()}
        return {**policy, "noise": self.policy.plan(self.stream.num_parameters).fingerprint}

    def read_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        # One noise for all clients of a round: that of one client by itself, of which each has its part.
        known: dict[str, Any] = {"trust": "untrusted-server"}
        if self.policy.batch_selection == "poisson":  # their noise is that of samples in every sum
            known |= {"batch_selection": "full_batch", "sampling_rate": 0.0}
        policy = replace(self.policy, **known)
        own = stated_noise(policy, policy.plan(self._release_size), 1)
        part = float(own[protocol.NOISE_IN_ALL]) / math.sqrt(self.stream.clients_per_round)
        entries = {"mechanism": policy.mechanism, "mu-guaranteed": self.mu, "trust": self.policy.trust}
        changed = {**entries, protocol.NOISE_IN_ALL: part}
        return super().read_noise({name: {**statement, **changed} for name, statement in statements.items()})

    # Rounds.

    def begin(self, session: str, checkpoint: Path | None) -> None:
        self.stream.session, self._checkpoint = session, checkpoint
        if checkpoint is not None and not self.stream.keys.simulated:
            self._files = TrustedCheckpoint(checkpoint, keeps_key=self._keeps_key)

    def settle(self, asked: int, needed: int) -> None:
        self.stream.clients_per_round = asked

    def shape(self, num_parameters: int, release_size: int) -> None:
        self._release_size = release_size
        self.stream.shape(num_parameters, release_size)

    def annotate(self, request: RoundRequest, save: Callable[[], None]) -> RoundRequest:
        self._unheard.update(list(request.acks))
        if self._new:
            self.stream.calibrate(self._release_size)
            # Saved before anybody is asked: clients count the session against their budgets from the first request on,
            # so it must be found again after a crash.
            self._new = False
            if self._files is not None:
                self._files.begin(self.stream.keys.secret_key)
                save()
        return request

    def validate_reply(self, reply: Reply, *, current: bool) -> bool:
        if not self.stream.accumulates:
            return is_well_formed(self.policy, reply, most_releases=1)
        # Only a reply built on the acknowledgement this server gave is aggregated; any other is late.
        most = self._unheard[reply.client] if current else self.policy.max_participations
        return is_well_formed(self.policy, reply, most_releases=most)

    def add(self, outcomes: Iterable[Outcome], count: Count, context: RoundContext) -> RoundOutcome:
        """Add contributions, and release what the stream makes of their sum, with noise."""
        outcome = super().add(outcomes, count, context)
        if not isinstance(outcome, Opened):
            return outcome
        for name in outcome.releases:
            del self._unheard[name]
        self.stream.check_round(outcome.report.server_round)
        if not (outcome.report.aggregated or self.stream.accumulates):
            return outcome  # nothing came, and nothing is published
        return replace(outcome, total=self.stream.released(outcome.total, outcome.report.server_round))

    # The checkpoint.

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
        unheard = {"unheard": dict(self._unheard)} if self.stream.accumulates else {}
        return {"key_check": self._key_check(), "mark": mark, **unheard, **self.stream.state()}

    def load(self, saved: Mapping[str, Any] | None, clients: Collection[str]) -> None:
        self._new = saved is None
        if saved is None:
            if self._files is not None:
                self._files.check_new()
            return
        self._check_saved(saved)
        self.stream.session = str(saved["session"])
        if self.stream.accumulates:
            self._unheard = Counter({str(name): int(times) for name, times in saved["unheard"].items()})
            # The round that was cut off may have been asked, and answered, after the checkpoint.
            self._unheard.update(clients)
        self.stream.restore(saved)

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that is not the newest, or was begun with another key; take the key that was kept."""
        if self._files is not None:
            self._files.resume(saved["mark"])
            if self._keeps_key:
                self.stream.keys = SystemKeys(self._files.key())
            self._files.check_key(saved["key_check"] == self._key_check())
        elif saved["key_check"] != self._key_check():
            raise CheckpointError(
                f"Expected the noise keys that the training in {self._checkpoint} was begun with, got others; give it "
                "the same, or remove the checkpoint to start anew.",
                kind="mismatch",
            )

    def _key_check(self) -> str:
        """Return a digest that recognises the key without telling it."""
        return hmac.digest(self.stream.keys.secret_key, b"murmurfl server's noise key", hashlib.sha256)[:16].hex()
