"""Rounds that clients can take part in: how many, which stay closed, and the ways out of a refusal."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.app import MessageType
from flwr.clientapp import ClientApp
from murmurfl.app import client_app
from murmurfl.app.client_app import app
from murmurfl.app.commands.main import cli
from murmurfl.app.data.task import Dataset
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import NoReleasesError, run_experiment
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import LinearEstimator, numpy_client_app
from murmurfl.privacy import ConfigurationError, MemoryLedger
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from tests.app.plain import SET, simulate
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast")

BASE = RunConfig(num_clients=6, clients_per_round=6, batch_size=20, num_rounds=500, evaluate_every=1000)
SHUFFLED = replace(
    *(BASE,), strategy="shuffled", task="synthetic-logistic", partition="own", model="logistic", synthetic_samples=60,
    synthetic_features=3, num_clients=3, clients_per_round=3, batch_size=8, num_rounds=9, max_participations=2,
    accounting="composed",
)  # fmt: skip
CONFIGURATIONS = {
    "mu2": BASE,
    "mu2, losses": replace(BASE, lost_replies=0.3),
    "mu2, the papers' release rule": replace(BASE, release_rule="paper", lost_replies=0.3),
    "mu2, some clients": replace(BASE, clients_per_round=2),
    "mu2, some clients, dealt": replace(BASE, clients_per_round=4, sampling="balanced"),
    "mu2, some clients, losses, another seed": replace(BASE, clients_per_round=5, lost_replies=0.3, seed=7),
    "mu2, uneven clients": replace(BASE, partition="dirichlet", seed=2),
    "mu2, some uneven clients": replace(BASE, partition="half-by-label", num_clients=10, clients_per_round=3),
    "mu2, uneven clients, sums": replace(BASE, partition="dirichlet", seed=2, trust="secure-aggregation"),
    "mu2, some clients, dealt, sums": replace(
        BASE, clients_per_round=4, sampling="balanced", trust="secure-aggregation"
    ),
    "mu2, a cap": replace(BASE, max_participations=3),
    "mu2, a cap, some clients": replace(BASE, max_participations=3, clients_per_round=2),
    "trusted-mu2": replace(BASE, strategy="trusted-mu2"),
    "delayed-momentum": replace(BASE, strategy="delayed-momentum", clients_per_round=3),
    "noisy-sgd": replace(BASE, strategy="noisy-sgd", clients_per_round=3),
    "isrl-dp, passes": replace(BASE, strategy="isrl-dp", passes=2, clients_per_round=4),
    "isrl-dp-accelerated, passes": replace(BASE, strategy="isrl-dp-accelerated", passes=2),
    "tree-momentum, uneven clients": replace(BASE, strategy="tree-momentum", partition="dirichlet", seed=2),
    "correlated-momentum, passes": replace(BASE, strategy="correlated-momentum", passes=2),
    "reduced-tree-momentum": replace(BASE, strategy="reduced-tree-momentum"),
    "trusted-sgd": replace(BASE, strategy="trusted-sgd"),
    "online": replace(BASE, strategy="online", clients_per_round=4),
    "shuffled, dp-shuffleg": replace(SHUFFLED, variant="dp-shuffleg"),
    "shuffled, priv-pub": replace(SHUFFLED, variant="priv-pub", public_samples=20),
    "shuffled, pub-priv": replace(SHUFFLED, variant="pub-priv", public_samples=20),
    "shuffled, some silos": replace(SHUFFLED, variant="dp-shuffleg", clients_per_round=2),
}


def refusals(config):
    return sum(report.refusals for report in run_cohort(config).strategy.history)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_number_said_is_the_largest_without_a_refusal(name):
    config = CONFIGURATIONS[name]
    with raises(ConfigurationError, "exhausted", "num-rounds", match=f"got {config.num_rounds}: client") as caught:
        run_cohort(config)
    possible = int(re.search(r"num-rounds <= (\d+),", str(caught.value))[1])
    assert possible > 1
    assert refusals(replace(config, num_rounds=possible)) == 0
    with raises(ConfigurationError, "exhausted", "num-rounds", match=f"num-rounds <= {possible}, got {possible + 1}"):
        run_cohort(replace(config, num_rounds=possible + 1))
    if config.strategy != "reduced-tree-momentum":  # which ends with the first refusal
        assert refusals(replace(config, num_rounds=possible + 1, allow_exhaustion=True)) > 0


def test_the_command_refuses_before_the_first_round(tmp_path):
    for engine in ("cohort", "inprocess", "ray"):
        arguments = ["run", "--engine", engine, "--out", str(tmp_path), *SET, "--set", "num-rounds=1000"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 1
        assert "murmurfl: Expected num-rounds <= 17, got 1000: client " in result.stderr
        assert "round " not in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_cap_below_one_pass_is_refused_too():
    with raises(
        ConfigurationError, "exhausted", "num-rounds", match=r"num-rounds <= 5, got 17: .*max-participations = 5"
    ):
        run_cohort(RunConfig(max_participations=5))


def test_one_pass_over_uneven_clients_says_who_runs_out_first(caplog):
    config = RunConfig(partition="dirichlet", evaluate_every=100)
    with caplog.at_level("WARNING", logger="flwr"):
        assert refusals(config) > 0
    assert "Not every client lasts for all 17 rounds: client 2 is the first" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="flwr"):
        assert refusals(RunConfig(evaluate_every=100)) == 0
    assert "lasts for" not in caplog.text


def test_the_public_epochs_of_a_server_are_not_taken_for_silence():
    config = replace(SHUFFLED, variant="pub-priv", public_samples=20, num_rounds=8, max_participations=0)
    assert refusals(config) == 0


def test_a_simulation_from_which_nothing_comes_any_more_gives_up(tmp_path):
    dry = replace(BASE, num_rounds=30, allow_exhaustion=True, give_up_after=2)
    with raises(NoReleasesError, "missing", match="2 rounds in a row, the last of them round 14: .*cap-reached"):
        run_cohort(dry)
    assert refusals(replace(dry, give_up_after=0)) > 0  # never
    arguments = [f"--set={key}" for key in ("num-rounds=30", "batch-size=20", "passes=1", "allow-exhaustion=true")]
    result = CliRunner().invoke(cli, ["run", "--out", str(tmp_path), *SET, *arguments])
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("murmurfl: Expected releases to aggregate, got none in 3 rounds in a row")


CONFIG = RunConfig(num_clients=2, clients_per_round=2, batch_size=32, num_rounds=4)


def real_clients(cap, requests):
    """Clients whose operators allow ``cap`` releases, whatever the run configuration says."""
    experiment = prepare(replace(CONFIG, num_rounds=cap))
    clients = [experiment.client(client, MemoryLedger()) for client in range(2)]

    def client_fn(context):
        requests.append(context)
        return clients[int(context.node_config["partition-id"])]

    return InProcessGrid(numpy_client_app(client_fn), 2, {}), clients


def test_real_clients_are_asked_what_they_can_do_before_the_first_round():
    grid, clients = real_clients(3, [])
    with raises(
        ConfigurationError,
        "exhausted",
        "num_rounds",
        match="3 rounds, got 4: client 0 says that it can make 3 releases",
    ):
        run_experiment(grid, CONFIG, deployed=True)
    assert [client.statement("any")["samples-used"] for client in clients] == [0, 0]
    grid, _ = real_clients(4, [])
    assert len(run_experiment(grid, CONFIG, deployed=True).progress) == 4


def test_real_clients_may_run_dry_where_that_is_asked_for():
    grid, _ = real_clients(3, [])
    result = run_experiment(grid, replace(CONFIG, allow_exhaustion=True), deployed=True)
    assert [report.aggregated for report in result.strategy.history] == [2, 2, 2, 0]


def test_real_clients_keep_their_operators_caps():
    config = replace(CONFIG, max_participations=3, num_rounds=4)
    with raises(ConfigurationError, "exhausted", "num-rounds", match="num-rounds <= 3"):
        run_experiment(InProcessGrid(client_app.app, 2, config.to_mapping()), config)
    grid, _ = real_clients(4, [])
    assert len(run_experiment(grid, config, deployed=True).progress) == 4


def test_clients_that_state_nothing_are_trained_with():
    grid, _ = real_clients(4, [])
    whole, app = grid._client_app, ClientApp()

    @app.train()
    def train(message, context):
        return whole(message, context)

    @app.query()
    def query(message, context):
        if message.content["config"]["ask"] == "privacy":
            raise RuntimeError("an older version")
        return whole(message, context)

    grid._client_app = app
    assert len(run_experiment(grid, CONFIG, deployed=True).progress) == 4


def test_the_rest_of_an_interrupted_run_is_a_warning(tmp_path, caplog):
    """A server that was killed asks for a round again; what that costs must not keep the run from going on."""
    grid, _ = real_clients(4, [])
    experiment = prepare(CONFIG)

    def strategy():
        return experiment.strategy(deployed=True, checkpoint=tmp_path / "c.npz", evaluate_every=9)

    first = strategy()
    first.start(grid, experiment.initial_arrays(), num_rounds=2)
    lost = strategy()  # asks for round 3, and is killed before it has saved it
    lost._save = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        lost.start(grid, experiment.initial_arrays(), num_rounds=4)
    with caplog.at_level("WARNING", logger="flwr"):
        last = strategy()
        last.start(grid, experiment.initial_arrays(), num_rounds=4)
    assert "client 0 says that it can make 1 more releases" in caplog.text
    assert [report.aggregated for report in last.history] == [2, 2, 2, 0]


SUMS = {"trust": "secure-aggregation", "num-clients": 4, "clients-per-round": 4, "trust.min-cohort": 4}
MISSING = r"closed \(3 of at least 4 releases\)"


class OneIsNeverHeard(InProcessGrid):
    """Of four clients and, after them, two helpers, the first client's releases are lost."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        first = min(self.get_node_ids())
        return [
            reply
            for reply in replies
            if reply.metadata.message_type != MessageType.TRAIN or reply.metadata.src_node_id != first
        ]


