"""A private evaluation's figures and intervals, and its round."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from murmurfl.clients import ContextLedger, Evaluation, FullBatchClient, numpy_client_app
from murmurfl.privacy import (
    ConfigurationError,
    EvaluationRows,
    Measured,
    PrivacyPolicy,
    SimulatedKeys,
    SumAssumption,
    SystemKeys,
    divided_mu,
    evaluation_policy,
    protocol,
)
from murmurfl.privacy.queries.evaluation import (
    EVALUATION_FIGURES,
    noisy_auc,
    noisy_ratio_interval,
    noisy_share_interval,
)
from murmurfl.privacy.sums.masking import Masking
from murmurfl.privacy.sums.roster import ClientKey, Roster
from murmurfl.strategies import (
    CheckpointError,
    EvaluationResult,
    NotEvaluatedError,
    PrivateEvaluation,
    SecureAggregation,
)
from scipy.stats import rankdata

from tests.harness.clients import Labelled
from tests.harness.errors import raises
from tests.harness.grid import KilledError, NodesGrid, TamperedNodes, killing
from tests.harness.secure import HELPERS, SEED, SecureGrid

DRAWS = 4000


def generator(key):
    return np.random.Generator(np.random.Philox(key=key))


def counted(scores, positive, bins):
    return np.array([np.histogram(scores[positive == c], bins=bins, range=(0, 1))[0] for c in (False, True)], float)


def area(scores, positive):
    ones, zeros = positive.sum(), (~positive).sum()
    return (rankdata(scores)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros)


@pytest.mark.parametrize("p", [0.5, 0.93, 0.99])
@pytest.mark.parametrize("std", [0.0, 0.005, 0.05, 0.3])
def test_the_interval_of_an_accuracy_has_it_in_95_of_100_cases(p, std):
    """Wilson's interval has 93 % at p = 0.99 without noise, for counts are whole; 92 % of 4000 draws is far below.

    It is wider than it need be only where noise carries shares outside of 0 and 1.
    """
    samples, draw = 400, generator(3)
    shares = draw.binomial(samples, p, DRAWS) / samples + std * draw.normal(size=DRAWS)
    within = [low <= p <= high for low, high in (noisy_share_interval(share, samples, std) for share in shares)]
    assert np.mean(within) > 0.92
    assert std == 0.3 or np.mean(within) <= 0.99


def test_an_interval_that_leaves_the_noise_out_is_caught():
    """The bug that would be: Wilson's interval, as if the count had no noise."""
    draw, p = generator(4), 0.9
    shares = draw.binomial(400, p, DRAWS) / 400 + 0.05 * draw.normal(size=DRAWS)
    planted = [low <= p <= high for low, high in (noisy_share_interval(share, 400, 0.0) for share in shares)]
    assert np.mean(planted) < 0.6


def owners_drawn(draw, owners, std):
    """Noisy numbers of right predictions and of owners, each of whom has one to four samples."""
    samples = draw.integers(1, 5, (DRAWS, owners))
    right = (draw.binomial(samples, 0.8) / samples).sum(axis=1)
    wrong = owners - right + std * draw.normal(size=DRAWS)
    right = right + std * draw.normal(size=DRAWS)
    return right, right + wrong


@pytest.mark.parametrize("std", [0.0, 10.0, 60.0, 300.0])
def test_the_interval_of_owners_has_their_accuracy_in_95_of_100_cases(std):
    """Shares of several samples vary less than is counted; without noise 92 % of 4000 draws is far below."""
    right, count = owners_drawn(generator(23), 400, std)
    within = [low <= 0.8 <= high for low, high in map(partial(noisy_ratio_interval, noise_std=std), right, count)]
    assert np.mean(within) > 0.92
    alone = [noisy_ratio_interval(320.0 + a, 400.0 + a + b, std, sampled=False) for a, b in noise_of(std)]
    assert np.mean([low - 1e-9 <= 0.8 <= high + 1e-9 for low, high in alone]) > 0.92


