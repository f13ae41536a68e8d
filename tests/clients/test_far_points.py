"""Query points so far away that float64 forgets a local step: what they do to ``contractive``, and where they end."""

import numpy as np
import pytest
from murmurfl.clients import Cohort, OnlineClient, local_updates
from murmurfl.clients.online_client import check_contractive, farthest_point
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, RefusedError, SimulatedKeys, protocol

from tests.harness.machines import Labelled, point_request
from tests.harness.models import Logistic, NonconvexLogistic, Ridge

CLIP, STEPS = 1.0, 50


def charged(steps):
    return PrivacyPolicy(
        clip_norm=CLIP, batch_size=steps, max_participations=1, mu=1.0, clip_unit="contractive"
    ).sensitivity


class Search:
    """A search for a query point and two neighbouring rounds between which g moves by more than is charged.

    In the first round it tries, the replaced sample's step is just longer than half a unit in the last place of one
    coordinate, which so moves by a whole unit. Every later step is shared by two coordinates and just too short to move
    them, so nothing brings the two worlds together again. From there the search varies the round at random, and keeps
    what is worse.
    """

    def __init__(self, kind, steps, learning_rate, distance, seed=5, dimensions=2):
        self.model, self.classes = kind(dimensions, 1.0), kind is Logistic
        self.rates, self.distance = np.full((1, steps), learning_rate), distance
        self.generator = np.random.Generator(np.random.Philox(key=seed))
        self.steps, self.dimensions = steps, dimensions

    def moved(self, candidate):
        point, features, labels, other, other_label = candidate
        replaced, relabelled = features.copy(), labels.copy()
        replaced[0], relabelled[0] = other, other_label
        with np.errstate(all="ignore"):
            one, two = (
                local_updates(self.model, point, batch, self.rates, clip_norm=CLIP)[0]
                for batch in ((features, labels), (replaced, relabelled))
            )
        return float(np.linalg.norm(one - two)) / charged(self.steps)

    def first(self):
        point = np.full(self.dimensions, self.distance / np.sqrt(self.dimensions))
        features = np.zeros((self.steps, self.dimensions))
        features[:, :2] = np.array([1.0, -1.0]) / np.sqrt(2)
        features[0] = np.eye(self.dimensions)[0]
        margins = features @ point
        labels = np.zeros(self.steps) if self.classes else margins - 1.0
        return [point, features, labels, -features[0], 0.0 if self.classes else -margins[0] - 1e3]

    def varied(self, candidate):
        point, features, labels, other, other_label = [np.array(part) for part in candidate]
        what, size = self.generator.integers(4), 10.0 ** -self.generator.integers(6)
        one = self.generator.integers(self.steps)
        if what == 0:
            point = point + self.generator.normal(size=point.shape) * size * self.distance
            point *= self.distance / np.linalg.norm(point)
        elif what == 1:
            features[one] += size * self.generator.normal(size=self.dimensions)
            features[one] /= np.linalg.norm(features[one])
        elif what == 2:
            labels[one] = 1.0 - labels[one] if self.classes else labels[one] + size
        else:
            other = -self.generator.normal(size=self.dimensions)
            other /= np.linalg.norm(other)
        return [point, features, labels, other, other_label]

    def worst(self, trials):
        kept = self.first()
        largest = self.moved(kept)
        for _ in range(trials):
            candidate = self.varied(kept)
            moved = self.moved(candidate)
            if moved > largest:
                kept, largest = candidate, moved
        return largest


@pytest.mark.parametrize("kind", [Logistic, Ridge])
@pytest.mark.parametrize("share", [1.0, 1e-3], ids=["longest step", "short step"])
def test_contractive_sensitivity_holds_from_the_farthest_point(kind, share):
    model = kind(2, 1.0)
    rate = share * 2.0 / model.smoothness
    farthest = farthest_point(check_contractive(model, rate, CLIP), rate, CLIP, STEPS)
    for distance in (1.0, farthest):
        assert 0.3 < Search(kind, STEPS, rate, distance).worst(trials=80) <= 1.0


