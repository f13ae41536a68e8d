"""A machine that evaluates, against a server that lies: once a session, one budget, and models that tell nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import (
    Centring,
    CountedGradients,
    DelayedMomentumClient,
    Evaluation,
    FullBatchClient,
    Mu2Client,
    ShuffledClient,
)
from murmurfl.clients.side.evaluation_client import held_out_samples
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    Measured,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    ShuffledPolicy,
    SimulatedKeys,
    SystemKeys,
    centring_policy,
    divided_mu,
    evaluation_policy,
    protocol,
)

from tests.harness.machines import DurableLedger, FixedNonces, Labelled, concatenated, training_config
from tests.harness.secure import masking_of, roster_of, unmasked

K, COUNT, HELD, MU = 3, 12, 4, 2.0
OWN_MU, REST_MU = divided_mu(MU, 0.1)
DRAW = np.random.Generator(np.random.Philox(key=3))
DATA = Labelled(DRAW.normal(size=(COUNT, K)).astype(np.float32), np.arange(COUNT) % 2)
MODEL = np.array([0.3, -0.2, 0.1])
SUMS = {"trust": "secure-aggregation", "min_honest": 2, "min_cohort": 3}
ROSTER = roster_of(("1", "2", "3"))
HOSTILE_MODELS = [
    np.zeros(K),
    np.full(K, 1e300),
    DATA.features[5].astype(float) * 1e12,
    np.array([1e-320, 0.0, -1e308]),
]


class Margins:
    """The gradient of <w, x>, seen: which samples were asked for."""

    def __init__(self):
        self.shapes, self.seen = [(K,)], []

    def __call__(self, parameters, samples):
        self.seen.append(np.array(samples[0]))
        return np.asarray(samples[0], dtype=np.float64)


def measure(parameters, samples):
    """Right where the sign of <w, x> is the label's; 1 / (1 + exp(-<w, x>)) is the score."""
    features, labels = samples
    margins = features[:, :K] @ parameters[0][:K]
    return Measured((margins > 0) == labels, 1 / (1 + np.exp(-margins)), labels)


def rest_policy(kind=FullBatchClient, **changes):
    own = {"order": "again", "batch_size": 2, "max_participations": 4}
    if kind is FullBatchClient:
        own = {"order": "all", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
    return PrivacyPolicy(
        **{"clip_norm": 1.0, "max_participations": 4, "mu": REST_MU, "budget_mu": MU, **own, **changes}
    )


def own_policy(**changes):
    return evaluation_policy(OWN_MU, budget_mu=MU, **changes)


def client(
    kind=FullBatchClient,
    *,
    data=DATA,
    ledger=None,
    keys=None,
    evaluates=True,
    trust=None,
    gradients=None,
    measured=measure,
    bins=2,
    held_out=0,
    **other,
):
    trust = trust or {}
    own = {"evaluation": Evaluation(own_policy(**trust), measured, bins, held_out=held_out)} if evaluates else {}
    ledger, keys = ledger or MemoryLedger(), keys or SimulatedKeys(1, "1")
    return kind(gradients or Margins(), data, rest_policy(kind, **trust), ledger, keys, name="1", **{**own, **other})


def request(model=MODEL, session="evaluation", **entries):
    return [model], training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_EVALUATION, **entries})


def gradient_request(subject, t=1, session="rest"):
    return [np.zeros(K)] * subject.query_points, training_config(t, 0, session)


@pytest.mark.parametrize("kind", [FullBatchClient, Mu2Client])
def test_the_answer_is_the_row_sum_and_public_facts(kind):
    subject = client(kind, trust={"mechanism": "none"})
    arrays, examples, metrics = subject.fit(*request())
    rows = subject.evaluated.rows
    expected = rows.rows(measure([MODEL], DATA[:])).sum(axis=0)
    assert concatenated(arrays) == pytest.approx(expected, abs=1e-4)
    assert examples == COUNT
    assert set(metrics) == {
        *(protocol.VERSION, protocol.RELEASE, protocol.ACK, protocol.SENSITIVITY, protocol.MACHINE),
        *(protocol.NOISE_STD, protocol.HELD_OUT, protocol.SCORES_SHARE),
    }
    noisy = client(kind).fit(*request())[2]
    assert noisy[protocol.NOISE_STD] == client(kind).evaluated.machine.plan.noise_std > 0
    assert noisy[protocol.HELD_OUT] == 0


