"""Estimators of scikit-learn: their own gradients, their own penalty, their own fitted form, or a refusal by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from murmurfl.clients import Column, Label, LinearEstimator, Part, Schema, fitted, private_client_app
from murmurfl.clients.adapters.per_sample_gradients import OuterProducts, PulledOuterProducts, combined_gradients
from murmurfl.clients.adapters.sklearn_model import estimator_model, slopes
from murmurfl.clients.records.client_records import Records, items_of
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SumAssumption, protocol
from murmurfl.privacy.errors import InvalidRecordError
from murmurfl.strategies import FullBatch, NoisySGD, SecureAggregation
from scipy.sparse import csr_array
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, LogisticRegressionCV, SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.harness.clients import each_method, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid

pytestmark = pytest.mark.usefixtures("no_result_folder")

SAMPLES, FEATURES = 60, 4


def data(classes, seed=0):
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(SAMPLES, FEATURES))
    return features, generator.integers(classes, size=SAMPLES)


def point_of(model, seed=1):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape) for shape in model.gradients.shapes]


def fitted_exactly(classes, num_samples=SAMPLES, **options):
    """scikit-learn's own optimum, and our model of the same estimator."""
    features, labels = data(classes)
    estimator = LogisticRegression(tol=1e-12, max_iter=10_000, **options)
    model = LinearEstimator(estimator, FEATURES, range(classes), num_samples=num_samples)
    found = LogisticRegression(tol=1e-12, max_iter=10_000, **options).fit(features, labels)
    optimum = [found.coef_, *([found.intercept_] if found.fit_intercept else [])]
    return model, optimum, (features, labels)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("options", [{}, {"C": 0.05}, {"C": np.inf}, {"fit_intercept": False}])
def test_at_the_optimum_of_scikit_learn_the_mean_gradient_is_zero(classes, options):
    model, optimum, samples = fitted_exactly(classes, **options)
    assert np.abs(model.gradients(optimum, samples).mean(axis=0)).max() < 1e-6
    away = [values + 0.1 for values in optimum[:1]] + optimum[1:]
    assert classes == 3 or np.abs(model.gradients(away, samples).mean(axis=0)).max() > 1e-3


def test_a_penalty_for_another_number_of_samples_has_another_optimum():
    model, optimum, samples = fitted_exactly(2, num_samples=SAMPLES // 10, C=0.05)
    assert np.abs(model.gradients(optimum, samples).mean(axis=0)).max() > 1e-2


def one_step(estimator, point, features, label):
    """The gradient of one sample by a step of scikit-learn's own SGD, of size 1e-3."""
    step = 1e-3
    estimator.set_params(learning_rate="constant", eta0=step)
    estimator.partial_fit(features[None] * 0.0, [label], classes=[0, 1])
    estimator.coef_, estimator.intercept_ = point[0].copy(), point[1].copy()
    estimator.partial_fit(features[None], [label])
    return np.concatenate([(point[0] - estimator.coef_).ravel(), point[1] - estimator.intercept_]) / step


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("loss", sorted(slopes(0.1)))
def test_the_gradient_of_every_loss_is_a_step_of_scikit_learn(loss, alpha):
    options = {"loss": loss, "alpha": alpha, "epsilon": 0.4}
    model = LinearEstimator(SGDClassifier(**options), FEATURES, [0, 1])
    features, labels = data(2)
    features *= 2
    point = point_of(model)
    found = model.gradients(point, (features, labels))
    expected = [
        one_step(SGDClassifier(**options, shuffle=False), point, row, label)
        for row, label in zip(features, labels, strict=True)
    ]
    assert found == pytest.approx(np.array(expected), abs=1e-9)
    assert (np.abs(found[:, :-1] - alpha * point[0]).max(axis=1) > 0).any()


@pytest.mark.parametrize("loss", ["hinge", "log_loss"])
def test_more_classes_are_each_against_the_rest(loss):
    model = LinearEstimator(SGDClassifier(loss=loss), FEATURES, range(3))
    features, labels = data(3)
    point = point_of(model)
    found = model.gradients(point, (features, labels))
    for one in range(3):
        pair = LinearEstimator(SGDClassifier(loss=loss), FEATURES, [0, 1])
        alone = pair.gradients(
            [point[0][one : one + 1], point[1][one : one + 1]], (features, (labels == one).astype(int))
        )
        own = [*range(one * FEATURES, (one + 1) * FEATURES), 3 * FEATURES + one]
        assert found[:, own] == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "classes"),
    [
        (LogisticRegression(), 2),
        (LogisticRegression(), 4),
        (SGDClassifier(alpha=0.2), 3),
        (SGDClassifier(alpha=0.0), 2),
    ],
)
def test_factored_gradients_match_at_several_weighted_points(estimator, classes):
    gradients = LinearEstimator(estimator, FEATURES, range(classes), num_samples=9).gradients
    samples = data(classes)
    points = [[np.random.default_rng(k).normal(size=shape) for shape in gradients.shapes] for k in (1, 2)]
    for weights in ([0.5, -2.0], [0.0, 1.0], [np.linspace(0, 1, SAMPLES), np.full(SAMPLES, 0.5)]):
        stacked = gradients.stacked(points, weights, samples)
        dense = combined_gradients(gradients, points, weights, samples)
        assert stacked.norms() == pytest.approx(np.linalg.norm(dense, axis=1), rel=1e-9)
        row = np.empty(dense.shape[1])
        stacked.write(5, 2.0, row)
        assert row == pytest.approx(2 * dense[5], rel=1e-9, abs=1e-12)


