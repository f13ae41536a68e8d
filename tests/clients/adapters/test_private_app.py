"""Sample-level privacy in the lines a mod takes: what clients release, to which strategy, and what they refuse."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from murmurfl.clients import Label, Part, Schema, load_trainable, private_client_app, trainable_arrays
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SumAssumption, gdp_mu, protocol
from murmurfl.strategies import (
    CorrelatedFedAvg,
    FullBatch,
    NodesUnavailableError,
    NothingAggregatedError,
    SecureAggregation,
)

from tests.harness.clients import each_method, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, ask, ask_real_node

pytestmark = pytest.mark.usefixtures("no_result_folder")

torch = pytest.importorskip("torch")
CLIENTS, EACH, ROUNDS, CLIP = 4, 12, 5, 0.5
HUGE = 3e3  # a mu with next to no noise
GENERATOR = np.random.Generator(np.random.Philox(key=18))
INPUTS = GENERATOR.normal(size=(CLIENTS, EACH, 3)).astype(np.float32)
TARGETS = (INPUTS.sum(axis=2) > 0).astype(np.int64)


def make_module():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5 + number / 10, parameter.numel()).reshape(parameter.shape))
    return module


def load(context):
    number = int(context.node_config["partition-id"])
    return INPUTS[number], TARGETS[number]


def made(**changes):
    settings = {"mu": 2.0, "rounds": ROUNDS, "clip_norm": CLIP, **changes}
    return private_client_app(make_module, samples=load, **settings)


def clipped_gradients(module, inputs, targets):
    """One by one, by plain autograd."""
    rows = []
    for one, target in zip(torch.as_tensor(inputs), torch.as_tensor(targets), strict=True):
        loss = torch.nn.functional.cross_entropy(module(one[None]), target[None])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
        rows.append(gradient * min(1.0, CLIP / float(gradient.norm())))
    return torch.stack(rows).double().numpy()


OPTIONS = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "node_deadline_s": 1.0, "seed": 1, "session": "s"}


def train(app, strategy, *, nodes=CLIENTS, rounds=ROUNDS, lost=0.0):
    return strategy.start(NodesGrid(app, nodes, lost=lost), trainable_arrays(make_module()), num_rounds=rounds)


def moved(result):
    """How far a training has moved the model, as one vector."""
    pairs = zip(result.arrays.values(), trainable_arrays(make_module()).values(), strict=True)
    return np.concatenate([(after.numpy() - before.numpy()).ravel() for after, before in pairs])


ALL_GRADIENTS = clipped_gradients(make_module(), INPUTS.reshape(-1, 3), TARGETS.reshape(-1))


def test_a_full_batch_is_the_mean_of_every_samples_clipped_gradient():
    strategy = FullBatch(learning_rate=2.0, **OPTIONS)
    result = train(made(mu=HUGE), strategy, rounds=1)
    assert moved(result) == pytest.approx(-2.0 * ALL_GRADIENTS.mean(axis=0), abs=1e-3)
    assert strategy.history[0].samples == CLIENTS * EACH


def test_fedavg_gets_the_mean_gradient_as_an_update_which_its_optimisers_step_along():
    strategy = CorrelatedFedAvg(learning_rate=2.0, **{k: v for k, v in OPTIONS.items() if k != "clients_per_round"})
    result = train(made(mu=HUGE, method="fedavg"), strategy, rounds=1)
    assert moved(result) == pytest.approx(-2.0 * ALL_GRADIENTS.mean(axis=0), abs=1e-3)


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_batches_for_fedavg_are_means_and_a_lost_one_is_carried_over(lost):
    strategy = CorrelatedFedAvg(num_clients=CLIENTS, node_deadline_s=1.0, seed=1, session="s", learning_rate=1e-3)
    result = train(made(mu=HUGE, method="fedavg", batch_size=2, rounds=6), strategy, rounds=6, lost=lost)
    used = sum(2 * strategy.acks[str(i)] for i in range(CLIENTS))
    assert (used < CLIENTS * EACH) == (lost > 0 and min(strategy.acks.values()) < 6)
    first = np.concatenate(
        [
            ALL_GRADIENTS.reshape(CLIENTS, EACH, -1)[i, : 2 * k]
            for i, k in enumerate(strategy.acks[str(i)] for i in range(CLIENTS))
        ]
    )
    # The model hardly moves, so that every gradient is close to the one where it began.
    assert moved(result) == pytest.approx(-1e-3 / (2 * CLIENTS) * first.sum(axis=0), abs=2e-5)


@pytest.mark.few_cases(4)
@each_method
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_every_method_trains_with_its_strategy_under_both_kinds_of_trust(method, strategy, options, trust):
    batch = {} if method in ("full-batch", "fedavg") else {"batch_size": 2}
    sums, nodes = {}, CLIENTS
    if trust == "secure-aggregation":
        batch |= {"trust": trust, "sums": SumAssumption(2, 3)}
        sums, nodes = {"secure_aggregation": SecureAggregation(min_cohort=3, helpers=2)}, CLIENTS + 2
    built = strategy(**options, **OPTIONS, **sums)
    result = train(made(method=method, **batch), built, nodes=nodes)
    assert [report.aggregated for report in built.history] == [CLIENTS] * ROUNDS
    assert np.abs(moved(result)).max() > 0


@pytest.mark.parametrize(
    ("method", "strategy"),
    [
        ("full-batch", CorrelatedFedAvg(num_clients=1, node_deadline_s=0.1)),
        ("fedavg", FullBatch(num_clients=1, clients_per_round=1, learning_rate=1.0, node_deadline_s=0.1)),
    ],
)
def test_a_strategy_that_takes_releases_for_something_else_gets_none(method, strategy):
    with pytest.raises((NodesUnavailableError, ConfigurationError)):
        train(made(method=method), strategy, nodes=1)
    assert not strategy.history


def asked(app, record, kind="train", number=0, grid=None, **entries):
    """One node's reply to one message."""
    grid = grid or NodesGrid(app, CLIENTS)
    content = RecordDict({"arrays": record, "config": ConfigRecord(training_config(**entries))})
    (reply,) = grid.send_and_receive([Message(content, grid.first_node + number, kind)])
    return reply


