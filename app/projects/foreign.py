"""Run somebody's Flower project as it is, in this process and without Ray, and note what its clients train on.

A project is a folder whose pyproject.toml has ``[tool.flwr.app]``, or a module with a ClientApp and a ServerApp. Its
own ServerApp asks its own ClientApp through :class:`~murmurfl.app.engines.inprocess.InProcessGrid`. Nothing of it is
protected: this is for simulated data.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import parameters_to_ndarrays
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from ...privacy.errors import ConfigurationError
from ..engines.inprocess import InProcessGrid

logger = logging.getLogger(__name__)
_NODES = 10
_LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss")


@dataclass(frozen=True)
class Project:
    """A Flower project: its two apps and its run configuration."""

    name: str
    client_app: ClientApp
    server_app: ServerApp
    run_config: Mapping[str, Any]
    client_file: str
    server_file: str

    @classmethod
    def load(cls, place: str, settings: Mapping[str, Any] | None = None) -> Project:
        """Import a project: the folder of a pyproject.toml, or ``package.module``.

        Raises
        ------
        ConfigurationError
            If there is no such project, or it cannot be imported.
        """
        folder = Path(place)
        if folder.is_dir():
            return cls._of_folder(folder, settings or {})
        module = _imported(place)
        apps = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
        clients = [one for one in apps if isinstance(one, ClientApp)]
        servers = [one for one in apps if isinstance(one, ServerApp)]
        if len(clients) != 1 or len(servers) != 1:
            raise ConfigurationError(
                f"Expected a module with one ClientApp and one ServerApp at {place}, got {len(clients)} and "
                f"{len(servers)}. Name the folder of a pyproject.toml with [tool.flwr.app] in their place.",
                kind="not-found",
                setting="package",
            )
        file = getattr(module, "__file__", None) or place
        config = {**getattr(module, "run_config", {}), **(settings or {})}
        return cls(place, clients[0], servers[0], config, file, file)

    @classmethod
    def _of_folder(cls, folder: Path, settings: Mapping[str, Any]) -> Project:
        try:
            app = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
            parts = app["components"]
            client, server = str(parts["clientapp"]), str(parts["serverapp"])
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            got = "no such file" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"Expected a pyproject.toml with [tool.flwr.app.components] in {folder}, got: {got}.",
                kind="not-found",
                setting="package",
            ) from error
        sys.path.insert(0, str(folder.resolve()))
        found = [getattr(_imported(one.partition(":")[0]), one.partition(":")[2], None) for one in (client, server)]
        if not isinstance(found[0], ClientApp) or not isinstance(found[1], ServerApp):
            raise ConfigurationError(
                f"Expected a ClientApp at {client} and a ServerApp at {server}, got {type(found[0]).__name__} and "
                f"{type(found[1]).__name__}.",
                kind="wrong-type",
                setting="package",
            )
        config = {**_flat(app.get("config", {})), **settings}
        files = [f"{one.partition(':')[0].replace('.', '/')}.py" for one in (client, server)]
        return cls(folder.resolve().name, found[0], found[1], config, *files)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs somebody's code
        raise ConfigurationError(
            f"Expected a project that can be imported, got {type(error).__name__} in {name}: {error}. Install what it "
            "needs, and name its folder or its module.",
            kind="not-found",
            setting="package",
        ) from error


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


@dataclass
class Seen:
    """Everything that was noted of a project's run."""

    first_arrays: ArrayRecord | None = None
    last_arrays: ArrayRecord | None = None
    request: Message | None = None
    """The first request to train, whose other records every later one has too."""
    rounds: int = 0
    clients: set[int] = field(default_factory=set)
    evaluation: Message | None = None
    scores: list[tuple[float, float]] = field(default_factory=list)
    """Scores and numbers of examples of the last evaluation by clients."""
    central: Callable[[int, ArrayRecord], Any] | None = None
    update_norms: list[float] = field(default_factory=list)
    module: Any = None
    datasets: dict[int, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Any] | None = None
    loss_line: str = ""
    estimator: Any = None
    keras_model: Any = None
    failure: Exception | None = None
    """First exception of a client."""
    queried: bool = False
    """Whether the server asked a query of its own."""
    training: bool = False
    """Whether a client is training now."""