def test_a_row_depends_on_its_own_sample_alone():
    gradients = LinearEstimator(SGDClassifier(loss="log_loss", alpha=0.1), FEATURES, range(3)).gradients
    features, labels = data(3)
    point = [np.random.default_rng(7).normal(size=shape) for shape in gradients.shapes]
    before = gradients(point, (features, labels))
    for value, label in ((1e300, 0), (np.nan, 1), (0.0, -1)):
        others, their_labels = features.copy(), labels.copy()
        others[5], their_labels[5] = value, label
        after = gradients(point, (others, their_labels))
        assert np.array_equal(np.delete(before, 5, axis=0), np.delete(after, 5, axis=0))


@pytest.mark.parametrize("classes", [[0, 1], ["benign", "malignant"], [3, 1, 2]])
@pytest.mark.parametrize("estimator", [LogisticRegression(C=np.inf), SGDClassifier(loss="log_loss")])
def test_a_fitted_estimator_predicts_as_one_that_scikit_learn_has_fitted(classes, estimator):
    features, numbers = data(len(classes))
    labels = np.array(sorted(classes))[numbers]
    model = LinearEstimator(estimator, FEATURES, classes)
    theirs = type(estimator)(**estimator.get_params()).fit(features, labels)
    ours = model.fitted(ArrayRecord({"coef_": Array(theirs.coef_), "intercept_": Array(theirs.intercept_)}))
    assert np.array_equal(ours.predict(features), theirs.predict(features))
    assert ours.predict_proba(features) == pytest.approx(theirs.predict_proba(features))
    assert ours.score(features, labels) == theirs.score(features, labels)
    assert not hasattr(estimator, "coef_")
    assert fitted(estimator, model.initial_arrays(), classes).decision_function(features[:1]) == pytest.approx(0.0)


