"""A machine's samples as people have them: arrays, tensors, a PyTorch data set or loader. They are read as slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..privacy import ConfigurationError
from .gradients import Samples
from .torch_values import as_tensor, first_axis, leaves, mapped, picked

_ADVICE = (
    "give (inputs, targets), two arrays or tensors with the samples along the first axis, or a data set of pairs "
    "(input, target)"
)


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

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, samples: slice, /) -> tuple[Any, Any]:
        return picked(self.inputs, samples), picked(self.targets, samples)


class DatasetSamples:
    """A data set whose items are pairs (input, target), read when they are asked for.

    Parameters
    ----------
    items : sequence
        With a length, and a pair for a number: a map-style ``torch.utils.data.Dataset``, or a list.
    """

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, samples: slice, /) -> tuple[Any, Any]:
        from torch.utils.data import default_collate

        chosen = [_pair(self.items[i]) for i in range(*samples.indices(len(self.items)))]
        inputs, targets = default_collate(chosen)
        return inputs, targets

    def in_memory(self) -> TensorSamples:
        """All items, read once: for simulations, which ask for them in every round."""
        return TensorSamples(*self[0 : len(self)])


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping) or not isinstance(item, Sequence) or len(item) != 2:
        got = f"a mapping with {', '.join(map(str, item))}" if isinstance(item, Mapping) else f"{type(item).__name__}"
        raise ConfigurationError(
            f'Expected items that are pairs (input, target), got {got}: write [(row["img"], row["label"]) for row in '
            "data], by the names that yours have."
        )
    return item[0], item[1]


def torch_samples(found: Any, *, in_memory: bool) -> Samples:
    """What a project calls its samples, as a machine reads them.

    Parameters
    ----------
    found : pair of arrays or tensors, Dataset, DataLoader, list of pairs, or Samples
        A loader's data set is taken, not its batches. Anything else with a length that gives a batch for a slice is
        left as it is.
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
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(found, DataLoader):
        found = found.dataset
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
    elif isinstance(found, Dataset | list):
        samples = DatasetSamples(found)
    elif not (hasattr(found, "__len__") and hasattr(found, "__getitem__")) or isinstance(found, Mapping | str | bytes):
        raise ConfigurationError(f"Expected samples, got {type(found).__name__}: {_ADVICE}.")
    if not len(samples):
        raise ConfigurationError("Expected at least one sample, got none.")
    return samples.in_memory() if in_memory and isinstance(samples, DatasetSamples) else samples
