"""A user's own features: a function, or a PyTorch module from a file.

``features = package.module:function`` takes images of shape (samples, height, width), float32 in [0, 1], and returns an
array of shape (samples, k), each row made from its own image alone. The function may have attributes: ``norm_bound``,
the largest L2 norm of a row, which bounds steps; ``nonnegative``, whether no value is ever below zero;
``reads_colour``, whether colour images are handed over as (samples, height, width, 3) and not as their luminance; and
``side``, the pixels to which images in files are resized. What a network was trained on must be public: no budget pays
for what its weights reveal.

``features = path/to/file.pt`` is a list of layers by name and their weights, and nothing that could run: the file is
read with ``torch.load(weights_only=True)``, and the module is built from the layers below. :func:`save_features` writes
it. All these layers treat every image by itself: batch normalisation is frozen, with the means it was saved with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....privacy.errors import ConfigurationError, check_installed
from ...settings.run_config import RunConfig
from .feature_map import Features, OfImages, in_unit_range, kept, unit_rows

if TYPE_CHECKING:
    import torch


_ROWS_ALONE = 3
"""Images that a user's function gets once more, one by one: a normalisation over all of them shows at once."""


class FunctionFeatures(OfImages):
    """A user's function.

    That row i depends on image i alone is the function's own promise. A trial on a few images finds a normalisation
    over all of them, and proves nothing.
    """

    def __init__(self, function: Callable[[NDArray[np.float32]], Any], name: str) -> None:
        self.name = name
        self.sentence = "features of your own"
        self.norm_bound = getattr(function, "norm_bound", None)
        self.nonnegative = getattr(function, "nonnegative", False) is True
        self.reads_colour = getattr(function, "reads_colour", False) is True
        self.side = int(getattr(function, "side", 0))
        self._function = function

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        values = in_unit_range(images, white)
        rows = self._rows(values)
        for i in range(min(_ROWS_ALONE, len(values))):
            alone = self._rows(values[i : i + 1])[0]
            if alone.shape != rows[i].shape or not np.allclose(alone, rows[i], rtol=1e-3, atol=1e-4, equal_nan=True):
                raise ConfigurationError(
                    f"Expected features = {self.name!r} to make each row from its own image alone, got another row "
                    "for an image among others than for the same one by itself: privacy is counted sample by sample.",
                    kind="unsupported",
                    setting="features",
                )
        return rows

    def _rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            rows = np.asarray(self._function(values.copy()))
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give an array, got {type(error).__name__}: {error}.",
                kind="wrong-type",
                setting="features",
            ) from error
        if rows.ndim != 2 or len(rows) != len(values) or rows.dtype.kind not in "fiub" or not rows.shape[1]:
            raise ConfigurationError(
                f"Expected features = {self.name!r} to give numbers of shape ({len(values)}, k), one row an image, got "
                f"{rows.dtype} of shape {rows.shape}.",
                kind="wrong-type",
                setting="features",
            )
        return np.asarray(rows, dtype=np.float32)


