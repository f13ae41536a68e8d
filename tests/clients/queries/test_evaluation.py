"""A client that evaluates, against a server that lies: once a session, one budget, and models that tell nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import (
    Centring,
    CountedGradients,
    DelayedMomentumClient,
    Evaluation,
    EvaluationShare,
    FullBatchClient,
    Mu2Client,
    ShuffledClient,
    private_client_app,
    trainable_arrays,
)
from murmurfl.clients.queries import held_out_samples
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    Measured,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    ShuffledPolicy,
    SimulatedKeys,
    SumAssumption,
    SystemKeys,
    centring_policy,
    divided_mu,
    evaluation_policy,
    protocol,
)
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    Mu2,
    NotEvaluatedError,
    PrivateEvaluation,
    SecureAggregation,
)

from tests.harness.clients import DurableLedger, FixedNonces, Labelled, concatenated, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.secure import masking_of, roster_of, unmasked

pytestmark = pytest.mark.usefixtures("no_result_folder")

torch = pytest.importorskip("torch")
K, COUNT, HELD, MU = 3, 12, 4, 2.0
OWN_MU, REST_MU = divided_mu(MU, 0.1)
DRAW = np.random.Generator(np.random.Philox(key=3))
DATA = Labelled(DRAW.normal(size=(COUNT, K)).astype(np.float32), np.arange(COUNT) % 2)
MODEL = np.array([0.3, -0.2, 0.1])
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3)}
ROSTER = roster_of(("1", "2", "3"))
HOSTILE_MODELS = [
    np.zeros(K),
    np.full(K, 1e300),
    DATA.features[5].astype(float) * 1e12,
    np.array([1e-320, 0.0, -1e308]),
]


class Margins:
    """The gradient of <w, x>, seen: which samples were asked for."""

    def __init__(self):
        self.shapes, self.seen = [(K,)], []

    def __call__(self, parameters, samples):
        self.seen.append(np.array(samples[0]))
        return np.asarray(samples[0], dtype=np.float64)


def measure(parameters, samples):
    """Right where the sign of <w, x> is the label's; 1 / (1 + exp(-<w, x>)) is the score."""
    features, labels = samples
    margins = features[:, :K] @ parameters[0][:K]
    return Measured((margins > 0) == labels, 1 / (1 + np.exp(-margins)), labels)


def rest_policy(kind=FullBatchClient, **changes):
    own = {"batch_selection": "cyclic", "batch_size": 2, "max_participations": 4}
    if kind is FullBatchClient:
        own = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
    return PrivacyPolicy(
        **{"clip_norm": 1.0, "max_participations": 4, "mu": REST_MU, "budget_mu": MU, **own, **changes}
    )


def own_policy(**changes):
    return evaluation_policy(OWN_MU, budget_mu=MU, **changes)


def client(
    kind=FullBatchClient,
    *,
    data=DATA,
    ledger=None,
    keys=None,
    evaluates=True,
    trust=None,
    gradients=None,
    measured=measure,
    bins=2,
    held_out=0,
    **other,
):
    trust = trust or {}
    own = {"queries": [Evaluation(own_policy(**trust), measured, bins, held_out=held_out)]} if evaluates else {}
    ledger, keys = ledger or MemoryLedger(), keys or SimulatedKeys(1, "1")
    return kind(gradients or Margins(), data, rest_policy(kind, **trust), ledger, keys, name="1", **{**own, **other})


def request(model=MODEL, session="evaluation", **entries):
    return [model], training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_EVALUATION, **entries})


def gradient_request(subject, t=1, session="rest"):
    return [np.zeros(K)] * subject.query_points, training_config(t, 0, session)


