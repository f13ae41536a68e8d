"""The digits of scikit-learn: the default task, with nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import distribution
from typing import ClassVar

import numpy as np

from ...privacy import derived_seed
from ..settings.run_config import RunConfig
from .task import Images, ImageTask, Tuned

_TEST_SHARE = 0.2  # the test set is fixed, whatever the run's seed


class Digits(ImageTask):
    """1,797 handwritten digits of 8 x 8 pixels with 17 shades."""

    name = "digits"
    sentence = "1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn"
    reads = frozenset()
    image_shape = (8, 8)
    tuned: ClassVar[Mapping[str, Tuned]] = {
        "pixels": Tuned(2.0, 58.0, 1.0, 2.0, 0.1, 1000.0, 80.0, 80.0),
        "soft-gradients": Tuned(0.7, 640.0, 0.8, 0.7, 0.8, 1000.0, 60.0, 80.0),
    }

    def images(self, config: RunConfig, root: str) -> Images:
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        rows = np.loadtxt(str(file), np.uint8, delimiter=",")  # importing scikit-learn takes a second
        images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
        order = np.random.Generator(np.random.Philox(key=derived_seed("digits"))).permutation(len(labels))
        test = order[: round(len(labels) * _TEST_SHARE)]
        train = order[len(test) :]
        return Images(images[train], labels[train], images[test], labels[test], 10, white=16)
