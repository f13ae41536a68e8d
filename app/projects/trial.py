"""Try a Flower project with privacy: rehearse clip, step and rounds on its simulated data, and say what will be kept.

The project runs as it is first. Then its model, loss and records, as its clients used them, go to a
:func:`~murmurfl.clients.private_client_app`, at the noise of the epsilon that is asked for. The figures are of that
simulation. They depend on its data and are not private.
"""

from __future__ import annotations

import copy
import logging
import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message

from ...clients import CorrelatedNoiseMod, LinearEstimator, MLPEstimator, UpdatePolicy, private_client_app
from ...clients.records.client_records import items_of
from ...clients.records.drafting import pair_of
from ...privacy.accounting.gdp import gdp_mu
from ...privacy.errors import ConfigurationError, MurmurflError
from ...strategies import CorrelatedFedAvg, FullBatch, ResultFolder
from ..engines.inprocess import InProcessGrid
from ..nodes.flower_internals import without_log
from .foreign import ForeignRun, Project, put_into

logger = logging.getLogger(__name__)
_NO_NOISE = 300.0
_FACTORS = (1.0, 3.0, 10.0)
"""Steps that are tried, as multiples of the one that follows from the records."""
_SEEDS = (1, 2, 3)
_SCORED = 200
"""Most records of a client by which a model is scored where the project measures nothing."""
_SLOW_S = 120.0
"""Seconds of trainings without noise from which each kind of noise is tried once, not with every seed."""
_UNMEASURED = (
    "The project gives no score by which models could be compared. Return a metric that is called accuracy, auc, f1, "
    "r2 or score from @app.evaluate(), or from the evaluate_fn of strategy.start(), and try again."
)
_USEFUL, _BEYOND = 0.5, 0.05
"""Least share of what is learnt without privacy, and least distance from guessing, of a model that is called useful."""


@dataclass(frozen=True)
class Way:
    """A way to train with privacy, and the score that it was rehearsed at."""

    trust: str
    score: float
    kept: float
    """Share of what is learnt without privacy, which is the distance from guessing."""
    rounds: int
    clip_norm: float
    options: Mapping[str, float]
    beyond: float = 0.0
    """Distance from guessing."""

    @property
    def useful(self) -> bool:
        """Whether the model is worth having: half of what is learnt is kept, clearly beyond guessing."""
        return self.kept >= _USEFUL and self.beyond > _BEYOND


@dataclass(frozen=True)
class Trial:
    """Outcome of :func:`try_project`.

    Examples
    --------
    >>> Trial("app", "refused", reason="Trees have no update.").verdict
    'refused'
    """

    name: str
    kind: str
    """``samples`` where gradients of records are protected, ``updates`` for whole updates, ``refused`` for neither."""
    without: float | None = None
    """Score of the project as it is."""
    guessing: float = 0.0
    """Score of always naming the most frequent class, or the mean."""
    epsilon: float = 0.0
    delta: float = 1e-5
    clients: int = 0
    ways: Sequence[Way] = ()
    client_line: str = ""
    server_line: str = ""
    reason: str = ""
    """Reason for which it is refused, and what to do."""
    files: tuple[str, str] = ("", "")

    @property
    def verdict(self) -> str:
        """``useful``, ``useful under sums``, ``useless``, ``not measured`` or ``refused``."""
        if self.kind == "refused":
            return "refused"
        if not self.ways:
            return "not measured"
        if self.ways and self.ways[0].useful:
            return "useful"
        return "useful under sums" if any(way.useful for way in self.ways) else "useless"

    @property
    def lines_changed(self) -> int:
        """Lines that a project changes."""
        return len(self.client_line.splitlines()) + len(self.server_line.splitlines())

    def lines(self) -> list[str]:
        """Return what to print, in lines of at most 80 columns."""
        if self.kind == "refused" or not self.ways:
            return _wrapped(f"{self.name}: {self.verdict}. {self.reason}")
        unit = "records" if self.kind == "samples" else "whole updates of clients"
        found = [
            f"{self.name}, {self.clients} simulated clients; {unit} are protected.",
            f"  {'as it is, without privacy':<34} {_percent(self.without)}",
            f"  {'guessing':<34} {_percent(self.guessing)}",
        ]
        for way in self.ways:
            what = "untrusted server" if way.trust == "untrusted-server" else "sums, half honest"
            label = f"epsilon {self.epsilon:g}, {what}"
            kept = f"{100 * min(max(way.kept, 0.0), 1.0):.0f} % of what is learnt"
            found.append(f"  {label:<34} {_percent(way.score)}  {kept}, {way.rounds} rounds")
        found += _wrapped(f"Likely {self.verdict}. These figures are of simulated data and are not private.")
        found += _wrapped(
            f"Epsilon = {self.epsilon:g} at delta = {self.delta:g}, for replacement of "
            f"{'one sample' if self.kind == 'samples' else 'all samples'} of one client, against the server and "
            "everybody else; noise on each client; over all releases. Under secure sums it holds if one helper and "
            "half of the clients of each sum are honest."
        )
        if self.verdict == "useless":
            found += _wrapped(self.reason)
        for file, lines in zip(self.files, (self.client_line, self.server_line), strict=True):
            found += ["", f"In {file}:", *(part for line in lines.splitlines() for part in _wrapped(line, code=True))]
        return found


