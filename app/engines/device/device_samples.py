"""Training samples that are on a device once, and machines' batches that are picked there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from ...data.task import Shard

if TYPE_CHECKING:
    import torch
else:
    from .late_torch import torch


@dataclass(frozen=True)
class DeviceBatch:
    """Samples of several machines, one after the other."""

    features: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class DeviceSamples:
    """All training samples of a run."""

    features: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, features: NDArray[Any], labels: NDArray[Any], device: torch.device) -> DeviceSamples:
        """Samples taken to a device."""
        return cls(torch.tensor(np.asarray(features), device=device), torch.tensor(np.asarray(labels), device=device))

    def batch(self, places: NDArray[np.int64]) -> DeviceBatch:
        """Some samples, by their places; only these numbers travel."""
        chosen = torch.from_numpy(places).to(self.features.device)
        return DeviceBatch(self.features.index_select(0, chosen), self.labels.index_select(0, chosen))


class DeviceShard:
    """One machine's samples, in the order it uses them; batches of several machines are made on the device.

    Parameters
    ----------
    samples : DeviceSamples
        Those of the shard's data set.
    """

    def __init__(self, shard: Shard, samples: DeviceSamples) -> None:
        self._shard, self._samples = shard, samples

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, samples: slice) -> DeviceBatch:
        return self._samples.batch(self._shard.places(samples))

    @classmethod
    def stack(cls, parts: Sequence[tuple[DeviceShard, slice]]) -> DeviceBatch:
        """One batch of several machines' samples."""
        places = np.concatenate([shard._shard.places(samples) for shard, samples in parts])
        return parts[0][0]._samples.batch(places)


class DeviceShards(Sequence[DeviceShard]):
    """The samples of all machines, made when they are looked at."""

    def __init__(self, shards: Sequence[Shard], samples: DeviceSamples) -> None:
        self._shards, self._samples = shards, samples

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, machine: int) -> DeviceShard: ...
    @overload
    def __getitem__(self, machine: slice) -> list[DeviceShard]: ...
    def __getitem__(self, machine: int | slice) -> DeviceShard | list[DeviceShard]:
        chosen = self._shards[machine]
        if isinstance(chosen, Shard):
            return DeviceShard(chosen, self._samples)
        return [DeviceShard(shard, self._samples) for shard in chosen]