def released(app):
    reply = asked(app, trainable_arrays(make_module()))
    assert not reply.has_error(), reply.error
    return np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])


@pytest.mark.parametrize("method", ["full-batch", "fedavg"])
def test_replacing_one_sample_moves_a_release_by_no_more_than_is_charged(method, monkeypatch):
    app = made(method=method)
    assert_moves_at_most_twice_the_clip(app, method, monkeypatch)


def assert_moves_at_most_twice_the_clip(app, method, monkeypatch):
    one = released(app)
    changed = INPUTS.copy()
    changed[0, 3] *= -300.0
    monkeypatch.setattr(f"{__name__}.INPUTS", changed)
    another = released(made(method=method))
    charged = app.policy.plan(len(one)).sensitivity
    assert 0 < np.linalg.norm(one - another) <= charged


def test_lengths_that_are_told_too_short_are_noticed(monkeypatch):
    """A planted bug, for the test above."""
    from murmurfl.clients.adapters import torch_model

    monkeypatch.setattr(torch_model._NarrowRows, "norms", lambda self: np.full(len(self._rows), 1e-9))
    with pytest.raises(AssertionError):
        assert_moves_at_most_twice_the_clip(made(), "full-batch", monkeypatch)


def test_gradients_that_see_the_other_samples_are_noticed(monkeypatch):
    """Another one: every row has the batch's sum in it."""
    from murmurfl.clients.adapters.torch_model import ModuleGradients

    real = ModuleGradients._rows

    def mixed(self, *asked, **beside):
        rows = real(self, *asked, **beside)
        return rows + rows.sum(axis=0)

    monkeypatch.setattr(ModuleGradients, "_rows", mixed)
    with pytest.raises(AssertionError):
        assert_moves_at_most_twice_the_clip(made(), "full-batch", monkeypatch)


