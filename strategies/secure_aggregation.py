"""What a strategy is told of secure aggregation, and how a run ends that cannot go on with it.

Machines hide their releases under masks, and helpers hand over what the masks of a whole cohort add up to
(docs/secure-aggregation.md). The update rules do not change: they are given the sum of a round's releases, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..privacy import ConfigurationError, MurmurflError
from ..privacy.roster import MOST_HELPERS, MOST_MACHINES

_DIGEST_DIGITS = 64


@dataclass(frozen=True)
class SecureAggregation:
    """That releases come under masks, and when the server has a sum of them opened.

    Parameters
    ----------
    min_cohort : int
        The fewest releases of a round that are opened; with fewer the round is closed, and everything is carried over.
        Machines and helpers have their own such number, which this one only saves asking.
    helpers : int
        How many helpers the roster has.
    patience : int
        In how many rounds in a row a helper may be out of reach, and how often the helpers are asked for one sum,
        before the run ends.
    roster : str
        The digest of the one roster to work with, 64 hexadecimal digits; default whichever all helpers have.

    Raises
    ------
    ConfigurationError
        If a number or the digest is impossible.

    Notes
    -----
    Helpers open only what their own rule allows, by what machines signed, whatever is asked here.
    """

    min_cohort: int
    helpers: int = 2
    patience: int = 3
    roster: str = ""

    def __post_init__(self) -> None:
        for name, most in (("min_cohort", MOST_MACHINES), ("helpers", MOST_HELPERS), ("patience", None)):
            value = getattr(self, name)
            right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not right or (most is not None and value > most):
                limit = "" if most is None else f" and <= {most}"
                raise ConfigurationError(f"Expected {name} to be an integer >= 1{limit}, got {value!r}.")
        digits = isinstance(self.roster, str) and set(self.roster) <= set("0123456789abcdef")
        if not digits or len(self.roster) not in (0, _DIGEST_DIGITS):
            raise ConfigurationError(
                f"Expected roster to be a digest of {_DIGEST_DIGITS} hexadecimal digits, got {self.roster!r}: "
                "`murmurfl roster show` prints it."
            )

    @property
    def settled(self) -> dict[str, Any]:
        """What a resumed training must agree on, plain values; how patient its server is may change."""
        return {"min_cohort": self.min_cohort, "helpers": self.helpers, "roster": self.roster}


class OpeningError(MurmurflError):
    """A sum of masked releases cannot be opened. The checkpoint is as it was, and holds the set that was to be."""


class HelperUnavailableError(OpeningError):
    """A helper is out of reach, or gives no answer that counts, and the server's patience is at its end."""


class HelpersDisagreeError(OpeningError):
    """A helper refuses a set that another helper may have opened."""


class WrongSumError(OpeningError):
    """What is left after the masks is no sum of releases: a helper, or a machine, did not do what it says."""
