"""Demonstration: a private training over real nodes on this computer, checked against their ledgers.

``murmurfl deploy-demo`` (``make deploy-demo``) shows it; docs/deployment.md does the same on several computers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...privacy import (
    ConfigurationError,
    LedgerError,
    LedgerSummary,
    OpeningRecordError,
    SQLiteOpeningRecord,
    read_ledger,
    rounded_up,
)
from ...privacy.machine.tables import PRIVATE
from ..engines.loopback import LaunchError, Scalar
from ..methods import METHODS
from ..runs.experiment import Experiment, prepare
from ..runs.outcome import FAILURE_NAME, Outcome
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from ..settings.trust_settings import SECURE
from .deployment import deployment
from .helper_config import HelperConfig
from .ledger_views import ledger_guarantee
from .node_config import NodeConfig, node_strategies

DEMO_SETTINGS: dict[str, Scalar] = {
    # Few, heavy rounds: a round over a network takes seconds, whatever it computes.
    "num-clients": 4,
    "clients-per-round": 4,
    "batch-size": 32,
    "round-timeout-s": 120.0,
    "node-deadline-s": 90.0,
}


_OF_SUMS: dict[str, Scalar] = {"num-clients": 6, "clients-per-round": 6}
"""Instead, under secure aggregation: enough machines for a sum that tolerates some that collude or are lost."""


def node_settings(experiment: Experiment, machine: int) -> dict[str, Scalar]:
    """Settings of a node that agree with a run configuration on data, model and policy.

    Raises
    ------
    ConfigurationError
        If a real node has no such settings.
    """
    config, policy = experiment.config, experiment.policy(machine)
    if not experiment.method.on_real_nodes:
        raise ConfigurationError(
            f"Expected a strategy for real nodes, one of {', '.join(node_strategies())}, got {config.strategy!r}."
        )
    if not config.private or config.noise_quality != "exact" or policy.mechanism_options:
        raise ConfigurationError(
            "Expected a mechanism without options and exact noise on real nodes, got "
            f"mechanism = {config.mechanism!r}, noise-quality = {config.noise_quality!r}."
        )
    # A preset may have another mechanism than its method, which a node's configuration must name.
    own = policy.mechanism == experiment.method.default_mechanism
    settings: dict[str, Scalar] = {
        "strategy": config.strategy,
        "model": config.model,
        "task": config.task,
        "features": registry("features").located(config.features),
        "partition": config.partition,
        "partition-seed": config.seed,
        "num-partitions": config.num_clients,
        "partition-id": machine,
        "clip-norm": policy.clip_norm,
        "batch-size": policy.batch_size,
        "max-participations": policy.max_participations,
        "passes": config.passes,
        "mu": config.mu,
        "budget-mu": policy.budget_mu or config.mu,
        "delta": policy.delta,
        "mechanism": config.mechanism or ("" if own else policy.mechanism),
    }
    if policy.clipping != "clip":
        settings |= {"clipping": policy.clipping, "clip-stability": policy.clip_stability}
    if config.samples_per_owner:
        settings["samples-per-owner"] = config.samples_per_owner
    if config.quantile:
        settings["quantile-share"] = config.quantile_share
    if experiment.is_centred:
        settings |= {"centring": PRIVATE, "centring-share": config.centring_share}
    elif config.centring:
        settings["centring"] = config.centring
    if experiment.is_evaluated:
        settings |= {"private-evaluation": config.private_evaluation, "held-out": config.held_out}
        settings |= {"score-bins": config.score_bins} if config.score_bins else {}
    if config.data_root:
        settings["data-root"] = str(Path(config.data_root).expanduser().resolve())
    if policy.trust == SECURE:
        settings |= {"trust": SECURE, "min-honest": policy.min_honest, "min-cohort": policy.min_cohort}
        settings["budget-local-mu"] = policy.local_budget
    if experiment.method.local_steps:
        settings["learning-rate"] = experiment.values.learning_rate
        settings["feature-bound"] = config.feature_bound
    return settings


def ledger_line(machine: str, ledger: LedgerSummary) -> str:
    """A node's ledger in one line; a run reserves its whole mu when it opens, however far it gets."""
    releases = sum(session.releases for session in ledger.sessions)
    spent = f"mu {rounded_up(ledger.reserved_mu)} of {rounded_up(ledger.budget_mu)} spent"
    guarantee = ledger_guarantee(ledger)
    if guarantee.mu_local is not None:
        spent += f", {rounded_up(guarantee.mu_local)} of {rounded_up(ledger.budget_local_mu)} whatever happens"
    return f"  ledger of {machine}: {releases} releases, {spent}: {guarantee.sentence}"


