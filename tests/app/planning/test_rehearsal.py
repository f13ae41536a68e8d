"""A rehearsal: the very run on made-up data of its shape, with one client in the place of those that are asked."""

import math
from dataclasses import replace
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
from murmurfl.app import simulate
from murmurfl.app.data.task import Dataset, own_task
from murmurfl.app.planning import decide, rehearsal
from murmurfl.app.planning.plan_lines import longer_lines, worth_lines
from murmurfl.app.planning.rehearsal import (
    ALIKE,
    FAMILY,
    SKEWED,
    LocalBaseline,
    SiteMix,
    SyntheticData,
    declared_mix,
    foretold,
    local_baselines,
    mean_auc,
    mean_retained_utility,
    rehearse,
)
from murmurfl.app.runs.experiment import plan_request_of, prepare, resolve
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Label, Part, Schema

SHAPE = {"samples": 400, "features": 12, "classes": 3, "norm": 2.0}
SETTINGS = {"task": "synthetic", "task.samples": 2000, "task.features": 20, "num-clients": 20}
EVERYBODY = {**SETTINGS, "clients-per-round": 20, "noise-quality": "fast"}


def experiment(**settings):
    return prepare(RunConfig.from_mapping({**EVERYBODY, **settings}))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("profile", FAMILY)
def test_made_up_rows_keep_to_the_bound_and_are_always_the_same(profile):
    made = SyntheticData(profile, **SHAPE)
    data, again = made.dataset, SyntheticData(profile, **SHAPE).dataset
    for rows in (data.train_features, data.test_features):
        assert np.linalg.norm(rows, axis=1).max() <= 2.0 * (1 + 1e-6)
    np.testing.assert_array_equal(data.train_features, again.train_features)
    floor, ceiling = made.bounds
    assert 1 / 3 <= floor < ceiling <= 1
    assert set(data.train_labels) == {0, 1, 2}


@pytest.mark.parametrize("classes", [2, 4])
def test_a_declared_majority_is_that_of_the_made_up_data_and_judged_by_auc(classes):
    made = SyntheticData(FAMILY[2], **{**SHAPE, "classes": classes, "samples": 4000}, majority=0.9)
    shares = np.bincount(made.dataset.train_labels) / 4000
    # Off by 0.03 in fewer than 1 of a million.
    np.testing.assert_allclose(shares, [0.9, *[0.1 / (classes - 1)] * (classes - 1)], atol=0.03)
    floor, ceiling = made.bounds
    assert floor == 0.5 < ceiling - 0.1 < 0.9


def test_the_mean_auc_is_that_of_each_class_against_the_rest():
    scores = np.log([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]]) + np.array([[3.0], [0.0], [-3.0], [0.0]])
    assert mean_auc(scores, np.array([0, 1, 1, 1])) == 1.0
    assert mean_auc(scores, np.array([1, 0, 1, 1])) == pytest.approx(1 / 3)
    assert mean_auc(np.zeros((4, 3)), np.array([0, 1, 2, 2])) == 0.5


def unequal(config):
    generator = np.random.Generator(np.random.Philox(7))
    rows, labels = generator.uniform(-1, 1, (600, 5)), (generator.random(600) < 0.1).astype(np.int64)
    return rows[:400], labels[:400], rows[400:], labels[400:]


unequal.schema = Schema(inputs=(Part(shape=(5,), bounds=(-1, 1)),), label=Label(classes=2, majority=0.9), norm=2.0)


def test_the_schema_of_a_task_says_the_majority_that_is_rehearsed(monkeypatch):
    config = RunConfig.from_mapping({"strategy": "full-batch", "task": f"{__name__}:unequal", "mu": 4.0})
    made, score = [], rehearsal._score
    monkeypatch.setattr(rehearsal, "_score", lambda *parts: made.append(parts[1]) or score(*parts))
    low, high = foretold(prepare(config), resolve)
    assert {(one.majority, one.norm, one.bounds[0]) for one in made} == {(0.9, 2.0, 0.5)}
    assert 0 <= low < high <= 1
    monkeypatch.setattr(unequal, "schema", Schema(inputs=(Part(shape=(5,)),), label=Label(classes=2)))
    assert own_task(unequal, "a name").majority == own_task(unequal, "a name").feature_bound == 0


