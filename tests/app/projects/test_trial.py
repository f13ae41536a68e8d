"""``murmurfl try`` runs somebody's Flower project as it is, and says truly what privacy leaves of it."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from murmurfl.app import try_project
from murmurfl.app.commands.main import cli
from murmurfl.app.projects.foreign import Project, Seen, _capture_sklearn, put_into, score_of
from murmurfl.app.projects.trial import _stated
from murmurfl.clients import LinearEstimator, MLPEstimator
from murmurfl.privacy import ConfigurationError, gdp_mu
from murmurfl.testing import assert_useful
from sklearn.linear_model import SGDClassifier
from sklearn.neural_network import MLPClassifier
from typer.testing import CliRunner

from tests.harness.errors import raises
from tests.harness.grid import context_of

pytestmark = pytest.mark.usefixtures("no_result_folder")

APPS = "tests.harness.apps"
DOCUMENT = json.loads((Path(__file__).parents[3] / "docs" / "results" / "foreign.json").read_text())
TABLE, THEIRS = DOCUMENT["rows"], DOCUMENT["foreign"]


def arrays(**values):
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def test_trees_and_batch_norm_are_refused_with_a_remedy():
    trial = try_project(f"{APPS}.trees", nodes=3)
    assert (trial.verdict, trial.lines_changed) == ("refused", 0)
    assert "train a linear model" in " ".join(trial.lines())
    pytest.importorskip("torch")
    trial = try_project(f"{APPS}.batch_norm", nodes=3)
    assert trial.verdict == "refused"
    assert "torch.nn.GroupNorm" in trial.reason


def test_an_estimator_is_rehearsed_by_its_own_evaluation():
    trial = try_project(f"{APPS}.logistic", nodes=4, rounds=8)
    assert trial.kind == "samples"
    assert trial.without > 0.85 > trial.guessing
    untrusted, sums = trial.ways
    assert sums.score > 0.85
    assert assert_useful(trial) is trial
    assert sums.score >= untrusted.score - 0.05
    assert "LinearEstimator(LogisticRegression(), num_features=30" in trial.client_line
    assert "private_client_app" in trial.client_line
    assert "FullBatch(num_clients=4" in trial.server_line


def test_an_epsilon_that_leaves_nothing_is_called_useless():
    """The sibling of the test above: a verdict that followed from the project as it is would be useful."""
    trial = try_project(f"{APPS}.logistic", nodes=3, rounds=4, epsilon=0.01)
    assert trial.verdict == "useless"
    with pytest.raises(AssertionError, match="Likely useless"):
        assert_useful(trial)
    assert all(way.kept < 0.5 for way in trial.ways)
    assert "clients has half of this noise" in " ".join(trial.lines())
    assert all(len(line) <= 80 for line in trial.lines())


def test_updates_of_any_framework_are_protected_as_a_whole():
    said = CliRunner().invoke(cli, ["try", f"{APPS}.plain_numpy", "--clients", "4"])
    assert said.exit_code == 0, said.output
    assert "whole updates of clients are protected" in said.output
    assert "CorrelatedNoiseMod(simulation=policy)" in said.output


def test_a_folder_is_read_by_its_pyproject(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("")
    (tmp_path / "theirs" / "apps.py").write_text(f"from {APPS}.trees import app, server\n")
    text = '[tool.flwr.app.components]\nserverapp = "theirs.apps:server"\nclientapp = "theirs.apps:app"\n'
    (tmp_path / "pyproject.toml").write_text(f"{text}[tool.flwr.app.config]\nlr.first = 0.1\n")
    project = Project.load(str(tmp_path))
    assert project.run_config == {"lr.first": 0.1}
    assert (project.client_file, project.server_file) == ("theirs/apps.py", "theirs/apps.py")
    (tmp_path / "pyproject.toml").write_text("[tool]\n")
    with raises(ConfigurationError, "not-found", "package"):
        Project.load(str(tmp_path))


def test_models_are_put_into_a_projects_own_arrays_by_name_or_by_shape():
    import numpy as np

    first = arrays(weight=np.zeros((2, 3)), mean=np.full(2, 7.0), bias=np.zeros(2))
    named = put_into(first, arrays(bias=np.ones(2), weight=np.ones((2, 3))))
    assert [float(array.numpy().sum()) for array in named.values()] == [6.0, 14.0, 2.0]
    placed = put_into(arrays(**{"0": np.zeros((2, 3)), "1": np.zeros(2)}), arrays(w=np.ones((2, 3)), b=np.ones(2)))
    assert [float(array.numpy().sum()) for array in placed.values()] == [6.0, 2.0]


@pytest.mark.parametrize(
    ("metrics", "score"),
    [({"eval_acc": 0.5, "loss": 2.0}, 0.5), ({"accuracy": 0.4, "top5_acc": 0.9}, 0.4), ({"loss": 1.0}, None)],
)
def test_the_score_of_a_project_is_what_it_calls_so(metrics, score):
    assert score_of(metrics) == score


def test_nothing_in_the_table_is_called_useful_that_ends_at_guessing():
    assert len(TABLE) >= 4
    for row in TABLE:
        best = max(row["untrusted"] or 0.0, row["sums"] or 0.0)
        if row["verdict"].startswith("useful"):
            assert best > row["guessing"] + 0.05
            assert 0 < row["lines"] <= 8
        else:
            assert row["reason"] or best < row["without"]


def test_nothing_of_others_is_called_useful_that_ends_at_guessing():
    assert len(THEIRS) >= 8
    for row in THEIRS:
        best = max(row["untrusted"] or 0.0, row["sums"] or 0.0)
        if row["verdict"].startswith("useful"):
            assert best > row["guessing"] + 0.05
        else:
            assert row["reason"]


def test_the_printed_lines_give_what_was_said():
    """Followed by hand, with keys and batches of another seed: within ten points."""
    import numpy as np
    from murmurfl.app.engines.inprocess import InProcessGrid
    from murmurfl.clients import LinearEstimator, private_client_app
    from murmurfl.strategies import FullBatch
    from sklearn.linear_model import LogisticRegression

    from tests.harness.apps import logistic

    trial = try_project(f"{APPS}.logistic", nodes=4, rounds=8)
    untrusted, sums = trial.ways
    scores = {}
    for way, epsilon in ((untrusted, 4.0), (sums, None)):
        model = LinearEstimator(LogisticRegression(), num_features=30, classes=(0, 1), num_samples=455)
        privacy = {"epsilon": epsilon} if epsilon else {"mu": gdp_mu(4.0, 1e-5) * 2**0.5}
        found = []
        for seed in (11, 12, 13):
            app = private_client_app(
                model,
                samples=lambda context: logistic.data(context)[0],
                rounds=8,
                clip_norm=way.clip_norm,
                seed=seed,
                **privacy,
            )
            strategy = FullBatch(num_clients=4, seed=seed, session=f"s{seed}", **way.options)
            result = strategy.start(InProcessGrid(app, 4, {}), model.initial_arrays(), num_rounds=8)
            fitted = model.fitted(result.arrays)
            tests = [logistic.data(context_of(1, number, **{"num-partitions": 4}))[1] for number in range(4)]
            found.append(np.mean([fitted.score(*one) for one in tests]))
        scores[way.trust] = float(np.mean(found))
    assert {way.trust: way.score for way in trial.ways} == pytest.approx(scores, abs=0.1)


@pytest.mark.parametrize("estimator", [MLPClassifier((3,)), SGDClassifier()])
def test_made_up_rows_for_the_classes_are_no_clients_data_and_a_stated_estimator_says_how_it_is_made(estimator):
    features, labels = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    seen = Seen(training=True)
    with ExitStack() as stack:
        _capture_sklearn(seen, lambda: 0, stack)
        estimator.partial_fit(np.zeros((2, 2)), [0, 1], classes=[0, 1])
        estimator.partial_fit(features, labels)
        estimator.partial_fit(features[:5], labels[:5])
    assert [len(part) for part in seen.datasets[0]] == [20, 20]
    model, line = _stated(seen.estimator, list(seen.datasets.values()))
    names = {"MLPEstimator": MLPEstimator, "LinearEstimator": LinearEstimator}
    made = eval(line, names | {"MLPClassifier": MLPClassifier, "SGDClassifier": SGDClassifier})
    assert (made.num_features, made.classes) == (model.num_features, model.classes) == (2, (0, 1))
    assert made.names == model.names
