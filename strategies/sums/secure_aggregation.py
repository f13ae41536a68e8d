"""What a strategy is told of secure aggregation, and how a run ends that cannot go on with it.

Machines hide their releases under masks, and helpers hand over what the masks of a whole cohort add up to
(docs/secure-aggregation.md). The update rules do not change: they are given the sum of a round's releases, as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...privacy import ConfigurationError, MurmurflError
from ...privacy.sums.roster import MOST_HELPERS, MOST_MACHINES, Roster

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


def read_roster(text: str) -> Roster | None:
    """The roster in a JSON text, or None if there is none."""
    try:
        return Roster.from_document(json.loads(text))
    except (ConfigurationError, ValueError, RecursionError):
        return None


def same_roster(text: str, roster: Roster) -> bool:
    """Whether a JSON text has that roster."""
    found = read_roster(text)
    return found is not None and found.digest == roster.digest


def common_roster(said: Mapping[str, str], option: SecureAggregation) -> Roster:
    """The one roster that all helpers have.

    Parameters
    ----------
    said : mapping of str to str
        What each connected helper says it works with, JSON text by its name.
    option : SecureAggregation

    Raises
    ------
    ConfigurationError
        If there is not one, or it has other helpers, or is not the one to insist on.
    """
    rosters = {name: read_roster(text) for name, text in said.items()}
    wanted = {name: one for name, one in rosters.items() if one is not None and option.roster in ("", one.digest)}
    if option.roster:
        for name, one in rosters.items():
            if name not in wanted:
                raise ConfigurationError(
                    f"Expected helpers with the roster {option.roster}, got helper {name!r} with "
                    f"{'none' if one is None else one.digest}: give it the same roster file, or take its digest out."
                )
    digests = {name: "none" if one is None else one.digest for name, one in rosters.items()}
    first = next(iter(wanted.values()), None)
    if first is None or len(set(digests.values())) > 1:
        shown = ", ".join(f"{name!r} has {digest}" for name, digest in sorted(digests.items()))
        raise ConfigurationError(
            f"Expected one roster at all helpers, got several: {shown}. Give all of them the same roster file; with "
            "SecureAggregation(roster=...) the server insists on the right one."
        )
    if len(first.helpers) != option.helpers or set(first.helper_names) != set(said):
        raise ConfigurationError(
            f"Expected {option.helpers} helpers, those of their roster ({', '.join(map(repr, first.helper_names))}), "
            f"got {', '.join(map(repr, sorted(said)))}: set helpers to as many as the roster has, and start each once."
        )
    return first