def test_training_starts_where_an_estimator_of_public_data_is():
    features, labels = data(2)
    model = estimator_model(SGDClassifier().fit(features, labels))
    assert model.gradients.shapes == [(1, FEATURES), (1,)]
    began = LogisticRegression(C=np.inf).fit(features, labels)
    assert np.array_equal(LinearEstimator(began, FEATURES, [0, 1]).initial_arrays()["coef_"].numpy(), began.coef_)
    with raises(ConfigurationError, "wrong-shape", match=r"Expected coef_ of shape \(3, 4\), got \(1, 4\)"):
        LinearEstimator(began, FEATURES, range(3)).initial_arrays()


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("estimator", "complaint"),
    [
        (LogisticRegression(l1_ratio=1), "l2 or no penalty"),
        (SGDClassifier(penalty="l1"), "l2 or no penalty.*got SGDClassifier with penalty 'l1'"),
        (SGDClassifier(penalty="elasticnet"), "l2 or no penalty"),
        (LogisticRegression(class_weight="balanced"), "LogisticRegression without class_weight = 'balanced'"),
        (SGDClassifier(class_weight={0: 2.0}), "SGDClassifier without class_weight"),
        (LogisticRegression(warm_start=True), "without warm_start = True.*set coef_ and intercept_"),
        (SGDClassifier(early_stopping=True), "without early_stopping = True.*a validation score too"),
        (SGDClassifier(average=True), r"without average = True.*FullBatch\(average='linear'\)"),
        (SGDClassifier(average=1), "without average = 1"),
        (
            SGDClassifier(learning_rate="adaptive"),
            r"without learning_rate = 'adaptive'.*FullBatch\(learning_rate",
        ),
        (LogisticRegression(solver="liblinear"), "no penalty on the intercept"),
        (LogisticRegression(), r"Expected num_samples with LogisticRegression\(C=1\)"),
        (LogisticRegressionCV(), "every value that is tried costs privacy"),
        (make_pipeline(StandardScaler(), LogisticRegression()), "got Pipeline: give the last step alone"),
        (RandomForestClassifier(), "trees have no gradient"),
        (LinearRegression(), "Expected LogisticRegression or SGDClassifier of scikit-learn, got LinearRegression"),
        (CalibratedClassifierCV(), "got CalibratedClassifierCV"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_with_what_takes_its_place(estimator, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        LinearEstimator(estimator, FEATURES, [0, 1])


def test_how_scikit_learn_would_have_searched_does_not_matter():
    for estimator in (LogisticRegression(solver="saga", max_iter=7, tol=1.0, C=np.inf), SGDClassifier(max_iter=3)):
        assert LinearEstimator(estimator, FEATURES, [0, 1]).names == ("coef_", "intercept_")


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: estimator_model(SGDClassifier()), r"give LinearEstimator\(SGDClassifier\(...\), num_features=30"),
        (lambda: estimator_model(RandomForestClassifier()), "trees have no gradient"),
        (lambda: estimator_model(LinearEstimator(SGDClassifier(), 2, [0, 1]), max), "Expected no loss beside"),
        (lambda: LinearEstimator(SGDClassifier(), 2, [1, 1]), "Expected at least two classes"),
        (lambda: LinearEstimator(SGDClassifier(), 0, [0, 1]), "Expected num_features to be an integer >= 1"),
        (lambda: LinearEstimator(SGDClassifier(), 2, [0, 1], num_samples=-1), "Expected num_samples to be an integer"),
        (lambda: LinearEstimator(SGDClassifier(loss="log"), 2, [0, 1]), "Expected loss one of hinge, log_loss"),
        (
            lambda: fitted(SGDClassifier(), ArrayRecord([np.zeros((2, 4)), np.zeros(2)]), [0, 1]),
            r"Expected the arrays coef_ and intercept_ with 1 rows, got \[\(2, 4\), \(2,\)\]",
        ),
    ],
)
def test_what_is_no_model_is_refused(made, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        made()


FRAMES = "numpy", "lists", "pandas"


def records_of(found, classes=(0, 1)):
    schema = estimator_model(LinearEstimator(SGDClassifier(), FEATURES, classes)).schema
    return Records(items_of(found), schema)


@pytest.mark.parametrize("kind", FRAMES)
def test_samples_are_arrays_lists_or_data_frames(kind):
    features, numbers = data(2)
    labels = np.array(["a", "b"])[numbers]
    found = (features, labels)
    if kind == "lists":
        found = (features.tolist(), labels.tolist())
    elif kind == "pandas":
        pandas = pytest.importorskip("pandas")
        index = np.arange(SAMPLES)[::-1]  # names of rows are not their places
        found = (pandas.DataFrame(features, index=index), pandas.Series(labels, index=index))
    records = records_of(found, ("b", "a"))
    rows, those = records[10:13]
    assert np.array_equal(rows, features[10:13].astype(np.float32))
    assert np.array_equal(those, numbers[10:13])


def test_a_real_client_reads_samples_singly_and_hides_bad_ones():
    features, labels = data(2)
    texts = features.astype(object)
    texts[7, 1] = "patient 4711"
    labels[8] = 5
    ragged = [[1.0], *texts.tolist()[1:]]
    records = records_of((ragged, labels))
    assert len(records) == SAMPLES
    assert np.flatnonzero(~records.fits).tolist() == [0, 7, 8]
    assert "4711" not in records.report()
    for number in (0, 7, 8):
        with pytest.raises(InvalidRecordError):
            records[number : number + 1]


def test_a_schema_must_be_the_estimators():
    check = estimator_model(LinearEstimator(SGDClassifier(), 2, ("no", "yes"))).check_schema
    inputs = (Part(shape=(2,), bounds=(0, 1)),)
    check(Schema(inputs=inputs, label=Label(classes=("no", "yes"))), None)
    for other in (("yes", "no"), ("no", "maybe"), 2):
        with raises(ConfigurationError, "mismatch", "schema", match="2 features and the classes no, yes"):
            check(Schema(inputs=inputs, label=Label(classes=other)), None)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (3, "Expected samples, got int"),
        ((np.zeros((3, 4)), np.zeros(2)), "Expected inputs and targets of one length, got 2 and 3"),
        ((np.zeros((0, 4)), np.zeros(0)), "Expected at least one sample"),
        ((csr_array(np.eye(4)), np.zeros(4)), "as a dense array, got a sparse one"),
    ],
)
def test_samples_that_are_none_are_refused(found, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        records_of(found)


CLIENTS, EACH, WIDTH, CLIP = 5, 24, 3, 0.5
HUGE = 1e4  # a mu with next to no noise
OPTIONS = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "node_deadline_s": 1.0, "seed": 1, "session": "s"}


