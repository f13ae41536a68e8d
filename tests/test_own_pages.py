"""The code of docs/swap-in.md and docs/own.md, block after block as a reader would type it, and what it does."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.clients import UpdateNode, UpdatePolicy
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.privacy import MECHANISMS, PrivacyPolicy, SimulatedKeys
from murmurfl.strategies import CorrelatedFedAvg

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


@pytest.fixture
def typed():
    """The names a page's code leaves behind."""
    before = dict(MECHANISMS)

    def run(page):
        namespace = {"__name__": page}
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
        return namespace

    yield run
    for name in MECHANISMS.keys() - before.keys():
        del MECHANISMS[name]


def context():
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def test_swapped_in(typed, caplog):
    names = typed("swap-in.md")
    with caplog.at_level("INFO", logger="flwr"):
        result = names["main"](InProcessGrid(names["app"], 10, {}), context())
    assert list(result.arrays) == ["layer.weight", "layer.bias"]
    (promised,) = blocks("swap-in.md", "text")
    assert promised.strip() in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="flwr"):
        names["legacy_main"](InProcessGrid(names["legacy_app"], 10, {}), context())
    assert promised.strip() in caplog.text


def test_sums_only(typed):
    names = typed("swap-in.md")
    names["strategy"] = names["summed_strategy"]
    result = names["main"](InProcessGrid(names["summed_app"], 12, {}), context())
    assert [report.aggregated for report in names["summed_strategy"].history] == [10] * 5
    assert np.abs(result.arrays.to_numpy_ndarrays()[0]).max() > 0


def test_a_model_swapped_in_learns_and_is_evaluated(typed, caplog):
    """Half of the samples are of each class; epsilon 4 leaves nearly all of what can be learnt."""
    names = typed("swap-in.md")
    model = names["private_main"](InProcessGrid(names["private_app"], 10, {}), context())
    inputs = names["torch"].randn(1000, 3, generator=names["torch"].Generator().manual_seed(1))
    right = (model(inputs).argmax(1) == (inputs.sum(1) > 0)).float().mean()
    assert right > 0.9
    found = names["evaluated_main"](InProcessGrid(names["evaluated_app"], 10, {}), context())
    assert found.held_out
    assert found.interval[0] < right < found.interval[1] + 0.05


def test_histograms_of_pandas_become_private(typed):
    """Five standard deviations: by chance once in a million and a half."""
    names = typed("swap-in.md")
    mean, median, kinds = names["counted_main"](InProcessGrid(names["counted_app"], 10, {}), context())
    assert mean.value == pytest.approx(5.8, abs=5 * (mean.interval[1] - mean.interval[0]) / (2 * 1.96))
    assert median.interval[0] < median.value < median.interval[1]
    assert [name for name, *_ in kinds] == ["0", "1", "2"]
    assert all(count == pytest.approx(2000 / 3, abs=5 * (std + 22)) for _, count, std in kinds)


def test_the_operators_files_of_the_page_are_ones(tmp_path):
    updates, samples = blocks("swap-in.md", "toml")
    path = tmp_path / "node.toml"
    path.write_text(updates)
    assert UpdateNode.read(path).client == "clinic-0"
    assert tomllib.loads(updates)["max-participations"] == 20
    path.write_text(samples)
    assert SampleNode.read(path).method == "full-batch"


def test_what_a_promise_is_worth():
    def last(releases, per_pass):
        policy = UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=releases, releases_per_pass=per_pass)
        plan = policy.privacy_policy().plan(100)
        return f"{np.linalg.norm(plan.mechanism.decoder()[-1]) * plan.noise_std:.3g}"

    text = (DOCS / "swap-in.md").read_text().partition("<!-- promise -->")[2].partition("<!-- /promise -->")[0]
    table = re.findall(r"^\| (\d+) \| (\S+) \| (\S+) \| (\S+) \|$", text, flags=re.MULTILINE)
    expected = [(str(K), last(K, 1), last(K, -(-K // 2)), last(K, K)) for K in (5, 20, 50)]
    assert table == expected


def test_the_noise_in_the_average_is_as_long_as_the_page_says():
    """Full participation, K rounds of updates of length 1 in one direction: their sum is K long."""
    clients, size, mu, releases = 100, 410, 8.0, 10
    plan = UpdatePolicy(clip_norm=1.0, mu=mu, max_participations=releases).privacy_policy().plan(size)
    noise = np.linalg.norm(plan.mechanism.decoder()[-1]) * plan.noise_std * np.sqrt(size / clients)
    assert noise / releases == pytest.approx(2 * np.sqrt(size / clients) / mu, rel=1e-3)


@pytest.fixture
def in_the_folder(monkeypatch):
    """The files of docs/own can be imported, as in a reader's copy."""
    monkeypatch.syspath_prepend(DOCS / "own")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def test_own_parts(in_the_folder, typed):
    names = typed("own.md")
    theirs = importlib.import_module("mine.strategy")
    result = names["main"](InProcessGrid(names["app"], 10, {}), context())
    assert np.abs(result.arrays.to_numpy_ndarrays()[0]).max() > 0
    assert names["strategy"].history[-1].aggregated == 10
    grid, start = InProcessGrid(names["app"], 10, {}), names["ArrayRecord"]([np.zeros((2, 3)), np.zeros(2)])
    moved = names["settled"].start(grid, start, num_rounds=2).evaluate_metrics_serverapp
    assert [moved[number]["moved"] > 0.01 for number in range(3)] == [True] * 3, "it goes on"
    policy = PrivacyPolicy(1.0, 8, 5, 4.0, mechanism="half-cancelling")
    assert policy.plan(8).mu == pytest.approx(4.0)

    def client_fn(ctx):
        client = names["simulated_client"](ctx)
        gradients = names["TorchGradients"](names["torch"].nn.Linear(3, 2), names["torch"].nn.functional.cross_entropy)
        assert isinstance(client["keys"], SimulatedKeys)
        return theirs.GradientClient(gradients, names["Readings"](1), policy, **client)

    strategy = theirs.AveragedSGD(num_clients=2, clients_per_round=2, learning_rate=0.1)
    grid = InProcessGrid(names["numpy_client_app"](client_fn), 2, {})
    strategy.start(grid, names["ArrayRecord"]([np.zeros((2, 3)), np.zeros(2)]), num_rounds=3)
    assert [report.aggregated for report in strategy.history] == [2, 2, 2]
    assert not isinstance(strategy, CorrelatedFedAvg)
