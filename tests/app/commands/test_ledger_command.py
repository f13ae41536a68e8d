"""``murmurfl ledger``: what an operator sees, and that looking changes nothing."""

import json
import math

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.nodes.ledger_views import session_rows
from murmurfl.privacy import (
    Account,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    SQLiteLedger,
    StreamRecord,
    SumAssumption,
    gdp_epsilon,
    protocol,
    rounded_up,
    row_bytes,
)
from murmurfl.privacy.ledger.ledger_history import read_ledger
from typer.testing import CliRunner

from tests.harness.errors import raises

BUDGET = gdp_epsilon(2.0, 1e-5)


def murmurfl(*arguments, answer=None):
    result = CliRunner().invoke(cli, ["ledger", *map(str, arguments)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.db"
    made = murmurfl("create", path, "--epsilon", BUDGET, "--delta", 1e-5, "--data", "ward 3")
    assert made.exit_code == 0
    assert f"epsilon {rounded_up(BUDGET)} at delta 1e-05 (mu 2)" in made.stdout
    return path


def release(path, session, count, **changes):
    ledger = SQLiteLedger(path)
    policy = PrivacyPolicy(0.5, 2, 10, 1.0, **{"budget_mu": ledger.budget_mu, **changes})
    privatizer = Privatizer(policy, 3, 100, ledger, ledger.keys(), data=row_bytes(range(100)), roster="r" * 64)
    first = privatizer.statement(session).releases
    for k in range(first, first + count):
        privatizer.release(session, k, lambda samples: np.zeros((samples.stop - samples.start, 3)))


def folder(path):
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.parent.iterdir()}


def test_show_says_what_was_spent_on_which_run_and_what_is_left(path, check_output):
    release(path, "first", 3)
    release(path, "second", 1, mechanism="blt")
    before = folder(path)
    text, document = murmurfl("show", path).stdout, json.loads(murmurfl("show", path, "--json").stdout)
    assert folder(path) == before, "looking changes nothing"
    assert document["budget"] == {"mu": pytest.approx(2.0), "epsilon": pytest.approx(BUDGET)}
    for name, mu in (("spent", math.sqrt(2)), ("left", math.sqrt(2))):
        assert document[name] == {"mu": pytest.approx(mu), "epsilon": pytest.approx(gdp_epsilon(mu, 1e-5))}
    guarantee = document["guarantee"]
    assert (guarantee["unit"], guarantee["relation"]) == ("sample", "replacement")
    assert "cancelling noise on this client; blt noise on this client" in guarantee["sentence"]
    assert (document["data"], document["samples_used"], document["problem"]) == ("ward 3", 8, "")
    first, second = document["sessions"]
    assert (first["session"], first["releases"], first["acknowledged"], first["closed"]) == ("first", 3, 2, False)
    assert first["first_release"] < first["last_release"]
    assert (second["session"], second["mu"], second["epsilon"]) == ("second", 1.0, gdp_epsilon(1.0, 1e-5))
    terms = second["terms"]
    assert (terms["clip_norm"], terms["batch_size"], terms["max_participations"]) == (0.5, 2, 10)
    assert (terms["mechanism"], terms["trust"], terms["num_parameters"]) == ("blt", "untrusted-server", 3)
    assert terms["noise_std"] > terms["sensitivity"] > 0.5
    check_output(text)


def test_a_trusted_session_is_shown_with_its_server_caveat(path, check_output):
    release(path, "open", 1)
    before = murmurfl("show", path).stdout
    assert "against the server and everybody else" in before
    assert "nothing is guaranteed" not in before
    release(path, "trusted", 1, trust="trusted-server")
    document = json.loads(murmurfl("show", path, "--json").stdout)
    assert document["spent"]["mu"] == pytest.approx(math.sqrt(2))
    assert document["left"]["mu"] == pytest.approx(math.sqrt(2))
    assert [session["trust"] for session in document["sessions"]] == ["untrusted-server", "trusted-server"]
    assert [session["mu"] for session in document["sessions"]] == pytest.approx([1.0, 1.0])
    for guarantee in (document["guarantee"]["sentence"], document["sessions"][1]["guarantee"]):
        assert "against everybody but the trusted server" in guarantee
        assert "Against the server nothing is guaranteed" in guarantee
        assert "against the server and everybody else" not in guarantee
    assert "against the server and everybody else" in document["sessions"][0]["guarantee"]
    check_output(murmurfl("show", path).stdout)


def test_a_session_that_has_made_all_its_releases_is_shown_as_finished(path):
    release(path, "whole", 10)
    release(path, "half", 5)
    states = {row["session"]: row["state"] for row in session_rows(read_ledger(path))}
    assert states == {"whole": "finished", "half": "open"}


def test_a_trusted_session_that_a_rollback_forgot_is_still_shown_as_one(path):
    release(path, "open", 1)
    saved = path.read_bytes()
    release(path, "trusted", 1, trust="trusted-server")
    path.write_bytes(saved)
    assert murmurfl("accept-rollback", path, "--yes").exit_code == 0
    document = json.loads(murmurfl("show", path, "--json").stdout)
    assert {s["session"]: (s["trust"], round(s["mu"], 9), s["closed"]) for s in document["sessions"]} == {
        "open": ("untrusted-server", 1.0, True),
        "trusted": ("trusted-server", 1.0, True),
    }
    assert "Against the server nothing is guaranteed" in document["guarantee"]["sentence"]
    assert murmurfl("show", path).exit_code == 0


def test_a_trusted_session_of_a_ledger_of_version_0_1_has_no_bound(path, check_output):
    """It reserved infinity; how much the server was trusted with is not known."""
    ledger = SQLiteLedger(path)
    with ledger.exclusive() as page:
        page.commit("old", StreamRecord("f", release=1), Account(2, {"old": math.inf}))
    document = json.loads(murmurfl("show", path, "--json").stdout)
    assert document["spent"] == {"mu": None, "epsilon": None}
    assert document["left"]["mu"] == 0.0
    check_output(murmurfl("show", path).stdout)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        release(path, "trusted", 1, trust="trusted-server")


def test_show_refuses_what_is_no_ledger_and_makes_nothing(tmp_path):
    result = murmurfl("show", tmp_path / "ledger.db")
    assert result.exit_code == 1
    assert "got no file" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", [[], ["--mu", 1.0, "--epsilon", 1.0], ["--mu", -1.0], ["--epsilon", "inf"]])
def test_an_impossible_budget_makes_nothing(tmp_path, budget):
    result = murmurfl("create", tmp_path / "ledger.db", "--delta", 1e-5, *budget)
    assert result.exit_code == 1
    assert result.stderr.startswith("murmurfl: Expected ")
    assert not list(tmp_path.iterdir())


def test_create_leaves_a_ledger_alone_and_can_put_mark_and_key_elsewhere(path, tmp_path):
    before = folder(path)
    assert murmurfl("create", path, "--mu", 1.0, "--delta", 1e-5).exit_code == 1
    assert folder(path) == before
    other = tmp_path / "other"
    other.mkdir()
    options = ["--mark", other / "mark", "--key-file", other / "key"]
    made = murmurfl("create", tmp_path / "second.db", "--mu", 1.0, "--delta", 1e-5, *options)
    assert made.exit_code == 0
    assert str(other / "key") in made.stdout
    assert sorted(file.name for file in other.iterdir()) == ["key", "mark"]


def test_a_rollback_is_shown_and_accepted_only_when_the_operator_says_so(path, check_output):
    release(path, "s", 1)
    saved = path.read_bytes()
    release(path, "s", 2)
    path.write_bytes(saved)
    shown = murmurfl("show", path)
    assert shown.exit_code == 0
    check_output(shown.stdout, "rolled back")
    assert "copied back" in json.loads(murmurfl("show", path, "--json").stdout)["problem"]
    assert murmurfl("accept-rollback", path, answer="n\n").exit_code == 1
    assert path.read_bytes() == saved
    check_output(murmurfl("accept-rollback", path, "--yes").stdout, "accepted")
    document = json.loads(murmurfl("show", path, "--json").stdout)
    assert document["problem"] == ""
    assert document["samples_used"] == 6
    assert [(s["releases"], s["closed"]) for s in document["sessions"]] == [(3, True)]
    assert murmurfl("accept-rollback", path, "--yes").exit_code == 1


def test_a_lost_mark_is_made_again_only_when_the_operator_vouches_for_the_ledger(path):
    release(path, "s", 1)
    mark = path.with_name("ledger.db.mark")
    mark.unlink()
    assert "no file" in murmurfl("show", path).stdout
    assert not mark.exists()
    assert murmurfl("new-mark", path, answer="n\n").exit_code == 1
    assert not mark.exists()
    assert murmurfl("new-mark", path, answer="y\n").exit_code == 0
    release(path, "s", 1)
    assert murmurfl("new-mark", path, "--yes").exit_code == 1


SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(4, 6)}  # mu = 1, mu_local = 2


