"""Local steps as the paper writes them, and both sensitivities against the worst change a sample can make."""

import math

import numpy as np
import pytest
import torch
from murmurfl.clients import Cohort, OnlineClient, TorchGradients, local_updates
from murmurfl.clients.adapters.per_sample_gradients import gradients_at, pick
from murmurfl.clients.online_client import check_contractive, farthest_point
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SystemKeys,
    clip_per_sample,
    protocol,
)

from tests.harness.clients import DurableLedger, Labelled, point_request
from tests.harness.errors import raises
from tests.harness.models import Logistic, NonconvexLogistic, Ridge, Undeclared

rng = np.random.Generator(np.random.Philox(key=31))
D, TAU = 6, 4


def logistic():
    return Logistic(D, 2.0)


def samples(count=40, seed=1):
    generator = np.random.Generator(np.random.Philox(key=seed))
    return Labelled(generator.normal(size=(count, D)), generator.integers(2, size=count))


def client(model=None, data=None, keys=None, learning_rate=0.5, **changes):
    policy = {"clip_norm": 1.0, "batch_size": TAU, "max_participations": 10, "mu": 1.0, "mechanism": "blt"}
    policy |= {"clip_unit": "update", **changes}
    return OnlineClient(
        logistic() if model is None else model,
        samples() if data is None else data,
        PrivacyPolicy(**policy),
        DurableLedger(),
        SimulatedKeys(1, "7") if keys is None else keys,
        name="7",
        learning_rate=learning_rate,
    )


def test_an_update_is_the_papers_difference_of_iterates():
    """(x - z^tau) / (eta tau) with z^{t+1} = z^t - eta grad f_t(z^t), one sample a step (lines 6 to 10)."""
    model, data, point, eta = logistic(), samples(), rng.normal(size=D), 0.3
    subject = client(trust="trusted-server", clip_norm=100.0, learning_rate=eta)
    for release in (1, 2):
        arrays, examples, _ = subject.fit(*point_request(point, release))
        z = point.copy()
        for t in range((release - 1) * TAU, release * TAU):
            z = z - eta * model([z], data[t : t + 1])[0]
        assert arrays[0] == pytest.approx((point - z) / (eta * TAU), abs=1e-4)
        assert examples == TAU


def test_clients_together_are_the_clients_alone():
    model, point = logistic(), rng.normal(size=D)
    many = [samples(TAU, seed) for seed in range(5)]
    rates = np.repeat(rng.uniform(0.1, 0.5, size=(5, 1)), TAU, axis=1)
    batch = tuple(np.concatenate([data[:][i] for data in many]) for i in (0, 1))
    together = local_updates(model, point, batch, rates, clip_norm=0.5)
    for i, data in enumerate(many):
        alone = local_updates(model, point, data[:], rates[i : i + 1], clip_norm=0.5)
        assert together[i] == pytest.approx(alone[0])


def test_gradients_at_points_are_those_of_one_point_at_a_time():
    module = torch.nn.Linear(D, 2)
    gradients = TorchGradients(module, torch.nn.functional.cross_entropy)
    points, data = rng.normal(size=(5, 2 * D + 2)).astype(np.float32), samples(5)
    batch = (data.features.astype(np.float32), data.labels)

    class Plain:
        shapes = gradients.shapes

        def __call__(self, parameters, chosen):
            return gradients(parameters, chosen)

    assert gradients_at(gradients, points, batch) == pytest.approx(gradients_at(Plain(), points, batch), abs=1e-5)
    with raises(ConfigurationError, "wrong-type", "samples"):
        pick([1, 2], slice(0, 1))