SCORES = ("accuracy", "acc", "auc", "f1", "r2", "score")


def score_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the figure among metrics that is larger where a model is better; None without one."""
    for word in SCORES:
        for name, value in metrics.items():
            if word in name.lower() and isinstance(value, int | float):
                return float(value)
    return None


class ForeignRun:
    """A project's run in this process, and scores of other models by the project's own evaluation."""

    def __init__(self, project: Project, nodes: int = _NODES) -> None:
        self.project = project
        self.nodes = nodes
        self.seen = Seen()

    def run(self) -> float | None:
        """Run the project as it is; return its score, None if it measures none."""
        grid = InProcessGrid(self._client, self.nodes, self.project.run_config)  # type: ignore[arg-type]
        context = Context(0, 0, {}, RecordDict(), dict(self.project.run_config))
        with _capturing(self.seen, lambda: self._partition), _central_evaluation(self.seen), _printing_aside():
            try:
                self.project.server_app(grid, context)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise _no_run(self.seen.failure or error) from error
            self._ask_the_others(grid)
        if self.seen.last_arrays is None:
            if self.seen.failure is not None:
                raise _no_run(self.seen.failure) from self.seen.failure
            raise _no_arrays(queried=self.seen.queried)
        return self.score(self.seen.last_arrays)

    def data_of(self, partition: int) -> Any:
        """Return what a client trained on; where the project sampled others only, the data of one of those."""
        found = self.seen.datasets
        return found[partition] if partition in found else found[sorted(found)[partition % len(found)]]

    def _ask_the_others(self, grid: InProcessGrid) -> None:
        """Have every client train once that the project did not sample, so that its data are known."""
        seen, last = self.seen, self.seen.last_arrays
        if seen.request is None or seen.first_arrays is None or not seen.datasets:
            return
        others = [node for number, node in enumerate(grid.get_node_ids()) if number not in seen.datasets]
        kind = seen.request.metadata.message_type
        list(grid.send_and_receive([Message(seen.request.content.copy(), node, kind) for node in others]))
        seen.last_arrays = last

    def score(self, arrays: ArrayRecord) -> float | None:
        """Return the project's own score of a model, by its server's evaluation or by its clients'."""
        if self.seen.central is not None:
            with suppress(Exception), _printing_aside():
                found = score_of(dict(self.seen.central(self.seen.rounds, arrays) or {}))
                if found is not None:
                    return found
        if self.seen.evaluation is None:
            return None
        self.seen.scores = []
        grid = InProcessGrid(self._client, self.nodes, self.project.run_config)  # type: ignore[arg-type]
        asked = self.seen.evaluation
        messages = [
            Message(_with_arrays(asked.content, arrays), node, asked.metadata.message_type)
            for node in grid.get_node_ids()
        ]
        with _printing_aside():
            list(grid.send_and_receive(messages))
        total = sum(weight for _, weight in self.seen.scores)
        return sum(score * weight for score, weight in self.seen.scores) / total if total else None

    def trained(self, message: Message, context: Context) -> Message:
        """Have the project's client train a model that came in one record of arrays, and return it in such a one.

        The project gets its own first request with the new model in it, whatever it calls its records.
        """
        request = self.seen.request
        arrays = next(iter(message.content.array_records.values()), None)
        if request is None or arrays is None:
            return self._client(message, context)
        own = Message(
            _with_arrays(request.content, arrays), message.metadata.dst_node_id, message.metadata.message_type
        )
        own.metadata.__dict__.update(message.metadata.__dict__, _message_type=request.metadata.message_type)
        reply = self._client(own, context)
        made = _readable(next(iter(reply.content.array_records.values()), None))
        named = {} if made is None else dict(zip(arrays, made.values(), strict=False))
        return Message(RecordDict({"arrays": ArrayRecord(named)}), reply_to=message)

    def _client(self, message: Message, context: Context) -> Message:
        self._partition = int(context.node_config["partition-id"])
        seen, kind = self.seen, message.metadata.message_type.partition(".")[0]
        asked = _readable(next(iter(message.content.array_records.values()), None))
        seen.queried = seen.queried or kind == "query"
        seen.training = kind == "train"
        if seen.training and seen.request is None:
            seen.request = Message(message.content.copy(), 0, message.metadata.message_type)
        try:
            with _printing_aside():
                reply = self.project.client_app(message, context)
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        except Exception as error:
            seen.failure = seen.failure or error
            raise
        finally:
            seen.training = False
        if kind == "train" and asked is not None:
            returned = _readable(next(iter(reply.content.array_records.values()), None))
            seen.clients.add(self._partition)
            seen.first_arrays = asked if seen.first_arrays is None else seen.first_arrays
            if returned is not None and _numeric(returned):
                seen.last_arrays = returned
                with suppress(Exception):
                    seen.update_norms.append(_distance(asked, returned))
        if kind == "evaluate" and asked is not None:
            seen.evaluation = Message(_with_arrays(message.content, asked), 0, message.metadata.message_type)
            seen.last_arrays = asked if _numeric(asked) else seen.last_arrays
            metrics = {k: v for record in reply.content.metric_records.values() for k, v in record.items()}
            metrics |= {k: v for record in reply.content.config_records.values() for k, v in record.items()}
            found = score_of(metrics)
            weight = next((float(v) for k, v in metrics.items() if "num" in k and isinstance(v, int | float)), 1.0)
            if found is not None:
                seen.scores.append((found, weight))
        return reply


