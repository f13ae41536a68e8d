"""Masks: who lacks one helper's seed sees uniform words, and a header has one form, one signer and one set of seals."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from murmurfl.privacy import (
    ClientKey,
    ConfigurationError,
    Header,
    HelperKey,
    MaskedReleaseError,
    Masking,
    PrivacyPolicy,
    Release,
    Roster,
    SumAssumption,
    add_mask,
    checked_header,
)
from murmurfl.privacy.release import policy as privacy_policy
from murmurfl.privacy.sums import masking
from murmurfl.privacy.sums.masking import (
    LARGEST_SIZE,
    LONGEST_HEADER,
    NOTHING_OPENED,
    SEAL_BYTES,
    SEED_BYTES,
    opened_seal,
)

from tests.harness.errors import raises
from tests.harness.masked_releases import (
    CLIENTS,
    HELPERS,
    NOTHING,
    OTHER_ROSTER,
    ROSTER,
    SEED,
    header_of,
    id_of,
    key_of,
    mask_of,
    release_of,
    sealed_by,
    signed,
)

D = 40
WORDS = 20_000
KEYS = {name: HelperKey.simulated(SEED, name) for name in HELPERS}


def policy(**changes):
    options = {"trust": "secure-aggregation", "clip_norm": 1.0, "batch_size": 2, "max_participations": 9, "mu": 1.0}
    return PrivacyPolicy(**{**options, "sums": SumAssumption(2, 3), **changes})


def released(counts, release=1, ack=0):
    """A release as a client's ledger gives it."""
    ids = [bytes.fromhex(id_of("a", k)) if k else NOTHING_OPENED for k in (release, ack)]
    return Release(np.asarray(counts, np.int64), policy().plan(len(counts)).grid.spacing, release, ack, *ids)


def masked(counts, name="a", session="s", **options):
    return Masking(name, key_of(name), ROSTER).mask(released(counts, **options), session, policy())


def seeds_of(sealed):
    header = checked_header(sealed, ROSTER)
    return [opened_seal(sealed, header, name, KEYS[name]) for name in HELPERS]


def test_the_masks_of_all_helpers_come_off_and_nothing_less():
    extremes = [0, 1, -1, 2**52 - 1, 1 - 2**52, -(2**62), 2**62, 7]
    out = masked(extremes)
    assert out.counts.dtype == np.uint64
    for seed in seeds_of(out.sealed):
        assert out.counts.astype(np.int64).tolist() != extremes
        add_mask(out.counts, seed, subtract=True)
    assert out.counts.astype(np.int64).tolist() == extremes


def test_sums_of_masked_releases_lose_their_masks_to_the_last_bit():
    generator = np.random.Generator(np.random.Philox(key=11))
    counts = generator.integers(-(2**52) + 1, 2**52, size=(len(CLIENTS), D))
    parts = [masked(values, name) for values, name in zip(counts, CLIENTS, strict=True)]
    total = sum((part.counts for part in parts), np.zeros(D, np.uint64))
    for helper in HELPERS:
        total -= sum((mask_of(part.sealed, helper) for part in parts), np.zeros(D, np.uint64))
    assert (total.astype(np.int64) == counts.sum(axis=0)).all()


def test_a_mask_is_aes_256_in_counter_mode_whatever_the_pieces():
    """The same keystream at once: an implementation that shares none of the code."""
    for size in (0, 1, 7, masking._BLOCK // 8 - 1, masking._BLOCK // 8, masking._BLOCK // 8 + 1, 100_001):
        seed = os.urandom(SEED_BYTES)
        total = np.full(size, 5, np.uint64)
        add_mask(total, seed)
        stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(8 * size))
        assert (total == np.frombuffer(stream, "<u8") + np.uint64(5)).all()
        add_mask(total, seed, subtract=True)
        assert (total == 5).all()


def test_the_keystream_is_the_one_it_was():
    """Of a seed of zeros: FIPS 197's AES-256 of the counter. Another one would break sessions that are under way."""
    total = np.zeros(3, np.uint64)
    add_mask(total, bytes(SEED_BYTES))
    assert total.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087530f8afbc74536b9"


