"""The answer of ``murmurfl plan`` as data: a decision, ways to run it, mechanisms, persons (:mod:`.plan_lines`).

Ways are compared by their score (:attr:`murmurfl.app.planning.Option.score`). What one comes to on data is only known
when it is tried (:func:`tried_out`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from ...privacy import TRUST_MODELS, ConfigurationError, Guarantee, PrivacyPolicy, Trust, gdp_epsilon
from ...privacy.accounting.amplification import Amplification, allocation_mu
from ...privacy.machine.tables import SHUFFLED
from ...privacy.setting import Value
from ..methods import METHODS
from ..methods.method import AUTO, worth_of_order
from ..nodes.flower_internals import without_log
from ..runs.experiment import Experiment, situation_of, worked_out
from ..runs.run_guarantees import configured_figures, run_guarantee
from ..settings.layers import layered, started_with
from ..settings.run_config import RunConfig, run_keys, without_unread
from .deciding import Decision, Option, Situation, decide, tried
from .noise_plans import Person, Plan, PlanRequest, make_plan, persons_of, request_of, request_of_decided

TAKEN, DEFAULT, AS_SET = "taken", "the default", "as it is set"
_OF_FILES = ("out-dir", "run-name", "track", "data-root")
_PARTS = (2, 4, 8, 16)
"""Batches are the samples of the smallest machine over these."""
_MORE_ROUNDS = (0.5, 2.0)
_BATCHES = ("mu2", "trusted-mu2", "noisy-sgd", "trusted-sgd")
"""Strategies that go through their samples in batches, those with less noise first."""


@dataclass(frozen=True)
class Variation:
    """One way to run what is wanted."""

    option: Option
    # What differs from the decision's: `taken`, `default`, `strategy`, `rounds`, `batch`, `order` or `trust`
    varied: str
    mark: str = ""  # What it is to whoever reads a list of them; often empty
    accuracy: float | None = None  # On the test set, where it was tried out

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.option.problem.config

    @property
    def trust(self) -> Trust:
        """Whom machines trust."""
        return self.config.trust_model

    @property
    def batch(self) -> int:
        """Samples of a machine in one release."""
        return min(self.option.problem.sizes) if self.option.whole else self.config.batch_size

    @property
    def uses(self) -> int:
        """The number of training releases that a sample is in."""
        return self.option.uses - self.option.problem.uses_beside

    @cached_property
    def amplification(self) -> Amplification | None:
        """What its secret order makes of epsilon; None without one."""
        problem, method = self.option.problem, METHODS[self.option.strategy]
        policies = [method.policy(problem.trained, size) for size in problem.sizes]
        return worth_of_order(policies, method.release_size(problem))

    @property
    def command(self) -> str:
        """The command that runs it in simulation."""
        settings = {name: value for name, value in self.config.to_mapping().items() if name not in _OF_FILES}
        return command_of({**settings, "strategy": self.option.strategy})


def variations_of(decision: Decision, default: Mapping[str, Value], *, mark: str = DEFAULT) -> list[Variation]:
    """The decision, what would be the default, and other rounds, batches and trust; the best first.

    ``default`` has the keys of the run that would be made if nobody decided, ``mark`` what that one is called.

    Notes
    -----
    Every row has the mu that was asked for, under the trust that it names. In a secret order a row has the epsilon that
    was asked for while nobody learns the order, and a larger mu (:attr:`Variation.amplification`).
    """
    situation, chosen = decision.situation, decision.chosen
    found = [Variation(chosen, "taken", TAKEN)]
    found += [Variation(one, "default", mark) for one in _as_settings(situation, default)]
    found += [Variation(one, "strategy") for one in decision.others]
    if chosen.whole:
        rounds = [max(round(chosen.rounds * times), 1) for times in _MORE_ROUNDS]
        more = [{**chosen.settings, "num-rounds": number} for number in rounds]
        found += [Variation(one, "rounds") for one in _possible(situation, chosen.strategy, more)]
    found += _batches(situation, [chosen, *decision.others])
    found += [Variation(one, "order") for one in _in_secret(situation)]
    found += [Variation(one, "trust") for one in _other_trusts(situation)]
    kept: dict[Any, Variation] = {}  # the first of each run; a default that is what was taken says both
    for one in found:
        key = (one.trust, one.option.strategy, one.batch, one.option.rounds, one.uses, one.option.features)
        before = kept.setdefault(key, one)
        if one.mark not in before.mark:
            kept[key] = replace(before, mark=" and ".join(filter(None, (before.mark, one.mark))))
    return sorted(kept.values(), key=lambda one: one.option.score)


def _tried(situation: Situation, strategy: str, ways: Iterable[Mapping[str, Value]]) -> Iterator[Option]:
    """A strategy in those of several ways that are possible; the decision says of each strategy why it is not."""
    for settings in ways:
        try:
            yield tried(situation, strategy, settings)
        except ConfigurationError:
            continue


def _possible(situation: Situation, strategy: str, ways: Iterable[Mapping[str, Value]]) -> list[Option]:
    """A strategy in those ways that keep to the situation's uses and rounds."""
    uses, rounds = situation.most_uses, situation.most_rounds
    return [
        one
        for one in _tried(situation, strategy, ways)
        if (uses is None or one.uses <= uses) and (rounds is None or one.rounds <= rounds)
    ]


