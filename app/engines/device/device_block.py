"""Arithmetic of a block of clients on a device (:class:`~murmurfl.privacy.release.privatizer_block.BlockArithmetic`).

Counts are rows of one int64 tensor, which the release rule adds and subtracts like NumPy arrays. A round returns one
sum of releases from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....clients.private_client import PrivateClient
from ....privacy.errors import ConfigurationError, check_installed
from ....privacy.ledger.ledger_records import MemoryLedger, StreamBlock
from ....privacy.release.clipping import StackedContributions
from ....privacy.release.prefix_sums import ReleaseRule
from ...runs.experiment import Experiment
from ..cohort import CohortClients
from .backend import CUDA, TORCH_CPU, check_device_name, torch
from .device_gradients import DeviceContributions, DeviceShards, clipped_counts, gradients_on
from .device_noise import DeviceNoise, RowTable, check_known_answers, check_mechanism_on_device

_SHARE_OF_MEMORY = 0.25
_CPU_BYTES = 256 << 20
_CPU_VALUES = 1 << 22
_BYTES_A_VALUE = 64
"""Work memory for a value of a block's contributions: counts, noise and its words, of 8 bytes each, and spare room."""


class DeviceArithmetic:
    """Computes all values of a block's releases, for simulations only: the noise is of quality ``fast``.

    With ``own_rows`` each client's counts own their memory: remembering a lost release does not keep all others.
    """

    def __init__(self, rule: ReleaseRule, device: torch.device, rows: RowTable, *, own_rows: bool = False) -> None:
        self._rule = rule
        self._noise = DeviceNoise(rule.noise.plan, rule.noise.num_parameters, device, rows)
        self._own_rows = own_rows

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> Any:
        """Return the clipped contributions with added and removed noise.

        These are int64 counts of shape (d,) for each client, as rows of one tensor or as separate tensors.
        """
        if not isinstance(contributions, DeviceContributions):
            raise ConfigurationError(
                f"Expected contributions on the device, got {type(contributions).__name__}: a model computes them "
                "there only if its gradients are on the device.",
                kind="unsupported",
            )
        policy, noise = self._rule.policy, self._rule.noise
        counts = clipped_counts(contributions, policy.bound, noise.plan.grid, policy.rows_per_release)
        self._noise.add_to(counts, (streams.release + 1).tolist(), keys, nonces, streams.nonces)
        for row, nonce in enumerate(nonces):
            streams.nonces[row] = noise.nonces_after(streams.nonces[row], nonce)
        return [row.clone() for row in counts] if self._own_rows else counts

    def total(self, counts: Sequence[torch.Tensor], places: Sequence[int]) -> NDArray[np.int64]:
        """Return the sum of some clients' counts, shape (d,), on this side."""
        return torch.stack([counts[place] for place in places]).sum(dim=0).cpu().numpy()

    def sent(self, counts: torch.Tensor) -> NDArray[np.int64]:
        """One client's counts on this side, for a server that wants every release by itself."""
        return counts.cpu().numpy()


