"""A helper's configuration: one TOML file of its operator, read where the helper runs and nowhere else.

Who may be opened together is decided by the roster whose digest stands here, and by the record of everything opened so
far; no message can change either. Unknown keys, missing ones and impossible values are refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...clients.nodes.operators_file import named_values, read_operators_file
from ...clients.nodes.roster_files import read_helper_key, read_roster
from ...privacy import ConfigurationError, HelperKey, Opener, SQLiteOpeningRecord
from ..settings.run_key import typed_value


@dataclass(frozen=True)
class HelperConfig:
    """Everything a helper decides for itself.

    Parameters
    ----------
    helper : str
        Its name in the roster: public.
    record : str
        Path of its opening record, made once, together with its key, by ``murmurfl roster key --helper``.
    roster : str
        Path of the roster.
    roster_digest : str
        The roster's digest, which its operator has compared with the other operators'.
    key : str
        Path of its private keys.

    Notes
    -----
    **Formal guarantees.** A release is opened at most once, in a sum of at least as many as the most careful of its
    machines asks for, as long as keys and record are the operator's alone. No value here comes from a server.
    """

    helper: str
    record: str
    roster: str
    roster_digest: str
    key: str

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name):
                key = field.name.replace("_", "-")
                raise ConfigurationError(f"Expected {key} to be set, got an empty text.")

    @classmethod
    def read(cls, path: Path, *, runs_kept: bool = False) -> HelperConfig:
        """The operator's file; relative paths in it are taken from its folder.

        Parameters
        ----------
        path : Path
        runs_kept : bool
            As for :func:`~murmurfl.clients.nodes.operators_file.read_operators_file`.

        Raises
        ------
        ConfigurationError
            If it cannot be read, others may write to it, or a key is unknown or missing.
        """
        return read_operators_file(path, cls.from_mapping, ["record", "roster", "key"], runs_kept=runs_kept)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HelperConfig:
        """A configuration from hyphenated keys.

        Raises
        ------
        ConfigurationError
            One line that names the key, what was expected and what came.
        """
        named, types = named_values(cls, values), {f.name: str(f.type) for f in fields(cls)}
        return cls(**{name: typed_value(name.replace("_", "-"), value, types[name]) for name, value in named.items()})

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
        return Opener(self.helper, self.keys(), roster, SQLiteOpeningRecord(Path(self.record)))
