"""Auditing a run's own clients: its client, policy, mechanism and model, on data with a canary (``murmurfl audit``).

The canary is one of two samples whose clipped gradients at one query point are as far apart as the model lets them be.
The server is not trusted, so the auditor chooses the query point as well. The client is asked at this point in every
round, and its whole stream is simulated many times on each of several neighbouring data sets
(:mod:`murmurfl.privacy.audit`).

Under secure aggregation there are two claims, each held against those it is made against. Server and all clients but h
see the sums over these h: that is mu's. Server, all helpers and all other clients see the client's own releases: that
is that of the worst case. A server that told the client that nothing ever arrived would see more, if helpers opened
such sums; whether they do is tried out (:func:`opens_without_acks`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.client_records import OwnedSamples
from ...clients.simulation.cohort_clients import Cohort
from ...privacy.accounting.amplification import amplification_of
from ...privacy.accounting.guarantee import Guarantee, rounded_up
from ...privacy.accounting.loss import Loss
from ...privacy.audit import Answers, AuditResult, audit_client, audit_secret_order, likelihood_weights, prefix_sums
from ...privacy.errors import ConfigurationError, RefusedError
from ...privacy.ledger.ledger_records import MemoryLedger
from ...privacy.noise import derived_seed
from ...privacy.release.clipping import clip_per_sample
from ...privacy.release.known_samples import Owners
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.prefix_sums import RowCache
from ...privacy.sums.masking import Sealed
from ...privacy.sums.opening_rule import MemoryOpeningRecord, Opener, OpeningRefusedError
from ...privacy.sums.roster import HelperKey
from ..data.task import Shard
from ..models.model import Model
from ..runs.experiment import Experiment, prepare, reply_is_lost
from ..runs.run_guarantees import Figures, configured_figures, run_guarantee
from ..settings.run_config import RunConfig

MOST_SUMMED = 8
"""Clients of a sum that are simulated; where more are honest, what is claimed of so many is measured."""


@dataclass(frozen=True)
class RunAudit:
    """The findings of an audit of a run configuration.

    ``result`` is about mu: a client's stream or, under secure aggregation, sums of ``summed`` honest clients'
    releases. ``local`` is about the worst case, by a client's own stream. ``unacknowledged`` is about mu where helpers
    open sums that a client's release is in again, which they never should. ``canary_mu`` is the most that these
    canaries can show.
    """

    result: AuditResult
    mechanism: str
    releases: int
    parameters: int
    canary_mu: float
    guarantee: Guarantee
    summed: int = 1
    local: AuditResult | None = None
    unacknowledged: AuditResult | None = None

    @property
    def violated(self) -> bool:
        """Whether a claim is refuted, at the stated confidence."""
        return any(one.violated for one in (self.result, self.local, self.unacknowledged) if one is not None)

    def document(self) -> dict[str, Any]:
        """Everything as plain values; what is infinite is None."""
        own = ("mechanism", "releases", "parameters", "canary_mu", "summed")
        return {
            **_finite({name: getattr(self, name) for name in own}),
            **_document(self.result),
            "violated": self.violated,
            "local": None if self.local is None else _document(self.local),
            "unacknowledged": None if self.unacknowledged is None else _document(self.unacknowledged),
            "guarantee": self.guarantee.document(),
        }


def _document(result: AuditResult) -> dict[str, Any]:
    derived = ("epsilon_of_measured_mu", "largest_measurable_mu", "violated")
    return _finite({**asdict(result), **{name: getattr(result, name) for name in derived}})


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def audit_run(config: RunConfig, runs: int) -> RunAudit:
    """Measure the privacy of a run's client with the most samples; under secure aggregation, of sums with it as well.

    Notes
    -----
    It is a statement about the code, of each measurement by itself, and none about anybody's data.
    """
    experiment = prepare(config)
    experiment.check_rounds()
    policy = experiment.policy()
    _check(experiment)
    measure = _Measurement(experiment, runs)
    plan, summed, local, unacknowledged = measure.plan, 1, None, None
    if config.secure:
        summed = min(policy.sums.min_honest, MOST_SUMMED)
        claimed = plan.loss.under_weaker(math.sqrt(policy.sums.min_honest / summed)).mu
        result = measure.of(summed=summed, claimed_mu=claimed)
        local = measure.of(claimed_mu=plan.loss.worst_case.mu)
        if policy.release_mode == "cumulative" and policy.max_participations > 1 and opens_without_acks(experiment):
            unacknowledged = measure.of(summed=summed, claimed_mu=claimed, ignored=True)
    else:
        result = measure.of()
    squares = [float(np.sum(likelihood_weights(plan.mechanism, shift) * shift)) for shift in measure.shifts.values()]
    figures = configured_figures(experiment)
    return RunAudit(
        result,
        policy.mechanism,
        policy.max_participations,
        experiment.method.release_size(experiment),
        math.sqrt(max(squares) / summed) / plan.noise_std,
        run_guarantee(experiment, figures if config.secure else Figures(Loss.of(result.claimed_mu))),
        summed,
        local,
        unacknowledged,
    )


def _check(experiment: Experiment) -> None:
    """Raise if clients release anything that canaries are not made for, or without noise."""
    policy, quantile = experiment.policy(), experiment.config.quantile
    for wrong, expected, got, instead in (
        *(
            (
                True,
                query.off.replace("=", " = "),
                f"a run whose clients release {query.says} too",
                f"Audit the training alone, with --set {query.off} --set mu={policy.mu!r}.",
            )
            for query in experiment.queries
        ),
        (
            quantile,
            "clipping.quantile = 0",
            f"{quantile:g}: canaries are made for gradients alone",
            f"The noise is that of --set clipping.quantile=0 --set clip-norm={policy.clip_norm:g}.",
        ),
        (
            not policy.adds_noise,
            "clients that add noise",
            "a run whose clients add none",
            "There is nothing to audit.",
        ),
    ):
        if wrong:
            raise ConfigurationError(f"Expected {expected} to audit, got {got}. {instead}", kind="conflict")


class _Measurement:
    """An experiment's canaries, and what shows of them in so many runs."""

    def __init__(self, experiment: Experiment, runs: int) -> None:
        config = experiment.config
        self._seed, self._runs, self._scene = config.seed, runs, CanarySetup(experiment)
        self._policy = policy = self._scene.policy
        self.plan = policy.plan(experiment.method.release_size(experiment))
        self._secret = policy.batch_selection == "shuffled"
        last = policy.min_separation if policy.sample_participations > 1 else policy.max_participations
        first = [1] if self._secret else sorted({1, min(2, last), last})
        self.shifts = {f"first {policy.unit} of release {k}": self._scene.shift(k) for k in first}
        releases = range(1, policy.max_participations + 1)
        self._lost = [reply_is_lost(config.lost_replies, config.seed, k, self._scene.client) for k in releases]

    def of(self, *, summed: int = 1, claimed_mu: float | None = None, ignored: bool = False) -> AuditResult:
        """Return the client's stream, or the sums of it with others'."""

        def streams(canary: str | None, numbers: range) -> Answers:
            release = 0 if canary is None else 1 if self._secret else int(canary.rsplit(maxsplit=1)[-1])
            seed = derived_seed("audit", self._seed, release) >> 65
            return self._scene.streams(release, numbers, seed, summed=summed, ignored=ignored)

        if self._secret:
            (move,) = (shift[-1] for shift in self.shifts.values())
            found = amplification_of(self._policy, self.plan)
            # Of sums, and where there is an estimate only, the claim is the one that holds whoever knows the order.
            proved = claimed_mu is None and found is not None and found.proved
            epsilon = found.epsilon if proved and found is not None else None
            return audit_secret_order(
                self._policy, streams, move, claimed_epsilon=epsilon, claimed_mu=claimed_mu, runs=self._runs
            )
        # What is built on nothing holds all that came before: each message is a prefix sum of the ignored client's.
        lost = [True] * len(self._lost) if ignored else self._lost
        return audit_client(self._policy, streams, self.shifts, runs=self._runs, lost=lost, claimed_mu=claimed_mu)


