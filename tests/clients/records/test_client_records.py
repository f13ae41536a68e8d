"""Whatever stands in one row of a file, or in one item, no other record becomes another one, and nothing is refused."""

import csv
import gzip
import io
import tracemalloc

import numpy as np
import pytest
from murmurfl.clients import Column, Label, Part, Schema, file_records
from murmurfl.clients.adapters.per_sample_gradients import check_rows_alone
from murmurfl.clients.records.client_records import Records, file_items, items_of
from murmurfl.privacy import ConfigurationError, row_bytes
from murmurfl.privacy.errors import InvalidRecordError

from tests.harness.errors import raises

COLUMNS = {
    "age": Column(kind="integer", bounds=(0, 100)),
    "dose": Column(kind="number", bounds=(0, 1), missing=0.5),
    "ward": Column(kind="category", values=("a", "b")),
}
SCHEMA = Schema(columns=COLUMNS, label=Label(column="ill", classes=2))
OWNED = Schema(columns=COLUMNS, label=Label(column="ill", classes=2), owner="who")
ARRAYS = Schema(inputs=(Part(shape=(2,), bounds=(-10, 10)),), label=Label(classes=2))
ROWS = [[20 + i, i / 10, "ab"[i % 2], i % 2, f"p{i % 4}"] for i in range(8)]
NAMES = ["age", "dose", "ward", "ill", "who"]
STRANGE = 3
"""The number of the record that is replaced."""


LINES = {
    "another row": b"33,0.3,a,1,p1",
    "label missing": b"23,0.3,b,,p3",
    "label as text": b"23,0.3,b,?,p3",
    "label out of range": b"23,0.3,b,7,p3",
    "half a label": b"23,0.3,b,0.5,p3",
    "cell missing": b",0.3,b,1,p3",
    "text": b"old,0.3,b,1,p3",
    "half a number": b"23.5,0.3,b,1,p3",
    "huge": b"1e308,-1e308,b,1,p3",
    "denormal": b"23,5e-324,b,1,p3",
    "nan": b"nan,nan,nan,nan,nan",
    "infinity": b"inf,-inf,b,1,p3",
    "unknown category": b"23,0.3,zzz,1,p3",
    "too many cells": b"23,0.3,b,1,p3,,,,,",
    "too few cells": b"23,0.3",
    "empty": b"",
    "unclosed quote": b'"23,0.3,b,1,p3',
    "quote within": b'23,"0.3"x"",b,1,p3',
    "carriage return": b'23,"0\r3",b,1,p3',
    "other line ends": "23,\u2028\x0b\x85,b,1,p3".encode(),
    "wrong encoding": b"23,\xff\xfe,b,1,p3",
    "nul": b"23,\x00,b,1,p3",
    "a megabyte": b"23,0.3," + b"b" * 2**20 + b",1,p3",
    "no owner": b"23,0.3,b,1,",
    "long owner": b"23,0.3,b,1,12345678901234567",
    "byte order mark": b"\xef\xbb\xbf23,0.3,b,1,p3",
}


def written(path, line=None):
    lines = [",".join(map(str, row)).encode() for row in ROWS]
    if line is not None:
        lines[STRANGE] = line
    content = b"\n".join([",".join(NAMES).encode(), *lines]) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def others_of(records, base):
    """Refuse that a record beside the strange one is not to the last bit what it was."""
    assert len(records) == len(base) == len(ROWS)
    for number in range(len(ROWS)):
        if number == STRANGE:
            continue
        assert records.fits[number] == base.fits[number]
        (inputs, label), (before, label_before) = records[number : number + 1], base[number : number + 1]
        assert inputs.tobytes() == before.tobytes()
        assert (inputs.dtype, label.dtype, int(label[0])) == (before.dtype, label_before.dtype, int(label_before[0]))
        assert row_bytes(records)(number) == row_bytes(base)(number)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_file_changes_no_other_record(line, name, tmp_path):
    base = Records(file_items(written(tmp_path / name), SCHEMA), SCHEMA, count=len(ROWS))
    assert base.fits.all()
    strange = Records(file_items(written(tmp_path / name, LINES[line]), SCHEMA), SCHEMA, count=len(ROWS))
    others_of(strange, base)
    fits = line in (
        *("another row", "huge", "denormal", "unknown category", "other line ends", "nul", "no owner", "long owner"),
        "carriage return",  # a text in a column of numbers counts as missing
    )
    assert strange.fits[STRANGE] == fits
    if not fits:
        with pytest.raises(InvalidRecordError):
            strange[STRANGE : STRANGE + 1]


