"""A client with centring against a server that lies: one mean a session, one budget, and centres that tell nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import Centring, DelayedMomentumClient, FullBatchClient, Mu2Client, OnlineClient, Request
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SumAssumption,
    SystemKeys,
    centred,
    centring_policy,
    divided_mu,
    protocol,
)

from tests.harness.clients import DurableLedger, FixedNonces, Labelled, concatenated, training_config
from tests.harness.errors import raises
from tests.harness.secure import masking_of, roster_of, unmasked

K, COUNT, MU = 3, 8, 2.0
MEAN_MU, REST_MU = divided_mu(MU, 0.05)
FEATURES = np.abs(np.random.Generator(np.random.Philox(key=3)).normal(size=(COUNT, K)))
FEATURES /= np.linalg.norm(FEATURES, axis=1)[:, None]
DATA = Labelled(FEATURES.astype(np.float32), np.arange(COUNT) % 2)
CENTRE = np.array([0.5, 0.4, 0.3], np.float32)
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3)}
ROSTER = roster_of(("1", "2", "3"))


class Margins:
    """The gradient of ||x||^2 / 2 + label <x, f>, on K features and what is appended to them."""

    def __init__(self):
        self.shapes, self.seen = [(K + 1,)], []

    def __call__(self, parameters, samples):
        features, labels = samples
        self.seen.append(np.array(features))
        return np.asarray(parameters[0])[None] + (1.0 + np.asarray(labels))[:, None] * features


def mean_policy(**changes):
    return centring_policy(1.0, **{"nonnegative": True, "mu": MEAN_MU, "budget_mu": MU, **changes})


def rest_policy(kind, **changes):
    own = {"batch_selection": "cyclic", "batch_size": 2, "max_participations": 4}
    if kind is FullBatchClient:
        own = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
    return PrivacyPolicy(
        **{"clip_norm": 5.0, "max_participations": 4, "mu": REST_MU, "budget_mu": MU, **own, **changes}
    )


def client(
    kind=FullBatchClient, *, data=DATA, ledger=None, keys=None, centring=True, trust=None, gradients=None, **other
):
    trust = trust or {}
    own = {"queries": [Centring(mean_policy(**trust), K)]} if centring else {}
    ledger, keys = ledger or MemoryLedger(), keys or SimulatedKeys(1, "1")
    gradients = gradients or Margins()
    return kind(gradients, data, rest_policy(kind, **trust), ledger, keys, name="1", **own, **other)


def mean_request(session="mean", **entries):
    return [], training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_MEAN, **entries})


def gradient_request(subject, t=1, ack=0, centre=CENTRE, session="rest", **entries):
    content = centre.astype("<f4").tobytes() if isinstance(centre, np.ndarray) else centre
    points = [np.zeros(K + 1)] * subject.query_points
    return points, training_config(t, ack, session, **{protocol.CENTRE: content, **entries})


def test_the_mean_is_a_feature_sum_with_its_sample_number():
    subject = client(trust={"mechanism": "none"})
    arrays, examples, metrics = subject.fit(*mean_request())
    assert examples == COUNT
    assert [values.shape for values in arrays] == [(K,)]
    assert arrays[0] == pytest.approx(FEATURES.sum(axis=0), abs=1e-4)
    assert set(metrics) == {
        protocol.VERSION, protocol.RELEASE, protocol.ACK, protocol.SENSITIVITY, protocol.CLIENT,
    }  # fmt: skip
    assert metrics[protocol.SENSITIVITY] == subject.parts["mean"].privatizer.plan.sensitivity


def test_bad_rows_are_bounded_and_not_refused():
    rows = np.array([[-1.0, 0.6, 0.8], [0.0, 3.0, 4.0], [math.nan, 1.0, 0.0], [-1.0, -1.0, -1.0]], np.float32)
    subject = client(data=Labelled(rows, np.zeros(4, int)), trust={"mechanism": "none"})
    arrays, examples, _ = subject.fit(*mean_request())
    assert examples == 4
    assert arrays[0] == pytest.approx([0.0, 1.2, 1.6], abs=1e-4)


@pytest.mark.parametrize("kind", [FullBatchClient, Mu2Client, DelayedMomentumClient])
def test_gradients_are_those_of_the_samples_seen_from_the_centre(kind):
    subject = client(kind, trust={"mechanism": "none"} if kind is not DelayedMomentumClient else None)
    subject.fit(*gradient_request(subject))
    used = np.concatenate(subject.gradients.seen)
    assert np.array_equal(
        np.unique(used, axis=0), np.unique(centred(FEATURES.astype(np.float32)[: len(used)], CENTRE, 0.3), axis=0)
    )


def test_a_simulation_takes_a_new_centre():
    subject = client(trust={"mechanism": "none"})
    for t, centre in enumerate((CENTRE, CENTRE, -CENTRE, CENTRE), 1):
        subject.gradients.seen.clear()
        subject.fit(*gradient_request(subject, t, centre=centre))
        assert np.array_equal(np.concatenate(subject.gradients.seen), centred(DATA.features, centre, 0.3))


@pytest.mark.parametrize("simulated", [True, False])
def test_a_hostile_centre_leaves_rows_separate_and_clipped(simulated):
    """Two data sets that differ in one sample, the same noise: only that sample's clipped rows differ."""
    other = FEATURES.astype(np.float32).copy()
    other[5] = [-1e30, math.nan, 1e30]
    for centre in (np.full(K, 3.4e38), np.zeros(K), FEATURES[5], np.full(K, 1e-45)):
        sent = []
        for rows in (DATA.features, other):
            keys = SimulatedKeys(1, "1") if simulated else FixedNonces()
            subject = client(data=Labelled(rows, DATA.labels), ledger=None if simulated else DurableLedger(), keys=keys)
            sent.append(concatenated(subject.fit(*gradient_request(subject, centre=centre))[0]))
        assert 0 < np.linalg.norm(sent[0] - sent[1]) <= subject.privatizer.plan.sensitivity