class DeviceBlocks:
    """Makes the arithmetic of a block from its release rule.

    ``limit_bytes`` is the most memory for kept normals, by default a quarter of a GPU's free memory.
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


def open_device(name: str) -> torch.device:
    """Return the device of a name, once its integers have passed a check.

    Refused if PyTorch or the device is missing.
    """
    check_device_name(name)
    check_installed("torch", "torch", f"device {name!r}")
    if name == TORCH_CPU:
        device = torch.device("cpu")
    else:
        _check_cuda(name)
        device = torch.device(name if ":" in name else f"{name}:0")
    check_known_answers(device)
    return device


def _check_cuda(name: str) -> None:
    built = f"PyTorch {torch.__version__}" + (" with CUDA" if torch.version.cuda else " without CUDA")
    other = f"leave the device empty to compute with NumPy, or name {TORCH_CPU!r} to try this path without a GPU"
    if not torch.cuda.is_available():
        cure = "see that its driver is installed" if torch.version.cuda else "install a build of PyTorch with CUDA"
        raise ConfigurationError(
            f"Expected a GPU for device {name!r}, got {built}, which finds none: {cure}, {other}.",
            kind="not-found",
            setting="device",
        )
    count, (_, _, number) = torch.cuda.device_count(), name.partition(":")
    if number and int(number) >= count:
        raise ConfigurationError(
            f"Expected device {CUDA + ':0'!r} to {CUDA}:{count - 1}, got {name!r}: {built} finds {count}; {other}.",
            kind="not-found",
            setting="device",
            got=name,
        )


def clients_on(experiment: Experiment, device: str) -> CohortClients:
    """Return an experiment's clients, with gradients, clipping, grid and noise on a device.

    Refused before anything starts.

    For simulations only: the noise is of quality ``fast``.
    """
    check_on_device(experiment)
    opened = open_device(device)
    gradients = gradients_on(experiment.model, opened)
    samples = gradients.samples(experiment.data.train_features, experiment.data.train_labels)
    model: Any = gradients
    shards: Any = DeviceShards(experiment.shards, samples)
    clients = CohortClients(replace(experiment, model=model, shards=shards))
    blocks = DeviceBlocks(opened, own_rows=experiment.config.lost_replies > 0)
    clients.cohort.arithmetic, clients.cohort.block_values = blocks, blocks.block_values
    return clients


_WITHOUT = "or leave the device empty"


def check_on_device(experiment: Experiment) -> None:
    """Raise if a device cannot compute the experiment."""
    config = experiment.config
    # Policies follow from the number of samples: one client of each is enough.
    of_each_size = {size: client for client, size in enumerate(experiment.sizes)}.values()
    policies = [experiment.policy(client) for client in of_each_size]
    if config.noise_quality != "fast" and any(policy.adds_noise for policy in policies):
        raise ConfigurationError(
            f"Expected noise-quality = 'fast' on a device, got {config.noise_quality!r}: exact normals need float64's "
            "own logarithm, of which backends round the last digit each in its way. Set noise-quality=fast (for "
            f"simulations, no guarantee), {_WITHOUT}.",
            kind="conflict",
            setting="noise-quality",
            got=config.noise_quality,
        )
    for query in experiment.queries:
        raise ConfigurationError(
            "Expected a run whose clients release gradients alone on a device, got one with "
            f"{query.off.partition('=')[0]}: a release beside the training is made on the processor. Set {query.off}, "
            f"{_WITHOUT}.",
            kind="conflict",
            setting="device",
        )
    if config.samples_per_owner:
        raise ConfigurationError(
            "Expected samples-per-owner = 0 on a device, got "
            f"{config.samples_per_owner}: owners are computed on the processor. Set samples-per-owner=0, {_WITHOUT}.",
            kind="conflict",
            setting="samples-per-owner",
            got=config.samples_per_owner,
        )
    if not _asked_together(type(experiment.client(0, MemoryLedger()))):
        raise ConfigurationError(
            "Expected a strategy whose clients release weighted gradients of the query points on a device, such as "
            f"mu2, trusted-mu2 or noisy-sgd, got {config.strategy!r}: its clients compute by themselves. Choose "
            f"another, {_WITHOUT}.",
            kind="conflict",
            setting="strategy",
            got=config.strategy,
        )
    for policy in policies:
        if policy.sums_samples or not policy.clips_samples or policy.bound.moments is not None:
            raise ConfigurationError(
                "Expected clients that release the mean of a batch of clipped gradients on a device, got "
                f"batch_selection {policy.batch_selection!r} and clip-unit {policy.clip_unit!r}: sums over all samples "
                f"and whole updates are computed on the processor. Choose another strategy, {_WITHOUT}.",
                kind="conflict",
                setting="device",
            )
    for plan in experiment.plans():
        if plan.noise_std:
            check_mechanism_on_device(plan.mechanism)


def _asked_together(client: type[PrivateClient]) -> bool:
    """Return True if clients of a kind contribute weighted gradients, as the model computes them."""
    plain = client.contribution is PrivateClient.contribution and client.release is PrivateClient.release
    together: Any = client.together
    return plain and together.__func__ is PrivateClient.__dict__["together"].__func__