def _as_settings(situation: Situation, settings: Mapping[str, Value]) -> Iterator[Option]:
    """The run that settings ask for; none where it is of a strategy that is not compared, or impossible."""
    strategy = str(settings.get("strategy", run_keys()["strategy"].default))
    if situation.config.trust_model in METHODS[strategy].trusts:
        known = situation.config.to_mapping().keys() - {"strategy", "epsilon"}
        yield from _tried(situation, strategy, [{name: settings[name] for name in settings if name in known}])


def _batches(situation: Situation, options: Sequence[Option]) -> list[Variation]:
    """The best strategy with batches, in one pass with each batch."""
    known = [one for name in _BATCHES for one in options if one.strategy == name]
    if not known:
        return []
    base, sizes = known[0], sorted({max(situation.fewest // part, 1) for part in _PARTS}, reverse=True)
    made = _possible(situation, base.strategy, [{"features": base.features, "batch-size": size} for size in sizes])
    return [Variation(one, "batch") for one in made]


_RELEASES = (6, 12, 24)
"""Numbers of releases that a sample hides in, of which the best is shown; each costs as many times the gradients."""


def _in_secret(situation: Situation) -> list[Option]:
    """Noisy SGD in a secret order, whose epsilon is the one that was asked for while nobody learns the order.

    No decision takes it: nobody can check that the order and the time of a release stay secret. There is none for a
    stream, where not all samples are there from the first release on, and none for a trusted server.
    """
    config, fewest = situation.config, situation.fewest
    if config.stream or not config.private:
        return []
    epsilon, ways = gdp_epsilon(config.mu, config.delta), []
    for batch in sorted({-(-fewest // min(releases, fewest)) for releases in _RELEASES}):
        # The mu is for noise without resolution; what resolution shows is left room for.
        mu = allocation_mu(0.999 * epsilon, fewest // batch, 0.99 * config.delta)
        known: Mapping[str, Value] = {"batch-size": batch, "mu": mu, "epsilon": 0.0}
        ways.append({**known, "batch-selection": "shuffled", "centring": "none"})
    return sorted(_possible(situation, "noisy-sgd", ways), key=lambda option: option.score)[:1]


def _other_trusts(situation: Situation) -> Iterator[Option]:
    """The best way under each other kind of trust."""
    plain = {one.attribute: one.default for one in run_keys().values() if one.read_by == "trust"}
    for trust in TRUST_MODELS:
        if trust == situation.config.trust_model:
            continue
        try:
            config = replace(situation.config, **{**plain, "trust": trust})
            yield decide(replace(situation, config=config)).chosen
        except ConfigurationError:
            continue


def tried_out(rows: Sequence[Variation], most: int) -> list[Variation]:
    """The rows with the accuracy that the best of them, the decision and the default have in simulation.

    Tried are the first ``most`` rows, and those that are marked.

    Notes
    -----
    Whoever chooses by accuracy chooses by the samples that it is measured on, which should be public.
    """
    from ..engines.start import run_cohort

    def accuracy(one: Variation) -> float | None:
        return run_cohort(replace(one.config, evaluate_every=1_000_000)).accuracy

    with without_log():
        return [
            replace(one, accuracy=accuracy(one)) if number < most or one.mark else one
            for number, one in enumerate(rows)
        ]


def command_of(settings: Mapping[str, Value]) -> str:
    """The command that runs settings in simulation; keys with their default are left out."""
    keys = run_keys()
    needed = {name: value for name, value in settings.items() if value != keys[name].default}
    if needed.get("epsilon"):  # of which a mu beside it was made
        needed.pop("mu", None)
    for name in [name for name in started_with(needed) if name not in needed]:  # what the command would set by itself
        own = settings.get(name, keys[name].default)
        if name == "mechanism" and not own:
            config = RunConfig.from_mapping(needed)
            own = METHODS[config.strategy].mechanism(config)
        if name not in ("mu", "epsilon") or not {"mu", "epsilon"} & needed.keys():
            needed[name] = own
    texts = [f"{name}={_typed(value)}" for name, value in needed.items()]
    return " ".join(["murmurfl run --engine cohort", *(f"--set {shlex.quote(text)}" for text in texts)])


def _typed(value: Value) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


_CLASSES = 10
"""Classes of the made-up data that stand in where no task is named: ten clouds."""
_OF_A_STRATEGY = ("passes", "max-participations", "mechanism", "clip-norm", "learning-rate", "clip-unit", "preset")
"""Keys that were set for another strategy and mean nothing to the one that is chosen."""
_LEFT_OUT = (
    "out-dir",
    "run-name",
    "track",
    "data-root",
    "strategy",
    "strategy.sample-uses",
    "strategy.stream",
    "num-rounds",
)
"""Keys that the command has no need of, or that the decision settles."""


@dataclass(frozen=True)
class Choice:
    """A decision, and the settings it was asked for with."""

    decision: Decision
    asked: Mapping[str, Value]  # Run-config keys as they were given
    made_up: bool  # Whether its task stands in for data that nobody has named

    @property
    def experiment(self) -> Experiment:
        """The chosen run."""
        return cast(Experiment, self.decision.chosen.problem)  # worked_out makes no other problems

    @property
    def command(self) -> str:
        """The command that runs it in simulation."""
        asked = {name: value for name, value in self.asked.items() if name not in _LEFT_OUT}
        return command_of(asked | self.decision.settings)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the chosen run."""
        return run_guarantee(self.experiment, configured_figures(self.experiment))

    @property
    def policy(self) -> PrivacyPolicy:
        """The training policy of the machine with the most samples."""
        return self.experiment.method.policy(self.experiment.trained, max(self.experiment.sizes))

    @property
    def noise_values(self) -> int:
        """The number of noise values in all releases of a machine, or of a trusted server."""
        rows = max(self.policy.normals_per_parameter, self.experiment.num_rounds)
        return self.experiment.method.release_size(self.experiment) * rows


@dataclass(frozen=True)
class Answer:
    """Everything that ``murmurfl plan`` answers."""

    choice: Choice
    # The decision beside other passes, batches and trust, and beside the run that would be made if nobody decided
    ways: Sequence[Variation]
    plan: Plan | None  # Of every mechanism; None where machines release no stream with noise
    persons: Sequence[Person]


def answer(
    choice: Choice,
    request: PlanRequest | None,
    settings: Mapping[str, Value],
    *,
    tries: int = 0,
    person: tuple[int | None, int | None] = (None, None),
    details: bool = True,
) -> Answer:
    """Vary a choice and work out its mechanisms and persons.

    ``settings`` are those of the run that was asked about, empty for numbers alone; ``tries`` ways are trained in
    simulation. ``person`` has on how many machines somebody has samples, and how many on each; None where nobody asks.
    Without ``details`` no ways and mechanisms are worked out.
    """
    if not details:
        asked = persons_of(choice.guarantee, choice.noise_values, *person) if any(person) else ()
        return Answer(choice, (), None, asked)
    strategy = settings.get("strategy", AUTO)
    named = strategy not in (AUTO, RunConfig.strategy)
    left = {"strategy": RunConfig.strategy if strategy == AUTO else strategy}  # where nobody decides
    default = choice.asked if choice.made_up else started_with({**choice.asked, **settings, **left})
    ways = variations_of(choice.decision, default, mark=AS_SET if named else DEFAULT)
    plan = None if request is None else make_plan(request)
    if plan is not None and plan.guarantee.unit == "owner":
        persons = persons_of(plan.guarantee, plan.noise_values, *person)
    else:
        persons = persons_of(choice.guarantee, choice.noise_values, *person)
    return Answer(choice, tried_out(ways, tries) if tries else ways, plan, persons)


def choice_of_run(settings: Mapping[str, Value]) -> Choice:
    """The decision for a run's settings, on the sizes of its data."""
    wanted = dict(settings)
    if wanted.get("strategy") != AUTO:
        noiseless = {"mechanism": "none"} if wanted.get("mechanism") == "none" else {}
        wanted = {name: value for name, value in wanted.items() if name not in _OF_A_STRATEGY} | noiseless
    wanted = without_unread({**wanted, "strategy": AUTO})
    return Choice(decide(situation_of(RunConfig.from_mapping(wanted))), wanted, made_up=False)


def choice_of_numbers(samples: int, parameters: int, settings: Mapping[str, Value]) -> Choice:
    """The decision for a few numbers.

    ``samples`` are those of each machine, ``parameters`` is d, and ``settings`` say machines, mu and trust.
    """
    for name, value in (("samples", samples), ("parameters", parameters)):
        if value < 1:
            raise ConfigurationError(f"Expected {name} >= 1, got {value}.")
    features = max(round(parameters / _CLASSES) - 1, 1)
    machines = int(settings["num-clients"])
    made_up = {"task": "synthetic", "task.samples": machines * samples, "task.features": features}
    asked: dict[str, Value] = {**made_up, **settings}
    config = RunConfig.from_mapping({**asked, "strategy": AUTO})
    return Choice(decide(Situation(config, (samples,) * machines, features, _CLASSES, worked_out)), asked, made_up=True)


def asked_of_numbers(
    samples: int, parameters: int, settings: Mapping[str, Any], of_batches: Mapping[str, Any]
) -> tuple[Choice, PlanRequest | None]:
    """The choice for a few numbers, and what mechanisms are compared for: the chosen run, or releases of a batch.

    ``of_batches`` has ``batch-size`` if it is given, and beside it ``passes`` and ``batch-selection``: they settle the
    comparison, and not the decision.
    """
    request, machines = None, settings["num-clients"]
    per_round = settings.get("clients-per-round") or machines
    if "batch-size" in of_batches:
        batch, passes = of_batches["batch-size"], of_batches.get("passes", 1)
        request = PlanRequest(
            machines=machines,
            samples=samples,
            rounds=settings.get("num-rounds") or passes * machines * (samples // max(batch, 1)) // per_round,
            batch_size=batch,
            epsilon=settings.get("epsilon", 0.0),
            mu=settings.get("mu", 0.0),
            delta=settings.get("delta", 1e-5),
            per_round=per_round,
            passes=passes,
            clip_norm=settings.get("clip-norm", 1.0),
            parameters=parameters,
            secret_order=of_batches.get("batch-selection") == SHUFFLED,
        )
        request.check_rounds()
    choice = choice_of_numbers(samples, parameters, {**settings, "clients-per-round": per_round})
    return choice, request or request_of_decided(choice.experiment)


def asked_of_run(
    settings: Mapping[str, Value], changes: Mapping[str, Value], sizes: Mapping[str, int]
) -> tuple[Choice, PlanRequest | None]:
    """The choice for a run, and what mechanisms are compared for: that run, or the chosen one where it is open."""
    merged = layered(settings, changes)
    if merged.get("strategy") == AUTO:
        choice = choice_of_run(merged)
        return choice, request_of_decided(choice.experiment)
    plain = {name: value for name, value in merged.items() if name not in _OF_DECISIONS}
    request = request_of(RunConfig.from_mapping(plain), check_rounds="samples" not in sizes)
    if sizes:
        request = replace(request, **sizes)
        request.check_rounds()
    return choice_of_run(merged), request


_OF_DECISIONS = ("strategy.sample-uses", "strategy.stream")
"""Keys that settle the decision alone."""
