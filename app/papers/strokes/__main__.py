"""``python -m murmurfl.app.papers.strokes FOLDER``: make the weights of learnt features again.

It reads no data set. One net takes ten to fifteen minutes on one core, the colours five, the whitening three. Nets are
trained in bfloat16, whose products differ between processors: elsewhere the files are as good, but other bits.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...data.features.learnt import SHA256
from .procedural_images import colour_arrays
from .stroke_training import PretrainConfig, net_arrays, packed, pretrain, whitening_arrays

MAKERS: dict[str, Callable[[], dict[str, NDArray[Any]]]] = {
    "colour.npz": colour_arrays,
    "scattering.npz": whitening_arrays,
    "strokes-1.npz": lambda: net_arrays(pretrain(PretrainConfig(seed=1))),
    "strokes-2.npz": lambda: net_arrays(pretrain(PretrainConfig(seed=2))),
}


def main(folder: Path, names: list[str]) -> None:
    """Write all weights files, or those with some names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or list(MAKERS):
        content = packed(MAKERS[name]())
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        same = "the file of this version" if digest == SHA256[name] else "not the bytes of this version's file"
        sys.stdout.write(f"{digest}  {name}: {len(content):,} bytes, {same}\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) < 2:
        sys.exit("Expected a folder: python -m murmurfl.app.papers.strokes FOLDER [NAME ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