def noise_of(std):
    return std * generator(24).normal(size=(DRAWS, 2))


def test_an_interval_of_owners_that_counts_the_noise_of_right_ones_alone_is_caught():
    """The bug that would be: the derivative of right / (right + wrong) with respect to the first number alone."""
    right, count = owners_drawn(generator(25), 400, 60.0)
    planted = [noisy_share_interval(a / n, 400, 60.0 * 0.2 / 400) for a, n in zip(right, count, strict=True)]
    assert np.mean([low <= 0.8 <= high for low, high in planted]) < 0.9


def test_owners_whom_noise_hides_have_any_accuracy():
    hidden = EvaluationResult(5.0, 4.0, 100, 1, held_out=True, owners=6.0)
    assert hidden.interval == hidden.noise_interval == (0.0, 1.0)
    assert EvaluationResult(-5.0, 4.0, 100, 1, owners=-3.0).accuracy == 0.0
    sure = EvaluationResult(80.0, 0.0, 1000, 1, owners=100.0)
    assert sure.noise_interval == (pytest.approx(0.8), pytest.approx(0.8))
    assert sure.interval == (pytest.approx(noisy_share_interval(0.8, 100, 0.0)[0]), pytest.approx(0.8666, abs=1e-4))
    assert "on about 100 owners (each counted once) of 1 client" in sure.sentence


def test_without_noise_it_is_wilson_s():
    low, high = noisy_share_interval(0.9, 100, 0.0)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))


@pytest.mark.parametrize("std", [0.0, 0.01])
def test_a_share_that_noise_carries_outside_leaves_an_interval(std):
    """It was [1, 1], which is what certainty looks like."""
    low, high = noisy_share_interval(1.4, 100, std)
    assert (low, high) == (noisy_share_interval(1.0, 100, std)[0], pytest.approx(1.0))
    assert 0.95 < low < 0.97
    assert noisy_share_interval(-3.0, 100, std) == (pytest.approx(0.0), pytest.approx(1 - low))


def test_clients_that_differ_make_no_interval_too_short():
    """Strata: each client's samples have an accuracy of their own."""
    draw, shares = generator(5), np.linspace(0.6, 1.0, 20)
    found = draw.binomial(20, shares, (DRAWS, 20)).sum(axis=1) / 400 + 0.02 * draw.normal(size=DRAWS)
    within = [low <= 0.8 <= high for low, high in (noisy_share_interval(share, 400, 0.02) for share in found)]
    assert np.mean(within) > 0.93


def test_the_area_without_noise_is_that_of_the_binned_scores():
    draw = generator(6)
    positive = draw.random(800) < 0.4
    scores = np.clip(draw.normal(0.4 + 0.2 * positive, 0.2), 0, 1)
    found, noise, sampling = noisy_auc(counted(scores, positive, 16), 0.0)
    binned = np.minimum(np.floor(scores * 16), 15)
    assert found == pytest.approx(area(binned, positive), rel=1e-12)
    assert found == pytest.approx(area(scores, positive), abs=0.01)
    assert noise == 0.0
    assert sampling > 0


def test_the_noise_of_an_area_is_what_is_said_of_it():
    """4000 draws miss their deviation by 12 % or more once in a hundred million times; the rest is curvature."""
    draw = generator(7)
    positive = draw.random(3000) < 0.3
    counts = counted(np.clip(draw.normal(0.4 + 0.2 * positive, 0.2), 0, 1), positive, 12)
    for std in (2.0, 15.0):
        found = [noisy_auc(counts + std * draw.normal(size=counts.shape), std) for _ in range(DRAWS)]
        areas, stated = np.array([one[0] for one in found]), np.median([one[1] for one in found])
        assert np.std(areas) == pytest.approx(stated, rel=0.15)


