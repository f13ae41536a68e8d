"""A schema says in public what a record is, and reads one record without any other."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.clients import Column, Label, Part, Schema
from murmurfl.clients.records.drafting import document, draft, drafted, inferred
from murmurfl.clients.records.schema import is_missing, text_of
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import InvalidRecordError

from tests.harness.errors import raises

TABLE = Schema(
    columns={
        "age": Column(kind="integer", bounds=(0, 100), missing=50),
        "dose": Column(kind="number", bounds=(-1, 1)),
        "ward": Column(kind="category", values=("a", "1")),
        "smoker": Column(kind="yes/no", missing="no"),
    },
    label=Label(column="ill", classes=("no", "yes")),
    owner="who",
)
ROW = {"age": "75", "dose": "0.5", "ward": "a", "smoker": "yes", "ill": "yes", "who": "p1"}
STRICT = TABLE.model_copy(
    update={
        "columns": {
            **TABLE.columns,
            "age": Column(kind="integer", bounds=(0, 100)),
            "smoker": Column(kind="yes/no"),
        }
    }
)
IMAGES = Schema(inputs=(Part(kind="byte", shape=(2, 2)),), label=Label(classes=3))


def read(**changes):
    return TABLE.read({**ROW, **changes})


def test_a_row_becomes_numbers_of_known_size_and_a_class():
    record = read()
    assert record.inputs.tolist() == [0.5, 0.5, 1.0, 0.0, 0.0, 1.0]
    assert (int(record.label), record.owner) == (1, "p1")
    assert (TABLE.num_features, TABLE.num_classes, TABLE.norm_bound) == (6, 2, 2.0)
    assert np.linalg.norm(record.inputs) <= TABLE.norm_bound


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"age": ""}, [0.0, 0.5, 1, 0, 0, 1]),
        ({"age": float("nan")}, [0.0, 0.5, 1, 0, 0, 1]),
        ({"age": 1e308}, [1.0, 0.5, 1, 0, 0, 1]),
        ({"age": np.int64(75)}, [0.5, 0.5, 1, 0, 0, 1]),
        ({"age": 75.0}, [0.5, 0.5, 1, 0, 0, 1]),
        ({"dose": "-1e300"}, [0.5, -1.0, 1, 0, 0, 1]),
        ({"dose": "5e-324"}, [0.5, 0.0, 1, 0, 0, 1]),
        ({"ward": 1}, [0.5, 0.5, 0, 1, 0, 1]),
        ({"ward": 1.0}, [0.5, 0.5, 0, 1, 0, 1]),
        ({"ward": " 1.00 "}, [0.5, 0.5, 0, 1, 0, 1]),
        ({"ward": "never seen"}, [0.5, 0.5, 0, 0, 1, 1]),
        ({"ward": None}, [0.5, 0.5, 0, 0, 1, 1]),
        ({"smoker": "NA"}, [0.5, 0.5, 1, 0, 0, -1]),
        ({"smoker": True}, [0.5, 0.5, 1, 0, 0, 1]),
        ({"smoker": 0.0}, [0.5, 0.5, 1, 0, 0, -1]),
        ({"extra": "cell"}, [0.5, 0.5, 1, 0, 0, 1]),
    ],
)
def test_what_is_strange_and_fits_is_moved_into_the_bounds(changes, expected):
    assert read(**changes).inputs.tolist() == expected


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"age": "75.5"}, "age: a number where an integer should be"),
        ({"age": "inf"}, "age: a number that is not finite"),
        ({"age": "old"}, "age: a text where a number should be"),
        ({"age": "7_5"}, "age: a text"),
        ({"age": [75]}, "age: a text where"),
        ({"dose": ""}, "dose: a missing value"),
        ({"dose": None}, "dose: a missing value"),
        ({"smoker": "maybe"}, "smoker: neither yes nor no"),
        ({"ward": "x" * 10**6}, "ward: a text too long"),
        ({"ill": ""}, "ill: a missing label"),
        ({"ill": "null"}, "or a word such as NA or none that is no class of the schema"),
        ({"ill": "perhaps"}, "ill: a label that is none of the classes"),
        ({"who": ""}, "who: a missing owner"),
        ({"who": None}, "who: a missing owner"),
    ],
)
def test_what_does_not_fit_is_said_without_its_value(changes, reason):
    with raises(InvalidRecordError, "invalid-record", match=reason) as caught:
        STRICT.read({**ROW, **changes})
    value = str(next(iter(changes.values())))
    assert len(value) < 3 or value not in str(caught.value).partition(":")[2]


def test_a_row_without_a_column_does_not_fit():
    with pytest.raises(InvalidRecordError):
        TABLE.read({name: cell for name, cell in ROW.items() if name != "dose"})
    with pytest.raises(InvalidRecordError):
        TABLE.read("age,dose")


def test_cells_may_come_in_the_order_of_the_columns():
    pair = ([75, 0.5, "a", "yes"], "yes", "p1")
    assert TABLE.read(pair).inputs.tolist() == read().inputs.tolist()
    with pytest.raises(InvalidRecordError):
        TABLE.read(([75, 0.5, "a"], "yes", "p1"))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("pair", "fits"),
    [
        ((np.zeros((2, 2), np.uint8), 1), True),
        (([[0, 255.0], [1, "7"]], 1.0), True),
        ((np.zeros((2, 2), object), "2"), True),
        ((np.zeros((2, 3)), 1), False),
        (([[0, 1], [2]], 1), False),
        (([[0, 1], [2, None]], 1), False),
        (([[0, 1], [2, 0.5]], 1), False),
        (([[0, 1], [2, 256]], 1), False),
        (([[0, 1], [2, math.nan]], 1), False),
        ((np.zeros((2, 2)), 3), False),
        ((np.zeros((2, 2)), -1), False),
        ((np.zeros((2, 2)), 0.5), False),
        ((np.zeros((2, 2)), None), False),
        ((np.zeros((2, 2)),), False),
        (None, False),
        ((object(), 1), False),
    ],
)
def test_an_array_fits_by_itself_or_not(pair, fits):
    if fits:
        record = IMAGES.read(pair)
        assert (record.inputs.dtype, record.inputs.shape, record.label.dtype) == (np.uint8, (2, 2), np.int64)
    else:
        with pytest.raises(InvalidRecordError):
            IMAGES.read(pair)


def test_several_inputs_and_sequences_keep_their_names_and_kinds():
    schema = Schema(
        inputs=(
            Part(name="ids", kind="sequence", length=4, vocabulary=9, padding=0),
            Part(name="mask", kind="yes/no", shape=(4,)),
        ),
        label=Label(bounds=(0, 10)),
    )
    record = schema.read({"ids": [8, 1], "mask": [1, 1, 0, 0], "label": 2})
    assert record.inputs["ids"].tolist() == [8, 1, 0, 0]
    assert record.inputs["mask"].tolist() == [True, True, False, False]
    assert (float(record.label), record.label.dtype) == (2.0, np.float32)
    for outside, bound in ((11, 10.0), (-3, 0.0), (1e300, 10.0)):
        assert float(schema.read({"ids": [8], "mask": [1] * 4, "label": outside}).label) == bound
    for wrong in ({"ids": [9]}, {"ids": [1] * 5}, {"ids": [0.5]}, {"mask": [1]}, {"label": "x"}, {"label": math.inf}):
        with pytest.raises(InvalidRecordError):
            schema.read({"ids": [1], "mask": [1, 1, 0, 0], "label": 2, **wrong})


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=9)))
def test_any_cell_anywhere_fits_or_does_not_and_nothing_else_happens(cell):
    for name in ROW:
        try:
            inputs = read(**{name: cell}).inputs
        except InvalidRecordError:
            continue
        assert np.isfinite(inputs).all()
        assert np.linalg.norm(inputs) <= TABLE.norm_bound * (1 + 1e-6)
    for pair in ((cell, 1), (np.zeros((2, 2)), cell), ([[cell, 1], [2, 3]], 1), cell):
        try:
            IMAGES.read(pair)
        except InvalidRecordError:
            continue


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"columns": {"a": {"kind": "number"}}}, "Expected bounds of a number"),
        ({"columns": {"a": {"kind": "number", "bounds": [1, 0]}}}, r"Expected bounds \[lowest, highest\]"),
        ({"columns": {"a": {"kind": "category"}}}, "Expected values of a category"),
        ({"columns": {"a": {"kind": "category", "values": ["other"]}}}, "none of them 'other'"),
        ({"columns": {"a": {"kind": "number", "bounds": [0, 1], "missing": "x"}}}, "Expected missing to be a value"),
        ({"columns": {"a": {"kind": "numbre", "bounds": [0, 1]}}}, "kind"),
        ({"colums": {"a": {}}}, "Expected no key 'colums' in a schema"),
        ({}, "Expected columns or inputs"),
        ({"inputs": [{"kind": "sequence", "length": 3}]}, "Expected length and vocabulary"),
        ({"inputs": [{"shape": [-1]}]}, "sizes >= 0"),
        ({"inputs": [{}], "label": {}}, "Expected a label with classes or with bounds"),
        ({"inputs": [{}], "label": {"classes": ["1", 1]}}, "at least two classes, all different"),
        ({"columns": {"y": {"kind": "yes/no"}}}, "label and owner to be no columns"),
        ({"columns": {"a": {"kind": "yes/no"}}, "label": {"classes": 2}}, "the name of the label's column"),
        *(({"inputs": [{}], "norm": norm}, "Expected norm > 0 and finite") for norm in (0, -1.0, math.inf, math.nan)),
        ({"inputs": [{"kind": "byte"}], "norm": 1.0}, "Expected norm for columns or inputs of kind 'number' alone"),
        *(
            ({"inputs": [{}], "label": {"classes": 2, "majority": share}}, "majority, the most frequent class's share")
            for share in (0.4, 1.0, -1.0, math.nan)
        ),
        *(
            ({"inputs": [{}], "label": {"classes": 2, "class_weights": weights}}, "class_weights, a positive number")
            for weights in ([1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan], [1.0, 1.0, 1.0])
        ),
        ({"inputs": [{}], "label": {"bounds": [0, 1], "class_weights": [1.0]}}, "class_weights, a positive number"),
        (
            {"inputs": [{}], "label": {"bounds": [0, 1], "majority": 0.5}},
            "Expected a label with|of two classes or more",
        ),
    ],
)
def test_a_schema_that_cannot_be_is_refused_in_one_line(said, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        Schema(**{"label": {"column": "y", "classes": 2}, **said})
    assert "\n" not in str(caught.value)


def test_the_digest_is_of_what_a_record_is_and_of_nothing_else():
    changed = [
        TABLE.model_copy(update={"owner": ""}),
        TABLE.model_copy(update={"label": Label(column="ill", classes=("yes", "no"))}),
        TABLE.model_copy(update={"columns": dict(reversed(TABLE.columns.items()))}),
    ]
    assert len({TABLE.digest, *(Schema(**one.model_dump()).digest for one in changed)}) == 4
    unread = {"reviewed": True, "separator": ";", "label": Label(column="ill", classes=("no", "yes"), majority=0.9)}
    assert Schema(**{**TABLE.model_dump(), **unread}).digest == TABLE.digest
    assert Schema(**{**TABLE.model_dump(), "norm": 1.0}).digest != TABLE.digest
    weighted = Label(column="ill", classes=("no", "yes"), class_weights=(1, 3))
    assert Schema(**{**TABLE.model_dump(), "label": weighted}).digest != TABLE.digest, "all clients have the same"


def test_inputs_longer_than_the_declared_norm_are_scaled_down_to_it_together():
    for norm in (0.5, 1.0, 50.0):
        cut = Schema(**{**TABLE.model_dump(), "norm": norm})
        whole, found = read().inputs, cut.read(ROW).inputs
        np.testing.assert_allclose(found, whole * min(1.0, norm / np.linalg.norm(whole)), rtol=1e-6)
        assert (cut.norm_bound, found.dtype) == (min(norm, 2.0), np.float32)
    pair = Schema(inputs=(Part(shape=(1,)), Part(shape=(2,))), label=Label(classes=2), norm=5.0)
    assert [part.tolist() for part in pair.read((([6.0], [8.0, 0.0]), 1)).inputs] == [[3.0], [4.0, 0.0]]
    assert [part.tolist() for part in pair.read((([0.0], [3.0, 4.0]), 1)).inputs] == [[0.0], [3.0, 4.0]]
    assert np.linalg.norm(np.concatenate(pair.read((([3e38], [3e38, -3e38]), 1)).inputs)) == pytest.approx(5.0)


DECLARED = Schema(
    columns=TABLE.columns,
    label=Label(column="ill", classes=("no", "yes"), majority=0.75, class_weights=(1.0, 2.5)),
    owner="who",
    norm=1.5,
)


@pytest.mark.parametrize("schema", [TABLE, IMAGES, DECLARED])
def test_a_schema_is_what_its_file_says(schema, tmp_path):
    (tmp_path / "schema.toml").write_text(document(schema, ["A draft."]))
    again = Schema.read_file(tmp_path / "schema.toml")
    assert again == schema
    assert again.digest == schema.digest


def test_a_file_that_is_no_schema_says_what_drafts_one(tmp_path):
    (tmp_path / "schema.toml").write_text("a = [")
    for path in (tmp_path / "schema.toml", tmp_path / "none.toml"):
        with raises(ConfigurationError, "unreadable", "schema", match="murmurfl schema"):
            Schema.read_file(path)


def test_real_nodes_take_reviewed_complete_schemas_only():
    with raises(ConfigurationError, "missing", "reviewed"):
        TABLE.check_for_real_nodes()
    Schema(**{**TABLE.model_dump(), "reviewed": True}).check_for_real_nodes()
    open_ended = Schema(inputs=(Part(shape=(2,)),), label=Label(classes=2), reviewed=True)
    unlabelled = Schema(inputs=(Part(shape=(2,), bounds=(0.0, 1.0)),), label=Label(kind="number"), reviewed=True)
    for schema in (open_ended, unlabelled):
        with raises(ConfigurationError, "missing", "schema"):
            schema.check_for_real_nodes()


@pytest.mark.parametrize("schema", [TABLE, IMAGES])
def test_made_up_records_fit_and_reach_every_class_and_every_bound(schema):
    random = np.random.Generator(np.random.Philox(key=3))
    read = [schema.read(item) for item in [*schema.made_up(12, random), *schema.outliers()]]
    assert {int(record.label) for record in read} == set(range(schema.num_classes))
    values = np.stack([record.inputs.astype(float) for record in read])
    low, high = (-1, 1) if schema is TABLE else (0, 255)
    assert (values.min(), values.max()) == (low, high)
    assert all(len(inputs) == len(label) == 1 for inputs, label in schema.examples())


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (1, "1"),
        (1.0, "1"),
        ("1.0", "1"),
        ("001", "001"),
        (12345678901234567, "12345678901234567"),
        ("12345678901234567", "12345678901234567"),
        (True, "True"),
        (b"a", "a"),
        (0.5, "0.5"),
        (None, ""),
        (float("nan"), "nan"),
    ],
)
def test_names_are_texts_and_one_is_one(cell, text):
    assert text_of(cell) == text


def test_what_is_missing():
    import pandas

    assert all(map(is_missing, (None, math.nan, np.float32("nan"), "", " NA ", "?", pandas.NA, pandas.NaT)))
    assert not any(map(is_missing, (0, "0", False, math.inf, "none of them", np.zeros(2))))


def write(path: Path, rows, names=("age", "sex", "note", "rare", "score", "ill")):
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def people(count=200):
    for i in range(count):
        sex = "" if i == 3 else "mf"[i % 2]
        rare = "seldom" if i < 5 else ("often", "mostly")[i % 2]
        yield ("" if i == 7 else 20 + i % 63, sex, f"text {i}", rare, i / 100, ("no", "yes")[i % 3 == 0])


def test_a_draft_has_rounded_bounds_and_no_rare_categories_and_is_not_reviewed(tmp_path):
    schema = drafted(write(tmp_path / "people.csv", people()))
    assert not schema.reviewed
    assert list(schema.columns) == ["age", "sex", "rare", "score"], "a free text teaches nothing"
    assert schema.columns["age"] == Column(kind="integer", bounds=(20, 100), missing=49)
    assert schema.columns["sex"].values == ("f", "m")
    assert schema.columns["rare"].values == ("mostly", "often"), "five records are too few to be named"
    assert schema.columns["score"].bounds == (0, 2)
    assert schema.label == Label(column="ill", classes=("no", "yes"))
    assert "text 1" not in document(schema)
    with raises(ConfigurationError, "unknown-name", match=r"Expected a column 'il' once.*age, sex"):
        drafted(tmp_path / "people.csv", label="il")


def test_a_draft_of_another_separator_owner_and_a_number_to_predict(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("who;x;y\n" + "".join(f"p{i % 9};{i};{i * 0.37}\n" for i in range(100)))
    schema = drafted(path, owner="who")
    assert (schema.separator, schema.owner, list(schema.columns)) == (";", "who", ["x"])
    assert schema.label == Label(column="y", bounds=(0, 40))


def test_decimal_commas_are_drafted_and_read_cell_by_cell(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("size;rent\n" + "".join(f"{i // 2},{5 * (i % 2)};{i},5\n" for i in range(100)))
    schema = drafted(path)
    assert schema.decimal == ","
    assert schema.columns["size"] == Column(kind="number", bounds=(0, 60), missing=24.8)
    assert float(schema.read({"size": "15,0", "rent": "7,5"}).inputs[0]) == pytest.approx(-0.5)
    assert schema.columns["size"].is_missing("1.012,5") is False
    missing = schema.read({"size": "", "rent": "7,5"}).inputs
    assert schema.read({"size": "1.012,5", "rent": "7,5"}).inputs == missing, "no number of this column"
    assert Schema(**{**dict(schema), "decimal": "."}).digest == schema.digest, "how a file is written is nobody else's"
    assert 'decimal = ","' in document(schema)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([f"20{i % 25:02d}-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(700)], "dates: write them as numbers"),
        ([f"P-{i}" for i in range(700)], "a name of its own in each row"),
        ([f"seen by {i % 100}" for i in range(700)], "free text"),
    ],
)
def test_a_draft_says_why_it_leaves_a_column_out(tmp_path, cells, reason):
    path = tmp_path / "p.csv"
    path.write_text("x,given,y\n" + "".join(f'{i % 9},"{cell}",{i % 2}\n' for i, cell in enumerate(cells)))
    assert draft(path).left_out == {reason: ["given"]}


def test_a_word_for_missing_is_none_of_the_numbers_and_a_category(tmp_path):
    path, words = tmp_path / "p.csv", ["unknown", ".", "-", "UNK"]
    rows = [(words[i // 2 % 4] if i % 2 else str(i), ["unknown", "a", "b", ""][i % 4], i % 2) for i in range(200)]
    path.write_text("x,kind,y\n" + "".join(f"{x},{kind},{y}\n" for x, kind, y in rows))
    found = draft(path).schema
    assert found.columns == {
        "x": Column(kind="integer", bounds=(0, 200), missing=99),
        "kind": Column(kind="category", values=("a", "b", "unknown")),
    }
    assert found.columns["kind"].encode("unknown") == [0, 0, 1, 0]
    assert found.columns["kind"].encode("") == [0, 0, 0, 1]


def test_plus_and_minus_are_names(tmp_path):
    """As in a laboratory's results, though a minus alone is a blank among numbers."""
    path = tmp_path / "p.csv"
    path.write_text("rh,y\n" + "".join(f"{'+-'[i % 2]},{'-+'[i // 2 % 2]}\n" for i in range(100)))
    found = draft(path).schema
    assert found.columns["rh"] == Column(kind="category", values=("+", "-"))
    assert found.label.classes == ("+", "-")
    assert [int(found.read({"rh": "-", "y": sign}).label) for sign in "+-"] == [0, 1]


