"""A row of gradients is the same to the last bit, whichever other rows are computed with it."""

import numpy as np
import pytest
from murmurfl.app.models import make_model
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.models.torch_networks import ConvolutionalNetwork, MultilayerPerceptron
from murmurfl.clients.adapters.per_sample_gradients import rows_unmixed, stacked_gradients
from murmurfl.clients.full_batch_client import CountedGradients
from murmurfl.privacy.machine.clipping import RowBound, squared_lengths

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


EXTREMES = {
    "zeros": 0.0,
    "tiny": 1e-310,
    "small": 1e-160,
    "just beyond the bound": 0.5 * (1 + 2.0**-45),
    "huge": 1e160,
    "infinite": np.inf,
    "not a number": np.nan,
}


def bounded_rows(model, point, features, labels):
    with np.errstate(all="ignore"):
        return RowBound(0.7).rows(np.asarray(model(point, (features, labels))))


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("reach", [1.0, 1e9, 1e200])
@pytest.mark.parametrize("kind", ["softmax", "logistic", "ridge", "counted"])
def test_no_bit_of_a_row_depends_on_a_sample_beside_it(kind, reach, extreme):
    """However far away a hostile point is: rows of models that say so are computed together on real machines."""
    classes = 1 if kind == "ridge" else 2
    model = made = make_model("softmax" if kind == "counted" else kind, 16, classes, 2.0)
    draws = generator(7)
    point = [reach * draws.standard_normal(shape) for shape in made.shapes]
    if kind == "counted":
        model, point = CountedGradients(made), [*point, np.array([0.5])]
    assert rows_unmixed(model)
    features = draws.standard_normal((257, 16)).astype(np.float32).astype(np.float64)
    labels = draws.integers(0, 2, 257)
    before = bounded_rows(model, point, features, labels)
    for place in (0, 128, 256):
        beside = features.copy()
        beside[place] = extreme
        rows = bounded_rows(model, point, beside, labels)
        assert np.array_equal(np.delete(rows, place, 0), np.delete(before, place, 0), equal_nan=True)


def test_a_model_that_centres_its_batch_would_be_noticed():
    """The planted bug, for the test above."""

    class Centring(SoftmaxRegression):
        def __call__(self, parameters, samples):
            return super().__call__(parameters, (samples[0] - samples[0].mean(axis=0), samples[1]))

    model, draws = Centring(16, 2), generator(7)
    point = [draws.standard_normal(shape) for shape in model.shapes]
    features, labels = draws.standard_normal((257, 16)), draws.integers(0, 2, 257)
    beside = features.copy()
    beside[128] = 1e-310
    one, other = (bounded_rows(model, point, made, labels) for made in (features, beside))
    assert not np.array_equal(one[0], other[0])
    assert not rows_unmixed(model), "a subclass does not inherit what its ancestor says of itself"