def test_classes_that_lie_farther_apart_are_easier():
    ceilings = [SyntheticData(FAMILY[1]._replace(between=share), **SHAPE).bounds[1] for share in (0.02, 0.15, 0.5)]
    assert ceilings == sorted(ceilings)
    assert ceilings[-1] > ceilings[0] + 0.2


def test_two_classes_overlap_as_those_of_people_do():
    _, told = SyntheticData(FAMILY[2], **{**SHAPE, "classes": 2, "samples": 4000}).bounds
    assert 0.65 < told < 0.8  # recidivism 0.68, made-up people 0.78


def test_one_client_alone_is_no_worse_than_the_usual_number_in_a_regression():
    made = SyntheticData(FAMILY[2], **{**SHAPE, "classes": 1, "features": 120, "samples": 2000})
    assert -0.1 < made.learnt(150) < made.bounds[1]  # nearly as few rows as columns


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full-batch", "num-rounds": 6},
        {"strategy": "mu2", "batch-size": 12, "num-rounds": 8},
        {"strategy": "noisy-sgd", "batch-size": 25, "num-rounds": 4},
        {"strategy": "noisy-sgd", "batch-size": 25, "num-rounds": 16, "clients-per-round": 5},
        {"strategy": "full-batch", "trust": "secure-aggregation", "num-rounds": 6},
        {"strategy": "trusted-full-batch", "num-rounds": 6},
        {"strategy": "trusted-mu2", "batch-size": 12, "num-rounds": 8},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_one_client_has_the_noise_of_all_that_a_round_asks(settings, monkeypatch):
    """Noise alone, at the end of twelve runs: 2,400 values a side, whose spread is off by a tenth in 1 of 10,000."""
    asked = {**settings, "mu": 0.05}
    whole = experiment(**asked)
    monkeypatch.setattr(rehearsal, "MOST_SAMPLES", 10**6)
    made = {}
    monkeypatch.setattr(rehearsal, "_score", lambda config, *rest: made.setdefault("config", config) and 0.5)
    rehearse(whole, resolve, profiles=FAMILY[:1])
    config = made["config"]
    zeros = Dataset(
        *(np.zeros((2000, 20), np.float32), np.zeros(2000, np.int64)),
        *(np.zeros((10, 20), np.float32), np.zeros(10, np.int64)),
        10,
    )

    def ends(config, clients):
        parts = np.array_split(np.arange(2000), clients)
        found = []
        for seed in range(12):
            run = resolve(replace(config, seed=seed), zeros, [rehearsal.Shard(zeros, part) for part in parts])
            strategy = run.strategy()
            result = strategy.start(rehearsal.direct_clients(run), run.initial_arrays(), num_rounds=run.num_rounds)
            found.append(result.arrays.to_numpy_ndarrays()[0].ravel())
        return float(np.std(np.concatenate(found)))  # rows of zeros: weights move by noise alone

    values = whole.values
    same = replace(whole.config, clip_norm=values.clip_norm, learning_rate=values.learning_rate)
    same = replace(same, num_rounds=whole.num_rounds, centring="none")
    config = replace(config, allow_exhaustion=True)
    assert ends(config, config.num_clients) == pytest.approx(ends(same, 20), rel=0.1)


def test_less_noise_keeps_more_and_the_range_says_so():
    kept = [mean_retained_utility(experiment(strategy="full-batch", mu=mu), resolve) for mu in (0.01, 0.1, 2.0)]
    assert kept[0] < 0.3 < kept[2]
    assert kept == sorted(kept)
    low, high = foretold(experiment(strategy="full-batch", mu=10.0), resolve)
    assert 0.5 < low < high <= 1


@pytest.mark.more_cases
@pytest.mark.parametrize(("samples", "mu", "worth"), [(40_000, 0.005, False), (500, 8.0, True)])
def test_whether_federating_is_worth_it_depends_on_what_a_client_has_alone(samples, mu, worth):
    settings = {**EVERYBODY, "task.samples": samples, "strategy": "auto", "mu": mu}
    chosen = decide(plan_request_of(RunConfig.from_mapping(settings))).chosen
    assert [one.is_worth for one in chosen.local_baselines] == [worth, worth]
    assert worth_lines(chosen)[0].startswith("Worth federating," if worth else "Not worth federating")


