"""Keys for secure aggregation, made once: a machine's, and a helper's together with its opening record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...clients.nodes.roster_files import write_helper_key, write_machine_key
from ...privacy import ConfigurationError, HelperKey, MachineKey, SQLiteOpeningRecord
from ...privacy.sums.roster import check_name
from .cards import Card


@dataclass(frozen=True)
class NewKey:
    """What was made.

    Parameters
    ----------
    card : Card
    path : Path
        Where the card is.
    """

    card: Card
    path: Path


def make_machine(path: Path, name: str) -> NewKey:
    """A machine's key at ``path``, of mode 600, and its card beside it.

    Raises
    ------
    ConfigurationError
        If something is in the way; it is left alone.

    Notes
    -----
    The key is the operating system's, and new; nothing that exists is overwritten.
    """
    check_name(name)  # before anything is made: else whoever makes the roster would be the one to find out
    key = MachineKey.generate()
    card = Card.of_machine(name, key)
    return _made(path, card, lambda: write_machine_key(path, key))


def make_helper(path: Path, name: str, record: Path, mark: Path | None = None) -> NewKey:
    """A helper's keys at ``path``, of mode 600, its card beside them, and its empty opening record.

    Raises
    ------
    ConfigurationError, MurmurflError
        If something is in the way; it is left alone.

    Notes
    -----
    The keys are the operating system's, and new. A record is made with its keys and in no other way, so that there is
    never an empty record for keys that have opened something: a helper that forgot what it opened could be made to open
    a release a second time, or one that builds on nothing that was opened.
    """
    check_name(name)
    key = HelperKey.generate()
    card = Card.of_helper(name, key)

    def write() -> None:
        # Last the key: a record without one is of no use to anybody, and the other way round it could be given another.
        SQLiteOpeningRecord.create(record, helper=key.entry(name), mark=mark)
        write_helper_key(path, name, key)

    return _made(path, card, write)


def _made(path: Path, card: Card, write: Callable[[], None]) -> NewKey:
    if path.suffix == ".card":  # what people send each other is *.card
        raise ConfigurationError(
            f"Expected a private key's file not to end in .card, got {path}: cards are sent around. Call it "
            f"{path.with_suffix('.key').name}; its card then goes to {path.name}."
        )
    shown = path.with_name(path.name.removesuffix(".key") + ".card")
    for one in (path, shown):
        if one.exists():
            raise ConfigurationError(
                f"Expected nothing at {one}, where a new key is to be made, got a file; it was left alone. Keep it if "
                "it is in a roster already, else give the new key another name."
            )
    write()
    card.write(shown)
    return NewKey(card, shown)
