"""What a ledger says of its releases: figures that are never less than what was released, from first principles."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.privacy import PrivacyPolicy, SessionSummary, SumAssumption, gdp_mu
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.ledger import ledger_history as history
from murmurfl.privacy.ledger.ledger_history import ReleaseRow, history_of
from murmurfl.privacy.release.shuffled_privatizer import ShuffledPolicy

K, SIZE = 5, 3
TURNS = {"sample_participations": 3, "min_separation": 2}
KINDS = [
    {"mechanism": "independent"},
    {"mechanism": "independent", "mechanism_options": {"shares": "late"}, **TURNS},
    {"mechanism": "cancelling"},
    {"mechanism": "cancelling", "schedule": "harmonic", **TURNS},
    {"mechanism": "cancelling", "schedule": "paper", "num_rounds": 9},
    {"mechanism": "tree"},
    {"mechanism": "tree", **TURNS},
    {"mechanism": "decay"},
    {"mechanism": "sqrt_toeplitz", **TURNS},
    {"mechanism": "sqrt_normalised"},
    {"mechanism": "bisr", "mechanism_options": {"bands": 3}, **TURNS},
    {"mechanism": "banded", "mechanism_options": {"bands": 2}},
    {"mechanism": "blt"},
    {"mechanism": "optimal"},
    {"mechanism": "independent", "batch_selection": "full_batch", "batch_size": 1},
    {"mechanism": "cancelling", "batch_selection": "shuffled"},
    {"mechanism": "cancelling", "clip_unit": "update", "batch_size": 1},
    {"trust": "secure-aggregation", "sums": SumAssumption(3, 4), "mechanism": "cancelling"},
    {"trust": "secure-aggregation", "sums": SumAssumption(3, 4), "mechanism": "blt", **TURNS},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(map(str, options.values())))


def policy_of(**options):
    return PrivacyPolicy(**{"clip_norm": 1.0, "batch_size": 2, "max_participations": K, "mu": 1.5, **options})


def session_of(policy, releases=K, name="s", **changes):
    """A session as a ledger says it, opened with a policy."""
    plan = policy.plan(SIZE)
    terms = json.loads(policy.terms(SIZE))
    made = SessionSummary(name, plan.loss, releases, 0, False, 0.0, 0.0, terms)
    return replace(made, **changes)


def rows(name="s", releases=K, start=0.0):
    return [ReleaseRow(name, k, start + k, 2 * k) for k in range(1, releases + 1)]


def turns(policy):
    """Every set of releases, from 0, that one sample may be in."""
    if policy.sample_participations == 1:
        return [{j} for j in range(K)]
    gap, most = policy.min_separation, policy.sample_participations
    return [set(range(start, K, gap)[:most]) for start in range(K)]


def exact_mu(policy, releases):
    """The largest shift of the rows drawn up to a release, from C itself: every pattern, every choice of signs."""
    plan = policy.plan(SIZE)
    drawn = sum(plan.mechanism.draws(k) for k in range(1, releases + 1))
    rows_drawn = plan.mechanism.materialize()[:drawn]
    worst = 0.0
    for pattern in turns(policy):
        columns = [rows_drawn[:, j] for j in pattern if j < releases]
        for signs in itertools.product([1.0, -1.0], repeat=len(columns)):
            shift = sum((sign * column for sign, column in zip(signs, columns, strict=True)), np.zeros(drawn))
            worst = max(worst, float(np.linalg.norm(shift)))
    return plan.sensitivity * worst / plan.noise_std


@kinds
def test_figures_cover_what_the_drawn_rows_show(options):
    policy = policy_of(**options)
    lines = history_of([session_of(policy)], rows()).lines
    for k, line in enumerate(lines, start=1):
        exact = exact_mu(policy, k)
        assert line.so_far.worst_case.mu >= exact * (1 - 1e-12)
        assert line.so_far.worst_case.mu <= line.reserved.worst_case.mu
        if policy.trust != "secure-aggregation":
            assert line.so_far.mu == line.so_far.worst_case.mu
            assert line.reserved.mu == policy.plan(SIZE).mu
            if options["mechanism"] not in ("bisr", "banded"):  # of which some products of columns are negative
                assert line.so_far.mu == pytest.approx(exact, rel=1e-5), "and not much more, either"
    assert lines[-1].so_far.mu == pytest.approx(policy.plan(SIZE).mu, rel=1e-9)


def is_too_small(policy):
    lines = history_of([session_of(policy)], rows()).lines
    return any(line.so_far.worst_case.mu < exact_mu(policy, k) * (1 - 1e-12) for k, line in enumerate(lines, start=1))


@pytest.mark.parametrize(
    "bug",
    [
        lambda plan, session, releases: session.loss.times(math.sqrt(releases / K)),
        lambda plan, session, releases: session.loss.times(releases / K),
        lambda plan, session, releases: Loss.of(
            plan.sensitivity * plan.mechanism.sensitivity(n=releases) / plan.noise_std  # as if no sample returned
        ),
    ],
)
def test_a_figure_that_is_too_small_is_caught(bug, monkeypatch):
    monkeypatch.setattr(history, "first_releases", bug)
    too_small = [options for options in KINDS if is_too_small(policy_of(**options))]
    assert too_small


@kinds
def test_sum_epsilon_with_exhausted_clients(options):
    policy = policy_of(**options)
    if policy.trust != "secure-aggregation":
        return
    plan, lines = policy.plan(SIZE), history_of([session_of(policy)], rows()).lines
    shown = [plan.sensitivity * plan.summed_sensitivity(k) / plan.noise_std for k in range(1, K + 1)]
    assert all(line.so_far.mu >= figure for line, figure in zip(lines, shown, strict=True))
    assert [line.so_far.mu for line in lines] == pytest.approx(shown, rel=1e-4)


def test_epochs_of_shuffled_gradients_count_in_full_each():
    policy = ShuffledPolicy(1.0, 4, 3, 1.5)
    lines = history_of([session_of(policy, 3)], rows(releases=3)).lines
    assert [line.so_far.mu for line in lines] == pytest.approx([1.5 * math.sqrt(k / 3) for k in (1, 2, 3)], rel=1e-6)


def test_sessions_add_up_in_squares_in_whatever_order_they_take_turns():
    first, second = policy_of(mechanism="cancelling"), policy_of(mechanism="decay", mu=1.0)
    sessions = [session_of(first, 2, "a"), session_of(second, 3, "b")]
    mixed = [ReleaseRow(*row) for row in [("b", 2, 4.0, 8), ("a", 1, 1.0, 2), ("b", 1, 2.0, 4), ("b", 3, 5.0, 10)]] + [
        ReleaseRow("a", 2, 3.0, 6)
    ]
    lines = history_of(sessions, mixed).lines
    assert [(line.session, line.release) for line in lines] == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 3)]
    made = [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)]
    for line, (of_first, of_second) in zip(lines, made, strict=True):
        exact = [exact_mu(policy, k) for policy, k in ((first, of_first), (second, of_second)) if k]
        assert line.so_far.mu == pytest.approx(math.hypot(*exact), rel=1e-5)
        assert line.so_far.mu >= math.hypot(*exact) * (1 - 1e-12)
    assert [line.reserved.mu for line in lines] == pytest.approx([1.5, *[math.hypot(1.5, 1.0)] * 4])


def test_clock_put_back_keeps_releases_in_order():
    policy = policy_of(mechanism="cancelling", batch_selection="cyclic")
    back = [ReleaseRow("s", k, 100.0 - 10 * k, 20) for k in range(1, K + 1)]
    lines = history_of([session_of(policy)], back).lines
    assert [line.release for line in lines] == list(range(1, K + 1))
    figures = [line.so_far.mu for line in lines]
    assert figures == sorted(figures)


WHOLE = {
    "closed": {"closed": True},
    "a trusted server's": {"trusted": True},
    "without terms": {"terms": {}},
    "of noise of another version": {"terms": {**session_of(policy_of()).terms, "noise_version": 1}},
    "with terms that were changed": {"terms": {**session_of(policy_of()).terms, "noise_std": 1.0}},
    "with another mu than its terms give": {"loss": Loss.of(1.6)},
    "of a batch selection that is not known": {"terms": {**session_of(policy_of()).terms, "order": "sideways"}},
    "of a policy that is not known": {"terms": {**session_of(policy_of()).terms, "mechanism": "magic"}},
    "with more releases than its cap": {"releases": K + 1},
}


@pytest.mark.parametrize("changes", WHOLE.values(), ids=WHOLE)
def test_an_uncertain_session_counts_whole_from_its_start(changes):
    sure, unsure = session_of(policy_of(mu=1.0), 1, "a"), replace(session_of(policy_of(), 3, "b"), **changes)
    made = [
        ReleaseRow("a", 1, 1.0, 2),
        *(ReleaseRow("b", k, 1.0 + k, 2 + 2 * k) for k in range(1, unsure.releases + 1)),
    ]
    told = history_of([sure, unsure], made)
    assert told.whole == ("b",)
    assert told.lines[0].so_far.mu < 1.0
    assert [line.so_far.mu for line in told.lines[1:]] == pytest.approx(
        [math.hypot(told.lines[0].so_far.mu, unsure.loss.mu)] * (len(told.lines) - 1)
    )


def test_a_session_that_a_rollback_forgot_counts_in_every_line():
    forgotten = SessionSummary("gone", Loss.of(0.7), 4, 0, True, None, None, {})
    told = history_of([session_of(policy_of(mechanism="cancelling"), 2), forgotten], rows(releases=2))
    assert told.in_every_line == ("gone",)
    assert told.lines[0].so_far.mu == pytest.approx(math.hypot(1.5 * math.sqrt(1 / K), 0.7), rel=1e-6)
    assert told.lines[0].reserved.mu == pytest.approx(math.hypot(1.5, 0.7))


def test_forgotten_summed_session_counts_by_its_local_mu():
    forgotten = SessionSummary("gone", Loss.of(0.7, 1.4), 4, 0, True, None, None, {})
    told = history_of([session_of(policy_of(), 1), forgotten], rows(releases=1))
    assert told.lines[0].reserved.mu == told.lines[0].reserved.worst_case.mu == pytest.approx(math.hypot(1.5, 1.4))


def test_a_line_of_no_session_bounds_nothing():
    assert history_of([], rows(releases=1)).lines[0].so_far.mu == math.inf


def test_a_session_of_no_bound_leaves_none():
    told = history_of([session_of(policy_of(), 1, loss=Loss.of(math.inf))], rows(releases=1))
    assert told.lines[0].so_far.mu == told.lines[0].reserved.mu == math.inf


def test_figures_of_many_releases_are_upper_bounds():
    many, mu = 1000, gdp_mu(2.0, 1e-5)
    policy = policy_of(max_participations=many, mechanism="cancelling", mu=mu)
    made = history_of([session_of(policy, many)], [ReleaseRow("s", k, float(k), 2 * k) for k in range(1, many + 1)])
    exact = mu * np.sqrt(np.arange(1, many + 1) / many)
    figures = np.array([line.so_far.mu for line in made.lines])
    assert (figures >= exact * (1 - 1e-12)).all()
    assert (np.diff(figures) >= 0).all()
    assert figures[-1] == mu
    assert figures[499] < 1.01 * exact[499]
