"""What a plan says of rounds that do not wait for all: what a late answer is worth, and what it costs."""

from __future__ import annotations

from ..methods import METHODS
from ..settings.run_config import RunConfig


def late_lines(config: RunConfig) -> list[str]:
    """What happens to late answers of a run; nothing where rounds wait for all.

    Parameters
    ----------
    config : RunConfig
        Of the strategy that is run.
    """
    if config.wait_for == 1 and config.ask == 1:
        return []
    asked, needed = config.asked_per_round, config.answers_needed
    ends = f"A round asks {asked} machines and ends when {needed} have answered."
    if METHODS[config.strategy].strategy_type.late_answers == "dropped":
        return [
            f"{ends} Later answers are dropped, and no other release carries them: of up to {asked - needed} machines "
            f"a round ({100 * (asked - needed) / asked:.0f} %) the budget of a release is spent for nothing."
        ]
    if (METHODS[config.strategy].release_rule or config.release_rule) == "paper":
        return [f"{ends} Later answers count when they come; one that never comes is lost, and its budget with it."]
    return [f"{ends} Later answers count when they come, and what is lost comes with the machine's next: no budget is."]