def worst_change(model, eta, clip, trials=300, steps=TAU):
    """The largest move of g over random neighbouring rounds: one sample replaced, everything else the same."""
    generator, worst = np.random.Generator(np.random.Philox(key=77)), 0.0
    for _ in range(trials):
        features = generator.normal(size=(steps, D)) * generator.choice([0.3, 1.0, 30.0], size=(steps, 1))
        if generator.random() < 0.5:  # all along one line: what one step overshoots the next ones see
            features[:] = 30.0 * np.eye(D)[0]
        labels = generator.integers(2, size=steps)
        start = generator.normal(size=D) * generator.choice([0.1, 1.0, 10.0])
        other_features, other_labels = features.copy(), labels.copy()
        changed = generator.integers(steps)
        other_features[changed] = -features[changed] * generator.choice([1.0, 10.0])
        other_labels[changed] = generator.integers(2)
        rates = np.full((1, steps), eta)
        one, other = (
            local_updates(model, start, batch, rates, clip_norm=clip)
            for batch in ((features, labels), (other_features, other_labels))
        )
        worst = max(worst, float(np.linalg.norm(one - other)))
    return worst


@pytest.mark.parametrize("clip", [0.2, 1.0, 2.0])
def test_a_contractive_round_moves_by_at_most_two_clips_over_tau(clip):
    model = logistic()
    charged = PrivacyPolicy(
        clip_norm=clip, batch_size=TAU, max_participations=1, mu=1.0, clip_unit="contractive"
    ).sensitivity
    assert 0.5 * charged < worst_change(model, 2.0 / model.smoothness, clip) <= charged


def test_steps_that_are_too_long_move_by_more_and_are_refused():
    """With eta > 2 / L the paper's sensitivity does not hold: each later sample moves the iterates further apart."""
    model, eta, lean = logistic(), 60.0, 0.1
    features = np.zeros((TAU, D))
    features[0, 0] = 2.0
    for t in range(1, TAU):
        features[t, 0], features[t, t] = 2.0 * lean, 2.0 * math.sqrt(1 - lean**2)
    labels = np.zeros(TAU, dtype=int)
    rates = np.full((1, TAU), eta)
    one = local_updates(model, np.zeros(D), (features, labels), rates, clip_norm=1.0)
    other = local_updates(model, np.zeros(D), (features, np.eye(TAU, dtype=int)[0]), rates, clip_norm=1.0)
    assert np.linalg.norm(one - other) > 1.2 * 2.0 / TAU
    with raises(ConfigurationError, "out-of-range", "learning_rate", match="learning_rate <= 2 / L"):
        client(clip_unit="contractive", learning_rate=2.01 / model.smoothness)


def test_contractive_is_refused_where_it_does_not_hold():
    with raises(ConfigurationError, "unsupported", "gradients"):
        client(model=Undeclared(D), clip_unit="contractive", learning_rate=1e-3)

    class NoClipping:
        shapes, smoothness, gradient_bound, clips_contractively = [(D,)], 1.0, 3.0, False

        def __call__(self, parameters, chosen):
            return np.zeros((len(chosen), D))

    with raises(ConfigurationError, "out-of-range", "clip_norm"):
        check_contractive(NoClipping(), 0.1, 2.9)
    check_contractive(NoClipping(), 0.1, 3.0)
    with raises(ConfigurationError, "conflict", "clip_unit"):
        client(clip_unit="sample")
    with raises(ConfigurationError, "conflict", "clip_unit", got="nonnegative"):
        client(clip_unit="nonnegative")
    with raises(ConfigurationError, "out-of-range", "learning_rate"):
        client(learning_rate=math.nan)


def test_a_failing_sample_counts_as_zero_silently():
    class Failing:
        def __init__(self, model):
            self.model, self.shapes, self.calls = model, model.shapes, 0
            self.smoothness, self.gradient_bound = model.smoothness, model.gradient_bound
            self.clips_contractively = True

        def __call__(self, parameters, chosen):
            if chosen[1][0] == 7:
                raise ValueError("label 7")
            return self.model(parameters, chosen)

    data = samples()
    data.labels[1] = 7
    model, point = logistic(), np.zeros(D)
    subject = client(
        model=Failing(model), data=data, keys=SystemKeys.generate(), clip_unit="contractive", trust="trusted-server"
    )
    arrays, _, _ = subject.fit(*point_request(point))
    z, total = point.copy(), np.zeros(D)
    for t in (0, 2, 3):
        gradient = clip_per_sample(model([z], data[t : t + 1]), 1.0)[0]
        z, total = z - 0.5 * gradient, total + gradient
    assert arrays[0] == pytest.approx(total / TAU, abs=1e-4)


