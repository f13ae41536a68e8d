"""``murmurfl helper``: open sums of masked releases, by a roster and a record of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .node_command import Insecure, NodeKey, RootCertificates, SuperLink
from .run_options import Verbose
from .serving import (
    Checked,
    CheckedAsJson,
    HealthAddress,
    LogDetails,
    LogJSON,
    MetricsAddress,
    Serving,
    check_helper_and_end,
    refuse_without_check,
)


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
    serving = Serving(log_json, log_details, verbose)
    serving.start_log(watched=check)
    with serving.failing():
        from ..nodes.connections.connection import Connection
        from ..nodes.helper_config import HelperConfig
        from ..nodes.preflight import Given
        from ..nodes.supernode import run_helper
        from ..nodes.taken_runs import TakenRuns
        from ..nodes.watching.health import Addresses, watched

        refuse_without_check(check=check, as_json=as_json)
        if check:
            given = Given(superlink, root_certificates, auth_private_key, insecure)
            check_helper_and_end(config, given, as_json=as_json)
        else:
            settings, runs = HelperConfig.read(config, runs_kept=True), TakenRuns.read(config)
            reached = Connection.read(config, superlink, root_certificates, auth_private_key, insecure)
            journal, addresses = serving.journal(), Addresses(health_address, metrics_address)
            with watched("helper", journal, addresses, certificates=reached.root_certificates):
                run_helper(settings, reached, journal, runs)