TRIED = {**EVERYBODY, "strategy": "full-batch", "mu": 1.0, "task.samples": 4000}


def test_skewed_labels_cost_one_client_alone_and_not_full_batches():
    """Of ten classes the review's cell: everybody's data are worse known, a site's own mix is easier."""
    run = experiment(**TRIED)
    alike, *skewed = local_baselines(run, resolve, [ALIKE, *(SiteMix("label-skew", alpha) for alpha in (1.0, 0.1))])
    assert len({one.federation for one in (alike, *skewed)}) == 1
    alone = [one.alone for one in (alike, *skewed)]
    assert alone == sorted(alone, reverse=True)
    assert alone[2] < 0.5 * alone[0]
    leads = [one.own_lead for one in (alike, *skewed)]
    assert leads == sorted(leads)
    assert leads[2] > leads[0] + 0.1


def test_few_of_many_clients_in_a_round_notice_skew():
    """Groups of a round's clients differ, the less the more clients a round asks."""
    parts = {"num-clients": 40, "clients-per-round": 4, "strategy": "noisy-sgd", "mu": 1e6, "batch-size": 50}
    run = experiment(**{**TRIED, **parts, "num-rounds": 10})
    alike, skewed = (
        fmean(one.score for one in rehearse(run, resolve, profiles=FAMILY[:3], sites=sites))
        for sites in (ALIKE, SiteMix("label-skew", 0.05))
    )
    assert skewed < alike - 0.01


def test_more_rows_of_a_class_come_from_where_its_rows_lie():
    made = SyntheticData(FAMILY[2], **{**SHAPE, "samples": 4000})
    data, labels = made.dataset, np.repeat(np.arange(3), 2000)
    more = made.rows_of(labels, "a client")
    np.testing.assert_array_equal(more, made.rows_of(labels, "a client"))
    assert np.linalg.norm(more, axis=1).max() <= 2.0 * (1 + 1e-6)
    spread = data.train_features.std()
    for one in range(3):  # a mean over 1,300 rows is off by five standard errors in one of a million
        known = data.train_features[data.train_labels == one].mean(axis=0)
        np.testing.assert_allclose(more[labels == one].mean(axis=0), known, atol=5 * spread / math.sqrt(600))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("partition", "keys", "amount"),
    [
        ("label-skew", {"partition.alpha": 0.2}, 0.2),
        ("dirichlet", {"partition.alpha": 0.2}, 0.2),
        ("classes", {"partition.classes": 1}, 1.0),
        ("half-by-label", {}, 0.0),
    ],
)
def test_a_declared_partition_deals_made_up_labels(partition, keys, amount):
    if partition == "dirichlet":
        pytest.importorskip("flwr_datasets")
    many = {"num-clients": 10, "clients-per-round": 10, "strategy": "full-batch", "partition": partition}
    run = experiment(**{**many, **keys})
    mix = declared_mix(run.config)
    assert mix == SiteMix(partition, amount)
    alike, declared = local_baselines(run, resolve, [ALIKE, mix])
    assert declared.alone < alike.alone
    assert declared.own_lead > alike.own_lead


def test_proportions_of_a_round_vary_as_the_concentration_says():
    """Of ten clients with two of ten classes each: variances of 4,000 draws are off by a tenth in 1 of 10,000."""
    generator = np.random.Generator(np.random.Philox(3))
    drawn = [
        np.mean([np.bincount(generator.permutation(10)[:2], minlength=10) / 2 for _ in range(5)], axis=0)
        for _ in range(2000)
    ]
    same = generator.dirichlet(np.full(10, SiteMix("classes", 2.0).concentration(10, 5)), 2000)
    assert np.var(drawn) == pytest.approx(np.var(same), rel=0.1)
    assert SiteMix("label-skew", 0.3).concentration(10, 1) == pytest.approx(0.3)
    assert ALIKE.concentration(10, 5) == SiteMix("classes", 10.0).concentration(10, 5) == 0.0


def test_a_partition_that_the_data_come_with_declares_no_mix():
    assert declared_mix(SimpleNamespace(partition="own")) is None