def own_features(found: Any, name: str) -> Features:
    """Wrap a user's function as Features; raise ConfigurationError if it is no function."""
    if isinstance(found, type) or not callable(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(
            f"Expected features = {name!r} to be a function of images, got {kind}.",
            kind="wrong-type",
            setting="features",
        )
    return FunctionFeatures(found, name)


SUFFIX = ".pt"
_BLOCK = 1000
_POOL = ("kernel_size", "stride", "padding")
_LAYERS = {
    "Conv2d": ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    "Linear": ("in_features", "out_features"),
    "BatchNorm1d": ("num_features", "eps"),
    "BatchNorm2d": ("num_features", "eps"),
    "MaxPool2d": _POOL,
    "AvgPool2d": _POOL,
    "AdaptiveAvgPool2d": ("output_size",),
    "Flatten": (),
    "ReLU": (),
    "LeakyReLU": ("negative_slope",),
    "GELU": (),
    "Tanh": (),
    "Sigmoid": (),
}
"""The layers that a file may have, and their settings; the weights determine a bias."""
_BIASED = ("Conv2d", "Linear")
_OF_MAPS = ("Conv2d", "BatchNorm2d", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d")
"""Layers of maps: some take a block's images as the rows of one map, and mix them."""
_IDLE = ("Dropout", "Dropout2d", "Identity")  # without effect after training


def save_features(module: torch.nn.Sequential, path: Path | str) -> None:
    """Write a module as a file for ``features = path``.

    Parameters
    ----------
    module : torch.nn.Sequential
        For images of shape (samples, 1, height, width), float32 in [0, 1], or (samples, 3, height, width) if its first
        layer has three input channels. Its layers, also in nested sequences:
        Conv2d, Linear, BatchNorm1d and BatchNorm2d (frozen), MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, Flatten, ReLU,
        LeakyReLU, GELU, Tanh, Sigmoid; dropout is left out.
    path : Path or str
        Ends with ``.pt``.

    Raises
    ------
    ConfigurationError
        If the module has other layers, maps after rows, or normalisation without running means.

    Notes
    -----
    Weights learnt from private data reveal something about them, and no budget pays for it.
    """
    check_installed("torch", "torch", "save_features")
    import torch

    path = Path(path)
    if path.suffix != SUFFIX:
        raise ConfigurationError(
            f"Expected the path of a file that ends with {SUFFIX}, got {str(path)!r}.", kind="malformed"
        )
    layers, state = [], []
    for layer in _flat(module):
        kind = type(layer).__name__
        if kind in _IDLE:
            continue
        _check_layer(layer, kind)
        settings = {name: getattr(layer, name) for name in _LAYERS[kind]}
        if kind in _BIASED:
            settings["bias"] = layer.bias is not None
        layers.append([kind, settings])
        state.append({name: values.detach().cpu() for name, values in layer.state_dict().items()})
    _check_sequence([kind for kind, _ in layers])
    torch.save({"layers": layers, "state": state}, path)


def _flat(module: torch.nn.Module) -> list[torch.nn.Module]:
    import torch

    if not isinstance(module, torch.nn.Sequential):
        return [module]
    return [layer for part in module for layer in _flat(part)]


def _check_layer(layer: Any, kind: str) -> None:
    import torch

    if type(layer) is not getattr(torch.nn, kind, None) or kind not in _LAYERS:
        raise ConfigurationError(
            f"Expected layers among {', '.join([*_LAYERS, *_IDLE])}, got {kind}.", kind="unsupported"
        )
    if kind.startswith("BatchNorm") and (layer.running_mean is None or not layer.affine):
        raise ConfigurationError(
            f"Expected {kind} with running means and a scale of its own, got one without: it would mix samples.",
            kind="unsupported",
        )
    extra = {"Flatten": ("start_dim", 1), "MaxPool2d": ("dilation", 1)}.get(kind)
    if extra is not None and getattr(layer, extra[0]) != extra[1]:
        raise ConfigurationError(
            f"Expected {kind} with {extra[0]} = {extra[1]}, got {getattr(layer, extra[0])}.", kind="unsupported"
        )


def _check_sequence(kinds: list[str]) -> None:
    """Raise if a layer of maps follows Flatten."""
    flat = kinds[kinds.index("Flatten") :] if "Flatten" in kinds else []
    behind = [kind for kind in flat if kind in _OF_MAPS]
    if behind:
        raise ConfigurationError(
            f"Expected no {behind[0]} behind Flatten, got one: it would mix images.", kind="unsupported"
        )


class FileFeatures(OfImages):
    """A module from the file of :func:`save_features` at the path ``name``; rows are scaled to an L2 norm of 1.

    Row i depends on image i alone: no layer that a file can have mixes images. That its weights were learnt from no
    private data is the promise of whoever made them.
    """

    sentence = "a net of your own, from a file"
    norm_bound = 1.0

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def reads_colour(self) -> bool:  # type: ignore[override]
        """Whether the first layer has three input channels."""
        return getattr(self._module[0], "in_channels", 1) == len("rgb")

    def of_any(self, images: NDArray[np.uint8], white: int = 255) -> NDArray[np.float32]:
        """Return the features of grey or colour images; row i depends on image i alone."""
        grey = self.reads_colour and images.ndim == len(("sample", "row", "column"))
        return super().of_any(np.stack([images] * 3, axis=3) if grey else images, white)

    def check(self, config: RunConfig) -> None:
        super().check(config)
        check_installed("torch", "torch", f"features = {self.name!r}")
        _ = self._module  # raises if the file is malformed

    def __call__(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        digest = hashlib.sha256(Path(self.name).expanduser().read_bytes()).hexdigest()
        return kept(["file", digest], images, white, self._made)

    def _made(self, images: NDArray[np.uint8], white: int) -> NDArray[np.float32]:
        import torch

        rows = []
        with torch.no_grad():
            for start in range(0, len(images), _BLOCK):
                values = torch.from_numpy(in_unit_range(images[start : start + _BLOCK], white))
                values = values.permute(0, 3, 1, 2) if self.reads_colour else values[:, None]
                try:
                    rows.append(self._module(values).flatten(1).numpy())
                except RuntimeError as error:
                    raise ConfigurationError(
                        f"Expected features = {self.name!r} to take images of {images.shape[1]} x {images.shape[2]} "
                        f"pixels, got: {error}.",
                        kind="failed",
                        setting="features",
                    ) from error
        return unit_rows(np.concatenate(rows).astype(np.float32))

    @cached_property
    def _module(self) -> torch.nn.Sequential:
        return _read(self.name)


def _read(name: str) -> torch.nn.Sequential:
    """Read the module that a file describes, and freeze it.

    Raises ConfigurationError if it is no file of :func:`save_features`; nothing of it was run then.
    """
    import torch

    try:
        held = torch.load(Path(name).expanduser(), map_location="cpu", weights_only=True)
        layers = [_layer(*described) for described in held["layers"]]
        _check_sequence([kind for kind, _ in held["layers"]])
        for layer, state in zip(layers, held["state"], strict=True):
            layer.load_state_dict(state)
    except ConfigurationError:
        raise
    except Exception as error:  # the file may hold anything
        raise ConfigurationError(
            f"Expected features = {name!r} to be a file of murmurfl's save_features, got "
            f"{type(error).__name__}: {error}.",
            kind="malformed",
            setting="features",
        ) from error
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


def _layer(kind: str, settings: dict[str, Any]) -> torch.nn.Module:
    import torch

    allowed = {*_LAYERS.get(kind, ()), *(["bias"] if kind in _BIASED else [])}
    if kind not in _LAYERS or not settings.keys() <= allowed:
        raise ConfigurationError(
            f"Expected a layer among {', '.join(_LAYERS)} with its settings, got {kind!r}.", kind="malformed"
        )
    return getattr(torch.nn, kind)(**settings)
