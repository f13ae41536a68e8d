"""One thing that was tried before a node starts, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....privacy import ConfigurationError

STATES = ("ok", "warning", "failed", "not tried")


@dataclass(frozen=True)
class Check:
    """What came of trying one thing.

    Parameters
    ----------
    name : str
        Of what was tried.
    state : str
        One of :data:`STATES`.
    sentence : str
        For the operator; with ``failed`` it says what to do.
    """

    name: str
    state: str
    sentence: str

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigurationError(f"Expected one of {', '.join(STATES)}, got {self.state!r}.")


def worst(checks: Sequence[Check]) -> str:
    """``failed`` if one of them did, else ``warning`` if there is one, else ``ok``."""
    states = {check.state for check in checks}
    return next((state for state in ("failed", "warning") if state in states), "ok")