@pytest.mark.parametrize("kind", [FullBatchClient, Mu2Client])
def test_the_answer_is_the_row_sum_and_public_facts(kind):
    subject = client(kind, trust={"mechanism": "none"})
    arrays, examples, metrics = subject.fit(*request())
    rows = subject.parts["evaluation"].query
    expected = rows.rows(measure([MODEL], DATA[:])).sum(axis=0)
    assert concatenated(arrays) == pytest.approx(expected, abs=1e-4)
    assert examples == COUNT
    assert set(metrics) == {
        *(protocol.VERSION, protocol.RELEASE, protocol.ACK, protocol.SENSITIVITY, protocol.CLIENT),
        *(protocol.NOISE_STD, protocol.HELD_OUT, protocol.SCORES_SHARE),
    }
    noisy = client(kind).fit(*request())[2]
    assert noisy[protocol.NOISE_STD] == client(kind).parts["evaluation"].privatizer.plan.noise_std > 0
    assert noisy[protocol.HELD_OUT] == 0


def test_nothing_of_the_reply_but_the_release_depends_on_data():
    said = []
    for features in (DATA.features, DATA.features * np.nan, DATA.features * 0):
        _, examples, metrics = client(data=Labelled(features, DATA.labels), held_out=HELD).fit(*request())
        said.append((examples, metrics))
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("held_out", [0, HELD])
def test_any_model_keeps_the_evaluation_within_its_sensitivity(simulated, held_out):
    """Two data sets that differ in one sample, the same noise: only that sample's row differs."""
    moved = []
    for place in (2, COUNT - 1):
        other, labels = DATA.features.copy(), DATA.labels.copy()
        other[place], labels[place] = [-1e30, math.nan, 1e30], 7
        for model in HOSTILE_MODELS:
            sent = []
            for rows, classes in ((DATA.features, DATA.labels), (other, labels)):
                keys = SimulatedKeys(1, "1") if simulated else FixedNonces()
                ledger = None if simulated else DurableLedger()
                subject = client(data=Labelled(rows, classes), ledger=ledger, keys=keys, held_out=held_out)
                sent.append(concatenated(subject.fit(*request(model))[0]))
            moved.append((place, np.linalg.norm(sent[0] - sent[1])))
    assert max(length for _, length in moved) <= subject.parts["evaluation"].privatizer.plan.sensitivity
    assert any(length > 0 for _, length in moved)
    if held_out:  # who was trained on is not in it at all
        assert all(length == 0 for place, length in moved if place < COUNT - held_out)


def test_any_measure_moves_the_sum_by_the_sensitivity_at_most():
    def hostile(parameters, samples):
        if samples[1][0] == 9:
            raise ValueError("secret")
        return Measured([1e300, -5.0][int(samples[1][0])] * np.ones(1), np.full(1, np.inf), np.full(1, 3.0))

    sent = []
    for label in (0, 1, 9):
        labels = DATA.labels.copy()
        labels[3] = label
        subject = client(
            data=Labelled(DATA.features, labels), ledger=DurableLedger(), keys=FixedNonces(), measured=hostile
        )
        sent.append(concatenated(subject.fit(*request())[0]))
    for other in sent[1:]:
        assert 0 < np.linalg.norm(sent[0] - other) <= subject.parts["evaluation"].privatizer.plan.sensitivity


def test_samples_that_are_set_aside_are_evaluated_on_and_never_trained_on():
    for kind in (FullBatchClient, Mu2Client):
        seen = []

        def watching(parameters, samples, seen=seen):
            seen.append(samples[0])
            return measure(parameters, samples)

        subject = client(kind, trust={"mechanism": "none"}, held_out=HELD, measured=watching)
        _, examples, metrics = subject.fit(*request())
        assert (examples, metrics[protocol.HELD_OUT]) == (HELD, 1)
        assert np.array_equal(np.concatenate(seen), DATA.features[-HELD:])
        for t in range(1, 5):
            subject.fit(*gradient_request(subject, t))
        trained = np.concatenate(subject.gradients.seen)
        assert {tuple(row) for row in trained} == {tuple(row) for row in DATA.features[:-HELD]}
        assert subject.privatizer.num_samples == COUNT - HELD


def test_a_ledger_knows_rows_of_training_and_evaluation():
    ledger, keys = DurableLedger(), SystemKeys(b"k" * 32)
    first = client(ledger=ledger, keys=keys, held_out=HELD)
    first.fit(*gradient_request(first, 1))
    first.fit(*request())
    first.fit(*gradient_request(first, 2))
    again = client(ledger=ledger, keys=keys, held_out=HELD)
    again.fit(*gradient_request(again, 3))
    for place in (1, COUNT - 1):  # a row that was trained on, and one that was set aside
        other = DATA.features.copy()
        other[place] += 1
        changed = client(data=Labelled(other, DATA.labels), ledger=ledger, keys=keys, held_out=HELD)
        with raises(LedgerError, "mismatch", "data"):
            changed.fit(*gradient_request(changed, 4))


