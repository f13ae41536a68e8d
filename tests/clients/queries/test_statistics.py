"""Statistics on a client: one strange record of a file moves a release by no more than is charged, whatever it is."""

import itertools
import math

import numpy as np
import pytest
from murmurfl.clients import (
    Column,
    Counting,
    FullBatchClient,
    Label,
    RecordQuery,
    Schema,
    StatisticsClient,
    TableRows,
    statistics_columns,
)
from murmurfl.clients.records.client_records import Records, file_items
from murmurfl.clients.records.places import RecordPlaces
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    divided_mu,
    evaluation_policy,
    protocol,
    statistics_policy,
)
from murmurfl.privacy.queries.statistics import StatisticsRows

from tests.harness.clients import DurableLedger, FixedNonces, training_config
from tests.harness.errors import raises

SCHEMA = Schema(
    columns={
        "age": Column(kind="integer", bounds=(0, 120)),
        "weight": Column(kind="number", bounds=(0, 200), missing=70),
        "ward": Column(kind="category", values=("a", "b")),
        "smoker": Column(kind="yes/no"),
    },
    label=Label(column="ill", classes=("no", "maybe", "yes")),
)
LINES = ["40,70.5,a,yes,no", "57,81,b,no,yes", "33,64.25,c,no,maybe", "71,90,a,yes,yes", "18,55,b,no,no"]
STRANGE = {
    "blank": b"",
    "blank cells": b",,,,",
    "text in a number": b"forty,70.5,a,yes,no",
    "1e308": b"1e308,-1e308,a,yes,no",
    "not finite": b"nan,inf,a,yes,no",
    "half a year": b"40.5,70.5,a,yes,no",
    "unknown category": b"40,70.5,wing 7,yes,no",
    "unknown label": b"40,70.5,a,yes,perhaps",
    "neither yes nor no": b"40,70.5,a,sometimes,no",
    "too few cells": b"40,70.5,a",
    "too many cells": b"40,70.5,a,yes,no,1,2,3",
    "an open quote": b'"40,70.5,a,yes,no',
    "not UTF-8": b"\xff\xfe,70.5,a,yes,no",
    "a zero byte": b"40\x00,70.5,a,yes,no",
    "a long text": b"4" * 100_000 + b",70.5," + b"a" * 100_000 + b",yes,no",
    "at both ends": b"-1e9,1e9,other,no,yes",
    "between places": b"40,70.123456789,a,yes,no",
}


def test_classes_are_counted_as_they_are_learnt():
    """Upper and lower case are read alike, and what is no class has no place."""
    places = RecordPlaces(SCHEMA)
    cells = dict(zip(("age", "weight", "ward", "smoker"), LINES[0].split(","), strict=False))
    assert [places.of({**cells, "ill": word})[-1] for word in ("no", "No", "YES", "maybe")] == [0, 0, 2, 1]
    assert np.isnan([places.of({**cells, "ill": word})[-1] for word in ("perhaps", "", "NA")]).all()


def written(tmp_path, lines, **how):
    path = tmp_path / "patients.csv"
    path.write_bytes(b"\n".join([b"age,weight,ward,smoker,ill", *lines]) + b"\n")
    return Records(file_items(path, SCHEMA), SCHEMA, **how)


def released(records, *, real=False, **policy):
    keys = FixedNonces() if real else SimulatedKeys(1, "1")
    ledger = DurableLedger() if real else MemoryLedger()
    subject = StatisticsClient(
        TableRows(SCHEMA), records, statistics_policy(1.0, **policy), ledger, keys, name="1"
    )  # fmt: skip
    arrays, count, metrics = subject.fit([], training_config())
    return arrays[0], count, metrics, subject


def read(records):
    """The counts of a release without noise, by column."""
    values, count, _, subject = released(records, mechanism="none")
    rows = subject.gradients.rows
    return dict(zip([column.name for column in rows.columns], rows.counts(values, count, 0.0), strict=True))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("strange", STRANGE.values(), ids=list(STRANGE))
def test_a_strange_record_of_a_file_moves_a_release_by_the_sensitivity_at_most(strange, real, tmp_path):
    """Under the same noise all that differs is what the record changed: nothing is refused, counted or scaled by it."""
    usual = [line.encode() for line in LINES]
    before, count, told, subject = released(written(tmp_path, usual), real=real)
    after, count_after, told_after, _ = released(written(tmp_path, [*usual[:2], strange, *usual[3:]]), real=real)
    assert (count, told) == (count_after, told_after)
    assert 0 < np.linalg.norm(after - before) <= subject.privatizer.plan.sensitivity


def test_no_two_lines_are_further_apart_than_the_sensitivity(tmp_path):
    lines = [*(line.encode() for line in LINES), *STRANGE.values()]
    values = [released(written(tmp_path, [line]), mechanism="none")[0] for line in lines]
    furthest = max(np.linalg.norm(one - other) for one, other in itertools.combinations(values, 2))
    assert 1.35 < furthest <= math.sqrt(2) * (1 + 1e-6)


def test_a_column_scaled_by_its_records_would_be_caught(tmp_path, monkeypatch):
    """The planted bug: places between the smallest and the largest value of the batch."""

    def scaled(self, places):
        low, high = np.nanmin(places, axis=0), np.nanmax(places, axis=0)
        ends = np.array([column.places - 1 for column in self.columns])
        return real(self, np.minimum((places - low) / np.where(high > low, high - low, 1.0) * ends, ends))

    real = type(TableRows(SCHEMA).rows).rows
    monkeypatch.setattr(type(TableRows(SCHEMA).rows), "rows", scaled)
    usual = [line.encode() for line in LINES]
    before, *_, subject = released(written(tmp_path, usual))
    after = released(written(tmp_path, [*usual[:2], b"120,200,a,yes,no", *usual[3:]]))[0]
    assert np.linalg.norm(after - before) > subject.privatizer.plan.sensitivity


