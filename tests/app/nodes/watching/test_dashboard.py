"""The dashboard, the scrape configuration and the alerts of examples/fleet, against the metrics there are."""

import json
import re
from pathlib import Path

import pytest
import yaml
from murmurfl.app.nodes.watching.health import BUILD, BUILD_LABELS, FIGURES, PROBLEMS, Address, Shown, figures_of

FLEET = Path(__file__).parents[4] / "examples" / "fleet"
DASHBOARD = FLEET / "grafana-dashboard.json"
JOBS = ("node", "helper", "server")
OF_PROMETHEUS = {"job", "instance"}
BY_NAME = {figure.name: figure for figure in FIGURES}


def targets(document):
    return [target for panel in document["panels"] for target in panel["targets"]]


def expressions():
    shown = [target["expr"] for target in targets(json.loads(DASHBOARD.read_text()))]
    rules = yaml.safe_load((FLEET / "alerts.yml").read_text())["groups"][0]["rules"]
    return shown + [rule["expr"] for rule in rules]


def unknown(expression):
    """Metrics, labels and jobs that an expression names and nobody shows."""
    names = set(re.findall(r"\bmurmurfl_\w+", expression))
    known = {label for name in names & set(BY_NAME) for label in [BY_NAME[name].label] if label}
    asked = {label for group in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)\s*=~?", group)}
    asked |= {
        label for group in re.findall(r"\bby \((.*?)\)", expression) for label in group.replace(" ", "").split(",")
    }
    jobs = {job for jobs in re.findall(r'job=~?"([^"]*)"', expression) for job in jobs.split("|")} - {"murmurfl-.*"}
    return (
        names - set(BY_NAME) - {BUILD},
        asked - known - OF_PROMETHEUS,
        {job for job in jobs if job.removeprefix("murmurfl-") not in JOBS},
    )


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_shown(expression):
    assert unknown(expression) == (set(), set(), set())
    assert expression.count("(") == expression.count(")")
    assert re.search(r"\bmurmurfl_\w+|\bup\{", expression)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(murmurfl_accuracy)",
        'murmurfl_refusals_total{session="x"}',
        "sum(murmurfl_lost_total) by (reason)",
        'murmurfl_healthy{job="murmurfl-nodes"}',
    ],
)
def test_a_name_that_nobody_shows_would_be_noticed(expression):
    assert unknown(expression) != (set(), set(), set())


def test_a_job_is_asked_only_for_what_it_shows():
    for expression in expressions():
        for name, jobs in re.findall(r'(murmurfl_\w+)\{job=~?"([^"]*)"', expression):
            for job in jobs.split("|"):
                assert BY_NAME[name] in figures_of(job.removeprefix("murmurfl-")), expression


def test_every_figure_is_on_the_dashboard():
    shown = " ".join(target["expr"] for target in targets(json.loads(DASHBOARD.read_text())))
    assert {figure.name for figure in FIGURES} | {BUILD} <= set(re.findall(r"murmurfl_\w+", shown))


def test_a_legend_names_labels_that_there_are():
    labels = OF_PROMETHEUS | set(BUILD_LABELS) | {figure.label for figure in FIGURES}
    for target in targets(json.loads(DASHBOARD.read_text())):
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_prometheus_asks_each_kind_at_the_port_of_its_unit():
    document = yaml.safe_load((FLEET / "prometheus.yml").read_text())
    jobs = {job["job_name"].removeprefix("murmurfl-"): job for job in document["scrape_configs"]}
    assert set(jobs) == set(JOBS)
    addresses = [target for job in jobs.values() for group in job["static_configs"] for target in group["targets"]]
    assert len(set(addresses)) == len(addresses)
    for kind, job in jobs.items():
        assert "metrics_path" not in job  # /metrics, as Prometheus has it by itself
        unit = (FLEET / f"murmurfl-{kind}.service").read_text()
        (own,) = re.findall(r"--metrics-address (\S+)", unit)
        assert Address.read(own).is_local
        for target in (target for group in job["static_configs"] for target in group["targets"]):
            assert Address.read(target).port == Address.read(own).port
    assert [Address.read(target).is_local for target in addresses] == [True, False, False, False]
    for file in document["rule_files"]:
        assert (FLEET / file).exists()


PAGE = (Path(__file__).parents[4] / "docs" / "operations.md").read_text()


def listed(page):
    """The names in the table of metrics, labels among them, each with who shows it."""
    section = page.partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| (`.*`) \|$", section, flags=re.MULTILINE)
    return {(name, kinds) for kinds, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_documentation_has_every_figure_and_every_reason():
    shown = {(BUILD, "all"), (f"{{{', '.join(BUILD_LABELS)}}}", "all")}
    for figure in FIGURES:
        kinds = "all" if len(figure.shown_by) == len(JOBS) else ", ".join(figure.shown_by)
        shown |= {(name, kinds) for name in (figure.name, figure.label and f"{{{figure.label}}}") if name}
    assert listed(PAGE) == {(name.removeprefix("murmurfl_"), kinds) for name, kinds in shown}
    for reason in PROBLEMS:
        assert f"| `{reason}` |" in PAGE


@pytest.mark.parametrize("kind", JOBS)
def test_each_figure_says_what_it_means_where_it_is_shown(kind):
    said = Shown(kind, lambda: {figure.name: {} if figure.label else 0 for figure in figures_of(kind)}).text().decode()
    for figure in figures_of(kind):
        assert f"# HELP {figure.name} {figure.meaning}\n" in said
