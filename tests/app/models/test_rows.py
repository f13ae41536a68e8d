"""A row of gradients is the same to the last bit, whichever other rows are computed with it."""

import numpy as np
import pytest
from murmurfl.app.models.torch_networks import ConvolutionalNetwork, MultilayerPerceptron
from murmurfl.clients.adapters.per_sample_gradients import stacked_gradients
from murmurfl.privacy.machine.clipping import squared_lengths

COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 126, 127, 200]


def generator(seed=1):
    return np.random.Generator(np.random.Philox(key=seed))


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (MultilayerPerceptron(64, 10), 200),
        (ConvolutionalNetwork(144, 10), 9),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_gradients_of_models_that_say_so_stand_alone(model, most):
    assert model.rows_stand_alone
    draws = generator(2)
    features = draws.standard_normal((most, model.num_features)).astype(np.float32)
    labels = draws.integers(0, max(model.num_classes, 2), most)
    points = [[draws.standard_normal(shape) for shape in model.shapes] for _ in range(2)]

    def rows_of(chosen):
        stack = stacked_gradients(model, points, (3.0, -2.0), (features[chosen], labels[chosen]))
        rows = np.empty((len(chosen), model.num_parameters))
        for i, row in enumerate(rows):
            stack.write(i, 1.0, row)
        return np.column_stack([rows, stack.norms()])

    whole = rows_of(np.arange(most))
    for count in [count for count in COUNTS if count <= most]:
        chosen = draws.permutation(most)[:count]
        assert (rows_of(chosen) == whole[chosen]).all(), count


def test_a_single_row_has_the_length_it_has_among_others():
    """NumPy adds up the values of a single long row in another order."""
    rows = generator(3).standard_normal((3, 20_000))
    assert (squared_lengths(rows[1:2]) == squared_lengths(rows)[1:2]).all()
