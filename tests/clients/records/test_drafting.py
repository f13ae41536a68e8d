"""A draft names what a column is and what is lost of it, and reads each record without any other."""

import numpy as np
import pytest
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records.client_records import Records, file_items, table_rows
from murmurfl.clients.records.drafting import document, draft, draft_of_rows
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import InvalidRecordError

from tests.harness.errors import raises

ROWS = 1000


def drafted(cells, name="x", label=None, **options):
    """Draft a table of one column next to a feature, and two classes."""
    rows = [
        {name: cell, "beside": number % 7, "y": number % 2 if label is None else label[number]}
        for number, cell in enumerate(cells)
    ]
    return draft_of_rows(table_rows(rows), "the table", label="y", **options)


def column_of(found, name="x"):
    return next(one for one in found.columns if one.name == name)


def values(seed=1, low=18, high=90, count=ROWS):
    return [str(one) for one in np.random.default_rng(seed).integers(low, high, count)]


def test_texts_among_numbers_become_missing_and_are_counted():
    cells = values()
    cells[::50] = ["> 89"] * 20
    one = column_of(drafted(cells))
    assert one.column.kind == "integer"
    assert (one.lost, one.num_lost) == ("read as missing: 20 that are no such numbers", 20)
    assert one.column.encode("> 89") == one.column.encode("") == one.column.encode(one.column.missing)


def test_codes_words_and_clipped_cells_are_counted_by_column():
    cells = values()
    cells[:30], cells[30:35], cells[35:37] = ["-9"] * 30, ["old"] * 5, ["100000"] * 2
    one = column_of(drafted(cells))
    low, high = one.column.bounds
    assert (
        one.lost == f"read as missing: 30 with -9, 5 that are no such numbers; clipped: 2 outside {low:g} to {high:g}"
    )
    assert one.num_lost == 35 == sum(one.column.lost(cell) == "missing" or cell == "-9" for cell in cells)
    assert "cells read as missing or as other: x 35" in drafted(cells).notes_on_used


def test_a_warning_that_several_columns_have_stands_once():
    rows = [{"a": cell, "b": cell, "y": n % 2} for n, cell in enumerate([*values()[:900], *["-9"] * 100])]
    notes = draft_of_rows(table_rows(rows), "the table", label="y").notes
    assert [note.partition(" is read")[0] for note in notes if "-9" in note] == ["a, b: -9"]


_random = np.random.default_rng(4)
LABELS = ["yes" if one else "no" for one in _random.integers(0, 2, ROWS)]
NUMBERS = [float(one) for one in _random.normal(size=ROWS)]
OWN = list(map(str, _random.permutation(10 * ROWS)[:ROWS]))


@pytest.mark.parametrize(
    ("cells", "label", "expected"),
    [
        (LABELS, LABELS, "a copy of the label"),
        ([{"yes": "ill", "no": "well"}[one] for one in LABELS], LABELS, "a copy of the label"),
        (
            [f"{one}{number % 3}" for number, one in enumerate(LABELS)],
            LABELS,
            "each value has one label",
        ),
        (
            [own if one == "yes" else "" for own, one in zip(OWN, LABELS, strict=True)],
            LABELS,
            "only rows of one label have a value",
        ),
        (
            [str(float(own) + (1e6 + 0.25 if one == "yes" else 0)) for own, one in zip(OWN, LABELS, strict=True)],
            LABELS,
            "its numbers separate the classes",
        ),
        ([str(3.7 * one + 20) for one in NUMBERS], NUMBERS, "the label in another unit"),
        (NUMBERS, NUMBERS, "a copy of the label"),
    ],
)
@pytest.mark.parametrize("order", ["as they come", "sorted by the label"])
def test_a_column_that_tells_the_label_is_named_first(cells, label, expected, order):
    if order == "sorted by the label":
        label, cells = zip(*sorted(zip(label, cells, strict=True)), strict=True)
    found = drafted(list(cells), label=list(label))
    (first, *_) = column_of(found).warnings
    assert first.startswith(expected)
    assert found.notes[len(found.warnings)] == f"x: {first}"
    assert column_of(found).column is not None, "a person decides"