def pooled(classes):
    generator = np.random.Generator(np.random.Philox(key=7))
    features = generator.normal(size=(CLIENTS * EACH, WIDTH))
    scores = features @ generator.normal(size=(WIDTH, classes)) + generator.gumbel(size=(len(features), classes))
    return features, scores.argmax(axis=1)


def load(classes):
    features, labels = pooled(classes)

    def samples(context):
        part = slice(EACH * context.node_config["partition-id"], EACH * (context.node_config["partition-id"] + 1))
        return features[part], labels[part]

    return samples


def linear(estimator, classes=2):
    return LinearEstimator(estimator, WIDTH, range(classes), num_samples=CLIENTS * EACH)


def made(model, **changes):
    settings = {"mu": 2.0, "rounds": 5, "clip_norm": CLIP, **changes}
    return private_client_app(model, samples=load(len(model.classes)), **settings)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("classes", "penalty"), [(2, 0.2), (3, np.inf)])
def test_with_next_to_no_noise_full_batches_end_where_scikit_learn_does(classes, penalty):
    model = linear(LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000), classes)
    app = made(model, mu=HUGE, rounds=60, clip_norm=20.0)
    strategy = FullBatch(learning_rate=1.0, momentum=0.9, **OPTIONS)
    result = strategy.start(NodesGrid(app, CLIENTS), model.initial_arrays(), num_rounds=60)
    ours, theirs = model.fitted(result.arrays), model.estimator.fit(*pooled(classes))
    assert ours.predict_proba(pooled(classes)[0]) == pytest.approx(theirs.predict_proba(pooled(classes)[0]), abs=0.02)
    assert ours.score(*pooled(classes)) == pytest.approx(theirs.score(*pooled(classes)), abs=0.02)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("estimator", [LogisticRegression(), SGDClassifier(), SGDClassifier(loss="log_loss")])
@each_method
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_every_method_trains_every_estimator_under_both_kinds_of_trust(estimator, method, strategy, options, trust):
    model, sums, nodes = linear(estimator), {}, CLIENTS
    settings = {} if method in ("full-batch", "fedavg") else {"batch_size": 4}
    if trust == "secure-aggregation":
        settings |= {"trust": trust, "sums": SumAssumption(2, 3)}
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3, helpers=2)}, CLIENTS + 2
    built = strategy(**options, **OPTIONS, **sums)
    app = made(model, method=method, rounds=3, **settings)
    result = built.start(NodesGrid(app, nodes), model.initial_arrays(), num_rounds=3)
    assert [report.aggregated for report in built.history] == [CLIENTS] * 3
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
    return ArrayRecord({"coef_": Array(size * pooled(2)[0][:1]), "intercept_": Array(np.zeros(1))})


def farthest(estimator, arrays_of):
    """How far replacing one sample of a client moves its release, with the same key; over what is charged."""
    model, releases = linear(estimator), []
    for value, label in ((None, 0), (-3.0, 0), (1e12, 1), (1e300, 0), (1e-9, 1)):
        features, labels = pooled(2)
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
    refusals = {released(app, ArrayRecord([np.zeros((2, WIDTH)), np.zeros(2)])).reason for _ in range(2)}
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
                rows[context.node_config["partition-id"] : 200 : CLIENTS],
                labels[context.node_config["partition-id"] : 200 : CLIENTS],
            ),
            mu=4.0,
            rounds=rounds,
            batch_size=batch,
            method=method,
            schema=schema,
        )
        shares.append((app.policy.clip_norm / (2 * unit), app.steps()["learning_rate"] * unit**2))
        strategy = strategies[method](**app.steps(), **OPTIONS)
        result = strategy.start(NodesGrid(app, CLIENTS), model.initial_arrays(), num_rounds=rounds)
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
        clip_norm=3.0, batch_size=1, max_participations=5, mu=2.0, batch_selection="full_batch",
        mechanism="independent", release_rule="paper",
    )  # fmt: skip
    assert private_client_app(model, samples=load(2), policy=policy, schema=schema).policy.clip_norm == 3.0


def test_without_bounds_the_clip_is_1_and_steps_are_measured(caplog):
    app = made(linear(LogisticRegression()), clip_norm=None)
    assert app.policy.clip_norm == 1.0
    assert app.steps()["learning_rate"] > 0.0
    assert "records of simulated client 0" in caplog.text
