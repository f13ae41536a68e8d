"""The scene of an audit: machines whose samples include canaries, and the releases a server sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import Cohort
from ...clients.records.machine_records import OwnedSamples
from ...privacy import MemoryLedger, RefusedError, Release, RowCache, derived_seed
from ...privacy.audit import Answers, prefix_sums
from ...privacy.machine.clipping import clip_per_sample
from ...privacy.machine.record_owners import Owners
from ..data.task import Shard
from ..models.model import Model
from ..runs.experiment import Experiment

_ROW_CACHE_BYTES = 64 << 20

# Candidate canaries and query points: random feature directions, their lengths, and one value for all parameters.
_DIRECTIONS = 2
_LENGTHS = (1.0, 1e3)
_FAR = 100.0


class Scene:
    """One machine of an experiment, canaries among its samples, and the point it is queried at."""

    def __init__(self, experiment: Experiment) -> None:
        # Under secure aggregation the smallest machine settles the policy of all.
        chosen = min if experiment.config.secure else max
        machine = chosen(range(len(experiment.shards)), key=lambda i: len(experiment.shards[i]))
        shard, self.policy = experiment.shards[machine], experiment.policy(machine)
        self.machine, self._samples = str(machine), len(shard)
        self.point, features, labels = canaries(experiment.model, self.policy.clip_norm, experiment.config.seed)
        data = replace(
            experiment.data,
            train_features=np.concatenate([_first(shard, 0), features]),
            train_labels=np.concatenate([_first(shard, 1), labels]),
            machine_of=None,
            owner_of=None,
        )
        self._experiment = replace(experiment, data=data)

    def shift(self, release: int) -> NDArray[np.float64]:
        """How far a canary moves each release, found by releasing with and without it under the same keys.

        In a secret order every release moves as the first would.
        """
        pair = [self.streams(canary, range(1), self._experiment.config.seed) for canary in (0, release)]
        without, present = (prefix_sums(answers, 1, self.policy.max_participations)[0] for answers in pair)
        moved = present - without
        return np.tile(moved[-1], (len(moved), 1)) if self.policy.order == "secret" else moved

    def streams(self, canary: int, numbers: range, seed: int, *, summed: int = 1, ignored: bool = False) -> Answers:
        """Return the answers of several runs whose second canary is in release ``canary``, or in none if 0.

        Parameters
        ----------
        summed : int
            Machines per opened sum: the canary's, and others without a canary.
        ignored : bool
            Whether the canary's machine alone is told that none of its releases arrived.
        """
        order = np.arange(self._samples)
        step = 1 if self.policy.order == "secret" else self.policy.batch_size
        order[::step] = self._samples  # the first sample of each release is a canary; in a secret order every sample is
        other = self._shard(order.copy())
        if canary:
            order[(canary - 1) * step] += 1
        base = self._experiment
        shards = [self._shard(order), *[other] * (summed - 1)] * numbers.stop
        world = replace(base, config=replace(base.config, seed=seed), shards=shards)
        rows = RowCache(_ROW_CACHE_BYTES)
        names = [str(i) for i in range(numbers.start * summed, numbers.stop * summed)]
        cohort = Cohort(names, lambda name: world.client(int(name), MemoryLedger(), rows))
        points = [self.point] * type(world.client(0, MemoryLedger())).query_points

        def answers(k: int, acks: Sequence[int]) -> Iterator[Release | RefusedError]:
            told = np.repeat(acks, summed)
            if ignored:
                told[:] = k - 1
                told[::summed] = 0
            named = dict(zip(names, told.tolist(), strict=True))
            made = [release for _, release in cohort.releases(k, base.session, named, points)]
            return (_sum(made[i : i + summed]) for i in range(0, len(made), summed))

        return answers

    def _shard(self, order: NDArray[np.int64]) -> Any:
        """A machine with these rows; if rows are owners, an owner's samples are all alike."""
        data, most = self._experiment.data, self.policy.samples_per_owner
        if not most:
            return Shard(data, order)
        owners = Owners.in_turn(len(order) * most, most).taken_from(np.repeat(order, most))
        return OwnedSamples((data.train_features, data.train_labels), owners)


def _first(shard: Any, part: int) -> NDArray[Any]:
    """Features (part 0) or labels (1) of a shard; of owners, those of their first sample."""
    values = shard[: len(shard)][part]
    return values[:, 0] if isinstance(shard, OwnedSamples) else values


def _sum(releases: Sequence[Release | RefusedError]) -> Release | RefusedError:
    """The opened sum of releases, or the first refusal."""
    made = [release for release in releases if isinstance(release, Release)]
    if len(made) < len(releases):
        return next(release for release in releases if isinstance(release, RefusedError))
    return made[0] if len(made) == 1 else replace(made[0], counts=np.sum([one.counts for one in made], axis=0))


def canaries(
    model: Model, clip_norm: float, seed: int
) -> tuple[list[NDArray[Any]], NDArray[np.float32], NDArray[np.int64]]:
    """Return the query point and the two samples whose clipped gradients are farthest apart, of a few candidates.

    Returns
    -------
    tuple
        The point, the features of the two samples, shape (2, features), and their labels.
    """
    generator = np.random.Generator(np.random.Philox(key=derived_seed("canary", seed)))
    directions = generator.standard_normal((_DIRECTIONS, model.num_features))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # The last are opposites with equal sums, which a point with equal weights scores alike.
    directions = np.concatenate([directions, -directions, 2 * directions.mean(axis=1, keepdims=True) - directions])
    features = np.concatenate([length * directions for length in _LENGTHS]).astype(np.float32)
    labels = np.repeat(np.arange(2), len(features))
    features = np.tile(features, (2, 1))
    initial = model.initial_parameters(seed)
    points = [initial, [np.full_like(values, _FAR) for values in initial]]
    best, chosen = -1.0, (points[0], 0, 0)
    for point in points:
        with np.errstate(all="ignore"):
            rows = clip_per_sample(np.asarray(model(point, (features, labels)), dtype=np.float64), clip_norm)
        products = rows @ rows.T
        squares = products.diagonal()
        distances = squares[:, None] + squares - 2 * products
        one, other = np.unravel_index(np.argmax(distances), distances.shape)
        if distances[one, other] > best:
            best, chosen = distances[one, other], (point, int(one), int(other))
    point, *pair = chosen
    return point, features[pair], labels[pair]