def traced(made):
    """The most memory that something takes while it is made."""
    tracemalloc.start()
    made()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("column", NAMES)
def test_a_long_cell_takes_memory_of_its_own_alone(column, name, tmp_path):
    """65,000 characters are as long as a name may be; an array of names as wide as that would take 130 MB here."""
    rows, long = [dict(zip(NAMES, row, strict=True)) for row in ROWS * 64], "x" * 65_000
    peaks = []
    for cell in (rows[STRANGE][column], long):
        rows[STRANGE] = {**rows[STRANGE], column: cell}
        lines = [",".join(NAMES), *(",".join(map(str, row.values())) for row in rows)]
        content = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

        def read():
            records = Records(file_items(tmp_path / name, OWNED), OWNED, together=True)
            assert len(records.by_owner(3, places=9, secret=bytes(16)).owners.rows) == len(rows)

        peaks.append(traced(read))
    assert peaks[1] - peaks[0] < 20 * 65_000
    assert peaks[1] < 20 * 65_000 + 2_000 * len(rows)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("behind", [b"", b"\n", b"\n23,0.3,b,1,p3\n"], ids=["the last", "with an end", "before others"])
def test_a_line_of_many_megabytes_is_one_record_that_does_not_fit(name, behind, tmp_path):
    before = b"\n".join([",".join(NAMES).encode(), b"22,0.2,a,0,p2", b"23,0.3,b,1,"])
    content = before + b"9" * (40 << 20) + behind
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    found = []
    assert traced(lambda: found.append(Records(file_items(path, OWNED), OWNED))) < 8 << 20
    assert found[0].fits.tolist() == [True, False, *[True] * (len(behind) > 1)]
    assert found[0].reasons == {"a line that is too long": 1}


def test_a_line_may_be_long_where_the_header_is(tmp_path):
    path, many = tmp_path / "rows.csv", 2**14
    header = ",".join([*NAMES, *(f"more{i}" for i in range(many))])
    row = "23,0.3,b,1,p3" + f",0{' ' * (16 * len(header) // many - 3)}" * many
    for length, reasons in ((16 * len(header), {}), (16 * len(header) + 1, {"a line that is too long": 1})):
        path.write_text(f"{header}\n{row}{' ' * (length - len(row))}\n")
        assert Records(file_items(path, OWNED), OWNED).reasons == reasons


def test_texts_of_a_record_that_is_handed_over_are_no_wider_than_they_are():
    """One text among a thousand numbers: in an array of texts each would have as many characters."""
    cells = [1.0] * 1_000
    long = Schema(
        columns={f"x{i}": Column(kind="category", values=("1",)) for i in range(1_000)},
        label=Label(column="y", classes=2),
    )
    assert (
        traced(lambda: long.read(([*cells[1:], "x" * 65_000], 1))) - traced(lambda: long.read((cells, 1))) < 4 * 65_000
    )
    names = Schema(columns={"x": Column(kind="category", values=("a",))}, label=Label(column="y", classes=2))
    assert names.read((["a\0"], "1")).inputs.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("line", ["another row", "huge", "text", "nan"])
def test_a_declared_norm_cuts_every_record_by_itself(line, tmp_path):
    short = Schema(columns=COLUMNS, label=SCHEMA.label, norm=0.5)
    base, strange = (
        Records(file_items(written(tmp_path / "a.csv", one), short), short, count=len(ROWS))
        for one in (None, LINES[line])
    )
    others_of(strange, base)
    rows = np.concatenate([records[i : i + 1][0] for records in (base, strange) for i in range(8) if records.fits[i]])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 0.5, rtol=1e-6)  # a category alone has norm 1


