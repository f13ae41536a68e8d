"""A private evaluation in one word: machines of a project's own model say how good it is, and mu stays what it was."""

import math

import numpy as np
import pytest
from murmurfl.clients import EvaluationShare, private_client_app, trainable_arrays
from murmurfl.privacy import ConfigurationError, PrivacyPolicy
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    Mu2,
    NotEvaluatedError,
    PrivateEvaluation,
    SecureAggregation,
)

from tests.harness.grid import NodesGrid

torch = pytest.importorskip("torch")

MACHINES, EACH, ROUNDS, CLASSES = 4, 40, 3, 2
DRAW = np.random.Generator(np.random.Philox(key=21))
INPUTS = DRAW.normal(size=(MACHINES, EACH, 3)).astype(np.float32)
TARGETS = (INPUTS.sum(axis=2) + 0.5 * DRAW.normal(size=(MACHINES, EACH)) > 0).astype(np.int64)
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


OPTIONS = {"num_clients": MACHINES, "node_deadline_s": 1.0, "seed": 1}


def evaluated(app, *, nodes=MACHINES, module=None, grid=None, **options):
    arrays = trainable_arrays(make_module() if module is None else module)
    return PrivateEvaluation(**OPTIONS, **options).evaluate(grid or NodesGrid(app, nodes), arrays)


def right_of(module, first):
    with torch.no_grad():
        guesses = module(torch.as_tensor(INPUTS[:, first:].reshape(-1, 3))).argmax(dim=1).numpy()
    return (guesses == TARGETS[:, first:].ravel()).mean()


def test_a_module_is_evaluated_on_what_was_set_aside():
    found = evaluated(made(mu=HUGE))
    assert (found.samples, found.held_out) == (4 * MACHINES, True)
    assert found.accuracy == pytest.approx(right_of(make_module(), -4), abs=1e-3)
    everything = evaluated(made(mu=HUGE, evaluation=EvaluationShare(0.1, held_out=0)))
    assert (everything.samples, everything.held_out) == (EACH * MACHINES, False)
    assert everything.accuracy == pytest.approx(right_of(make_module(), 0), abs=1e-3)


def test_training_and_evaluation_are_together_what_was_asked_for():
    app = made(mu=2.0, evaluation=0.2)
    grid, strategy = NodesGrid(app, MACHINES), FullBatch(learning_rate=1.0, clients_per_round=MACHINES, **OPTIONS)
    result = strategy.start(grid, trainable_arrays(make_module()), num_rounds=ROUNDS)
    evaluation = PrivateEvaluation(**OPTIONS)
    evaluation.evaluate(grid, result.arrays)
    for said in strategy.ask_privacy(grid).values():
        assert said["mu-guaranteed"] == said["mu-budget"] == pytest.approx(2.0, rel=1e-9)
        assert said["mu-spent"] == pytest.approx(2.0, rel=1e-9)
    assert strategy.history[0].samples == MACHINES * (EACH - 4)
    noise = evaluation._stated["0"][0]
    assert noise == pytest.approx(math.sqrt(2) / (2.0 * math.sqrt(0.2)), rel=1e-2)


BUILT = {
    "mu2": (Mu2, {"learning_rate": 0.1, "clients_per_round": MACHINES}),
    "full-batch": (FullBatch, {"learning_rate": 0.1, "clients_per_round": MACHINES}),
    "fedavg": (CorrelatedFedAvg, {}),
    "fedavg in batches": (CorrelatedFedAvg, {}),
}
CASES = [
    pytest.param(method, trust, marks=[] if quick else [pytest.mark.long])
    for method in BUILT
    for trust in ("untrusted-server", "secure-aggregation")
    for quick in [(method, trust) in (("full-batch", "untrusted-server"), ("fedavg", "secure-aggregation"))]
]


@pytest.mark.parametrize(("method", "trust"), CASES)
def test_every_method_is_evaluated_under_both_kinds_of_trust(method, trust):
    strategy, options = BUILT[method]
    batch = {"batch_size": 4} if method in ("mu2", "fedavg in batches") else {}
    sums, nodes = {}, MACHINES
    if trust == "secure-aggregation":
        batch |= {"trust": trust, "min_honest": 2, "min_cohort": 3}
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3, helpers=2)}, MACHINES + 2
    method = method.partition(" ")[0]
    grid = NodesGrid(made(method=method, mu=4.0, **batch), nodes)
    built = strategy(**options, **OPTIONS, **sums)
    result = built.start(grid, trainable_arrays(make_module()), num_rounds=ROUNDS)
    assert [report.aggregated for report in built.history] == [MACHINES] * ROUNDS
    found = PrivateEvaluation(**OPTIONS, **sums, of_updates=method == "fedavg").evaluate(grid, result.arrays)
    assert (found.machines, found.samples) == (MACHINES, 4 * MACHINES)
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
            arrays[name] = type(array)(DRAW.normal(size=array.numpy().shape))
        found = PrivateEvaluation(**OPTIONS).evaluate(NodesGrid(app, MACHINES), arrays)
        expected = model.fitted(arrays).score(INPUTS.reshape(-1, 3), labels.ravel())
        assert found.accuracy == pytest.approx(expected, abs=1e-3)


def test_every_session_costs_anew_and_needs_an_evaluation():
    grid = NodesGrid(made(evaluation=0.3), MACHINES)
    for number in range(3):  # 3 x 0.3 of mu^2
        evaluated(None, grid=grid, session=f"again{number}")
    with pytest.raises(NotEvaluatedError, match="budget-exhausted"):
        evaluated(None, grid=grid, session="onemore")
    with pytest.raises(NotEvaluatedError, match="not-configured"):
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
    with pytest.raises(ConfigurationError, match="share"):
        made(evaluation=2)


def test_a_policy_that_says_everything_is_of_both():
    policy = PrivacyPolicy(1.0, 4, 5, 2.0, order="in-turn")
    share = EvaluationShare(0.25)
    trained = share.training(policy)
    assert (trained.mu, trained.budget_mu, trained.order) == (pytest.approx(2.0 * math.sqrt(0.75)), 2.0, "again")
    own = share.evaluation(policy, lambda parameters, samples: None, range(100))
    assert (own.policy.mu, own.policy.budget_mu, own.held_out) == (1.0, 2.0, 10)
    own.check_beside(trained)


def test_unreadable_outputs_end_a_simulation_with_advice():
    app = made(model=lambda: make_module(3), loss=torch.nn.MSELoss(), samples=lambda context: (INPUTS[0], INPUTS[0]))
    from murmurfl.clients.adapters.torch_checks import torch_machine_model

    measure = torch_machine_model(lambda: make_module(3), torch.nn.MSELoss(), seed=0, chunk=None).measure(None)
    with pytest.raises(ConfigurationError, match="evaluation=EvaluationShare"):
        measure([np.zeros((3, 3)), np.zeros(3)], (INPUTS[0], INPUTS[0]))
    assert app.evaluation.right is None
