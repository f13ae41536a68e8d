"""`murmurfl report`: a page that needs nothing else, figures that are true, and clear refusals."""

import html
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports import making
from murmurfl.app.reports.card import REAL, REHEARSAL, STATED, card, digest, status
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.groups import Group
from murmurfl.app.reports.making import make_report
from murmurfl.app.reports.plots import run_plots
from murmurfl.app.runs.outcome import Outcome, ReportError
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import Forecast, gdp_epsilon, rounded_up
from murmurfl.privacy.forecast_text import forecast_document
from typer.testing import CliRunner

LOSSY = RunConfig(lost_replies=0.3, clients_per_round=5, num_rounds=40, mu=2.0, allow_exhaustion=True)
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


def make_report_of(run, folder):
    """The text of the page of a run with this outcome."""
    (folder / run.name).mkdir()
    (folder / run.name / "result.json").write_text(json.dumps(run.outcome.document()))
    return make_report([folder / run.name], folder / "out").read_text()


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
    row = re.search(r'<th scope="row">lost-replies</th>(.*?)</tr>', text, flags=re.DOTALL)[1]
    assert re.findall(r"<td data-of=.*?>(.*?)</td>", row) == ["0.3", "0"]
    assert "this model" not in text, "several runs stand in a table"


def test_card_of_simulation_says_first_that_nobody_was_protected(folders, tmp_path):
    run = RecordedRun.read(folders[0])
    text = " ".join(html.unescape(make_report([folders[0]], tmp_path).read_text()).split())
    body = text[text.index("<body>") :]
    assert body.index("REHEARSAL") < body.index("Nobody was protected") < body.index("<dl>") < body.index("<svg")
    assert f"murmurfl {run.outcome.versions['murmurfl']}" in body
    assert digest(run.outcome.config) in body
    assert body.count(run.outcome.guarantee) == 1
    assert "ε would be" in body


@pytest.mark.parametrize(
    ("engine", "word"), [("ray", REHEARSAL), ("cohort", REHEARSAL), ("real-nodes", REAL), (None, STATED)]
)
def test_card_tells_rehearsal_from_real_clients(folders, engine, word):
    run = changed(RecordedRun.read(folders[0]), engine=engine)
    assert status(run.outcome)[0] == word
    made = card([Group("x", [run])])
    assert ("ε" in made["figures"][0]) == (word != REHEARSAL), "a rehearsal has no epsilon of its own"
    assert ("simulation" in made["whence"]["On whose word"][0][0]) == (word == REHEARSAL)


def test_card_has_a_persons_figures_and_delta_beside_the_records(folders):
    run = RecordedRun.read(folders[0])
    heading, one, five, twenty = card([Group("x", [run])])["figures"]
    assert heading == ["for", "ε would be", "best guess right at most"]
    assert one == ["one record", rounded_up(run.outcome.epsilon), "84.2 %"]
    assert five == ["5 records of one person on one client", rounded_up(gdp_epsilon(10.0, 1e-5)), "100 %"]
    assert twenty[1] == "infinite", "more than noise is vouched for"
    used = sum(one["samples-used"] for one in run.outcome.clients.values())
    ((below, _),) = card([Group("x", [run])])["below"]
    assert below == f"All at δ = 1e-05; 1/n = {1 / used:.2g} (n = {used:,} records used)."
    assert card([Group("x", [changed(run, delta=1 / used)])])["warned"][0][0].startswith("δ is not below 1/n")
    assert card([Group("x", [run])])["warned"] == []


def test_card_of_sums_names_who_must_be_honest_and_what_holds_if_not(folders):
    run = RecordedRun.read(folders[0])
    privacy = {"trust": "secure-aggregation", "mu_local": 6.0, "min_honest": 5}
    sums = changed(run, privacy={**run.outcome.document()["privacy"], **privacy}, min_honest=5)
    made = card([Group("x", [sums])])
    assert made["who"]["If honest"][0][0].startswith("one helper and 5 clients of each sum")
    assert made["figures"][1][3] == rounded_up(gdp_epsilon(6.0, 1e-5))


def test_what_runs_say_alike_stands_once(folders):
    lossy, trusted = map(RecordedRun.read, folders)
    runs = [Group(str(number), [lossy]) for number in range(12)]
    alike = card(runs)
    assert [runs for _, _, runs in alike["status"]] == [""]
    assert alike["full"][0][0].startswith("Epsilon is at delta = 1e-05, for replacement of one sample of one client")
    assert {names for _, names in alike["full"]} == {""}
    other = card([*runs, Group("trusted", [trusted])])
    assert ("Simulated with seeded keys.", "") in other["full"]
    assert any(text.startswith("Fast simulation noise") and names == "Run 13" for text, names in other["full"])
    assert [names for _, names in other["who"]["From whom"]] == ["Run 1 to 12", "Run 13"]
    assert other["warned"] == [("Fast noise is for research and protects nobody.", "Run 13")]


def test_digest_is_of_what_was_set_and_not_of_where_it_lies():
    config = {"mu": 1.0, "out-dir": "/a", "run-name": "x"}
    assert digest(config) == digest({"run-name": "y", "mu": 1.0})
    assert digest(config) != digest({**config, "mu": 2.0})