def test_all_of_it_is_one_budget_and_the_statement_says_the_whole():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    for t in range(1, 5):
        subject.fit(*gradient_request(subject, t))
    subject.fit(*request())
    for model in (MODEL, -MODEL):  # the same again, or another model: neither is answered twice
        with raises(RefusedError, "refused", code=protocol.CAP_REACHED) as refusal:
            subject.fit(*request(model))
        assert refusal.value.code == protocol.CAP_REACHED
    said = subject.statement("rest")
    assert said["mu-guaranteed"] == pytest.approx(MU, rel=1e-12)
    assert said["mu-spent"] == pytest.approx(MU, rel=1e-9)
    assert (said["mu-budget"], said["samples-used"]) == (MU, COUNT)
    for asked in (request(session="another"), gradient_request(subject, session="another")):
        with pytest.raises(RefusedError) as refusal:
            subject.fit(*asked)
        assert refusal.value.code == protocol.BUDGET_EXHAUSTED


def test_repeated_evaluations_stay_within_the_budget():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    possible = round(MU**2 / OWN_MU**2)
    for number in range(possible):
        subject.fit(*request(DRAW.normal(size=K), session=f"session{number}"))
    with pytest.raises(RefusedError) as refusal:
        subject.fit(*request(session="onemore"))
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED


def test_one_session_is_of_one_kind():
    subject = client()
    subject.fit(*request(session="both"))
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="policy"):
        subject.fit(*gradient_request(subject, session="both"))
    other = client()
    other.fit(*gradient_request(other, session="both"))
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="policy"):
        other.fit(*request(session="both"))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("points", "entries"),
    [
        ([], {}),
        ([MODEL, MODEL], {}),
        ([np.zeros(K + 1)], {}),
        ([np.full(K, math.nan)], {}),
        ([np.zeros(K, int)], {}),
        ([MODEL], {protocol.RELEASE_OF: "losses"}),
        ([MODEL], {protocol.RELEASE_OF: b"evaluation"}),
        ([MODEL], {protocol.RELEASE_OF: ["evaluation"]}),
        ([MODEL], {protocol.CLIENT: "2"}),
        ([MODEL], {protocol.SESSION: "a b"}),
    ],
    ids=str,
)
def test_a_malformed_request_is_refused_and_spends_nothing(points, entries):
    texts = set()
    for rows in (DATA.features, DATA.features * 0):
        subject = client(data=Labelled(rows, DATA.labels))
        with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="malformed request") as refusal:
            subject.fit(points, {**request()[1], **entries})
        texts.add(refusal.value.reason)
        assert subject.statement("rest")["samples-used"] == 0
    assert len(texts) == 1


def test_a_client_that_is_not_configured_refuses_and_flower_s_own_evaluation_stays_refused():
    subject = client(evaluates=False)
    with raises(
        RefusedError, "refused", code=protocol.NOT_CONFIGURED, match="not configured for private evaluation"
    ) as refusal:
        subject.fit(*request())
    assert refusal.value.code == protocol.NOT_CONFIGURED
    for one in (subject, client()):
        with pytest.raises(RefusedError) as refusal:
            one.evaluate([MODEL], request()[1])
        assert refusal.value.code == protocol.EVALUATION_BLOCKED


def test_an_evaluation_leaves_under_masks_only():
    subject = client(trust=SUMS, masking=masking_of("1", ROSTER))
    arrays, examples, metrics = subject.fit(*request())
    assert arrays[0].dtype == np.uint64
    assert (examples, arrays[0].shape) == (COUNT, (6,))
    bare = client(trust=SUMS, masking=masking_of("1", ROSTER))
    release = bare.released(bare._read(*request()))
    assert np.array_equal(unmasked(arrays, metrics, ROSTER)[0], release.counts)
    with raises(ConfigurationError, "missing", "masking"):
        client(trust=SUMS).fit(*request())


