"""Texts as records, and encoders of one's own."""

import numpy as np
import pytest
from murmurfl.clients import Column, Label, Schema, register_encoder
from murmurfl.clients.records.client_records import Records, table_rows
from murmurfl.clients.records.encoders import HashedNGrams
from murmurfl.privacy.errors import ConfigurationError, InvalidRecordError

from tests.harness.errors import raises

SCHEMA = Schema(
    columns={
        "note": Column(kind="text", dimension=256),
        "age": Column(kind="integer", bounds=(0, 100), missing=50),
    },
    label=Label(column="ill", classes=("no", "yes")),
)
STRANGE = {
    "huge": "ward " * 2_000_000,
    "empty": "",
    "one long word": "x" * 3_000_000,
    "a ligature that grows": "\ufdfa" * 100_000,
    "a lone surrogate": "\ud800 fever",
    "NULs": "\0" * 1000,
    "right to left": "\u202e\u05d0\u05d1 fever",
    "combining": "e" + "\u0301" * 50_000,
    "bytes": b"\xff\xfe fever",
    "no text": 3,
    "nothing": None,
    "a list": ["fever"],
    "a number without end": 10**5000,
}


def rows(note):
    words = ("fever", "cough", "no pain", "pain at night")
    made = [{"note": words[i % 4], "age": 30 + i, "ill": ("no", "yes")[i % 2]} for i in range(12)]
    made[6] = {**made[6], "note": note}
    return made


@pytest.mark.parametrize("name", STRANGE)
def test_strange_text_changes_its_own_row_alone(name):
    ordinary = Records(table_rows(rows("fever")), SCHEMA, together=True)
    strange = Records(table_rows(rows(STRANGE[name])), SCHEMA, together=True)
    others = np.arange(12) != 6
    assert np.array_equal(strange[:][0][others], ordinary[:][0][others])
    assert strange.fits[others].all()
    assert bool(strange.fits[6]) == (name != "a list")
    assert np.linalg.norm(strange[:][0][6]) <= SCHEMA.norm_bound + 1e-6


def test_empty_text_is_zeros_and_any_other_has_norm_one():
    column = SCHEMA.columns["note"]
    assert column.encode("") == column.encode(" \n") == column.encode(None) == [0.0] * 256
    for text in ("fever", "a", "the fever is back since night", "\u4f60\u597d"):
        assert np.linalg.norm(column.encode(text)) == pytest.approx(1.0, abs=1e-6)
    assert SCHEMA.norm_bound == pytest.approx(2**0.5)


def test_n_grams_know_words_and_parts_of_words():
    encode = HashedNGrams(1024)

    def alike(one, other):
        return float(encode(one) @ encode(other))

    assert alike("severe headache", "headache, severe") > 0.4 > alike("severe headache", "broken left arm")
    assert alike("headaches", "headache") > 0.3  # of characters alone
    assert alike("No Fever", "no fever") == pytest.approx(1.0)


def test_signs_of_hashes_keep_products_of_unlike_texts_near_zero():
    """Without signs every collision adds up: a mean above 0.05 in one of 10^6 draws of unlike words."""
    random = np.random.Generator(np.random.Philox(key=3))
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    texts = [" ".join("".join(random.choice(letters, 8)) for _ in range(40)) for _ in range(30)]
    found = np.stack([HashedNGrams(64)(text) for text in texts])
    products = (found @ found.T)[np.triu_indices(30, 1)]
    assert abs(products.mean()) < 0.05


def test_own_encoder_is_bounded_and_costs_its_record_alone():
    def encode(text):
        if "boom" in text:
            raise RuntimeError("secret: " + text)
        return {"long": [300.0, 400.0], "nan": [np.nan, 0.0], "short": [1.0]}.get(text, [0.1, 0.2])

    register_encoder("text", "own-of-test", encode, 2)
    column = Column(kind="text", encoder="own-of-test", dimension=2)
    assert column.encode("long") == pytest.approx([0.6, 0.8])
    assert column.encode("plain") == pytest.approx([0.1, 0.2])
    for text in ("nan", "short", "boom"):
        with pytest.raises(InvalidRecordError) as error:
            column.encode(text)
        assert text not in str(error.value)
    with raises(ConfigurationError, "mismatch", "dimension", got=3):
        Column(kind="text", encoder="own-of-test", dimension=3).encode("plain")


def test_schema_names_no_code():
    """A schema may come from others: a name such as ``os:system`` is looked up and never imported."""
    column = Column(kind="text", encoder="os:system", dimension=2)
    with raises(ConfigurationError, "unknown-name", "encoder", got="os:system"):
        column.encode("touch /tmp/never")
    with raises(ConfigurationError, "exists", "encoder"):
        register_encoder("text", "n-grams", len, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "text"},
        {"kind": "number", "bounds": (0, 1), "dimension": 4},
        {"kind": "yes/no", "encoder": "colour"},
        {"kind": "text", "dimension": 0},
        {"kind": "image", "dimension": 4, "missing": "none"},
        {"kind": "text", "dimension": 4, "bounds": (0, 1)},
        {"kind": "text", "dimension": 4, "values": ("a",)},
    ],
)
def test_columns_that_say_too_little_or_too_much_are_refused(fields):
    with pytest.raises(ValueError, match="Expected"):
        Column(**fields)


def test_additive_models_refuse_texts():
    with raises(ConfigurationError, "conflict", "model"):
        SCHEMA.of_values()
