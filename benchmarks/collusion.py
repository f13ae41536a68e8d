"""Table of docs/comparison.md: which epsilon is left against whom, for each kind of trust, by the clients' own plans.

``python -m benchmarks.collusion`` prints it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from murmurfl.privacy import NoisePlan, PrivacyPolicy, SumAssumption, gdp_epsilon, gdp_mu, rounded_up
from murmurfl.privacy.accounting.noise_plan import Summing

EPSILON, DELTA = 1.0, 1e-5
CLIENTS, COHORT, RELEASES, BATCH, PARAMETERS = 100, 80, 100, 6, 7850
HONEST = (50, 10)
"""Honest clients of every sum, in the two columns for sums."""

TERMS = (
    f"Epsilon at delta = {DELTA:g}, for replacement of one sample of one client, against the server and everybody "
    "else; `cancelling` noise on each client or, where the server is trusted, of the server; over all of "
    f"{RELEASES} releases. The row says which of them work together. {CLIENTS} clients have {BATCH} fresh samples in "
    f"each release, and noise for an epsilon of one under the trust of the column. Sums have {COHORT} releases or more."
)


def plan_of(honest: int = 1) -> NoisePlan:
    """Return a client's plan: with an untrusted server, or with sums that have so many honest clients."""
    policy = PrivacyPolicy(
        clip_norm=1.0,
        batch_size=BATCH,
        max_participations=RELEASES,
        mu=gdp_mu(EPSILON, DELTA),
        mechanism="cancelling",
        trust="secure-aggregation" if honest > 1 else "untrusted-server",
        sums=SumAssumption(honest, COHORT) if honest > 1 else SumAssumption(),
    )
    return policy.plan(PARAMETERS)


def epsilon_against(plan: NoisePlan, honest: int) -> float:
    """Return the epsilon of a plan's noise if every sum has only so many honest clients, the client itself among them.

    Notes
    -----
    **Formal guarantees.** Mu is the sensitivity of sums with the noise of ``honest`` clients over the noise that the
    client adds, for replacement of one sample. With one honest client it is the worst case of the plan.
    Proof: docs/proofs/secure-aggregation.md.
    """
    if plan.sums is None:
        return plan.epsilon(DELTA)
    fewer = replace(plan, sums=Summing(honest, plan.sums.is_memoryless))
    noise = fewer.sensitivity * fewer.summed_sensitivity() / fewer.noise_std
    return gdp_epsilon(math.hypot(noise, fewer.resolution_mu), DELTA)


def table() -> str:
    """Return the table in Markdown, below its terms."""
    alone = plan_of()
    sums = [plan_of(honest) for honest in HONEST]
    asked = rounded_up(alone.epsilon(DELTA))
    rows: list[tuple[str, list[str], str]] = []

    def row(who: str, honest: int | None, trusted: str) -> None:
        """Add a row: sums that have so many honest clients left, or no sum that anybody opens."""
        left = [
            rounded_up(plan.epsilon(DELTA) if honest is None else epsilon_against(plan, min(honest, most)))
            for plan, most in zip(sums, HONEST, strict=True)
        ]
        rows.append((who, [asked, *left], trusted))

    row("readers of the model", None, asked)
    row(f"{COHORT - HONEST[0]} clients of each sum", None, asked)
    row("the server", None, "none")
    row(f"the server, all helpers but one and {COHORT - HONEST[0]} clients of each sum", HONEST[0], "none")
    row(f"the server, all helpers but one and {COHORT - HONEST[1]} clients of each sum", HONEST[1], "none")
    row("the server and all other clients", 1, "none")
    row("the server and all helpers", 1, "none")
    noise = [alone.noise_std, *(plan.noise_std for plan in sums), alone.noise_std / math.sqrt(CLIENTS)]
    heads = ["untrusted server", *(f"sums, h = {honest}" for honest in HONEST), "trusted server"]
    lines = [f"| who works together | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    lines += [f"| {who} | {' | '.join(figures)} | {trusted} |" for who, figures, trusted in rows]
    times = [f"{one / noise[-1]:.3g}" for one in noise]
    lines.append(f"| *noise of the average, trusted server = 1* | {' | '.join(times)} |")
    return "\n".join([TERMS, "", *lines])


if __name__ == "__main__":
    print(table())