def test_under_sums_what_holds_whatever_happens_is_counted_as_well():
    subject = client(trust=SUMS, masking=masking_of("1", ROSTER))
    said = subject.statement("rest")
    assert said["mu-guaranteed"] == pytest.approx(MU, rel=1e-9)
    assert said[protocol.MU_LOCAL] == pytest.approx(MU * math.sqrt(2), rel=1e-3)


def test_samples_are_seen_from_the_centre_where_a_client_has_one():
    mean_mu, left = MU * math.sqrt(0.1), MU * math.sqrt(0.8)
    mean = centring_policy(1.0, nonnegative=False, mu=mean_mu, budget_mu=MU)
    seen = []

    def watching(parameters, samples):
        seen.append(samples[0])
        return Measured(np.ones(len(samples[1])))

    class Wider(Margins):
        def __init__(self):
            super().__init__()
            self.shapes = [(K + 1,)]

    subject = FullBatchClient(
        *(Wider(), DATA, replace(rest_policy(), mu=left), MemoryLedger(), SimulatedKeys(1, "1")),
        name="1",
        queries=[Centring(mean, K), Evaluation(own_policy(), watching, held_out=HELD)],
    )
    with raises(RefusedError, "refused", code=protocol.NOT_CONFIGURED, match="must bring a centre"):
        subject.fit(*request(np.zeros(K + 1)))
    centre = np.full(K, 0.5, np.float32)
    subject.fit(*request(np.zeros(K + 1), **{protocol.CENTRE: centre.astype("<f4").tobytes()}))
    assert np.array_equal(np.concatenate(seen), subject.giver.asked.seen(DATA[COUNT - HELD :], centre)[0])
    # What is set aside is not in the mean either.
    _, examples, _ = subject.fit([], training_config(session="mean", **{protocol.RELEASE_OF: protocol.OF_MEAN}))
    assert examples == COUNT - HELD
    assert subject.statement("rest")["mu-guaranteed"] == pytest.approx(MU, rel=1e-9)


def test_with_marks_beside_the_gradients_a_model_is_asked_for_without_a_clip():
    subject = client(gradients=CountedGradients(Margins()))
    subject.fit(*request())
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="expected 1 query points of 1 arrays"):
        subject.fit([MODEL, np.ones(1)], request(session="other")[1])


def test_a_model_of_other_shapes_than_the_gradients_is_evaluated_in_its_own():
    """Moments are no model's gradient."""
    own = Evaluation(own_policy(), measure, shapes=[[K + 2]])
    subject = FullBatchClient(
        Margins(), DATA, rest_policy(), MemoryLedger(), SimulatedKeys(1, "1"), name="1", queries=[own]
    )
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="shape"):
        subject.fit(*request())
    assert subject.fit(*request(np.append(MODEL, np.zeros(2))))[1] == COUNT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_selection": "once"}, "batch_selection 'cyclic' beside an evaluation"),
        ({"batch_selection": "shuffled"}, "another batch_selection than 'shuffled'"),
        ({"budget_mu": 3.0}, "one budget_mu"),
        ({"delta": 1e-6}, "one delta"),
        ({"trust": "trusted-server"}, "one trust"),
        ({"mechanism": "none"}, "noise on the evaluation"),
    ],
)
def test_a_policy_that_does_not_go_with_the_evaluation_s_is_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        Mu2Client(
            *(Margins(), DATA, rest_policy(Mu2Client, **changes), MemoryLedger(), SimulatedKeys(1, "1")),
            name="1",
            queries=[Evaluation(own_policy(), measure)],
        )