_VICTIM = "0"


def opens_without_acks(experiment: Experiment) -> bool:
    """Whether all helpers open a second sum in which a client was told that its first, opened release never arrived.

    Every later sum would then have the client's old samples in it again, and mu would not hold. What a helper opens
    depends on headers, seals and signatures alone, never on data or noise, so one trial with real masks is enough.
    """
    config, session = experiment.config, experiment.session
    names = [str(client) for client in range(config.sums.min_cohort)]
    cohort = Cohort(names, lambda name: experiment.client(int(name), MemoryLedger()))
    openers = [
        Opener(name, HelperKey.simulated(config.seed, name), experiment.roster, MemoryOpeningRecord())
        for name in experiment.roster.helper_names
    ]
    first = _sealed(experiment, cohort, 1, dict.fromkeys(names, 0))
    if not _all_open(openers, session, 1, first):
        raise ConfigurationError(
            "Expected helpers that open an honest server's sum, got a refusal of the first one.", kind="refused"
        )
    second = _sealed(experiment, cohort, 2, {name: 0 if name == _VICTIM else 1 for name in names})
    logger = logging.getLogger(Opener.__module__)  # a refusal is what is hoped for: no helper need warn of it
    before, logger.disabled = logger.disabled, True
    try:
        return _all_open(openers, session, 2, second)
    finally:
        logger.disabled = before


