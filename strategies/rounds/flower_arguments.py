"""Refusals of arguments of Flower's strategies that ours do not take, each with what takes its place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping

from ...privacy import ConfigurationError


class UnexpectedArgumentError(ConfigurationError, TypeError):
    """An argument that a strategy does not take; a ``TypeError`` as well, as of any other function."""


_EVALUATION = (
    "machines are not asked to evaluate, for what they would measure has no noise. Give start(..., evaluate_fn=...), "
    "which evaluates on the server's own data, or have a noised count of correct predictions with PrivateEvaluation"
)
_ON_MACHINES = (
    "; CorrelatedFedAvg(evaluate_on_machines=True) asks machines all the same, without privacy, where they allow it"
)
_METRICS = (
    "machines send no metrics of their training (loss, accuracy, counts): those have no noise. Look at the model, with "
    "start(..., evaluate_fn=...)"
)
_ROBUST = (
    "single updates are noise and cannot be told apart or left out. A machine's influence is bounded by its clip, and "
    "largest_value drops what no honest machine can send. Leave it out"
)
_BY_LOSS = (
    "weights by a machine's loss would publish something about its data. All machines count the same. Leave it out"
)
_NOISE = (
    "clip and noise are each machine's own, and no server's: UpdatePolicy(clip_norm=..., mu=..., "
    "max_participations=...), or the operator's file. Leave it out"
)
_SUMMATION = "releases are added up in one way, exactly. Leave it out"
_ADAPTIVE = "write CorrelatedFedAvg(optimizer=ServerAdam(beta_1=..., beta_2=..., tau=...)) or ServerYogi"

# By names of FedAvg, FedProx, FedAdam, ..., of the Message API and of the legacy one.
_INSTEAD: dict[str, str] = {
    "weighted_by_key": (
        "all machines count the same. A weight, such as the number of examples, would publish a number that depends on "
        "a machine's data, and a machine that counts for more would need more noise. Leave it out"
    ),
    **dict.fromkeys(
        (
            *("fraction_evaluate", "min_evaluate_nodes", "min_evaluate_clients", "evaluate_metrics_aggr_fn"),
            *("evaluate_metrics_aggregation_fn", "on_evaluate_config_fn"),
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(("train_metrics_aggr_fn", "fit_metrics_aggregation_fn"), _METRICS),
    **dict.fromkeys(("inplace", "aggregation"), _SUMMATION),
    "accept_failures": "a machine that fails costs its round one update, and the training goes on. Leave it out",
    **dict.fromkeys(
        ("min_completion_rate_fit", "min_completion_rate_evaluate"),
        "a round takes what came. Under secure aggregation SecureAggregation(min_cohort=...) is the fewest",
    ),
    "fraction_fit": "it is called fraction_train here",
    "min_fit_clients": "it is called min_train_nodes here",
    "min_available_clients": "it is called min_available_nodes here",
    "on_fit_config_fn": (
        "give start(..., train_config=ConfigRecord({...})); the round's number reaches clients as 'server-round'"
    ),
    "initial_parameters": "give start(grid, initial_arrays=ArrayRecord(...))",
    **dict.fromkeys(
        ("evaluate_fn", "evaluate_function"),
        "give start(..., evaluate_fn=...), called with the round and the model's ArrayRecord",
    ),
    "num_rounds": "give start(..., num_rounds=...)",
    "proximal_mu": (
        "the proximal term is part of what clients do: send it to them, start(..., "
        "train_config=ConfigRecord({'proximal-mu': ...})), as FedProx does"
    ),
    "eta": "the server's step is learning_rate=...",
    "server_learning_rate": "the server's step is learning_rate=...",
    "eta_l": "clients train with a rate of their own: start(..., train_config=ConfigRecord({'lr': ...}))",
    "server_momentum": "write CorrelatedFedAvg(optimizer=ServerMomentum(momentum=...))",
    **dict.fromkeys(("beta_1", "beta_2", "tau"), _ADAPTIVE),
    **dict.fromkeys(
        (
            *("beta", "num_malicious_nodes", "num_malicious_clients", "num_nodes_to_select", "num_clients_to_keep"),
            *("selection_rule", "first_aggregation_rule"),
        ),
        _ROBUST,
    ),
    **dict.fromkeys(("q", "q_param", "client_learning_rate", "qffl_learning_rate", "train_loss_key"), _BY_LOSS),
    **dict.fromkeys(
        (
            *(
                "strategy",
                "noise_multiplier",
                "clipping_norm",
                "initial_clipping_norm",
                "target_clipped_quantile",
                "clip_norm_lr",
            ),
            *("clipped_count_stddev", "init_clip_norm", "clip_norm_target_quantile", "clip_count_stddev"),
            *("server_side_noising", "num_sampled_clients", "accountant", "clip_norm", "mu", "epsilon", "delta"),
        ),
        _NOISE,
    ),
    **dict.fromkeys(
        ("arrayrecord_key", "configrecord_key"),
        "murmurfl's own clients read 'arrays' and 'config'; CorrelatedFedAvg alone takes other keys. Leave it out",
    ),
}


def refuse_arguments(strategy: type, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that none of a strategy's constructors takes, unless they ask for nothing.

    None asks for nothing, and neither does ``fraction_evaluate = 0``: machines do not evaluate anyway.
    """
    refused = {name: value for name, value in arguments.items() if not _asks_for_nothing(name, value)}
    if refused:
        raise UnexpectedArgumentError(" ".join(_refusal(strategy, name, value) for name, value in refused.items()))


def _asks_for_nothing(name: str, value: object) -> bool:
    if name not in _INSTEAD:
        return False
    none_evaluates = name in ("fraction_evaluate", "min_evaluate_nodes", "min_evaluate_clients") and value == 0
    return value is None or (none_evaluates and not isinstance(value, bool))


def _refusal(strategy: type, name: str, value: object) -> str:
    shown = repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
    if name not in _INSTEAD:
        close = difflib.get_close_matches(name, _arguments(strategy), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        return f"Expected an argument that {strategy.__name__} has, got {name!r}{hint}"
    instead = _INSTEAD[name]
    if instead is _EVALUATION and "evaluate_on_machines" in _arguments(strategy):
        instead += _ON_MACHINES
    return f"Expected no {name} for {strategy.__name__}, got {shown}: {instead}."


def _arguments(strategy: type) -> set[str]:
    """The names of all keyword arguments of a class and its bases."""
    names: set[str] = set()
    for base in strategy.__mro__:
        if "__init__" in vars(base) and base is not object:
            names |= {
                parameter.name
                for parameter in inspect.signature(base.__init__).parameters.values()
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            }
    return names