def test_what_is_no_evaluation_is_refused():
    for changes in ({"max_participations": 2, "sample_participations": 2}, {"clip_unit": "sample"}, {"clip_norm": 0.5}):
        with raises(ConfigurationError, "conflict", "policy", match="evaluation_policy"):
            Evaluation(replace(own_policy(), **changes), measure)
    for held_out in (-1, True, 0.5):
        with raises(ConfigurationError, "out-of-range", "held_out"):
            Evaluation(own_policy(), measure, held_out=held_out)
    with raises(ConfigurationError, "wrong-type", "measure"):
        Evaluation(own_policy(), None)
    with raises(ConfigurationError, "out-of-range", "bins"):
        Evaluation(own_policy(), measure, bins=1)
    with raises(ConfigurationError, "out-of-range", "held_out"):
        client(held_out=COUNT)
    policy = ShuffledPolicy(1.0, COUNT, 2, REST_MU, MU)
    with raises(ConfigurationError, "conflict", "evaluation", match="no evaluation for ShuffledClient"):
        ShuffledClient(
            *(Margins(), DATA, policy, MemoryLedger(), SimulatedKeys(1, "1")),
            name="1",
            learning_rate=0.1,
            queries=[Evaluation(own_policy(), measure)],
        )


def test_delayed_momentum_evaluates_as_well():
    subject = client(DelayedMomentumClient)
    assert subject.fit(*request())[1] == COUNT


def test_a_share_of_samples_is_at_least_one_and_never_all():
    assert [held_out_samples(n, 0.1) for n in (2, 9, 10, 19, 20, 1000)] == [1, 1, 1, 1, 2, 100]
    assert held_out_samples(2, 0.9) == 1
    for share in (0.0, 1.0, -1.0):
        with raises(ConfigurationError, "out-of-range", "share"):
            held_out_samples(10, share)


CLIENTS, EACH, ROUNDS, CLASSES = 4, 40, 3, 2
DRAWN = np.random.Generator(np.random.Philox(key=21))
INPUTS = DRAWN.normal(size=(CLIENTS, EACH, 3)).astype(np.float32)
TARGETS = (INPUTS.sum(axis=2) + 0.5 * DRAWN.normal(size=(CLIENTS, EACH)) > 0).astype(np.int64)
HUGE = 3e3  # a mu with next to no noise


def make_module(outputs=CLASSES):
    module = torch.nn.Linear(3, outputs)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-0.5, 0.7, 3 * outputs).reshape(outputs, 3))
        module.bias.zero_()
    return module


def load(context):
    number = int(context.node_config["partition-id"])
    return INPUTS[number], TARGETS[number]


def made(**changes):
    settings = {"mu": 2.0, "rounds": ROUNDS, "evaluation": 0.1, **changes}
    return private_client_app(settings.pop("model", make_module), samples=settings.pop("samples", load), **settings)


OPTIONS = {"num_clients": CLIENTS, "node_deadline_s": 1.0, "seed": 1}


def evaluated(app, *, nodes=CLIENTS, module=None, grid=None, **options):
    arrays = trainable_arrays(make_module() if module is None else module)
    return PrivateEvaluation(**OPTIONS, **options).evaluate(grid or NodesGrid(app, nodes), arrays)


def right_of(module, first):
    with torch.no_grad():
        guesses = module(torch.as_tensor(INPUTS[:, first:].reshape(-1, 3))).argmax(dim=1).numpy()
    return (guesses == TARGETS[:, first:].ravel()).mean()


def test_a_module_is_evaluated_on_what_was_set_aside():
    found = evaluated(made(mu=HUGE))
    assert (found.samples, found.held_out) == (4 * CLIENTS, True)
    assert found.accuracy == pytest.approx(right_of(make_module(), -4), abs=1e-3)
    everything = evaluated(made(mu=HUGE, evaluation=EvaluationShare(0.1, held_out=0)))
    assert (everything.samples, everything.held_out) == (EACH * CLIENTS, False)
    assert everything.accuracy == pytest.approx(right_of(make_module(), 0), abs=1e-3)


def test_training_and_evaluation_are_together_what_was_asked_for():
    app = made(mu=2.0, evaluation=0.2)
    grid, strategy = NodesGrid(app, CLIENTS), FullBatch(learning_rate=1.0, clients_per_round=CLIENTS, **OPTIONS)
    result = strategy.start(grid, trainable_arrays(make_module()), num_rounds=ROUNDS)
    evaluation = PrivateEvaluation(**OPTIONS)
    evaluation.evaluate(grid, result.arrays)
    for said in strategy.ask_privacy(grid).values():
        assert said["mu-guaranteed"] == said["mu-budget"] == pytest.approx(2.0, rel=1e-9)
        assert said["mu-spent"] == pytest.approx(2.0, rel=1e-9)
    assert strategy.history[0].samples == CLIENTS * (EACH - 4)
    noise = evaluation._stated["0"][0]
    assert noise == pytest.approx(math.sqrt(2) / (2.0 * math.sqrt(0.2)), rel=1e-2)