def test_a_worker_keeps_samples_while_there_is_memory_for_them(monkeypatch):
    from murmurfl.clients.adapters import private_app

    def loaded(numbers):
        seen = []

        def counted(context):
            seen.append(context.node_config["partition-id"])
            return load(context)

        app = private_client_app(make_module, samples=counted, mu=2.0, rounds=ROUNDS)
        for number in numbers:
            asked(app, trainable_arrays(make_module()), number=number)
        return seen

    others = [1, 2, 3, 0]  # of which the schema is inferred too, once; and whether records change, by the first client
    assert loaded([0, 1, 0, 1]) == [0, *others, 1]
    monkeypatch.setattr(private_app, "_KEPT_BYTES", 1)
    assert loaded([0, 0, 1, 0]) == [0, *others, 1, 0], "the last one's are kept whatever they take"


@pytest.mark.parametrize(
    ("record", "kind", "code", "said"),
    [
        (
            lambda: ArrayRecord(torch.nn.Sequential(make_module(), torch.nn.BatchNorm1d(2)).state_dict()),
            "train",
            protocol.MALFORMED_REQUEST,
            "trainable_arrays",
        ),
        (lambda: ArrayRecord({"w": Array(np.zeros(3))}), "train", protocol.MALFORMED_REQUEST, "trainable_arrays"),
        (lambda: trainable_arrays(make_module()), "evaluate", protocol.EVALUATION_BLOCKED, "does not evaluate"),
        (lambda: trainable_arrays(make_module()), "query", protocol.MALFORMED_REQUEST, "query"),
        (lambda: trainable_arrays(make_module()), "query.open", protocol.OPENING_REFUSED, "no helper"),
    ],
)
def test_other_requests_are_refused_with_a_text_that_depends_on_them_alone(record, kind, code, said):
    texts = set()
    for number in range(CLIENTS):
        reply = asked(made(), record(), kind, number)
        assert reply.error.code == code
        assert said in reply.error.reason
        texts.add(reply.error.reason)
    assert len(texts) == 1


def test_a_server_without_murmurfls_strategy_is_told_which_one_to_use():
    content = RecordDict({"arrays": trainable_arrays(make_module()), "config": ConfigRecord({"lr": 0.1})})
    reply = ask(made(), content=content)
    assert reply.error.code == protocol.PROTOCOL_MISMATCH
    assert "FullBatch" in reply.error.reason


def test_a_failure_says_nothing_of_the_data(monkeypatch):
    monkeypatch.setattr("murmurfl.clients.messages.in_simulation", lambda: False)  # whose text a server gets
    secret = "patient 4711"

    def broken(context):
        raise ValueError(secret)

    app = private_client_app(make_module, samples=broken, mu=1.0, rounds=2)
    reply = asked(app, trainable_arrays(make_module()))
    assert reply.has_error()
    assert secret not in reply.error.reason


def test_no_more_releases_than_rounds_and_no_second_session():
    app = made(rounds=2)
    grid = NodesGrid(app, 1)
    codes = []
    for session, ack in (("s", 0), ("s", 1), ("s", 2), ("t", 0)):
        reply = asked(app, trainable_arrays(make_module()), grid=grid, ack=ack, session=session)
        codes.append(reply.error.code if reply.has_error() else 0)
    assert codes == [0, 0, protocol.CAP_REACHED, protocol.BUDGET_EXHAUSTED]


