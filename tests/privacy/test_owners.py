"""Rows of data by owner: who is where, what is kept of whom, and that nobody's samples change another's row."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, Owners, PrivacyPolicy, person_mu, policy_guarantee

NAMES = np.array(["ann", "bob", "ann", "cy", "ann", "bob", "ann"])


def rows_of(owners):
    """What is kept of each owner."""
    return [sorted(set(row[there].tolist())) for row, there in zip(*owners.places(slice(0, len(owners))), strict=True)]


def test_owners_are_in_the_order_of_their_first_rows_and_keep_their_first_ones():
    assert rows_of(Owners.of(NAMES, 2)) == [[0, 2], [1, 5], [3]]
    assert rows_of(Owners.of(NAMES, 9)) == [[0, 2, 4, 6], [1, 5], [3]]


@pytest.mark.parametrize("names", [np.arange(7) - 3, np.array([f"{i}".encode() for i in range(7)]), NAMES])
def test_integers_and_texts_name_owners(names):
    assert len(Owners.of(names, 3)) == len(set(names.tolist()))


@pytest.mark.parametrize("names", [np.array([0.5, 0.5]), np.zeros((2, 2), int), np.array([], int), np.array([None])])
def test_anything_else_is_refused_without_a_word_of_any_row(names):
    with pytest.raises(ConfigurationError, match="Expected one owner a row, integers or texts") as refused:
        Owners.of(names, 1)
    assert "0.5" not in str(refused.value)


def test_a_place_is_as_wide_for_one_sample_as_for_the_most():
    places, present = Owners.of(NAMES, 3).places(slice(0, 3))
    assert places.tolist() == [[0, 2, 4], [1, 5, 1], [3, 3, 3]]
    assert present.sum(axis=1).tolist() == [3, 2, 1]


def test_rows_that_are_added_move_nobody():
    before = Owners.of(NAMES, 3)
    after = Owners.of(np.append(NAMES, ["dee", "ann", "dee"]), 3)
    assert rows_of(after)[:3] == rows_of(before)  # of ann there were three already
    assert rows_of(after)[3] == [7, 9]


def test_stand_ins_and_parts_of_a_table():
    assert rows_of(Owners.in_turn(5, 2)) == [[0, 1], [2, 3], [4]]
    assert rows_of(Owners.in_turn(3, 2).taken_from(np.array([40, 7, 9]))) == [[7, 40], [9]]


def test_a_policy_of_owners_says_so_and_clips_rows_of_gradients():
    policy = PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4)
    said = policy_guarantee(policy, policy.plan(5).mu)
    assert said.unit == "owner"
    assert "for replacement of all samples of one owner on one machine" in said.sentence
    assert "up to 4 samples of an owner clipped together" in said.sentence
    assert "whether one owner's samples on a machine were used" in said.meaning
    assert policy_guarantee(PrivacyPolicy(1.0, 2, 3, mu=1.0), 1.0).unit == "sample"
    with pytest.raises(ConfigurationError, match="Expected clip_unit 'sample' with samples_per_owner, got 'update'"):
        PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=4, clip_unit="update")
    for wrong in (-1, True, 1.5):
        with pytest.raises(ConfigurationError, match="Expected samples_per_owner to be an integer >= 0"):
            PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=wrong)


def test_a_session_belongs_to_its_number_of_samples_per_owner_and_older_ones_go_on():
    plain, owned = (PrivacyPolicy(1.0, 2, 3, mu=1.0, samples_per_owner=most) for most in (0, 4))
    assert plain.plan(5).fingerprint != owned.plan(5).fingerprint
    assert "samples_per_owner" not in plain.terms(5)  # as in the terms of sessions that were begun without owners
    assert '"samples_per_owner": 4' in owned.terms(5)


def test_a_persons_figure_says_what_it_needs():
    assert person_mu(0.0, machines=3) == 0.0
    for wrong, complaint in (
        ({"machines": 0}, "machines"),
        ({"samples": 1.5}, "samples"),
        ({"trust": "secure-aggregation"}, "Expected mu_local under secure aggregation"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            person_mu(1.0, **wrong)
    with pytest.raises(ConfigurationError, match="Expected mu >= 0"):
        person_mu(-1.0)