BUILT = {
    "mu2": (Mu2, {"learning_rate": 0.1, "clients_per_round": CLIENTS}),
    "full-batch": (FullBatch, {"learning_rate": 0.1, "clients_per_round": CLIENTS}),
    "fedavg": (CorrelatedFedAvg, {}),
    "fedavg in batches": (CorrelatedFedAvg, {}),
}
CASES = [
    pytest.param(method, trust, marks=[] if quick else [pytest.mark.long])
    for method in BUILT
    for trust in ("untrusted-server", "secure-aggregation")
    for quick in [(method, trust) in (("full-batch", "untrusted-server"), ("fedavg", "secure-aggregation"))]
]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("method", "trust"), CASES)
def test_every_method_is_evaluated_under_both_kinds_of_trust(method, trust):
    strategy, options = BUILT[method]
    batch = {"batch_size": 4} if method in ("mu2", "fedavg in batches") else {}
    sums, nodes = {}, CLIENTS
    if trust == "secure-aggregation":
        batch |= {"trust": trust, "sums": SumAssumption(2, 3)}
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3, helpers=2)}, CLIENTS + 2
    method = method.partition(" ")[0]
    grid = NodesGrid(made(method=method, mu=4.0, **batch), nodes)
    built = strategy(**options, **OPTIONS, **sums)
    result = built.start(grid, trainable_arrays(make_module()), num_rounds=ROUNDS)
    assert [report.aggregated for report in built.history] == [CLIENTS] * ROUNDS
    found = PrivateEvaluation(**OPTIONS, **sums, of_updates=method == "fedavg").evaluate(grid, result.arrays)
    assert (found.clients, found.samples) == (CLIENTS, 4 * CLIENTS)
    module = make_module()
    with torch.no_grad():
        for parameter, array in zip(module.parameters(), result.arrays.values(), strict=True):
            parameter.copy_(torch.as_tensor(array.numpy().copy()))
    assert found.accuracy == pytest.approx(right_of(module, -4), abs=6 * found.noise_std)
    assert all(said["mu-guaranteed"] == pytest.approx(4.0, rel=1e-6) for said in built.ask_privacy(grid).values())


@pytest.mark.parametrize("outputs", ["two", "a logit", "a probability"])
def test_scores_of_two_classes_give_an_area(outputs):
    losses = {"two": None, "a logit": torch.nn.BCEWithLogitsLoss(), "a probability": torch.nn.BCELoss()}
    models = {
        "two": make_module,
        "a logit": lambda: make_module(1),
        "a probability": lambda: torch.nn.Sequential(make_module(1), torch.nn.Sigmoid()),
    }

    def own(context):
        inputs, targets = load(context)
        return inputs, targets if outputs == "two" else targets[:, None].astype(np.float32)

    app = made(
        mu=HUGE, evaluation=EvaluationShare(0.5, held_out=0, score_bins=32), loss=losses[outputs],
        model=models[outputs], samples=own,
    )  # fmt: skip
    module = models[outputs]()
    found = evaluated(app, module=module, bins=32)
    with torch.no_grad():
        output = module(torch.as_tensor(INPUTS.reshape(-1, 3))).numpy()
    margin = output[:, 1] - output[:, 0] if outputs == "two" else output[:, 0]
    positive = TARGETS.ravel() == 1
    pairs = np.sign(margin[positive][:, None] - margin[~positive][None])
    assert found.auc == pytest.approx((pairs + 1).mean() / 2, abs=0.02)  # bins
    guesses = margin > (0.5 if outputs == "a probability" else 0)
    assert found.accuracy == pytest.approx((guesses == positive).mean(), abs=1e-3)


