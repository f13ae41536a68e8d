"""Every error of docs/errors.md is provoked here, says what the page says, and is gone once the page was followed."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.data import loading as tasks
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy, numpy_client_app
from murmurfl.privacy import (
    MemoryLedger,
    MurmurflError,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SQLiteLedger,
    errors,
    read_ledger,
)
from murmurfl.privacy.errors import ErrorKind
from murmurfl.strategies import CorrelatedFedAvg
from typer.testing import CliRunner

from tests.harness.grid import NodesGrid

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
SOURCE = tomllib.loads((PAGE.parent / "errors.toml").read_text())
SHOWN = dict(re.findall(r"<!-- error: (\S+) -->\n```text\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL))
FOREIGN_MODEL = ArrayRecord([np.zeros(3)])
WITH_MOD = [CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, mu=4.0, max_participations=5))]
TWO = RunConfig(num_clients=2, clients_per_round=2, num_rounds=2, node_deadline_s=0.2)


def command(*arguments):
    """What the command says on standard error, or nothing if it succeeds."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    return "" if result.exit_code == 0 else result.stderr.strip()


def run(*arguments):
    return command("run", "--no-twin", "--engine", "cohort", "--set", "num-rounds=1", "--name", "x", *arguments)


def error(call: Callable[[], object]):
    try:
        call()
    except MurmurflError as raised:
        return str(raised)
    return ""