def record_line(helper: str, sets: int) -> str:
    """A helper's record in one line."""
    return f"  record of {helper}: {sets} sums opened"


@dataclass(frozen=True)
class Demonstrated:
    """Result of a demonstration."""

    outcome: Outcome  # the run's ``result.json``
    ledgers: dict[str, LedgerSummary]  # by node
    opened: dict[str, int]  # sums opened, by helper


def run_demo(config: RunConfig, folder: Path, *, timeout_s: float, on_line: Callable[[str], None]) -> Demonstrated:
    """Deploy a node for each machine of a run configuration, and its helpers, and complete the run over them.

    Parameters
    ----------
    config : RunConfig
        Its out-dir and run-name must give ``folder``.
    folder : Path
        The run's.
    timeout_s : float
        For everything but the stopping, in seconds.
    on_line : callable
        Receives the lines of the run's log.

    Raises
    ------
    MurmurflError
        If the deployment or the run failed, or a ledger has fewer releases than the server aggregated.
    """
    experiment = prepare(config)
    settings = {f"node-{machine}": node_settings(experiment, machine) for machine in range(config.num_clients)}
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with deployment(folder, timeout_s=timeout_s, on_line=on_line, environment=environment) as deployed:
        helpers = config.helpers if config.trust_model == SECURE else 0
        deployed.add_nodes(settings, [f"helper-{number}" for number in range(helpers)])
        for name in (*deployed.helpers, *deployed.nodes):
            deployed.start_node(name)
        try:
            deployed.submit(config.to_mapping())
        except LaunchError as error:
            failure = folder / FAILURE_NAME
            reason = (
                f"The run failed: {json.loads(failure.read_text())['reason']}" if failure.exists() else error.reason
            )
            raise LaunchError(reason, error.log) from error
    outcome = Outcome.read(folder)
    ledgers = {name: read_ledger(NodeConfig.read(files.config).ledger) for name, files in deployed.nodes.items()}
    recorded = {name: sum(session.releases for session in ledger.sessions) for name, ledger in ledgers.items()}
    for name, statement in (outcome.machines or {}).items():
        if recorded[name] < statement["releases"]:
            raise LedgerError(f"Expected {statement['releases']} releases in {name}'s ledger, got {recorded[name]}.")
    if sum(recorded.values()) < outcome.aggregated:
        raise LedgerError(f"Expected {outcome.aggregated} releases in the ledgers, got {sum(recorded.values())}.")
    helpers = {name: HelperConfig.read(files.config) for name, files in deployed.helpers.items()}
    opened = {name: SQLiteOpeningRecord(helper.record).sets for name, helper in helpers.items()}
    for name, sets in opened.items():
        if sets < outcome.rounds:
            raise OpeningRecordError(f"Expected {outcome.rounds} sums in {name}'s record, got {sets}.")
    return Demonstrated(outcome, ledgers, opened)


def demo_config(overrides: Mapping[str, Scalar], out: Path, name: str) -> RunConfig:
    """The demonstration's run configuration with overrides; its files go to ``out / name``."""
    of_sums = _OF_SUMS if overrides.get("trust") == SECURE else {}
    given = {**DEMO_SETTINGS, **of_sums, **overrides, "out-dir": str(out), "run-name": name}
    if "num-clients" in overrides and "clients-per-round" not in overrides:
        given["clients-per-round"] = overrides["num-clients"]
    if "batch-size" not in overrides and not METHODS[str(given.get("strategy", "mu2"))].keys & {"batch-size"}:
        del given["batch-size"]
    config = RunConfig.from_mapping(given)
    # Machines' samples are no secret here; a server of others has to be told the rounds.
    return config if config.num_rounds else replace(config, num_rounds=prepare(config).num_rounds)
