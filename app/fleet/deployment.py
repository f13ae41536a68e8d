"""A whole deployment on this computer: a SuperLink with TLS and node keys, nodes with ledgers, helpers with records.

Tests drive it, and ``murmurfl deploy-demo`` (``make deploy-demo``) shows it: a private training over real nodes,
checked against their ledgers. docs/deployment.md does the same on several computers. Certificates and node keys lie in
a scratch folder and are thrown away with the deployment; real ones come from the operators. Configurations, ledgers,
records, keys of secure aggregation and logs stay in the run's folder.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...clients.nodes.roster_files import write_roster
from ...privacy.accounting.guarantee import added_words, rounded_up
from ...privacy.accounting.loss import Profile
from ...privacy.errors import ConfigurationError, LedgerError
from ...privacy.files import write_private
from ...privacy.ledger.ledger_history import LedgerSummary, read_ledger
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.setting import spelled_out
from ...privacy.sums.opening_file import SQLiteOpeningRecord
from ...privacy.sums.opening_rule import OpeningRecordError
from ..engines.loopback import LaunchError, Scalar, executable, interrupts_as_keyboard_interrupt, toml_document
from ..engines.start import app_folder
from ..engines.superlink import CONNECTION_NAME, Launch, override_document
from ..methods import METHODS
from ..methods.queries import RUN_QUERIES
from ..nodes.ledger_views import ledger_guarantee
from ..nodes.node_config import HelperConfig, NodeConfig, node_strategies
from ..runs.experiment import Experiment, prepare
from ..runs.outcome import FAILURE_NAME, Outcome
from ..settings.registry import registry
from ..settings.run_config import SECURE, RunConfig, run_keys
from .federation.keys_and_cards import (
    ServerCertificates,
    make_client,
    make_helper,
    make_node_key,
    make_server_certificates,
    roster_of,
)

_NODES, _ROSTER = "nodes", "roster.json"
_SIGNING_KEY, _HELPER_KEY, _RECORD = "signing.key", "helper.key", "record.sqlite"
_REGISTER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeFiles:
    """Files of one node or helper of a deployment."""

    config: Path  # the operator's file
    log: Path
    private_key: Path  # registered with the SuperLink
    command: str = "node"  # of ``murmurfl``


class Deployment(Launch):
    """Real processes on the loopback interface; :func:`deployment` starts and stops one."""

    def __init__(self, folder: Path, timeout_s: float, on_line: Callable[[str], None]) -> None:
        super().__init__(app_folder(), time.monotonic() + timeout_s, timeout_s, on_line)
        self.folder = folder
        self.nodes: dict[str, NodeFiles] = {}
        self.helpers: dict[str, NodeFiles] = {}
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self._certificates: ServerCertificates | None = None

    def prepare(self, overrides: str, environment: Mapping[str, str]) -> None:
        super().prepare(overrides, environment)
        self.environment["TMPDIR"] = str(self.scratch())  # removed in the end, with what killed processes left there

    @property
    def certificates(self) -> ServerCertificates:
        """The SuperLink's certificates, made when first needed."""
        if self._certificates is None:
            self._certificates = make_server_certificates(self.scratch())
        return self._certificates

    def superlink_options(self) -> list[str]:
        """TLS, node keys, and a database, so that a restarted SuperLink knows its nodes and runs."""
        paths = self.certificates
        options = ["--ssl-ca-certfile", str(paths.authority), "--ssl-certfile", str(paths.certificate)]
        options += ["--ssl-keyfile", str(paths.key), "--enable-supernode-auth"]
        return [*options, "--database", str(self.scratch() / "superlink.db")]

    def connection(self) -> str:
        return f"root-certificates = {json.dumps(str(self.certificates.authority))}"

    def certificate(self) -> Path | None:
        return self.certificates.certificate

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(self.certificates.authority))

    def add_nodes(self, configs: Mapping[str, Mapping[str, Scalar]], helpers: Sequence[str] = ()) -> None:
        """Give each node its file, its ledger and its key, and register the keys with the SuperLink.

        ``configs`` has each node's file, with budget and delta, without client, ledger, roster and keys. Helpers get
        keys and records, and they and all nodes one roster.
        """
        shared = self._make_roster(list(configs), helpers)
        for name, values in configs.items():
            own = {**shared, "signing-key": _SIGNING_KEY} if helpers else {}
            files = self._files(name, {"client": name, "ledger": "ledger.sqlite", **values, **own}, "node")
            node = NodeConfig.read(files.config)
            budgets = {"budget_mu": node.budget_mu, "budget_local_mu": node.budget_local_mu or None}
            SQLiteLedger.create(node.ledger, **budgets, delta=node.delta, data=name)
            self.nodes[name] = files
        for name in helpers:
            own = {"helper": name, "record": _RECORD, **shared, "key": _HELPER_KEY}
            self.helpers[name] = self._files(name, own, "helper")
        self._register({name: self.files_of(name) for name in (*configs, *helpers)})

    def _make_roster(self, clients: Sequence[str], helpers: Sequence[str]) -> dict[str, Scalar]:
        """Make everybody's keys and cards and one roster; return its keys for everybody's configuration."""
        if not helpers:
            return {}
        cards = []
        for name in (*clients, *helpers):
            folder = self.folder / _NODES / name
            folder.mkdir(parents=True)
            if name in clients:
                cards.append(make_client(folder / _SIGNING_KEY, name).card)
            else:
                cards.append(make_helper(folder / _HELPER_KEY, name, folder / _RECORD).card)
        roster = roster_of(cards)
        write_roster(self.folder / _NODES / _ROSTER, roster)
        return {"roster": f"../{_ROSTER}", "roster-digest": roster.digest}

    def _files(self, name: str, values: Mapping[str, Scalar], command: str) -> NodeFiles:
        """Make a node's folder with the operator's file."""
        folder, keys = self.folder / _NODES / name, self.scratch() / "keys"
        folder.mkdir(parents=True, exist_ok=True)
        keys.mkdir(mode=0o700, exist_ok=True)
        files = NodeFiles(folder / f"{command}.toml", folder / f"{command}.log", keys / name, command)
        write_private(files.config, toml_document(values))
        return files

    def files_of(self, name: str) -> NodeFiles:
        return self.nodes.get(name) or self.helpers[name]

    def _register(self, nodes: Mapping[str, NodeFiles]) -> None:
        """Make nodes' keys and register them with the SuperLink."""
        registering = []
        for name, files in nodes.items():
            public = make_node_key(files.private_key)
            registering.append((name, self._flwr("supernode", "register", str(public), CONNECTION_NAME)))
        for name, process in registering:
            try:
                output, _ = process.communicate(timeout=_REGISTER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise LaunchError(f"The SuperLink did not take the key of node {name} in time.") from None
            if process.returncode:
                raise LaunchError(f"The SuperLink refused the key of node {name}.", output)

    def start_node(self, name: str, program: Sequence[str] = ()) -> subprocess.Popen[Any]:
        """Start a node or a helper, or start it again: ``murmurfl``, or another program that takes its arguments."""
        files = self.files_of(name)
        program = program or (sys.executable, "-m", "murmurfl.app")
        command = [*program, files.command, str(files.config), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--auth-private-key", str(files.private_key)]
        command += ["--root-certificates", str(self.certificates.authority), "--verbose"]
        with files.log.open("ab") as log:
            self.running[name] = self.start_process(command, stdout=log)
        return self.running[name]

    def submit(self, run_config: Mapping[str, Scalar], app_dir: Path | None = None) -> tuple[int, str]:
        """Complete a run of an app over the nodes; return its id and status, or raise a ``LaunchError``."""
        self.app_dir = self.app_dir if app_dir is None else app_dir
        (self.scratch() / "run-config.toml").write_text(override_document(self.app_dir, run_config), encoding="utf-8")
        return self.run("", has_overrides=bool(run_config))

    def _flwr(self, *arguments: str) -> subprocess.Popen[Any]:
        options: dict[str, Any] = {"cwd": self.scratch(), "text": True, "encoding": "utf-8", "errors": "replace"}
        return self.start_process([executable("flwr"), *arguments], stdout=subprocess.PIPE, **options)


@contextmanager
def deployment(
    folder: Path,
    *,
    timeout_s: float = 900.0,
    on_line: Callable[[str], None] = lambda line: None,  # noqa: ARG005 - nobody reads along
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """Run a SuperLink that answers, with its nodes' files in ``folder``.

    What was started is stopped when the block ends. The time is for everything but the stopping; ``on_line`` gets the
    runs' log. A process that could not be started or stopped is a ``LaunchError``.
    """
    deployed = Deployment(folder, timeout_s, on_line)
    with interrupts_as_keyboard_interrupt() as protect:
        left: list[int] = []
        try:
            deployed.prepare("", environment or {})
            deployed.start_superlink()
            yield deployed
        finally:
            protect()
            left = deployed.stop()
        if left:
            raise LaunchError(f"These processes of the deployment could not be stopped: {left}.", deployed.log)


DEMO_SETTINGS: dict[str, Scalar] = {
    # Few, heavy rounds: a round over a network takes seconds, whatever it computes.
    "num-clients": 4,
    "clients-per-round": 4,
    "batch-size": 32,
    "round-timeout-s": 120.0,
    "node-deadline-s": 90.0,
}


_OF_SUMS: dict[str, Scalar] = {"num-clients": 6, "clients-per-round": 6}
"""Instead, under secure aggregation: enough clients for a sum that tolerates some that collude or are lost."""


def node_settings(experiment: Experiment, client: int) -> dict[str, Scalar]:
    """Return settings of a node that agree with a run configuration on data, model and policy, if it can have such."""
    config, policy = experiment.config, experiment.policy(client)
    if not experiment.method.on_real_nodes:
        raise ConfigurationError(
            f"Expected a strategy for real nodes, one of {', '.join(node_strategies())}, got {config.strategy!r}.",
            kind="unknown-name",
            setting="strategy",
            got=config.strategy,
        )
    if not config.private or config.noise_quality != "exact" or policy.mechanism_options:
        raise ConfigurationError(
            "Expected a mechanism without options and exact noise on real nodes, got "
            f"mechanism = {config.mechanism.kind!r}, noise-quality = {config.noise_quality!r}.",
            kind="conflict",
            setting="mechanism",
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
        "partition-id": client,
        "clip-norm": policy.clip_norm,
        "batch-size": policy.batch_size,
        "max-participations": policy.max_participations,
        "passes": config.passes,
        "mu": config.mu,
        "budget-mu": policy.budget_mu or config.mu,
        "delta": policy.delta,
        "mechanism": config.mechanism.kind or ("" if own else policy.mechanism),
    }
    if policy.clipping != "clip":
        settings |= {"clipping": policy.clipping, "clipping.stability": policy.clip_stability}
    if config.samples_per_owner:
        settings["samples-per-owner"] = config.samples_per_owner
    if config.quantile:
        settings["clipping.quantile-share"] = config.quantile_share
    for query in RUN_QUERIES.values():
        settings |= query.node_settings(config)
    if config.data_root:
        settings["data-root"] = str(Path(config.data_root).expanduser().resolve())
    if policy.trust == SECURE:
        sums = policy.sums
        settings |= {"trust": SECURE, "trust.min-honest": sums.min_honest, "trust.min-cohort": sums.min_cohort}
        settings["budget-local-mu"] = policy.budget.worst_case.mu
    if experiment.method.local_steps:
        settings["learning-rate"] = experiment.values.learning_rate
        settings["feature-bound"] = config.feature_bound
    return settings


def ledger_line(client: str, ledger: LedgerSummary) -> str:
    """Return a node's ledger in one line; a run reserves its whole mu when it opens, however far it gets."""
    releases = sum(session.releases for session in ledger.sessions)
    spent, guarantee = f"mu {_of_budget(ledger.spent.assumed, ledger.budget.assumed)} spent", ledger_guarantee(ledger)
    if guarantee.loss.conditional:
        spent += f", {_of_budget(guarantee.loss.worst_case, ledger.budget.worst_case)} in the worst case"
    return f"  ledger of {client}: {releases} releases, {spent}: {guarantee.sentence}"


def _of_budget(spent: Profile, budget: Profile) -> str:
    return f"{rounded_up(spent.mu)}{added_words(spent)} of {rounded_up(budget.mu)}"


def record_line(helper: str, sets: int) -> str:
    """Return a helper's record in one line."""
    return f"  record of {helper}: {sets} sums opened"


@dataclass(frozen=True)
class Demonstrated:
    """Result of a demonstration."""

    outcome: Outcome  # the run's ``result.json``
    ledgers: dict[str, LedgerSummary]  # by node
    opened: dict[str, int]  # sums opened, by helper


def run_demo(config: RunConfig, folder: Path, *, timeout_s: float, on_line: Callable[[str], None]) -> Demonstrated:
    """Deploy a node for each client of a run configuration, and its helpers, and complete the run over them.

    Out-dir and run-name of ``config`` give ``folder``. Raise if a ledger has fewer releases than the server aggregated,
    or a helper's record fewer sums than there were rounds.
    """
    experiment = prepare(config)
    settings = {f"node-{client}": node_settings(experiment, client) for client in range(config.num_clients)}
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with deployment(folder, timeout_s=timeout_s, on_line=on_line, environment=environment) as deployed:
        helpers = config.summing.helpers if config.trust_model == SECURE else 0
        deployed.add_nodes(settings, [f"helper-{number}" for number in range(helpers)])
        for name in (*deployed.helpers, *deployed.nodes):
            deployed.start_node(name)
        _submit(deployed, config, folder / FAILURE_NAME)
    return _demonstrated(deployed, Outcome.read(folder))


def _submit(deployed: Deployment, config: RunConfig, failure: Path) -> None:
    """Complete a run; one that fails is refused with the reason that it left."""
    try:
        deployed.submit(spelled_out(config.to_mapping(), run_keys()))
    except LaunchError as error:
        reason = f"The run failed: {json.loads(failure.read_text())['reason']}" if failure.exists() else error.reason
        raise LaunchError(reason, error.log) from error


def _demonstrated(deployed: Deployment, outcome: Outcome) -> Demonstrated:
    """Return a run with its nodes' and helpers' records, which must have what the server aggregated."""
    ledgers = {name: read_ledger(NodeConfig.read(files.config).ledger) for name, files in deployed.nodes.items()}
    recorded = {name: sum(session.releases for session in ledger.sessions) for name, ledger in ledgers.items()}
    for name, statement in (outcome.clients or {}).items():
        if recorded[name] < statement["releases"]:
            raise LedgerError(
                f"Expected {statement['releases']} releases in {name}'s ledger, got {recorded[name]}.", kind="mismatch"
            )
    if sum(recorded.values()) < outcome.aggregated:
        raise LedgerError(
            f"Expected {outcome.aggregated} releases in the ledgers, got {sum(recorded.values())}.", kind="mismatch"
        )
    helpers = {name: HelperConfig.read(files.config) for name, files in deployed.helpers.items()}
    opened = {name: SQLiteOpeningRecord(helper.record).sets for name, helper in helpers.items()}
    for name, sets in opened.items():
        if sets < outcome.rounds:
            raise OpeningRecordError(f"Expected {outcome.rounds} sums in {name}'s record, got {sets}.", kind="mismatch")
    return Demonstrated(outcome, ledgers, opened)


def demo_config(overrides: Mapping[str, Scalar], out: Path, name: str) -> RunConfig:
    """Return the demonstration's run configuration with overrides; its files go to ``out / name``."""
    of_sums = _OF_SUMS if overrides.get("trust") == SECURE else {}
    given = {**DEMO_SETTINGS, **of_sums, **overrides, "out-dir": str(out), "run-name": name}
    if "num-clients" in overrides and "clients-per-round" not in overrides:
        given["clients-per-round"] = overrides["num-clients"]
    if "batch-size" not in overrides and not METHODS[str(given.get("strategy", "mu2"))].keys & {"batch-size"}:
        del given["batch-size"]
    config = RunConfig.from_mapping(given)
    # Clients' samples are no secret here; a server of others has to be told the rounds.
    return config if config.num_rounds else replace(config, num_rounds=prepare(config).num_rounds)
