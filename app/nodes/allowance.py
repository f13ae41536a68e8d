"""What a machine's budget, cap and samples still allow: runs, releases, and until when they last."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...clients import PrivateClient
from ...clients.adapters.update_policy import UpdatePolicy
from ...privacy import LedgerSummary, SessionSummary, rounded_up
from ...privacy.machine.admission import ROUNDING

DAY_S = 86400.0
_ENDLESS_DAYS = 36500.0


@dataclass(frozen=True)
class Costs:
    """What a run costs a machine.

    Parameters
    ----------
    mu : float
        That a run reserves with its first release, with what it releases beside its training.
    releases : int
        K, the most of one run.
    budget_mu : float
        Of all runs.
    trusted : bool
        Whether the noise is left to a trusted server.
    mu_local, budget_local_mu : float, optional
        The same of what holds whatever happens, under secure aggregation.
    samples : int, optional
        That the machine has; None where runs go through samples that others have used.
    batch_size : int
        Samples of a release.
    once : bool
        Whether the samples are hidden in a secret order, which only the first run can do.
    """

    mu: float
    releases: int
    budget_mu: float
    trusted: bool = False
    mu_local: float | None = None
    budget_local_mu: float = math.inf
    samples: int | None = None
    batch_size: int = 1
    once: bool = False

    @classmethod
    def of_client(cls, client: PrivateClient) -> Costs:
        """Those of a machine with murmurfl's clients."""
        machine, beside = client.machine, client.parts.machines
        policy, trusted = machine.policy, machine.policy.trust == "trusted-server"
        summed = policy.trust == "secure-aggregation"
        own = [policy.mu, *(m.policy.mu for m in beside)] if trusted else [m.plan.mu for m in (machine, *beside)]
        fresh = policy.order == "in-turn" and policy.sample_participations == 1
        return cls(
            mu=math.hypot(*own),
            releases=policy.max_participations,
            budget_mu=float(policy.budget_mu or policy.mu),
            trusted=trusted,
            mu_local=math.hypot(*(m.plan.mu_local for m in (machine, *beside))) if summed else None,
            budget_local_mu=machine.admission.local_budget,
            samples=machine.num_samples if fresh else None,
            batch_size=policy.batch_size,
            once=policy.order == "secret",
        )

    @classmethod
    def of_updates(cls, policy: UpdatePolicy) -> Costs:
        """Those of a machine whose own app's updates are released."""
        private = policy.privacy_policy()
        summed = policy.trust == "secure-aggregation"
        return cls(
            mu=policy.mu,
            releases=policy.max_participations,
            budget_mu=float(policy.budget_mu or policy.mu),
            trusted=policy.trust == "trusted-server",
            mu_local=private.plan(1).mu_local if summed else None,
            budget_local_mu=private.local_budget if summed else math.inf,
        )


@dataclass(frozen=True)
class Allowance:
    """What is left of a machine's budget and samples.

    Parameters
    ----------
    runs : int
        That may still be begun.
    releases : int, optional
        That fresh samples allow, over all runs; None where samples are not used up.
    open_releases : int
        That the newest run, if it is open, may still make.
    days : float, optional
        How long that lasts; None where nobody knows how often runs are made.
    every_days : float, optional
        How often one begins.
    costs : Costs

    Notes
    -----
    Releases nothing and promises nothing: arithmetic on the policy and on what a ledger says without looking at data.
    The ledger decides, release by release.
    """

    runs: int
    releases: int | None
    open_releases: int
    days: float | None
    every_days: float | None
    costs: Costs

    @property
    def state(self) -> str:
        """``failed`` if nothing can be released any more, ``warning`` if no further run can begin."""
        if self.runs:
            return "ok"
        return "warning" if self.open_releases else "failed"

    def sentence(self, now: float) -> str:
        """For the operator.

        Parameters
        ----------
        now : float
            In seconds since 1970.
        """
        costs = self.costs
        each = f"of mu = {rounded_up(costs.mu)} and up to {costs.releases} releases"
        parts = [
            f"the budget allows {_counted(self.runs, 'more run')} {each}" if self.runs else "no further run can begin"
        ]
        if self.releases is not None:
            parts.append(f"unused data allow {_counted(self.releases, 'more release')} of {costs.batch_size}")
        if self.open_releases:
            parts.append(f"the newest run may make {_counted(self.open_releases, 'more release')}")
        said = ", ".join(parts)
        if not self.runs:
            return f"{said[0].upper()}{said[1:]}: {_WAY_OUT}"
        return f"{said[0].upper()}{said[1:]}; {self._until(now)}."

    def _until(self, now: float) -> str:
        if self.days is None or self.every_days is None:
            return "until when depends on how often runs are made, which --run-every DAYS says"
        if self.days > _ENDLESS_DAYS:
            return f"at a run in {self.every_days:.3g} days that lasts for more than a hundred years"
        when = time.strftime("%Y-%m-%d", time.gmtime(now + self.days * DAY_S))
        return f"at a run in {self.every_days:.3g} days that lasts until about {when}"