def test_what_was_forecast_is_said_and_what_would_have_helped(page, folders, tmp_path):
    text = " ".join(page.read_text().split())
    read = [RecordedRun.read(folder) for folder in folders]
    for run in read:
        assert run.outcome.forecast.sentence in text
    assert "What would help" not in text  # both are useful
    foreseen = Forecast(40.0, 650, 10, 10, rounds=5, mu=1.0, delta=1e-5, unit="client")
    foreseen = forecast_document(foreseen)
    useless = changed(read[0], forecast=foreseen)
    text = html.unescape(make_report_of(useless, tmp_path))
    assert foreseen["sentence"] in " ".join(text.split())
    assert "<details open><summary>What would help" in text
    assert all(change["words"] in text for change in foreseen["changes"])


def test_releases_by_round_end_at_what_clients_state_and_cost_what_they_say(folders):
    run = RecordedRun.read(folders[0])
    statements = run.outcome.clients
    assert [statements[name]["releases"] for name in run.names] == list(run.releases[:, -1])
    assert (np.diff(run.releases, axis=1) >= 0).all()
    assert (np.diff(run.releases, axis=1) <= 1).all()
    for name, epsilons in zip(run.names, run.epsilons, strict=True):
        assert epsilons[-1] == pytest.approx(gdp_epsilon(statements[name]["mu-spent"], 1e-5))
        assert epsilons.max() <= run.outcome.epsilon * (1 + 1e-9)


def test_an_unanswered_request_counts_until_known_free():
    """Asked in rounds 1 to 6; answers in 3 (release 2) and 5 (release 4); states five releases in the end."""
    rounds = [{"round": t, "asked": 1, "accuracy": None, "loss": None, "refused": {}} for t in range(1, 8)]
    clients = {"rounds": {str(t): {"a": {3: 2, 5: 4}.get(t)} for t in range(1, 7)}, "streams": []}
    nothing = {"mu": 1.0, "epsilon": 4.4, "guarantee": "", "rounds": 7, "num_clients": 1, "config": {}}
    document = {"format": 1, "date": "2026-01-01", "delta": 1e-5, "per_round": rounds, **nothing}
    run = RecordedRun("x", Outcome.model_validate({**document, "clients": {"a": {"releases": 5}}}), clients)
    assert run.releases.tolist() == [[1, 1, 2, 3, 4, 5, 5]]
    silent = changed(run, clients={})
    assert silent.releases.tolist() == [[1, 1, 2, 3, 4, 5, 5]]
    refused = changed(run, clients={"a": {"releases": 4}})
    assert refused.releases.tolist() == [[1, 1, 2, 3, 4, 4, 4]]


def test_clients_whose_noise_the_server_cannot_know_have_no_epsilon_by_round(tmp_path):
    """Real clients with another policy than the run configuration's: only what they state."""
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
    assert "did not record which clients were asked" in text


def test_infinite_and_missing_figures_are_said_and_not_drawn(tmp_path):
    write_record(run_cohort(RunConfig(strategy="online", mechanism="none", num_rounds=3)), tmp_path / "none")
    run = RecordedRun.read(tmp_path / "none")
    assert dict(making._happened(run.outcome))["μ"] == "infinite"
    shown = card([Group("none", [run])])
    assert shown["figures"] == []
    assert shown["warned"] == [("There was no noise: nothing is guaranteed.", "")]
    assert shown["who"]["Who is protected"] == [("nobody", "")]
    assert "Given" not in shown["who"], "a question without an answer is none"
    assert {row["ε guaranteed"] for row in making._clients(run).texts()} == {"infinite"}
    assert "epsilon" not in {plot.name for plot in run_plots(run)}


@pytest.mark.more_cases
@pytest.mark.parametrize("odd", [2**62, -5, 1e308, None, "x"], ids=repr)
def test_numbers_of_old_results_do_not_break_a_report(folders, tmp_path, odd):
    """Earlier versions aggregated a release of any number, which a table of 32 bits does not hold."""
    run = tmp_path / "run"
    shutil.copytree(folders[0], run)
    document, clients = (json.loads((run / name).read_text()) for name in ("result.json", "clients.json"))
    clients["rounds"]["3"] = {**clients["rounds"]["3"], "0": odd}
    document["clients"]["1"]["releases"] = 2**62 if odd is None or odd == "x" else odd
    (run / "result.json").write_text(json.dumps(document))
    (run / "clients.json").write_text(json.dumps(clients))
    assert "<svg" in make_report([run], tmp_path / "out").read_text()
    assert RecordedRun.read(run).releases.max() <= 2**31 - 1


@pytest.mark.more_cases
@pytest.mark.parametrize("name", ["a$x^$", r"a\\$\frac{$", "$$", "b$"])
def test_a_name_is_no_formula(folders, tmp_path, name):
    for run in folders:
        shutil.copytree(run, tmp_path / f"{name}{run.name}")
    document = json.loads((folders[0] / "clients.json").read_text())
    text = json.dumps(document).replace('"0"', json.dumps(name))
    (tmp_path / f"{name}{folders[0].name}" / "clients.json").write_text(text)
    page = make_report([tmp_path / f"{name}{run.name}" for run in folders], tmp_path / "out").read_text()
    assert page.count(f"{name}lossy") > 1


@pytest.mark.few_cases(6)
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