def run(**changes):
    config = RunConfig.from_mapping({**SUMS, **changes})
    run_experiment(OneIsNeverHeard(app, 6, config.to_mapping()), config)


def test_a_run_whose_rounds_are_all_closed_ends_with_what_was_missing():
    with raises(
        NoReleasesError, "missing", match=rf"none in 2 rounds in a row, .* round 2: it was {MISSING}; no client"
    ):
        run(**{"num-rounds": 4, "give-up-after": 2})


def test_a_short_run_whose_rounds_were_all_closed_is_no_result():
    with raises(
        ConfigurationError, "missing", match=rf"none in 2 rounds: a round was {MISSING}; see the clients' logs"
    ):
        run(**{"num-rounds": 2})


FEATURES = np.random.default_rng(1).standard_normal((80, 4)).astype(np.float32)
LABELS = (FEATURES[:, 0] > 0).astype(int)
TABLE = pd.DataFrame(FEATURES, columns=list("abcd"))
SMALL = {"num_clients": 4, "clients_per_round": 4, "num_rounds": 1}


def parts(features=FEATURES):
    return features[:60], LABELS[:60], features[60:], LABELS[60:]


def network(layer, argument):
    torch = pytest.importorskip("torch")

    def make(num_features, num_classes):
        layers = [torch.nn.Linear(num_features, 8), getattr(torch.nn, layer)(argument), torch.nn.Linear(8, num_classes)]
        return torch.nn.Sequential(*layers)

    return make


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: simulate(task="patients.csv"), ["`murmurfl fit patients.csv --label COLUMN`", "murmurfl.app.fit"]),
        (lambda: simulate("patients.csv"), ["murmurfl.app.fit(table, label=...)", "simulate(task=...)"]),
        (lambda: simulate(TABLE), ["got DataFrame", "murmurfl.app.fit(table, label=...)"]),
        (lambda: simulate(task=TABLE), ["got DataFrame", "murmurfl.app.fit(table, label=...)"]),
        (
            lambda: simulate(task=parts(TABLE.assign(city="x")), **SMALL),
            ["in column 'city'", "`murmurfl fit FILE --label COLUMN`"],
        ),
        (
            lambda: simulate(task=Dataset(*parts(TABLE.assign(city="x")), 2), **SMALL),
            ["in column 'city'", "`murmurfl fit FILE --label COLUMN`"],
        ),
        (lambda: simulate(partition="own"), ["Dataset(client_of=...)", "partition 'iid'"]),
        (lambda: simulate(eps=2), ["did you mean 'epsilon'"]),
        (lambda: simulate(lr=0.1), ["did you mean 'learning-rate'"]),
        (lambda: simulate({"rounds": 3}), ["did you mean 'num-rounds'"]),
        (lambda: simulate(nothing_like_it=1), ["`murmurfl keys` lists all of them"]),
        (lambda: simulate(model=LogisticRegression), ["model 'softmax'", "LinearEstimator(LogisticRegression(), ...)"]),
        (
            lambda: simulate(model=network("Dropout", 0.5), **SMALL),
            ["Dropout at '1'", "leave it out (p=0, or .eval())"],
        ),
        (lambda: simulate(model=network("BatchNorm1d", 8), **SMALL), ["BatchNorm1d at '1'", "GroupNorm"]),
        (lambda: LinearEstimator(LogisticRegression, 4, [0, 1]), ["got the class", "LogisticRegression()"]),
        (lambda: LinearEstimator(RandomForestClassifier(), 4, [0, 1]), ["LogisticRegression or SGDClassifier"]),
    ],
)
def test_refusal_names_the_way_out(call, words):
    with pytest.raises(ConfigurationError) as refused:
        call()
    text = str(refused.value)
    assert [word for word in words if word not in text] == []
    assert len(text) < 450


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--mu", "2"], "--set mu=VALUE"),
        (["run", "patients.csv"], "`murmurfl fit patients.csv --label COLUMN`"),
        (["run", "--set", "task=patients.csv"], "`murmurfl fit patients.csv --label COLUMN`"),
        (["run", "--set", "eps=2"], "did you mean 'epsilon'"),
    ],
)
def test_command_names_the_way_out(arguments, words):
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code
    assert words in " ".join(ran.stderr.replace("\u2502", " ").split())


def test_function_data_and_module_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    by_hand = simulate(task=parts, **SMALL)
    assert by_hand.outcome.document()["config"]["task"].endswith("test_possible_rounds:parts")
    for task in (parts(), parts(TABLE), Dataset(*parts(), 2), lambda: parts(), lambda config: parts()):
        given = simulate(task=task, **SMALL)
        assert np.array_equal(given.parameters[0], by_hand.parameters[0])
    module = torch.nn.Linear(4, 2)
    before = [value.detach().clone() for value in module.parameters()]
    result = simulate(task=parts, model=module, **SMALL)
    assert [array.shape for array in result.parameters] == [(2, 4), (2,)]
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def test_two_functions_of_one_name_are_two_tasks():
    """A notebook's cell that is run again defines another function of the same name."""

    def made(sign):
        def make_task():
            return parts(sign * FEATURES)

        return make_task

    one, other = made(1.0), made(-1.0)
    names = [registry("task").named(task) for task in (one, other, one)]
    assert names[0] == names[2] != names[1]
    first, second = (registry("task")[name].load(RunConfig(), "").train_features for name in names[:2])
    assert np.array_equal(first, -second)
