"""The commands for real nodes: ``murmurfl node``, ``murmurfl helper`` and ``murmurfl deploy-demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .run_options import Assignments, ConfigFile, Verbose, settings_of
from .serving import (
    Checked,
    CheckedAsJson,
    HealthAddress,
    LogDetails,
    LogJSON,
    MetricsAddress,
    RunEvery,
    Serving,
    refuse_without_check,
    say_checks_and_end,
)
from .terminal import fail, failing_clearly, say

SuperLink = Annotated[str, typer.Option(help="The SuperLink's HOST:PORT.", show_default=False)]
RootCertificates = Annotated[Path | None, typer.Option(help="PEM file the SuperLink's certificate is checked against.")]
NodeKey = Annotated[Path | None, typer.Option(help="The node's own key, known to the SuperLink.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: for tests on one machine.")]


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
    """Take part with this machine's own data, policy and ledger; only code runs that is installed here."""
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
    take_part("helper", **locals(), run_every=None)


def take_part(
    kind: str,
    *,
    config: Path,
    superlink: str,
    root_certificates: Path | None,
    auth_private_key: Path | None,
    insecure: bool,
    check: bool,
    run_every: float | None,
    as_json: bool,
    log_json: bool,
    log_details: bool,
    verbose: bool,
    health_address: str,
    metrics_address: str,
) -> None:
    """Run a node or a helper, or check it; keywords are the commands' options."""
    serving = Serving(log_json, log_details, verbose)
    serving.start_log(watched=check)
    with serving.failing():
        from ..nodes.connection import Given
        from ..nodes.node_app import read_node
        from ..nodes.node_config import HelperConfig
        from ..nodes.preflight import check_helper, check_node
        from ..nodes.supernode import run_helper, run_node
        from ..nodes.taken_runs import TakenRuns
        from ..nodes.watching.health import Addresses, watched

        refuse_without_check(check=check, as_json=as_json, run_every=run_every)
        given = Given(superlink, root_certificates, auth_private_key, insecure)
        if check:
            is_node = kind == "node"
            found = check_node(config, given, run_every_days=run_every) if is_node else check_helper(config, given)
            say_checks_and_end(found, as_json=as_json)
            return
        settings = (read_node if kind == "node" else HelperConfig.read)(config, runs_kept=True)
        runs, reached, journal = TakenRuns.read(config), given.needed_connection(config), serving.journal()
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
    """Run a private training over real nodes on this machine: TLS, node keys, a ledger each."""
    from ..nodes.deployment import demo_config, ledger_line, record_line, run_demo
    from ..runs.run_files import folder_for
    from ..runs.run_guarantees import expected_guarantee
    from ..runs.run_summary import summary_lines
    from ..settings.trust_settings import SECURE
    from .display import RunDisplay

    def show(line: str) -> None:
        words = line.removeprefix("INFO :").strip()
        if words.startswith("Waiting for machines") and not verbose:
            display.message(words)
        else:
            display.log_line(line, verbose=verbose)

    with failing_clearly():
        with folder_for(out.resolve(), name, "deploy-demo") as folder:
            if name and folder.exists():
                fail(f"Expected a new run folder, got {folder}; choose another --name.")
            settings = settings_of(config_file, [*(assignments or []), *([f"trust={trust}"] if trust else [])])
            config = demo_config(settings, out.resolve(), name or folder.name)
            helpers = f", and {config.helpers} helpers with records" if config.trust_model == SECURE else ""
            say(f"Starting a SuperLink with TLS and {config.num_clients} nodes with keys and ledgers{helpers} ...")
            with RunDisplay(expected_guarantee(config, deployed=True)) as display:
                demonstrated = run_demo(config, folder, timeout_s=timeout, on_line=show)
        typer.echo("")
        lines = [ledger_line(machine, ledger) for machine, ledger in demonstrated.ledgers.items()]
        lines += [record_line(helper, sets) for helper, sets in demonstrated.opened.items()]
        for line in [*summary_lines(demonstrated.outcome, folder), "", *lines]:
            say(line)
