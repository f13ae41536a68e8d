"""What a plan says of rounds that do not wait for all, and which run configurations may have them."""

import re

import pytest
from murmurfl.app.planning.plan_lines import late_lines
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wait_for": 0.8}, "no budget is"),
        ({"wait_for": 0.8, "strategy": "noisy-sgd"}, "one that never comes is lost, and its budget"),
        (
            {"wait_for": 0.8, "strategy": "full-batch"},
            r"2 machines a round \(20 %\) the budget of a release",
        ),
        ({"ask": 1.2, "clients_per_round": 5, "strategy": "full-batch"}, "asks 6 machines and ends when 5"),
    ],
)
def test_a_plan_says_what_late_answers_are_worth(settings, said):
    (line,) = late_lines(RunConfig(**settings))
    assert re.search(said, line)


def test_a_plan_says_nothing_where_rounds_wait_for_all():
    assert late_lines(RunConfig()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "one-shot", "wait_for": 0.8}, "wait-for to be 1 with this strategy"),
        ({"strategy": "tree-momentum", "wait_for": 0.8}, "wait-for to be 1 with this strategy"),
        ({"ask": 1.2}, "ask to be at most 10 machines over clients-per-round = 10"),
        ({"trust": "secure-aggregation", "wait_for": 0.5}, "at least min-cohort = 8 machines"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        RunConfig(**settings)


def test_whatever_depends_on_machines_a_round_counts_those_that_are_asked():
    more, as_many = RunConfig(clients_per_round=5, ask=1.2), RunConfig(clients_per_round=6)
    assert more.asked_per_round == 6
    assert prepare(more).num_rounds == prepare(as_many).num_rounds
    assert prepare(more).values == prepare(as_many).values
    assert prepare(more).strategy().clients_per_round == 6