def test_a_session_under_secure_aggregation_is_shown_with_both_figures(path, check_output):
    plain = json.loads(murmurfl("show", path, "--json").stdout)
    assert plain["local"] is None
    assert "nobody else is honest" not in murmurfl("show", path).stdout
    assert "Decided" in murmurfl("set-local-budget", path, "--budget-local-mu", 3.0).stdout
    release(path, "alone", 1)
    release(path, "summed", 2, **SUMS)
    document = json.loads(murmurfl("show", path, "--json").stdout)
    assert document["spent"]["mu"] == pytest.approx(math.sqrt(2))
    assert document["local"]["budget"] == {"mu": 3.0, "epsilon": gdp_epsilon(3.0, 1e-5)}
    assert document["local"]["spent"]["mu"] == pytest.approx(math.sqrt(5))
    assert document["local"]["left"]["mu"] == pytest.approx(2.0)
    alone, summed = document["sessions"]
    assert (alone["trust"], alone["mu_local"], alone["epsilon_local"], alone["min_honest"]) == (
        "untrusted-server", None, None, None,
    )  # fmt: skip
    assert (summed["trust"], summed["mu"], summed["min_honest"]) == ("secure-aggregation", 1.0, 4)
    assert summed["mu_local"] == pytest.approx(2.0)
    assert "if one helper and 4 clients of each sum are honest, and mu = 2, epsilon = 9.998" in summed["guarantee"]
    guarantee = document["guarantee"]
    assert (guarantee["trust"], guarantee["min_honest"]) == ("secure-aggregation", 4)
    assert guarantee["mu_local"] == pytest.approx(math.sqrt(5))
    check_output(murmurfl("show", path).stdout)