def masks_are_uniform():
    """Every bit of what leaves is a fair coin, for counts of zero, whoever has all seeds but one.

    64 bits of two helpers are tested at 6 standard deviations: false alarms below 128 x 2e-9.
    """
    out = masked(np.zeros(WORDS))
    for seed in seeds_of(out.sealed):
        left = out.counts.copy()
        masking.add_mask(left, seed, subtract=True)
        share = np.unpackbits(left.astype("<u8").view(np.uint8)).reshape(WORDS, 64).mean(axis=0)
        if np.abs(share - 0.5).max() > 6 * 0.5 / math.sqrt(WORDS):
            return False
    return True


def test_who_lacks_one_seed_sees_uniform_words():
    assert masks_are_uniform()


@pytest.mark.parametrize("lost", [np.uint32, np.uint16], ids=["int32", "int16"])
def test_masks_of_fewer_bits_would_be_noticed(monkeypatch, lost):
    def narrow(total, seed, *, subtract=False):
        mask = np.zeros(len(total), np.uint64)
        add_mask(mask, seed)
        mask = mask.astype(lost).astype(np.uint64)
        total += -mask if subtract else mask

    monkeypatch.setattr(masking, "add_mask", narrow)
    assert not masks_are_uniform()


def seeds_are_fresh():
    """No seed twice: in two releases, at two helpers, or for a release that is masked again."""
    outs = [masked(np.zeros(D)), masked(np.zeros(D)), masked(np.zeros(D), release=2, ack=1), masked(np.zeros(D), "b")]
    seeds = [seed for out in outs for seed in seeds_of(out.sealed)]
    return len(set(seeds)) == len(seeds)


def test_every_mask_has_a_seed_of_its_own():
    assert seeds_are_fresh()


@pytest.mark.parametrize("shared", ["one for all", "one a client", "one a helper"])
def test_seeds_that_are_used_again_would_be_noticed(monkeypatch, shared):
    state = {"calls": 0}

    def again(size):
        state["calls"] += 1
        part = {"one for all": 0, "one a client": state["calls"] % 2, "one a helper": (state["calls"] - 1) // 2}[shared]
        return bytes([part]) * size

    monkeypatch.setattr(masking.secrets, "token_bytes", again)
    assert not seeds_are_fresh()


def test_the_release_itself_is_left_alone():
    """The ledger may hold the very array."""
    release = released(np.arange(D))
    release.counts.setflags(write=False)
    Masking("a", key_of("a"), ROSTER).mask(release, "s", policy())
    assert (release.counts == np.arange(D)).all()


def test_what_leaves_beside_the_counts_does_not_depend_on_them():
    one, other = (Header.from_bytes(masked(counts).sealed.header) for counts in (np.zeros(D), np.full(D, 2**51)))
    assert one == other
    assert {len(seal) for seal in masked(np.zeros(D)).sealed.seals} == {SEAL_BYTES}


def test_the_header_says_what_the_release_and_the_operator_say():
    own = policy()
    header = checked_header(masked(np.zeros(D), release=3, ack=2).sealed, ROSTER)
    assert (header.session, header.client, header.release) == ("s", "a", 3)
    assert (header.release_id, header.ack_id) == (id_of("a", 3), id_of("a", 2))
    assert (header.size, header.spacing) == (D, own.plan(D).grid.spacing)
    assert (header.release_mode, header.min_cohort, header.terms) == ("cumulative", 3, own.shared_terms(D))
    assert (header.roster, header.helpers) == (ROSTER.digest, HELPERS)


def test_a_release_that_stands_alone_is_built_on_nothing():
    alone = policy(mechanism="independent", release_rule="paper")
    assert alone.release_mode == "independent"
    out = Masking("a", key_of("a"), ROSTER).mask(released(np.zeros(D), release=3, ack=2), "s", alone)
    header = checked_header(out.sealed, ROSTER)
    assert (header.release_mode, header.ack_id) == ("independent", NOTHING)
    assert header.terms != policy().shared_terms(D)


@pytest.mark.parametrize(
    "release",
    [
        replace(released(np.zeros(D)), counts=np.zeros(D, np.int32)),
        replace(released(np.zeros(D)), counts=np.zeros(D)),
        replace(released(np.zeros(D)), release_id=b""),
        replace(released(np.zeros(D)), ack_id=b""),
    ],
    ids=["int32", "float", "no id", "no id of what it is built on"],
)
def test_what_is_no_release_under_secure_aggregation_is_not_masked(release):
    with raises(ConfigurationError, "wrong-type", "release"):
        Masking("a", key_of("a"), ROSTER).mask(release, "s", policy())


def test_a_client_that_is_not_in_the_roster_or_under_another_key_cannot_mask():
    with raises(ConfigurationError, "missing", "roster"):
        Masking("z", key_of("z"), ROSTER)
    with raises(ConfigurationError, "mismatch", "key"):
        Masking("a", key_of("b"), ROSTER)


def test_a_policy_that_the_roster_cannot_serve_is_refused():
    own = Masking("a", key_of("a"), ROSTER)
    own.check_policy(policy(sums=SumAssumption(2, len(CLIENTS))))
    with raises(ConfigurationError, "out-of-range", "min_cohort"):
        own.check_policy(policy(sums=SumAssumption(2, len(CLIENTS) + 1)))
    with raises(ConfigurationError, "conflict", "trust"):
        own.mask(released(np.zeros(D)), "s", PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=9, mu=1.0))


