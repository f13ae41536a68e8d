"""`murmurfl report`: a page that needs nothing else, figures that are true, and clear refusals."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports import making
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.making import make_report
from murmurfl.app.reports.page import page as made_page
from murmurfl.app.reports.plots import run_plots
from murmurfl.app.runs.outcome import Outcome, ReportError
from murmurfl.app.runs.run_files import write_record
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import Forecast, gdp_epsilon
from typer.testing import CliRunner

LOSSY = RunConfig(lost_replies=0.3, clients_per_round=5, num_rounds=40, mu=2.0, run_dry=True)
PLOTS = {"accuracy", "loss", "epsilon", "participation", "replies", "noise"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for name, config in {
        "lossy": LOSSY,
        "trusted": RunConfig(strategy="trusted-mu2", num_rounds=3, noise_quality="fast"),
    }.items():
        write_record(run_cohort(config), out / name)
    return out / "lossy", out / "trusted"


@pytest.fixture(scope="module")
def page(folders):
    return make_report(folders, folders[0].parent / "report")


def changed(run, **fields):
    """The same run with another outcome."""
    return replace(run, outcome=Outcome.model_validate({**run.outcome.document(), **fields}))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.identifiers = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for key, value in attributes:
            if key in ("src", "href", "xlink:href"):
                self.references.append(value)
            if key == "id":
                self.identifiers.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page):
    text = page.read_text()
    parsed = Page(text)
    assert not parsed.open
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    assert len(set(parsed.identifiers)) == len(parsed.identifiers)
    assert {r[1:] for r in parsed.references if r[0] == "#"} <= set(parsed.identifiers)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text


def test_every_plot_is_there_as_png_and_svg_and_in_the_page(page):
    names = {path.name for path in page.parent.iterdir()}
    expected = {f"lossy-{plot}" for plot in PLOTS} | {f"trusted-{plot}" for plot in ("accuracy", "loss", "replies")}
    expected |= {"trusted-participation", "runs-accuracy", "runs-loss", "runs-accuracy-epsilon"}
    assert names == {"index.html"} | {f"{name}.{kind}" for name in expected for kind in ("png", "svg")}
    assert page.read_text().count("<svg") == len(expected)
    assert "epsilon = 9.998 at delta = 1e-05" in (page.parent / "lossy-epsilon.svg").read_text()


def test_the_page_takes_the_readers_colours(page):
    text = page.read_text()
    assert "prefers-color-scheme: dark" in text
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "currentColor" in drawings
    assert "var(--c0)" in drawings


def test_both_guarantees_and_what_differs_are_named(page, folders):
    text = page.read_text().replace("&#39;", "'")
    for folder in folders:
        assert json.loads((folder / "result.json").read_text())["guarantee"] in text
    assert '<th scope="row">lost-replies</th><td>0.3</td><td>0</td>' in text
    assert "test accuracy" in text


def test_what_was_forecast_is_said_and_what_would_have_helped(page, folders):
    text = " ".join(page.read_text().split())
    read = [RecordedRun.read(folder) for folder in folders]
    for run in read:
        assert run.outcome.forecast.sentence in text
    assert "What would help" not in text  # both are useful
    foreseen = Forecast(40.0, 650, 10, 10, rounds=5, mu=1.0, delta=1e-5, unit="machine").document()
    useless = changed(read[0], forecast=foreseen)
    text = html.unescape(made_page(runs=[making._section(useless, [])]))
    assert foreseen["sentence"] in " ".join(text.split())
    assert "<details open><summary>What would help" in text
    assert all(change["words"] in text for change in foreseen["changes"])


def test_releases_by_round_end_at_what_machines_state_and_cost_what_they_say(folders):
    run = RecordedRun.read(folders[0])
    statements = run.outcome.machines
    assert [statements[name]["releases"] for name in run.names] == list(run.releases[:, -1])
    assert (np.diff(run.releases, axis=1) >= 0).all()
    assert (np.diff(run.releases, axis=1) <= 1).all()
    for name, epsilons in zip(run.names, run.epsilons, strict=True):
        assert epsilons[-1] == pytest.approx(gdp_epsilon(statements[name]["mu-spent"], 1e-5))
        assert epsilons.max() <= run.outcome.epsilon * (1 + 1e-9)


def test_an_unanswered_request_counts_until_known_free():
    """Asked in rounds 1 to 6; answers in 3 (release 2) and 5 (release 4); states five releases in the end."""
    rounds = [{"round": t, "asked": 1, "accuracy": None, "loss": None, "refused": {}} for t in range(1, 8)]
    machines = {"rounds": {str(t): {"a": {3: 2, 5: 4}.get(t)} for t in range(1, 7)}, "streams": []}
    nothing = {"mu": 1.0, "epsilon": 4.4, "guarantee": "", "rounds": 7, "num_clients": 1, "config": {}}
    document = {"format": 1, "date": "2026-01-01", "delta": 1e-5, "per_round": rounds, **nothing}
    run = RecordedRun("x", Outcome.model_validate({**document, "machines": {"a": {"releases": 5}}}), machines)
    assert run.releases.tolist() == [[1, 1, 2, 3, 4, 5, 5]]
    silent = changed(run, machines={})
    assert silent.releases.tolist() == [[1, 1, 2, 3, 4, 5, 5]]
    refused = changed(run, machines={"a": {"releases": 4}})
    assert refused.releases.tolist() == [[1, 1, 2, 3, 4, 4, 4]]


def test_machines_whose_noise_the_server_cannot_know_have_no_epsilon_by_round(tmp_path):
    """Real machines with another policy than the run configuration's: only what they state."""
    config = RunConfig(num_clients=2, clients_per_round=2, num_rounds=3)
    result = run_experiment(InProcessGrid(client_app.app, 2, config.to_mapping()), config, deployed=True)
    other = {name: {**entries, "noise-std": 7.0} for name, entries in result.statements.items()}
    write_record(replace(result, statements=other), tmp_path / "run")
    run = RecordedRun.read(tmp_path / "run")
    assert run.epsilons is None
    assert run.participation.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert not {"epsilon", "noise"} & {plot.name for plot in run_plots(run)}


