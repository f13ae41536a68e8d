"""Masked releases made by hand, with any header, and every set that a helper must not open."""

import hashlib
import secrets
from dataclasses import dataclass, replace

import numpy as np
from murmurfl.privacy import ClientKey, Header, HelperKey, Opener, OpeningRefusedError, Roster, Sealed, add_mask
from murmurfl.privacy.sums.masking import _SUITE as SUITE
from murmurfl.privacy.sums.masking import NOTHING_OPENED, SEED_BYTES, opened_seal
from murmurfl.privacy.sums.masking import _seal_info as seal_info

SEED, D, SPACING, MIN_COHORT = 7, 40, 2.0**-20, 3
CLIENTS, HELPERS = tuple("abcdef"), ("left", "right")
ROSTER = Roster.simulated(SEED, CLIENTS, HELPERS)
OTHER_ROSTER = Roster.simulated(SEED, (*CLIENTS, "g"), HELPERS)
NOTHING = NOTHING_OPENED.hex()


def id_of(client, release):
    """The name of a client's release."""
    return hashlib.sha256(f"{client} {release}".encode()).hexdigest()[:32]


def header_of(client, release=1, ack=0, **changes):
    """The header of release k, built on release ``ack``; 0 for nothing."""
    values = {
        "session": "s",
        "client": client,
        "release_mode": "cumulative",
        "release": release,
        "release_id": id_of(client, release),
        "ack_id": id_of(client, ack) if ack else NOTHING,
        "size": D,
        "spacing": SPACING,
        "min_cohort": MIN_COHORT,
        "roster": ROSTER.digest,
        "helpers": ROSTER.helper_names,
        "terms": "5" * 64,
        **changes,
    }
    return Header(**values)


def key_of(client):
    """A client's key."""
    return ClientKey.simulated(SEED, client)


def sealed_by(header, key=None, roster=ROSTER):
    """A header with seals and signature, by the client it names unless another key is given."""
    content = header if isinstance(header, bytes) else header.to_bytes()
    seals = tuple(
        SUITE.encrypt(secrets.token_bytes(SEED_BYTES), HelperKey.simulated(SEED, name).sealing.public_key(),
                      info=seal_info(name, content))
        for name in roster.helper_names
    )  # fmt: skip
    return signed(Sealed(content, seals, b""), key or key_of(header.client))


def signed(sealed, key):
    """The same with that key's signature."""
    return replace(sealed, signature=key.sign(sealed.signed))


def release_of(client, release=1, ack=0, **changes):
    """What a helper is shown of a release."""
    return sealed_by(header_of(client, release, ack, **changes))


def round_of(clients=CLIENTS, release=1, ack=0, **changes):
    """One release of each of some clients."""
    return [release_of(client, release, ack, **changes) for client in clients]


def mask_of(sealed, helper):
    """The keystream that a helper has for a release: what no helper ever gives away."""
    total = np.zeros(D, np.uint64)
    add_mask(total, opened_seal(sealed, Header.from_bytes(sealed.header), helper, HelperKey.simulated(SEED, helper)))
    return total


def opener_of(record, helper="left"):
    """A helper with that record."""
    return Opener(helper, HelperKey.simulated(SEED, helper), ROSTER, record)


@dataclass(frozen=True)
class Attack:
    """A set that must be refused, and what was opened before; each set is (name, releases)."""

    before: list
    opening: str
    releases: list
    session: str = "s"


def _edited(sealed, **changes):
    """A header changed by somebody who has no key; seals and signature are the client's."""
    return replace(sealed, header=replace(Header.from_bytes(sealed.header), **changes).to_bytes())


def _resealed(sealed, seals):
    """The same header with other seals, rightly signed by its client."""
    return signed(replace(sealed, seals=tuple(seals)), key_of(Header.from_bytes(sealed.header).client))


