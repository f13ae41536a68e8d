"""A client with an additive model against a server that lies: one count a session, one budget, harmless knots."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient, Knots
from murmurfl.privacy import (
    ConfigurationError,
    CountedColumn,
    KnotRows,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    divided_mu,
    protocol,
)

from tests.harness.clients import DurableLedger, FixedNonces, Labelled, concatenated, training_config
from tests.harness.errors import raises

MU, COUNT = 2.0, 12
KNOTS_MU, REST_MU = divided_mu(MU, 0.1)
ROWS = KnotRows((CountedColumn("age", (0.0, 100.0)), CountedColumn("city", values=("a", "b"))), knots=4, rank_share=0.3)
VALUES = np.zeros((COUNT, 4))
VALUES[:, 0] = np.linspace(5.0, 95.0, COUNT)
VALUES[:, 2:] = np.eye(2)[np.arange(COUNT) % 2]
DATA = Labelled(VALUES, np.arange(COUNT) % 2)


class Softmax:
    """The gradient of the cross entropy of two linear scores, without a bias."""

    shapes = ((2, ROWS.num_features),)

    def __call__(self, parameters, samples):
        features, labels = samples
        scores = np.exp(features @ np.asarray(parameters[0]).T)
        residuals = scores / scores.sum(axis=1, keepdims=True) - np.eye(2)[labels]
        return (residuals[:, :, None] * features[:, None, :]).reshape(len(labels), -1)


MODEL = Softmax()
KNOTS = np.array([0.3, 10.0, 40.0, 60.0, 90.0])


def client(values=VALUES, rows=ROWS, *, real=False, queries=True, **policy):
    asked = Knots(rows.policy(KNOTS_MU, budget_mu=MU, **policy), rows)
    rest = PrivacyPolicy(
        clip_norm=0.5,
        batch_size=1,
        max_participations=3,
        batch_selection="full_batch",
        mechanism="independent",
        release_rule="paper",
        mu=REST_MU,
        budget_mu=MU,
        **policy,
    )
    ledger, keys = (DurableLedger(), FixedNonces()) if real else (MemoryLedger(), SimulatedKeys(1, "1"))
    data, own = Labelled(values, DATA.labels), {"queries": [asked]} if queries else {}
    return FullBatchClient(MODEL, data, rest, ledger, keys, name="1", **own)


def test_a_client_whose_schema_has_knots_releases_no_counts_for_them():
    given = replace(ROWS, given=tuple(KNOTS[1:].tolist()))
    one = client(rows=given)
    with raises(RefusedError, "refused", code=protocol.NOT_CONFIGURED):
        one.fit(*counts_request())
    release, _, _ = one.fit(*gradient_request())
    assert release[0].any()
    assert one.statement("rest")["mu-guaranteed"] == pytest.approx(REST_MU)  # and not that of the counts as well
    assert given.public.tolist() == KNOTS.tolist()


def counts_request(session="counts"):
    return [], training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_KNOTS})


def gradient_request(t=1, knots=KNOTS, session="rest"):
    content = knots.astype("<f8").tobytes() if isinstance(knots, np.ndarray) else knots
    points = [np.zeros(shape) for shape in MODEL.shapes]
    return points, training_config(t, t - 1, session, **({} if content is None else {protocol.KNOTS: content}))


def test_counts_and_training_spend_exactly_the_budget():
    subject = client()
    arrays, examples, metrics = subject.fit(*counts_request())
    assert arrays[0].shape == (ROWS.width,)
    assert examples == COUNT
    assert metrics[protocol.NOISE_STD] == pytest.approx(math.sqrt(2.0) / KNOTS_MU, rel=1e-3)
    for t in (1, 2, 3):
        subject.fit(*gradient_request(t))
    assert subject.statement("rest")["mu-guaranteed"] == pytest.approx(MU)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED):
        subject.fit(*counts_request("again"))


STRANGE = ([1e300, 0.0, 1.0, 1.0], [math.nan, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [-math.inf, 3.0, -5.0, 9.0])
HOSTILE = (
    KNOTS,
    np.array([0.0, 0.0, 0.0, 0.0, 100.0]),
    np.array([1.0, 0.0, 5e-324, 5e-324, 5e-324]),
    np.array([0.5, 49.0, 49.0, 49.0, np.nextafter(49.0, 50.0)]),
)


def difference(real, knots, record, rows=ROWS):
    """How far a release moves when the sixth record is another one, under the same noise; and its sensitivity."""
    sent = []
    for values in (VALUES, np.where(np.arange(COUNT)[:, None] == 5, record, VALUES)):
        subject = client(values, rows, real=real)
        sent.append(concatenated(subject.fit(*gradient_request(knots=knots))[0]))
    return float(np.linalg.norm(sent[0] - sent[1])), subject.privatizer.plan.sensitivity


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("knots", HOSTILE, ids=["usual", "at the ends", "tiny", "equal"])
def test_hostile_knots_leave_rows_separate_and_clipped(knots, real):
    for record in STRANGE:
        moved, sensitivity = difference(real, knots, record)
        assert moved <= sensitivity


class Peeking(KnotRows):
    """The bug that the test above is for: a record's features are scaled by those of its batch."""

    def features(self, values, public):
        found = super().features(values, public)
        return found * 1e6 / max(float(np.abs(values[..., 0]).max()), 1.0)


def test_features_that_looked_at_other_records_would_be_caught():
    moved, sensitivity = difference(False, KNOTS, STRANGE[0], Peeking(ROWS.columns, ROWS.knots, ROWS.rank_share))
    assert moved > sensitivity


MALFORMED = {
    "too short": KNOTS[:-1],
    "falling": KNOTS[[0, 2, 1, 3, 4]],
    "equal": np.array([0.3, 5.0, 5.0, 5.0, 5.0]),
    "below the bounds": np.array([0.3, -1.0, 40.0, 60.0, 90.0]),
    "above the bounds": np.array([0.3, 10.0, 40.0, 60.0, 101.0]),
    "no share": np.array([1.5, 10.0, 40.0, 60.0, 90.0]),
    "not a number": np.array([0.3, math.nan, 40.0, 60.0, 90.0]),
    "numbers": [0.3, 10.0, 40.0, 60.0, 90.0],
    "text": "0.3",
}


@pytest.mark.parametrize("knots", MALFORMED.values(), ids=list(MALFORMED))
def test_knots_that_are_none_are_refused_with_a_fixed_text_and_spend_nothing(knots):
    texts = set()
    for values in (VALUES, VALUES * 0.0):
        subject = client(values)
        with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST) as refusal:
            subject.fit(*gradient_request(knots=knots))
        texts.add(refusal.value.reason)
        assert subject.statement("rest")["samples-used"] == 0
    assert len(texts) == 1


def test_requests_that_fit_another_client_are_refused_both_ways():
    with_knots, without = client(), client(queries=False)
    for subject, asked in (
        (with_knots, gradient_request(knots=None)),
        (without, gradient_request()),
        (without, counts_request()),
    ):
        with raises(RefusedError, "refused", code=protocol.NOT_CONFIGURED):
            subject.fit(*asked)


def test_a_policy_of_another_query_is_refused():
    with raises(ConfigurationError, "conflict", "policy"):
        Knots(PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=1, mu=1.0), ROWS)
