"""What a run sets aside for gradients is what its networks keep to."""

import pytest
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError


def test_a_run_says_how_much_memory_gradients_may_take():
    made = prepare(RunConfig(model="mlp", gradient_memory_mib=96.0)).model
    assert made.gradient_memory_mib == 96.0
    assert made._gradients.gradient_memory_mib == 96.0


def test_a_model_without_a_network_refuses_it():
    with pytest.raises(ConfigurationError, match="gradient-memory-mib"):
        RunConfig(model="softmax", gradient_memory_mib=96.0)
