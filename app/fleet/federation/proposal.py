"""Settings that a coordinator proposes for a schema: the operators' files, and the run that trains by them.

Method, model, rounds and clip are chosen from public sizes alone: how many clients and records there are, what a
record is, and how private the training is to be (:mod:`murmurfl.app.planning.deciding`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....clients.records.schema import Schema
from ....privacy.errors import ConfigurationError
from ....privacy.release.policy import PrivacyPolicy
from ....privacy.setting import Value, spelled_out
from ...data.table_task import SchemaTask
from ...engines.loopback import toml_document
from ...methods import METHODS, ResolvedRun
from ...methods.full_batch_method import QUANTILE
from ...methods.method import AUTO
from ...nodes.node_config import NodeConfig
from ...planning import PlanRequest, decide
from ...runs.experiment import resolve
from ...runs.fit_arguments import chosen_additive
from ...runs.real_fit import evaluated_privately
from ...settings.layers import layered
from ...settings.run_config import SECURE, RunConfig, run_keys, sum_assumption

SETTINGS: tuple[str, ...] = (
    *(
        "strategy",
        "model",
        "model.knots",
        "model.knots-share",
        "clip-norm",
        "batch-size",
        "max-participations",
        "passes",
        "mechanism",
        "mu",
        "delta",
    ),
    *(
        "clipping",
        "clipping.stability",
        "clipping.quantile-share",
        "evaluation.share",
        "evaluation.held-out",
        "evaluation.score-bins",
    ),
    *("trust", "trust.min-cohort", "trust.min-honest"),
)
"""Keys of operators' files that a federation may propose: no path, no address, and no name of somebody's code."""

DEFAULT_ROWS = 1000
"""Records of each client that a training is planned for, unless the coordinator knows better."""

_HONEST = 2
_DIGITS = 6
_OF_CLIENTS = frozenset({"task", "schema", "num-clients", "clients-per-round", "trust.helpers", "training-samples"})
"""Run-config keys that schema and members decide."""
_ALSO_OF_RUNS = frozenset({"epsilon", "learning-rate"})
"""Keys of operators' files by which a run's settings mean another thing, or mu."""
_ALWAYS_SHOWN = ("strategy", "model", "mu", "delta", "num-rounds")


@dataclass(frozen=True)
class Proposal:
    """Settings for everybody."""

    members: Mapping[str, Value]
    """Settings of the clients' files, keys among :data:`SETTINGS`."""
    run: Mapping[str, Value]
    """Run-config keys, without the schema's and those that depend on who is a member."""
    reason: str
    """Reason for this method, in a sentence; empty where the coordinator set it."""


def propose(records: Schema, clients: int, helpers: int, num_records: int, settings: Mapping[str, Value]) -> Proposal:
    """Return the settings for a federation of ``clients`` with so many records each; ``settings`` win over defaults.

    Raises
    ------
    ConfigurationError
        If no built-in method of real nodes can train by these settings.
    """
    if records.num_classes == 1 and not chosen_additive(records, settings):
        raise ConfigurationError(
            "Expected a label of classes, or an additive model, whose knots scale a label of numbers, got numbers and "
            "another model: leave out --set model, or train with `murmurfl fit TABLE --schema SCHEMA.toml`.",
            kind="unsupported",
            setting="schema",
        )
    if fixed := sorted(settings.keys() & _OF_CLIENTS):
        raise ConfigurationError(
            f"Expected no --set {fixed[0]}, which schema and members decide, got {settings[fixed[0]]!r}: leave it out.",
            kind="conflict",
            setting="settings",
        )
    own = (settings.keys() & NodeConfig.settings().keys()) - {*SETTINGS, *_ALSO_OF_RUNS}
    if own:
        name = min(own)
        raise ConfigurationError(
            f"Expected settings that a federation may propose, got {name} = {settings[name]!r}: each operator writes "
            "it into node.toml, and you into run.settings.",
            kind="unknown-name",
            setting="settings",
        )
    if not num_records >= 1:
        raise ConfigurationError(
            f"Expected --num-records >= 1, about how many records a client has, got {num_records}.",
            kind="out-of-range",
            setting="num-records",
            got=num_records,
        )
    if names := sorted(name for name, value in settings.items() if isinstance(value, str) and ":" in value):
        raise ConfigurationError(
            f"Expected settings that are built-in names, got {names[0]} = {settings[names[0]]!r}: code of one's own is "
            "each operator's to install.",
            kind="unknown-name",
        )
    counts: dict[str, Value] = {"num-clients": clients, "clients-per-round": clients}
    given = layered(_defaults(records, settings), _sums(clients, helpers, settings), settings)
    config = RunConfig.from_mapping({**given, **counts, "task": SchemaTask(records).name})
    problem, reason = _chosen(config, records, num_records)
    return Proposal(_members(problem), _run(problem), reason)


