"""A common model adapted inside a site: when it may leave the common model, and what it must not depend on."""

import numpy as np
import pytest
from murmurfl.clients import PersonalHead
from murmurfl.clients.personal_head import FEWEST_OF_ONE_CLASS, FEWEST_OWNERS, held_out_scores
from murmurfl.privacy import ConfigurationError, derived_seed

from tests.harness.errors import raises


def random(*key):
    return np.random.Generator(np.random.Philox(key=derived_seed("personal head", *key)))


def site(count, *key, turned=False, classes=3):
    """Scores of a common model that knows the truth, features and labels; the site's relation may be another one."""
    generator = random(*key)
    features = generator.normal(size=(count, 4))
    truth = features @ random("truth").normal(size=(4, classes)) * 2
    labels = (-truth if turned else truth).argmax(axis=1)
    return truth, labels, features


def right(scores, labels):
    return float((scores.argmax(axis=1) == labels).mean())


@pytest.mark.parametrize("count", [1, 2, FEWEST_OWNERS - 1])
def test_few_rows_give_the_common_model_back(count):
    head = PersonalHead.fit(*site(count, "few", turned=True))
    assert (head.share, head.common) == (1.0, 1.0)
    assert not head.weights.any()
    assert not head.offsets.any()


def test_few_rows_of_a_single_class_give_the_common_model_back():
    scores, _, features = site(FEWEST_OF_ONE_CLASS, "one class")
    labels = np.full(len(scores), 2)
    assert PersonalHead.fit(scores[1:], labels[1:], features[1:]).common == 1.0
    assert PersonalHead.fit(scores, labels, features).common < 0.9


@pytest.mark.parametrize("copies", [1, 3])
def test_small_sites_like_all_others_keep_the_common_model(copies):
    # Without the price the mean weight over these sites is 0.76, and 0.85 if each copy of an owner's row counts.
    kept = []
    for key in range(12):
        scores, _, features = site(20, "alike", key)
        labels = (scores + random("drawn", key).gumbel(size=scores.shape)).argmax(axis=1)
        rows = [np.repeat(part, copies, axis=0) for part in (scores, labels, features)]
        kept.append(PersonalHead.fit(*rows, owners=np.repeat(np.arange(20), copies)).common)
    assert np.mean(kept) > 0.88


def test_a_site_with_other_relations_leaves_the_common_model():
    scores, labels, features = site(300, "turned", turned=True)
    head = PersonalHead.fit(scores, labels, features)
    new_scores, new_labels, new_features = site(1000, "turned, new", turned=True)
    assert right(new_scores, new_labels) < 0.4
    assert right(head.scores(new_scores, new_features), new_labels) > 0.9
    assert head.common < 0.05


def skewed(count, *key):
    """Rows of a site where class 0 is frequent, whose labels follow the scores' probabilities."""
    scores, _, features = site(count, *key)
    labels = (scores + np.eye(3)[0] * 3 + random("drawn", *key).gumbel(size=scores.shape)).argmax(axis=1)
    return scores, labels, features


def test_offsets_alone_follow_the_classes_of_a_site():
    scores, labels, _ = skewed(300, "skew")
    head = PersonalHead.fit(scores, labels)
    assert head.weights.size == 0
    assert head.offsets[0] - head.offsets[1:].mean() == pytest.approx(3, abs=1)
    new_scores, new_labels, _ = skewed(3000, "skew, new")
    assert right(head.scores(new_scores), new_labels) > right(new_scores, new_labels) + 0.05


def test_scores_that_are_too_small_are_no_reason_to_change_a_class():
    scores, labels, _ = site(4000, "small")
    kept = np.flatnonzero((labels == 0) | (random("kept").random(4000) < 0.05))[:300]
    small = scores[kept] * 0.2  # always right, but unsure: offsets would lower the loss
    head = PersonalHead.fit(small, labels[kept])
    assert head.share > 2
    assert right(head.scores(small), labels[kept]) > 0.99


def test_the_order_of_rows_does_not_matter():
    scores, labels, features = site(80, "order", turned=True)
    order = random("order").permutation(80)
    owners = np.array([f"person {number // 2}" for number in range(80)])
    for given in (None, owners):
        own = PersonalHead.fit(scores, labels, features, owners=given)
        other = PersonalHead.fit(
            scores[order], labels[order], features[order], owners=None if given is None else given[order]
        )
        assert np.array_equal(own.weights, other.weights)
        assert np.array_equal(own.offsets, other.offsets)