def _sealed(experiment: Experiment, cohort: Cohort, server_round: int, acks: Mapping[str, int]) -> list[Sealed]:
    """Return the parts of a round's releases that helpers see."""
    points = [experiment.model.initial_parameters(experiment.config.seed)] * cohort.client(_VICTIM).query_points
    sealed = []
    for name, release in cohort.releases(server_round, experiment.session, acks, points):
        if isinstance(release, RefusedError):
            raise ConfigurationError(
                f"Expected releases of all clients, got a refusal of {name!r}: {release}.", kind="refused"
            )
        masked = experiment.masking(int(name)).mask(release, experiment.session, experiment.policy(int(name)))
        sealed.append(masked.sealed)
    return sealed


def _all_open(openers: list[Opener], session: str, server_round: int, sealed: list[Sealed]) -> bool:
    try:
        for opener in openers:
            opener.open(session, str(server_round), sealed)
    except OpeningRefusedError:
        return False
    return True


def _rounded_down(value: float) -> str:
    """Return a lower bound for people, never above what was measured."""
    if not math.isfinite(value) or value <= 0:
        return "infinite" if value > 0 else "0"
    rounded = Decimal(f"{value:.3e}")
    if rounded > Decimal(value):
        rounded -= Decimal((0, (1,), rounded.adjusted() - 3))
    return f"{float(rounded):.4g}"


_REPLACED = {"sample": "one sample of one client", "owner": "all samples of one owner on one client"}


def audit_lines(audit: RunAudit) -> list[str]:
    """Return the findings of an audit as lines of text."""
    result = audit.result
    lines = [
        f"Audited: {audit.mechanism} noise, {audit.releases} releases of {audit.parameters} values, "
        f"{_REPLACED[audit.guarantee.unit]} replaced; {result.runs} runs with the canary and {result.runs} without.",
    ]
    if audit.local is not None:
        honest = audit.guarantee.min_honest
        fewer = "" if audit.summed == honest else f", in the place of h = {honest}: what is claimed of so many"
        lines.append(f"Seen by the server and all clients but {audit.summed} of each sum{fewer}:")
    lines += _measured_lines(result)
    lines.append(
        f"  this canary can show at most mu {audit.canary_mu:.4g}, so many runs at most "
        f"{result.largest_measurable_mu:.4g}"
    )
    if audit.local is not None:
        lines += ["Seen by the server, all helpers and all other clients:", *_measured_lines(audit.local)]
        lines.append(_UNACKNOWLEDGED[audit.unacknowledged is not None])
    if audit.unacknowledged is not None:
        lines += _measured_lines(audit.unacknowledged)
    verdict = "The claim is refuted." if audit.violated else "The claim stands: nothing measured contradicts it."
    return [*lines, f"The claim: {audit.guarantee.sentence}", verdict]


