"""New keys of secure aggregation, and cards: small files with a key's public half, which operators send each other.

Cards make a roster (:class:`~murmurfl.privacy.sums.roster.Roster`). A card holds nothing secret, and nothing proves who
made it: operators compare the roster's digest, and each looks for its own key in it.
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
from ...privacy.machine.policy import MOST_MACHINES
from ...privacy.sums.roster import MOST_HELPERS, check_name

_FORMAT_KEY = "murmurfl-card"
_FORMAT = 1
_SHOWN_DIGITS, _GROUP = 16, 4


@dataclass(frozen=True)
class Card:
    """The public keys of a machine or a helper.

    A card proves nothing: only its owner, who misses the right key in the roster, notices that it was altered on its
    way.
    """

    name: str  # in the roster: public
    signing: bytes  # public Ed25519 key
    sealing: bytes = b""  # a helper's public X25519 key; empty for a machine

    @classmethod
    def of_machine(cls, name: str, key: MachineKey) -> Card:
        return cls(name, key.public)

    @classmethod
    def of_helper(cls, name: str, key: HelperKey) -> Card:
        entry = key.entry(name)
        return cls(name, entry.signing, entry.sealing)

    @property
    def kind(self) -> str:
        """``machine`` or ``helper``."""
        return "helper" if self.sealing else "machine"

    @property
    def document(self) -> dict[str, Any]:
        """The card as plain values, for JSON."""
        sealing = {"sealing": self.sealing.hex()} if self.sealing else {}
        return {_FORMAT_KEY: _FORMAT, self.kind: self.name, **sealing, "signing": self.signing.hex()}

    @property
    def fingerprint(self) -> str:
        """Sixteen digits by which people tell keys apart; what must be compared is the roster's digest."""
        digits = hashlib.sha256(self.sealing + self.signing).hexdigest()[:_SHOWN_DIGITS]
        return " ".join(digits[i : i + _GROUP] for i in range(0, _SHOWN_DIGITS, _GROUP))

    def write(self, path: Path) -> None:
        """Write the card to a new file.

        Raises
        ------
        ConfigurationError
            If the file exists, and it is left alone; or it cannot be written.
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
        """Read a card from a file.

        Raises
        ------
        ConfigurationError
            If the file cannot be read, or is no card.
        """
        try:
            document: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"Expected a card at {path}, got: {error.strerror}.") from error
        except ValueError:
            document = None
        return cls.from_document(document, f"at {path}")

    @classmethod
    def from_document(cls, document: Any, where: str) -> Card:
        """A card from what :attr:`document` gave; ``where`` it stood, for errors."""
        check_format(f"a card {where}", document, _FORMAT_KEY, _FORMAT)
        try:
            (kind,) = {"machine", "helper"} & document.keys()
            expected = {_FORMAT_KEY, kind, "signing"} | ({"sealing"} if kind == "helper" else set())
            if document.keys() != expected or document[_FORMAT_KEY] != _FORMAT:
                raise ValueError("other keys")
            keys = {name: bytes.fromhex(document[name]) for name in expected & {"signing", "sealing"}}
            return cls(document[kind], **keys)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"Expected a card of `murmurfl roster key` {where}, got something else: ask its operator for it."
            ) from error


def roster_of(cards: Iterable[Card]) -> Roster:
    """The roster of some cards, whatever their order.

    Raises
    ------
    ConfigurationError
        If a name or a key occurs twice, or there is no machine or no helper.
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
    """Cards of a roster: machines by name, then helpers in their order."""
    machines = [Card(name, roster.machines[name]) for name in sorted(roster.machines)]
    return [*machines, *(Card(helper.name, helper.signing, helper.sealing) for helper in roster.helpers)]


@dataclass(frozen=True)
class NewKey:
    """A card whose private key was just made."""

    card: Card
    path: Path  # of the card


def make_machine(path: Path, name: str) -> NewKey:
    """Make a machine's key at ``path``, with mode 600, and its card beside it.

    Raises
    ------
    ConfigurationError
        If a file is in the way; it is left alone.

    Notes
    -----
    The key comes from the operating system's randomness.
    """
    check_name(name)  # now, and not when somebody makes the roster
    key = MachineKey.generate()
    return _made(path, Card.of_machine(name, key), lambda: write_machine_key(path, key))


def make_helper(path: Path, name: str, record: Path, mark: Path | None = None) -> NewKey:
    """Make a helper's keys at ``path``, with mode 600, its card beside them, and its empty opening record.

    Raises
    ------
    ConfigurationError, MurmurflError
        If a file is in the way; it is left alone.

    Notes
    -----
    The keys come from the operating system's randomness. A record is made only with its keys, so keys that have opened
    something never have an empty record: a helper that forgot what it opened could be made to open a release a second
    time, or one that builds on nothing opened.
    """
    check_name(name)
    key = HelperKey.generate()

    def write() -> None:
        # The key last: a record without a key is useless, but a key without a record could be given another one.
        SQLiteOpeningRecord.create(record, helper=key.entry(name), mark=mark)
        write_helper_key(path, name, key)

    return _made(path, Card.of_helper(name, key), write)


def _made(path: Path, card: Card, write: Callable[[], None]) -> NewKey:
    if path.suffix == ".card":  # people send each other *.card
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
