"""``murmurfl roster check``: whether an operator's file and a roster agree, and what follows if they do not."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...clients import UpdateNode
from ...clients.nodes.operators_file import operators_values
from ...clients.nodes.roster_files import pinned_digest, read_machine_key, read_roster
from ...privacy import MurmurflError, Roster
from ..settings.trust_settings import SECURE
from .cards import Card, cards_of
from .helper_config import HelperConfig
from .own_app import read_node

_NO_START = "so the node does not start"
_NO_HELP = "so the helper does not start, and no sum is opened"


@dataclass(frozen=True)
class Finding:
    """The outcome of one look."""

    right: bool
    text: str  # what was found and, if it is wrong, its effect and what to do


def check_operators_file(path: Path) -> Iterator[Finding]:
    """Check everything that the file of a machine or a helper states of a roster.

    Raises
    ------
    ConfigurationError
        If ``path`` is no operator's file.

    Notes
    -----
    Changes nothing. A file in order shows that *this* operator's key is in the pinned roster. Once every operator has
    seen that for the same digest, each key belongs to the operator with its name: nobody has put a key in somebody
    else's place.
    """
    if "helper" in operators_values(path.expanduser()):
        yield from _helper_findings(HelperConfig.read(path, runs_kept=True))
        return
    node = read_node(path, runs_kept=True)
    decided = node.updates if isinstance(node, UpdateNode) else node
    if decided.trust != SECURE:
        yield Finding(
            False,
            f"trust is {decided.trust or 'not set'!r}, so machine {node.machine!r} sends single releases and needs no "
            f"roster: set trust = {SECURE!r} to take part in sums only.",
        )
        return
    roster, found = _pinned(node.roster, node.roster_digest, _NO_START)
    yield found
    if roster is None:
        return
    try:
        yield _own_card(Card.of_machine(node.machine, read_machine_key(Path(node.signing_key))), roster, _NO_START)
    except MurmurflError as error:
        yield Finding(False, _because(error, _NO_START))
    yield _cohort(decided.min_cohort, decided.min_honest, len(roster.machines))
    names = ", ".join(repr(name) for name in roster.helper_names)
    if len(roster.helper_names) == 1:
        yield Finding(True, f"one helper, {names}: that it does not work with the server rests on it alone")
    else:
        text = f"{len(roster.helper_names)} helpers, {names}: one of them must not work with the server"
        yield Finding(True, text)


def _helper_findings(config: HelperConfig) -> Iterator[Finding]:
    roster, found = _pinned(config.roster, config.roster_digest, _NO_HELP)
    yield found
    if roster is None:
        return
    try:
        yield _own_card(Card.of_helper(config.helper, config.keys()), roster, _NO_HELP)
        config.opener()
        yield Finding(True, f"the record at {config.record} is this key's and can be written")
    except MurmurflError as error:
        yield Finding(False, _because(error, _NO_HELP))


def _pinned(path: str, digest: str, consequence: str) -> tuple[Roster | None, Finding]:
    """The roster, if it can be read and has the pinned digest."""
    try:
        roster, pinned = read_roster(Path(path), None), pinned_digest(digest)
    except MurmurflError as error:
        return None, Finding(False, _because(error, consequence))
    if hmac.compare_digest(roster.digest.encode(), pinned.encode()):
        return roster, Finding(True, f"roster-digest is that of {path}")
    return None, Finding(
        False,
        f"the roster at {path} has the digest {roster.digest}, and roster-digest pins {digest}, {consequence}. One of "
        "them is old, or somebody changed the roster: ask the other operators what theirs is, by your own means, and "
        "pin that one.",
    )


def _because(error: MurmurflError, consequence: str) -> str:
    return f"{error} {consequence[0].upper()}{consequence[1:]}."


def _own_card(own: Card, roster: Roster, consequence: str) -> Finding:
    """Whether the roster has this operator's key under this operator's name."""
    known = next((card for card in cards_of(roster) if card.name == own.name), None)
    if known == own:
        return Finding(True, f"{own.kind} {own.name!r} stands in the roster with its own key, {own.fingerprint}")
    if known is None:
        return Finding(
            False,
            f"the roster has no {own.kind} {own.name!r}, {consequence}: send its card to whoever makes the roster. All "
            "operators then pin the new digest.",
        )
    if known.kind != own.kind:
        return Finding(False, f"the roster has a {known.kind} of the name {own.name!r}, no {own.kind}, {consequence}.")
    return Finding(
        False,
        f"the roster has {own.kind} {own.name!r} with the key {known.fingerprint}, and this key is {own.fingerprint}, "
        f"{consequence}. Either this is an old or another key file, or somebody exchanged your card: with a key of "
        "theirs in your place, they would count as you. Tell the other operators before anybody trains.",
    )


def _cohort(least: int, honest: int, machines: int) -> Finding:
    if least > machines:
        return Finding(
            False,
            f"min-cohort = {least}, and the roster has {machines} machines, {_NO_START}: no sum could ever be opened.",
        )
    colluders = least - honest
    return Finding(
        True,
        f"min-cohort = {least} of the roster's {machines} machines: {colluders} of a sum may work with the server, "
        f"{honest} must not; {machines - least} may be missing from a round",
    )