def test_the_area_interval_covers_95_percent():
    draw, std, bins = generator(8), 4.0, 12
    many = draw.random(200_000) < 0.4
    scores = np.clip(draw.normal(0.4 + 0.2 * many, 0.2), 0, 1)
    truth = area(np.minimum(np.floor(scores * bins), bins - 1), many)
    within = []
    for _ in range(600):
        chosen = draw.integers(0, len(many), 500)
        counts = counted(scores[chosen], many[chosen], bins) + std * draw.normal(size=(2, bins))
        low, high = EvaluationResult(0, 0, 500, 1, histograms=counts, histogram_std=std).auc_interval
        within.append(low <= truth <= high)
    assert np.mean(within) > 0.93


def test_a_class_that_noise_hides_has_no_area():
    counts = np.array([[5.0, 3.0], [100.0, 80.0]])
    assert noisy_auc(counts, 10.0) is None
    assert noisy_auc(counts, 0.1) is not None
    assert noisy_auc(np.array([[0.0, 0.0], [1.0, 2.0]]), 0.0) is None
    hidden = EvaluationResult(90.0, 1.0, 100, 4, histograms=counts, histogram_std=10.0)
    assert (hidden.auc, hidden.auc_interval) == (None, None)
    assert "no AUC: the noise hides one of the classes" in hidden.sentence


def test_the_sentence_says_what_each_interval_counts_and_whose_samples_they_are():
    found = EvaluationResult(934.0, 5.0, 1000, 12, held_out=True)
    assert found.sentence == (
        "accuracy 93.4 % (95 % interval 91.4 to 95.1 %, noise and sampling; noise alone 92.4 to 94.4 %), on 1,000 "
        "samples of 12 clients that were held out"
    )
    assert EvaluationResult(934.0, 5.0, 1000, 1).sentence.endswith("of 1 client that it was trained on")
    assert tuple(found.document) == EVALUATION_FIGURES
    assert found.document["interval"] == list(found.interval)
    assert EvaluationResult(1200.0, 500.0, 1000, 1).accuracy == 1.0
    assert math.isclose(found.noise_std, 0.005)


K, CLIENTS, MU, BINS = 4, 5, 2.0, 4
OWN_MU, REST_MU = divided_mu(MU, 0.2)
SIZES = {str(i): 40 + 20 * i for i in range(CLIENTS)}
MODEL = np.array([1.0, -0.5, 0.25, 0.0])


def samples_of(name):
    draw = np.random.Generator(np.random.Philox(key=int(name)))
    rows = draw.normal(size=(SIZES[name], K))
    return Labelled(rows, (rows @ MODEL + draw.normal(size=len(rows)) > 0).astype(int))


def measure(parameters, samples):
    margins = samples[0] @ parameters[0]
    return Measured((margins > 0) == samples[1], 1 / (1 + np.exp(-2 * margins)), samples[1])


def measured(names, first=None):
    parts = [measure([MODEL], (samples_of(n).features[first:], samples_of(n).labels[first:])) for n in names]
    return [np.concatenate([getattr(part, field) for part in parts]) for field in ("right", "score", "positive")]


class Model:
    shapes = ((K,),)

    def __call__(self, parameters, samples):
        return np.asarray(samples[0], dtype=np.float64)


def client_of(name, state, *, masking=None, evaluates=True, mechanism="", bins=BINS, held_out=0, share=0.5, **trust):
    rest = {"batch_selection": "full_batch", "release_rule": "paper", "mechanism": mechanism or "independent", **trust}
    policy = PrivacyPolicy(1.0, 1, 3, REST_MU, MU, **rest)
    own = {}
    if evaluates:
        ours = evaluation_policy(OWN_MU, budget_mu=MU, mechanism=mechanism, **trust)
        own = {"queries": [Evaluation(ours, measure, bins, share, held_out=held_out)]}
    ledger, keys = ContextLedger(state, name), SimulatedKeys(3, name)
    return FullBatchClient(Model(), samples_of(name), policy, ledger, keys, name=name, masking=masking, **own)