def test_a_regression_says_itself_which_predictions_are_right():
    def own(context):
        inputs, _ = load(context)
        return inputs, inputs.sum(axis=1, keepdims=True) / 2

    settings = {"mu": HUGE, "loss": torch.nn.MSELoss(), "model": lambda: make_module(1), "samples": own}
    close = EvaluationShare(0.1, held_out=0, right=lambda output, target: (output - target).abs().flatten() < 0.5)
    found = evaluated(made(evaluation=close, **settings), module=make_module(1))
    with torch.no_grad():
        output = make_module(1)(torch.as_tensor(INPUTS.reshape(-1, 3))).numpy()[:, 0]
    assert found.accuracy == pytest.approx((abs(output - INPUTS.sum(axis=2).ravel() / 2) < 0.5).mean(), abs=1e-3)


def test_a_linear_estimator_is_evaluated():
    linear = pytest.importorskip("sklearn.linear_model")
    from murmurfl.clients import LinearEstimator

    for labels in (TARGETS, (INPUTS[:, :, 0] > 0) + TARGETS):
        model = LinearEstimator(linear.LogisticRegression(C=1.0), 3, np.unique(labels).tolist(), num_samples=160)
        app = made(
            mu=HUGE, model=model, evaluation=EvaluationShare(held_out=0),
            samples=lambda context, labels=labels: (INPUTS[int(context.node_config["partition-id"])],
                                                    labels[int(context.node_config["partition-id"])]),
        )  # fmt: skip
        arrays = model.initial_arrays()
        for name, array in list(arrays.items()):
            arrays[name] = type(array)(DRAWN.normal(size=array.numpy().shape))
        found = PrivateEvaluation(**OPTIONS).evaluate(NodesGrid(app, CLIENTS), arrays)
        expected = model.fitted(arrays).score(INPUTS.reshape(-1, 3), labels.ravel())
        assert found.accuracy == pytest.approx(expected, abs=1e-3)


def test_every_session_costs_anew_and_needs_an_evaluation():
    grid = NodesGrid(made(evaluation=0.3), CLIENTS)
    for number in range(3):  # 3 x 0.3 of mu^2
        evaluated(None, grid=grid, session=f"again{number}")
    with raises(NotEvaluatedError, "missing", match="budget-exhausted"):
        evaluated(None, grid=grid, session="onemore")
    with raises(NotEvaluatedError, "missing", match="not-configured"):
        evaluated(made(evaluation=None))


def test_values_that_make_no_sense_are_refused():
    for changes, words in (
        ({"share": 0.0}, "share"),
        ({"share": 1.0}, "share"),
        ({"share": True}, "share"),
        ({"held_out": 1.0}, "held_out"),
        ({"held_out": -0.1}, "held_out"),
        ({"score_bins": 1}, "bins"),
        ({"right": 0.5}, "right"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            EvaluationShare(**changes)
    with raises(ConfigurationError, "out-of-range", "share"):
        made(evaluation=2)


def test_a_policy_that_says_everything_is_of_both():
    policy = PrivacyPolicy(1.0, 4, 5, 2.0, batch_selection="once")
    share = EvaluationShare(0.25)
    trained = share.training(policy)
    assert (trained.mu, trained.budget_mu, trained.batch_selection) == (
        pytest.approx(2.0 * math.sqrt(0.75)),
        2.0,
        "cyclic",
    )
    own = share.evaluation(policy, lambda parameters, samples: None, range(100))
    assert (own.policy.mu, own.policy.budget_mu, own.held_out) == (1.0, 2.0, 10)
    own.check_beside(trained)


def test_unreadable_outputs_end_a_simulation_with_advice():
    app = made(model=lambda: make_module(3), loss=torch.nn.MSELoss(), samples=lambda context: (INPUTS[0], INPUTS[0]))
    from murmurfl.clients.adapters.torch_checks import torch_client_model

    measure = torch_client_model(lambda: make_module(3), torch.nn.MSELoss(), seed=0, chunk=None).measure(None)
    with raises(ConfigurationError, "missing", "evaluation", match="evaluation=EvaluationShare"):
        measure([np.zeros((3, 3)), np.zeros(3)], (INPUTS[0], INPUTS[0]))
    assert app.evaluation.right is None