def test_a_norm_of_all_records_is_caught(tmp_path):
    """The planted bug: records are scaled down by the longest of them."""

    class BatchedContribution(Records):
        def __getitem__(self, chosen):
            rows, labels = super().__getitem__(chosen)
            found = np.concatenate(
                [super(BatchedContribution, self).__getitem__(slice(i, i + 1))[0] for i in range(len(ROWS))]
            )
            return rows / np.linalg.norm(found, axis=1).max(), labels

    base, strange = (
        BatchedContribution(file_items(written(tmp_path / "a.csv", one), SCHEMA), SCHEMA, count=len(ROWS))
        for one in (None, LINES["huge"])
    )
    with pytest.raises(AssertionError):
        others_of(strange, base)


def test_a_reader_of_the_whole_file_is_caught(tmp_path):
    """The planted bug: quotes are read before lines are split, and a column has one type."""

    class Whole:
        def __init__(self, path):
            text = path.read_text(encoding="utf-8", errors="replace")
            self.rows = list(csv.DictReader(io.StringIO(text)))

        def __len__(self):
            return len(ROWS)

        def __getitem__(self, number):
            return self.rows[number]

    base = Records(Whole(written(tmp_path / "a.csv")), SCHEMA, count=len(ROWS))
    with pytest.raises(AssertionError):
        others_of(Records(Whole(written(tmp_path / "b.csv", LINES["unclosed quote"])), SCHEMA, count=len(ROWS)), base)


def test_a_quoted_line_break_makes_two_rows(tmp_path):
    path = written(tmp_path / "a.csv", b'23,"0.\n3",b,1,p3')
    records = Records(file_items(path, SCHEMA), SCHEMA, count=len(ROWS))
    assert len(records) == len(ROWS)
    assert records.fits.tolist() == [True, True, True, False, False, True, True, True]
    assert "Rows behind them are left out: 1." in records.report()
    longer = Records(file_items(path, SCHEMA), SCHEMA, count=12)
    assert (len(longer), longer.fits.sum()) == (12, 7)
    assert "3 with no record there" in longer.report()


VALUES = [None, "", "?", "old", 23.5, 1e308, 5e-324, float("nan"), float("inf"), 2**60, True, b"x", [1, 2], "x" * 2**20]


def frame(**cells):
    pandas = pytest.importorskip("pandas")
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(NAMES)}
    for name, cell in cells.items():
        columns[name][STRANGE] = cell
    return pandas.DataFrame(columns)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("name", NAMES[:4])
def test_a_cell_of_a_table_changes_no_other_record_whatever_type_its_column_becomes(name, value):
    base = Records(items_of(frame()), SCHEMA, count=len(ROWS))
    others_of(Records(items_of(frame(**{name: value})), SCHEMA, count=len(ROWS)), base)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("value", [None, "?", 23.5, float("nan"), float("inf"), 1e308])
@pytest.mark.parametrize("name", NAMES[:4])
def test_a_cell_of_a_parquet_file_changes_no_other_record(name, value, tmp_path):
    pytest.importorskip("pyarrow")

    def parquet(table, file):
        if isinstance(value, str) or name == "ward":
            table[name] = table[name].map(str)  # a column of one type, as the format has it
        table.to_parquet(tmp_path / file)
        return Records(file_items(tmp_path / file, SCHEMA), SCHEMA, count=len(ROWS))

    others_of(parquet(frame(**{name: value}), "b.parquet"), parquet(frame(), "a.parquet"))


