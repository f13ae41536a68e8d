"""The arithmetic of a block of machines on a device (:class:`~murmurfl.privacy.machine.machine_block.BlockArithmetic`).

Counts are rows of one int64 tensor, which the rule of releases adds and subtracts as it does arrays of NumPy; of a
round's releases one sum comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....privacy import ConfigurationError
from ....privacy.ledger.ledger_block import StreamBlock
from ....privacy.machine.clipping import StackedContributions
from ....privacy.machine.prefix_sums import ReleaseRule
from .device_counts import DeviceContributions, clipped_counts
from .device_noise import DeviceNoise, RowTable

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch

from dataclasses import replace

from ...runs.experiment import Experiment
from ..cohort import CohortMachines
from .backend import open_device
from .device_gradients import gradients_on
from .device_samples import DeviceShards
from .support import check_on_device

_SHARE_OF_MEMORY = 0.25
_CPU_BYTES = 256 << 20
_CPU_VALUES = 1 << 22
_BYTES_A_VALUE = 64
"""Work memory for a value of a block's contributions: counts, noise and its words, each of 8 bytes, and room."""


class DeviceArithmetic:
    """What is computed of all values of the releases of a block.

    Parameters
    ----------
    rows : RowTable
        Where normals are kept until a later release has taken them out.
    own_rows : bool
        Whether each machine's counts are memory of their own: then what a machine remembers of a lost release does not
        hold on to those of all others.

    Notes
    -----
    For simulations only: the noise is of quality ``fast``.
    """

    def __init__(self, rule: ReleaseRule, device: torch.device, rows: RowTable, *, own_rows: bool = False) -> None:
        self._rule = rule
        self._noise = DeviceNoise(rule.noise.plan, rule.noise.num_parameters, device, rows)
        self._own_rows = own_rows

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> Any:
        """The clipped contributions with what the noise adds and removes: int64 counts of shape (d,), a machine each,
        as rows of one tensor or as tensors of their own.
        """
        if not isinstance(contributions, DeviceContributions):
            raise ConfigurationError(
                f"Expected contributions on the device, got {type(contributions).__name__}: a model computes them "
                "there only if its gradients are on the device."
            )
        policy, noise = self._rule.policy, self._rule.noise
        counts = clipped_counts(contributions, policy.bound, noise.plan.grid, policy.rows_per_release)
        self._noise.add_to(counts, (streams.release + 1).tolist(), keys, nonces, streams.nonces)
        for row, nonce in enumerate(nonces):
            streams.nonces[row] = noise.nonces_after(streams.nonces[row], nonce)
        return [row.clone() for row in counts] if self._own_rows else counts

    def total(self, counts: Sequence[torch.Tensor], places: Sequence[int]) -> NDArray[np.int64]:
        """The sum of some machines' counts, shape (d,): all that comes back of a round."""
        return torch.stack([counts[place] for place in places]).sum(dim=0).cpu().numpy()

    def sent(self, counts: torch.Tensor) -> NDArray[np.int64]:
        """One machine's counts, where a server wants every release by itself."""
        return counts.cpu().numpy()


class DeviceBlocks:
    """A device as a run's machines use it: given the rule of a block, its arithmetic.

    Parameters
    ----------
    limit_bytes : int, optional
        The most memory for normals that are kept; by default a quarter of what a GPU has free.
    own_rows : bool
        Whether releases may be lost (:class:`DeviceArithmetic`).
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None, *, own_rows: bool = False) -> None:
        self.device = device
        self.block_values = _CPU_VALUES if device.type == "cpu" else int(_room(device)) // _BYTES_A_VALUE
        self._own_rows = own_rows
        self._limit = _room(device) if limit_bytes is None else limit_bytes
        self._rows: dict[int, RowTable] = {}

    def __call__(self, rule: ReleaseRule) -> DeviceArithmetic:
        size = rule.noise.num_parameters
        if size not in self._rows:
            self._rows[size] = RowTable(size, self._limit // (4 * size), self.device)
        return DeviceArithmetic(rule, self.device, self._rows[size], own_rows=self._own_rows)


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(_SHARE_OF_MEMORY * free)


def machines_on(experiment: Experiment, device: str) -> CohortMachines:
    """An experiment's machines, whose gradients, clipping, grid and noise are computed on a device.

    Parameters
    ----------
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