def test_samples_return_in_chains_only_where_a_plan_pays_for_the_whole_roster(monkeypatch):
    """More clients than may be in one sum: a sample could meet others each time it returns."""
    own, returning = Masking("a", key_of("a"), ROSTER), {"sample_participations": 3, "min_separation": 3}
    policies = [
        policy(**returning),
        policy(),
        policy(mechanism="independent", release_rule="paper", **returning),
    ]
    monkeypatch.setattr(privacy_policy, "MOST_SUMMED", len(CLIENTS))
    for one in policies:
        own.check_policy(one)
    monkeypatch.setattr(privacy_policy, "MOST_SUMMED", len(CLIENTS) - 1)
    with raises(
        ConfigurationError, "out-of-range", "clients", match=f"at most {len(CLIENTS) - 1} clients .* got {len(CLIENTS)}"
    ):
        own.check_policy(policies[0])
    for one in policies[1:]:
        own.check_policy(one)


def test_a_header_is_read_as_it_was_written():
    header = header_of("a", 3, 2, session="é" * 64, spacing=5e-324)
    assert Header.from_bytes(header.to_bytes()) == header
    assert header.to_bytes().isascii()


@pytest.mark.parametrize(("mode", "word"), [("cumulative", "last-opened"), ("independent", "nothing")])
def test_a_header_keeps_its_words_for_the_release_mode(mode, word):
    content = header_of("a", 3, release_mode=mode, ack_id=NOTHING).to_bytes()
    assert json.loads(content)["builds_on"] == word
    assert Header.from_bytes(content).release_mode == mode


def other_forms():
    """A header's values, written otherwise or with another type."""
    header = header_of("a")
    content, values = header.to_bytes(), json.loads(header.to_bytes())
    compact = {"separators": (",", ":")}
    yield "spaces", json.dumps(values, sort_keys=True).encode()
    yield "order", json.dumps(dict(reversed(values.items())), **compact).encode()
    yield "a key twice", content.replace(b'{"ack_id"', b'{"size":1,"ack_id"')
    yield "the same key twice", content.replace(b'{"ack_id"', b'{"size":40,"ack_id"')
    yield "one more key", content.replace(b'{"ack_id"', b'{"a":1,"ack_id"')
    for left_out in values:
        others = {key: value for key, value in values.items() if key != left_out}
        yield f"without {left_out}", json.dumps(others, sort_keys=True, **compact).encode()
    yield "escapes", content.replace(b'"client":"a"', b'"client":"\\u0061"')
    yield "utf-8", content.replace(b'"session":"s"', '"session":"é"'.encode())
    yield "utf-16", content.decode().encode("utf-16")
    yield "a mark before it", b"\xef\xbb\xbf" + content
    yield "a line after it", content + b"\n"
    yield "another spacing's digits", content.replace(b"9.5367431640625e-07", b"0.00000095367431640625")
    yield "text", content.decode()
    yield "nothing", b""
    yield "a list", b"[]"
    yield "a number", b"7"
    yield "null", b"null"
    yield "nested", b"[" * 50_000
    yield "not json", b"\xff\x00"
    yield "the names alone", json.dumps(list(values)).encode()
    yield "too long", content.replace(b'"session":"s"', b'"session":"' + b"s" * LONGEST_HEADER + b'"')


