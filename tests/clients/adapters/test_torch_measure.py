"""What counts as right of a module with one output."""

import numpy as np
import pytest
import torch
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_one_output_fits_classes_0_1_and_minus_1_1(low):
    """Losses of margins have the second; counted as another class they would be wrong without a word."""
    measure = ModuleMeasure(ModuleGradients(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss))
    inputs, targets = torch.tensor([[-2.0], [3.0], [-1.0], [4.0]]), torch.tensor([low, 1.0, 1.0, low])
    measured = measure([np.array([[1.0]])], (inputs, targets))
    assert measured.right.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert measured.positive.tolist() == [0.0, 1.0, 1.0, 0.0]
