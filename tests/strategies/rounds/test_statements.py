"""What counts as a statement of a machine: a server prints figures from it, after a run that may have taken days."""

import math

import pytest
from murmurfl.strategies.rounds.replies import is_statement

PLAIN = {
    "releases": 3,
    "mu-spent": 0.5,
    "mu-guaranteed": 1.0,
    "mu-budget": math.inf,
    "samples-used": 24,
    "max-participations": 10,
    "mechanism": "cancelling",
}
SUMS = {"mu-local": 2.0, "min-honest": 4, "min-cohort": 5}


def test_a_statement_has_all_its_figures_and_under_sums_what_they_rest_on():
    assert is_statement(PLAIN)
    assert is_statement(PLAIN | SUMS)
    assert is_statement(PLAIN | SUMS | {"mu-local": math.inf})


@pytest.mark.parametrize("name", [*SUMS, "mu-guaranteed"])
@pytest.mark.parametrize("value", ["many", None, math.nan, -1, [3], True])
def test_one_machine_cannot_spoil_a_runs_figures_with_something_that_is_none(name, value):
    """It would end the run that has just been made, or put an impossible figure into its sentence."""
    assert not is_statement(PLAIN | SUMS | {name: value})


@pytest.mark.parametrize("change", [{"min-honest": 0}, {"min-cohort": 0}, {"min-honest": 2.5}, {"min-honest": 5000}])
def test_numbers_of_machines_are_whole_and_possible(change):
    assert not is_statement(PLAIN | SUMS | change)
