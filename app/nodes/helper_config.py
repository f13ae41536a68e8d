"""A helper's configuration: one TOML file of its operator, read where the helper runs and nowhere else.

Who may be opened together is decided by the roster whose digest stands here, and by the record of everything opened so
far; no message can change either. Unknown keys, missing ones and impossible values are refused with one line.
"""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import ClassVar

from ...clients.nodes.machine_file import Pinned
from ...clients.nodes.roster_files import read_helper_key, read_roster
from ...privacy import ConfigurationError, HelperKey, Opener, SQLiteOpeningRecord
from ...privacy.setting import setting, table


@table()
class HelperConfig(Pinned):
    """Everything a helper decides for itself.

    Notes
    -----
    **Formal guarantees.** A release is opened at most once, in a sum of at least as many as the most careful of its
    machines asks for, as long as keys and record are the operator's alone. No value here comes from a server.
    """

    required: ClassVar[frozenset[str]] = frozenset({"roster", "roster-digest"})
    helper: str = setting(MISSING, "Its name in the roster: public.")
    record: str = setting(
        MISSING,
        "Path of its opening record, made once, together with its key, by `murmurfl roster key --helper`.",
        file=True,
    )
    key: str = setting(MISSING, "Path of its private keys.", file=True)
    largest_model: int = setting(
        2**20,
        "The most values of a release that it takes memory for, some 30 bytes each, whatever a header says.",
        at_least=1,
    )
    min_cohort: int = setting(
        2, "The fewest releases of a sum that it opens; machines have such a number too.", at_least=1
    )
    sessions_a_day: int = setting(
        100, "The most sessions that it begins in 24 hours of its clock; a run takes one to three.", at_least=1
    )
    sets_a_day: int = setting(
        10_000, "The most sums that it opens in 24 hours of its clock; a round takes one.", at_least=1
    )

    def keys(self) -> HelperKey:
        """The helper's private keys.

        Raises
        ------
        ConfigurationError
            If they are not there, others could read them, or they are another helper's.
        """
        name, key = read_helper_key(Path(self.key))
        if name != self.helper:
            raise ConfigurationError(
                f"Expected the keys of helper {self.helper!r} at {self.key}, got those of {name!r}: the configuration "
                "names another helper or another file."
            )
        return key

    def opener(self) -> Opener:
        """What opens sums: the pinned roster, the helper's keys and its record.

        Raises
        ------
        ConfigurationError, MurmurflError
            If one of them is not there, is not what was pinned, or does not fit the others; nothing was opened.

        Notes
        -----
        The record outlives the process and is never made here: a fresh one would have forgotten what was opened.
        """
        roster = read_roster(Path(self.roster), self.roster_digest)
        return Opener(
            self.helper,
            self.keys(),
            roster,
            SQLiteOpeningRecord(Path(self.record)),
            largest_model=self.largest_model,
            min_cohort=self.min_cohort,
            sessions_a_day=self.sessions_a_day,
            sets_a_day=self.sets_a_day,
        )