def test_nothing_of_the_reply_but_the_release_depends_on_data():
    said = []
    for features in (DATA.features, DATA.features * np.nan, DATA.features * 0):
        _, examples, metrics = client(data=Labelled(features, DATA.labels), held_out=HELD).fit(*request())
        said.append((examples, metrics))
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("held_out", [0, HELD])
def test_any_model_keeps_the_evaluation_within_its_sensitivity(simulated, held_out):
    """Two data sets that differ in one sample, the same noise: only that sample's row differs."""
    moved = []
    for place in (2, COUNT - 1):
        other, labels = DATA.features.copy(), DATA.labels.copy()
        other[place], labels[place] = [-1e30, math.nan, 1e30], 7
        for model in HOSTILE_MODELS:
            sent = []
            for rows, classes in ((DATA.features, DATA.labels), (other, labels)):
                keys = SimulatedKeys(1, "1") if simulated else FixedNonces()
                ledger = None if simulated else DurableLedger()
                subject = client(data=Labelled(rows, classes), ledger=ledger, keys=keys, held_out=held_out)
                sent.append(concatenated(subject.fit(*request(model))[0]))
            moved.append((place, np.linalg.norm(sent[0] - sent[1])))
    assert max(length for _, length in moved) <= subject.evaluated.machine.plan.sensitivity
    assert any(length > 0 for _, length in moved)
    if held_out:  # who was trained on is not in it at all
        assert all(length == 0 for place, length in moved if place < COUNT - held_out)


def test_any_measure_moves_the_sum_by_the_sensitivity_at_most():
    def hostile(parameters, samples):
        if samples[1][0] == 9:
            raise ValueError("secret")
        return Measured([1e300, -5.0][int(samples[1][0])] * np.ones(1), np.full(1, np.inf), np.full(1, 3.0))

    sent = []
    for label in (0, 1, 9):
        labels = DATA.labels.copy()
        labels[3] = label
        subject = client(
            data=Labelled(DATA.features, labels), ledger=DurableLedger(), keys=FixedNonces(), measured=hostile
        )
        sent.append(concatenated(subject.fit(*request())[0]))
    for other in sent[1:]:
        assert 0 < np.linalg.norm(sent[0] - other) <= subject.evaluated.machine.plan.sensitivity


def test_samples_that_are_set_aside_are_evaluated_on_and_never_trained_on():
    for kind in (FullBatchClient, Mu2Client):
        seen = []

        def watching(parameters, samples, seen=seen):
            seen.append(samples[0])
            return measure(parameters, samples)

        subject = client(kind, trust={"mechanism": "none"}, held_out=HELD, measured=watching)
        _, examples, metrics = subject.fit(*request())
        assert (examples, metrics[protocol.HELD_OUT]) == (HELD, 1)
        assert np.array_equal(np.concatenate(seen), DATA.features[-HELD:])
        for t in range(1, 5):
            subject.fit(*gradient_request(subject, t))
        trained = np.concatenate(subject.gradients.seen)
        assert {tuple(row) for row in trained} == {tuple(row) for row in DATA.features[:-HELD]}
        assert subject.machine.num_samples == COUNT - HELD


def test_a_ledger_knows_rows_of_training_and_evaluation():
    ledger, keys = DurableLedger(), SystemKeys(b"k" * 32)
    first = client(ledger=ledger, keys=keys, held_out=HELD)
    first.fit(*gradient_request(first, 1))
    first.fit(*request())
    first.fit(*gradient_request(first, 2))
    again = client(ledger=ledger, keys=keys, held_out=HELD)
    again.fit(*gradient_request(again, 3))
    for place in (1, COUNT - 1):  # a row that was trained on, and one that was set aside
        other = DATA.features.copy()
        other[place] += 1
        changed = client(data=Labelled(other, DATA.labels), ledger=ledger, keys=keys, held_out=HELD)
        with pytest.raises(LedgerError, match="unchanged"):
            changed.fit(*gradient_request(changed, 4))


