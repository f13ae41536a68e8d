"""The data of jiang-2026."""

import os
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.data import TASKS
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.data.public_samples import PAPER_SIZES
from murmurfl.app.methods.shuffled_method import regularization
from murmurfl.app.settings.run_config import RunConfig

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("MURMURFL_DATA", "/nowhere")) / "compas").is_dir(), reason="no data root in MURMURFL_DATA"
)


@needs_data
@pytest.mark.parametrize("task", PAPER_SIZES)
def test_the_papers_data_have_the_papers_sizes_and_the_declared_bounds(task):
    data = load_dataset(RunConfig(strategy="shuffled", task=task, model=TASKS[task].models[0]))
    assert data.train_features.shape == data.public_features.shape == PAPER_SIZES[task]
    norms = np.linalg.norm(np.concatenate([data.train_features, data.public_features]).astype(float), axis=1)
    assert (norms <= TASKS[task].feature_bound * (1 + 1e-6)).mean() > 0.98
    assert (data.test_labels == data.train_labels).all()
    if task == "credit-card":
        assert (data.train_labels.mean(), data.public_labels.mean()) == (0.5, 0.05)
    assert regularization(RunConfig(strategy="shuffled", task=task, model=TASKS[task].models[0])) == (
        TASKS[task].regularizer,
        TASKS[task].regularizer_strength,
    )
