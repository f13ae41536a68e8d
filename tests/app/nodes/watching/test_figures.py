"""What a monitor may see of a node, a helper and a server: a closed list, held here name by name."""

import prometheus_client
import pytest
from murmurfl.app.nodes.diagnosis import CAUSES
from murmurfl.app.nodes.watching.health import BUILD, BUILD_LABELS, FIGURES, OTHER, Shown, figures_of
from murmurfl.privacy import ConfigurationError, protocol
from prometheus_client.parser import text_string_to_metric_families

# Whoever adds a figure adds it here, and by that says: it does not depend on anybody's data.
NODE = {
    "murmurfl_started_timestamp_seconds": (),
    "murmurfl_healthy": (),
    "murmurfl_connected": (),
    "murmurfl_last_contact_timestamp_seconds": (),
    "murmurfl_rounds_total": (),
    "murmurfl_round_seconds": (),
    "murmurfl_releases_total": (),
    "murmurfl_repeated_total": (),
    "murmurfl_refusals_total": ("reason",),
    "murmurfl_disconnections_total": ("cause",),
    "murmurfl_certificate_expiry_timestamp_seconds": (),
    "murmurfl_budget_mu": (),
    "murmurfl_budget_left_mu": (),
    "murmurfl_budget_left_epsilon": (),
    "murmurfl_budget_local_left_mu": (),
    "murmurfl_sessions": (),
    "murmurfl_ledger_readable": (),
    "murmurfl_build_info": ("kind", "version", "flower", "python"),
}
OF_THE_NODE_ALONE = {name for name in NODE if "budget" in name} | {
    "murmurfl_releases_total",
    "murmurfl_repeated_total",
    "murmurfl_sessions",
    "murmurfl_ledger_readable",
}
HELPER = {name: labels for name, labels in NODE.items() if name not in OF_THE_NODE_ALONE} | {
    "murmurfl_openings_total": ()
}
SERVER = {
    "murmurfl_started_timestamp_seconds": (),
    "murmurfl_healthy": (),
    "murmurfl_superlink_running": (),
    "murmurfl_superlink_restarts_total": (),
    "murmurfl_runs_total": ("end",),
    "murmurfl_last_contact_timestamp_seconds": (),
    "murmurfl_round": (),
    "murmurfl_rounds_planned": (),
    "murmurfl_rounds_total": (),
    "murmurfl_round_seconds": (),
    "murmurfl_closed_rounds_total": (),
    "murmurfl_asked_total": (),
    "murmurfl_releases_total": (),
    "murmurfl_lost_total": (),
    "murmurfl_late_total": (),
    "murmurfl_malformed_total": (),
    "murmurfl_unopened_total": (),
    "murmurfl_refusals_total": ("reason",),
    "murmurfl_certificate_expiry_timestamp_seconds": (),
    "murmurfl_build_info": ("kind", "version", "flower", "python"),
}
REASONS = {*protocol.REFUSAL_NAMES.values(), "other"}
ENDS = {"completed", "failed", "stopped", "killed", "other"}
VALUES = {"reason": REASONS, "cause": {*CAUSES, "other"} - {"reached"}, "end": ENDS}


def samples(text):
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


def full(kind):
    """All figures of a kind, each with a value; those with labels with one that nobody expects."""
    return {figure.name: {"evil": 1.0} if figure.label else 2.0 for figure in figures_of(kind)}


@pytest.mark.parametrize(("kind", "expected"), [("node", NODE), ("helper", HELPER), ("server", SERVER)])
def test_what_is_shown_is_the_closed_list_and_nothing_else(kind, expected):
    shown = samples(Shown(kind, lambda: full(kind)).text())
    assert {sample.name: tuple(sorted(sample.labels)) for sample in shown} == {
        name: tuple(sorted(labels)) for name, labels in expected.items()
    }


def test_a_label_has_no_value_but_those_that_are_listed():
    for sample in samples(Shown("node", lambda: full("node")).text()):
        for label, value in sample.labels.items():
            assert label in BUILD_LABELS or value in VALUES[label]


def test_what_is_not_listed_counts_as_other():
    refused = {"cap-reached": 2, 'x"} 1\nmurmurfl_secret{a="': 3, "error-7": 4}
    shown = samples(Shown("node", lambda: {"murmurfl_refusals_total": refused}).text())
    counted = {sample.labels["reason"]: sample.value for sample in shown if sample.name != BUILD}
    assert {reason: count for reason, count in counted.items() if count} == {"cap-reached": 2, OTHER: 7}
    assert set(counted) == REASONS


@pytest.mark.parametrize("name", ["murmurfl_accuracy", "murmurfl_asked_total"])
def test_a_figure_that_is_not_a_nodes_cannot_be_shown(name):
    with pytest.raises(ConfigurationError, match="Expected figures of a node, got"):
        Shown("node", lambda: {name: 1.0}).text()


def test_a_figure_that_is_not_known_is_left_out():
    shown = samples(Shown("server", lambda: {"murmurfl_round": None, "murmurfl_rounds_total": 0}).text())
    assert {sample.name for sample in shown} == {BUILD, "murmurfl_rounds_total"}


def test_each_process_shows_its_own_figures_and_none_of_the_client_librarys():
    before = {family.name for family in prometheus_client.REGISTRY.collect()}
    Shown("node", dict).text()
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == before
    assert not any(name.startswith("murmurfl") for name in before)


def test_names_follow_the_customs_of_prometheus():
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        assert figure.counts == figure.name.endswith("_total")
        assert figure.meaning.endswith(".")
        assert bool(figure.label) == bool(figure.values)
