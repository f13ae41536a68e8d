"""The answer of ``murmurfl plan`` as data: a decision, ways to run it, mechanisms, persons (:mod:`.plan_lines`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ...privacy import ConfigurationError, Guarantee, PrivacyPolicy
from ...privacy.setting import Value
from ..methods.auto_method import AUTO
from ..runs.experiment import Experiment, situation_of, worked_out
from ..runs.run_guarantees import configured_figures, run_guarantee
from ..settings.layers import layered, started_with
from ..settings.run_config import RunConfig, without_unread
from .deciding import Decision, decide
from .noise_plans import Person, Plan, PlanRequest, make_plan, persons_of, request_of, request_of_decided
from .situation import Situation
from .variations import AS_SET, DEFAULT, Variation, command_of, tried_out, variations_of

_CLASSES = 10
"""Classes of the made-up data that stand in where no task is named: ten clouds."""
_OF_A_STRATEGY = ("passes", "max-participations", "mechanism", "clip-norm", "learning-rate", "clip-unit", "preset")
"""Keys that were set for another strategy and mean nothing to the one that is chosen."""
_LEFT_OUT = ("out-dir", "run-name", "track", "data-root", "strategy", "sample-uses", "stream", "num-rounds")
"""Keys that the command has no need of, or that the decision settles."""


@dataclass(frozen=True)
class Choice:
    """A decision, and the settings it was asked for with.

    Parameters
    ----------
    asked : mapping
        Run-config keys as they were given.
    made_up : bool
        Whether its task stands in for data that nobody has named.
    """

    decision: Decision
    asked: Mapping[str, Value]
    made_up: bool

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
    """Everything that ``murmurfl plan`` answers.

    Parameters
    ----------
    ways : sequence of Variation
        The decision beside other passes, batches and trust, and beside the run that would be made if nobody decided.
    plan : Plan or None
        Of every mechanism; None where machines release no stream with noise.
    """

    choice: Choice
    ways: Sequence[Variation]
    plan: Plan | None
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

    Parameters
    ----------
    request : PlanRequest or None
        What mechanisms are compared for.
    settings : mapping
        Run-config keys of the run that was asked about; empty for numbers alone.
    tries : int
        How many ways are trained in simulation, the first ones.
    person : tuple
        On how many machines somebody has samples, and how many on each; None where nobody asks.
    details : bool
        Whether ways and mechanisms are worked out, and persons that nobody asked about.
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

    Parameters
    ----------
    samples : int
        Of each machine.
    parameters : int
        d.
    settings : mapping
        Run-config keys beside: machines, mu, trust.
    """
    for name, value in (("samples", samples), ("parameters", parameters)):
        if value < 1:
            raise ConfigurationError(f"Expected {name} >= 1, got {value}.")
    features = max(round(parameters / _CLASSES) - 1, 1)
    machines = int(settings["num-clients"])
    made_up = {"task": "synthetic", "synthetic-samples": machines * samples, "synthetic-features": features}
    asked: dict[str, Value] = {**made_up, **settings}
    config = RunConfig.from_mapping({**asked, "strategy": AUTO})
    return Choice(decide(Situation(config, (samples,) * machines, features, _CLASSES, worked_out)), asked, made_up=True)


def asked_of_numbers(
    samples: int, parameters: int, settings: Mapping[str, Any], of_batches: Mapping[str, Any]
) -> tuple[Choice, PlanRequest | None]:
    """The choice for a few numbers, and what mechanisms are compared for: the chosen run, or releases of a batch.

    Parameters
    ----------
    samples, parameters, settings
        As for :func:`choice_of_numbers`.
    of_batches : mapping
        ``batch-size`` if it is given, and beside it ``passes`` and ``secret-order``: they settle the comparison, and
        not the decision.
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
            secret_order=of_batches.get("secret-order", False),
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


_OF_DECISIONS = ("sample-uses", "stream")
"""Keys that settle the decision alone."""