@pytest.mark.parametrize(("form", "content"), list(other_forms()))
def test_a_header_in_another_form_is_none(form, content):
    with raises(MaskedReleaseError, "malformed"):
        Header.from_bytes(content)


IMPOSSIBLE = {
    "version": [0, 2, True, 1.0, "1", None],
    "session": ["", "s" * 65, 7, None],
    "client": ["", "m" * 65, 7],
    "builds_on": ["", "last", "cumulative", None, ["nothing"]],
    "release": [0, -1, 2**31, True, 1.0, "1", 10**4000],
    "release_id": ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "1" * 31 + "\n", NOTHING, None],
    "ack_id": ["", "0" * 31, "A" * 32, id_of("a", 1), None],
    "size": [0, -1, LARGEST_SIZE + 1, 1.5, True, 10**4000],
    "spacing": [0.0, -1.0, math.nan, math.inf, -math.inf, 1, True, "1.0", None],
    "min_cohort": [0, -3, 2**11 + 1, 2.0, True, None],
    "roster": ["", "0" * 63, "G" * 64, None],
    "helpers": [None, [["left"]], "left", 7],
    "terms": ["", "5" * 65, "T" * 64, None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values], ids=str
)
def test_a_header_with_an_impossible_value_is_none(name, value):
    values = json.loads(header_of("a").to_bytes()) | {name: value}
    content = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with raises(MaskedReleaseError, "malformed"):
        Header.from_bytes(content.encode())


def test_a_number_too_long_to_read_is_no_header():
    content = header_of("a").to_bytes().replace(b'"size":40', b'"size":' + b"9" * 10_000)
    with raises(MaskedReleaseError, "malformed"):
        Header.from_bytes(content)


def test_every_field_is_tried_with_impossible_values():
    assert set(IMPOSSIBLE) == set(json.loads(header_of("a").to_bytes()))


def test_a_release_that_stands_alone_names_nothing_it_is_built_on():
    with pytest.raises(MaskedReleaseError):
        Header.from_bytes(header_of("a", 2, 1, release_mode="independent").to_bytes())


def changed(sealed):
    """A signed release with one part of it changed, each as somebody without the client's key could."""
    other = release_of("a", 2)
    header = Header.from_bytes(sealed.header)
    yield "header", replace(sealed, header=replace(header, min_cohort=1).to_bytes())
    yield "another header", replace(sealed, header=other.header)
    yield "seal", replace(sealed, seals=(sealed.seals[0], other.seals[1]))
    yield "order of seals", replace(sealed, seals=sealed.seals[::-1])
    yield "one seal less", replace(sealed, seals=sealed.seals[:1])
    yield "one seal more", replace(sealed, seals=(*sealed.seals, sealed.seals[0]))
    yield (
        "one bit of a seal",
        replace(sealed, seals=(bytes([sealed.seals[0][0] ^ 1]) + sealed.seals[0][1:], sealed.seals[1])),
    )
    yield "the border of seals", replace(sealed, seals=(sealed.seals[0][:-1], sealed.seals[0][-1:] + sealed.seals[1]))
    yield "the border of the header", replace(sealed, header=sealed.header[:-1])
    yield "signature", replace(sealed, signature=bytes(64))
    yield "another's signature", replace(sealed, signature=other.signature)
    yield "no signature", replace(sealed, signature=None)
    yield "no seals", replace(sealed, seals=(None, None))
    yield "text", replace(sealed, seals=("x" * SEAL_BYTES,) * 2)
    yield "nothing", replace(sealed, header=b"", seals=(), signature=b"")


@pytest.mark.parametrize(("part", "sealed"), list(changed(release_of("a"))))
def test_nothing_of_a_signed_release_can_be_changed(part, sealed):
    with pytest.raises(MaskedReleaseError):
        checked_header(sealed, ROSTER)


def rightly_signed_and_wrong():
    """What a client of the roster could sign."""
    one = release_of("a")
    yield "another roster", release_of("a", roster=OTHER_ROSTER.digest)
    yield "another helper", release_of("a", helpers=("left", "center"))
    yield "helpers in another order", release_of("a", helpers=HELPERS[::-1])
    yield "one helper", release_of("a", helpers=HELPERS[:1])
    yield "one seal", signed(replace(one, seals=one.seals[:1]), key_of("a"))
    yield "three seals", signed(replace(one, seals=(*one.seals, one.seals[0])), key_of("a"))
    yield "short seals", signed(replace(one, seals=(one.seals[0], one.seals[1][:-1])), key_of("a"))
    yield "another's name", sealed_by(header_of("b"), key_of("a"))
    yield "nobody's name", sealed_by(header_of("z"), key_of("a"))