def nodes_of(*, deaf=(), forged=lambda reply: reply, **changes):
    return TamperedNodes(partial(client_of, **changes), CLIENTS, deaf=deaf, forged=forged)


def evaluation(**options):
    options = {"seed": 1, "session": "evaluation", "node_deadline_s": 0.5, "bins": BINS, **options}
    return PrivateEvaluation(num_clients=CLIENTS, **options)


def evaluate(grid, strategy=None):
    return (strategy or evaluation()).evaluate(grid, ArrayRecord([MODEL]))


def test_without_noise_an_evaluation_is_accuracy_and_binned_area():
    found = evaluate(nodes_of(mechanism="none"))
    right, score, positive = measured(SIZES)
    assert found.accuracy == pytest.approx(right.mean(), abs=1e-4)
    assert (found.samples, found.clients, found.held_out) == (sum(SIZES.values()), CLIENTS, False)
    assert found.noise_interval == pytest.approx((found.accuracy, found.accuracy))
    counts = [np.histogram(score[positive == c], bins=BINS, range=(0, 1))[0] for c in (0, 1)]
    assert found.histograms == pytest.approx(np.array(counts), abs=1e-3)
    assert 0.7 < found.auc < 1.0


def test_with_noise_it_is_as_far_off_as_is_said():
    """Five standard deviations: by chance once in a million and a half."""
    found = evaluate(nodes_of())
    right, _, _ = measured(SIZES)
    std = evaluation_policy(OWN_MU).plan(2 + 2 * BINS).noise_std
    assert found.right_std == pytest.approx(std * math.sqrt(CLIENTS) / math.sqrt(2) / math.sqrt(0.5), rel=1e-9)
    assert 0 < abs(found.right - right.sum()) < 5 * found.right_std


@pytest.mark.parametrize("mechanism", ["none", ""])
@pytest.mark.parametrize("bins", [0, BINS])
def test_samples_without_an_evaluation_are_reported_apart_from_noise(monkeypatch, mechanism, bins):
    """A failed sample's row is zero, which is half a right prediction; by chance said once in 30,000 times."""
    whole = evaluate(nodes_of(mechanism=mechanism, bins=bins), evaluation(bins=bins))
    assert "could not be evaluated" not in whole.sentence
    real = EvaluationRows.rows
    monkeypatch.setattr(EvaluationRows, "rows", lambda self, measured: 0.0 * real(self, measured))
    found = evaluate(nodes_of(mechanism=mechanism, bins=bins), evaluation(bins=bins))
    assert found.accuracy == pytest.approx(0.5, abs=5 * found.noise_std + 1e-6)
    assert found.silent == pytest.approx(sum(SIZES.values()), abs=5 * found.silent_std + 1e-6)
    assert "of them could not be evaluated, and count as half right" in found.sentence


