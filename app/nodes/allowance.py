"""Runs and releases that a machine's budget, cap and samples still allow, and until when they last."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from ...clients import PrivateClient
from ...clients.adapters.update_policy import UpdatePolicy
from ...privacy import LedgerSummary, rounded_up
from ...privacy.machine.admission import ROUNDING

DAY_S = 86400.0
_ENDLESS_DAYS = 36500.0


@dataclass(frozen=True)
class Costs:
    """Costs of one run of a machine."""

    mu: float  # reserved by a run's first release, side releases included
    releases: int  # k, the most of one run
    budget_mu: float  # of all runs
    trusted: bool = False  # a trusted server adds the noise
    # Under secure aggregation: the same whatever happens
    mu_local: float | None = None
    budget_local_mu: float = math.inf
    samples: int | None = None  # of the machine; None if a run may use samples again
    batch_size: int = 1  # samples of a release
    once: bool = False  # a secret order hides the samples, which works for the first run only

    @classmethod
    def of_client(cls, client: PrivateClient) -> Costs:
        """Costs of a machine with murmurfl's clients."""
        machine, beside = client.machine, client.beside
        policy, trusted = machine.policy, machine.policy.trust == "trusted-server"
        summed = policy.trust == "secure-aggregation"
        own = [policy.mu, *(m.policy.mu for m in beside)] if trusted else [m.plan.mu for m in (machine, *beside)]
        fresh = policy.order == "in-turn" and policy.sample_participations == 1
        return cls(
            mu=math.hypot(*own),
            releases=policy.max_participations,
            budget_mu=policy.budget,
            trusted=trusted,
            mu_local=math.hypot(*(m.plan.mu_local for m in (machine, *beside))) if summed else None,
            budget_local_mu=machine.admission.local_budget,
            samples=machine.num_samples if fresh else None,
            batch_size=policy.batch_size,
            once=policy.order == "secret",
        )

    @classmethod
    def of_updates(cls, policy: UpdatePolicy) -> Costs:
        """Costs of a node that runs a third-party ClientApp."""
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

    This is arithmetic on the policy and on a ledger's entries, and no promise: the ledger decides, release by release.
    """

    runs: int  # that may still begin
    releases: int | None  # that fresh samples allow, over all runs; None if samples are not used up
    open_releases: int  # of the newest run, if it is open
    days: float | None  # until a run is refused or ends early for lack of samples; None if the pace is unknown
    every_days: float | None  # from one run's beginning to the next
    costs: Costs

    @property
    def state(self) -> str:
        """``failed`` if no release is possible any more, ``warning`` if no further run can begin."""
        if self.runs:
            return "ok"
        return "warning" if self.open_releases else "failed"

    def sentence(self, now: float) -> str:
        """The allowance in one sentence for the operator; ``now`` in seconds since 1970."""
        costs = self.costs
        each = f"of mu = {rounded_up(costs.mu)} and up to {costs.releases} releases"
        runs = f"the budget allows {_counted(self.runs, 'more run')} {each}"
        parts = [runs if self.runs else "no further run can begin"]
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
    """What is left of a machine's budget and samples.

    Parameters
    ----------
    run_every_days : float, optional
        Days between the beginnings of runs; default as in the ledger.
    now : float
        Seconds since 1970.
    """
    releases = None if costs.samples is None else max(costs.samples - summary.samples_used, 0) // costs.batch_size
    by_budget = _runs(costs.budget_mu, summary.reserved_mu, costs.mu)
    if costs.mu_local is not None:
        by_budget = min(by_budget, _runs(costs.budget_local_mu, summary.reserved_local_mu, costs.mu_local))
    if summary.trusted_a_server and not costs.trusted:
        by_budget = 0
    if costs.once:
        by_budget = 0 if summary.samples_used else min(by_budget, 1)
    # Without the one-release sessions of a mean or an evaluation
    trainings = [s for s in summary.sessions if costs.releases == 1 or s.terms.get("max_participations") != 1]
    open_releases = 0
    if trainings and not trainings[-1].closed:
        cap = trainings[-1].terms.get("max_participations")
        open_releases = cap - trainings[-1].releases if isinstance(cap, int) else 0
        open_releases = max(open_releases if releases is None else min(open_releases, releases), 0)
    left = Allowance(0 if releases == 0 else by_budget, releases, open_releases, None, None, costs)
    begun = sorted(session.first_release for session in trainings if session.first_release is not None)
    every = run_every_days or ((begun[-1] - begun[0]) / (len(begun) - 1) / DAY_S if len(begun) > 1 else None)
    if not every:
        return left
    runs = left.runs
    if releases is not None:
        made = [session.releases for session in trainings if session.releases]
        a_run = sum(made) / len(made) if made else costs.releases
        runs = min(runs, int(releases / max(a_run, 1.0)))
    # The next run begins when it is due, at once if it is overdue.
    first = max(every - (now - begun[-1]) / DAY_S, 0.0) if begun else 0.0
    return replace(left, every_days=every, days=first + runs * every)


def _runs(budget: float, reserved: float, each: float) -> int:
    """Number of further runs within the budget; mus add in squares, compared as the admission rule does."""
    if not (math.isfinite(reserved) and math.isfinite(each) and each > 0):
        return 0
    if math.isinf(budget):
        return int(_ENDLESS_DAYS)
    room = (budget * (1 + ROUNDING)) ** 2 - reserved**2
    return max(int(room / each**2), 0)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
