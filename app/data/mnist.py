"""MNIST, read by torchvision from a data root: ten digits, or their parity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ...privacy.errors import check_installed
from ..settings.run_config import RunConfig
from .task import Images, ImageTask, Tuned


class Mnist(ImageTask):
    """60,000 handwritten digits of 28 x 28 pixels, and 10,000 for testing."""

    name = "mnist"
    sentence = "MNIST: 60,000 handwritten digits of 28 x 28 pixels, from data-root"
    reads = frozenset({"download"})
    image_shape = (28, 28)
    tuned: ClassVar[Mapping[str, Tuned]] = {
        "pixels": Tuned(8.0, 110.0, 0.5, 4.0, 0.0135, 20.0, 150.0, 600.0),
        "oriented-gradients": Tuned(1.0, 700.0, 1.0, 1.0, 0.15, 1000.0, 60.0, 140.0),
        # The same for features of norm 1 instead of 4.
        **dict.fromkeys(
            ("soft-gradients", "strokes", "scattering", "scattering+strokes"),
            Tuned(0.25, 11200.0, 1.0, 0.25, 2.4, 4000.0, 60.0, 140.0),
        ),
    }

    def images(self, config: RunConfig, root: str) -> Images:
        return read_mnist(root, config.download, f"task = {self.name!r}")


class MnistParity(ImageTask):
    """MNIST's images in two classes: even and odd digits."""

    name = "mnist-parity"
    sentence = "MNIST's images in two classes, even digits and odd ones"
    reads = frozenset({"download"})
    image_shape = (28, 28)

    def images(self, config: RunConfig, root: str) -> Images:
        digits = read_mnist(root, config.download, f"task = {self.name!r}")
        return replace(digits, train_labels=digits.train_labels % 2, test_labels=digits.test_labels % 2, num_classes=2)


def read_mnist(root: str, download: bool, setting: str) -> Images:
    """Read MNIST.

    Parameters
    ----------
    root : str
        The data root, empty if there is none.
    download : bool
        Whether to fetch missing files into the data root.
    setting : str
        What asks for it, for a refusal.

    Raises
    ------
    ConfigurationError
        If MNIST or torchvision is missing.
    """
    fetch, read_images, read_labels = _torchvision(setting)
    if not root:
        raise ConfigurationError(
            "Expected a data root for task 'mnist', got none: set data-root or the environment variable MURMURFL_DATA, "
            "and download=true to fetch it there."
        )
    folder = Path(root).expanduser() / "MNIST" / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in names):
        if not download:
            raise ConfigurationError(
                f"Expected MNIST under {folder}, got no such files: set data-root or MURMURFL_DATA to the folder that "
                "has MNIST/raw, or set download=true."
            )
        fetch(root=str(Path(root).expanduser()), download=True)
    train, train_labels, test, test_labels = (
        _read_idx(folder, name, read_images if "images" in name else read_labels) for name in names
    )
    return Images(train, train_labels.astype(np.int64), test, test_labels.astype(np.int64), 10)


def _torchvision(setting: str) -> tuple[Callable[..., Any], Callable[[str], Any], Callable[[str], Any]]:
    """Functions that fetch MNIST, read images, and read labels."""
    try:
        check_installed("torchvision", "torch", setting)
        from torchvision.datasets import MNIST
        from torchvision.datasets.mnist import read_image_file, read_label_file
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"Expected a torchvision that fits torch {version('torch')}, got: {error}. Install both together, from "
            "one place: pip install --upgrade --force-reinstall torch torchvision."
        ) from error
    return MNIST, read_image_file, read_label_file


def _read_idx(folder: Path, name: str, read: Callable[[str], Any]) -> NDArray[Any]:
    """Read an idx file with torchvision; a packed one is unpacked elsewhere, since a data root may be read-only."""
    import gzip
    import tempfile

    if (folder / name).exists():
        return read(str(folder / name)).numpy()
    with tempfile.NamedTemporaryFile() as unpacked:
        unpacked.write(gzip.decompress((folder / f"{name}.gz").read_bytes()))
        unpacked.flush()
        return read(unpacked.name).numpy()