def test_held_out_is_claimed_only_if_all_clients_agree():
    found = evaluate(nodes_of(mechanism="none", held_out=10))
    right, _, _ = measured(SIZES, first=-10)
    assert (found.held_out, found.samples) == (True, 10 * CLIENTS)
    assert found.accuracy == pytest.approx(right.mean(), abs=1e-4)

    def one_not(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node:
            reply.content[protocol.METRICS] = MetricRecord({**reply.content[protocol.METRICS], "held-out": 0})
        return reply

    assert not evaluate(nodes_of(held_out=10, forged=one_not)).held_out


def test_lost_clients_leave_count_number_and_noise():
    found = evaluate(nodes_of(deaf=(0, 4)))
    heard = [str(i) for i in (1, 2, 3)]
    assert (found.samples, found.clients) == (sum(SIZES[name] for name in heard), 3)
    assert found.right_std == pytest.approx(evaluate(nodes_of()).right_std * math.sqrt(3 / 5))


FORGED = {
    "no noise": {"noise-std": None},
    "noise that is no number": {"noise-std": math.nan},
    "noise below zero": {"noise-std": -1.0},
    "whole noise": {"noise-std": 1},
    "noise whose square overflows": {"noise-std": 1e200},
    "held out by half": {"held-out": 2},
    "no word of it": {"held-out": None},
    "another share for scores": {"scores-share": 0.4},
    "no samples": {"num-examples": 0},
}


@pytest.mark.parametrize("said", FORGED.values(), ids=list(FORGED))
def test_a_reply_that_does_not_say_what_it_is_of_is_dropped(said):
    def forged(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node + 2:
            entries = {**reply.content[protocol.METRICS], **said}
            reply.content[protocol.METRICS] = MetricRecord({k: v for k, v in entries.items() if v is not None})
        return reply

    strategy = evaluation()
    assert evaluate(nodes_of(forged=forged), strategy).clients == CLIENTS - 1
    assert strategy.history[0].malformed == 1


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"evaluates": False}, "clients refused with not-configured"),
        ({"deaf": range(CLIENTS)}, "5 replies were lost"),
        ({"bins": 0}, "5 replies were malformed"),
        ({"share": 0.25}, "5 replies were malformed"),
        ({"forged": lambda reply: Message(Error(protocol.INTERNAL_ERROR, "x"), reply_to=reply)}, "internal-error"),
    ],
)
def test_where_nobody_answers_it_says_what_was_said(nodes, words):
    with raises(NotEvaluatedError, "missing", match=words):
        evaluate(nodes_of(**nodes))


# A server that is killed.


def test_a_server_that_was_killed_after_the_round_has_it_in_its_checkpoint(tmp_path):
    path = tmp_path / "evaluation.npz"
    found = evaluate(nodes_of(), evaluation(session=None, checkpoint=path))
    again = evaluate(nodes_of(deaf=range(CLIENTS)), evaluation(session=None, checkpoint=path))
    assert again.document == found.document
    with raises(CheckpointError, "mismatch", "start"):  # another model is another evaluation
        evaluation(session=None, checkpoint=path).evaluate(nodes_of(), ArrayRecord([-MODEL]))
    with raises(CheckpointError, "mismatch", "bins"):
        evaluation(session=None, checkpoint=path, bins=0).evaluate(nodes_of(), ArrayRecord([MODEL]))


def test_a_server_killed_in_the_round_asks_again(tmp_path):
    path, grid = tmp_path / "evaluation.npz", nodes_of(forged=killing)
    first = evaluation(session=None, checkpoint=path)
    with pytest.raises(KilledError):
        evaluate(grid, first)
    second, second_grid = evaluation(session=None, checkpoint=path), nodes_of()
    second_grid.contexts = grid.contexts  # the clients' ledgers are as they were
    # No client of a test repeats its last answer, as real nodes do: what was released is lost, and spent once.
    with raises(NotEvaluatedError, "missing", match=r"killed before it had their answers.*cap-reached"):
        evaluate(second_grid, second)
    assert second.session == first.session


# Under secure aggregation.


SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(3, 4)}


class Secure(SecureGrid):
    """Clients that evaluate under masks, and two helpers."""

    def __init__(self, **changes):
        names = tuple(SIZES)
        roster = Roster.simulated(SEED, names, HELPERS)

        def client_fn(context):
            name = str(context.node_config["partition-id"])
            masking = Masking(name, ClientKey.simulated(SEED, name), roster)
            return client_of(name, context.state, masking=masking, **{**SUMS, **changes})

        super().__init__(SimpleNamespace(app=numpy_client_app(client_fn), count=CLIENTS, roster=roster))


def of_sums(**options):
    return evaluation(secure_aggregation=SecureAggregation(min_cohort=4, helpers=2), **options)