def test_a_ledger_rests_on_what_the_most_demanding_of_its_sessions_rests_on(path):
    murmurfl("set-local-budget", path, "--budget-local-mu", 4.0)
    release(path, "a", 1, **SUMS)
    release(path, "b", 1, **{**SUMS, "sums": SumAssumption(5, 6)})
    assert json.loads(murmurfl("show", path, "--json").stdout)["guarantee"]["min_honest"] == 5
    release(path, "trusted", 1, trust="trusted-server")
    guarantee = json.loads(murmurfl("show", path, "--json").stdout)["guarantee"]
    assert (guarantee["trust"], guarantee["min_honest"]) == ("trusted-server", None)
    assert guarantee["mu"] == pytest.approx(math.sqrt(4 + 5 + 1)), "of which no other client takes anything away"


def test_a_forgotten_summed_session_is_shown_by_its_local_mu(path):
    murmurfl("set-local-budget", path, "--budget-local-mu", 3.0)
    release(path, "open", 1)
    saved = path.read_bytes()
    release(path, "summed", 1, **SUMS)
    path.write_bytes(saved)
    assert murmurfl("accept-rollback", path, "--yes").exit_code == 0
    document = json.loads(murmurfl("show", path, "--json").stdout)
    forgotten = document["sessions"][1]
    assert (forgotten["trust"], round(forgotten["mu"], 7), forgotten["min_honest"]) == ("untrusted-server", 2.0, None)
    assert forgotten["guarantee"].startswith("mu = 2 Gaussian DP")
    assert document["guarantee"]["mu"] == pytest.approx(math.sqrt(5))
    assert document["guarantee"]["trust"] == "untrusted-server"


