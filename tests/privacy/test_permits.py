"""Permits: what an owner signed is believed, and nothing that anybody else wrote."""

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from murmurfl.privacy import ClientKey, ConfigurationError, permits
from murmurfl.privacy.permits import (
    LONGEST_LOGIN_S,
    LONGEST_PERMIT,
    MOST_SESSIONS,
    OwnerKey,
    Permit,
    PermitError,
    public_owner_key,
    read_permit,
    verified_login,
    verified_permit,
)

from tests.harness.errors import raises

OWNER, STRANGER = OwnerKey(bytes(range(32))), OwnerKey(bytes(range(1, 33)))
DIGEST = "ab" * 32
PERMIT = OWNER.permit(["night1"], not_before=1000, until=2000, bundle=DIGEST)


def encoded(content):
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def parts(text):
    return [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in text.split(".")[1:]]


def assembled(payload, signature, name="murmurfl-permit-1"):
    return f"{name}.{encoded(payload)}.{encoded(signature)}"


def is_believed(text, owners=(OWNER.public,)):
    try:
        verified_permit(text, owners)
    except PermitError:
        return False
    return True


def test_a_permit_says_what_its_owner_signed():
    permit = verified_permit(PERMIT, [STRANGER.public, OWNER.public])
    assert permit == Permit(OWNER.public, ("night1",), DIGEST, 1000, 2000)
    assert read_permit(PERMIT) == permit
    assert [permit.is_for(now) for now in (999.9, 1000, 1999.9, 2000)] == [False, True, True, False]
    assert len(OWNER.permit([f"{i}" * 64 for i in range(MOST_SESSIONS)], not_before=0, until=1)) <= LONGEST_PERMIT


def test_every_changed_character_is_noticed():
    for place in range(len(PERMIT)):
        for other in "A._":
            if PERMIT[place] != other:
                assert not is_believed(PERMIT[:place] + other + PERMIT[place + 1 :])
    assert is_believed(PERMIT)


def test_nothing_but_a_permit_is_believed():
    payload, signature = parts(PERMIT)
    sign = Ed25519PrivateKey.from_private_bytes(OWNER.secret).sign
    wrong = [
        "",
        None,
        b"murmurfl-permit-1",
        7,
        "x" * (LONGEST_PERMIT + 1),
        PERMIT + " ",
        PERMIT + "=",
        PERMIT.replace("permit-1", "permit-2"),
        "é".join(PERMIT.split(".")),
        assembled(payload, signature[:-1]),
        assembled(payload, b""),
        assembled(payload, sign(payload)),  # of no label
        assembled(payload, sign(b"murmurfl masked release 1\x00" + payload)),  # of another one
        assembled(payload, ClientKey(OWNER.secret).sign(payload)),
        assembled(payload.replace(b"night1", b"night2"), signature),
    ]
    assert [is_believed(text) for text in wrong] == [False] * len(wrong)


def test_a_signature_of_a_key_that_is_not_listed_is_not_believed():
    assert not is_believed(STRANGER.permit(["night1"], not_before=1000, until=2000))
    assert not is_believed(PERMIT, [STRANGER.public])
    assert not is_believed(PERMIT, [])


def test_an_owner_does_not_sign_in_anothers_name():
    """A listed owner, whose permit names another listed one: nobody could say later whose run it was."""
    payload = Permit(OWNER.public, ("night1",), "", 1000, 2000).payload
    sign = Ed25519PrivateKey.from_private_bytes(STRANGER.secret).sign
    assert not is_believed(assembled(payload, sign(permits._LABEL + payload)), [OWNER.public, STRANGER.public])


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": []},
        {"sessions": ["a b"]},
        {"sessions": ["a" * 65]},
        {"sessions": ["a", "a"]},
        {"sessions": [1]},
        {"sessions": "night1"},
        {"sessions": {"night1": 1}},
        {"until": 1000},
        {"until": True},
        {"until": 2e3},
        {"until": None},
        {"until": 2**60},
        {"not-before": -1},
        {"bundle": "ab"},
        {"bundle": DIGEST.upper()},
        {"owner": "00"},
        {"more": 1},
    ],
)
def test_signed_payload_that_is_no_permit_is_refused(change):
    payload = json.dumps({**json.loads(parts(PERMIT)[0]), **change}).encode()
    sign = Ed25519PrivateKey.from_private_bytes(OWNER.secret).sign
    text = assembled(payload, sign(permits._LABEL + payload))
    assert not is_believed(text)