_WAY_OUT = "a ledger's budget is never raised; new data get a ledger of their own, and these may be retired."


def allowance_of(summary: LedgerSummary, costs: Costs, run_every_days: float | None, now: float) -> Allowance:
    """What is left.

    Parameters
    ----------
    summary : LedgerSummary
    costs : Costs
    run_every_days : float, optional
        How often a run begins; default as often as those in the ledger.
    now : float
        In seconds since 1970.
    """
    releases = None if costs.samples is None else max(costs.samples - summary.samples_used, 0) // costs.batch_size
    by_budget = _runs(costs.budget_mu, summary.reserved_mu, costs.mu)
    if costs.mu_local is not None:
        by_budget = min(by_budget, _runs(costs.budget_local_mu, summary.reserved_local_mu, costs.mu_local))
    if summary.trusted_a_server and not costs.trusted:
        by_budget = 0
    if costs.once:
        by_budget = 0 if summary.samples_used else min(by_budget, 1)
    left = Allowance(
        runs=0 if releases == 0 else by_budget,
        releases=releases,
        open_releases=_open_releases(summary, costs, releases),
        days=None,
        every_days=None,
        costs=costs,
    )
    trainings = _trainings(summary, costs)
    every = run_every_days or _pace(trainings)
    return left if every is None else replace(left, every_days=every, days=_days(trainings, costs, left, every, now))


def _runs(budget: float, reserved: float, each: float) -> int:
    """How many more runs fit, mus adding in squares, by the comparison that the rule of admission makes."""
    if not (math.isfinite(reserved) and math.isfinite(each) and each > 0):
        return 0
    if math.isinf(budget):
        return int(_ENDLESS_DAYS)
    room = (budget * (1 + ROUNDING)) ** 2 - reserved**2
    return max(int(room / each**2), 0)


def _open_releases(summary: LedgerSummary, costs: Costs, releases: int | None) -> int:
    trainings = _trainings(summary, costs)
    if not trainings or (newest := trainings[-1]).closed:
        return 0
    cap = newest.terms.get("max_participations")
    left = cap - newest.releases if isinstance(cap, int) else 0
    return max(left if releases is None else min(left, releases), 0)


def _trainings(summary: LedgerSummary, costs: Costs) -> list[SessionSummary]:
    """The sessions that are a run each: not those of the one release of a mean or of an evaluation beside it."""
    return [s for s in summary.sessions if costs.releases == 1 or s.terms.get("max_participations") != 1]


def _pace(trainings: Sequence[SessionSummary]) -> float | None:
    """Days from one run's beginning to the next; None before the second."""
    begun = _begun(trainings)
    return (begun[-1] - begun[0]) / (len(begun) - 1) / DAY_S if len(begun) > 1 and begun[-1] > begun[0] else None


def _begun(trainings: Sequence[SessionSummary]) -> list[float]:
    return sorted(session.first_release for session in trainings if session.first_release is not None)


def _days(trainings: Sequence[SessionSummary], costs: Costs, allowance: Allowance, every: float, now: float) -> float:
    """Until the first run that is refused, or ends early for want of samples."""
    begun, runs = _begun(trainings), allowance.runs
    # The next run begins when it is due, and at once where it is due already.
    first = max(every - (now - begun[-1]) / DAY_S, 0.0) if begun else 0.0
    if allowance.releases is not None:
        made = [session.releases for session in trainings if session.releases]
        a_run = sum(made) / len(made) if made else costs.releases
        runs = min(runs, int(allowance.releases / max(a_run, 1.0)))
    return first + runs * every


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