def _no_run(error: BaseException) -> ConfigurationError:
    """Return the refusal of a project that fails as it is, with the line of its own that failed."""
    ours = str(Path(__file__).resolve().parents[2])
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(("<", f"{ours}/app/"))
    ]
    where = f" in {places[-1]}" if places else ""
    return ConfigurationError(
        f"Expected the project to run as it is, got {type(error).__name__}{where}: {error}. Mend it first: `flwr run` "
        "ends in the same way.",
        kind="failed",
        setting="package",
    )


def _no_arrays(*, queried: bool) -> ConfigurationError:
    """Return the refusal of a project whose clients return no model of numbers."""
    if queried:
        return ConfigurationError(
            "Expected a project that trains a model, got one whose server asks queries (@app.query()). Its clients can "
            "answer with noise: private_client_app(schema, samples=samples, method='statistics', epsilon=..., "
            "rounds=1), asked by murmurfl.strategies.Statistics, gives counts, means and quantiles.",
            kind="unsupported",
            setting="package",
        )
    return ConfigurationError(
        "Expected a project whose clients return arrays of numbers, got none: models of trees or texts have no "
        "update that could be clipped. Ask clients for private statistics, or train a linear model or a "
        "network on the same data.",
        kind="unsupported",
        setting="package",
    )


@contextmanager
def _printing_aside() -> Iterator[None]:
    """Send what a project prints to standard error: standard output is for what was found."""
    with redirect_stdout(sys.stderr):
        yield


def _readable(record: ArrayRecord | None) -> ArrayRecord | None:
    """Return a record with types and shapes of its arrays, which Flower's older messages leave out; None without."""
    if record is None:
        return None
    with suppress(Exception):
        return ArrayRecord({name: _copy(array) for name, array in record.items()})
    return None


def _copy(array: Array) -> Array:
    return Array(np.array(array.numpy()))


def _numeric(record: ArrayRecord) -> bool:
    return bool(record) and any(np.dtype(array.dtype).kind == "f" for array in record.values())