def attacks():
    """Every attack by its name; all are on the helper ``left``."""
    first, second = round_of(), round_of(release=2, ack=1)
    unknown_node = ClientKey.simulated(99, "stranger")
    opened = [("1", first)]
    return {
        "one client": Attack([], "1", first[:1]),
        "nobody": Attack([], "1", []),
        "too few": Attack([], "1", first[: MIN_COHORT - 1]),
        "too few for one of them": Attack([], "1", [*first[:4], release_of("e", min_cohort=6)]),
        "too few, by an edited header": Attack([], "1", [_edited(one, min_cohort=1) for one in first[:2]]),
        "one many times": Attack([], "1", [first[0]] * 4),
        "one twice among others": Attack([], "1", [*first, release_of("a", 2)]),
        "header edited": Attack([], "1", [*first[:5], _edited(first[5], release=7)]),
        "ack edited": Attack(opened, "2", [*second[:5], _edited(release_of("f", 2, 0), ack_id=id_of("f", 1))]),
        "a stranger": Attack([], "1", [*first, sealed_by(header_of("z"), unknown_node)]),
        "a stranger under a known name": Attack([], "1", [*first[:5], sealed_by(header_of("f"), unknown_node)]),
        "a client under another's name": Attack([], "1", [*first[:5], sealed_by(header_of("f"), key_of("e"))]),
        "another session's": Attack([], "1", first, session="t"),
        "one of another session": Attack([], "1", [*first[:5], release_of("f", session="t")]),
        "a subset under the same name": Attack(opened, "1", first[:5]),
        "a subset under the next name": Attack(opened, "2", first[:5]),
        "a subset of new releases among old ones": Attack(opened, "2", [*first[:4], *second[4:]]),
        "more under the same name": Attack([("1", first[:5])], "1", first),
        "another order under the same name": Attack(opened, "1", first[::-1]),
        "the same set under another name": Attack(opened, "2", first),
        "the same releases sealed again": Attack(opened, "1", round_of()),
        "P_2 - P_0 after P_1": Attack(opened, "2", [*second[:5], release_of("f", 2, 0)]),
        "P_2 - P_0 of everybody after P_1": Attack(opened, "2", round_of(release=2, ack=0)),
        "P_3 - P_1 after P_2": Attack([*opened, ("2", second)], "3", round_of(release=3, ack=1)),
        "the original after its carry-over": Attack([("1", round_of(release=2, ack=0))], "2", first),
        "built on what was never opened": Attack(opened, "2", round_of(release=3, ack=2)),
        "built on something though nothing was opened": Attack([], "1", second),
        "k again, by another release": Attack(opened, "2", round_of(ack_id=id_of("x", 1), release_id=id_of("x", 2))),
        "two sizes": Attack([], "1", [*first[:5], release_of("f", size=D + 1)]),
        "two spacings": Attack([], "1", [*first[:5], release_of("f", spacing=2 * SPACING)]),
        "two terms": Attack([], "1", [*first[:5], release_of("f", terms="6" * 64)]),
        "one stands alone": Attack([], "1", [*first[:5], release_of("f", release_mode="independent")]),
        "another size in a later round": Attack(opened, "2", round_of(release=2, ack=1, size=D + 1)),
        "another spacing in a later round": Attack(opened, "2", round_of(release=2, ack=1, spacing=2 * SPACING)),
        "other terms in a later round": Attack(opened, "2", round_of(release=2, ack=1, terms="6" * 64)),
        "standing alone in a later round": Attack(opened, "2", round_of(release=2, release_mode="independent")),
        "another roster": Attack([], "1", round_of(roster=OTHER_ROSTER.digest)),
        "another helper": Attack([], "1", round_of(helpers=("left", "center"))),
        "one helper": Attack([], "1", [_resealed(one, one.seals[:1]) for one in first]),
        "stolen seals": Attack([], "1", [*first[:5], _resealed(first[5], first[0].seals)]),
        "swapped seals": Attack([], "1", [*first[:5], _resealed(first[5], first[5].seals[::-1])]),
        "a seal that does not open": Attack([], "1", [*first[:5], _resealed(first[5], [bytes(80), first[5].seals[1]])]),
        "no signature": Attack([], "1", [*first[:5], replace(first[5], signature=b"")]),
        "no name": Attack([], "", first),
        "a name that is too long": Attack([], "1" * 65, first),
        "a name of other letters": Attack([], "1/2", first),
        "no session": Attack([], "1", round_of(session=""), session=""),
        "a session of other letters": Attack([], "1", round_of(session="a b"), session="a b"),
    }


ATTACKS = attacks()
"""Made once: seals take time."""


def allowed(opener, attack):
    """Whether a helper opens what it must not, after everything else was opened rightly."""
    for opening, releases in attack.before:
        opener.open("s", opening, releases)
    try:
        opener.open(attack.session, attack.opening, attack.releases)
    except OpeningRefusedError:
        return False
    return True