def test_all_of_it_is_one_budget_and_the_statement_says_the_whole():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    for t in range(1, 5):
        subject.fit(*gradient_request(subject, t))
    subject.fit(*request())
    for model in (MODEL, -MODEL):  # the same again, or another model: neither is answered twice
        with pytest.raises(RefusedError, match="cap") as refusal:
            subject.fit(*request(model))
        assert refusal.value.code == protocol.CAP_REACHED
    said = subject.statement("rest")
    assert said["mu-guaranteed"] == pytest.approx(MU, rel=1e-12)
    assert said["mu-spent"] == pytest.approx(MU, rel=1e-9)
    assert (said["mu-budget"], said["samples-used"]) == (MU, COUNT)
    for asked in (request(session="another"), gradient_request(subject, session="another")):
        with pytest.raises(RefusedError) as refusal:
            subject.fit(*asked)
        assert refusal.value.code == protocol.BUDGET_EXHAUSTED


def test_repeated_evaluations_stay_within_the_budget():
    subject = client(ledger=DurableLedger(), keys=SystemKeys.generate())
    possible = round(MU**2 / OWN_MU**2)
    for number in range(possible):
        subject.fit(*request(DRAW.normal(size=K), session=f"session{number}"))
    with pytest.raises(RefusedError) as refusal:
        subject.fit(*request(session="onemore"))
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED


def test_one_session_is_of_one_kind():
    subject = client()
    subject.fit(*request(session="both"))
    with pytest.raises(RefusedError, match="policy"):
        subject.fit(*gradient_request(subject, session="both"))
    other = client()
    other.fit(*gradient_request(other, session="both"))
    with pytest.raises(RefusedError, match="policy"):
        other.fit(*request(session="both"))


@pytest.mark.parametrize(
    ("points", "entries"),
    [
        ([], {}),
        ([MODEL, MODEL], {}),
        ([np.zeros(K + 1)], {}),
        ([np.full(K, math.nan)], {}),
        ([np.zeros(K, int)], {}),
        ([MODEL], {protocol.RELEASE_OF: "losses"}),
        ([MODEL], {protocol.RELEASE_OF: b"evaluation"}),
        ([MODEL], {protocol.RELEASE_OF: ["evaluation"]}),
        ([MODEL], {protocol.MACHINE: "2"}),
        ([MODEL], {protocol.SESSION: "a b"}),
    ],
    ids=str,
)
def test_a_malformed_request_is_refused_and_spends_nothing(points, entries):
    texts = set()
    for rows in (DATA.features, DATA.features * 0):
        subject = client(data=Labelled(rows, DATA.labels))
        with pytest.raises(RefusedError, match="malformed request") as refusal:
            subject.fit(points, {**request()[1], **entries})
        texts.add(refusal.value.reason)
        assert subject.statement("rest")["samples-used"] == 0
    assert len(texts) == 1


def test_a_machine_that_is_not_configured_refuses_and_flower_s_own_evaluation_stays_refused():
    subject = client(evaluates=False)
    with pytest.raises(RefusedError, match="not configured for private evaluation") as refusal:
        subject.fit(*request())
    assert refusal.value.code == protocol.NOT_CONFIGURED
    for one in (subject, client()):
        with pytest.raises(RefusedError) as refusal:
            one.evaluate([MODEL], request()[1])
        assert refusal.value.code == protocol.EVALUATION_BLOCKED


def test_an_evaluation_leaves_under_masks_only():
    subject = client(trust=SUMS, masking=masking_of("1", ROSTER))
    arrays, examples, metrics = subject.fit(*request())
    assert arrays[0].dtype == np.uint64
    assert (examples, arrays[0].shape) == (COUNT, (6,))
    bare = client(trust=SUMS, masking=masking_of("1", ROSTER))
    release = bare.released(bare._read(*request()))
    assert np.array_equal(unmasked(arrays, metrics, ROSTER)[0], release.counts)
    with pytest.raises(ConfigurationError, match="nothing leaves this machine without masks"):
        client(trust=SUMS).fit(*request())


def test_under_sums_what_holds_whatever_happens_is_counted_as_well():
    subject = client(trust=SUMS, masking=masking_of("1", ROSTER))
    said = subject.statement("rest")
    assert said["mu-guaranteed"] == pytest.approx(MU, rel=1e-9)
    assert said[protocol.MU_LOCAL] == pytest.approx(MU * math.sqrt(2), rel=1e-3)