@pytest.mark.parametrize(("kind", "unit"), [(Logistic, 8), (Ridge, 1)])
def test_an_accepted_far_point_would_exceed_the_charge(kind, unit):
    """The bug that the test above is for: machines of 0.1 took such a point from any server."""
    rate, distance = 0.6 * unit, 1.5 * 2.0**52 * unit * np.sqrt(2)  # a step is 0.6 units in the last place
    check_contractive(kind(2, 1.0), rate, CLIP)
    assert Search(kind, STEPS, rate, distance).worst(trials=0) > 9.0


SAMPLES = Labelled(np.eye(2)[np.arange(40) % 2], np.arange(40) % 2)


def client(model=None, unit="contractive", name="7", kind=OnlineClient, rate=1.0, clip=CLIP):
    policy = PrivacyPolicy(clip_norm=clip, batch_size=4, max_participations=10, mu=1.0, clip_unit=unit)
    keys = SimulatedKeys(1, name)
    model = Logistic(2, 1.0) if model is None else model
    return kind(model, SAMPLES, policy, MemoryLedger(), keys, name=name, learning_rate=rate)


def test_far_points_are_refused_with_a_fixed_text():
    subject = client()
    direction = np.array([0.6, 0.8])
    farthest = farthest_point(subject.gradients, 1.0, CLIP, 4)
    assert 1e3 < farthest < 1e12
    for point in (1.01 * farthest * direction, np.array([1e16, 0.0]), np.array([1e300, 1e300])):
        with pytest.raises(RefusedError) as refusal:
            subject.fit(*point_request(point))
        assert refusal.value.code == protocol.MALFORMED_REQUEST
        assert str(refusal.value) == "malformed request: the query point is too far away"
    assert subject.statement("s")["releases"] == 0
    subject.fit(*point_request(0.99 * farthest * direction))
    client(unit="update").fit(*point_request(np.array([1e16, 0.0])))  # clipped as a whole, whatever rounding does


def test_machines_asked_together_refuse_as_they_do_alone():
    cohort = Cohort(["0", "1"], lambda name: client(name=name))
    outcomes = dict(cohort.releases(1, "s", {"0": 0, "1": 0}, [[np.array([1e16, 0.0])]]))
    assert [outcome.code for outcome in outcomes.values()] == [protocol.MALFORMED_REQUEST] * 2


def test_more_steps_or_parameters_or_a_smaller_clip_bring_the_farthest_point_nearer():
    def farthest(dimensions=10, clip=CLIP, steps=10, rate=0.1):
        return farthest_point(Ridge(dimensions, 1.0), rate, clip, steps)

    assert farthest() > farthest(dimensions=1000) > farthest(dimensions=1000, steps=100)
    assert farthest() > farthest(clip=0.1)
    assert farthest(clip=1e-3) > 0
    with pytest.raises(ConfigurationError, match="rounding"):
        farthest(dimensions=10**6, steps=10**4)


def test_a_loss_that_is_not_convex_is_refused_however_large_its_clip():
    """It has a smoothness and a gradient bound, but two iterates near 1 go apart with every step along a gradient."""
    model = NonconvexLogistic(2, 1.0)
    rate, clip = 2.0 / model.smoothness, 2.0 * model.gradient_bound
    points, batch = np.array([[0.9, 1.0], [1.1, 1.0]]), (np.array([[0.0, 1.0]] * 2), np.zeros(2))
    stepped = points - rate * model.at_points(points, batch)
    assert np.linalg.norm(stepped[0] - stepped[1]) > 1.01 * np.linalg.norm(points[0] - points[1])
    with pytest.raises(ConfigurationError, match="declares itself convex"):
        client(model, rate=rate, clip=clip)


def test_a_contribution_of_ones_own_is_not_charged_as_contractive():
    class Other(OnlineClient):
        def contribution(self, request, samples):
            return np.zeros((1, 2))

    with pytest.raises(ConfigurationError, match="contribution of its own"):
        client(kind=Other)
    client(kind=Other, unit="update")