def test_an_opened_sum_has_every_clients_noise_share():
    """Five standard deviations: by chance once in a million and a half."""
    found = evaluate(Secure(), of_sums())
    right, _, _ = measured(SIZES)
    share = evaluation_policy(OWN_MU, **SUMS).plan(2 + 2 * BINS).noise_std
    alone = evaluation_policy(OWN_MU).plan(2 + 2 * BINS).noise_std
    assert share == pytest.approx(alone / math.sqrt(3), rel=1e-2)
    assert found.right_std == pytest.approx(share * math.sqrt(CLIENTS) / math.sqrt(2) / math.sqrt(0.5), rel=1e-9)
    assert (found.clients, found.samples) == (CLIENTS, sum(SIZES.values()))
    assert 0 < abs(found.right - right.sum()) < 5 * found.right_std


def test_a_sum_of_too_few_stays_closed_and_nothing_is_said():
    grid = Secure()
    grid.tamper = lambda replies: replies[:3]
    with raises(NotEvaluatedError, "missing", match="round was closed"):
        evaluate(grid, of_sums())


def test_a_killed_server_remembers_whose_noise_an_unopened_sum_has(tmp_path):
    path, grid = tmp_path / "evaluation.npz", Secure()

    def dying(kind, helper, message):
        if kind == "open":
            raise KilledError
        return message

    grid.watch = dying
    with pytest.raises(KilledError):
        evaluate(grid, of_sums(session=None, checkpoint=path))
    grid.watch = lambda kind, helper, message: message
    found = evaluate(grid, of_sums(session=None, checkpoint=path))
    assert found.clients == CLIENTS
    assert found.right_std == pytest.approx(evaluate(Secure(), of_sums()).right_std, rel=1e-12)


# With a trusted server.


def trusted(**options):
    policy = evaluation_policy(OWN_MU, budget_mu=MU, trust="trusted-server")
    options = {"policy": policy, "noise_keys": SimulatedKeys(1, "server"), "bins": BINS, **options}
    return PrivateEvaluation(num_clients=CLIENTS, seed=1, **{"session": "evaluation", **options})


def test_a_trusted_server_adds_the_noise_of_one_client_for_all():
    strategy, width = trusted(), 2 + 2 * BINS
    found = evaluate(nodes_of(trust="trusted-server"), strategy)
    std = strategy.aggregator.stream.noise_std(width)
    assert math.sqrt(2) / OWN_MU < std < 1.01 * math.sqrt(2) / OWN_MU
    right, _, _ = measured(SIZES)
    noise = strategy.aggregator.stream.fresh_normals(1, width) * std
    assert found.right == pytest.approx(right.sum() + (noise[0] - noise[1]) / (2 * math.sqrt(0.5)), abs=1e-3)
    assert found.right_std == strategy.query.right_std(std)
    assert strategy.aggregator.guaranteed_mu(width) == OWN_MU
    with raises(ConfigurationError, "conflict", "policy", match="evaluation_policy"):
        trusted(
            policy=PrivacyPolicy(
                1.0, 1, 3, 1.0, trust="trusted-server", batch_selection="full_batch", mechanism="independent"
            )
        )


def test_a_trusted_server_drops_oversized_contributions():
    def forged(reply):
        if reply.metadata.src_node_id == NodesGrid.first_node:
            reply.content[protocol.ARRAYS] = ArrayRecord({"0": Array(np.full(2 + 2 * BINS, 2.0**8))})
        return reply

    strategy = trusted()
    assert evaluate(nodes_of(trust="trusted-server", forged=forged), strategy).clients == CLIENTS - 1
    assert strategy.history[0].malformed == 1


def test_a_trusted_server_that_was_killed_after_the_round_publishes_the_same_figures(tmp_path):
    path = tmp_path / "evaluation.npz"
    found = evaluate(nodes_of(trust="trusted-server"), trusted(noise_keys=None, session=None, checkpoint=path))
    again = evaluate(nodes_of(deaf=range(CLIENTS)), trusted(noise_keys=None, session=None, checkpoint=path))
    assert again.document == found.document
    other = evaluate(nodes_of(trust="trusted-server"), trusted(noise_keys=SystemKeys.generate()))
    assert other.right != found.right
