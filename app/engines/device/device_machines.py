"""The machines of the cohort engine with their arithmetic on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...runs.experiment import Experiment
from ..cohort import CohortMachines
from .backend import open_device
from .device_block import DeviceBlocks
from .device_gradients import gradients_on
from .device_samples import DeviceShards
from .support import check_on_device


def machines_on(experiment: Experiment, device: str) -> CohortMachines:
    """An experiment's machines, whose gradients, clipping, grid and noise are computed on a device.

    Parameters
    ----------
    experiment : Experiment
    device : str
        ``cuda``, ``cuda:1`` and so on, or ``torch-cpu``.

    Raises
    ------
    ConfigurationError
        If the device is not there, or cannot compute this experiment; nothing was started.

    Notes
    -----
    For simulations only: the noise is of quality ``fast``.
    """
    check_on_device(experiment)
    opened = open_device(device)
    gradients = gradients_on(experiment.model, opened)
    samples = gradients.samples(experiment.data.train_features, experiment.data.train_labels)
    model: Any = gradients
    shards: Any = DeviceShards(experiment.shards, samples)
    machines = CohortMachines(replace(experiment, model=model, shards=shards))
    blocks = DeviceBlocks(opened, own_rows=experiment.config.lost_replies > 0)
    machines.cohort.arithmetic, machines.cohort.block_values = blocks, blocks.block_values
    return machines
