"""A node's figures: what they count, and that two data sets give the same."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.node_app import machine_of
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.nodes.watching.health import BudgetWatch, NodeFigures, NodeHealth, Shown
from murmurfl.app.nodes.watching.journal import Journal, noting
from murmurfl.privacy import SQLiteLedger, gdp_epsilon, protocol

from tests.harness.grid import ask_real_node
from tests.harness.machines import training_config
from tests.harness.schemas import write_samples

FEATURES, CLASSES = 3, 2


class Clock:
    """Seconds since 1970, as a test has them pass."""

    def __init__(self):
        self.now = 1_800_000_000.25

    def __call__(self):
        return self.now


class Watched:
    """A real machine's answers, its journal and its figures, on a clock of the test's."""

    def __init__(self, folder, values, slowness=0.0):
        folder.mkdir()
        own = write_samples(folder, **values, classes=CLASSES)
        SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
        settings = {
            "machine": "clinic",
            "ledger": "ledger.sqlite",
            **own,
            "clip-norm": 1.0,
            "batch-size": 2,
            "max-participations": 3,
            "mu": 2.0,
        }
        (folder / "node.toml").write_text(toml_document(settings))
        self.clock, self.slowness = Clock(), slowness
        self.journal = Journal(self.clock)
        self.health = NodeHealth(self.journal, lambda: 0.0)
        watch = BudgetWatch(folder / "ledger.sqlite")
        self.looked = 0.0
        self.figures = NodeFigures("node", self.journal, self.health, lambda: watch.left(self.looked))
        answers, _ = machine_of(NodeConfig.read(folder / "node.toml"))
        self.app = noting(self._slowly(answers), self.journal)
        self.journal.note("started", kind="node", name="clinic")
        self.journal.note("connecting", superlink="a:1")
        self.journal.note("connected", superlink="a:1")

    def _slowly(self, answers):
        def answer(message, context: Context):
            self.clock.now += self.slowness  # how long a machine computes may depend on its data
            return answers(message, context)

        return answer

    def ask(self, at, number, session="s", ack=0, **entries):
        """A request that comes at a time, whatever the machine is busy with."""
        self.clock.now = at
        points = [np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)]
        config = training_config(number, ack, session, **entries)
        content = RecordDict(
            {
                protocol.ARRAYS: ArrayRecord(points),
                protocol.PREVIOUS_ARRAYS: ArrayRecord(points),
                protocol.CONFIG: ConfigRecord(config),
            }
        )
        return ask_real_node(self.app, content)

    def text(self):
        self.looked += 10.0
        return Shown("node", self.figures.read).text()


def data(seed, scale):
    numbers = np.random.default_rng(seed)
    return {
        "features": scale * numbers.normal(size=(10, FEATURES)),
        "labels": numbers.integers(0, CLASSES, 10),
    }


def whole_life(watched):
    """Releases, a repetition, refusals, the end of the samples, a second session, a lost connection."""
    for number in range(1, 6):
        watched.ask(1_800_000_100.7 + 20 * number, number, ack=0)
    watched.ask(1_800_000_300.0, 1, session="t")
    watched.ask(1_800_000_301.0, 1, session="t", ack=7)
    watched.journal.note("disconnected", superlink="a:1", cause="refused", retry_s=1.0)
    return watched.text()


def values(text, wanted):
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if name.startswith(wanted)}


def test_two_data_sets_give_the_same_metrics(tmp_path):
    calm = Watched(tmp_path / "calm", data(1, 1e-3), slowness=0.1)
    wild = Watched(tmp_path / "wild", data(2, 1e6), slowness=9.4)
    texts = whole_life(calm), whole_life(wild)
    assert texts[0] == texts[1]
    assert values(texts[0], "murmurfl_releases_total")["murmurfl_releases_total"] > 2


def test_a_figure_of_how_long_an_answer_took_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "arrived", lambda journal: None)
    monkeypatch.setattr(
        Journal, "asked_at", property(lambda journal: journal._clock(), lambda journal, value: None), False
    )
    calm = Watched(tmp_path / "calm", data(1, 1e-3), slowness=0.1)
    wild = Watched(tmp_path / "wild", data(1, 1e-3), slowness=9.4)
    assert whole_life(calm) != whole_life(wild)


def test_releases_refusals_rounds_and_times_are_counted(tmp_path):
    watched = Watched(tmp_path / "node", data(1, 1.0))
    whole_life(watched)
    shown = watched.text()
    assert values(shown, "murmurfl_releases_total") == {"murmurfl_releases_total": 4}
    refused = {name: count for name, count in values(shown, "murmurfl_refusals_total").items() if count}
    assert refused == {
        'murmurfl_refusals_total{reason="cap-reached"}': 2,
        'murmurfl_refusals_total{reason="bad-acknowledgement"}': 1,
    }
    assert values(shown, "murmurfl_rounds_total") == {"murmurfl_rounds_total": 6}
    assert values(shown, "murmurfl_round_seconds") == {"murmurfl_round_seconds": 20}  # and not until another run
    assert values(shown, "murmurfl_last_contact") == {"murmurfl_last_contact_timestamp_seconds": 1_800_000_301}
    assert values(shown, "murmurfl_connected") == {"murmurfl_connected": 0}
    assert values(shown, 'murmurfl_disconnections_total{cause="refused"}').popitem()[1] == 1


def test_the_budget_that_is_left_is_the_ledgers_and_no_name_is_shown(tmp_path):
    watched = Watched(tmp_path / "node", data(1, 1.0))
    assert values(watched.text(), "murmurfl_budget_left_mu") == {"murmurfl_budget_left_mu": 4}
    watched.ask(1_800_000_100.0, 1, session="secretsession")
    assert b"secretsession" not in watched.text()
    assert b"clinic" not in watched.text()
    left = values(watched.text(), "murmurfl_budget_left")
    assert left["murmurfl_budget_left_mu"] == pytest.approx(np.sqrt(12))
    assert left["murmurfl_budget_left_epsilon"] == pytest.approx(gdp_epsilon(np.sqrt(12), 1e-5))
    assert values(watched.text(), "murmurfl_sessions") == {"murmurfl_sessions": 1}


def test_a_ledger_that_cannot_be_believed_shows_no_budget(tmp_path, caplog):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    watch, journal = BudgetWatch(tmp_path / "ledger.sqlite"), Journal()
    assert watch.left(0.0) is not None
    (tmp_path / "ledger.sqlite.mark").write_text("{}")
    for now in (10.0, 20.0):
        figures = NodeFigures("node", journal, NodeHealth(journal), lambda now=now: watch.left(now)).read()
        assert {name for name in figures if "budget" in name or "ledger" in name} == {"murmurfl_ledger_readable"}
        assert figures["murmurfl_ledger_readable"] == 0
    assert len([line for line in caplog.messages if "cannot be shown" in line]) == 1


def test_a_ledger_is_not_read_again_for_everybody_who_asks(tmp_path, monkeypatch):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    watch = BudgetWatch(tmp_path / "ledger.sqlite")
    assert watch.left(0.0) is not None
    monkeypatch.setattr("murmurfl.app.nodes.watching.health.budget_left", None)
    assert all(watch.left(now) is not None for now in (0.1, 4.9, 60.0))


def test_a_helper_counts_what_it_opened():
    journal = Journal(Clock())
    figures = NodeFigures("helper", journal, NodeHealth(journal))
    journal.note("started", kind="helper", name="auditor")
    journal.note("opened", run=1, session="s", round=1, releases=3)
    journal.note("refused", run=1, reason="opening-refused", session="s", round=2)
    shown = values(Shown("helper", figures.read).text(), "murmurfl")
    assert shown["murmurfl_openings_total"] == 1
    assert shown['murmurfl_refusals_total{reason="opening-refused"}'] == 1
    assert not any(name.startswith("murmurfl_budget") for name in shown)
