"""Keys of secure aggregation, made once, and cards: a key's public half, a small file that operators send each other.

A roster (:class:`~murmurfl.privacy.sums.roster.Roster`) is made from cards. There is nothing secret in one, and nothing
that says who made it: operators compare the roster's digest, and each looks for its own key in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...clients.nodes.roster_files import write_helper_key, write_machine_key
from ...privacy import ConfigurationError, HelperEntry, HelperKey, MachineKey, Roster, SQLiteOpeningRecord
from ...privacy.errors import check_format
from ...privacy.sums.roster import MOST_HELPERS, MOST_MACHINES, check_name

_FORMAT_KEY = "murmurfl-card"
_FORMAT = 1
_SHOWN_DIGITS, _GROUP = 16, 4


@dataclass(frozen=True)
class Card:
    """What a machine or a helper shows of its keys.

    Parameters
    ----------
    name : str
        Its name in the roster: public.
    signing : bytes
        Its public Ed25519 key.
    sealing : bytes
        A helper's public X25519 key; empty for a machine.

    Notes
    -----
    Nothing secret is in it. It proves nothing either: that a card was altered on its way shows only to its owner, who
    does not find the right key in the roster.
    """

    name: str
    signing: bytes
    sealing: bytes = b""

    @classmethod
    def of_machine(cls, name: str, key: MachineKey) -> Card:
        """A machine's card."""
        return cls(name, key.public)

    @classmethod
    def of_helper(cls, name: str, key: HelperKey) -> Card:
        """A helper's card."""
        entry = key.entry(name)
        return cls(name, entry.signing, entry.sealing)

    @property
    def kind(self) -> str:
        """``machine`` or ``helper``."""
        return "helper" if self.sealing else "machine"

    @property
    def document(self) -> dict[str, Any]:
        """The card as plain values, for a JSON file."""
        sealing = {"sealing": self.sealing.hex()} if self.sealing else {}
        return {_FORMAT_KEY: _FORMAT, self.kind: self.name, **sealing, "signing": self.signing.hex()}

    @property
    def fingerprint(self) -> str:
        """Sixteen digits for people to tell keys apart by; what must be compared is the roster's digest."""
        digits = hashlib.sha256(self.sealing + self.signing).hexdigest()[:_SHOWN_DIGITS]
        return " ".join(digits[i : i + _GROUP] for i in range(0, _SHOWN_DIGITS, _GROUP))

    def write(self, path: Path) -> None:
        """Write the card to a new file.

        Raises
        ------
        ConfigurationError
            If there is a file already; it is left alone.
        """
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.document, indent=1) + "\n")
        except FileExistsError as error:
            raise ConfigurationError(
                f"Expected nothing at {path}, where a card is to be written, got a file; it was left alone."
            ) from error
        except OSError as error:
            raise ConfigurationError(f"Expected to write a card to {path}, got {error.strerror}.") from error

    @classmethod
    def read(cls, path: Path) -> Card:
        """The card in a file.

        Raises
        ------
        ConfigurationError
            If it cannot be read, or is none.
        """
        try:
            document: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"Expected a card at {path}, got: {error.strerror}.") from error
        except ValueError:
            document = None
        check_format(f"a card at {path}", document, _FORMAT_KEY, _FORMAT)
        try:
            (kind,) = {"machine", "helper"} & document.keys()
            expected = {_FORMAT_KEY, kind, "signing"} | ({"sealing"} if kind == "helper" else set())
            if document.keys() != expected or document[_FORMAT_KEY] != _FORMAT:
                raise ValueError("other keys")
            keys = {name: bytes.fromhex(document[name]) for name in expected & {"signing", "sealing"}}
            return cls(document[kind], **keys)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"Expected a card of `murmurfl roster key` at {path}, got something else: ask its operator for it."
            ) from error


def roster_of(cards: Iterable[Card]) -> Roster:
    """The roster of some cards, the same in whatever order they come.

    Raises
    ------
    ConfigurationError
        If a name or a key stands twice, or there is no machine or no helper.
    """
    machines: dict[str, bytes] = {}
    helpers: dict[str, HelperEntry] = {}
    for card in cards:
        if card.name in machines or card.name in helpers:
            raise ConfigurationError(
                f"Expected one card for each name, got two for {card.name!r}: leave one out, or have one of the two "
                "made again under a name of its own."
            )
        if card.sealing:
            helpers[card.name] = HelperEntry(card.name, card.sealing, card.signing)
        else:
            machines[card.name] = card.signing
    for kind, found in (("machine", machines), ("helper", helpers)):
        if not found:
            raise ConfigurationError(
                f"Expected a roster of 1 to {MOST_MACHINES if kind == 'machine' else MOST_HELPERS} {kind}s, got no "
                f"{kind}'s card: its operator makes one with `murmurfl roster key PATH --{kind} NAME`."
            )
    return Roster(machines, tuple(helpers[name] for name in sorted(helpers)))


def cards_of(roster: Roster) -> list[Card]:
    """Everybody in a roster: machines by their names, then helpers in their order."""
    machines = [Card(name, roster.machines[name]) for name in sorted(roster.machines)]
    return [*machines, *(Card(helper.name, helper.signing, helper.sealing) for helper in roster.helpers)]


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
