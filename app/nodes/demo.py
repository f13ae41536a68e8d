"""A whole deployment on this computer: a SuperLink with TLS and node keys, real nodes with ledgers, one run over them.

``murmurfl deploy-demo`` (``make deploy-demo``) shows it and the tests drive it; docs/deployment.md does the same on
several computers. Keys and certificates live in a scratch folder that goes with the deployment; node configurations,
ledgers and logs stay in the run's folder.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError, LedgerError, LedgerSummary, SQLiteLedger, read_ledger, rounded_up
from ...privacy.files import write_private
from ..config import RunConfig
from ..engines.loopback import LaunchError, executable
from ..engines.processes import interrupts_as_keyboard_interrupt
from ..engines.start import app_folder
from ..engines.superlink import CONNECTION_NAME, Launch
from ..engines.toml import Scalar, toml_document
from ..experiment import Experiment, prepare
from ..record import FAILURE_NAME, RESULT_NAME
from .certificates import ServerCertificates, make_node_key, make_server_certificates
from .config import NodeConfig, node_strategies
from .ledgers import ledger_guarantee

DEMO_SETTINGS: dict[str, Scalar] = {
    # Few, heavy rounds: a round over a network costs seconds, whatever is computed in it.
    "num-clients": 4,
    "clients-per-round": 4,
    "batch-size": 32,
    "round-timeout-s": 120.0,
    "node-deadline-s": 90.0,
}

_REGISTER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeFiles:
    """One node of a deployment.

    Parameters
    ----------
    config : Path
        The operator's file.
    log : Path
        What the node says.
    private_key : Path
        Registered with the SuperLink.
    """

    config: Path
    log: Path
    private_key: Path


class Deployment(Launch):
    """Real processes on the loopback interface; :func:`deployment` starts and stops one.

    Parameters
    ----------
    folder : Path
        Where node configurations, ledgers and logs go.
    timeout_s : float
        For everything but the stopping.
    on_line : callable
        Gets the lines of the runs' logs.
    """

    def __init__(self, folder: Path, timeout_s: float, on_line: Callable[[str], None]) -> None:
        super().__init__(app_folder(), time.monotonic() + timeout_s, timeout_s, on_line)
        self.folder = folder
        self.nodes: dict[str, NodeFiles] = {}
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self._certificates: ServerCertificates | None = None

    def prepare(self, overrides: str, environment: Mapping[str, str]) -> None:
        super().prepare(overrides, environment)
        self.environment["TMPDIR"] = str(self.scratch())  # what a killed process leaves behind goes with the rest

    @property
    def certificates(self) -> ServerCertificates:
        """The SuperLink's certificates, made when they are first needed."""
        if self._certificates is None:
            self._certificates = make_server_certificates(self.scratch())
        return self._certificates

    def superlink_options(self) -> list[str]:
        """TLS, node keys, and a database, so that a SuperLink that is started again knows its nodes and runs."""
        paths = self.certificates
        options = ["--ssl-ca-certfile", str(paths.authority), "--ssl-certfile", str(paths.certificate)]
        options += ["--ssl-keyfile", str(paths.key), "--enable-supernode-auth"]
        return [*options, "--database", str(self.scratch() / "superlink.db")]

    def connection(self) -> str:
        return f"root-certificates = {json.dumps(str(self.certificates.authority))}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(self.certificates.authority))

    def add_nodes(self, configs: Mapping[str, Mapping[str, Scalar]]) -> None:
        """Give each node its file, its ledger and its key, and register the keys with the SuperLink.

        Parameters
        ----------
        configs : mapping
            Each node's configuration by name, budget and delta in it, without its machine name and its ledger.
        """
        keys = self.scratch() / "keys"
        keys.mkdir(mode=0o700, exist_ok=True)
        registering = []
        for name, values in configs.items():
            folder = self.folder / "nodes" / name
            folder.mkdir(parents=True)
            files = NodeFiles(folder / "node.toml", folder / "node.log", keys / name)
            write_private(files.config, toml_document({"machine": name, "ledger": "ledger.sqlite", **values}))
            node = NodeConfig.read(files.config)
            SQLiteLedger.create(node.ledger, budget_mu=node.budget_mu, delta=node.delta, data=name)
            public = make_node_key(files.private_key)
            registering.append((name, self._flwr("supernode", "register", str(public), CONNECTION_NAME)))
            self.nodes[name] = files
        for name, process in registering:
            try:
                output, _ = process.communicate(timeout=_REGISTER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise LaunchError(f"The SuperLink did not take the key of node {name} in time.") from None
            if process.returncode:
                raise LaunchError(f"The SuperLink refused the key of node {name}.", output)

    def start_node(self, name: str, program: Sequence[str] = ()) -> subprocess.Popen[Any]:
        """Start a node, or start it again: ``murmurfl node``, or another program that takes its arguments."""
        files = self.nodes[name]
        program = program or (sys.executable, "-m", "murmurfl.app")
        command = [*program, "node", str(files.config), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--auth-private-key", str(files.private_key)]
        command += ["--root-certificates", str(self.certificates.authority)]
        with files.log.open("ab") as log:
            self.running[name] = self.start_process(command, stdout=log)
        return self.running[name]

    def submit(self, run_config: Mapping[str, Scalar], app_dir: Path | None = None) -> tuple[int, str]:
        """Run an app over the nodes, to its end; its id and status.

        Raises
        ------
        LaunchError
            If the run was refused or did not complete.
        """
        self.app_dir = self.app_dir if app_dir is None else app_dir
        (self.scratch() / "run-config.toml").write_text(toml_document(run_config), encoding="utf-8")
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
    """A SuperLink that answers; whatever is started in it is stopped when the block ends, however it ends.

    Parameters
    ----------
    folder : Path
        Where node configurations, ledgers and logs go.
    timeout_s : float
        For everything but the stopping, in seconds.
    on_line : callable
        Gets the lines of the runs' logs.
    environment : mapping, optional
        Further environment variables of all processes.

    Raises
    ------
    LaunchError
        If the SuperLink does not start, or something could not be stopped.
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


def node_settings(experiment: Experiment, machine: int) -> dict[str, Scalar]:
    """A node's configuration that agrees with a run configuration on data, model and policy.

    Raises
    ------
    ConfigurationError
        If a real node cannot be told so.
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
    settings: dict[str, Scalar] = {
        "strategy": config.strategy,
        "model": config.model,
        "task": config.task,
        "features": config.features,
        "partition": config.partition,
        "partition-seed": config.seed,
        "num-partitions": config.num_clients,
        "partition-id": machine,
        "clip-norm": policy.clip_norm,
        "batch-size": policy.batch_size,
        "max-participations": policy.max_participations,
        "passes": config.passes,
        "mu": policy.mu,
        "budget-mu": policy.mu,
        "delta": policy.delta,
        "mechanism": config.mechanism,
    }
    if config.data_root:
        settings["data-root"] = str(Path(config.data_root).expanduser().resolve())
    if experiment.method.local_steps:
        settings["learning-rate"] = experiment.values.learning_rate
        settings["feature-bound"] = config.feature_bound
    return settings


def ledger_line(machine: str, ledger: LedgerSummary) -> str:
    """What a node's ledger says, in one line: mu is reserved whole when a run opens, however far it gets."""
    releases = sum(session.releases for session in ledger.sessions)
    return (
        f"  ledger of {machine}: {releases} releases, mu {rounded_up(ledger.reserved_mu)} of "
        f"{rounded_up(ledger.budget_mu)} spent: {ledger_guarantee(ledger).sentence}"
    )


def run_demo(
    config: RunConfig, folder: Path, *, timeout_s: float, on_line: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, LedgerSummary]]:
    """Deploy one node for each machine of a run configuration and run it over them, to the end.

    Parameters
    ----------
    config : RunConfig
        With out-dir and run-name such that the run's files go to ``folder``.
    folder : Path
        The run's.
    timeout_s : float
        For everything but the stopping, in seconds.
    on_line : callable
        Gets the lines of the run's log.

    Returns
    -------
    tuple
        The run's ``result.json``, and what each node's ledger says.

    Raises
    ------
    MurmurflError
        If the deployment or the run failed, or a ledger knows of fewer releases than the server aggregated.
    """
    experiment = prepare(config)
    settings = {f"node-{machine}": node_settings(experiment, machine) for machine in range(config.num_clients)}
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with deployment(folder, timeout_s=timeout_s, on_line=on_line, environment=environment) as deployed:
        deployed.add_nodes(settings)
        for name in deployed.nodes:
            deployed.start_node(name)
        try:
            deployed.submit(config.to_mapping())
        except LaunchError as error:
            raise LaunchError(_reason(folder) or error.reason, error.log) from error
    document = json.loads((folder / RESULT_NAME).read_text())
    ledgers = {name: read_ledger(NodeConfig.read(files.config).ledger) for name, files in deployed.nodes.items()}
    recorded = {name: sum(session.releases for session in ledger.sessions) for name, ledger in ledgers.items()}
    for name, statement in document["machines"].items():
        if recorded[name] < statement["releases"]:
            raise LedgerError(f"Expected {statement['releases']} releases in {name}'s ledger, got {recorded[name]}.")
    if sum(recorded.values()) < document["aggregated"]:
        raise LedgerError(f"Expected {document['aggregated']} releases in the ledgers, got {sum(recorded.values())}.")
    return document, ledgers


def _reason(folder: Path) -> str:
    path = folder / FAILURE_NAME
    return f"The run failed: {json.loads(path.read_text())['reason']}" if path.exists() else ""


def demo_config(overrides: Mapping[str, Scalar], out: Path, name: str) -> RunConfig:
    """The demonstration's run configuration with overrides, its files in ``out / name``."""
    given = {**DEMO_SETTINGS, **overrides, "out-dir": str(out), "run-name": name}
    if "num-clients" in overrides and "clients-per-round" not in overrides:
        given["clients-per-round"] = overrides["num-clients"]
    return RunConfig.from_mapping(given)
