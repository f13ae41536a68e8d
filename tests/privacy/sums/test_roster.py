"""Rosters: what operators pin has one digest, and nothing in it that somebody else could use or be mistaken for."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from murmurfl.privacy import ClientKey, ConfigurationError, HelperEntry, HelperKey, Roster
from murmurfl.privacy.release.policy import MOST_SUMMED
from murmurfl.privacy.sums.roster import (
    KEY_BYTES,
    MOST_CLIENTS,
    MOST_HELPERS,
    is_sealing_point,
    is_signed,
    is_signing_point,
)

from tests.harness.errors import raises

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
SMALL_ORDER_8 = int.from_bytes(
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
)
"""y of two of the points of order 8; the others' is PRIME minus it (RFC 8032's curve, any table of it)."""
LOW_ORDER_U = (
    0,
    1,
    PRIME - 1,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
)
"""u of the points of X25519 whose shared secret is zero with everybody."""

CLIENTS, HELPERS = ("north", "south", "Zürich"), ("auditor", "board")
ROSTER = Roster.simulated(3, CLIENTS, HELPERS)


def little(number, sign=0):
    return (number | sign << 255).to_bytes(KEY_BYTES, "little")


def with_key(key, name="north"):
    return Roster({**ROSTER.clients, name: key}, ROSTER.helpers)


def with_helper(**changes):
    one = ROSTER.helpers[0]
    entry = HelperEntry(**{"name": one.name, "sealing": one.sealing, "signing": one.signing, **changes})
    return Roster(ROSTER.clients, (entry, ROSTER.helpers[1]))


def test_a_roster_comes_back_from_its_document():
    text = json.dumps(ROSTER.document)
    assert Roster.from_json(text) == Roster.from_document(json.loads(text)) == ROSTER
    assert Roster.from_json(text).digest == ROSTER.digest
    assert ROSTER.helper_names == HELPERS


def test_the_digest_is_that_of_every_name_key_and_order_of_helpers():
    others = [
        with_key(ClientKey.simulated(4, "x").public),
        with_key(ClientKey.simulated(4, "x").public, "new"),
        Roster({name: ROSTER.clients[name] for name in CLIENTS[:2]}, ROSTER.helpers),
        Roster(
            dict(zip(CLIENTS, [ROSTER.clients[name] for name in ("south", "north", "Zürich")], strict=True)),
            ROSTER.helpers,
        ),
        Roster(ROSTER.clients, ROSTER.helpers[::-1]),
        Roster(ROSTER.clients, ROSTER.helpers[:1]),
        with_helper(name="another"),
        with_helper(sealing=HelperKey.simulated(4, "x").entry("x").sealing),
        with_helper(signing=HelperKey.simulated(4, "x").entry("x").signing),
    ]
    assert len({ROSTER.digest, *(other.digest for other in others)}) == 1 + len(others)
    shuffled = Roster({name: ROSTER.clients[name] for name in reversed(CLIENTS)}, ROSTER.helpers)
    assert shuffled.digest == ROSTER.digest, "clients have no order"


def test_the_digest_stays_that_of_what_is_inside():
    clients = dict(ROSTER.clients)
    roster = Roster(clients, list(ROSTER.helpers))
    before = roster.digest
    clients["stranger"] = ClientKey.simulated(4, "stranger").public
    assert "stranger" not in roster.clients
    assert roster.digest == before == Roster(roster.clients, roster.helpers).digest


@pytest.mark.parametrize(
    "name",
    ["", "x" * 65, "a\nb", "a\x00", "\ud800", "\u202eabc", "\u200b", "Zu\u0308rich", " north", "north ", 7, None],
    ids=ascii,
)
def test_names_that_do_not_show_or_show_as_another_are_refused(name):
    with raises(ConfigurationError, "malformed", "name"):
        with_key(ClientKey.simulated(4, "x").public, name)
    with raises(ConfigurationError, "malformed", "name"):
        with_helper(name=name)


def test_nobody_stands_in_it_twice():
    with raises(ConfigurationError, "duplicate", match="every key once"):
        with_key(ROSTER.clients["south"])
    with raises(ConfigurationError, "duplicate", match="every key once"):
        with_key(ROSTER.helpers[0].signing)
    with raises(ConfigurationError, "duplicate", match="every key once"):
        with_helper(sealing=ROSTER.helpers[1].sealing)
    with raises(ConfigurationError, "duplicate", match="every name once"):
        with_helper(name="board")
    with raises(ConfigurationError, "duplicate", match="every name once"):
        with_helper(name="north")


@pytest.mark.parametrize(
    "key",
    [
        *(little(y, sign) for y in (0, 1, PRIME - 1, SMALL_ORDER_8, PRIME - SMALL_ORDER_8) for sign in (0, 1)),
        *(little(y + PRIME, sign) for y in range(19) for sign in (0, 1)),
        little(2),  # not on the curve
    ],
    ids=bytes.hex,
)
def test_a_key_that_anybody_can_sign_for_or_a_second_encoding_is_refused(key):
    assert not is_signing_point(key)
    with raises(ConfigurationError, "malformed", match=r"client 'north'.*make another card"):
        with_key(key)
    with raises(ConfigurationError, "malformed", match="helper 'auditor' to sign with"):
        with_helper(signing=key)


def test_such_a_key_would_let_anybody_sign():
    """The attack, without a secret: R = the identity, S = 0 is a signature of a point of order 1."""
    identity = little(1)
    Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), b"anything")
    assert is_signed(identity, identity + bytes(32), b"anything else")


@pytest.mark.parametrize(
    "key",
    [
        *(little(u) for u in LOW_ORDER_U),
        *(little(u, 1) for u in LOW_ORDER_U),
        *(little(u + PRIME) for u in range(19)),
        bytes([*ROSTER.helpers[0].sealing[:31], ROSTER.helpers[0].sealing[31] | 128]),
    ],
    ids=bytes.hex,
)
def test_a_key_whose_seals_everybody_opens_or_a_second_encoding_is_refused(key):
    assert not is_sealing_point(key)
    with raises(ConfigurationError, "malformed", match=r"helper 'auditor' to seal for.*make another card"):
        with_helper(sealing=key)


def test_keys_that_are_made_are_never_refused():
    for number in range(200):
        assert is_signing_point(ClientKey.simulated(number, "m").public)
        entry = HelperKey.simulated(number, "h").entry("h")
        assert is_signing_point(entry.signing)
        assert is_sealing_point(entry.sealing)
    assert Roster({"m": ClientKey.generate().public}, (HelperKey.generate().entry("h"),)).digest


def test_generated_keys_are_the_systems_and_simulated_ones_the_seeds():
    assert ClientKey.generate() != ClientKey.generate()
    assert HelperKey.generate() != HelperKey.generate()
    assert ClientKey.simulated(3, "a") == ClientKey.simulated(3, "a") != ClientKey.simulated(3, "b")
    assert HelperKey.simulated(3, "a") == HelperKey.simulated(3, "a") != HelperKey.simulated(4, "a")
    secrets = {HelperKey.simulated(3, "a").sealing_secret, HelperKey.simulated(3, "a").signing_secret}
    assert len(secrets | {ClientKey.simulated(3, "a").secret}) == 3


def test_no_secret_is_shown():
    for key in (ClientKey.simulated(3, "a"), HelperKey.simulated(3, "a")):
        assert "secret" not in repr(key)
        assert "x" not in repr(key)


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "x" * 32, None])
def test_keys_of_other_lengths_are_refused(secret):
    with raises(ConfigurationError, "wrong-shape", match="of 32 bytes"):
        ClientKey(secret)
    with raises(ConfigurationError, "wrong-shape", match="of 32 bytes"):
        HelperKey(bytes(32), secret)
    with raises(ConfigurationError, "wrong-shape", match="of 32 bytes"):
        with_key(secret)
    with raises(ConfigurationError, "wrong-shape", match="of 32 bytes"):
        with_helper(sealing=secret)


def test_sizes_that_cannot_be_are_refused():
    with raises(ConfigurationError, "out-of-range", "clients", match=f"1 to {MOST_CLIENTS} clients, got 0"):
        Roster({}, ROSTER.helpers)
    with raises(ConfigurationError, "out-of-range", "helpers", match=f"1 to {MOST_HELPERS} helpers, got 0"):
        Roster(ROSTER.clients, ())
    with raises(
        ConfigurationError, "out-of-range", "clients", match=f"1 to {MOST_CLIENTS} clients, got {MOST_CLIENTS + 1}"
    ):
        Roster(dict.fromkeys(map(str, range(MOST_CLIENTS + 1)), bytes(32)), ROSTER.helpers)
    with raises(ConfigurationError, "malformed", match="to be one that only its owner can use"):  # not for their number
        Roster(dict.fromkeys(map(str, range(MOST_SUMMED + 1)), bytes(32)), ROSTER.helpers)
    with raises(ConfigurationError, "out-of-range", "helpers", match=f"1 to {MOST_HELPERS} helpers, got 18"):
        Roster(ROSTER.clients, ROSTER.helpers * 9)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("machines"),
        lambda d: d.update({"murmurfl-roster": 2}),
        lambda d: d.update({"extra": 1}),
        lambda d: d.update({"machines": ["north"]}),
        lambda d: d["machines"].update({"north": "zz"}),
        lambda d: d["machines"].update({"north": None}),
        lambda d: d.update({"helpers": {}}),
        lambda d: d.update({"helpers": None}),
        lambda d: d["helpers"][0].pop("signing"),
        lambda d: d["helpers"][0].update({"trusted": True}),
        lambda d: d["helpers"][0].update({"name": ["auditor"]}),
    ],
)
def test_documents_that_are_no_roster_are_refused(change):
    document = json.loads(json.dumps(ROSTER.document))
    change(document)
    with pytest.raises(ConfigurationError):
        Roster.from_document(document)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", '"x"', "{", "[" * 100_000, "\ufeff{}"])
def test_texts_that_are_no_roster_are_refused(text):
    with raises(ConfigurationError, "other-format", match="Expected a roster of format 1"):
        Roster.from_json(text)


def test_a_text_that_names_anything_twice_is_refused():
    """Of two keys under one name other readers, and people, would see the other one."""
    text = json.dumps(ROSTER.document)
    key = ClientKey.simulated(4, "x").public.hex()
    twice = text.replace('"machines": {', f'"machines": {{"north": "{key}", ')
    assert Roster.from_document(json.loads(twice)) == ROSTER, "a reader that does not look sees nothing"
    with raises(ConfigurationError, "other-format", match="'north' stands twice"):
        Roster.from_json(twice)


def test_a_signature_fits_one_key_message_and_form():
    key = ClientKey.simulated(3, "north")
    signature = key.sign(b"message")
    assert is_signed(key.public, signature, b"message")
    point, scalar = signature[:32], int.from_bytes(signature[32:], "little")
    others = [
        point + (scalar + ORDER).to_bytes(32, "little"),
        b"",
        signature[:63],
        signature + b"\x00",
        bytes(64),
        None,
        "x" * 64,
    ]
    assert not any(is_signed(key.public, other, b"message") for other in others)
    assert not is_signed(key.public, signature, b"another")
    assert not is_signed(ROSTER.clients["south"], signature, b"message")
    assert not is_signed(b"short", signature, b"message")


def test_a_key_signs_as_rfc_8032_says():
    """Test vector 2 of its section 7.1: that our keys are Ed25519's."""
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    key = ClientKey(secret)
    assert key.public.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex().startswith("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da")
    assert key.sign(b"\x72") == Ed25519PrivateKey.from_private_bytes(secret).sign(b"\x72")


def test_the_digest_of_a_roster_is_the_one_it_had():
    """Operators pin it in files: another one would stop every federation."""
    assert hashlib.sha256(ROSTER.digest.encode()).hexdigest()[:16] == "3e01c6d269b7e7cb"