@pytest.mark.parametrize(
    ("cells", "label"),
    [
        (
            [*["ill" if one == "yes" else "well" for one in LABELS[:-1]], "ill" if LABELS[-1] == "no" else "well"],
            LABELS,
        ),
        (OWN, LABELS),
        (
            [own if one == "yes" or i % 9 == 0 else "" for i, (own, one) in enumerate(zip(OWN, LABELS, strict=True))],
            LABELS,
        ),
        ([str(3.7 * one + 0.01 * abs(one)) for one in NUMBERS], NUMBERS),
        (["a" if i > 6 else "b" for i in range(60)], ["no" if i > 6 else "yes" for i in range(60)]),
    ],
    ids=["but for one row", "a name of each row", "nearly always there", "not linear", "few rows of a class"],
)
def test_a_column_that_nearly_tells_the_label_is_not_named(cells, label):
    found = drafted(cells, label=label)
    assert not [note for note in found.notes if "label" in note]


def test_numbers_with_many_words_are_numbers_and_few_numbers_are_categories():
    assert (
        column_of(drafted([cell if i % 3 else "unclear" for i, cell in enumerate(values())])).column.kind == "integer"
    )
    assert column_of(drafted([["1", "2", "3+"][i % 3] for i in range(ROWS)])).column.kind == "category"


@pytest.mark.parametrize("codes", [["V45", "E812", "V58"], ["01001F", "01002F", "01003F"]])
def test_numbers_with_codes_are_categories(codes):
    random = np.random.default_rng(2)
    cells = [codes[i % 3] if i % 40 == 0 else str(random.integers(240, 280)) for i in range(ROWS)]
    assert column_of(drafted(cells)).column.kind == "category"


def test_numbers_with_leading_zeros_and_numbers_called_codes_are_categories():
    assert column_of(drafted([f"{20 * (1 + i % 9):03d}" for i in range(ROWS)])).column.values[0] == "020"
    assert column_of(drafted([str(1 + i % 9) for i in range(ROWS)], "admission_type_id"), "admission_type_id").kind == (
        "category"
    )


@pytest.mark.parametrize(
    ("code", "low", "high"),
    [("-9", 0, 4), ("-9", 18, 90), ("-200", 2, 1400), ("999", 0, 27), ("99", 1, 60), ("-1", 1, 800)],
)
def test_a_frequent_constant_far_outside_is_read_as_missing(code, low, high):
    cells = [code if i % 20 == 0 else cell for i, cell in enumerate(values(low=low, high=high))]
    one = column_of(drafted(cells))
    assert one.column.missing_codes == (float(code),)
    assert one.column.encode(code) == one.column.encode(f" {code}.00 ") == one.column.encode("NA")
    assert one.column.bounds[0] >= low - 20 * (high - low)
    assert f"{code} is read as missing" in one.warnings[0]
    assert high / 4 <= one.column.missing < high