@pytest.mark.parametrize(("what", "sealed"), list(rightly_signed_and_wrong()))
def test_a_release_for_others_or_in_anothers_name_is_refused(what, sealed):
    with pytest.raises(MaskedReleaseError):
        checked_header(sealed, ROSTER)


def test_what_a_client_signed_for_something_else_signs_no_release():
    """Its label is in what it signs: without it other documents of the same bytes would pass."""
    sealed = release_of("a")
    assert sealed.signed.startswith(b"murmurfl masked release 1\x00")
    stripped = sealed.signed.partition(b"\x00")[2]
    with pytest.raises(MaskedReleaseError):
        checked_header(replace(sealed, signature=key_of("a").sign(stripped)), ROSTER)


def test_a_seal_opens_for_its_helper_and_its_header_alone():
    sealed = release_of("a")
    header = checked_header(sealed, ROSTER)
    assert len(opened_seal(sealed, header, "left", KEYS["left"])) == SEED_BYTES
    other = replace(header, min_cohort=1)
    wrong = [
        (sealed, header, "left", KEYS["right"]),
        (sealed, header, "right", KEYS["left"]),
        (sealed, header, "nobody", KEYS["left"]),
        (replace(sealed, seals=sealed.seals[::-1]), header, "left", KEYS["left"]),
        (replace(sealed, header=other.to_bytes()), other, "left", KEYS["left"]),
        (replace(sealed, seals=()), header, "left", KEYS["left"]),
        (replace(sealed, seals=(b"", b"")), header, "left", KEYS["left"]),
        (replace(sealed, seals=(bytes(SEAL_BYTES), bytes(SEAL_BYTES))), header, "left", KEYS["left"]),
    ]
    for arguments in wrong:
        with raises(MaskedReleaseError, "mismatch", match="Expected a seal for this helper and this release"):
            opened_seal(*arguments)


def test_a_seal_for_two_helpers_with_one_key_differs_by_name():
    """No roster has them; if one had, a seal for the one would still not be one for the other."""
    sealed, header = release_of("a"), header_of("a")
    renamed = replace(header, helpers=("other", "right"))
    with pytest.raises(MaskedReleaseError):
        opened_seal(sealed, renamed, "other", KEYS["left"])


def test_a_seed_of_another_length_is_refused():
    header = header_of("a")
    short = masking._SUITE.encrypt(
        bytes(SEED_BYTES - 1),
        KEYS["left"].sealing.public_key(),
        info=masking._seal_info("left", header.to_bytes()),
    )
    sealed = replace(release_of("a"), header=header.to_bytes(), seals=(short, short))
    with raises(MaskedReleaseError, "wrong-shape", match="a seed of 32 bytes"):
        opened_seal(sealed, header, "left", KEYS["left"])


def test_a_seal_is_for_the_helpers_name_behind_its_length_and_the_header():
    """The bytes that clients of every version seal with."""
    header = header_of("a")
    info = b"murmurfl mask seed 1\0" + bytes([0, 0, 0, 0, 0, 0, 0, 4]) + b"left" + header.to_bytes()
    seal = masking._SUITE.encrypt(bytes(range(SEED_BYTES)), KEYS["left"].sealing.public_key(), info=info)
    sealed = replace(release_of("a"), header=header.to_bytes(), seals=(seal, seal))
    assert bytes(opened_seal(sealed, header, "left", KEYS["left"])) == bytes(range(SEED_BYTES))


def test_masks_with_real_keys_work_as_well():
    key, helper = ClientKey.generate(), HelperKey.generate()
    roster = Roster({"m": key.public}, (helper.entry("h"),))
    out = Masking("m", key, roster).mask(released(np.arange(D)), "s", policy(sums=SumAssumption(1, 1)))
    header = checked_header(out.sealed, roster)
    add_mask(out.counts, opened_seal(out.sealed, header, "h", helper), subtract=True)
    assert (out.counts.astype(np.int64) == np.arange(D)).all()