_UNACKNOWLEDGED = {
    False: "Sums with a client that is told its opened releases never arrived: helpers refuse to open them.",
    True: "Sums with a client that is told its opened releases never arrived: HELPERS OPEN THEM.",
}


def _measured_lines(result: AuditResult) -> list[str]:
    return [
        f"  claimed    mu {rounded_up(result.claimed_mu)}    epsilon {rounded_up(result.claimed_epsilon)}",
        f"  measured   mu >= {_rounded_down(result.measured_mu)}, epsilon >= {_rounded_down(result.measured_epsilon)} "
        f"({100 * result.confidence:g} % confidence, whatever the noise)",
        f"  estimated  mu {result.estimated_mu:.4g} if the noise is Gaussian",
        f"  best found: {result.canary}, {result.statistic}",
    ]


_ROW_CACHE_BYTES = 64 << 20

# Candidate canaries and query points: random feature directions, their lengths, and one value for all parameters.
_DIRECTIONS = 2
_LENGTHS = (1.0, 1e3)
_FAR = 100.0


class CanarySetup:
    """One client of an experiment, canaries among its samples, and the point it is queried at."""

    def __init__(self, experiment: Experiment) -> None:
        # Under secure aggregation the smallest client settles the policy of all.
        chosen = min if experiment.config.secure else max
        client = chosen(range(len(experiment.shards)), key=lambda i: len(experiment.shards[i]))
        shard, self.policy = experiment.shards[client], experiment.policy(client)
        self.client, self._samples = str(client), len(shard)
        self.point, features, labels = canaries(experiment.model, self.policy.clip_norm, experiment.config.seed)
        data = replace(
            experiment.data,
            train_features=np.concatenate([_first(shard, 0), features]),
            train_labels=np.concatenate([_first(shard, 1), labels]),
            client_of=None,
            owner_of=None,
        )
        self._experiment = replace(experiment, data=data)

    def shift(self, release: int) -> NDArray[np.float64]:
        """Return how far a canary moves each release, found by releasing with and without it under the same keys.

        In a secret order every release moves as the first would.
        """
        pair = [self.streams(canary, range(1), self._experiment.config.seed) for canary in (0, release)]
        without, present = (prefix_sums(answers, 1, self.policy.max_participations)[0] for answers in pair)
        moved = present - without
        return np.tile(moved[-1], (len(moved), 1)) if self.policy.batch_selection == "shuffled" else moved

    def streams(self, canary: int, numbers: range, seed: int, *, summed: int = 1, ignored: bool = False) -> Answers:
        """Return the answers of several runs whose second canary is in release ``canary``, or in none if 0.

        A sum has the canary's client and ``summed`` - 1 others without a canary. With ``ignored`` the canary's client
        alone is told that none of its releases arrived.
        """
        order = np.arange(self._samples)
        step = 1 if self.policy.batch_selection == "shuffled" else self.policy.batch_size
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
            acknowledged = np.repeat(acks, summed)
            if ignored:
                acknowledged[:] = k - 1
                acknowledged[::summed] = 0
            named = dict(zip(names, acknowledged.tolist(), strict=True))
            made = [release for _, release in cohort.releases(k, base.session, named, points)]
            return (_sum(made[i : i + summed]) for i in range(0, len(made), summed))

        return answers

    def _shard(self, order: NDArray[np.int64]) -> Any:
        """Return a client with these rows; if rows are owners, an owner's samples are all alike."""
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
    """Return the opened sum of releases, or the first refusal."""
    made = [release for release in releases if isinstance(release, Release)]
    if len(made) < len(releases):
        return next(release for release in releases if isinstance(release, RefusedError))
    return made[0] if len(made) == 1 else replace(made[0], counts=np.sum([one.counts for one in made], axis=0))


def canaries(
    model: Model, clip_norm: float, seed: int
) -> tuple[list[NDArray[Any]], NDArray[np.float32], NDArray[np.int64]]:
    """Return the query point, and the two of a few samples whose clipped gradients are farthest apart there.

    Features have shape (2, features).
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
