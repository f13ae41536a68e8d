"""Run a configuration on an engine; each gives the same model for the same seed.

The one place where engines are named: what carries a run is imported by the function that starts it.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...privacy.errors import ConfigurationError
from ...privacy.setting import spelled_out
from ..runs.experiment import prepare
from ..runs.outcome import RESULT_NAME
from ..runs.progress import Progress, participant_names
from ..runs.result import RunResult
from ..runs.training_run import run_experiment
from ..settings.layers import environment_for
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys
from .cohort import DEFAULT_ROW_CACHE_MIB, CohortClients
from .device.backend import checked_device
from .pool import checked_workers, opened_pool

ENGINES = ("cohort", "inprocess", "ray")


def run_document(config: RunConfig, engine: str) -> dict[str, Any]:
    """Run a configuration on an engine; return its result document as plain values.

    Raises
    ------
    MurmurflError
        If the engine is unknown, the configuration impossible, or the run failed.
    """
    if engine == "cohort":
        return run_cohort(config).outcome.document()
    if engine == "inprocess":
        return run_in_process(config).outcome.document()
    if engine == "ray":
        return run_on_ray(config)
    raise ConfigurationError(
        f"Expected engine one of {', '.join(ENGINES)}, got {engine!r}.",
        kind="unknown-name",
        setting="engine",
        got=engine,
    )


def run_in_process(
    config: RunConfig, *, on_progress: Callable[[Progress], None] | None = None, rehearsed: bool = False
) -> RunResult:
    """Run a configuration on the in-process grid, without a checkpoint.

    Parameters, result and errors are those of :func:`~murmurfl.app.runs.training_run.run_experiment`.
    """
    from ..client_app import app
    from .inprocess import InProcessGrid

    prepare(config)
    grid = InProcessGrid(app, num_nodes(config), config.to_mapping())
    return run_experiment(grid, config, on_progress=on_progress, engine="inprocess", rehearsed=rehearsed)


def run_cohort(
    config: RunConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    row_cache_mib: float = DEFAULT_ROW_CACHE_MIB,
    workers: int | None = None,
    ray_address: str = "",
    say: Callable[[str], None] | None = None,
    device: str = "",
    rehearsed: bool = False,
) -> RunResult:
    """Run a configuration on the cohort engine, in this process or spread over several.

    Parameters
    ----------
    on_progress : callable, optional
        Called after every round.
    row_cache_mib : float
        As for :class:`~murmurfl.app.engines.cohort.CohortClients`, of all processes together.
    workers : int, optional
        Number of processes over which the clients are spread; default this one. The model is the same to the last bit.
    ray_address : str
        A Ray cluster for the workers, ``host:port``, ``auto`` or ``ray://host:port``; default this computer. Its nodes
        have murmurfl and get the data from here. The default of ``workers`` is its number of cores.
    say : callable, optional
        Told what is waited for, in a sentence; default Flower's log.
    device : str
        Computes gradients, clipping, grid and noise: ``cuda`` or ``cuda:1`` for a GPU, ``torch-cpu`` for the same path
        on PyTorch's CPU backend, in tests; default NumPy. Noise of a device has other bits and the same law.
    rehearsed : bool
        As for :func:`~murmurfl.app.runs.training_run.run_experiment`.

    Returns
    -------
    RunResult
        Without a checkpoint.

    Raises
    ------
    MurmurflError
        As :func:`~murmurfl.app.runs.training_run.run_experiment`.
    ConfigurationError
        If there is no such cluster or device, or the device cannot compute this configuration; nothing was started.
    WorkerError
        If a worker does not start, or is gone; there is no result.
    """
    checked_workers(workers, ray_address=ray_address)
    checked_device(device, "cohort", workers, ray_address)
    experiment = prepare(config)
    options: dict[str, Any] = {"on_progress": on_progress, "engine": "cohort", "rehearsed": rehearsed}
    if device:
        from .device.device_block import clients_on

        clients = clients_on(experiment, device)
        return replace(run_experiment(clients, config, **options), device=device)
    if not ray_address and (workers or 1) == 1:
        clients = CohortClients(experiment, row_cache_mib=row_cache_mib)
        return run_experiment(clients, config, **options)
    experiment.check_rounds()  # refused before anything is started
    tell = say or logging.getLogger("flwr").info
    spread = opened_pool(
        workers,
        ray_address,
        most=config.num_clients,
        of="clients",
        say=tell,
        data_bytes=experiment.data.train_features.nbytes + experiment.data.test_features.nbytes,
    )
    from .workers import WorkerClients

    with spread as pool:
        clients = WorkerClients(experiment, pool, row_cache_mib=row_cache_mib)
        return run_experiment(clients, config, **options)


def run_on_ray(config: RunConfig, *, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run a configuration through ``flwr run`` on Ray in a scratch folder; return its result document.

    Raises
    ------
    LaunchError
        If the run did not complete.
    """
    from .superlink import run_flower_app

    with tempfile.TemporaryDirectory() as folder:
        run_config = {**ray_overrides(config), "out-dir": folder, "run-name": "run"}
        run_flower_app(
            app_folder(),
            run_config=run_config,
            num_supernodes=num_nodes(config),
            timeout_s=timeout_s,
            environment=ray_environment(config),
            on_line=lambda line: None,  # noqa: ARG005 - nobody reads along
        )
        return json.loads((Path(folder) / "run" / RESULT_NAME).read_text())


def num_nodes(config: RunConfig) -> int:
    """Nodes on an engine with messages: one for each client and, under secure aggregation, each helper."""
    return len(participant_names(config))


def ray_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that Ray's processes need for a run of this configuration."""
    from ..data.features.learnt import FOLDER, WEIGHTS_VARIABLE

    offline = {"HF_HUB_OFFLINE": "1"}  # partitions are made here, without the hub
    return {**offline, WEIGHTS_VARIABLE: str(FOLDER), **environment_for(config)}  # a bundle has no weights


def ray_overrides(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return the configuration as overrides, with absolute paths: Ray's workers have other working directories."""
    root = config.data_root or os.environ.get("MURMURFL_DATA", "")
    root = str(Path(root).expanduser().resolve()) if root else ""
    settled = {**config.to_mapping(), "data-root": root, "features": registry("features").located(config.features)}
    return spelled_out(settled, run_keys())


def app_folder() -> Path:
    """Return the checkout that this package runs from, which ``flwr run`` needs; refused without one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "pyproject.toml").is_file():
        raise ConfigurationError(
            f"Expected a checkout of murmurfl around {folder}, got none: Ray runs need the app's pyproject.toml; "
            "clone the repository, or use --engine inprocess.",
            kind="not-found",
        )
    return folder
