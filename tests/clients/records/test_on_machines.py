"""Records on machines: parts of a file for a ClientApp of one's own, owners, and models that see one at a time."""

import numpy as np
import pytest
from murmurfl.clients import Column, Label, Part, Schema, file_records
from murmurfl.clients.adapters.per_sample_gradients import check_rows_alone
from murmurfl.clients.records.machine_records import Records, file_items
from murmurfl.privacy import ConfigurationError

SCHEMA = Schema(columns={"x": Column(kind="number", bounds=(0, 10))}, label=Label(column="y", classes=2))
OWNED = Schema(**{**SCHEMA.model_dump(), "owner": "who"})


def written(path, cells):
    path.write_text("x,y,who\n" + "".join(f"{cell},{i % 2},{who}\n" for i, (cell, who) in enumerate(cells)))
    return path


def test_parts_of_a_file_are_disjoint_and_a_row_stays_in_its_part(tmp_path):
    path = written(tmp_path / "a.csv", [(i, "p") for i in range(7)])
    parts = [file_records(path, SCHEMA, rows=9, part=part, parts=3) for part in range(3)]
    values = [((inputs[:, 0] + 1) * 5).round().astype(int).tolist() for inputs, _ in parts]
    assert values == [[0, 3, 6], [1, 4], [2, 5]]
    strange = written(tmp_path / "b.csv", [("old" if i == 3 else i, "p") for i in range(7)])
    for part, (inputs, labels) in enumerate(parts):
        again, those = file_records(strange, SCHEMA, rows=9, part=part, parts=3)
        kept = [i for i in range(len(labels)) if (part, i) != (0, 1)]
        assert again.tolist() == inputs[kept].tolist()
        assert those.tolist() == labels[kept].tolist()


def test_a_part_without_records_is_empty_and_of_the_same_kind(tmp_path):
    path = written(tmp_path / "a.csv", [("old", "p")])
    inputs, labels = file_records(path, SCHEMA)
    assert (inputs.shape, inputs.dtype, labels.shape) == ((0, 1), np.float32, (0,))


def test_owners_are_known_though_the_rest_of_a_row_does_not_fit(tmp_path):
    rows = [(1, "a"), (2, "b"), ("old", "a"), (4, ""), (5, "c"), (6, "a")]
    records = Records(file_items(written(tmp_path / "a.csv", rows), OWNED), OWNED, together=True)
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
    with pytest.raises(ConfigurationError, match=said):
        check_rows_alone(Gradients(change), EXAMPLES)


def test_a_single_sample_model_may_fail_on_outliers():
    def overflows(self, rows, samples):
        if np.abs(samples[0]).max() > 8.99:
            raise OverflowError
        return rows

    check_rows_alone(Gradients(), EXAMPLES)
    check_rows_alone(Gradients(overflows), EXAMPLES)