def _distance(one: ArrayRecord, other: ArrayRecord) -> float:
    pairs = zip(one.values(), other.values(), strict=True)
    squares = [float(np.square(a.numpy() - b.numpy()).sum()) for a, b in pairs if np.dtype(a.dtype).kind == "f"]
    return float(np.sqrt(sum(squares)))


def _with_arrays(content: RecordDict, arrays: ArrayRecord) -> RecordDict:
    """Return a message's content with the values of another model in its first record of arrays, in their order."""
    made = content.copy()
    for key, record in content.array_records.items():
        names = list(record)
        if len(names) == len(arrays):
            made[key] = ArrayRecord(dict(zip(names, map(_copy, arrays.values()), strict=True)))
        break
    return made


def put_into(first: ArrayRecord, trained: ArrayRecord) -> ArrayRecord:
    """Return a project's own arrays with trained ones in their places: by name, or else by order and shape."""
    if trained.keys() <= first.keys():
        return ArrayRecord({name: _copy(trained.get(name, array)) for name, array in first.items()})
    rest = list(trained.values())
    made: dict[str, Array] = {}
    for name, array in first.items():
        fits = bool(rest) and tuple(rest[0].shape) == tuple(array.shape)
        fits = fits or (bool(rest) and np.prod(rest[0].shape) == np.prod(array.shape))
        made[name] = Array(rest.pop(0).numpy().reshape(array.shape)) if fits else _copy(array)
    return ArrayRecord(made)


@contextmanager
def _central_evaluation(seen: Seen) -> Iterator[None]:
    """Note the function by which the server evaluates, of strategies of both kinds that Flower has."""
    usual, of_legacy = Strategy.start, LegacyFedAvg.evaluate

    def start(self: Any, *args: Any, **named: Any) -> Any:
        seen.central = named.get("evaluate_fn")
        result = usual(self, *args, **named)
        seen.rounds = int(named.get("num_rounds", args[2] if len(args) > 2 else 3))
        if getattr(result, "arrays", None) is not None and _numeric(result.arrays):
            seen.last_arrays = result.arrays
        return result

    def evaluate(self: Any, server_round: int, parameters: Any) -> Any:
        seen.rounds = server_round
        with suppress(Exception):
            seen.last_arrays = ArrayRecord(parameters_to_ndarrays(parameters))
        if self.evaluate_fn is not None:
            seen.central = lambda number, arrays: self.evaluate_fn(number, arrays.to_numpy_ndarrays(), {})[1]
        return of_legacy(self, server_round, parameters)

    with patch.object(Strategy, "start", start), patch.object(LegacyFedAvg, "evaluate", evaluate):
        yield


@contextmanager
def _capturing(seen: Seen, partition: Callable[[], int]) -> Iterator[None]:
    """Note modules, losses and data sets, and estimators of scikit-learn or Keras, as clients train them."""
    with ExitStack() as stack:
        _capture_sklearn(seen, partition, stack)
        if "keras" in sys.modules:
            _capture_keras(seen, partition, stack)
        if "torch" in sys.modules:
            _capture_torch(seen, partition, stack)
        yield


def _capture_sklearn(seen: Seen, partition: Callable[[], int], stack: ExitStack) -> None:
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    both = [
        (kind, method) for kind in (SGDClassifier, MLPClassifier, MLPRegressor) for method in ("fit", "partial_fit")
    ]
    for kind, method in ((LogisticRegression, "fit"), *both):
        usual = getattr(kind, method)

        def noted(self: Any, features: Any, labels: Any, *args: Any, usual: Any = usual, **named: Any) -> Any:
            if seen.training:
                seen.estimator = self
                made, before = (
                    (np.asarray(features, dtype=np.float64), np.asarray(labels)),
                    seen.datasets.get(partition()),
                )
                if before is None or len(before[1]) < len(made[1]):  # some begin with made-up rows, for the classes
                    seen.datasets[partition()] = made
            return usual(self, features, labels, *args, **named)

        stack.enter_context(patch.object(kind, method, noted))