def foreign(strategy, mods, nodes, *, model=FOREIGN_MODEL, rounds=1):
    """Somebody's Message-API project under a strategy."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        arrays = {name: Array(array.numpy() + 0.1) for name, array in message.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    strategy.start(NodesGrid(app, nodes), model, num_rounds=rounds)


@dataclass
class World:
    """Where the errors happen."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def wrong_key(self):
        return run("--set", "nun-clients=3"), run("--set", "num-clients=3", "--set", "clients-per-round=3")

    def impossible_value(self):
        return run("--set", "num-clients=3", "--set", "clients-per-round=10"), run(
            "--set", "num-clients=3", "--set", "clients-per-round=3"
        )

    def wrong_noise_key(self):
        path, key = self.folder / "ledger.sqlite", self.folder / "noise.key"
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, key_file=key)
        (self.folder / "node.toml").write_text(self.node())
        right = key.read_bytes()
        key.write_bytes(bytes(len(right)))
        said = command("node", self.folder / "node.toml", "--superlink", "127.0.0.1:1", "--insecure")
        key.write_bytes(right)
        return said, command("node", self.folder / "node.toml", "--check")

    def no_data_root(self):
        self.monkeypatch.delenv("MURMURFL_DATA", raising=False)
        return run("--set", "task=mnist"), run("--set", "task=digits")

    def wrong_data_root(self):
        """Mended by fetching, which is not done here: torchvision is asked to, with the right folder."""
        asked = []

        def fetch(root, download):
            asked.append((root, download))
            raise OSError(0, "this test fetches nothing")

        self.monkeypatch.setattr("torchvision.datasets.MNIST", fetch)
        said = run("--set", "task=mnist", "--set", f"data-root={self.folder}")
        recovered = run("--set", "task=mnist", "--set", f"data-root={self.folder}", "--set", "download=true")
        assert asked == [(str(self.folder), True)]
        return said, recovered.replace("murmurfl: this test fetches nothing", "")

    def torchvision(self):
        tasks._loaded.cache_clear()

        class Broken:
            def find_spec(self, name, path, target=None):
                if name.startswith("torchvision"):
                    raise RuntimeError("operator torchvision::nms does not exist")

        with self.monkeypatch.context() as broken:
            broken.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                broken.delitem(sys.modules, name)
            said = run("--set", "task=mnist", "--set", f"data-root={self.folder}", "--set", "download=true")
        return said.replace(importlib.metadata.version("torch"), "VERSION"), run()

    def no_nodes(self):
        def training(nodes):
            return error(lambda: run_experiment(InProcessGrid(client_app.app, nodes, TWO.to_mapping()), TWO))

        return training(0), training(2)

    def few_simulated_nodes(self):
        self.simulation()

        def training(nodes):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=10), WITH_MOD, nodes))

        return training(2), training(10)

    def no_mod(self):
        self.simulation()
        strategy = lambda: CorrelatedFedAvg(num_clients=4)  # noqa: E731
        return error(lambda: foreign(strategy(), [], 4)), error(lambda: foreign(strategy(), WITH_MOD, 4))

    def not_configured(self):
        self.simulation()

        def training(mods):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=4), mods, 4))

        return training([CorrelatedNoiseMod()]), training(WITH_MOD)

    def legacy_client(self):
        self.simulation()

        class Legacy(NumPyClient):
            def fit(self, parameters, config):
                return parameters, 1, {}

        def training(app):
            return error(lambda: CorrelatedFedAvg(num_clients=4).start(NodesGrid(app, 4), FOREIGN_MODEL, num_rounds=1))

        client_fn = lambda context: Legacy().to_client()  # noqa: E731
        return training(ClientApp(client_fn)), training(numpy_client_app(client_fn, mods=WITH_MOD))

    def flower_argument(self):
        def training(**given):
            return error(lambda: foreign(CorrelatedFedAvg(fraction_train=0.5, **given), WITH_MOD, 4))

        return training(weighted_by_key="num-examples"), training()

    def no_numbers(self):
        def training(model):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=4), WITH_MOD, 4, model=ArrayRecord([model])))

        return training(np.frombuffer(b"{a booster}", dtype=np.uint8)), training(np.zeros(3))

    def more_rounds_than_the_cap(self):
        def training(rounds):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=4), WITH_MOD, 4, rounds=rounds))

        return training(9), training(5)

    def no_evaluation(self):
        def training(**options):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=4, **options), WITH_MOD, 4))

        return training(evaluate_on_clients=True), training()

    def nothing_came(self):
        self.simulation()

        def fail(*arguments):
            raise ValueError("patient 4711")

        def training(mods):
            return error(lambda: foreign(CorrelatedFedAvg(num_clients=4), mods, 4))

        return training([*WITH_MOD, fail]), training(WITH_MOD)

    def simulation(self):
        """The grid of these errors counts as Flower's simulation, whose nodes are all there from its start."""
        for place in ("client_registry", "loop"):
            self.monkeypatch.setattr(f"murmurfl.strategies.rounds.{place}.is_simulation", lambda grid: True)
        self.monkeypatch.setattr("murmurfl.strategies.rounds.client_registry._ALL_MADE_WITHIN_S", 0.0)

    def no_helpers(self):
        class Connected(InProcessGrid):
            most = 4  # two clients and, after them, two helpers

            def get_node_ids(self):
                return list(super().get_node_ids())[: self.most]

        def training(nodes):
            sums = RunConfig.from_mapping({**TWO.to_mapping(), "trust": "secure-aggregation", "trust.min-cohort": 2})
            grid = Connected(client_app.app, 4, sums.to_mapping())
            grid.most = nodes
            return error(lambda: run_experiment(grid, sums))

        return training(2), training(4)

    def shapes(self):
        def training(model):
            clients = RunConfig.from_mapping({**TWO.to_mapping(), "model": model})
            return error(lambda: run_experiment(InProcessGrid(client_app.app, 2, clients.to_mapping()), TWO))

        return training("mlp"), training("softmax")

    def gradient_shape(self):
        def release(values):
            policy = PrivacyPolicy(clip_norm=1.0, batch_size=4, max_participations=5, mu=1.0)
            privatizer = Privatizer(policy, 3, 20, MemoryLedger(), SimulatedKeys(1, "a"))
            return error(lambda: privatizer.release("training", 0, lambda samples: np.ones((4, values))))

        return release(2), release(3)

    def budget_gone(self):
        """A real node's ledger; mended by a smaller mu where something is left, as the page says."""
        path = self.folder / "ledger.sqlite"
        SQLiteLedger.create(path, budget_mu=2.5, delta=1e-5)
        config = RunConfig(num_clients=1, clients_per_round=1, num_rounds=4, batch_size=32, mu=2.0)

        def training(mu):
            (self.folder / "node.toml").write_text(self.node(mu=mu))
            client = NodeConfig.read(self.folder / "node.toml").make_client()
            grid = InProcessGrid(numpy_client_app(lambda context: client), 1, config.to_mapping())
            return error(lambda: run_experiment(grid, config, deployed=True))

        assert training(2.0) == ""
        said = training(2.0)
        assert read_ledger(path).left.mu == pytest.approx(1.5)
        return said, training(1.4)

    def too_many_rounds(self):
        mu2 = ("--set", "strategy=mu2", "--set", "partition=iid")
        return run(*mu2, "--set", "num-rounds=1000"), run(*mu2, "--set", "num-rounds=3")

    def run_exists(self):
        assert run() == ""
        return run(), run("--name", "another")

    def no_run(self):
        said = command("report", "runs/x")
        assert run() == ""
        return said, command("report", "runs/x")

    def no_tracker(self):
        with self.monkeypatch.context() as without:
            without.setitem(sys.modules, "wandb", None)
            said = run("--set", "track=wandb")
        return said.replace("import of wandb halted; None in sys.modules", "No module named 'wandb'"), run()

    def node(self, **changes):
        values = {"client": "clinic", "ledger": "ledger.sqlite", "clip-norm": 2.0, "batch-size": 32, "mu": 2.0}
        values |= {"task": "digits", "num-partitions": 4, "partition-id": 0, "max-participations": 4, **changes}
        return toml_document(values)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.cache_clear()
    return World(tmp_path, monkeypatch)