def test_a_folder_of_parquet_files_is_refused_for_its_parts_names_share_a_type(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    for ward in ("01", "02"):
        (tmp_path / "a.parquet" / f"ward={ward}").mkdir(parents=True)
        pd.DataFrame({"age": [30.0], "ill": [1]}).to_parquet(tmp_path / "a.parquet" / f"ward={ward}" / "part.parquet")
    with raises(ConfigurationError, "unreadable", match="Expected a Parquet file"):
        file_items(tmp_path / "a.parquet", SCHEMA)


def test_an_owner_that_is_missing_changes_no_other_owner_of_a_parquet_file(tmp_path):
    table = frame()
    table["who"] = [12345678901234567 + i % 4 for i in range(len(ROWS))]
    table.to_parquet(tmp_path / "a.parquet")
    table["who"] = table["who"].astype("Int64")
    table.loc[STRANGE, "who"] = None
    table.to_parquet(tmp_path / "b.parquet")
    names = [
        [OWNED.owner_of(items[i]) for i in range(len(ROWS))]
        for items in (file_items(tmp_path / file, OWNED) for file in ("a.parquet", "b.parquet"))
    ]
    assert names[0][0] == "12345678901234567"
    assert names[1][STRANGE] == ""
    assert [n for i, n in enumerate(names[0]) if i != STRANGE] == [n for i, n in enumerate(names[1]) if i != STRANGE]


def pairs(value=None, *, of="inputs"):
    """Items as a project has them in memory."""
    items = [([float(i), i / 7], i % 2) for i in range(len(ROWS))]
    if value is not None:
        inputs, label = items[STRANGE]
        items[STRANGE] = ([value, 0.1], label) if of == "inputs" else (inputs, value)
    return items


def arrays(items):
    """As NumPy makes columns of them: one cell settles the type of all."""
    return tuple(np.asarray(column) for column in zip(*items, strict=True))


def objects(items):
    made = np.empty((len(items), 2), dtype=object)
    for i, (inputs, _) in enumerate(items):
        made[i, 0], made[i, 1] = inputs
    return made, np.array([label for _, label in items], dtype=object)


def dataset(items):
    torch = pytest.importorskip("torch")

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return len(items)

        def __getitem__(self, number):
            return items[number]

    return Items()


def loader(items):
    torch = pytest.importorskip("torch")

    def alone(batch):
        if len(batch) != 1:
            raise AssertionError("two records were seen together")
        return tuple([part] for part in batch[0])

    return torch.utils.data.DataLoader(dataset(items), batch_size=4, shuffle=True, collate_fn=alone)


def hugging(items):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"x": list(map(float, x)), "label": float(y)} for x, y in items])


SOURCES = {"arrays": arrays, "objects": objects, "list": list, "Dataset": dataset, "DataLoader": loader}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("value", ["old", None, 0.5, 1e308, 5e-324, float("nan"), float("inf"), 7], ids=str)
@pytest.mark.parametrize("of", ["inputs", "label"])
@pytest.mark.parametrize("source", [*SOURCES, "datasets"])
def test_an_item_changes_no_other_record_whatever_hands_it_over(source, of, value):
    made = {**SOURCES, "datasets": hugging}[source]
    if source == "datasets" and not isinstance(value, float | int):
        pytest.skip("its columns have one type")
    base, strange = (pairs(), pairs(value if value is not None else np.nan, of=of))
    if value is None and source in ("list", "Dataset", "DataLoader", "objects"):
        inputs, label = strange[STRANGE]
        strange[STRANGE] = ([None, 0.1], label) if of == "inputs" else (inputs, None)
    kept = Records(items_of(made(base)), ARRAYS, count=len(ROWS))
    others_of(Records(items_of(made(strange)), ARRAYS, count=len(ROWS)), kept)


