"""Measuring privacy: lower bounds on mu and epsilon of the code that runs, to compare with what it claims.

Formal guarantees
-----------------
A lower bound above the claim refutes the claim, at the stated confidence. One below it proves nothing, for another
attack may do better, and no audit protects anybody's data. Both ask the clients' own code: policy, ledger, keys,
clipping, noise and release rule.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .many_runs import Answers as Answers
    from .many_runs import AuditResult as AuditResult
    from .many_runs import Streams as Streams
    from .many_runs import audit_client as audit_client
    from .many_runs import audit_secret_order as audit_secret_order
    from .many_runs import epsilon_bound as epsilon_bound
    from .many_runs import error_bound as error_bound
    from .many_runs import likelihood_weights as likelihood_weights
    from .many_runs import mu_bound as mu_bound
    from .many_runs import prefix_sums as prefix_sums
    from .one_run import OneRunResult as OneRunResult
    from .one_run import audit_one_run as audit_one_run
    from .one_run import canary_scores as canary_scores
    from .one_run import one_run_epsilon as one_run_epsilon
    from .one_run import one_run_p_value as one_run_p_value

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
