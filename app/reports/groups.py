"""Runs that differ in their seed alone, as one: means, and how far apart they are."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from ..runs.outcome import Outcome
from .finding import RecordedRun

_OF_ONE_RUN = ("seed", "run-name", "out-dir", "track", "checkpoint", "data-root", "download")
"""Keys in which runs of one group may differ."""
_MOST_NAMED = 3
_SHORTEST_NAME = 3
_SEED, _TIME = re.compile(r"[-_. ]?seed[-_=]?\d+"), re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""Parts of a run's name that tell its seed, and when it was made."""

Spread = tuple[float, float | None]
"""A mean and a standard deviation; of a single run None."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone; often a single one.

    Parameters
    ----------
    runs : sequence of RecordedRun
        At least one, each with a seed of its own.
    """

    name: str
    runs: Sequence[RecordedRun]

    @property
    def outcome(self) -> Outcome:
        """The first run's: what is the same in all of them may be taken from it."""
        return self.runs[0].outcome

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs."""
        return sorted(int(run.outcome.config.get("seed", 0)) for run in self.runs)

    def spread(self, measure: str) -> Spread | None:
        """Mean and deviation of a figure of the results; None unless every run has it."""
        return _spread([getattr(run.outcome, measure) for run in self.runs])

    def without_noise(self, measure: str) -> Spread | None:
        """Mean and deviation of a figure of their twins without noise; None without any."""
        twins = [twin for run in self.runs if (twin := run.outcome.without_noise) is not None]
        return _spread([getattr(twin, measure) for twin in twins])

    @property
    def alone(self) -> Spread | None:
        """Mean and deviation of the accuracy of one client alone; None unless it is known."""
        return _spread([one.accuracy for run in self.runs if (one := run.outcome.alone) is not None])

    def curve(self, measure: str) -> tuple[list[int], list[float], list[float]]:
        """Return rounds in which all runs were evaluated, means and deviations; a single run's deviations are 0."""
        curves = [dict(zip(*run.curve(measure), strict=True)) for run in self.runs]
        rounds = [number for number in curves[0] if all(number in curve for curve in curves)]
        spreads = [_spread([curve[number] for curve in curves]) or (0.0, None) for number in rounds]
        return rounds, [mean for mean, _ in spreads], [deviation or 0.0 for _, deviation in spreads]

    def total(self, count: Callable[[RecordedRun], int]) -> int:
        """Add up a count over all runs."""
        return sum(map(count, self.runs))


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return fmean(known), stdev(known) if len(known) > 1 else None


def grouped(runs: Sequence[RecordedRun]) -> list[Group]:
    """Group runs whose configurations and guarantees differ in the seed alone, in the order of the first of each.

    A second run of the same seed is in another group: it says nothing of how far apart seeds are.
    """
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], list[RecordedRun]] = {}
    for run in runs:
        likeness = repr(_likeness(run))
        same_seed = f"{run.outcome.config.get('seed')} of {likeness}"
        found.setdefault((likeness, seen[same_seed]), []).append(run)
        seen[same_seed] += 1
    return _told_apart([Group(_common_name([run.name for run in members]), members) for members in found.values()])


def _likeness(run: RecordedRun) -> Any:
    config = run.outcome.config
    rest = sorted((key, repr(value)) for key, value in config.items() if key not in _OF_ONE_RUN)
    return rest, run.outcome.guarantee, run.outcome.num_clients


def _common_name(names: Sequence[str]) -> str:
    """Return the common part of a group's names without seed and time, where that is a name."""
    if len(names) == 1:
        return names[0]
    plain = {without_time(_SEED.sub("", name)).strip("-_. ") for name in names}
    common = os.path.commonprefix(list(plain)).rstrip("-_. ")  # noqa: RUF071 - of names, not of paths
    return common if len(common) >= (1 if len(plain) == 1 else _SHORTEST_NAME) else f"{names[0]} and others"


def without_time(name: str) -> str:
    """Return a run's name without when it was made."""
    return _TIME.sub("", name)


def _told_apart(groups: Sequence[Group]) -> list[Group]:
    """Give groups names that no other has: by their settings where names are the same, otherwise by a number."""
    made: dict[str, Group] = {}
    for group in groups:
        same = [one for one in groups if one.name == group.name]
        differences = _differences(group, same) if len(same) > 1 else ""
        name = base = f"{group.name} ({differences})" if differences else group.name
        number = 1
        while name in made:
            number += 1
            name = f"{base}, {number}"
        made[name] = replace(group, name=name)
    return list(made.values())


def _differences(group: Group, same: Sequence[Group]) -> str:
    own, configs = group.outcome.config, [one.outcome.config for one in same]
    differ = (key for key in own if len({repr(config.get(key)) for config in configs}) > 1)
    # What was asked for tells more than what follows from it.
    keys = sorted((key for key in differ if key not in _OF_ONE_RUN), key=lambda key: key in group.outcome.asked)
    return ", ".join(f"{key} = {setting_text(own[key])}" for key in keys[:_MOST_NAMED])


def setting_text(value: Any) -> str:
    """Return a value of the configuration as a page shows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