def test_the_budget_of_what_holds_whatever_happens_is_decided_at_creation_or_once(path, tmp_path):
    other = tmp_path / "second.db"
    made = murmurfl("create", other, "--mu", 1.0, "--delta", 1e-5, "--budget-local-mu", 7.2)
    assert f"budget  epsilon {rounded_up(gdp_epsilon(7.2, 1e-5))} at delta 1e-05 (mu 7.2)" in made.stdout
    refused = murmurfl("set-local-budget", other, "--budget-local-mu", 8.0)
    assert refused.exit_code == 1
    assert "without a decided budget_local_mu" in refused.stderr
    low = murmurfl("create", tmp_path / "third.db", "--mu", 1.0, "--delta", 1e-5, "--budget-local-mu", 0.5)
    assert low.exit_code == 1
    assert not (tmp_path / "third.db").exists()
    release(path, "undecided", 1, **SUMS)
    assert "for none was decided (`murmurfl ledger set-local-budget`)" in " ".join(
        murmurfl("show", path).stdout.split()
    )


def test_releases_are_shown_one_a_line_with_what_all_up_to_each_guarantee(path, check_output):
    release(path, "first", 2, mechanism="cancelling")
    release(path, "second", 1, mechanism="cancelling")
    release(path, "first", 1, mechanism="cancelling")
    before = folder(path)
    text = murmurfl("show", path, "--releases").stdout
    document = json.loads(murmurfl("show", path, "--releases", "--json").stdout)
    assert folder(path) == before, "looking changes nothing"
    lines = document["releases"]
    assert [(line["session"], line["release"], line["samples"], line["samples_used"]) for line in lines] == [
        ("first", 1, 2, 2),
        ("first", 2, 2, 4),
        ("second", 1, 2, 6),
        ("first", 3, 2, 8),
    ]
    exact = [math.sqrt(releases / 10) for releases in (1, 2, 3, 4)]
    assert [line["mu_so_far"] for line in lines] == pytest.approx(exact, rel=1e-5)
    assert all(line["mu_so_far"] >= figure * (1 - 1e-12) for line, figure in zip(lines, exact, strict=True))
    assert [line["mu_reserved"] for line in lines] == pytest.approx([1.0, 1.0, math.sqrt(2), math.sqrt(2)])
    assert document["spent"]["mu"] == pytest.approx(lines[-1]["mu_reserved"])
    check_output(text)


def test_of_a_closed_session_every_release_counts_whole(path):
    backup = path.read_bytes()
    release(path, "first", 3, mechanism="cancelling")
    rolled = path.with_name("kept.db")
    rolled.write_bytes(backup)
    path.write_bytes(backup)
    for log in path.parent.glob("ledger.db-*"):
        log.unlink()
    path.chmod(0o600)
    assert murmurfl("accept-rollback", path, "--yes").exit_code == 0
    release(path, "next", 1, mechanism="cancelling")
    document = json.loads(murmurfl("show", path, "--releases", "--json").stdout)
    assert document["counted_in_every_line"] == ["first"]
    assert [line["mu_so_far"] for line in document["releases"]] == pytest.approx([math.sqrt(1.0 + 0.1)], rel=1e-5)
    assert "Counted in every line" in murmurfl("show", path, "--releases").stdout


def test_a_ledger_that_released_nothing_says_so(path):
    assert "Nothing was released." in murmurfl("show", path, "--releases").stdout
    assert json.loads(murmurfl("show", path, "--releases", "--json").stdout)["releases"] == []


def test_releases_of_sums_are_shown_with_both_figures_where_there_is_room(path, monkeypatch):
    murmurfl("set-local-budget", path, "--budget-local-mu", 9)
    release(path, "summed", 1, trust="secure-aggregation", sums=SumAssumption(4, 5))
    (line,) = json.loads(murmurfl("show", path, "--releases", "--json").stdout)["releases"]
    assert line["mu_local_reserved"] == pytest.approx(2 * line["mu_reserved"])  # h = 4
    assert line["mu_so_far"] <= line["mu_local_so_far"] <= line["mu_local_reserved"]
    assert "in the worst case: the same two" in murmurfl("show", path, "--releases").stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = murmurfl("show", path, "--releases").stdout
    assert "A wider window, or --json" in narrow
    assert max(map(len, narrow.splitlines())) <= 80
