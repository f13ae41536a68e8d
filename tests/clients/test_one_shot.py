"""A client of one shot: what it hands over, what it answers to, and that it answers once."""

import math

import numpy as np
import pytest
from murmurfl.clients import LabelledFeatures, OneShotClient
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SystemKeys,
    protocol,
)
from murmurfl.privacy.release.clipping import Moments

from tests.harness.clients import DurableLedger, Labelled, training_config
from tests.harness.errors import raises

K, C, N = 4, 3, 60
FEATURES = np.random.Generator(np.random.Philox(key=5)).normal(size=(N, K)) / 3
LABELS = np.arange(N) % C


def client(keys=None, ledger=None, constant=0.0, labels=LABELS, features=FEATURES, **changes):
    policy = {
        "clip_norm": 1.0,
        "batch_size": 1,
        "max_participations": 1,
        "mu": 10.0,
        "mechanism": "independent",
        "release_rule": "paper",
        "batch_selection": "full_batch",
        "clip_unit": "moments",
        "classes": C,
        **changes,
    }
    keys = SimulatedKeys(1, "7") if keys is None else keys
    ledger = MemoryLedger() if ledger is None else ledger
    rows = LabelledFeatures(K, C, constant)
    return OneShotClient(rows, Labelled(features, labels), PrivacyPolicy(**policy), ledger, keys, name="7")


def moments_of(features, labels):
    bounded = features * np.minimum(1, 1 / np.linalg.norm(features, axis=1))[:, None]
    marks = (labels[:, None] == np.arange(C)) - (1 / C) * np.isin(labels, np.arange(C))[:, None]
    return bounded.T @ bounded, bounded.T @ marks


@pytest.mark.parametrize("real", [False, True])
def test_a_release_is_all_samples_moments_made_one_by_one(real):
    keys, ledger = (SystemKeys(b"k" * 32), DurableLedger()) if real else (None, None)
    labels = np.where(np.arange(N) % 7 == 0, -1, LABELS)  # some that are no class
    sent, samples, entries = client(keys, ledger, labels=labels).fit([], training_config())
    assert samples == N
    assert set(entries) == {"protocol-version", "release", "ack", "sensitivity", "client"}
    gram, by_class = Moments(C).read(sent[0], 1.0)
    # Noise of standard deviation 0.22 and less in 18 values: beyond 2 with a chance below 1e-15.
    assert np.abs(gram - moments_of(FEATURES, labels)[0]).max() < 2
    assert np.abs(by_class - moments_of(FEATURES, labels)[1]).max() < 2
    assert moments_of(FEATURES, labels)[0].max() > 4


def test_real_and_simulated_clients_add_up_the_same():
    made = []
    for keys, ledger in ((None, None), (SystemKeys(b"k" * 32), DurableLedger())):
        privatizer = client(keys, ledger).privatizer
        counts = privatizer._contribution_counts(
            lambda i: LabelledFeatures(K, C)((), (FEATURES[i], LABELS[i])), slice(0, N)
        )
        made.append(privatizer.plan.grid.values(counts))
    assert made[0] == pytest.approx(made[1], abs=2 * privatizer.plan.grid.spacing)
    assert np.abs(made[0]).max() > 1


def test_a_constant_is_appended_and_bounded_with_the_features():
    rows = LabelledFeatures(K, C, 0.5)((), (FEATURES, LABELS))
    assert rows.shape == (N, K + 1 + C)
    assert (rows[:, K] == 0.5).all()
    assert (rows[:, K + 1 :].argmax(axis=1) == LABELS).all()
    sent, _, _ = client(constant=0.5).fit([], training_config())
    assert sent[0].shape == (Moments(C).num_values(K + 1),)


def test_it_is_asked_at_no_point_and_answers_once():
    subject = client()
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="malformed"):
        subject.fit([np.zeros((C, K))], training_config())
    subject.fit([], training_config())
    for session in ("s", "other"):
        with pytest.raises(RefusedError, match=r"cap|budget"):
            subject.fit([], training_config(2, session=session))


def test_a_sample_that_cannot_be_computed_on_a_real_client_counts_as_zero():
    features = FEATURES.copy()
    features[3] = math.nan
    keys, ledger = SystemKeys(b"k" * 32), DurableLedger()
    sent, samples, _ = client(keys, ledger, features=features).fit([], training_config())
    assert samples == N
    expected = moments_of(np.delete(FEATURES, 3, axis=0), np.delete(LABELS, 3))[0]
    assert np.abs(Moments(C).read(sent[0], 1.0)[0] - expected).max() < 2  # as above


@pytest.mark.parametrize(
    "changes", [{"mechanism": "cancelling"}, {"clip_unit": "sample", "classes": 0}, {"classes": C + 1}], ids=str
)
def test_a_policy_that_is_not_for_this_release_is_refused(changes):
    with pytest.raises(ConfigurationError, match=r"mechanism|clip_unit|classes"):
        client(**changes)