@pytest.mark.parametrize(("word", "classes"), [("None", ("None", "mild")), ("NA", None)])
def test_a_frequent_word_for_nothing_is_a_class(tmp_path, word, classes):
    """Of a severity none is a class, and NA is R's blank."""
    path = tmp_path / "p.csv"
    path.write_text("x,y\n" + "".join(f"{i},{'mild' if i % 3 else word}\n" for i in range(300)))
    if classes is None:
        with raises(ConfigurationError, "wrong-type", "label", match="got 'mild' alone"):
            draft(path)
        return
    found = draft(path)
    assert (found.schema.label.classes, found.label_notes) == (classes, [])
    assert int(found.schema.read({"x": "3", "y": "none"}).label) == 0


def test_a_class_that_is_too_rare_is_named_to_whoever_has_the_rows(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("x,y\n" + "".join(f"{i % 9},{'huge' if i % 99 == 0 else i % 2}\n" for i in range(1000)))
    found = draft(path)
    assert found.schema.label.classes == ("0", "1")
    assert found.label_notes == ["too rare to be a class: 'huge' (11)"]
    assert "huge" not in document(found.schema)


def test_a_file_without_names_of_columns_is_refused(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("".join(f"{i / 7},{i % 2}\n" for i in range(3, 100)))
    with raises(ConfigurationError, "malformed", "header"):
        drafted(path)


def test_a_few_far_labels_do_not_settle_the_bounds(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("x,y\n" + "".join(f"{i % 7},{(i % 40) + 0.5 if i % 90 else 70_000}\n" for i in range(900)))
    assert drafted(path).label.bounds == (0, 40)


def test_a_class_is_read_in_upper_and_lower_case_where_no_other_is_like_it():
    label = Label(column="y", classes=("No", "yes", "YES"))
    assert [int(label.encode(cell)) for cell in ("no", "NO", "yes", "YES")] == [0, 0, 1, 2]
    with pytest.raises(InvalidRecordError):
        label.encode("Yes")


def test_arrays_are_drafted_by_their_kind(tmp_path):
    np.savez(tmp_path / "a.npz", features=np.arange(80).reshape(20, 2, 2) / 10, labels=np.arange(20) % 4)
    schema = drafted(tmp_path / "a.npz")
    assert (schema.inputs, schema.label) == ((Part(shape=(2, 2), bounds=(0, 8)),), Label(classes=4))


@pytest.mark.parametrize(
    ("items", "part", "label"),
    [
        ([(np.zeros(3), 1), (np.ones(3), 0)], Part(shape=(3,)), Label(kind="integer", bounds=(0, 1))),
        ([([1, 2], 0.5)], Part(kind="integer", shape=(2,)), Label(kind="number")),
        (
            [{"img": np.zeros((2, 2), np.uint8), "label": "b"}, {"img": 0, "label": "a"}],
            None,
            Label(classes=("a", "b")),
        ),
        ([(np.zeros(3), [0.0, 1.0])], Part(shape=(3,)), Label(kind="number", shape=(2,))),
    ],
)
def test_a_simulation_infers_what_its_records_seem_to_be(items, part, label):
    schema = inferred(items)
    assert schema.label == label
    assert part is None or schema.inputs == (part,)
