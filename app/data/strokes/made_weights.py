"""From what was learnt to the files that a run reads, and their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..features.feature_map import unit_rows
from ..features.frozen_net import frozen_net
from ..features.kept_weights import quantised, restored
from .random_characters import Alphabet, drawn, keyed
from .whitening import whitening

_CENTRED_ON = (4000, 12000)
"""Classes and images that a net's mean is taken over: of an alphabet that no net has learnt."""
_DECIMALS = 6


def net_arrays(layers: Sequence[NDArray[np.float64]]) -> dict[str, NDArray[Any]]:
    """A frozen net as its file has it: weights in eight bits, and its mean over random characters."""
    arrays: dict[str, NDArray[Any]] = {}
    for layer, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        arrays[f"weight{layer}"], arrays[f"step{layer}"] = quantised(weight)
        arrays[f"bias{layer}"] = bias.astype(np.float32)
    count = len(layers) // 2
    weights = [restored(arrays[f"weight{layer}"], arrays[f"step{layer}"]) for layer in range(count)]
    answers = frozen_net(_characters(), weights, [arrays[f"bias{layer}"] for layer in range(count)])
    arrays["centre"] = unit_rows(answers).mean(axis=0, dtype=np.float64).astype(np.float32)
    return arrays


def whitening_arrays() -> dict[str, NDArray[Any]]:
    """The whitening of scattering coefficients, as its file has it: its large matrix in eight bits."""
    found = whitening()
    axes, step = quantised(found.pop("axes"))
    small = {name: values.astype(np.float32) for name, values in found.items()}
    return {**small, "axes": axes, "axes_step": step}


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a weights file."""
    file = BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def rounded_digest(arrays: Sequence[NDArray[np.float64]]) -> str:
    """SHA-256 of arrays to six decimals: what machines whose last digits differ agree on."""
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(np.round(values * 10**_DECIMALS).astype("<i8").tobytes())
    return digest.hexdigest()


def _characters() -> NDArray[np.float32]:
    classes, images = _CENTRED_ON
    hand = keyed("centre")
    alphabet = Alphabet.random(classes, hand)
    parts = [drawn(alphabet, hand.integers(classes, size=500), hand) for _ in range(0, images, 500)]
    return np.concatenate(parts).astype(np.float32)