def test_epsilon_is_kept_exactly_and_the_policy_says_everything_else():
    assert made(mu=None, epsilon=2.0, delta=1e-6).policy.mu == gdp_mu(2.0, 1e-6)
    policy = PrivacyPolicy(0.7, 1, 3, 1.5, batch_selection="full_batch", mechanism="independent", release_rule="paper")
    assert private_client_app(make_module, samples=load, policy=policy).policy is policy


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mu": None}, "Expected mu or epsilon"),
        ({"epsilon": 2.0}, "got both"),
        ({"rounds": None}, "Expected rounds"),
        ({"batch_size": 3}, "batch_size to be left out with method 'full-batch'"),
        ({"method": "mu2"}, "batch_size to be set with method 'mu2'"),
        ({"method": "sgd"}, "method one of 'mu2', 'full-batch', 'noisy-sgd', 'fedavg'"),
        ({"policy": PrivacyPolicy(1.0, 1, 3, 1.0)}, "Expected policy or mu, clip_norm, rounds, got both"),
        ({"chunk": 0}, "chunk"),
        ({"helpers": 0, "trust": "secure-aggregation", "sums": SumAssumption(1, 2)}, "helpers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        made(**changes)


def test_samples_are_needed_and_must_be_some():
    with raises(ConfigurationError, "missing", "samples"):
        private_client_app(make_module, mu=1.0, rounds=2)
    unlabelled, words = [{"img": INPUTS[0][0], "class": 1}], [("a text", 1)]
    for wrong in (
        (INPUTS[0],),
        unlabelled,
        words,
        "data",
        iter([1]),
        [],
        {"x": INPUTS[0]},
        (INPUTS[0], TARGETS[0][:3]),
    ):
        with pytest.raises(ConfigurationError, match="Expected"):
            private_client_app(make_module, samples=wrong, mu=1.0, rounds=2)


def turned(items):
    targets, inputs = torch.utils.data.default_collate(items)
    return inputs, targets


def hugging(pair):
    datasets = pytest.importorskip("datasets")
    rows = {"img": pair[0].tolist(), "label": pair[1].tolist()}
    return datasets.Dataset.from_dict(rows).with_transform(lambda batch: {**batch, "img": torch.tensor(batch["img"])})


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "tensors",
        "dataset",
        "loader",
        "pairs",
        "own",
        "rows",
        "collated",
        pytest.param("hugging", marks=pytest.mark.long),
    ],
)
def test_samples_may_be_whatever_a_project_has(kind):
    pair = torch.as_tensor(INPUTS[0]), torch.as_tensor(TARGETS[0])
    dataset = torch.utils.data.TensorDataset(*pair)

    class Own:
        def __len__(self):
            return EACH

        def __getitem__(self, chosen):
            return INPUTS[0][chosen], TARGETS[0][chosen]

    given = {
        "arrays": (INPUTS[0], TARGETS[0]),
        "tensors": pair,
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=5, shuffle=True),
        "pairs": list(zip(INPUTS[0], TARGETS[0].tolist(), strict=True)),
        "own": Own(),
        "rows": [{"label": int(label), "img": image} for image, label in zip(*pair, strict=True)],
        "collated": torch.utils.data.DataLoader(list(zip(TARGETS[0], INPUTS[0], strict=True)), collate_fn=turned),
        "hugging": hugging(pair) if kind == "hugging" else None,
    }[kind]
    app = private_client_app(make_module, samples=lambda context: given, mu=HUGE, rounds=1, clip_norm=CLIP)
    expected = ALL_GRADIENTS[:EACH].sum(axis=0)
    assert released(app) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("wrong", ["a cell", "a label"])
def test_a_record_of_a_simulation_that_does_not_fit_counts_as_zero(wrong, caplog):
    inputs, targets = INPUTS[0].copy(), TARGETS[0].astype(float)
    (inputs[3:4, 1] if wrong == "a cell" else targets[3:4])[:] = np.nan
    schema = Schema(inputs=(Part(shape=(3,)),), label=Label(classes=2))
    app = private_client_app(
        make_module, samples=lambda context: (inputs, targets), schema=schema, mu=HUGE, rounds=1, clip_norm=CLIP
    )
    expected = ALL_GRADIENTS[[i for i in range(EACH) if i != 3]].sum(axis=0)
    assert released(app) == pytest.approx(expected, abs=1e-2)
    assert "11 of 12 records fit the schema" in caplog.text


