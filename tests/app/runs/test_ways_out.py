"""What strangers try is refused in one or two sentences that name the way out, or taken as it is."""

import numpy as np
import pandas as pd
import pytest
from murmurfl.app import simulate
from murmurfl.app.commands.main import cli
from murmurfl.app.data.task import Dataset
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import LinearEstimator
from murmurfl.privacy import ConfigurationError
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

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
        (lambda: simulate(partition="own"), ["Dataset(machine_of=...)", "partition 'iid'"]),
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
        (["run", "--epsilon", "2"], "--set epsilon=VALUE"),
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
    assert by_hand.outcome.document()["config"]["task"].endswith("test_ways_out:parts")
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
