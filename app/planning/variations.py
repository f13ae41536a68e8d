"""Variations of a decision: more or fewer rounds, other batches, other trust, and the default run.

Options are compared by their score (:attr:`murmurfl.app.planning.Option.score`). What a row comes to on data is only
known when it is tried (:func:`tried_out`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...privacy import TRUST_MODELS, ConfigurationError, Trust
from ...privacy.setting import Value
from ..methods import METHODS
from ..nodes.flower_internals import without_log
from ..settings.layers import started_with
from ..settings.run_config import RunConfig, run_keys
from .deciding import Decision, Option, decide, tried
from .situation import Situation

TAKEN, DEFAULT, AS_SET = "taken", "the default", "as it is set"
_OF_FILES = ("out-dir", "run-name", "track", "data-root")
_PARTS = (2, 4, 8, 16)
"""Batches are the samples of the smallest machine over these."""
_MORE_ROUNDS = (0.5, 2.0)
_BATCHES = ("mu2", "trusted-mu2", "noisy-sgd", "trusted-sgd")
"""Strategies that go through their samples in batches, those with less noise first."""


@dataclass(frozen=True)
class Variation:
    """One way to run what is wanted.

    Parameters
    ----------
    varied : str
        What differs from the decision's: ``taken``, ``default``, ``strategy``, ``rounds``, ``batch`` or ``trust``.
    mark : str
        What it is to whoever reads a list of them; often empty.
    accuracy : float or None
        On the test set, where it was tried out.
    """

    option: Option
    varied: str
    mark: str = ""
    accuracy: float | None = None

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

    @property
    def command(self) -> str:
        """The command that runs it in simulation."""
        settings = {name: value for name, value in self.config.to_mapping().items() if name not in _OF_FILES}
        return command_of({**settings, "strategy": self.option.strategy})


def variations_of(decision: Decision, default: Mapping[str, Value], *, mark: str = DEFAULT) -> list[Variation]:
    """The decision, what would be the default, and other rounds, batches and trust; the best first.

    Parameters
    ----------
    default : mapping
        Run-config keys of the run that would be made if nobody decided.
    mark : str
        What that one is called.

    Notes
    -----
    Every row has the mu that was asked for, under the trust that it names.
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

    Parameters
    ----------
    most : int
        How many are tried, the first ones; those that are marked as well.

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
