"""A row of gradients is the same to the last bit, whichever other rows are computed with it."""

import numpy as np
import pytest
from murmurfl.app.models.linear import LogisticRegression, RidgeRegression
from murmurfl.app.models.rows import row_products
from murmurfl.app.models.softmax import SoftmaxRegression
from murmurfl.app.models.torch import ConvolutionalNetwork, MultilayerPerceptron

COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 126, 127, 200]


def generator(seed=1):
    return np.random.Generator(np.random.Philox(key=seed))


@pytest.mark.parametrize("size", [1, 20, 784])
@pytest.mark.parametrize("classes", [1, 2, 10])
def test_a_product_has_the_same_rows_however_many_there_are_and_wherever_they_stand(size, classes):
    draws = generator()
    rows, matrix = draws.standard_normal((300, size)), draws.standard_normal((classes, size)).T
    whole = row_products(rows, matrix)
    np.testing.assert_allclose(whole, rows @ matrix, rtol=1e-12, atol=1e-12)
    for count in COUNTS:
        chosen = draws.permutation(300)[:count]
        assert (row_products(rows[chosen], matrix) == whole[chosen]).all()


def test_a_plain_product_does_not_here():
    """Else there would be nothing to see to; NumPy's products of few rows take another way."""
    draws = generator()
    rows, matrix = draws.standard_normal((300, 784)), draws.standard_normal((10, 784)).T
    whole = rows @ matrix
    if all((rows[:count] @ matrix == whole[:count]).all() for count in COUNTS):
        pytest.skip("this computer's products are steady by themselves")
    assert not all((rows[:count] @ matrix == whole[:count]).all() for count in COUNTS)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (SoftmaxRegression(64, 10), 200),
        (SoftmaxRegression(64, 10, bias=False), 200),
        (LogisticRegression(30, 5.0), 200),
        (RidgeRegression(30, 5.0), 200),
        (MultilayerPerceptron(64, 10), 200),
        (ConvolutionalNetwork(144, 10), 9),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_gradients_of_models_that_say_so_stand_alone(model, most):
    from murmurfl.clients.gradients import stacked_gradients

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