def test_texts_of_a_run_are_shown_and_not_obeyed(folders, tmp_path):
    document = json.loads((folders[0] / "result.json").read_text())
    document["config"]["run-name"] = "<script>alert(1)</script>"
    folder = tmp_path / "<img src=x>"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(document))
    text = make_report([folder], tmp_path / "out").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;img" in text
    assert "did not record which machines were asked" in text


def test_infinite_and_missing_figures_are_said_and_not_drawn(tmp_path):
    write_record(run_cohort(RunConfig(strategy="online", mechanism="none", num_rounds=3)), tmp_path / "none")
    run = RecordedRun.read(tmp_path / "none")
    assert dict(making._tiles(run.outcome))["ε at δ = 1e-05"] == "infinite"
    assert {row["ε guaranteed"] for row in making._machines(run).texts()} == {"infinite"}
    assert "epsilon" not in {plot.name for plot in run_plots(run)}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "there is nothing"),
        ({}, "there is no result.json"),
        ({"checkpoint.npz": ""}, "has not ended"),
        ({"failure.json": '{"reason": "no nodes"}'}, r"failed \(no nodes\)"),
        ({"result.json": "{"}, "Expected JSON"),
        ({"result.json": "[]"}, "Expected a JSON object"),
        ({"result.json": '{"accuracy": 1}'}, "without loss, mu"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, files, said):
    folder = tmp_path / "x"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ReportError, match=said):
        RecordedRun.read(folder)
    result = CliRunner().invoke(cli, ["report", str(folder)])
    assert result.exit_code == 1
    assert result.stderr.startswith("murmurfl: Expected")
    assert result.stderr.count("\n") == 1