def test_a_payload_that_is_no_json_is_refused():
    sign = Ed25519PrivateKey.from_private_bytes(OWNER.secret).sign
    for payload in (b"", b"[]", b"{", b"\xff", b"[" * 2000, b'{"a":' * 500):
        assert not is_believed(assembled(payload, sign(permits._LABEL + payload)))


def test_a_public_key_that_anybody_can_sign_for_is_refused():
    assert public_owner_key(f" {OWNER.public.hex().upper()}\n") == OWNER.public
    for key in ("", "00", "zz" * 32, "00" * 32, "01" + "00" * 31, None, 3):
        with raises(ConfigurationError, "malformed", "owners"):
            public_owner_key(key)


def test_a_key_shows_nothing_of_its_secret():
    assert OWNER.secret.hex() not in repr(OWNER)
    assert repr(OWNER) == "OwnerKey()"
    assert OwnerKey.generate() != OwnerKey.generate()
    with raises(ConfigurationError, "wrong-shape", "secret", match="32 bytes"):
        OwnerKey(b"short")


@pytest.mark.parametrize("planted", ["the signature", "the label", "the owner"])
def test_a_check_that_is_taken_away_is_noticed(monkeypatch, planted):
    payload, signature = parts(PERMIT)
    changed = payload.replace(b"night1", b"night2")
    sign = Ed25519PrivateKey.from_private_bytes(OWNER.secret).sign
    if planted == "the signature":
        monkeypatch.setattr(permits, "is_signed", lambda *_: True)
        assert is_believed(assembled(changed, signature))
    elif planted == "the label":
        monkeypatch.setattr(permits, "_LABEL", b"")
        assert is_believed(assembled(payload, sign(payload)))
    else:
        monkeypatch.setattr(permits, "is_signed", lambda owner, *_: owner == STRANGER.public)
        assert not is_believed(PERMIT, [OWNER.public, STRANGER.public])


SERVER, NOW = "cd" * 32, 1_000_000.0
LOGIN = OWNER.login(SERVER, until=int(NOW) + 60)


def logs_in(text, owners=(OWNER.public,), server=SERVER, now=NOW):
    try:
        return verified_login(text, owners, server, now)
    except PermitError:
        return None


def test_a_login_is_its_owners_for_one_server_until_it_ends():
    assert logs_in(LOGIN, (STRANGER.public, OWNER.public)) == OWNER.public
    assert logs_in(OWNER.login("", until=int(NOW) + 60), server="") == OWNER.public
    assert [logs_in(LOGIN, now=NOW + s) is not None for s in (59.9, 60.0)] == [True, False]
    for server in ("", "cd" * 31 + "ce"):
        assert logs_in(LOGIN, server=server) is None
        assert logs_in(OWNER.login(server, until=int(NOW) + 60)) is None
    assert logs_in(LOGIN, ()) is logs_in(LOGIN, (STRANGER.public,)) is None


def test_a_login_of_years_is_none():
    lasting = [LONGEST_LOGIN_S, 2 * LONGEST_LOGIN_S, 2**62]
    assert [logs_in(OWNER.login(SERVER, until=int(NOW) + s)) is not None for s in lasting] == [True, False, False]


def test_no_other_text_logs_in_and_no_login_is_a_permit():
    payload, signature = parts(LOGIN)
    sign = Ed25519PrivateKey.from_private_bytes(OWNER.secret).sign
    label = b"murmurfl login 1\x00"
    assert logs_in(assembled(payload, sign(label + payload), "murmurfl-login-1")) == OWNER.public
    others = json.loads(payload) | {"owner": STRANGER.public.hex()}, [1], {**json.loads(payload), "until": 1e9}
    made = [json.dumps(other).encode() for other in others]
    wrong = [assembled(one, sign(label + one), "murmurfl-login-1") for one in [*made, b"", b"[" * 3000]]
    wrong += [assembled(payload, sign(payload), "murmurfl-login-1"), assembled(payload, signature), PERMIT, "", None]
    wrong += [assembled(payload, sign(b"murmurfl permit 1\x00" + payload), "murmurfl-login-1"), LOGIN + " "]
    for place in range(len(LOGIN)):
        wrong.append(LOGIN[:place] + ("A" if LOGIN[place] != "A" else "B") + LOGIN[place + 1 :])
    assert [text for text in wrong if logs_in(text) is not None] == []
    assert not is_believed(LOGIN)
    assert not is_believed(assembled(payload, sign(label + payload)))
