"""A machine's samples as people have them: arrays, tensors, a PyTorch data set or loader. They are read as slices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..privacy import ConfigurationError
from .gradients import Samples
from .torch_values import as_tensor, first_axis, leaves, mapped, picked

_ADVICE = (
    "give (inputs, targets), two arrays or tensors with the samples along the first axis, or a data set of pairs "
    "(input, target)"
)


_TARGETS = ("label", "labels", "target", "targets")
"""What the target of an item that is a mapping is called."""


class TensorSamples:
    """Inputs and targets that are in memory.

    Parameters
    ----------
    inputs, targets : array, tensor, or tuples and mappings of them
        With the samples along the first axis.

    Raises
    ------
    ConfigurationError
        If they are not as many.
    """

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = mapped(inputs, as_tensor), mapped(targets, as_tensor)
        if any(part.ndim == 0 for part in leaves((self.inputs, self.targets))):
            raise ConfigurationError(f"Expected inputs and targets with a first axis, got a single number: {_ADVICE}.")
        self._length = first_axis((self.inputs, self.targets))
        self.nbytes = sum(part.nbytes for part in leaves((self.inputs, self.targets)))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, samples: slice, /) -> tuple[Any, Any]:
        return picked(self.inputs, samples), picked(self.targets, samples)


class DatasetSamples:
    """A data set whose items are an input and a target each, read when they are asked for.

    Parameters
    ----------
    items : sequence
        With a length, and an item for a number: a map-style data set, or a list.
    collate : callable
        Makes a batch of a list of items: a ``DataLoader``'s ``collate_fn``, or PyTorch's own.
    """

    def __init__(self, items: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.items = items
        self.collate = collate

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, samples: slice, /) -> tuple[Any, Any]:
        chosen = [self.items[i] for i in range(*samples.indices(len(self.items)))]
        try:
            return _pair(self.collate(chosen))
        except TypeError as error:  # what PyTorch says of it names types, and no values
            raise ConfigurationError(
                f"Expected items of tensors, arrays or numbers, got: {error}; {_ADVICE}."
            ) from error

    def in_memory(self) -> TensorSamples:
        """All items, read once: for simulations, which ask for them in every round."""
        return TensorSamples(*self[0 : len(self)])


def _pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets); of a mapping the entry that is called a label, and all others."""
    if isinstance(batch, Mapping):
        targets = [name for name in batch if name in _TARGETS]
        inputs = {name: part for name, part in batch.items() if name not in targets}
        if len(targets) == 1 and inputs:
            return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), batch[targets[0]]
        raise ConfigurationError(
            f"Expected items with one entry called {' or '.join(_TARGETS)} and inputs beside it, got a mapping with "
            f'{", ".join(map(str, batch))}: write [(row["img"], row["class"]) for row in data].'
        )
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise ConfigurationError(
            f"Expected items that are pairs (input, target), got {type(batch).__name__}: {_ADVICE}."
        )
    return batch[0], batch[1]


def torch_samples(found: Any, *, in_memory: bool) -> Samples:
    """What a project calls its samples, as a machine reads them.

    Parameters
    ----------
    found : pair of arrays or tensors, Dataset, DataLoader, list of pairs, or Samples
        Items are pairs, or mappings with a label. Of a loader the data set and the ``collate_fn`` are taken, not its
        batches. A ``Dataset`` is PyTorch's or one of the package ``datasets``. Anything else with a length that gives a
        batch for a slice is left as it is.
    in_memory : bool
        Whether items may be read at once. A real machine reads them one by one, because whether one can be read may
        depend on it.

    Raises
    ------
    ConfigurationError
        If it is none of these, or empty.

    Notes
    -----
    **Formal guarantees.** None of its own: reads, and releases nothing.
    """
    from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(found, DataLoader):
        found, collate = found.dataset, found.collate_fn
    if isinstance(found, IterableDataset):
        raise ConfigurationError(
            f"Expected samples with a length, got {type(found).__name__}, an iterable: a sample's number says how "
            f"often it was used; {_ADVICE}."
        )
    samples: Any = found
    if isinstance(found, tuple):
        if len(found) != 2:
            raise ConfigurationError(f"Expected a pair (inputs, targets), got {len(found)} parts: {_ADVICE}.")
        samples = TensorSamples(*found)
    elif isinstance(found, Dataset | list) or _of_datasets(found):
        samples = DatasetSamples(found, collate)
    elif not (hasattr(found, "__len__") and hasattr(found, "__getitem__")) or isinstance(found, Mapping | str | bytes):
        raise ConfigurationError(f"Expected samples, got {type(found).__name__}: {_ADVICE}.")
    if not len(samples):
        raise ConfigurationError("Expected at least one sample, got none.")
    return samples.in_memory() if in_memory and isinstance(samples, DatasetSamples) else samples


def _of_datasets(found: Any) -> bool:
    """Whether it is a data set of Hugging Face's, whose slices are columns and not items."""
    datasets = sys.modules.get("datasets")  # who has one has imported it
    return datasets is not None and isinstance(found, datasets.Dataset)