def test_a_query_point_that_could_overflow_is_refused():
    subject = client()
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="too far"):
        subject.fit(*point_request(np.full(D, 1e200)))
    assert subject.statement("s")["releases"] == 0


def test_every_pair_of_mechanism_and_sensitivity_releases_within_its_budget():
    for mechanism in MECHANISMS:
        for unit in ("update", "contractive"):
            subject = client(mechanism=mechanism, clip_unit=unit)
            for release in range(1, 11):
                subject.fit(*point_request(rng.normal(size=D), release))
            statement = subject.statement("s")
            assert statement["mu-spent"] == pytest.approx(statement["mu-guaranteed"]) == pytest.approx(1.0)
            with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
                subject.fit(*point_request(np.zeros(D), 11))


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


@pytest.mark.more_cases
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
    """The bug that the test above is for: clients of 0.1 took such a point from any server."""
    rate, distance = 0.6 * unit, 1.5 * 2.0**52 * unit * np.sqrt(2)  # a step is 0.6 units in the last place
    check_contractive(kind(2, 1.0), rate, CLIP)
    assert Search(kind, STEPS, rate, distance).worst(trials=0) > 9.0


SAMPLES = Labelled(np.eye(2)[np.arange(40) % 2], np.arange(40) % 2)


def far_client(model=None, unit="contractive", name="7", kind=OnlineClient, rate=1.0, clip=CLIP):
    policy = PrivacyPolicy(clip_norm=clip, batch_size=4, max_participations=10, mu=1.0, clip_unit=unit)
    keys = SimulatedKeys(1, name)
    model = Logistic(2, 1.0) if model is None else model
    return kind(model, SAMPLES, policy, MemoryLedger(), keys, name=name, learning_rate=rate)


def test_far_points_are_refused_with_a_fixed_text():
    subject = far_client()
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
    far_client(unit="update").fit(*point_request(np.array([1e16, 0.0])))  # clipped as a whole, whatever rounding does


def test_clients_asked_together_refuse_as_they_do_alone():
    cohort = Cohort(["0", "1"], lambda name: far_client(name=name))
    outcomes = dict(cohort.releases(1, "s", {"0": 0, "1": 0}, [[np.array([1e16, 0.0])]]))
    assert [outcome.code for outcome in outcomes.values()] == [protocol.MALFORMED_REQUEST] * 2


def test_more_steps_or_parameters_or_a_smaller_clip_bring_the_farthest_point_nearer():
    def farthest(dimensions=10, clip=CLIP, steps=10, rate=0.1):
        return farthest_point(Ridge(dimensions, 1.0), rate, clip, steps)

    assert farthest() > farthest(dimensions=1000) > farthest(dimensions=1000, steps=100)
    assert farthest() > farthest(clip=0.1)
    assert farthest(clip=1e-3) > 0
    with raises(ConfigurationError, "out-of-range", "steps"):
        farthest(dimensions=10**6, steps=10**4)


def test_a_loss_that_is_not_convex_is_refused_however_large_its_clip():
    """It has a smoothness and a gradient bound, but two iterates near 1 go apart with every step along a gradient."""
    model = NonconvexLogistic(2, 1.0)
    rate, clip = 2.0 / model.smoothness, 2.0 * model.gradient_bound
    points, batch = np.array([[0.9, 1.0], [1.1, 1.0]]), (np.array([[0.0, 1.0]] * 2), np.zeros(2))
    stepped = points - rate * model.at_points(points, batch)
    assert np.linalg.norm(stepped[0] - stepped[1]) > 1.01 * np.linalg.norm(points[0] - points[1])
    with raises(ConfigurationError, "unsupported", "gradients"):
        far_client(model, rate=rate, clip=clip)


def test_a_contribution_of_ones_own_is_not_charged_as_contractive():
    class Other(OnlineClient):
        def contribution(self, request, samples):
            return np.zeros((1, 2))

    with raises(ConfigurationError, "conflict", "clip_unit"):
        far_client(kind=Other)
    far_client(kind=Other, unit="update")
