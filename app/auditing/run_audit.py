"""Auditing a run's own machines: its client, policy, mechanism and model, on data with a canary (``murmurfl audit``).

The canary is one of two samples whose clipped gradients at one query point are as far apart as the model lets them be.
The server is not trusted, so the auditor chooses the query point as well. The machine is asked at this point in every
round, and its whole stream is simulated many times on each of several neighbouring data sets
(:mod:`murmurfl.privacy.audit`).

Under secure aggregation there are two claims, each held against those it is made against. Server and all machines but h
see the sums over these h: that is mu's. Server, all helpers and all other machines see the machine's own releases: that
is mu_local's. A server that told the machine that nothing ever arrived would see more, if helpers opened such sums;
whether they do is tried out (:mod:`.opening_trial`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from ...privacy import ConfigurationError, Guarantee, derived_seed, rounded_up
from ...privacy.accounting.amplification import amplification_of
from ...privacy.audit import Answers, AuditResult, audit_client, audit_secret_order, likelihood_weights
from ..runs.experiment import Experiment, prepare
from ..runs.lost_replies import reply_is_lost
from ..runs.run_guarantees import Figures, configured_figures, run_guarantee
from ..settings.run_config import RunConfig
from .opening_trial import opens_without_acks
from .scene import Scene
from .scene import canaries as canaries

MOST_SUMMED = 8
"""Machines of a sum that are simulated; where more are honest, what is claimed of so many is measured."""


@dataclass(frozen=True)
class RunAudit:
    """What an audit of a run configuration found.

    Parameters
    ----------
    result : AuditResult
        Of mu: of a machine's stream or, under secure aggregation, of the sums of the honest machines' releases.
    mechanism : str
    releases, parameters : int
        K and d of the machine that was run.
    canary_mu : float
        The claim that would hold if no sample could move more than these canaries did: the most that they can show.
    guarantee : Guarantee
        The claim, in words.
    summed : int
        Machines in such a sum; 1 for a stream by itself.
    local : AuditResult or None
        Under secure aggregation, of mu_local: of a machine's own stream.
    unacknowledged : AuditResult or None
        Of mu, where helpers open sums that a machine's release is in again and again, which they never should.
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
    def results(self) -> list[AuditResult]:
        """Everything that was measured."""
        return [one for one in (self.result, self.local, self.unacknowledged) if one is not None]

    @property
    def violated(self) -> bool:
        """Whether a claim is refuted, at the stated confidence."""
        return any(one.violated for one in self.results)

    def document(self) -> dict[str, Any]:
        """Everything as plain values; what is infinite is None."""
        document = {
            "mechanism": self.mechanism,
            "releases": self.releases,
            "parameters": self.parameters,
            "canary_mu": self.canary_mu,
            "summed": self.summed,
            **_document(self.result),
            "violated": self.violated,
            "local": None if self.local is None else _document(self.local),
            "unacknowledged": None if self.unacknowledged is None else _document(self.unacknowledged),
            "guarantee": self.guarantee.document(),
        }
        return {name: _finite(value) for name, value in document.items()}


def _document(result: AuditResult) -> dict[str, Any]:
    figures = {
        **asdict(result),
        "epsilon_of_measured_mu": result.epsilon_of_measured_mu,
        "largest_measurable_mu": result.largest_measurable_mu,
        "violated": result.violated,
    }
    return {name: _finite(value) for name, value in figures.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def audit_run(config: RunConfig, runs: int) -> RunAudit:
    """Measure the privacy of a run's machine with the most samples; under secure aggregation, of sums with it as well.

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
    It is a statement about the code, of each measurement by itself, and none about anybody's data.
    """
    experiment = prepare(config)
    experiment.check_rounds()
    policy = experiment.policy()
    if experiment.is_centred:
        raise ConfigurationError(
            "Expected centring = 'none' to audit, got a run whose machines release the mean of their features first: "
            f"audit what follows it, with --set centring=none --set mu={policy.mu!r}."
        )
    if experiment.is_evaluated:
        raise ConfigurationError(
            "Expected private-evaluation = 0 to audit, got a run whose machines release an evaluation too: audit what "
            f"comes before it, with --set private-evaluation=0 --set mu={policy.mu!r}."
        )
    if config.quantile:
        raise ConfigurationError(
            f"Expected quantile 0 to audit, got {config.quantile:g}: canaries are made for gradients alone. The noise "
            f"is that of --set quantile=0 --set clip-norm={policy.clip_norm:g}."
        )
    if not policy.adds_noise:
        raise ConfigurationError("Expected machines that add noise, got a run whose machines do not: nothing to audit.")
    measure = _Measurement(experiment, runs)
    plan, summed, local, unacknowledged = measure.plan, 1, None, None
    if config.secure:
        summed = min(policy.min_honest, MOST_SUMMED)
        claimed = min(plan.mu * math.sqrt(policy.min_honest / summed), plan.mu_local)
        result = measure.of(summed=summed, claimed_mu=claimed)
        local = measure.of(claimed_mu=plan.mu_local)
        if policy.builds_on == "last-opened" and policy.max_participations > 1 and opens_without_acks(experiment):
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
        run_guarantee(experiment, figures if config.secure else Figures(result.claimed_mu)),
        summed,
        local,
        unacknowledged,
    )