def _defaults(records: Schema, settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings where the coordinator leaves them open."""
    additive = chosen_additive(records, settings)
    own: dict[str, Value] = {"strategy": "full-batch" if additive else AUTO, "mu": 2.0, "delta": 1e-5}
    own["model"] = "additive" if additive else "softmax"
    strategy = str(settings.get("strategy", own["strategy"]))
    can_evaluate = strategy == AUTO or (strategy in METHODS and METHODS[strategy].evaluates)
    if not can_evaluate or records.num_classes == 1 or settings.get("evaluation.share") == 0:
        return own
    # A file of records may be sorted by its label, and the last ones would be set aside: all are evaluated on.
    return {
        **own,
        **{name: 0.0 if name == "evaluation.held-out" else one for name, one in evaluated_privately(records).items()},
    }


def _sums(clients: int, helpers: int, settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings of sums; without helpers there are none."""
    trust = settings.get("trust", SECURE if helpers else "")
    if (trust == SECURE) != bool(helpers):
        raise ConfigurationError(
            f"Expected helpers with trust = {SECURE!r}, and with nothing else, got {helpers} and trust = {trust!r}: "
            "set --helpers, or leave trust out.",
            kind="conflict",
            setting="helpers",
            got=helpers,
        )
    if not helpers:
        return {}
    least = int(settings.get("trust.min-cohort", 0)) or sum_assumption(clients).min_cohort
    return {
        "trust": SECURE,
        "trust.helpers": helpers,
        "trust.min-cohort": least,
        "trust.colluders": max(least - _HONEST, 0),
    }


def _chosen(config: RunConfig, records: Schema, num_records: int) -> tuple[ResolvedRun, str]:
    """Return the run worked out on sizes, and why its strategy was chosen, if it was."""
    sizes = (num_records,) * config.num_clients
    situation = PlanRequest(config, sizes, records.num_features, records.num_classes, resolve)
    if config.strategy != AUTO:
        return situation.problem({"strategy": config.strategy}), ""
    decision = decide(situation)
    able = [one for one in (decision.chosen, *decision.others) if METHODS[one.strategy].on_real_nodes]
    if not able:
        raise ConfigurationError(
            f"Expected settings that a method of real nodes can serve, got some for {decision.chosen.strategy} alone: "
            "name a strategy with --set.",
            kind="conflict",
        )
    return able[0].problem, replace(decision, chosen=able[0], others=[]).reason


def _members(problem: ResolvedRun) -> dict[str, Value]:
    """Return settings of clients' files by which they answer the run: those of the policy that a client of it has."""
    config = problem.config
    policy: PrivacyPolicy = METHODS[config.strategy].policy(problem.trained, min(problem.sizes))
    made: dict[str, Value] = {
        "strategy": config.strategy,
        "model": config.model,
        "clip-norm": rounded(policy.clip_norm),
        "batch-size": policy.batch_size,
        "max-participations": policy.max_participations,
        "mu": config.mu,
        "delta": config.delta,
    }
    if config.quantile:
        made["clipping.quantile-share"] = config.quantile_share
    if config.secure:
        made |= {"trust.min-cohort": config.sums.min_cohort, "trust.min-honest": config.sums.min_honest}
    of_run, usual = config.to_mapping(), NodeConfig.settings()
    open_still = [name for name in SETTINGS if name not in made and name in of_run and name not in QUANTILE]
    return made | {name: of_run[name] for name in open_still if of_run[name] != usual[name].default}


def _run(problem: ResolvedRun) -> dict[str, Value]:
    """Return the run's settings that are not the defaults, and those that everybody should see."""
    config = problem.config
    values = {**config.to_mapping(), "num-rounds": problem.num_rounds}
    if not config.quantile:
        values["clip-norm"] = rounded(problem.values.clip_norm)
    default = {name: one.default for name, one in run_keys().items()}
    kept = [name for name in values if name in _ALWAYS_SHOWN or values[name] != default[name]]
    return {name: values[name] for name in kept if name not in _OF_CLIENTS}


def rounded(clip_norm: float) -> float:
    """Return a clip in so few digits that operators can read it."""
    return float(f"{clip_norm:.{_DIGITS}g}")


def counts(clients: int, helpers: int, num_records: int) -> dict[str, int]:
    """Run-config keys that the number of members decides."""
    made = {"num-clients": clients, "clients-per-round": clients, "training-samples": clients * num_records}
    return {**made, "trust.helpers": helpers} if helpers else made


def run_text(values: Mapping[str, Value]) -> str:
    """Run settings as ``flwr run -c "$(cat FILE)"`` takes them: KEY=VALUE, one a line."""
    lines = toml_document(spelled_out(values, run_keys())).splitlines()
    return "".join(re.sub(r'^"([A-Za-z0-9_.-]+)" = ', r"\1=", line) + "\n" for line in lines)


def with_counts(text: str, before: Mapping[str, int], now: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return run settings with the members' present counts, and what an operator must know of it, in lines.

    Only a count that still stands as it was written here (``before``) is changed. Everything else in the text is its
    operator's: added and changed lines stay, and a line that was taken out stays out.
    """
    lines = []
    for name in dict.fromkeys([*before, *now]):
        wanted = now.get(name)
        found = re.search(rf"(?m)(?<!\S){re.escape(name)}=(\S+)\n?", text)
        if found is None:
            if wanted is not None and name not in before:
                text = f"{text.rstrip()}\n{name}={wanted}\n"
                lines.append(f"{name} = {wanted}, which is new")
        elif found[1] == str(wanted):
            continue
        elif found[1] != str(before.get(name)):
            lines.append(f"{name} = {found[1]} stays, as you set it; by the members it would be {wanted}")
        elif wanted is None:
            text = text[: found.start()] + text[found.end() :]
            lines.append(f"{name} is gone")
        else:
            text = text[: found.start(1)] + str(wanted) + text[found.end(1) :]
            lines.append(f"{name} = {wanted}, was {found[1]}")
    return text, lines