def _capture_keras(seen: Seen, partition: Callable[[], int], stack: ExitStack) -> None:
    import keras  # pyright: ignore[reportMissingImports]  # of an extra

    usual = keras.Model.fit

    def fit(self: Any, x: Any = None, y: Any = None, *args: Any, **named: Any) -> Any:
        if seen.training and isinstance(x, np.ndarray) and y is not None:
            seen.keras_model = self
            seen.datasets.setdefault(partition(), (x, np.asarray(y)))
        return usual(self, x, y, *args, **named)

    stack.enter_context(patch.object(keras.Model, "fit", fit))


def _capture_torch(seen: Seen, partition: Callable[[], int], stack: ExitStack) -> None:
    import torch
    from torch.nn.modules import module as hooks
    from torch.utils.data import DataLoader

    usual_iter = DataLoader.__iter__
    depth, last = [0], [None, None]
    outermost: list[Any] = [None]

    def iterated(self: Any) -> Any:
        if seen.training:
            seen.datasets.setdefault(partition(), self)
        return usual_iter(self)

    def before(module: Any, given: Any) -> None:  # noqa: ARG001 - PyTorch's interface
        outermost[0] = outermost[0] if depth[0] else module
        depth[0] += 1

    def after(module: Any, given: Any, output: Any) -> None:  # noqa: ARG001 - PyTorch's interface
        depth[0] -= 1
        if not depth[0] and module.training and seen.training and any(True for _ in module.parameters()):
            last[:] = [module, output]

    def losing(name: str, usual: Any) -> Any:
        def noted(given: Any, target: Any, *args: Any, **named: Any) -> Any:
            inside = depth[0] and any(True for _ in outermost[0].parameters())
            if seen.module is None and inside and seen.training:
                seen.module = outermost[0]  # which computes its own loss, as those of transformers do
            if seen.module is None and last[0] is not None and seen.training:
                change, words = _between(last[1], given)
                seen.module = last[0]
                plain = {k: v for k, v in named.items() if v is not None}
                kind, flat = target.dtype, target.shape == given.shape

                def loss(output: Any, wanted: Any) -> Any:
                    made = change(output)
                    wanted = wanted.to(kind)
                    return usual(made, wanted.reshape(made.shape) if flat else wanted, **plain)

                seen.loss, seen.loss_line = loss, f"lambda out, y: F.{name}({words}, y{'' if not flat else '.float()'})"
            return usual(given, target, *args, **named)

        return noted

    stack.enter_context(patch.object(DataLoader, "__iter__", iterated))
    for handle in (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    ):
        stack.callback(handle.remove)
    for name in _LOSSES:
        usual = getattr(torch.nn.functional, name)
        stack.enter_context(patch.object(torch.nn.functional, name, losing(name, usual)))


def _between(output: Any, given: Any) -> tuple[Callable[[Any], Any], str]:
    """Return what a project does with its model's output before the loss, and how to write it."""
    import torch

    ways: Sequence[tuple[Callable[[Any], Any], str]] = (
        (lambda out: out, "out"),
        (lambda out: out.logits, "out.logits"),
        (lambda out: out.squeeze(-1), "out.squeeze(-1)"),
        (lambda out: torch.log_softmax(out, dim=1), "F.log_softmax(out, dim=1)"),
        (torch.sigmoid, "torch.sigmoid(out)"),
        (lambda out: torch.sigmoid(out).squeeze(-1), "torch.sigmoid(out).squeeze(-1)"),
    )
    for change, words in ways:
        with suppress(Exception), torch.no_grad():
            made = change(output)
            if made.shape == given.shape and bool(torch.allclose(made, given)):
                return change, words
    return ways[0]
