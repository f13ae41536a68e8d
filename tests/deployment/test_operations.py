"""docs/operations.md followed over real nodes: enrolling, adding, removing, rotating, backing up and restoring.

In the page's order, by one fleet. What takes longer, a full disk or an upgrade within a run, is in
test_operations_faults.py.
"""

import re
import tomllib
from pathlib import Path

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.privacy import SQLiteLedger, protocol, read_ledger
from typer.testing import CliRunner

from tests.deployment.fleet import NOT_TYPED, Fleet, lines_of, releases_of, sections, wait


def docs(test):
    """Mark a test over real nodes: a release needs it, and not every change."""
    return pytest.mark.docs(pytest.mark.long(test))


# The sections with commands, and whether this file types them.
TYPED_HERE = {
    "Install on a device": False,
    "Enrol a node": True,
    "Remove a client during a run": True,
    "What happened last night": True,
    "Is it well": True,
    "How much budget is left": True,
    "Schedule": True,
    "Rotate a node's key": True,
    "Rotate the noise key": True,
    "Rotate the keys of secure aggregation": True,
    "Renew the server's certificate": False,
    "Upgrade murmurfl or Flower": False,
    "Back up": True,
    "Restore": True,
    "A full disk": False,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        made.begin()
        yield made
    finally:
        made.stop()


@docs
def test_a_fleet_is_enrolled_and_one_node_comes_and_another_goes_during_a_run(fleet):
    for number in range(3):
        fleet.prepare(number)
    for number in range(2):
        fleet.follow("Enrol a node", number)
        assert fleet.numbers[number], "the number that is needed to take it out"
    fleet.follow("Back up", 0)
    run = fleet.submit("first", num_clients=2, clients_per_round=1, num_rounds=12, give_up_after=12)
    wait(lambda: run.poll() is not None or releases_of(fleet.ledger(1)) >= 1, "the run did not begin")
    fleet.hold(0)  # the run waits for it, however quick its rounds are
    fleet.follow("Enrol a node", 2)
    fleet.follow("Remove a client during a run", 1)
    assert run.poll() is None, run.communicate(timeout=60)[0][-2000:]
    fleet.go_on(0)
    left = releases_of(fleet.ledger(1))
    result = fleet.ended(run, "first")
    assert result["rounds"] == 12
    made = releases_of(fleet.ledger(0)) + left
    assert made - 1 <= result["aggregated"] <= made, "what a node that goes is answering is lost"
    assert releases_of(fleet.ledger(0)) > 2
    assert releases_of(fleet.ledger(1)) == left > 0
    assert releases_of(fleet.ledger(2)) == 0, "a run's clients are those that were there when it began"


@docs
def test_last_night_and_the_budget_are_shown(fleet):
    shown, journal = fleet.follow("What happened last night", 0)
    releases = releases_of(fleet.ledger(0))
    assert len(re.findall(r"^\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2} ", shown, flags=re.MULTILINE)) == releases
    assert len(re.findall(r"^\S+Z INFO +Released: ", journal, flags=re.MULTILINE)) == releases
    assert "\x1b" not in journal
    budget, check = fleet.follow("How much budget is left", 0)
    assert "(mu 3.465): for new sessions" in budget
    assert "The budget allows 3 more runs of mu = 2" in check
    assert not [line for line in check.splitlines() if re.search(r"\bfailed\b", line)]


@docs
def test_health_and_figures_are_answered_on_this_computer(fleet):
    health, figures = fleet.follow("Is it well", 0)
    assert '"status": "ok"' in health
    found = dict(re.findall(r"^(murmurfl_\w+) (\S+)$", figures, flags=re.MULTILINE))
    assert float(found["murmurfl_healthy"]) == 1.0
    assert float(found["murmurfl_releases_total"]) == releases_of(fleet.ledger(0))
    watched = re.findall(r"`(murmurfl_\w+)`", sections()["Is it well"])
    assert {name for name in watched if name != "murmurfl_refusals_total"} <= found.keys()


@docs
def test_a_schedule_is_enabled_in_place_of_the_service(fleet):
    fleet.follow("Schedule", 0)
    assert not fleet.is_running(0)
    fleet.start_node(0)  # its hour has come


@docs
def test_restored_and_rotated_nodes_join_the_next_run(fleet):
    """Node 0 gets its ledger back from the day on which it was enrolled, then another noise key; node 2 another key."""
    made, noise_key = releases_of(fleet.ledger(0)), SQLiteLedger(fleet.ledger(0)).keys().secret_key
    fleet.follow("Restore", 0)
    (session,) = read_ledger(fleet.ledger(0)).sessions
    assert (session.closed, session.releases, session.loss.mu) == (True, made, 2.0), "what the backup never knew"
    fleet.follow("Rotate the noise key", 0)
    assert noise_key not in fleet.ledger(0).read_bytes()
    assert [session.closed for session in read_ledger(fleet.ledger(0)).sessions] == [True]
    fleet.follow("Rotate a node's key", 2)
    assert len(fleet.numbers[2]) == 1
    result = fleet.ended(fleet.submit("second", num_clients=2, clients_per_round=2, num_rounds=2), "second")
    assert result["aggregated"] == 4
    assert sorted(result["clients"]) == ["clinic-0", "clinic-2"]
    assert [session.closed for session in read_ledger(fleet.ledger(0)).sessions] == [True, False]


@docs
def test_new_keys_of_secure_aggregation_make_new_cards(fleet):
    fleet.follow("Rotate the keys of secure aggregation", 0)
    etc = fleet.operator(0) / "etc"
    assert (etc / "clinic-0-2.card").exists()
    assert (etc / "auditor-2.card").exists()


@docs
def test_all_nodes_answer_within_their_ledgers(fleet):
    for number in (0, 2):
        assert fleet.is_running(number)
        ledger = read_ledger(fleet.ledger(number))
        assert ledger.mark_problem == ""
        assert ledger.spent.mu == pytest.approx(2.0 * len(ledger.sessions) ** 0.5)


# Without nodes.


def test_every_section_with_commands_is_typed_by_somebody():
    assert set(TYPED_HERE) == {title for title in sections() if lines_of(title)}
    faults = Path(__file__).with_name("test_operations_faults.py").read_text()
    elsewhere = [title for title, here in TYPED_HERE.items() if not here]
    for title in elsewhere:
        assert f'"{title}"' in faults or all(line.startswith((*NOT_TYPED, "df ")) for line in lines_of(title)), title


def test_every_command_of_ours_on_the_page_exists():
    for line in (line for title in sections() for line in lines_of(title)):
        words = line.removeprefix("/opt/murmurfl/bin/").split()
        if words[0] == "murmurfl":
            names = [word for word in words[1:3] if re.fullmatch(r"[a-z-]+", word)]
            assert CliRunner().invoke(cli, [*names, "--help"]).exit_code == 0, line


def refusals():
    """The rows of the table: name, meaning, who acts, what to do."""
    rows = [
        line.strip("|").split("|") for line in sections()["After each refusal"].splitlines() if line.startswith("| `")
    ]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_table_has_every_refusal_and_says_what_to_do():
    table = refusals()
    assert set(table) == set(protocol.REFUSAL_NAMES.values())
    for name, (meaning, who, what) in table.items():
        assert meaning, name
        assert who in ("server", "node", "both"), name
        assert len(what) > 10, name


def test_a_refusal_that_is_new_would_be_missed(monkeypatch):
    monkeypatch.setitem(protocol.REFUSAL_NAMES, 1099, "something-new")
    with pytest.raises(AssertionError):
        test_the_table_has_every_refusal_and_says_what_to_do()


def test_the_connection_on_the_page_is_one():
    from murmurfl.app.nodes.connection import Connection
    from murmurfl.clients.nodes.operators_file import named_values

    table = tomllib.loads(
        re.sub(r"^ +", "", re.search(r"```toml\n(.*?)```", sections()["Enrol a node"], re.DOTALL)[1], flags=re.M)
    )
    assert set(named_values(Connection, table["connection"])) == {"superlink", "root_certificates", "private_key"}
