"""Measuring privacy: lower bounds on mu and epsilon of the code that runs, to compare with what it claims.

Formal guarantees
-----------------
A lower bound above the claim refutes the claim, at the stated confidence. One below it proves nothing, for another
attack may do better, and no audit protects anybody's data. Both ask the machines' own code: policy, ledger, keys,
clipping, noise and release rule.
"""

from .many_runs import (
    Answers,
    AuditResult,
    Streams,
    audit_client,
    audit_secret_order,
    epsilon_bound,
    error_bound,
    likelihood_weights,
    mu_bound,
    prefix_sums,
)
from .one_run import OneRunResult, audit_one_run, canary_scores, one_run_epsilon, one_run_p_value

__all__ = [
    "Answers",
    "AuditResult",
    "OneRunResult",
    "Streams",
    "audit_client",
    "audit_one_run",
    "audit_secret_order",
    "canary_scores",
    "epsilon_bound",
    "error_bound",
    "likelihood_weights",
    "mu_bound",
    "one_run_epsilon",
    "one_run_p_value",
    "prefix_sums",
]