class _Measurement:
    """An experiment's canaries, and what shows of them in this or that many runs."""

    def __init__(self, experiment: Experiment, runs: int) -> None:
        config = experiment.config
        self._seed, self._runs, self._scene = config.seed, runs, Scene(experiment)
        self._policy = policy = self._scene.policy
        self.plan = policy.plan(experiment.method.release_size(experiment))
        self._secret = policy.order == "secret"
        last = policy.min_separation if policy.sample_participations > 1 else policy.max_participations
        first = [1] if self._secret else sorted({1, min(2, last), last})
        self.shifts = {f"first {policy.unit} of release {k}": self._scene.shift(k) for k in first}
        releases = range(1, policy.max_participations + 1)
        self._lost = [reply_is_lost(config.lost_replies, config.seed, k, self._scene.machine) for k in releases]

    def of(self, *, summed: int = 1, claimed_mu: float | None = None, ignored: bool = False) -> AuditResult:
        """The machine's stream, or the sums of it with others'.

        Parameters
        ----------
        summed : int
            Machines in a sum.
        claimed_mu : float, optional
            Default what the policy claims of a stream.
        ignored : bool
            Whether the machine is told that nothing of it ever arrived, and the others what is true.
        """

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
        # What is built on nothing holds all that came before: each message is a prefix sum of the ignored machine's.
        lost = [True] * len(self._lost) if ignored else self._lost
        return audit_client(self._policy, streams, self.shifts, runs=self._runs, lost=lost, claimed_mu=claimed_mu)


def _rounded_down(value: float) -> str:
    """A lower bound for people, never above what was measured."""
    if not math.isfinite(value) or value <= 0:
        return "infinite" if value > 0 else "0"
    shown = Decimal(f"{value:.3e}")
    if shown > Decimal(value):
        shown -= Decimal((0, (1,), shown.adjusted() - 3))
    return f"{float(shown):.4g}"


_REPLACED: dict[str, str] = {
    "sample": "one sample of one machine",
    "owner": "all samples of one owner on one machine",
}


def audit_lines(audit: RunAudit) -> list[str]:
    """What an audit found, to read."""
    result = audit.result
    lines = [
        f"Audited: {audit.mechanism} noise, {audit.releases} releases of {audit.parameters} values, "
        f"{_REPLACED[audit.guarantee.unit]} replaced; {result.runs} runs with the canary and {result.runs} without.",
    ]
    if audit.local is not None:
        honest = audit.guarantee.min_honest
        fewer = "" if audit.summed == honest else f", in the place of h = {honest}: what is claimed of so many"
        lines.append(f"Seen by the server and all machines but {audit.summed} of each sum{fewer}:")
    lines += _measured_lines(result)
    lines.append(
        f"  this canary can show at most mu {audit.canary_mu:.4g}, so many runs at most "
        f"{result.largest_measurable_mu:.4g}"
    )
    if audit.local is not None:
        lines += ["Seen by the server, all helpers and all other machines:", *_measured_lines(audit.local)]
        lines.append(_UNACKNOWLEDGED[audit.unacknowledged is not None])
    if audit.unacknowledged is not None:
        lines += _measured_lines(audit.unacknowledged)
    verdict = "The claim is refuted." if audit.violated else "The claim stands: nothing measured contradicts it."
    return [*lines, f"The claim: {audit.guarantee.sentence}", verdict]


_UNACKNOWLEDGED = {
    False: "Sums with a machine that is told its opened releases never arrived: helpers refuse to open them.",
    True: "Sums with a machine that is told its opened releases never arrived: HELPERS OPEN THEM.",
}


def _measured_lines(result: AuditResult) -> list[str]:
    return [
        f"  claimed    mu {rounded_up(result.claimed_mu)}    epsilon {rounded_up(result.claimed_epsilon)}",
        f"  measured   mu >= {_rounded_down(result.measured_mu)}, epsilon >= {_rounded_down(result.measured_epsilon)} "
        f"({100 * result.confidence:g} % confidence, whatever the noise)",
        f"  estimated  mu {result.estimated_mu:.4g} if the noise is Gaussian",
        f"  best found: {result.canary}, {result.statistic}",
    ]