def test_copies_of_an_owners_rows_are_no_evidence():
    scores, labels, features = site(4, "copies", turned=True)
    many = [np.repeat(part, 50, axis=0) for part in (scores, labels, features)]
    assert PersonalHead.fit(*many, owners=np.repeat(np.arange(4), 50)).common == 1.0
    assert PersonalHead.fit(*many).common < 0.5


def test_no_owner_stands_on_both_sides_of_a_held_out_fold():
    # Features name the owner and labels are drawn by owner: only a model that knows an owner's other rows is right.
    generator = random("owners")
    owners = np.repeat(np.arange(40), 5)
    features = np.eye(40)[owners]
    labels = generator.integers(0, 2, 40)[owners]
    scores = np.zeros((200, 2))
    apart = held_out_scores(scores, labels, features, owners=owners)
    mixed = held_out_scores(scores, labels, features)
    assert right(apart.alone, labels[apart.rows]) < 0.65
    assert right(mixed.alone, labels[mixed.rows]) > 0.9


def test_held_out_scores_cover_each_row_once():
    scores, labels, features = site(50, "held out")
    found = held_out_scores(scores, labels, features)
    assert sorted(found.rows.tolist()) == list(range(50))
    assert found.alone.shape == found.personal.shape == (50, 3)
    assert len(held_out_scores(scores[:1], labels[:1], features[:1]).rows) == 0


def test_numbers_are_adapted_too():
    generator = random("numbers")
    features = generator.normal(size=(200, 3))
    labels = features @ [1.0, -2.0, 0.5] + 0.1 * generator.normal(size=200)
    scores = (features @ [1.0, 0.0, 0.0] + 4.0)[:, None]
    head = PersonalHead.fit(scores[:150], labels[:150], features[:150])
    errors = head.scores(scores[150:], features[150:])[:, 0] - labels[150:]
    assert np.sqrt(np.square(errors).mean()) < 0.15


@pytest.mark.parametrize("features", [np.ones((30, 2)), np.zeros((30, 0)), np.eye(30)[:, :29]])
def test_constant_missing_and_wide_features_are_fitted(features):
    scores, labels, _ = site(30, "odd features", turned=True)
    head = PersonalHead.fit(scores, labels, features)
    assert np.isfinite(head.scores(scores, features)).all()
    if features.shape[1] == 2:
        assert not head.weights.any(), "a constant column says nothing that an offset does not"


def test_a_head_of_torch_features_is_fitted_in_a_few_lines():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    body, last = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()), torch.nn.Linear(8, 3)
    _, labels, inputs = site(200, "torch")
    with torch.no_grad():
        below = body(torch.tensor(inputs, dtype=torch.float32))
        scores = last(below)
    head = PersonalHead.fit(scores, labels, below)
    assert right(head.scores(scores, below), labels) > 0.8 > right(scores.numpy(), labels)


@pytest.mark.parametrize(
    ("change", "kind", "setting"),
    [
        ({"labels": np.array([], int), "scores": np.zeros((0, 3)), "features": np.zeros((0, 4))}, "missing", "labels"),
        ({"labels": np.zeros(5, int)}, "wrong-shape", "labels"),
        ({"labels": np.full(20, 3)}, "out-of-range", "labels"),
        ({"labels": np.full(20, 0.5)}, "out-of-range", "labels"),
        ({"scores": np.zeros(20)}, "wrong-shape", "scores"),
        ({"features": np.full((20, 4), np.nan)}, "out-of-range", "features"),
        ({"scores": np.full((20, 3), np.inf)}, "out-of-range", "features"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, kind, setting):
    scores, labels, features = site(20, "refused")
    with raises(ConfigurationError, kind, setting):
        PersonalHead.fit(**{"scores": scores, "labels": labels, "features": features, **change})


def test_a_head_says_what_it_contains():
    assert "contains this site's records, do not publish" in repr(PersonalHead.fit(*site(20, "said")))


def test_a_head_with_features_asks_for_them():
    scores, labels, features = site(100, "asks", turned=True)
    with raises(ConfigurationError, "missing", "features"):
        PersonalHead.fit(scores, labels, features).scores(scores)