WRONG = {
    "longer": np.zeros(3),
    "wider": np.zeros((2, 1)),
    "ragged": [[1.0], [1.0, 2.0]],
    "an object": object(),
    "a text": "text",
    "a mapping": {},
    "nothing": (),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_item_of_another_shape_changes_no_other_record(wrong):
    items = pairs()
    items[STRANGE] = (wrong, 1)
    base = Records(items_of(pairs()), ARRAYS, count=len(ROWS))
    strange = Records(items_of(items), ARRAYS, count=len(ROWS))
    others_of(strange, base)
    assert not strange.fits[STRANGE]


@pytest.mark.parametrize("raised", [ValueError, KeyError, SystemExit, MemoryError])
def test_an_item_that_cannot_be_read_counts_as_zero(raised, caplog):
    class Broken(list):
        def __getitem__(self, number):
            if number == STRANGE:
                raise raised("patient 4711")
            return super().__getitem__(number)

    base = Records(items_of(pairs()), ARRAYS, count=len(ROWS))
    others_of(Records(items_of(Broken(pairs())), ARRAYS, count=len(ROWS)), base)
    assert all(line.of_data for line in caplog.records), "the operator's own log alone, among what depends on data"


def test_a_simulation_marks_and_replaces_unfit_records():
    items = pairs("old")
    records = Records(items_of(items), ARRAYS, together=True)
    inputs, labels = records[0 : len(ROWS)]
    assert (inputs.shape, labels.shape) == ((8, 2), (8,))
    assert np.isfinite(inputs).all()
    assert records.fits.sum() == 7
    assert "7 of 8 records fit" in records.report()


def test_records_too_many_to_keep_are_read_again(monkeypatch):
    from murmurfl.clients.records import client_records as module

    kept = Records(items_of(pairs("old")), ARRAYS, count=len(ROWS))
    monkeypatch.setattr(module, "_MOST_KEPT", 8)
    read_again = Records(items_of(pairs("old")), ARRAYS, count=len(ROWS))
    assert read_again._kept is None
    others_of(read_again, kept)
    with pytest.raises(InvalidRecordError):
        read_again[STRANGE : STRANGE + 1]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", None, "Expected a CSV file"),
        ("a.csv", b"", "missing or twice"),
        ("a.csv", b"age,dose,ward\n1,2,a\n", "ill missing or twice"),
        ("a.csv", b"age,dose,ward,ill,age\n1,2,a,1,2\n", "age missing or twice"),
        ("a.csv", b'"age,dose\n', "names of columns in the first line"),
        ("a.csv.gz", b"no gzip", "Expected a CSV file"),
        ("a.parquet", b"no parquet", "Expected a Parquet file"),
        ("a.npz", b"no npz", "Expected an .npz"),
        ("a.xlsx", b"", "ends in .csv, .csv.gz, .parquet or .npz"),
    ],
)
def test_a_file_that_is_none_of_records_is_refused(name, content, complaint, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=complaint):
        Records(file_items(tmp_path / name, SCHEMA), SCHEMA)


def test_a_table_without_a_column_of_the_schema_is_refused_by_its_name():
    with raises(ConfigurationError, "mismatch", "columns", match="got dose missing or twice"):
        Records(items_of(frame().drop(columns="dose")), SCHEMA)
    with raises(ConfigurationError, "wrong-type", "schema"):
        Records(items_of(frame()), ARRAYS)


ONE_NUMBER = Schema(columns={"x": Column(kind="number", bounds=(0, 10))}, label=Label(column="y", classes=2))
OWNED_NUMBER = Schema(**{**ONE_NUMBER.model_dump(), "owner": "who"})


def written_cells(path, cells):
    path.write_text("x,y,who\n" + "".join(f"{cell},{i % 2},{who}\n" for i, (cell, who) in enumerate(cells)))
    return path


def test_parts_of_a_file_are_disjoint_and_a_row_stays_in_its_part(tmp_path):
    path = written_cells(tmp_path / "a.csv", [(i, "p") for i in range(7)])
    parts = [file_records(path, ONE_NUMBER, rows=9, part=part, parts=3) for part in range(3)]
    values = [((inputs[:, 0] + 1) * 5).round().astype(int).tolist() for inputs, _ in parts]
    assert values == [[0, 3, 6], [1, 4], [2, 5]]
    strange = written_cells(tmp_path / "b.csv", [("old" if i == 3 else i, "p") for i in range(7)])
    for part, (inputs, labels) in enumerate(parts):
        again, those = file_records(strange, ONE_NUMBER, rows=9, part=part, parts=3)
        kept = [i for i in range(len(labels)) if (part, i) != (0, 1)]
        assert again.tolist() == inputs[kept].tolist()
        assert those.tolist() == labels[kept].tolist()