@each_method
def test_clients_of_one_class_or_one_record_take_part(method, strategy, options):
    """Classes are known from all clients; a client with fewer records than a batch sends what it has."""

    def own(context):
        number = int(context.node_config["partition-id"])
        rows = slice(0, 1 if number == 0 else None)
        inputs = np.zeros_like(INPUTS[number]) if number == 1 else INPUTS[number]
        return inputs[rows], np.full(EACH, number % 2)[rows]

    batch = {} if method == "full-batch" else {"batch_size": 4}
    built = strategy(**options, **OPTIONS)
    app = private_client_app(make_module, samples=own, mu=2.0, rounds=ROUNDS, clip_norm=CLIP, method=method, **batch)
    result = train(app, built)
    assert [report.aggregated for report in built.history] == [CLIENTS] * ROUNDS
    assert moved(result).any()


def test_a_simulation_none_of_whose_records_fit_says_so():
    schema = Schema(inputs=(Part(shape=(4,)),), label=Label(classes=2))
    app = private_client_app(make_wide, samples=load, schema=schema, mu=1.0, rounds=1)
    reply = asked(app, trainable_arrays(make_wide()))
    assert reply.error.code == protocol.NOT_CONFIGURED


def make_wide():
    return torch.nn.Linear(4, 2)


def test_a_real_node_without_its_operators_file_refuses(monkeypatch):
    monkeypatch.delenv("MURMURFL_NODE_CONFIG", raising=False)
    content = RecordDict({"arrays": trainable_arrays(make_module()), "config": ConfigRecord(training_config())})
    reply = ask_real_node(made(mu=1e6), content)
    assert reply.error.code == protocol.NOT_CONFIGURED


def test_a_trained_model_goes_back_into_a_module():
    result = train(made(), FullBatch(learning_rate=1.0, **OPTIONS))
    module = load_trainable(make_module(), result.arrays)
    for name, parameter in module.named_parameters():
        assert parameter.detach().numpy() == pytest.approx(result.arrays[name].numpy())
    with raises(ConfigurationError, "mismatch", "arrays"):
        load_trainable(torch.nn.Linear(3, 4), result.arrays)


def test_a_whole_state_dict_ends_training_with_advice(caplog):
    strategy = FullBatch(learning_rate=2.0, **OPTIONS)
    whole = ArrayRecord({"more": Array(np.zeros(3)), **trainable_arrays(make_module())})
    with raises(NothingAggregatedError, "missing", match=r"start the strategy with murmurfl.clients.trainable_arrays"):
        strategy.start(NodesGrid(made(), CLIENTS), whole, num_rounds=ROUNDS)
    assert caplog.text.count("clients refuse: malformed request") == 1


@pytest.mark.parametrize("wide", [1.0, 10.0])
def test_the_clip_of_a_module_follows_from_gradients_for_made_up_records_and_not_from_samples(wide):
    schema = Schema(inputs=(Part(shape=(3,), bounds=(-wide, wide)),), label=Label(classes=2))

    def zeros():
        module = torch.nn.Linear(3, 2)
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
        return module

    def never(context):
        pytest.fail("a sample was looked at")

    app = private_client_app(zeros, samples=never, mu=2.0, rounds=ROUNDS, schema=schema)
    longest = np.hypot(wide * 3**0.5, 1.0)
    assert 0.05 * longest < app.policy.clip_norm <= 0.1 * longest * (1 + 1e-6)
    bound = app.policy.clip_norm / 0.1
    assert app.steps()["learning_rate"] == pytest.approx(120 / (app.policy.clip_norm * bound * ROUNDS))
    open_ended = Schema(inputs=(Part(shape=(3,)),), label=Label(classes=2))
    normal = private_client_app(zeros, samples=never, mu=2.0, rounds=ROUNDS, schema=open_ended)
    assert 0.05 < normal.policy.clip_norm < 0.5  # extremes of 1e30 do not count