def test_a_cell_without_a_value_costs_its_record_no_other_column(tmp_path):
    """A missing value is counted as one, whatever the schema has in its place; what cannot be read has no value."""
    lines = [b"40,70,a,yes,no", b"41,,c,no,yes", b"x,80,NA,no,yes", b"40,70,a,?,nobody", b"40"]
    found = read(written(tmp_path, lines))
    assert found["age"].counts[[40, 41, -1]] == pytest.approx([2, 1, 2], abs=1e-3)
    assert found["weight"].counts[-1] == pytest.approx(2, abs=1e-3)
    assert found["ward"].counts == pytest.approx([2, 0, 1, 2], abs=1e-3)
    assert found["smoker"].counts == pytest.approx([2, 1, 2], abs=1e-3)
    assert found["ill"].counts == pytest.approx([1, 0, 2, 2], abs=1e-3)


def test_columns_are_those_of_the_schema():
    columns = statistics_columns(SCHEMA)
    assert [(one.name, one.places, one.exact) for one in columns] == [
        ("age", 121, True),
        ("weight", 256, False),
        ("ward", 3, True),
        ("smoker", 2, True),
        ("ill", 3, True),
    ]
    unbounded = Schema(columns=SCHEMA.columns, label=Label(column="y", kind="number"))
    assert [one.name for one in statistics_columns(unbounded)] == ["age", "weight", "ward", "smoker"]
    with raises(ConfigurationError, "conflict", "schema"):
        statistics_columns(Schema(**{**dict(SCHEMA), "owner": "name"}))
    with raises(ConfigurationError, "wrong-type", "schema"):
        statistics_columns(Schema(inputs=({"kind": "byte", "shape": (2,)},), label=Label(classes=2)))


OWN_MU, REST_MU = divided_mu(1.0, 0.2)


class Zeros:
    shapes = ((5,),)

    def __call__(self, parameters, samples):
        return np.zeros((len(samples[1]), 5))


def beside(records, *, mu=OWN_MU, counting=True, **changes):
    policy = PrivacyPolicy(
        1.0, 1, 3, REST_MU, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper"
    )
    own = [Counting(statistics_policy(mu, budget_mu=1.0, **changes), SCHEMA)] if counting else []
    keys = SimulatedKeys(1, "1")
    return FullBatchClient(Zeros(), records, policy, MemoryLedger(), keys, name="1", queries=own)


class NamedAsTheTraining(StatisticsRows):
    name = "gradients"


def test_a_query_with_the_name_of_another_or_of_the_training_is_refused(tmp_path):
    """A request names what it is for: the last of several would answer for all, or for the training."""
    records = written(tmp_path, [line.encode() for line in LINES])
    policy = PrivacyPolicy(
        1.0, 1, 3, REST_MU, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper"
    )
    own = statistics_policy(OWN_MU, budget_mu=1.0)
    named = RecordQuery(own, NamedAsTheTraining(statistics_columns(SCHEMA)))
    for queries in ([Counting(own, SCHEMA), Counting(own, SCHEMA)], [named]):
        with pytest.raises(ConfigurationError) as refusal:
            FullBatchClient(Zeros(), records, policy, MemoryLedger(), SimulatedKeys(1, "1"), name="1", queries=queries)
        assert (refusal.value.kind, refusal.value.setting) == ("duplicate", "queries")


def asked(session):
    return [], training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_STATISTICS})


def test_beside_a_training_statistics_are_paid_from_its_budget(tmp_path):
    lines = [line.encode() for line in LINES]
    subject = beside(written(tmp_path, [*lines, b"x,,,,"], together=True))
    (values,), count, metrics = subject.fit(*asked("first"))
    assert (values.size, count) == (TableRows(SCHEMA).rows.width, 6)
    assert metrics[protocol.NOISE_STD] == statistics_policy(OWN_MU, budget_mu=1.0).plan(values.size).noise_std
    statement = subject.statement("rest")
    assert statement["mu-guaranteed"] == pytest.approx(1.0)
    subject.fit([np.zeros(5)], training_config(session="rest"))
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        subject.fit(*asked("second"))


def test_a_client_that_is_not_configured_for_statistics_says_so(tmp_path):
    records = written(tmp_path, [line.encode() for line in LINES])
    with raises(RefusedError, "refused", code=protocol.NOT_CONFIGURED, match="not configured for statistics"):
        beside(records, counting=False).fit(*asked("first"))
    with raises(ConfigurationError, "mismatch", "delta"):
        beside(records, delta=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        PrivacyPolicy(1.0, 1, 1, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper"),
        PrivacyPolicy(
            2.0,
            1,
            1,
            1.0,
            batch_selection="full_batch",
            mechanism="independent",
            release_rule="paper",
            clip_unit="nonnegative",
        ),
    ],
    ids=["sample", "longer"],
)
def test_another_policy_is_refused(policy, tmp_path):
    records = written(tmp_path, [line.encode() for line in LINES])
    for made in (
        lambda: Counting(policy, SCHEMA),
        lambda: StatisticsClient(TableRows(SCHEMA), records, policy, MemoryLedger(), SimulatedKeys(1, "1"), name="1"),
    ):
        with raises(ConfigurationError, "conflict", "policy", match="statistics_policy"):
            made()
    with raises(ConfigurationError, "wrong-type", "gradients"):
        StatisticsClient(Zeros(), records, evaluation_policy(1.0), MemoryLedger(), SimulatedKeys(1, "1"), name="1")
