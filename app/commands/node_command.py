"""``murmurfl node``, ``helper``, ``server`` and ``deploy-demo``: what serves until stopped, and how it reports."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy.errors import ConfigurationError, MurmurflError
from .run_options import Assignments, ConfigFile, Verbose, settings_of
from .terminal import FAILED, INTERRUPTED, fail, failing_clearly, say, system_error

if TYPE_CHECKING:
    from ..fleet.preflight import Preflight
    from ..nodes.journal import Journal


HealthAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /health there; a port alone: for this computer only.")
]
MetricsAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /metrics there, for Prometheus; a port alone: as above.")
]


LogJSON = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]
LogDetails = Annotated[
    bool,
    typer.Option("--log-details", help="Log what may depend on this client's data, too: such a log must stay here."),
]


@dataclass(frozen=True)
class Serving:
    """Output of a long-running process for its operator; fields as the options."""

    log_json: bool = False
    log_details: bool = False
    verbose: bool = False

    def start_log(self, *, watched: bool = False, sees_samples: bool = True) -> None:
        """Log as a node does from here on, to standard error; with details if somebody looks on (``watched``)."""
        from ..nodes.journal import LogSettings, start_log

        details = self.log_details or watched
        start_log(LogSettings(self.log_json, self.verbose, details=details, sees_samples=sees_samples))

    def journal(self) -> Journal:
        """Return a journal whose entries are in the log."""
        from ..nodes.journal import EntryWriter, Journal

        journal = Journal()
        journal.listen(EntryWriter())
        return journal

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Like :func:`~.terminal.failing_clearly`; a log for programs ends with the reason."""
        if not self.log_json:
            with failing_clearly():
                yield
            return
        logger = logging.getLogger(__name__)
        try:
            yield
        except MurmurflError as error:
            logger.critical("%s", error)
            sys.exit(FAILED)
        except OSError as error:
            logger.critical("%s", system_error(error))
            sys.exit(FAILED)
        except KeyboardInterrupt:
            logger.critical("Interrupted.")
            sys.exit(INTERRUPTED)


Checked = Annotated[
    bool,
    typer.Option(
        "--check", help="Try everything that can be tried before the start, release nothing, and end: a line a check."
    ),
]
RunEvery = Annotated[
    float | None,
    typer.Option(metavar="DAYS", help="With --check: how often a run begins; default as often as in the ledger."),
]
CheckedAsJson = Annotated[bool, typer.Option("--json", help="With --check: print one JSON document.")]


def refuse_without_check(*, check: bool, as_json: bool, run_every: float | None = None) -> None:
    """Raise if --json or --run-every comes without --check, or --run-every is no number of days above 0."""
    if not check and (as_json or run_every is not None):
        raise ConfigurationError(
            "Expected --json and --run-every with --check only, got one without it.", kind="conflict"
        )
    if run_every is not None and not 0 < run_every < float("inf"):
        raise ConfigurationError(
            f"Expected --run-every to be a number of days > 0, got {run_every!r}.",
            kind="out-of-range",
            setting="run-every",
            got=run_every,
        )


def say_checks_and_end(found: Preflight, *, as_json: bool) -> None:
    """Print the outcome of checks; exit code 1 if one failed."""
    failed = [check for check in found.checks if check.state == "failed"]
    # The reason why a node does not start reads as at a start.
    first = next((check for check in failed if check.name == "configuration"), None)
    if as_json:
        typer.echo(json.dumps(found.document(time.time()), indent=2, allow_nan=False))
    else:
        if found.description:
            say(found.description)
        for check in found.checks:
            say(f"{check.name:<14} {check.state:<10} {'See below.' if check is first else check.sentence}")
    if first is not None:
        fail(first.sentence)
    if failed:
        fail(f"Expected every check to pass, got failures of {', '.join(check.name for check in failed)}: see above.")


SuperLink = Annotated[str, typer.Option(help="The SuperLink's HOST:PORT.", show_default=False)]
RootCertificates = Annotated[Path | None, typer.Option(help="PEM file the SuperLink's certificate is checked against.")]
NodeKey = Annotated[Path | None, typer.Option(help="The node's own key, known to the SuperLink.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: for tests on one client.")]


def node(
    config: Annotated[Path, typer.Argument(help="The operator's node configuration (TOML); see docs/deployment.md.")],
    superlink: SuperLink = "",
    root_certificates: RootCertificates = None,
    auth_private_key: NodeKey = None,
    insecure: Insecure = False,
    check: Checked = False,
    run_every: RunEvery = None,
    as_json: CheckedAsJson = False,
    log_json: LogJSON = False,
    log_details: LogDetails = False,
    verbose: Verbose = False,
    health_address: HealthAddress = "",
    metrics_address: MetricsAddress = "",
) -> None:
    """Take part with this client's own data, policy and ledger; only code runs that is installed here."""
    take_part("node", **locals())


def helper(
    config: Annotated[Path, typer.Argument(help="The helper's configuration (TOML); see docs/deployment.md.")],
    superlink: SuperLink = "",
    root_certificates: RootCertificates = None,
    auth_private_key: NodeKey = None,
    insecure: Insecure = False,
    check: Checked = False,
    as_json: CheckedAsJson = False,
    log_json: LogJSON = False,
    log_details: LogDetails = False,
    verbose: Verbose = False,
    health_address: HealthAddress = "",
    metrics_address: MetricsAddress = "",
) -> None:
    """Help a server to sums of releases and to nothing smaller: it gets seeds of masks, never a release."""
    take_part("helper", **locals())