def _wrapped(text: str, *, code: bool = False) -> list[str]:
    """Break a sentence, or a line of code between arguments, at 80 columns."""
    before, after = ("    ", "        ") if code else ("", "")
    return textwrap.wrap(
        text, 80, initial_indent=before, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )


def _percent(score: float | None) -> str:
    return "   not measured" if score is None else f"{100 * score:5.1f} %"


def try_project(
    place: str,
    *,
    nodes: int = 10,
    epsilon: float = 4.0,
    delta: float = 1e-5,
    rounds: int = 30,
    settings: Mapping[str, Any] | None = None,
) -> Trial:
    """Run somebody's Flower project in this process, and rehearse it with privacy.

    Parameters
    ----------
    place : str
        A folder whose pyproject.toml has ``[tool.flwr.app]``, or a module with one ClientApp and one ServerApp.
    nodes : int
        Clients of the simulation.
    epsilon, delta : float
        Privacy of all releases of a client together.
    rounds : int
        Rounds of full batches, each of which is one step.
    settings : mapping, optional
        Values for the project's run configuration.

    Raises
    ------
    ConfigurationError
        If there is no such project, or it does not run as it is.

    Notes
    -----
    Nothing is protected here: the figures depend on the simulated records.

    Examples
    --------
    >>> try:
    ...     try_project("no.such.project")
    ... except ConfigurationError as error:
    ...     error.kind
    'not-found'
    """
    project = Project.load(place, settings)
    run = ForeignRun(project, nodes)
    files = (project.client_file, project.server_file)
    try:
        with without_log():
            without = run.run()
    except ConfigurationError as error:
        if error.kind != "unsupported":
            raise
        return Trial(project.name, "refused", reason=str(error), files=files)
    try:
        return _rehearsal(run, epsilon, delta, rounds).trial(run, project.name, without, files)
    except MurmurflError as error:
        return Trial(project.name, "refused", without, clients=nodes, reason=str(error), files=files)


def assert_useful(place: str | Trial, **options: Any) -> Trial:
    """Return the trial of a project; fail a test unless its model is useful with privacy.

    Parameters
    ----------
    place : str or Trial
        A project, as for :func:`try_project`, or its trial.
    **options
        Parameters of :func:`try_project`.

    Raises
    ------
    AssertionError
        If privacy leaves no useful model for a server that nobody trusts or under secure sums, the project is refused,
        or it measures nothing. The text is that of ``murmurfl try``.

    Examples
    --------
    >>> try:
    ...     assert_useful(Trial("app", "refused", reason="Trees have no update."))
    ... except AssertionError as error:
    ...     print(error)
    app: refused. Trees have no update.
    """
    trial = place if isinstance(place, Trial) else try_project(place, **options)
    if not trial.verdict.startswith("useful"):
        raise AssertionError("\n".join(trial.lines()))
    return trial


