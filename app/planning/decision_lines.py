"""What ``murmurfl plan`` says of a decision: the strategy, what it is run with, why not the others, and the command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...privacy import ConfigurationError, Guarantee
from ...privacy.setting import Value
from ..methods import METHODS
from ..methods.auto_method import AUTO
from ..papers.unread import without_unread
from ..runs.experiment import Experiment, situation_of, worked_out
from ..runs.run_guarantees import configured_figures, run_guarantee
from ..settings.default_run import started_with
from ..settings.run_config import RunConfig, run_keys
from . import Decision, Situation, decide
from .request import PlanRequest

_CLASSES = 10
"""Of the made-up data that stand in for data nobody has named: ten clouds."""
_OF_A_STRATEGY = ("passes", "max-participations", "mechanism", "clip-norm", "learning-rate", "clip-unit", "preset")
"""Keys that were set for another strategy and mean nothing to the one that is chosen."""
_LEFT_OUT = ("out-dir", "run-name", "track", "data-root", "strategy", "sample-uses", "stream", "num-rounds")
"""Keys that the command has no need of, or that the decision settles."""


@dataclass(frozen=True)
class Choice:
    """A decision, and the settings it was asked for with.

    Parameters
    ----------
    decision : Decision
    asked : mapping
        Run-config keys as they were given.
    made_up : bool
        Whether its task stands in for data that nobody has named.
    """

    decision: Decision
    asked: Mapping[str, Value]
    made_up: bool

    @property
    def command(self) -> str:
        """What runs it in simulation, as it is typed."""
        return command_of(
            {name: value for name, value in self.asked.items() if name not in _LEFT_OUT} | self.decision.settings
        )

    @property
    def guarantee(self) -> Guarantee:
        """What the chosen run would guarantee."""
        experiment = cast(Experiment, self.decision.chosen.problem)  # worked_out makes no other problems
        return run_guarantee(experiment, configured_figures(experiment))

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self.decision.document(),
            "noise": self.noise,
            "command": self.command,
            "made_up_data": self.made_up,
            "guarantee": self.guarantee.document(),
        }

    @property
    def noise_values(self) -> int:
        """How many values of noise all releases of a machine have, or a trusted server's."""
        problem = self.decision.chosen.problem
        method = METHODS[problem.config.strategy]
        policy = method.policy(problem.trained, max(problem.sizes))
        return method.release_size(problem) * max(policy.normals_per_parameter, problem.num_rounds)

    @property
    def noise(self) -> str:
        """Whose noise of which mechanism, in words."""
        problem = self.decision.chosen.problem
        return METHODS[problem.config.strategy].policy(problem.trained, max(problem.sizes)).words

    def lines(self) -> list[str]:
        """What people read."""
        decision, chosen = self.decision, self.decision.chosen
        problem = chosen.problem
        often = "every sample in each" if chosen.uses == chosen.rounds else _times(chosen.uses)
        rows = {
            "rounds": f"{chosen.rounds}, {often}",
            "batch": str(chosen.settings["batch-size"]) if "batch-size" in chosen.settings else "",
            "noise": self.noise,
            "clip": f"{problem.values.clip_norm:.4g}",
            "features": chosen.features if chosen.features != run_keys()["features"].default else "as they are",
            "centring": "private: the mean of the features is released first" if problem.is_centred else "",
            "noise to signal": f"{chosen.noise_to_signal:.2g}: in the mean gradient that the last step rests on, the "
            "length of the noise over that of a clipped gradient",
            "because": decision.reason.partition(";")[0] + ".",
        }
        width = max(map(len, rows))
        told = [f"Take {chosen.strategy}."]
        told += [f"  {name:<{width}}  {text}" for name, text in rows.items() if text]
        told.append(f"Guarantee: {self.guarantee.sentence}")
        told += [f"In plain words: {self.guarantee.meaning}"] if self.guarantee.meaning else []
        told += [f"Not {one.strategy}: {decision.why_not(one)}." for one in decision.others]
        told += [f"Not {one.strategy}: {one.why.rstrip('.')}." for one in decision.impossible]
        told += ["Run it:", f"    {self.command}"]
        if self.made_up:
            told.append(
                "There it runs on made-up data of these sizes; --set task=package.module:make_task names yours."
            )
        return told


def command_of(settings: Mapping[str, Value]) -> str:
    """What runs settings in simulation, as it is typed.

    Parameters
    ----------
    settings : mapping
        Run-config keys; those with their default are left out.
    """
    keys = run_keys()
    needed = {name: value for name, value in settings.items() if value != keys[name].default}
    if needed.get("epsilon"):  # of which a mu beside it was made
        needed.pop("mu", None)
    for name in started_with(needed).keys() - needed.keys():  # what the command would set by itself
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


def _times(uses: int) -> str:
    return "each sample in one of them" if uses == 1 else f"each sample in {uses} of them"


def choice_of_run(settings: Mapping[str, Value]) -> Choice:
    """The decision for a run's settings, on the sizes of its data.

    Parameters
    ----------
    settings : mapping
        Run-config keys. What only another strategy reads is left out.

    Raises
    ------
    ConfigurationError
        If no strategy can do what is asked for.
    """
    wanted = dict(settings)
    if wanted.get("strategy") != AUTO:
        noiseless = {"mechanism": "none"} if wanted.get("mechanism") == "none" else {}
        wanted = {name: value for name, value in wanted.items() if name not in _OF_A_STRATEGY} | noiseless
    wanted = without_unread({**wanted, "strategy": AUTO})
    config = RunConfig.from_mapping(wanted)
    return Choice(decide(situation_of(config), worked_out), wanted, made_up=False)


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

    Raises
    ------
    ConfigurationError
        If no strategy can do what is asked for.
    """
    if samples < 1:
        raise ConfigurationError(f"Expected samples >= 1, got {samples}.")
    if parameters < 1:
        raise ConfigurationError(f"Expected parameters >= 1, got {parameters}.")
    features = max(round(parameters / _CLASSES) - 1, 1)
    machines = int(settings["num-clients"])
    made_up: dict[str, Value] = {
        "task": "synthetic",
        "synthetic-samples": machines * samples,
        "synthetic-features": features,
    }
    asked = {**made_up, **settings}
    config = RunConfig.from_mapping({**asked, "strategy": AUTO})
    return Choice(decide(Situation(config, (samples,) * machines, features, _CLASSES), worked_out), asked, made_up=True)


def request_of_choice(choice: Choice) -> PlanRequest | None:
    """What the tables of mechanisms are for: the chosen run; None where its machines release no stream with noise.

    Parameters
    ----------
    choice : Choice
    """
    problem = choice.decision.chosen.problem
    config = problem.config
    policy = METHODS[config.strategy].policy(problem.trained, max(problem.sizes))
    if not policy.adds_noise or policy.clip_unit == "moments":
        return None
    whole = policy.sums_samples
    samples = min(problem.sizes) if config.secure else max(problem.sizes)
    return PlanRequest(
        machines=config.num_clients,
        samples=samples,
        rounds=problem.num_rounds,
        batch_size=samples if whole else config.batch_size,
        epsilon=0.0,
        delta=config.delta,
        per_round=config.asked_per_round,
        passes=policy.participations,
        clip_norm=policy.clip_norm,
        parameters=problem.model.num_parameters,
        mu=policy.mu,
        cap=policy.max_participations,
        clip_unit=policy.clip_unit,
        release_rule=policy.release_rule,
        trust=policy.trust,
        min_honest=policy.min_honest,
        min_cohort=policy.min_cohort,
        after_mean=problem.is_centred,
    )