def take_part(
    kind: str,
    *,
    config: Path,
    superlink: str = "",
    root_certificates: Path | None = None,
    auth_private_key: Path | None = None,
    insecure: bool = False,
    check: bool = False,
    run_every: float | None = None,
    as_json: bool = False,
    log_json: bool = False,
    log_details: bool = False,
    verbose: bool = False,
    health_address: str = "",
    metrics_address: str = "",
) -> None:
    """Run a node or a helper, or check it; keywords are the commands' options."""
    serving = Serving(log_json, log_details, verbose)
    serving.start_log(watched=check, sees_samples=kind == "node")
    with serving.failing():
        from ..fleet.health import Addresses, watched
        from ..fleet.preflight import check_helper, check_node
        from ..nodes.connection import Connection
        from ..nodes.node_app import read_node
        from ..nodes.node_config import HelperConfig
        from ..nodes.run_admission import RunAdmissionPolicy
        from ..nodes.supernode import run_helper, run_node

        refuse_without_check(check=check, as_json=as_json, run_every=run_every)
        given = {
            "superlink": superlink,
            "root_certificates": root_certificates,
            "private_key": auth_private_key,
            "insecure": insecure,
        }
        if check:
            is_node = kind == "node"
            found = check_node(config, given, run_every_days=run_every) if is_node else check_helper(config, given)
            say_checks_and_end(found, as_json=as_json)
            return
        settings = (read_node if kind == "node" else HelperConfig.read)(config, runs_kept=True)
        runs, reached, journal = RunAdmissionPolicy.read(config), Connection.needed(config, given), serving.journal()
        ledger = None if isinstance(settings, HelperConfig) else Path(settings.ledger)
        with watched(kind, journal, Addresses(health_address, metrics_address), ledger, reached.root_certificates):
            if isinstance(settings, HelperConfig):
                run_helper(settings, reached, journal, runs)
            else:
                run_node(settings, reached, journal, runs)


def deploy_demo(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    out: Annotated[Path, typer.Option(help="Folder for the run's own folder.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the run's folder; default from the time.")] = None,
    timeout: Annotated[float, typer.Option(help="Longest time the demonstration may take, in seconds.")] = 900.0,
    trust: Annotated[
        str, typer.Option(help="As --set trust=...: secure-aggregation starts helpers too.", show_default=False)
    ] = "",
    verbose: Verbose = False,
) -> None:
    """Run a private training over real nodes on this computer: TLS, node keys, a ledger each."""
    from ..fleet.deployment import demo_config, ledger_line, record_line, run_demo
    from ..runs.result import folder_for
    from ..runs.run_guarantees import expected_guarantee
    from ..runs.run_summary import summary_lines
    from ..settings.run_config import SECURE
    from .run_command import RunDisplay

    def show(line: str) -> None:
        words = line.removeprefix("INFO :").strip()
        if words.startswith("Waiting for clients") and not verbose:
            display.message(words)
        else:
            display.log_line(line, verbose=verbose)

    with failing_clearly():
        with folder_for(out.resolve(), name, "deploy-demo") as folder:
            if name and folder.exists():
                fail(f"Expected a new run folder, got {folder}; choose another --name.")
            settings = settings_of(config_file, [*(assignments or []), *([f"trust={trust}"] if trust else [])])
            config = demo_config(settings, out.resolve(), name or folder.name)
            helpers = f", and {config.summing.helpers} helpers with records" if config.trust_model == SECURE else ""
            say(f"Starting a SuperLink with TLS and {config.num_clients} nodes with keys and ledgers{helpers} ...")
            with RunDisplay(expected_guarantee(config, deployed=True)) as display:
                demonstrated = run_demo(config, folder, timeout_s=timeout, on_line=show)
        typer.echo("")
        lines = [ledger_line(client, ledger) for client, ledger in demonstrated.ledgers.items()]
        lines += [record_line(helper, sets) for helper, sets in demonstrated.opened.items()]
        for line in [*summary_lines(demonstrated.outcome, folder), "", *lines]:
            say(line)


Figures = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Keeps the counts of rounds when this ends; default: none does.")
]
Owners = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Who may submit runs and register nodes (docs/deployment.md); default nobody."),
]


def server(
    context: typer.Context,
    owners: Owners = None,
    health_address: HealthAddress = "",
    metrics_address: MetricsAddress = "",
    figures: Figures = None,
    log_json: LogJSON = False,
    verbose: Verbose = False,
) -> None:
    """Run Flower's SuperLink: takes its options too, starts it again when it ends, shows how it is."""
    # Details, because a server's log contains no data of a client.
    serving = Serving(log_json, log_details=True, verbose=verbose)
    serving.start_log(sees_samples=False)
    with serving.failing():
        from ..fleet.health import Addresses
        from ..fleet.servers.watched_server import run_server

        addresses = Addresses(health_address, metrics_address)
        run_server(context.args, addresses, figures, serving.journal(), owners)