@pytest.mark.parametrize(("options", "same"), [({"seed": 1, "session": "s"}, True), ({"seed": 1}, False)])
def test_a_simulation_repeats_with_a_seed_and_a_session(options, same):
    """As the pages say: the session names the noise, and is random by default."""

    def trained():
        app = private_client_app(make_module, samples=load, mu=2.0, rounds=2, clip_norm=1.0)
        strategy = FullBatch(learning_rate=0.1, num_clients=CLIENTS, **options)
        return strategy.start(NodesGrid(app, CLIENTS), trainable_arrays(make_module()), num_rounds=2).arrays

    first, second = (np.concatenate([a.numpy().ravel() for a in trained().values()]) for _ in range(2))
    assert (first == second).all() == same


NETWORK = Schema(inputs=(Part(shape=(3,), bounds=(-1, 1)),), label=Label(classes=2))


@pytest.mark.parametrize("rounds", [2, 20])
def test_steps_of_a_network_are_a_share_of_its_untrained_parameters(rounds):
    """eta S is at most a fifth of their norm; one weight matrix has no such limit, nor has a frozen layer."""

    def step(module):
        app = private_client_app(module, samples=lambda context: (), mu=2.0, rounds=rounds, schema=NETWORK)
        return app.steps()["learning_rate"] * app.policy.clip_norm, 12.0 / (app.policy.clip_norm * rounds)

    torch.manual_seed(4)
    deep = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter *= 0.1
    norm = float(torch.cat([parameter.detach().flatten() for parameter in deep.parameters()]).norm())
    length, linear = step(deep)
    assert length == pytest.approx(min(0.2 * norm, linear))
    if rounds == 2:
        assert length < linear / 2
        deep[0].requires_grad_(False)
        length, linear = step(deep)
    else:
        length, linear = step(torch.nn.Linear(3, 2))
    assert length == pytest.approx(linear)


@pytest.mark.parametrize(("method", "batch_size"), [("mu2", 4), ("noisy-sgd", 4), ("fedavg", None)])
def test_methods_without_a_rule_for_networks_suggest_no_steps(method, batch_size):
    for module, fits in ((torch.nn.Linear(3, 2), True), (make_module(), False)):
        app = private_client_app(
            module,
            samples=lambda context: (),
            mu=2.0,
            rounds=4,
            schema=NETWORK,
            method=method,
            batch_size=batch_size,
        )
        if fits:
            assert app.steps()["learning_rate"] > 0
        else:
            with raises(ConfigurationError, "unsupported", "method"):
                app.steps()


def test_a_network_learns_with_the_clip_and_steps_of_its_schema():
    generator = np.random.Generator(np.random.Philox(key=19))
    labels = np.arange(800) % 2
    rows = (generator.normal(size=(800, 3)) * 0.3 + np.where(labels, 0.4, -0.4)[:, None]).clip(-1, 1)
    schema = Schema(inputs=(Part(shape=(3,), bounds=(-1, 1)),), label=Label(classes=2))

    def part(context):
        chosen = slice(int(context.node_config["partition-id"]), 400, CLIENTS)
        return rows[chosen].astype(np.float32), labels[chosen]

    app = private_client_app(make_module, samples=part, mu=4.0, rounds=12, schema=schema)
    result = train(app, FullBatch(**app.steps(), **OPTIONS), rounds=12)
    module = make_module()
    load_trainable(module, result.arrays)
    right = module(torch.as_tensor(rows[400:], dtype=torch.float32)).argmax(dim=1).numpy() == labels[400:]
    assert right.mean() > 0.85
