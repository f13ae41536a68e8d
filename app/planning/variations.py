"""What a decision would come to with more or fewer passes, other batches and other trust, beside what is the default.

Options of different strategies are compared by their score (:attr:`murmurfl.app.planning.Option.score`), a rule of
thumb made of public sizes. What a row comes to on data is only known when it is tried (:func:`tried_out`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...privacy import TRUST_MODELS, ConfigurationError, Trust
from ...privacy.setting import Value
from ..runs.experiment import worked_out
from ..settings.run_config import RunConfig, run_keys
from ..settings.trust_settings import TRUST_KEYS
from . import Decision, Option, Situation, decide, tried
from .decision_lines import command_of
from .rules import RULES, Rule

TAKEN, DEFAULT, AS_SET = "taken", "the default", "as it is set"
_OF_FILES = ("out-dir", "run-name", "track", "data-root")
_RULES = {rule.strategy: rule for rule in RULES}
_PASSES = (1, 2, 4, 8)
_PARTS = (1, 2, 4, 8, 16)
"""Of a machine's samples in a release, the fewest machine's divided by these."""
_MORE_ROUNDS = (0.5, 2.0)
_BATCHES = ("mu2", "trusted-mu2", "noisy-sgd", "trusted-sgd")
"""Strategies that go through their samples in batches, those with less noise first."""


@dataclass(frozen=True)
class Variation:
    """One way to run what is wanted.

    Parameters
    ----------
    option : Option
    varied : str
        What differs from the decision's: ``taken``, ``default``, ``passes``, ``batch`` or ``trust``.
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
        return min(self.option.problem.sizes) if self.whole else self.config.batch_size

    @property
    def whole(self) -> bool:
        """Whether all samples of a machine are in every release."""
        return _RULES[self.option.strategy].whole

    @property
    def uses(self) -> int:
        """In how many releases a sample is, beside what is released once for something else."""
        return self.option.uses - self.option.problem.uses_beside

    @property
    def command(self) -> str:
        """What runs it in simulation."""
        settings = {name: value for name, value in self.config.to_mapping().items() if name not in _OF_FILES}
        return command_of({**settings, "strategy": self.option.strategy})

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self.option.document(),
            "trust": self.trust,
            "batch": self.batch,
            "varied": self.varied,
            "mark": self.mark or None,
            "accuracy": self.accuracy,
            "command": self.command,
        }


def variations_of(decision: Decision, default: Mapping[str, Value], *, mark: str = DEFAULT) -> list[Variation]:
    """The decision, what would be the default, and other passes, batches and trust; the best first.

    Parameters
    ----------
    decision : Decision
    default : mapping
        Run-config keys of the run that would be made if nobody decided.
    mark : str
        What that one is called.

    Notes
    -----
    It looks at no sample. Every row has the mu that is asked for, under the trust that stands beside it.
    """
    situation = decision.situation
    found = [Variation(decision.chosen, "taken", TAKEN)]
    found += _as_settings(situation, default, mark)
    found += [Variation(one, "passes") for one in decision.others]
    if _RULES[decision.chosen.strategy].whole:
        found += _more_rounds(decision)
    found += _batches(situation, [decision.chosen, *decision.others])
    found += _other_trusts(situation)
    return sorted(_once_each(found), key=lambda one: one.option.score)


def _once_each(found: Sequence[Variation]) -> list[Variation]:
    """The first of each run; a default that is what was taken says both."""
    kept: dict[Any, Variation] = {}
    for one in found:
        key = (one.trust, one.option.strategy, one.batch, one.option.rounds, one.uses, one.option.features)
        before = kept.get(key)
        if before is None:
            kept[key] = one
        elif one.mark and one.mark not in before.mark:
            kept[key] = replace(before, mark=" and ".join(filter(None, (before.mark, one.mark))))
    return list(kept.values())