MALFORMED = {
    "too short": CENTRE.tobytes()[:-1],
    "too long": CENTRE.tobytes() + b"\x00",
    "empty": b"",
    "of another kind": "0" * len(CENTRE.tobytes()),
    "numbers": [0.5, 0.4, 0.3],
    "not a number": np.array([0.5, math.nan, 0.3], np.float32).tobytes(),
    "infinite": np.array([0.5, math.inf, 0.3], np.float32).tobytes(),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("content", MALFORMED.values(), ids=list(MALFORMED))
def test_a_centre_that_is_none_is_refused_with_a_fixed_text_and_spends_nothing(content):
    texts = set()
    for rows in (DATA.features, DATA.features * 0):
        subject = client(data=Labelled(rows, DATA.labels))
        with raises(
            RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="malformed request: expected centre"
        ) as refusal:
            subject.fit(*gradient_request(subject, centre=content))
        assert refusal.value.code == protocol.MALFORMED_REQUEST
        texts.add(refusal.value.reason)
        assert subject.statement("rest")["samples-used"] == 0
    assert len(texts) == 1


def test_requests_that_fit_another_client_are_refused_both_ways():
    with_centring, without = client(), client(centring=False)
    for subject, asked in (
        (with_centring, gradient_request(with_centring, centre=None)),
        (without, gradient_request(without)),
        (without, mean_request()),
    ):
        with pytest.raises(RefusedError) as refusal:
            subject.fit(*asked)
        assert refusal.value.code == protocol.NOT_CONFIGURED
        assert subject.statement("rest")["samples-used"] == 0
    for entries in (
        {protocol.CENTRE: CENTRE.tobytes()},
        {protocol.RELEASE_OF: "variance"},
        {protocol.RELEASE_OF: b"mean"},
    ):
        with pytest.raises(RefusedError) as refusal:
            with_centring.fit(*mean_request(**entries))
        assert refusal.value.code == protocol.MALFORMED_REQUEST
    with raises(RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="0 query points"):
        with_centring.fit([np.zeros(K)], mean_request()[1])


def test_all_of_it_is_one_budget_and_the_statement_says_the_whole():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    subject.fit(*mean_request())
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.fit(*mean_request())
    for t in range(1, 5):
        subject.fit(*gradient_request(subject, t))
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.fit(*gradient_request(subject, 5))
    said = subject.statement("rest")
    assert said["mu-guaranteed"] == pytest.approx(MU, rel=1e-12)
    assert said["mu-spent"] == pytest.approx(MU, rel=1e-9)
    assert said["mu-budget"] == MU
    assert (said["releases"], said["samples-used"]) == (4, COUNT)
    for session in ("again", "rest2"):
        with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
            subject.fit(*mean_request(session))
        with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
            subject.fit(*gradient_request(subject, session=session))


def test_repeated_means_stay_within_the_budget():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    for number in range(round(MU**2 / MEAN_MU**2)):
        subject.fit(*mean_request(f"session{number}"))
    with pytest.raises(RefusedError) as refusal:
        subject.fit(*mean_request("one more"[:3]))
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED


def test_one_session_is_of_one_kind():
    subject = client()
    subject.fit(*mean_request("both"))
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="policy"):
        subject.fit(*gradient_request(subject, session="both"))


