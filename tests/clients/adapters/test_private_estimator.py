"""scikit-learn in `private_client_app`: trainings that end where scikit-learn does, and machines that stay private."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from murmurfl.clients import Column, Label, LinearEstimator, Part, Schema, private_client_app
from murmurfl.clients.adapters.per_sample_gradients import OuterProducts, PulledOuterProducts
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, protocol
from murmurfl.strategies import FullBatch, NoisySGD, SecureAggregation
from sklearn.linear_model import LogisticRegression, SGDClassifier

from tests.harness.grid import NodesGrid
from tests.harness.machines import each_method, training_config

MACHINES, EACH, FEATURES, CLIP = 5, 24, 3, 0.5
HUGE = 1e4  # a mu with next to no noise
OPTIONS = {"num_clients": MACHINES, "clients_per_round": MACHINES, "node_deadline_s": 1.0, "seed": 1, "session": "s"}


def data(classes):
    generator = np.random.Generator(np.random.Philox(key=7))
    features = generator.normal(size=(MACHINES * EACH, FEATURES))
    scores = features @ generator.normal(size=(FEATURES, classes)) + generator.gumbel(size=(len(features), classes))
    return features, scores.argmax(axis=1)


def load(classes):
    features, labels = data(classes)

    def samples(context):
        part = slice(EACH * context.node_config["partition-id"], EACH * (context.node_config["partition-id"] + 1))
        return features[part], labels[part]

    return samples


def linear(estimator, classes=2):
    return LinearEstimator(estimator, FEATURES, range(classes), num_samples=MACHINES * EACH)


def made(model, **changes):
    settings = {"mu": 2.0, "rounds": 5, "clip_norm": CLIP, **changes}
    return private_client_app(model, samples=load(len(model.classes)), **settings)


@pytest.mark.parametrize(("classes", "penalty"), [(2, 0.2), (3, np.inf)])
def test_with_next_to_no_noise_full_batches_end_where_scikit_learn_does(classes, penalty):
    model = linear(LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000), classes)
    app = made(model, mu=HUGE, rounds=60, clip_norm=20.0)
    strategy = FullBatch(learning_rate=1.0, momentum=0.9, **OPTIONS)
    result = strategy.start(NodesGrid(app, MACHINES), model.initial_arrays(), num_rounds=60)
    ours, theirs = model.fitted(result.arrays), model.estimator.fit(*data(classes))
    assert ours.predict_proba(data(classes)[0]) == pytest.approx(theirs.predict_proba(data(classes)[0]), abs=0.02)
    assert ours.score(*data(classes)) == pytest.approx(theirs.score(*data(classes)), abs=0.02)


@pytest.mark.parametrize("estimator", [LogisticRegression(), SGDClassifier(), SGDClassifier(loss="log_loss")])
@each_method
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_every_method_trains_every_estimator_under_both_kinds_of_trust(estimator, method, strategy, options, trust):
    model, sums, nodes = linear(estimator), {}, MACHINES
    settings = {} if method in ("full-batch", "fedavg") else {"batch_size": 4}
    if trust == "secure-aggregation":
        settings |= {"trust": trust, "min_honest": 2, "min_cohort": 3}
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3, helpers=2)}, MACHINES + 2
    built = strategy(**options, **OPTIONS, **sums)
    app = made(model, method=method, rounds=3, **settings)
    result = built.start(NodesGrid(app, nodes), model.initial_arrays(), num_rounds=3)
    assert [report.aggregated for report in built.history] == [MACHINES] * 3
    assert np.abs(model.fitted(result.arrays).coef_).max() > 0


def released(app, arrays):
    grid = NodesGrid(app, 1)
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(training_config())})
    (reply,) = grid.send_and_receive([Message(content, grid.first_node, "train")])
    if reply.has_error():
        return reply.error
    return np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])


def hostile_arrays(model, size=1e9):
    """A model whose penalty pulls harder than any gradient, along the first sample."""
    return ArrayRecord({"coef_": Array(size * data(2)[0][:1]), "intercept_": Array(np.zeros(1))})


def farthest(estimator, arrays_of):
    """How far replacing one sample of a machine moves its release, with the same key; over what is charged."""
    model, releases = linear(estimator), []
    for value, label in ((None, 0), (-3.0, 0), (1e12, 1), (1e300, 0), (1e-9, 1)):
        features, labels = data(2)
        if value is not None:
            features[0], labels[0] = value, label
        own = features[:EACH], labels[:EACH]
        app = private_client_app(model, samples=own, mu=2.0, rounds=5, clip_norm=CLIP)
        releases.append(released(app, arrays_of(model)))
    charged = app.policy.plan(len(releases[0])).sensitivity
    return max(float(np.linalg.norm(release - releases[0])) / charged for release in releases)


@pytest.mark.parametrize("estimator", [LogisticRegression(C=1e-3), SGDClassifier(alpha=1.0), SGDClassifier(alpha=0.0)])
@pytest.mark.parametrize("arrays_of", [LinearEstimator.initial_arrays, hostile_arrays])
def test_replacing_one_sample_moves_a_release_by_no_more_than_is_charged(estimator, arrays_of):
    assert 0.1 < farthest(estimator, arrays_of) <= 1.0


def test_a_penalty_that_is_left_out_of_norms_is_noticed(monkeypatch):
    """The planted bug, for the test above."""
    monkeypatch.setattr(PulledOuterProducts, "norms", OuterProducts.norms)
    assert farthest(SGDClassifier(alpha=1.0), lambda model: hostile_arrays(model, size=20.0)) > 1.0


def test_other_arrays_are_refused_with_what_to_start_with():
    model = linear(SGDClassifier())
    app = made(model)
    refusals = {released(app, ArrayRecord([np.zeros((2, FEATURES)), np.zeros(2)])).reason for _ in range(2)}
    (said,) = refusals
    assert "initial_arrays" in said
    assert released(app, ArrayRecord([np.zeros(2)])).code == protocol.MALFORMED_REQUEST


def clouds(unit):
    """Two clouds of 200 records each, no value of which is longer than ``unit``."""
    generator = np.random.Generator(np.random.Philox(key=31))
    labels = np.arange(400) % 2
    rows = generator.normal(size=(400, 4)) * 0.3 + np.where(labels, 0.3, -0.3)[:, None]
    return np.clip(rows, -1, 1) * unit, labels


@pytest.mark.parametrize(("method", "rounds", "batch"), [("full-batch", 12, None), ("noisy-sgd", 4, 10)])
def test_clip_and_steps_follow_from_the_schema_whatever_unit_numbers_are_in(method, rounds, batch):
    strategies, scores, shares = {"full-batch": FullBatch, "noisy-sgd": NoisySGD}, [], []
    for unit in (0.01, 1000.0):
        rows, labels = clouds(unit)
        schema = Schema(inputs=(Part(shape=(4,), bounds=(-unit, unit)),), label=Label(classes=2))
        model = LinearEstimator(LogisticRegression(fit_intercept=False), 4, (0, 1), num_samples=10**9)
        app = private_client_app(
            model,
            samples=lambda context, rows=rows, labels=labels: (
                rows[context.node_config["partition-id"] : 200 : MACHINES],
                labels[context.node_config["partition-id"] : 200 : MACHINES],
            ),
            mu=4.0,
            rounds=rounds,
            batch_size=batch,
            method=method,
            schema=schema,
        )
        shares.append((app.policy.clip_norm / (2 * unit), app.steps()["learning_rate"] * unit**2))
        strategy = strategies[method](**app.steps(), **OPTIONS)
        result = strategy.start(NodesGrid(app, MACHINES), model.initial_arrays(), num_rounds=rounds)
        scores.append(model.fitted(result.arrays).score(rows[200:], labels[200:]))
    assert shares[0] == pytest.approx(shares[1])
    assert shares[0][0] == pytest.approx({"full-batch": 0.1, "noisy-sgd": 0.4}[method])
    assert scores[0] == pytest.approx(scores[1], abs=0.03)  # the grid of noise differs
    assert min(scores) > 0.85


def test_a_clip_that_is_given_stays_and_steps_go_with_it():
    columns = {name: Column(kind="number", bounds=(0, 10**number)) for number, name in enumerate("abc")}
    schema = Schema(columns=columns, label=Label(column="y", classes=2))
    model = linear(LogisticRegression())
    usual = made(model, clip_norm=None, schema=schema)
    assert usual.policy.clip_norm == pytest.approx(0.1 * 2)  # three columns of norm 1, and the intercept
    assert made(model, schema=schema).policy.clip_norm == CLIP
    given = made(model, schema=schema).steps()["learning_rate"]
    assert given * CLIP == pytest.approx(usual.steps()["learning_rate"] * 0.2)
    declared = Schema(**{**schema.model_dump(), "norm": 1.0})
    assert made(model, clip_norm=None, schema=declared).policy.clip_norm == pytest.approx(0.1 * 2**0.5)
    policy = PrivacyPolicy(
        clip_norm=3.0, batch_size=1, max_participations=5, mu=2.0, order="all", mechanism="independent",
        release_rule="paper",
    )  # fmt: skip
    assert private_client_app(model, samples=load(2), policy=policy, schema=schema).policy.clip_norm == 3.0


def test_without_bounds_the_clip_is_1_and_no_steps_are_known():
    app = made(linear(LogisticRegression()), clip_norm=None)
    assert app.policy.clip_norm == 1.0
    with pytest.raises(ConfigurationError, match="Expected a schema with bounds"):
        app.steps()