def _tried(rule: Rule, situation: Situation, settings: Mapping[str, Value]) -> Option | None:
    try:
        return tried(rule, situation, settings, worked_out)
    except ConfigurationError:
        return None  # it is no way to do it, and the decision says of each strategy why it is not


def _as_settings(situation: Situation, settings: Mapping[str, Value], mark: str) -> list[Variation]:
    """The run that settings ask for; none where it is of a strategy that is not compared, or impossible."""
    strategy = str(settings.get("strategy", run_keys()["strategy"].default))
    if strategy not in _RULES or situation.config.trust_model not in _trusts_of(strategy):
        return []
    known = situation.config.to_mapping()
    own = {name: value for name, value in settings.items() if name in known and name not in ("strategy", "epsilon")}
    made = _tried(_RULES[strategy], situation, own)
    return [] if made is None else [Variation(made, "default", mark)]


def _trusts_of(strategy: str) -> tuple[str, ...]:
    from ..methods import METHODS

    return METHODS[strategy].trusts


def _more_rounds(decision: Decision) -> Iterator[Variation]:
    """The chosen full batches in half and in twice as many rounds, which is how often a sample is used."""
    chosen, situation = decision.chosen, decision.situation
    for times in _MORE_ROUNDS:
        rounds = max(round(chosen.rounds * times), 1)
        made = _tried(_RULES[chosen.strategy], situation, {**chosen.settings, "num-rounds": rounds})
        if made is not None and _allowed(situation, made):
            yield Variation(made, "passes")


def _allowed(situation: Situation, option: Option) -> bool:
    uses, rounds = situation.most_uses, situation.most_rounds
    return (uses is None or option.uses <= uses) and (rounds is None or option.rounds <= rounds)


def _batches(situation: Situation, options: Sequence[Option]) -> list[Variation]:
    """The best strategy with batches: the best batch of each number of passes, and of the best number all batches."""
    known = [one for name in _BATCHES for one in options if one.strategy == name]
    if not known:
        return []
    base = min(known, key=lambda one: one.score)
    rule = _RULES[base.strategy]
    best: list[Option] = []
    whole: list[list[Option]] = []
    for passes in _PASSES:
        batches = sorted({max(situation.fewest // part, 1) for part in _PARTS}, reverse=True)
        shared = {"features": base.features, **({"passes": passes} if passes > 1 else {})}
        made = []
        for batch in batches:
            found = _tried(rule, situation, {**shared, "batch-size": batch})
            if found is not None and found.rounds > 1 and _allowed(situation, found):
                made.append(found)
        if made:
            best.append(min(made, key=lambda one: one.score))
            whole.append(made)
    if not best:
        return []
    chosen = min(range(len(best)), key=lambda number: best[number].score)
    near = sorted(whole[chosen], key=lambda one: one.score)[1:3]
    return [*(Variation(one, "passes") for one in best), *(Variation(one, "batch") for one in near)]


def _other_trusts(situation: Situation) -> Iterator[Variation]:
    """The best way under each other kind of trust."""
    plain = {name.replace("-", "_"): run_keys()[name].default for name in TRUST_KEYS}
    for trust in TRUST_MODELS:
        if trust == situation.config.trust_model:
            continue
        try:
            config = replace(situation.config, **{**plain, "trust": trust})
            yield Variation(decide(replace(situation, config=config), worked_out).chosen, "trust")
        except ConfigurationError:
            continue


def tried_out(rows: Sequence[Variation], most: int) -> list[Variation]:
    """The rows with the accuracy that the best of them, the decision and the default have in simulation.

    Parameters
    ----------
    rows : sequence of Variation
    most : int
        How many are tried, the first ones; those that are marked as well.

    Notes
    -----
    Whoever chooses by accuracy chooses by the samples that it is measured on, which should be public.
    """
    from ..engines.start import run_cohort

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return [
            replace(one, accuracy=run_cohort(replace(one.config, evaluate_every=1_000_000)).accuracy)
            if number < most or one.mark
            else one
            for number, one in enumerate(rows)
        ]
    finally:
        logging.disable(before)