def test_the_mean_leaves_under_masks_only():
    subject = client(trust=SUMS, masking=masking_of("1", ROSTER))
    arrays, examples, metrics = subject.fit(*mean_request())
    assert arrays[0].dtype == np.uint64
    assert (examples, arrays[0].shape) == (COUNT, (K,))
    bare = client(trust=SUMS, masking=masking_of("1", ROSTER))
    release = bare.parts["mean"].answer(Request(1, "mean", 0, ()), lambda _: None)
    assert np.array_equal(unmasked(arrays, metrics, ROSTER)[0], release.counts)
    with raises(ConfigurationError, "missing", "masking"):
        client(trust=SUMS).fit(*mean_request())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_selection": "once"}, "batch_selection 'cyclic'"),
        ({"batch_selection": "shuffled"}, "another batch_selection than 'shuffled'"),
        ({"budget_mu": 3.0}, "one budget_mu"),
        ({"delta": 1e-6}, "one delta"),
        ({"trust": "trusted-server"}, "one trust"),
        ({"mechanism": "none"}, "noise on the mean"),
    ],
)
def test_a_policy_that_does_not_go_with_the_mean_s_is_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        Mu2Client(Margins(), DATA, rest_policy(Mu2Client, **changes), MemoryLedger(), SimulatedKeys(1, "1"), name="1",
                  queries=[Centring(mean_policy(), K)])  # fmt: skip


def test_only_a_mean_has_a_centring_policy():
    for changes in ({"max_participations": 2}, {"mechanism": "cancelling"}, {"release_rule": "acknowledged"}):
        with raises(ConfigurationError, "conflict", "policy", match="centring_policy"):
            Centring(replace(mean_policy(), sample_participations=1, **changes), K)
    for constant, features in ((0.0, K), (math.nan, K), (0.3, 0), (0.3, True)):
        with pytest.raises(ConfigurationError, match="Expected"):
            Centring(mean_policy(), features, constant)
    policy = rest_policy(OnlineClient, clip_unit="update")
    with raises(ConfigurationError, "conflict", "centring", match="no centring for OnlineClient"):
        OnlineClient(Margins(), DATA, policy, MemoryLedger(), SimulatedKeys(1, "1"), name="1", learning_rate=0.1,
                     queries=[Centring(mean_policy(), K)])  # fmt: skip


def test_a_training_whose_samples_return_in_turn_leaves_some_to_the_mean():
    turns = {"batch_selection": "once", "sample_participations": 2, "min_separation": 2}
    Centring(mean_policy(), K).check_beside(rest_policy(Mu2Client, **turns))
    with raises(ConfigurationError, "conflict", "batch_selection", match="batch_selection 'cyclic'"):
        Centring(mean_policy(), K).check_beside(rest_policy(Mu2Client, batch_selection="once"))
