"""The norm of the training loss's gradient."""

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.settings.run_config import RunConfig

from tests.app.run_configs import GRADIENT_NORMS as SMALL


def test_the_gradient_norm_is_told_on_request():
    config = RunConfig.from_mapping({**SMALL, "strategy": "reduced-tree-momentum"})
    result = run_cohort(config)
    task, model = result.experiment.data, result.experiment.model
    last = np.linalg.norm(model.mean_gradient(result.parameters, (task.train_features, task.train_labels)))
    assert result.gradient_norms["rounds"][-1] == result.experiment.num_rounds == 60
    assert result.gradient_norms["values"][-1] == pytest.approx(last)
    assert run_cohort(RunConfig(num_rounds=2, checkpoint=False)).gradient_norms is None
