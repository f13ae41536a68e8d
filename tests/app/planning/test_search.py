"""A search that is paid for: what every ledger has recorded is what is printed, and the count chooses."""

import itertools
import math

import pytest
from murmurfl.app.planning import private_search as module
from murmurfl.app.planning.private_search import divided, search
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, MurmurflError

from tests.harness.errors import raises

FEW = {"num_clients": 4, "clients_per_round": 4, "num_rounds": 3, "strategy": "full-batch", "mu": 8.0}
TWO = [{"learning_rate": 300.0}, {"learning_rate": 0.5}]


SIDES = [{"centring": "private"}, {"private_evaluation": 0.1}]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("changes", [{}, {"strategy": "mu2"}, *SIDES], ids=str)
@pytest.mark.parametrize("public", [False, True])
def test_everything_together_costs_what_is_printed_and_every_client_has_recorded_it(changes, public):
    found = search(RunConfig(**{**FEW, **changes}), TWO, public=public)
    assert found.spent == pytest.approx(8.0, rel=1e-9)
    assert found.guarantee.mu == 8.0
    assert "2 trials, 30 % of mu^2" in found.guarantee.sentence
    assert found.guarantee.covers == "over all sessions of the search"
    assert found.result.mu < 8.0


@pytest.mark.parametrize("public", [False, True])
def test_nothing_is_said_to_be_guaranteed_where_noise_ends_within_reach(public):
    """Of a mu so large a run by itself guarantees nothing, and says so; a search of such runs guarantees no more."""
    found = search(RunConfig(**{**FEW, "num_rounds": 1, "mu": 30.0}), TWO, public=public)
    assert math.isinf(found.result.mu)
    assert math.isinf(found.spent)
    assert math.isinf(found.guarantee.mu)
    assert "Nothing is guaranteed" in found.guarantee.sentence


def test_the_better_step_is_chosen_and_its_multiple_is_of_the_last_mu():
    found = search(RunConfig(**FEW), TWO)
    assert found.chosen == 1
    assert found.trials[1].score > found.trials[0].score + 0.2
    assert found.result.progress[-1].accuracy > 0.6
    assert found.result.experiment.values.learning_rate >= found.trials[1].learning_rate


def test_without_the_counts_share_a_ledger_would_refuse_the_last_training(monkeypatch):
    """The bug that would be: trials that nobody pays for."""
    monkeypatch.setattr(module, "divided", lambda mu, *_: module.Parts(mu / 2, mu / 10, mu))
    with raises(MurmurflError, "missing", match="budget"):
        search(RunConfig(**FEW), TWO)


def test_the_parts_of_mu_add_up_in_squares():
    for trials, share, counting in itertools.product((2, 7), (0.1, 0.6), (0.0, 0.4)):
        parts = divided(0.5, trials, share, counting)
        assert trials * (parts.training**2 + parts.count**2) + parts.last**2 == pytest.approx(0.25)
        assert parts.count == 0 or math.isclose((parts.count / parts.training) ** 2, counting / (1 - counting))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "candidates", "options"),
    [
        ({}, TWO[:1], {}),
        ({}, [{"momentum": 1.0}, {}], {}),
        ({}, [{"clip_norm": 0.0}, {}], {}),
        ({"trust": "secure-aggregation"}, TWO, {}),
        ({"mechanism": "none"}, TWO, {}),
        ({"learning_rate": 1.0}, TWO, {}),
        ({}, TWO, {"share": 1.0}),
        ({}, TWO, {"counting": -0.1}),
    ],
    ids=str,
)
def test_what_cannot_be_searched_for_is_refused_before_anything_is_spent(changes, candidates, options):
    with pytest.raises(ConfigurationError, match="Expected"):
        search(RunConfig(**{**FEW, **changes}), candidates, **options)