@pytest.fixture
def made(monkeypatch):
    """Messages of all errors that are made, with their kinds."""
    kinds, init = {}, MurmurflError.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        kinds[str(self)] = self.kind

    monkeypatch.setattr(MurmurflError, "__init__", noted)
    return kinds


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", SHOWN)
def test_the_text_is_the_one_shown_and_following_the_page_mends_it(name, world, made):
    said, recovered = getattr(world, name.replace("-", "_"))()
    # A simulation's error quotes what the client raised behind its own words.
    places = {message: said.index(message[:30]) for message in made if message and message[:30] in said}
    kinds = {made[message] for message, place in places.items() if place == min(places.values())}
    assert kinds == {SOURCE["error"][name]["kind"]} if "kind" in SOURCE["error"][name] else not kinds
    said, shown = said.replace(str(world.folder), "PATH"), SHOWN[name]
    # The page leaves out the way out that the line itself has.
    assert said.startswith(shown.removesuffix("...")) if shown.endswith((" ...", "\n...")) else said == shown
    assert recovered == ""


def test_sections_are_those_of_the_data_file():
    """The page's sections are written from it (tests/test_pages.py compares), and each of its errors is in one."""
    shown = [name for section in SOURCE["section"] for name in re.findall(r"^{([a-z-]+)}$", section["body"], re.M)]
    assert sorted(shown) == sorted(SOURCE["error"]) == sorted(SHOWN)
    assert {error["kind"] for error in SOURCE["error"].values() if "kind" in error} <= set(get_args(ErrorKind))


WITHOUT_RAY = """
import importlib.util
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
importlib.util.find_spec = lambda name, package=None: None
run_simulation(ServerApp(), ClientApp(), num_supernodes=2)
"""


def test_flower_names_its_extra_where_ray_is_missing():
    """The page quotes Flower, which ends a run, and its process, before any code of ours."""
    (section,) = [section["body"] for section in SOURCE["section"] if section["title"] == "Ray is missing"]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert re.search(r"```text\n(.*?)\n```", section)[1] in ran.stdout + ran.stderr
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text())["project"]
    assert any("[simulation]" in one for one in project["optional-dependencies"]["simulation"])


def test_every_block_of_the_page_belongs_to_an_error_that_is_provoked():
    assert PAGE.read_text().count("```text") == len(SHOWN) + 1  # Flower's own
    assert {name.replace("-", "_") for name in SHOWN} <= set(dir(World))


def test_the_page_has_every_kind_of_error():
    source = Path(errors.__file__).read_text()
    kinds = re.findall(r'^    "([a-z-]+)",  # (.*)$', source, flags=re.MULTILINE)
    assert [kind for kind, _ in kinds] == list(get_args(ErrorKind))
    assert re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE) == kinds