def test_a_part_without_records_is_empty_and_of_the_same_kind(tmp_path):
    path = written_cells(tmp_path / "a.csv", [("old", "p")])
    inputs, labels = file_records(path, ONE_NUMBER)
    assert (inputs.shape, inputs.dtype, labels.shape) == ((0, 1), np.float32, (0,))


def test_owners_are_known_though_the_rest_of_a_row_does_not_fit(tmp_path):
    rows = [(1, "a"), (2, "b"), ("old", "a"), (4, ""), (5, "c"), (6, "a")]
    records = Records(file_items(written_cells(tmp_path / "a.csv", rows), OWNED_NUMBER), OWNED_NUMBER, together=True)
    owned = records.by_owner(3, places=64, secret=bytes(32))
    assert (len(owned), len(owned.owners)) == (64, 3)
    used = []
    for owner in range(3):
        inputs, _, present = owned[owner : owner + 1]
        used.append(sorted(round(float(x) * 5 + 5) for x in inputs[present][:, 0]))
    assert sorted(used) == [[1, 6], [2], [5]], "the row that does not fit is one of its owner's and counts as nothing"


class Hostile:
    """Whatever is asked of it ends the process."""

    def refuse(self, *_):
        raise SystemExit("patient 4711")

    __str__ = __eq__ = __ne__ = __array__ = __float__ = refuse
    __hash__ = None


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "who", [10**5000, Hostile(), object(), {"a": 1}, [["p"]], 1j, "x" * 10**6], ids=lambda who: type(who).__name__
)
def test_an_owner_without_a_name_is_nobody(who):
    schema = Schema(inputs=(Part(shape=(1,), bounds=(0, 10)),), label=Label(classes=2), owner="who")
    items = [([i], i % 2, f"p{i % 3}") for i in range(8)]
    known = Records(items, schema, together=True).by_owner(2, places=16, secret=bytes(32))
    items[6] = ([6], 0, who)
    records = Records(items, schema, together=True)
    assert records.fits.tolist() == [True] * 6 + [False, True]
    assert len(records.by_owner(2, places=16, secret=bytes(32)).owners) == len(known.owners)


class Gradients:
    """A row a sample: its value times a weight."""

    shapes = ((2,),)

    def __init__(self, change=lambda self, rows, samples: rows):
        self.change, self.seen = change, 0.0

    def __call__(self, parameters, samples):
        inputs, _ = samples
        rows = np.asarray(inputs, dtype=float).reshape(len(inputs), -1)[:, :2] * parameters[0]
        return self.change(self, rows, samples)


def remembers(self, rows, samples):
    self.seen += float(np.abs(samples[0]).sum())
    return rows * self.seen


def flips(self, rows, samples):
    rows = -rows if self.seen else rows
    self.seen = self.seen or float(samples[0].max() > 8.9)
    return rows


def mixes(self, rows, samples):
    return rows - rows.mean(axis=0) if len(rows) > 1 else rows


def fails(self, rows, samples):
    raise ValueError("no")


EXAMPLES = Schema(inputs=(Part(shape=(2,), bounds=(-9, 9)),), label=Label(classes=2)).examples()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remembers, "the same after other samples"),
        (flips, "the same after other samples"),
        (mixes, "mixes samples"),
        (fails, "fails for all"),
    ],
)
def test_a_model_that_sees_other_samples_is_refused_on_made_up_records(change, said):
    with raises(ConfigurationError, "unsupported", match=said):
        check_rows_alone(Gradients(change), EXAMPLES)


def test_a_single_sample_model_may_fail_on_outliers():
    def overflows(self, rows, samples):
        if np.abs(samples[0]).max() > 8.99:
            raise OverflowError
        return rows

    check_rows_alone(Gradients(), EXAMPLES)
    check_rows_alone(Gradients(overflows), EXAMPLES)