def test_samples_are_seen_from_the_centre_where_a_machine_has_one():
    mean_mu, left = MU * math.sqrt(0.1), MU * math.sqrt(0.8)
    mean = centring_policy(1.0, nonnegative=False, mu=mean_mu, budget_mu=MU)
    seen = []

    def watching(parameters, samples):
        seen.append(samples[0])
        return Measured(np.ones(len(samples[1])))

    class Wider(Margins):
        def __init__(self):
            super().__init__()
            self.shapes = [(K + 1,)]

    subject = FullBatchClient(
        *(Wider(), DATA, replace(rest_policy(), mu=left), MemoryLedger(), SimulatedKeys(1, "1")),
        name="1",
        centring=Centring(mean, K),
        evaluation=Evaluation(own_policy(), watching, held_out=HELD),
    )
    with pytest.raises(RefusedError, match="must bring a centre"):
        subject.fit(*request(np.zeros(K + 1)))
    centre = np.full(K, 0.5, np.float32)
    subject.fit(*request(np.zeros(K + 1), **{protocol.CENTRE: centre.astype("<f4").tobytes()}))
    assert np.array_equal(np.concatenate(seen), subject.centred.centring.batch(DATA[COUNT - HELD :], centre)[0])
    # What is set aside is not in the mean either.
    _, examples, _ = subject.fit([], training_config(session="mean", **{protocol.RELEASE_OF: protocol.OF_MEAN}))
    assert examples == COUNT - HELD
    assert subject.statement("rest")["mu-guaranteed"] == pytest.approx(MU, rel=1e-9)


def test_with_marks_beside_the_gradients_a_model_is_asked_for_without_a_clip():
    subject = client(gradients=CountedGradients(Margins()))
    subject.fit(*request())
    with pytest.raises(RefusedError, match="expected 1 query points of 1 arrays"):
        subject.fit([MODEL, np.ones(1)], request(session="other")[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": "in-turn"}, "order 'again' beside an evaluation"),
        ({"order": "secret"}, "another order than 'secret'"),
        ({"budget_mu": 3.0}, "one budget_mu"),
        ({"delta": 1e-6}, "one delta"),
        ({"trust": "trusted-server"}, "one trust"),
        ({"mechanism": "none"}, "noise on the evaluation"),
    ],
)
def test_a_policy_that_does_not_go_with_the_evaluation_s_is_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        Mu2Client(
            *(Margins(), DATA, rest_policy(Mu2Client, **changes), MemoryLedger(), SimulatedKeys(1, "1")),
            name="1",
            evaluation=Evaluation(own_policy(), measure),
        )


def test_what_is_no_evaluation_is_refused():
    for changes in ({"max_participations": 2, "sample_participations": 2}, {"clip_unit": "sample"}, {"clip_norm": 0.5}):
        with pytest.raises(ConfigurationError, match="evaluation_policy"):
            Evaluation(replace(own_policy(), **changes), measure)
    for held_out in (-1, True, 0.5):
        with pytest.raises(ConfigurationError, match="held_out"):
            Evaluation(own_policy(), measure, held_out=held_out)
    with pytest.raises(ConfigurationError, match="measure"):
        Evaluation(own_policy(), None)
    with pytest.raises(ConfigurationError, match="bins"):
        Evaluation(own_policy(), measure, bins=1)
    with pytest.raises(ConfigurationError, match="none would be left to train on"):
        client(held_out=COUNT)
    policy = ShuffledPolicy(1.0, COUNT, 2, REST_MU, MU)
    with pytest.raises(ConfigurationError, match="no evaluation for ShuffledClient"):
        ShuffledClient(
            *(Margins(), DATA, policy, MemoryLedger(), SimulatedKeys(1, "1")),
            name="1",
            learning_rate=0.1,
            evaluation=Evaluation(own_policy(), measure),
        )


def test_delayed_momentum_evaluates_as_well():
    subject = client(DelayedMomentumClient)
    assert subject.fit(*request())[1] == COUNT


def test_a_share_of_samples_is_at_least_one_and_never_all():
    assert [held_out_samples(n, 0.1) for n in (2, 9, 10, 19, 20, 1000)] == [1, 1, 1, 1, 2, 100]
    assert held_out_samples(2, 0.9) == 1
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigurationError, match="share of samples"):
            held_out_samples(10, share)
