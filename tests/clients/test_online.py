"""Local steps as the paper writes them, and both sensitivities against the worst change a sample can make."""

import math

import numpy as np
import pytest
import torch
from murmurfl.clients import OnlineClient, TorchGradients, local_updates
from murmurfl.clients.adapters.per_sample_gradients import gradients_at, pick
from murmurfl.clients.online_client import check_contractive
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SystemKeys,
    clip_per_sample,
)

from tests.harness.machines import DurableLedger, Labelled, point_request
from tests.harness.models import Logistic, Undeclared

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


def test_machines_together_are_the_machines_alone():
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
    with pytest.raises(ConfigurationError, match="batch"):
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
    with pytest.raises(ConfigurationError, match="learning_rate <= 2 / L"):
        client(clip_unit="contractive", learning_rate=2.01 / model.smoothness)


def test_contractive_is_refused_where_it_does_not_hold():
    with pytest.raises(ConfigurationError, match="declares itself convex and smooth"):
        client(model=Undeclared(D), clip_unit="contractive", learning_rate=1e-3)

    class NoClipping:
        shapes, smoothness, gradient_bound, clips_contractively = [(D,)], 1.0, 3.0, False

        def __call__(self, parameters, chosen):
            return np.zeros((len(chosen), D))

    with pytest.raises(ConfigurationError, match="gradient bound"):
        check_contractive(NoClipping(), 0.1, 2.9)
    check_contractive(NoClipping(), 0.1, 3.0)
    with pytest.raises(ConfigurationError, match="'update' or 'contractive'"):
        client(clip_unit="sample")
    with pytest.raises(ConfigurationError, match="'nonnegative'"):
        client(clip_unit="nonnegative")
    with pytest.raises(ConfigurationError, match="learning_rate"):
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
    with pytest.raises(RefusedError, match="too far"):
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
            with pytest.raises(RefusedError, match="cap"):
                subject.fit(*point_request(np.zeros(D), 11))
