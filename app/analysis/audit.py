"""Auditing a run's own machines: its client, policy, mechanism and model, on data with a canary (``murmurfl audit``).

The canary is one of two samples whose clipped gradients at one query point are as far apart as the model lets them be.
The server is not trusted, so the auditor chooses the query point as well. The machine is asked at this point in every
round, and its whole stream is simulated many times on each of several neighbouring data sets
(:mod:`murmurfl.privacy.audit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import Cohort
from ...privacy import (
    ConfigurationError,
    Guarantee,
    MemoryLedger,
    RefusedError,
    Release,
    RowCache,
    derived_seed,
    rounded_up,
)
from ...privacy.audit import Answers, AuditResult, audit_client, likelihood_weights, prefix_sums
from ...privacy.clipping import clip_per_sample
from ..config import RunConfig
from ..experiment import Experiment, prepare
from ..guarantees import run_guarantee
from ..models.base import Model
from ..network import reply_is_lost
from ..tasks.base import Shard

_ROW_CACHE_BYTES = 64 << 20

# Canaries and query points to choose from: directions of features, their lengths, and values of all parameters.
_DIRECTIONS = 2
_LENGTHS = (1.0, 1e3)
_FAR = 100.0


@dataclass(frozen=True)
class RunAudit:
    """What an audit of a run configuration found.

    Parameters
    ----------
    result : AuditResult
    mechanism : str
    releases, parameters : int
        K and d of the machine that was run.
    canary_mu : float
        The claim that would hold if no sample could move more than these canaries did: the most that they can show.
    guarantee : Guarantee
        The claim, in words.
    """

    result: AuditResult
    mechanism: str
    releases: int
    parameters: int
    canary_mu: float
    guarantee: Guarantee

    def document(self) -> dict[str, Any]:
        """Everything as plain values; what is infinite is None."""
        document = {
            **{name: value for name, value in asdict(self).items() if name not in ("result", "guarantee")},
            **asdict(self.result),
            "epsilon_of_measured_mu": self.result.epsilon_of_measured_mu,
            "largest_measurable_mu": self.result.largest_measurable_mu,
            "violated": self.result.violated,
            "guarantee": self.guarantee.document(),
        }
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in document.items()}


def audit_run(config: RunConfig, runs: int) -> RunAudit:
    """Measure the privacy of a run's machine with the most samples.

    Parameters
    ----------
    config : RunConfig
    runs : int
        Simulated streams on each neighbouring data set.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible or its machines add no noise.

    Notes
    -----
    **Formal guarantees.** Those of :func:`~murmurfl.privacy.audit.audit_client`: a statement about the code, and none
    about anybody's data.
    """
    experiment = prepare(config)
    experiment.check_rounds()
    policy = experiment.policy()
    if not policy.adds_noise:
        raise ConfigurationError("Expected machines that add noise, got a run whose machines do not: nothing to audit.")
    scene = _Scene(experiment)
    last = policy.min_separation if policy.sample_participations > 1 else policy.max_participations
    shifts = {f"first sample of release {k}": scene.shift(k) for k in sorted({1, min(2, last), last})}
    releases = range(1, policy.max_participations + 1)
    lost = [reply_is_lost(config.lost_replies, config.seed, k, scene.machine) for k in releases]

    def streams(canary: str | None, numbers: range) -> Answers:
        release = 0 if canary is None else int(canary.rsplit(maxsplit=1)[-1])
        return scene.streams(release, numbers, derived_seed("audit", config.seed, release) >> 65)

    result = audit_client(policy, streams, shifts, runs=runs, lost=lost)
    plan = policy.plan(experiment.model.num_parameters)
    squares = [float(np.sum(likelihood_weights(plan.mechanism, shift) * shift)) for shift in shifts.values()]
    return RunAudit(
        result,
        policy.mechanism,
        policy.max_participations,
        experiment.model.num_parameters,
        math.sqrt(max(squares)) / plan.noise_std,
        run_guarantee(experiment, result.claimed_mu),
    )


def _rounded_down(value: float) -> str:
    """A lower bound for people, never above what was measured."""
    if not math.isfinite(value) or value <= 0:
        return "infinite" if value > 0 else "0"
    shown = Decimal(f"{value:.3e}")
    if shown > Decimal(value):
        shown -= Decimal((0, (1,), shown.adjusted() - 3))
    return f"{float(shown):.4g}"


def audit_lines(audit: RunAudit) -> list[str]:
    """What an audit found, to read."""
    result = audit.result
    lines = [
        f"Audited: {audit.mechanism} noise, {audit.releases} releases of {audit.parameters} values, one sample of one "
        f"machine replaced; {result.runs} runs with the canary and {result.runs} without.",
        f"  claimed    mu {rounded_up(result.claimed_mu)}    epsilon {rounded_up(result.claimed_epsilon)}",
        f"  measured   mu >= {_rounded_down(result.measured_mu)}, epsilon >= {_rounded_down(result.measured_epsilon)} "
        f"({100 * result.confidence:g} % confidence, whatever the noise)",
        f"  estimated  mu {result.estimated_mu:.4g} if the noise is Gaussian; this canary can show at most "
        f"{audit.canary_mu:.4g}, so many runs at most {result.largest_measurable_mu:.4g}",
        f"  best found: {result.canary}, {result.statistic}",
        f"The claim: {audit.guarantee.sentence}",
    ]
    verdict = "The claim is refuted." if result.violated else "The claim stands: nothing measured contradicts it."
    return [*lines, verdict]


class _Scene:
    """A machine of an experiment, the canaries among its samples, and the point it is asked at."""

    def __init__(self, experiment: Experiment) -> None:
        machine = max(range(len(experiment.shards)), key=lambda i: len(experiment.shards[i]))
        shard, self.policy = experiment.shards[machine], experiment.policy(machine)
        self.machine, self._samples = str(machine), len(shard)
        self.point, features, labels = canaries(experiment.model, self.policy.clip_norm, experiment.config.seed)
        own = shard[: self._samples]
        data = replace(
            experiment.data,
            train_features=np.concatenate([own[0], features]),
            train_labels=np.concatenate([own[1], labels]),
            machine_of=None,
        )
        self._experiment = replace(experiment, data=data)

    def shift(self, release: int) -> NDArray[np.float64]:
        """What the canary of a release moves, without the noise: the same keys with it and without."""
        pair = [self.streams(canary, range(1), self._experiment.config.seed) for canary in (0, release)]
        without, present = (prefix_sums(answers, 1, self.policy.max_participations)[0] for answers in pair)
        return present - without

    def streams(self, canary: int, numbers: range, seed: int) -> Answers:
        """Machines of the seed and these numbers, with the other canary in a release; 0: in none."""
        order = np.arange(self._samples)
        order[:: self.policy.batch_size] = self._samples  # each release's first sample is a canary
        if canary:
            order[(canary - 1) * self.policy.batch_size] += 1
        base = self._experiment
        shards = [Shard(base.data, order)] * numbers.stop
        world = replace(base, config=replace(base.config, seed=seed), shards=shards)
        rows = RowCache(_ROW_CACHE_BYTES)
        cohort = Cohort([str(i) for i in numbers], lambda name: world.client(int(name), MemoryLedger(), rows))
        points = [self.point] * type(world.client(0, MemoryLedger())).query_points

        def answers(k: int, acks: Sequence[int]) -> Iterator[Release | RefusedError]:
            named = dict(zip(cohort.names(), acks, strict=True))
            return (release for _, release in cohort.releases(k, base.session, named, points))

        return answers


def canaries(
    model: Model, clip_norm: float, seed: int
) -> tuple[list[NDArray[Any]], NDArray[np.float32], NDArray[np.int64]]:
    """The query point and the two samples whose gradients, clipped, are farthest apart there, of a few tried.

    Parameters
    ----------
    model : Model
    clip_norm : float
        S.
    seed : int

    Returns
    -------
    tuple
        The point, the features of the two samples, shape (2, features), and their labels.
    """
    generator = np.random.Generator(np.random.Philox(key=derived_seed("canary", seed)))
    directions = generator.standard_normal((_DIRECTIONS, model.num_features))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # The last are the opposites with the same sum, so that a point with all weights alike gives both the same score.
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