def baselines(alike, skewed, declared, trust="untrusted-server"):
    found = [LocalBaseline(sites, 0.5, 0.5 - gain, 0.1) for sites, gain in ((ALIKE, alike), (SKEWED, skewed))]
    config = SimpleNamespace(trust_model=trust)
    return SimpleNamespace(
        local_baselines=found, request=SimpleNamespace(declares_mix=declared), config=config, measure=""
    )


@pytest.mark.parametrize(
    ("alike", "skewed", "declared", "words"),
    [
        (0.2, 0.3, False, ("Worth federating, likely:",)),
        (-0.2, -0.1, False, ("Not worth federating, likely:", "More clients")),
        (-0.2, 0.3, False, ("Worth federating? It depends", "likely if sites' labels differ, not if alike")),
        (-0.2, 0.3, True, ("Worth federating, likely, where sites differ", "would not be worth it")),
        (0.2, -0.3, True, ("Not worth federating, likely, where sites differ", "it would be worth it")),
        (-0.9, 0.2, True, ("Not worth federating, perhaps, where sites differ", "a little less", "would not be")),
    ],
)
def test_the_verdict_says_where_it_depends_on_how_sites_differ(alike, skewed, declared, words):
    text = " ".join(worth_lines(baselines(alike, skewed, declared)))
    for one in words:
        assert one in text
    assert "keeps 50 % of what all samples teach" in text
    assert text.count("depends") == (not declared and alike * skewed < 0)
    assert ("own mix of classes one client alone is likely better" in text) == text.startswith("Worth")


@pytest.mark.more_cases
@pytest.mark.parametrize(("asked", "said"), [({}, "More rounds would "), ({"num-rounds": 2}, None)])
def test_plan_says_whether_more_rounds_would_learn_more(asked, said):
    decision = decide(plan_request_of(RunConfig.from_mapping({**EVERYBODY, "strategy": "auto", "mu": 2.0, **asked})))
    lines = longer_lines(decision)
    assert lines == [] if said is None else lines[0].startswith(said)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("kept", "word"), [(0.6, "gain little"), (0.7, "learn more"), (0.5, "learn less")])
def test_twice_as_many_rounds_are_compared_by_what_they_keep(kept, word):
    decision = SimpleNamespace(
        chosen=SimpleNamespace(retained_utility=0.6), longer=SimpleNamespace(retained_utility=kept)
    )
    assert longer_lines(decision) == [f"More rounds would {word}, likely: twice as many keep {100 * kept:.0f} % of it."]


@pytest.mark.parametrize("settings", [{"num-rounds": 201}, {"num-rounds": 190, "task.features": 3000}])
def test_what_would_take_minutes_is_not_rehearsed(settings, monkeypatch):
    monkeypatch.setattr(rehearsal, "_score", lambda *_: pytest.fail("rehearsed"))
    assert rehearse(experiment(strategy="full-batch", **settings), resolve) == []


def test_a_model_that_cannot_learn_from_made_up_rows_is_not_rehearsed(monkeypatch):
    monkeypatch.setattr(rehearsal, "_score", lambda *_: math.nan / 0)
    assert rehearse(experiment(strategy="full-batch"), resolve) == []
    assert foretold(experiment(strategy="full-batch"), resolve) is None
    assert mean_retained_utility(experiment(strategy="full-batch"), resolve) == 0


@pytest.mark.parametrize(("mu", "verdict"), [(0.003, "useless"), (3.0, "useful")])
def test_a_run_says_before_it_starts_what_was_rehearsed(mu, verdict):
    result = simulate({**EVERYBODY, "strategy": "full-batch", "mu": mu})
    forecast = result.outcome.forecast
    assert forecast.verdict == verdict
    assert forecast.kept == pytest.approx(fmean(forecast.kept_range))
    assert "Rehearsed on made-up data of its shape" in forecast.sentence


def test_no_sample_changes_what_is_rehearsed():
    one = experiment(strategy="full-batch", mu=1.0)
    other = replace(one, data=replace(one.data, train_features=one.data.train_features * 0 + 7))
    assert foretold(one, resolve) == foretold(other, resolve)
    assert stdev(foretold(one, resolve)) > 0