@dataclass
class _Rehearsal:
    """Runs of one project with privacy."""

    kind: str
    epsilon: float
    delta: float
    rounds: int
    client_line: str
    server_line: str
    guessing: float
    train: Callable[[float, float, int], tuple[float | None, Way]]
    """Train with a mu, a factor of the step and a seed."""
    factors: Sequence[float] = _FACTORS
    own_score: Callable[[], float | None] = field(default=lambda: None)

    def trial(self, run: ForeignRun, name: str, without: float | None, files: tuple[str, str]) -> Trial:
        """Find the step without noise, and score it with the noise of both kinds of trust."""
        began = time.monotonic()
        without = self.own_score() if without is None else without
        found = {factor: self.train(_NO_NOISE, factor, 0)[0] for factor in self.factors}
        scored = {factor: score for factor, score in found.items() if score is not None}
        if without is None or not scored:
            return Trial(name, self.kind, reason=_UNMEASURED, clients=run.nodes, files=files)
        best = max(scored, key=scored.__getitem__)
        candidates = [factor for factor in self.factors if factor <= best][-2:] or [self.factors[0]]
        seeds = _SEEDS if time.monotonic() - began < _SLOW_S else _SEEDS[:1]
        # A project that hardly trains is measured by what its model can learn with full batches.
        learnt = without - self.guessing
        learnt = learnt if learnt > _BEYOND else max(*scored.values(), without) - self.guessing
        ways: list[Way] = []
        for trust, noisy_mu in self._noise(run.nodes):
            first = {factor: self.train(noisy_mu, factor, 0)[0] or 0.0 for factor in candidates}
            chosen = max(first, key=lambda factor: first[factor])
            again = [self.train(noisy_mu, chosen, seed) for seed in seeds]
            score = float(np.mean([found or 0.0 for found, _ in again]))
            beyond = score - self.guessing
            kept = beyond / learnt if learnt > _BEYOND else 0.0
            ways.append(replace(again[0][1], trust=trust, score=score, kept=kept, beyond=beyond))
        chosen_way = ways[0] if ways[0].useful else max(ways, key=lambda way: way.kept)
        client, server = self._lines(chosen_way, run.nodes)
        reason = (
            f"The project as it is ends {100 * (without - self.guessing):.0f} points beyond guessing, and so does its "
            "model without noise: there is little to keep. Train it for longer, or on a task that it learns."
            if learnt <= _BEYOND
            else "More clients, more records of each, or a smaller model would help: the mean of "
            f"{4 * run.nodes} clients has half of this noise."
        )
        guarantee = (self.guessing, self.epsilon, self.delta)
        return Trial(name, self.kind, without, *guarantee, run.nodes, ways, client, server, reason, files)

    def _noise(self, nodes: int) -> Sequence[tuple[str, float]]:
        """Return the mu of a release under both kinds of trust, of which half of the clients make that of sums."""
        mu = gdp_mu(self.epsilon, self.delta)
        return ("untrusted-server", mu), ("secure-aggregation", mu * math.sqrt(max(nodes // 2, 1)))

    def _lines(self, way: Way, nodes: int) -> tuple[str, str]:
        """Return the lines to change for a way of training."""
        secure = way.trust == "secure-aggregation"
        sums = f"SumAssumption(min_honest={max(nodes // 2, 1)}, min_cohort={nodes})"
        words = {
            "clip": f"{way.clip_norm:.3g}",
            "rounds": way.rounds,
            "epsilon": f"{self.epsilon:g}",
            "delta": "" if self.delta == 1e-5 else f", delta={self.delta:g}",
            "clients": nodes,
            "options": "".join(f", {key}={value:.3g}" for key, value in way.options.items()),
            "trust": f', trust="secure-aggregation", sums={sums}' if secure else "",
            "sums": f", secure_aggregation=SecureAggregation(min_cohort={nodes}, helpers=2)" if secure else "",
        }
        helpers = f"\n# the last 2 of {nodes + 2} nodes are helpers (docs/secure-aggregation.md)" if secure else ""
        return self.client_line.format(**words), f"{self.server_line.format(**words)}{helpers}"


def _rehearsal(run: ForeignRun, epsilon: float, delta: float, rounds: int) -> _Rehearsal:
    seen = run.seen
    if seen.keras_model is not None and seen.datasets:
        return _of_keras(run, epsilon, delta, rounds)
    if seen.module is not None and seen.datasets:
        return _of_module(run, epsilon, delta, rounds)
    if seen.estimator is not None and seen.datasets:
        return _of_estimator(run, epsilon, delta, rounds)
    return _of_updates(run, epsilon, delta)


def _targets(run: ForeignRun) -> list[Any]:
    found = []
    for data in run.seen.datasets.values():
        items = items_of(data)
        found += [np.asarray(pair_of(items[number])[1]).ravel() for number in range(len(items))]
    return found


def _guessing(targets: Sequence[Any]) -> float:
    """Return the share of the most frequent class; 0 for numbers, whose score is R^2."""
    values = [value.tolist() for value in targets]
    if any(isinstance(part, float) and part != int(part) for value in values for part in value):
        return 0.0
    return Counter(map(str, values)).most_common(1)[0][1] / len(values)


def _steps(
    run: ForeignRun,
    make: Callable[..., Any],
    arrays: ArrayRecord,
    rounds: int,
    own: Callable[[ArrayRecord], float | None] = lambda _: None,
) -> Any:
    """Return a function that trains with full batches; ``own`` scores a model where the project does not."""
    with without_log():
        try:
            bound = make(mu=_NO_NOISE, rounds=rounds).measured_bound()
        except ConfigurationError as error:  # which stands for what was wrong with the model or the records
            if isinstance(error.__cause__, MurmurflError):
                raise error.__cause__ from error
            raise
    clip = 0.1 * bound

    def train(mu: float, factor: float, seed: int) -> tuple[float | None, Way]:
        with without_log():
            app = make(mu=mu, rounds=rounds, clip_norm=clip, seed=seed)
            options = app.steps()
            options["learning_rate"] *= factor
            strategy = FullBatch(
                num_clients=run.nodes,
                node_deadline_s=60.0,
                seed=seed,
                session=f"try{seed}",
                callbacks=[ResultFolder(None)],
                **options,
            )
            result = strategy.start(InProcessGrid(app, run.nodes, {}), arrays, num_rounds=rounds)
            way = Way("", 0.0, 0.0, rounds, clip, options)
            found = run.score(put_into(run.seen.first_arrays or arrays, result.arrays))
            return (own(result.arrays) if found is None else found), way

    return train


def _of_module(run: ForeignRun, epsilon: float, delta: float, rounds: int) -> _Rehearsal:
    import torch

    from ...clients import load_trainable, trainable_arrays

    seen = run.seen
    module = copy.deepcopy(seen.module)
    named = {name for name, _ in module.named_parameters()}
    first = seen.first_arrays or ArrayRecord()
    if named <= first.keys():
        values = ArrayRecord({name: first[name] for name, _ in module.named_parameters()})
        module = load_trainable(module, values) if all(p.requires_grad for p in module.parameters()) else module
    # As clients train it, so that what mixes a batch is refused with what to use instead. Dropout is only left out.
    still = not any(isinstance(one, torch.nn.modules.batchnorm._BatchNorm) for one in module.modules())
    module.train(not still)
    arrays = trainable_arrays(module)

    def samples(context: Context) -> Any:
        return run.data_of(int(context.node_config["partition-id"]))

    def make(**named: Any) -> Any:
        return private_client_app(module, seen.loss, samples, **named)

    def own(trained: ArrayRecord) -> float:
        return _module_score(load_trainable(copy.deepcopy(module), trained), run)

    train = _steps(run, make, arrays, rounds, own)
    name = type(module).__name__
    drawing = still and any(isinstance(one, torch.nn.modules.dropout._DropoutNd) for one in module.modules())
    made = f"lambda: {name}(...).eval()" if drawing else name
    loss = f"{seen.loss_line}, " if seen.loss_line else "samples="
    client = (
        f"app = private_client_app({made}, {loss}samples, epsilon={{epsilon}}{{delta}}, rounds={{rounds}}, "
        "clip_norm={clip}{trust})\n# samples(context) returns the training set of the context's partition"
    )
    server = (
        "strategy = FullBatch(num_clients={clients}{options}{sums})\n"
        f"result = strategy.start(grid, trainable_arrays({name}()), num_rounds={{rounds}})"
    )
    return _Rehearsal(
        "samples",
        epsilon,
        delta,
        rounds,
        client,
        server,
        _guessing(_targets(run)),
        train,
        own_score=lambda: _module_score(seen.module.eval(), run),
    )


def _of_keras(run: ForeignRun, epsilon: float, delta: float, rounds: int) -> _Rehearsal:
    import keras  # pyright: ignore[reportMissingImports]  # of an extra

    from ...clients import trainable_arrays

    seen = run.seen
    model = keras.models.clone_model(seen.keras_model)
    model.compile(loss=seen.keras_model.loss)
    first = [array.numpy() for array in (seen.first_arrays or ArrayRecord()).values()]
    if [one.shape for one in first] == [one.shape for one in model.get_weights()]:
        model.set_weights(first)

    def samples(context: Context) -> Any:
        return run.data_of(int(context.node_config["partition-id"]))

    def make(**named: Any) -> Any:
        return private_client_app(model, None, samples, **named)

    train = _steps(run, make, trainable_arrays(model), rounds)
    client = (
        "app = private_client_app(model, samples=samples, epsilon={epsilon}{delta}, rounds={rounds}, clip_norm={clip}"
        "{trust})\n# samples(context) returns inputs and labels of the context's partition"
    )
    server = (
        "strategy = FullBatch(num_clients={clients}{options}{sums})\n"
        "result = strategy.start(grid, trainable_arrays(model), num_rounds={rounds})"
    )
    return _Rehearsal("samples", epsilon, delta, rounds, client, server, _guessing(_targets(run)), train)


def _module_score(module: Any, run: ForeignRun) -> float:
    """Return the accuracy, or R^2 of numbers, of a module on the records that clients trained on."""
    import torch

    from ...clients.adapters.torch_model import called_with
    from ...clients.records.schema import stacked

    wanted, made = [], []
    parameter = next(module.parameters())
    for data in run.seen.datasets.values():
        items = items_of(data)
        pairs = [pair_of(items[number]) for number in range(min(len(items), _SCORED))]
        for inputs, target in pairs:
            batch, _ = stacked(
                [inputs if isinstance(inputs, tuple | dict) else np.asarray(inputs)], [np.asarray(target)]
            )
            given = torch.as_tensor(batch) if not isinstance(batch, tuple | dict) else batch
            if not isinstance(given, tuple | dict) and given.is_floating_point():
                given = given.to(parameter.dtype)
            arguments, named = called_with(given)
            with torch.no_grad():
                output = module(*arguments, **named)
            made.append(np.asarray(getattr(output, "logits", output)).ravel())
            wanted.append(np.asarray(target).ravel())
    outputs, targets = np.stack(made), np.stack(wanted)
    if outputs.shape[1] > 1 and targets.shape[1] == 1:
        return float((outputs.argmax(axis=1) == targets[:, 0]).mean())
    if set(np.unique(targets).tolist()) <= {0, 1}:
        return float(((outputs > 0) == targets).mean())
    return float(1 - np.square(outputs - targets).sum() / np.square(targets - targets.mean(axis=0)).sum())


def _of_estimator(run: ForeignRun, epsilon: float, delta: float, rounds: int) -> _Rehearsal:
    seen = run.seen
    model, line = _stated(seen.estimator, list(seen.datasets.values()))

    def samples(context: Context) -> Any:
        return run.data_of(int(context.node_config["partition-id"]))

    def make(**named: Any) -> Any:
        return private_client_app(model, samples=samples, **named)

    train = _steps(run, make, model.initial_arrays(), rounds)
    client = (
        f"model = {line}\n"
        "app = private_client_app(model, samples=samples, epsilon={epsilon}{delta}, rounds={rounds}, clip_norm={clip}"
        "{trust})\n"
        "# samples(context) returns features and labels of the context's partition"
    )
    server = (
        "strategy = FullBatch(num_clients={clients}{options}{sums})\n"
        "result = strategy.start(grid, model.initial_arrays(), num_rounds={rounds})"
    )
    return _Rehearsal("samples", epsilon, delta, rounds, client, server, _guessing(_targets(run)), train)


def _stated(estimator: Any, parts: Sequence[tuple[Any, Any]]) -> tuple[LinearEstimator | MLPEstimator, str]:
    """Return the model of an estimator for records of these parts, and the code that makes it."""
    given, targets = estimator.get_params(), np.concatenate([np.asarray(labels) for _, labels in parts])
    # Steps, stopping and weights of classes are the server's, or none (docs/private-client-app.md).
    perceptron = type(estimator).__name__.startswith("MLP")
    kept = ("hidden_layer_sizes", "activation") if perceptron else ("loss", "alpha", "C", "fit_intercept")
    plain = type(estimator)(**{key: given[key] for key in kept if key in given})
    features, classes = np.shape(parts[0][0])[1], tuple(np.unique(targets).tolist())
    arguments = f"{plain!r}, num_features={features}, "
    if not perceptron:
        count = len(targets)
        model = LinearEstimator(plain, num_features=features, classes=classes, num_samples=count)
        return model, f"LinearEstimator({arguments}classes={classes}, num_samples={count})"
    if hasattr(estimator, "classes_"):
        return MLPEstimator(plain, features, classes=classes), f"MLPEstimator({arguments}classes={classes})"
    bounds = (math.floor(targets.min()), math.ceil(targets.max()))
    return MLPEstimator(plain, features, bounds=bounds), f"MLPEstimator({arguments}bounds={bounds})"


def _of_updates(run: ForeignRun, epsilon: float, delta: float) -> _Rehearsal:
    """Protect whole updates of clients, whatever computes them."""
    seen = run.seen
    if not seen.update_norms or seen.first_arrays is None:
        raise ConfigurationError(
            "Expected clients that return a changed model of numbers, got none. Ask them for private statistics "
            "(murmurfl.strategies.Statistics), or train a linear model or a network on the same data.",
            kind="unsupported",
            setting="package",
        )
    clip, rounds = float(np.median(seen.update_norms)) or 1.0, max(seen.rounds, 1)
    legacy = seen.request is not None and any(key.startswith("fitins.") for key in seen.request.content)
    first = seen.first_arrays

    def train(mu: float, factor: float, seed: int) -> tuple[float | None, Way]:
        policy = UpdatePolicy(clip_norm=clip * factor, mu=mu, delta=delta, max_participations=rounds)
        mod = CorrelatedNoiseMod(simulation=policy, seed=seed)

        def client(message: Message, context: Context) -> Message:
            return mod(message, context, run.trained)

        with without_log():
            strategy = CorrelatedFedAvg(
                num_clients=run.nodes,
                node_deadline_s=60.0,
                seed=seed,
                session=f"try{seed}",
                callbacks=[ResultFolder(None)],
            )
            grid = InProcessGrid(client, run.nodes, run.project.run_config)  # type: ignore[arg-type]
            result = strategy.start(grid, first, num_rounds=rounds)
            return run.score(result.arrays), Way("", 0.0, 0.0, rounds, clip * factor, {})

    made = "numpy_client_app(client_fn, " if legacy else "ClientApp("
    client_line = (
        "policy = UpdatePolicy(clip_norm={clip}, epsilon={epsilon}{delta}, max_participations={rounds}{trust})\n"
        f"app = {made}mods=[CorrelatedNoiseMod(simulation=policy)])"
    )
    server_line = "strategy = CorrelatedFedAvg(num_clients={clients}{sums})"
    return _Rehearsal(
        "updates", epsilon, delta, rounds, client_line, server_line, run.score(first) or 0.0, train, factors=(0.5, 1.0)
    )