@pytest.mark.parametrize(
    "cells",
    [
        ["0" if i % 5 else str(1000 + i) for i in range(ROWS)],  # mostly zeros
        [str(min(17 + i % 100, 90)) for i in range(ROWS)],  # ages cut off at 90
        [str(i % 5 - 2) for i in range(ROWS)],  # an ordinal scale around zero
        [str(1 + i % 7) for i in range(ROWS)],
        [str(round(np.sinh(i / 120 - 4), 3)) for i in range(ROWS)],  # heavy tails
        ["-1" if i == 5 else cell for i, cell in enumerate(values())],  # one record is no code
        ["-1", "1"] * (ROWS // 2),
    ],
)
def test_zeros_ages_scales_tails_and_single_records_are_no_codes(cells):
    assert column_of(drafted(cells)).column.missing_codes == ()


def test_a_code_of_other_columns_is_one_where_it_is_less_far_outside():
    cells = ["-200" if i % 20 == 0 else cell for i, cell in enumerate(values(low=-20, high=900))]
    assert column_of(drafted(cells)).column.missing_codes == ()
    far = ["-200" if i % 20 == 0 else cell for i, cell in enumerate(values(low=-5, high=9))]
    rows = [{"x": cell, "far": other, "y": i % 2} for i, (cell, other) in enumerate(zip(cells, far, strict=True))]
    found = draft_of_rows(table_rows(rows), "the table")
    assert [one.column.missing_codes for one in found.columns] == [(-200.0,), (-200.0,)]


def test_a_code_of_several_columns_is_one_where_it_is_rare():
    """-9 stands twice in the last column, which is too seldom for a column alone."""
    often = ["-9" if i % 10 == 0 else str(i % 4) for i in range(ROWS)]
    rare = ["-9" if i < 2 else str(i % 3) for i in range(ROWS)]
    near = ["-9" if i < 2 else str(i % 100 - 8) for i in range(ROWS)]
    for first, expected in ((often, (-9.0,)), (values(), ())):
        columns = zip(often, first, rare, near, strict=True)
        rows = [{"a": a, "b": b, "rare": c, "near": d, "y": i % 2} for i, (a, b, c, d) in enumerate(columns)]
        found = {one.name: one.column for one in draft_of_rows(table_rows(rows), "the table").columns}
        assert found["rare"].missing_codes == expected
        assert found["near"].missing_codes == ()


@pytest.mark.parametrize(
    ("name", "apart", "noted"),
    [
        ("site", [], True),
        ("Hospital", [], True),
        ("clinic_id", [], True),
        ("centre", ["centre"], False),
        ("siteless", [], False),
    ],
)
def test_a_column_that_names_sites_is_noted_with_the_option(name, apart, noted):
    rows = [{name: "abc"[i % 3], "x": i % 50, "y": i % 2} for i in range(ROWS)]
    notes = draft_of_rows(table_rows(rows), "the table", apart=apart).notes
    assert any(f"--site {name}" in note for note in notes) == noted


def test_zeros_far_below_all_others_are_named_and_stay_values():
    cells = ["0" if i % 20 == 0 else cell for i, cell in enumerate(values(low=150, high=300))]
    one = column_of(drafted(cells))
    assert one.column.missing_codes == ()
    assert "0 stands in 50 rows" in one.warnings[0]


@pytest.mark.parametrize(
    ("written", "unit", "thousands"),
    [
        ("{} CC", "CC", ""),
        ("{}.5 km/kg", "km/kg", ""),
        ("${},100.50", "$", ","),
        ("{} %", "%", ""),
        ("{},234", "", ","),
        ("Rs. {}", "Rs.", ""),
        ("{} 234", "", " "),
    ],
)
def test_numbers_with_one_unit_are_numbers(written, unit, thousands):
    one = column_of(drafted([written.format(cell) for cell in values()]))
    assert (one.column.unit, one.column.thousands) == (unit, thousands)
    assert unit in one.reason
    (middle,) = one.column.encode(written.format("54"))
    assert -0.3 < middle < 0.3
    assert one.column.encode("54 stone") == one.column.encode(""), "another unit is none"


def test_a_second_unit_is_missing_and_counted():
    cells = [f"{cell} {'km/kg' if i % 100 == 0 else 'kmpl'}" for i, cell in enumerate(values())]
    one = column_of(drafted(cells))
    assert one.column.unit == "kmpl"
    assert one.num_lost == 10


def test_a_unit_is_read_with_decimal_commas_and_before_a_sign(tmp_path):
    column = Column(kind="number", bounds=(-2000, 2000), unit="€", thousands=".")
    schema = Schema(columns={"x": column}, label=Label(column="y", classes=2), decimal=",", separator=";")
    for cell in ("-1.000,0 €", "€ -1.000", "-€1000", "-1000,00€", "-1000"):
        assert schema.read({"x": cell, "y": 1}).inputs.tolist() == [-0.5]
    for cell in ("1.00.0", "1 000 $", "€", "1,000,0", "1_000", "٣€x"):
        with pytest.raises(InvalidRecordError):
            schema.read({"x": cell, "y": 1})
    assert schema.read({"x": "123,456", "y": 1}).inputs[0] == pytest.approx(123.456 / 2000)


@pytest.mark.parametrize("unit", [" CC", "5", "-", ".x"])
def test_a_unit_that_could_be_part_of_a_number_is_refused(unit):
    with pytest.raises(ValueError, match="Expected a unit"):
        Column(kind="number", bounds=(0, 1), unit=unit)


def test_codes_are_none_of_a_columns_values():
    with pytest.raises(ValueError, match="missing_codes that are none of the values"):
        Column(kind="category", values=("a", "unknown"), missing_codes=("Unknown",))
    column = Column(kind="category", values=("a", "b"), missing="b", missing_codes=("unknown", -9))
    assert [column.encode(cell) for cell in ("Unknown", "-9.0", -9, "")] == [[0.0, 1.0, 0.0]] * 4
    assert Column(kind="yes/no", missing="no", missing_codes=(-9,)).encode("-9") == [-1.0]


def test_a_label_that_is_mostly_numbers_is_a_number_and_words_are_named():
    labels = [f"{14 + i % 15 / 10:.1f}" if i % 3 else "Not Available" for i in range(ROWS)]
    found = drafted(values(), label=labels)
    assert found.schema.label.bounds == (14, 15.5)
    assert found.label_notes == ["no such numbers, so these rows are dropped: 'Not Available' (334)"]


def test_codes_of_a_label_are_no_classes_and_no_numbers():
    found = drafted(values(), label=[["0", "1", "-9", "2"][i % 4] for i in range(ROWS)])
    assert (found.schema.label.classes, found.schema.label.missing_codes) == (("0", "1", "2"), ("-9",))
    found = drafted(values(), label=["-200" if i % 20 == 0 else str(i % 99 / 10) for i in range(ROWS)])
    assert found.schema.label.missing_codes == (-200.0,)
    assert found.schema.label.bounds[0] == 0
    for cell in ("-200", -200.0, ""):
        with raises(InvalidRecordError, "invalid-record", match="a missing label"):
            found.schema.label.encode(cell)


@pytest.mark.parametrize(
    ("name", "cells", "reason"),
    [
        ("patient_id", [str(7000 + i * 37 % 409) for i in range(400)], "an id"),
        ("", [str(i) for i in range(ROWS)], "a number of its own in each row"),
        ("Unnamed: 0", [str(i) for i in range(100)], "an id"),
        ("first_name", ["Anna", "Ben", "Carl"] * 300, "names: of persons, it seems"),
        ("customer", [f"c{i}" for i in range(ROWS)], "a name of its own in each row"),
        ("key", [f"{i % 200}-x" for i in range(ROWS)], "an id"),
    ],
)
def test_identifiers_and_names_are_left_out(name, cells, reason):
    assert column_of(drafted(cells, name), name).reason == reason


def test_an_id_with_several_rows_is_named_as_a_possible_owner():
    found = drafted([str(9000 + i * i % 700) for i in range(ROWS)], "patient_nbr")
    one = column_of(found, "patient_nbr")
    assert one.column is None
    assert one.lost.endswith("values in 1,000 rows")
    assert "--owner patient_nbr" in one.warnings[0]
    assert f"patient_nbr: {one.warnings[0]}" in found.notes


@pytest.mark.parametrize(
    ("cells", "bounds", "missing"),
    [
        ([str(round(0.9 + i % 25 / 100, 2)) for i in range(ROWS)], (0.9, 1.2), 1.02),
        ([str(1950 + i % 59) for i in range(ROWS)], (1940, 2020), 1979),
        (["0" if i % 250 else "7" for i in range(ROWS)], None, None),
        (["0" if i % 40 else str(1 + i % 6) for i in range(ROWS)], (0, 6), 0),
    ],
)
def test_bounds_and_missing_values_are_rounded_against_the_range(cells, bounds, missing):
    one = column_of(drafted(cells))
    if bounds is None:
        assert one.reason == "a single value but for few rows"
        return
    assert one.column.bounds == pytest.approx(bounds)
    assert one.column.missing == pytest.approx(missing)


def written(path, lines, encoding="utf-8"):
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return path


PEOPLE = [f"{20 + i % 60},{'MF'[i % 2]},{['no', 'yes'][i % 3 == 0]}" for i in range(200)]


def test_a_file_without_a_header_is_refused_and_read_with_no_header(tmp_path):
    path = written(tmp_path / "p.csv", PEOPLE)
    with raises(ConfigurationError, "malformed", "header", match="--no-header"):
        draft(path)
    found = draft(path, header=False)
    assert found.schema.header == ("column-1", "column-2", "column-3")
    assert list(found.schema.columns) == ["column-1", "column-2"]
    records = Records(file_items(path, found.schema), found.schema)
    assert (len(records), records.fits.all()) == (200, True)
    assert file_items(path, found.schema).public_count == 200


@pytest.mark.parametrize("first", [b"1,2", b"PK\x03\x04,M,no", b"\xff\xfe,M,no", b"", b"\x00", b"40,M,no"])
def test_the_first_record_of_a_file_without_a_header_changes_no_other(first, tmp_path):
    schema = draft(written(tmp_path / "p.csv", PEOPLE), header=False).schema
    base = Records(file_items(tmp_path / "p.csv", schema), schema)
    (tmp_path / "q.csv").write_bytes(b"\n".join([first, *(line.encode() for line in PEOPLE[1:])]) + b"\n")
    strange = Records(file_items(tmp_path / "q.csv", schema), schema)
    assert len(strange) == len(base)
    for number in range(1, len(base)):
        assert strange[number : number + 1][0].tobytes() == base[number : number + 1][0].tobytes()


def test_a_header_that_stands_twice_is_a_header(tmp_path):
    path = written(tmp_path / "p.csv", ["age,sex,ill", *PEOPLE, "age,sex,ill", *PEOPLE])
    assert list(draft(path).schema.columns) == ["age", "sex"]


def test_a_table_of_r_is_read_with_its_row_names(tmp_path):
    rows = [f'"{i}" {20 + i % 60} "{"MF"[i % 2]}" "{["no", "yes"][i % 3 == 0]}"' for i in range(1, 201)]
    path = written(tmp_path / "p.csv", ['"age" "sex" "ill"', *rows])
    found = draft(path)
    assert (found.schema.separator, found.schema.row_names) == (" ", True)
    assert list(found.schema.columns) == ["age", "sex"]
    assert Records(file_items(path, found.schema), found.schema).fits.all()
    again = written(tmp_path / "schema.toml", [document(found.schema)])
    assert Schema.read_file(again) == found.schema


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_found_where_cells_have_commas(separator, tmp_path):
    lines = [separator.join(["size, m2", "kind", "y"])]
    lines += [separator.join([f"{i % 60},{i % 9}", "a, b", "01"[i % 2]]) for i in range(200)]
    found = draft(written(tmp_path / "p.csv", lines)).schema
    assert (found.separator, found.decimal) == (separator, ",")


def test_latin_1_is_read_and_named(tmp_path):
    lines = ["temp °C,ort,ill", *(f"{i % 40},{['Köln', 'Bonn'][i % 2]},{i % 3 % 2}" for i in range(200))]
    path = written(tmp_path / "p.csv", lines, "latin-1")
    found = draft(path)
    assert found.schema.encoding == "cp1252"
    assert found.schema.columns["ort"].values == ("Bonn", "Köln")
    assert "Latin-1" in found.warnings[0]
    assert Records(file_items(path, found.schema), found.schema).fits.all()


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("p.csv", "a,y\n1,2\n".encode("utf-16"), "UTF-16"),
        ("p.csv", b"PK\x03\x04rest", "an Excel workbook"),
        ("p.csv", b"\x1f\x8b\x08", "compressed"),
        ("p.xlsx", b"PK\x03\x04rest", "pandas.read_excel"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_cause(name, content, cause, tmp_path):
    (tmp_path / name).write_bytes(content)
    with raises(ConfigurationError, "malformed", "path", match=cause):
        draft(tmp_path / name)


def test_a_header_with_too_few_names_says_how_many_cells_rows_have(tmp_path):
    path = written(tmp_path / "p.csv", ["a,y", *("1,2,3,4" for _ in range(50))])
    with raises(ConfigurationError, "malformed", None, match="names 2 columns and most rows have 4 cells"):
        draft(path)


def test_copied_rows_are_named(tmp_path):
    path = written(tmp_path / "p.csv", ["age,dose,ill", *(f"{i % 60},{i / 7},{i % 2}" for i in range(200))] * 1)
    assert not draft(path).warnings
    lines = path.read_text().splitlines()
    found = draft(written(path, [*lines, *lines[1:101]]))
    assert found.warnings[0].startswith("100 rows are copies of other rows.")
    assert "score" in found.warnings[0]


@pytest.mark.parametrize("kind", ["mappings", "parquet", "npz"])
def test_copied_rows_are_named_whatever_the_table_is_kept_in(kind, tmp_path):
    def found(copied):
        rows = [(float(i), None if i % 9 == 0 else i / 7, i % 2) for i in range(200)]
        rows += rows[: 100 * copied]
        if kind == "npz":
            arrays = np.array([[age, dose or 0.0] for age, dose, _ in rows])
            np.savez(tmp_path / "p.npz", features=arrays, labels=np.array([ill for _, _, ill in rows]))
            return draft(tmp_path / "p.npz")
        named = [dict(zip(("age", "dose", "ill"), row, strict=True)) for row in rows]
        if kind == "mappings":
            return draft_of_rows(table_rows(named), "the table", label="ill")
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.DataFrame(named).to_parquet(tmp_path / "p.parquet")
        return draft(tmp_path / "p.parquet")

    assert not found(copied=False).warnings
    assert found(copied=True).warnings[0].startswith("100 rows are copies of other rows.")


STRANGE = ["", "NA", "-9", "> 89", "5 kg", "5 lb", "1,234", "1e308", "nan", "inf", "\x00", "9" * 500, "٣", "5_0", " 7 "]


@pytest.mark.parametrize(
    "kind", [{"missing": 3}, {}, {"missing": 3, "missing_codes": (-9,), "unit": "kg", "thousands": ","}]
)
def test_rows_read_together_are_those_read_alone(kind):
    """A simulation remembers texts that it has read; no row becomes another one by it."""
    columns = {
        "x": Column(kind="number", bounds=(0, 99), **kind),
        "z": Column(kind="category", values=("5 kg", "7"), missing_codes=("-9",)),
    }
    schema = Schema(columns=columns, label=Label(column="y", classes=("0", "1")))
    rows = [{"x": x, "z": z, "y": y} for x in STRANGE for z in STRANGE[::-1] for y in ("0", "1", "", "2")]
    together = Records(table_rows(rows), schema, together=True)
    inputs, labels = together[:]
    for number, row in enumerate(rows):
        try:
            alone = schema.read(row)
        except InvalidRecordError:
            assert not together.fits[number]
            continue
        assert together.fits[number]
        assert (inputs[number].tobytes(), int(labels[number])) == (alone.inputs.tobytes(), int(alone.label))
