"""A real fit: nothing leaves it but what was released or is public, and its ledger counts every call on the rows."""

import ctypes
import errno
import faulthandler
import gc
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import tomllib
import traceback
import types
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.nodes.ledger_views import ledger_guarantee
from murmurfl.app.reports.card import OF_ALL_CALLS, card
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.groups import Group
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs import real_fit
from murmurfl.app.runs import result as result_files
from murmurfl.app.runs.fit_summary import fit_lines
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.real_fit import Dealt, dealt_order, evaluated_privately, figure_forecast
from murmurfl.app.runs.run_summary import UNRELEASED, shown_accuracy
from murmurfl.app.runs.sealed import PRIVATE_FIRST_LINE, Ending, SealedError, run_sealed
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records.client_records import CsvLines, Records, Rows
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, gdp_epsilon, gdp_mu, rounded_up
from murmurfl.privacy.accounting.guarantee import right_at_most
from murmurfl.privacy.ledger.ledger_history import read_ledger
from murmurfl.privacy.queries.evaluation import EvaluationRows, Measured
from murmurfl.privacy.queries.knots import KnotRows
from murmurfl.privacy.queries.query import QuerySum, divided_mu
from murmurfl.privacy.release.clipping import RowBound
from murmurfl.strategies.callbacks.metrics_file import FIGURES_VARIABLE
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("small_rehearsals")

ROWS, STRANGE = 40, 25
SCHEMA = """reviewed = true
[label]
column = "ill"
classes = 2
[columns.age]
kind = "number"
bounds = [0, 100]
[columns.ward]
kind = "category"
values = ["a", "b"]
"""
SECRET = "5551234"
"""Part of a strange row: it must be found in nothing that leaves."""
QUICK = ("--set", "strategy=full-batch", "--set", "num-rounds=2", "--epsilon", "2")
LINEAR = ("--set", "model=softmax")
EVALUATED = ("--evaluate", "private")
"""The figure of so few rows is left out unless it is asked for."""
BEGUN = "Training for real on 40 rows of people.csv, 2 rounds. Until it ends, nothing is shown that depends on a row.\n"
FORECAST = (
    f"{BEGUN}Forecast of the figure, from public numbers: it will count 4 rows, and its 95 % interval will be about 50 "
    "points to each side, too wide to be of use. What helps: no figure, which is the default here (a better model).\n"
)
"""What a fit of so few rows says before it reads one."""
NOISY = ("accuracy", "interval", "noise_interval", "auc", "auc_interval", "auc_noise_interval", "sentence")
"""What a private evaluation releases, by its keys in ``result.json``."""

INVALID = [
    *(
        f"33,a,{label}"
        for label in ("", " ", "NA", "nan", "none", "2", "-1", "1e999", "yes", f"x{SECRET}", "\u0661", "1,")
    ),
    *(f"{age},a,1" for age in ("text", "inf", "-inf", "1e999", "0x10", "1_0", "--1", f"{SECRET}x", "9" * 401)),
    *("33,a", "33", "", " ", ",", ",,", ",,,", "33,a,1,1", f"{SECRET}", "33;a;1", "33\ta\t1"),
    *('"33,a,1', '33,"a,1', '33,a,"1', '"33",a,"1"x', '3"3,a,1"', '"', '""', '"""'),
    *(b"\xff,a,1", b"33,a,\xfe", b"33,a,\x00", b"\x00\x00", b"33\x0033,a,1", b"\xed\xa0\x80,a,1"),
    *("33,a," + "9" * 100_000, "9" * 200_000 + ",a,1", "33,a,1" + "\r1", "\r", "33,a,\r", "33,a," + "1" * 5_000),
    *(
        f"=cmd|' /C {SECRET}'!A0,a,1",
        "{0},a,1",
        "%s,a,1",
        "\x1b[2J,a,1",
        "33,a,\u202e1",
        "<b>,a,<script>",
    ),
]
"""Lines that do not fit the schema: each is a row that counts as zero."""
NO_AGE = [",a,1", "nan,a,1", b"\xef\xbb\xbf,a,1", "\u2028,a,1"]
"""Lines without an age, for which an additive model has a feature, and a straight line none."""
FITTING = [
    *NO_AGE,
    "33,a,1",
    "-0,b,0",
    "1e308,a,1",
    "-1e308,c,0",
    " 33 ,  a , 1 ",
    "33,,1",
    f"33,{SECRET},1",
    '33,"a",1',
    "33,a,1.0",
]
"""Lines that fit: what is released may differ, and nothing else."""


def table_of(home, line, *, at=STRANGE, last=False):
    """A table in which one line is another; ``last`` puts it at the end, without a line break."""
    line = line.encode() if isinstance(line, str) else line
    lines = [f"{20 + i % 60},{'ab'[i % 2]},{int(i % 60 > 30)}".encode() for i in range(ROWS)]
    if last:
        lines.append(line)
    else:
        lines[at] = line
    home.mkdir(exist_ok=True)
    (home / "schema.toml").write_text(SCHEMA)
    (home / "people.csv").write_bytes(b"age,ward,ill\n" + b"\n".join(lines) + (b"" if last else b"\n"))
    return home / "people.csv"


@pytest.fixture
def same_noise(monkeypatch):
    """A way to have the same key and the same nonces in each of several fits."""
    monkeypatch.setattr(
        secrets, "token_bytes", lambda size: hashlib.blake2b(b"%d" % next(drawn), digest_size=size).digest()
    )
    drawn = iter(())

    def begin():
        nonlocal drawn
        drawn = iter(range(10_000))

    return begin


def files_of(folder, *, released):
    """Contents of all files that a fit wrote, without the date; with what was ``released``, or without."""
    found = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            document = json.loads(path.read_text())
            document.pop("date", None)
            if not released and isinstance(document.get("private_evaluation"), dict):
                noisy = NOISY if document["private_evaluation"]["owners"] is None else (*NOISY, "owners", "noise_std")
                document["private_evaluation"] |= dict.fromkeys(noisy)
            elif not released and "private_evaluation" in document:
                document["private_evaluation"] = "noisy"
            found[name] = document
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tobytes() if released else arrays[key].shape for key in arrays.files}
        elif path.suffix == ".skops" and not released:  # coefficients are of the released model
            found[name] = zipfile.ZipFile(path).namelist()
        elif path.name == "CARD.md":
            text = path.read_text().partition("* **made**")[0]
            found[name] = text if released else text.partition("* **measured**")[0] + text.partition("* **data**")[2]
        else:
            found[name] = path.read_bytes()
    return found


def left_by(home, *arguments, released=True, evaluated=True, capfd=None):
    """Everything that leaves a fit of the table in a folder."""
    asked = [
        "fit",
        home / "people.csv",
        "--schema",
        home / "schema.toml",
        "--real",
        "--out",
        home,
        "--name",
        "run",
        *QUICK,
        *(EVALUATED if evaluated else ()),
    ]
    done = CliRunner().invoke(cli, [str(one) for one in [*asked, *arguments]])
    texts = [done.stdout, done.stderr, *([] if capfd is None else capfd.readouterr())]
    if not released:
        kept = ("The released figure", "figure ")
        texts = ["\n".join(one for one in text.splitlines() if not one.startswith(kept)) for text in texts]
    assert all(SECRET not in text for text in texts)
    ledger = sorted(path.name for path in home.iterdir() if path.is_file())
    folder = home / "run"
    return {
        "code": done.exit_code,
        "error": type(done.exception),
        "texts": [text.replace(str(home), "HOME") for text in texts],
        "files": files_of(folder, released=released) if folder.exists() else {},
        "beside": ledger,
    }


@pytest.fixture
def model():
    """Options of a fit that choose its model: the default, which is additive."""
    return ()


@pytest.fixture
def of_invalid(tmp_path, same_noise, capfd, model):
    """What leaves a fit in which one row is missing its label."""
    table_of(tmp_path / "missing", "33,a,")
    same_noise()
    left = left_by(tmp_path / "missing", *model, capfd=capfd)
    assert left["code"] == 0, left["texts"]
    assert "result.json" in left["files"]
    return left


CASES_OF_INVALID = [*(((), line) for line in INVALID), *((LINEAR, line) for line in [*INVALID[::6], *NO_AGE])]


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize(("model", "line"), CASES_OF_INVALID, ids=range(len(CASES_OF_INVALID)))
def test_rows_that_do_not_fit_are_alike_in_all_that_leaves(model, line, tmp_path, same_noise, of_invalid, capfd):
    table_of(tmp_path / "strange", line)
    same_noise()
    assert left_by(tmp_path / "strange", *model, capfd=capfd) == of_invalid


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize("line", FITTING, ids=range(len(FITTING)))
def test_rows_that_fit_differ_from_others_in_released_figures_alone(line, tmp_path, same_noise, capfd):
    left = []
    for name, one in (("fits", line), ("missing", "33,a,")):
        table_of(tmp_path / name, one)
        same_noise()
        left.append(left_by(tmp_path / name, released=False, capfd=capfd))
    assert left[0] == left[1]
    assert left[0]["code"] == 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("line", ["33,a,1", "", "33,a,", "\r", "x" * 1000])
def test_number_of_rows_does_not_depend_on_a_last_line_without_line_break(line, tmp_path, same_noise):
    table_of(tmp_path / "ended", "33,a,1", last=True)
    table_of(tmp_path / "strange", line, last=True)
    left = []
    for name in ("ended", "strange"):
        same_noise()
        left.append(left_by(tmp_path / name))
    assert left[0] == left[1]
    assert f"{ROWS} rows" in left[0]["texts"][0]
    assert CsvLines(tmp_path / "strange" / "people.csv", ",").public_count == ROWS


def table_of_visits(home, rows):
    """A table of ten persons with three visits each, but for one, whose rows are others and somewhere else."""
    visits = [f"p{i % 10},{20 + i},{'ab'[i % 2]},{int(i % 10 > 4)}" for i in range(30) if i % 10 != 3]
    home.mkdir()
    (home / "schema.toml").write_text(SCHEMA.replace("reviewed = true", 'reviewed = true\nowner = "patient"'))
    (home / "people.csv").write_text("\n".join(["patient,age,ward,ill", *visits[:4], *rows, *visits[4:]]) + "\n")


OF_OWNERS = ("--owners", "16", "--set", "samples-per-owner=2")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "rows",
    [
        *(["p3,1e308,a,0"], ["p3,33,a,1"] * 9, ["p3,text,a,1", f"p3,33,{SECRET},x", ",33,a,1", "p3,5,a,0"]),
        *(["p3,-1e308,b,1", "p3,1e308,,0"] * 300, ["p3,1e999,a,2"] * 2),
    ],
)
def test_all_rows_of_an_owner_and_their_number_show_in_released_figures_alone(rows, tmp_path, same_noise, capfd):
    left = []
    for name, own in (("others", rows), ("three", ["p3,40,b,1"] * 3)):
        table_of_visits(tmp_path / name, own)
        same_noise()
        left.append(left_by(tmp_path / name, *OF_OWNERS, released=False, capfd=capfd))
    assert left[0] == left[1]
    assert left[0]["code"] == 0
    card = left[0]["files"]["model/card.json"]
    assert card["unit"] == "owner"
    assert card["data"]["places for owners"] == 16
    assert "rows" not in card["data"]
    sessions = [one.session for one in read_ledger(tmp_path / "others" / "people.csv.ledger").sessions]
    assert len(sessions) == 3, "knots, training and evaluation"


def test_owners_of_a_real_fit_are_in_its_ledger_and_may_get_more_rows(tmp_path):
    table_of_visits(tmp_path / "a", ["p3,40,b,1"])
    left_by(tmp_path / "a", *OF_OWNERS, "--budget", "9")
    table = tmp_path / "a" / "people.csv"
    summary = read_ledger(Path(f"{table}.ledger"))
    assert ledger_guarantee(summary).unit == "owner"
    assert "the computer that trained" in ledger_guarantee(summary).against
    table.write_text(table.read_text() + "p3,41,b,1\nnobody before,50,a,0\n")
    again = left_by(tmp_path / "a", *OF_OWNERS, "--name", "again")
    assert again["code"] == 0, again["texts"]
    table.write_text(table.read_text().replace("p3,", "p33,"))
    renamed = left_by(tmp_path / "a", *OF_OWNERS, "--name", "renamed")
    assert renamed["code"] == 1
    assert Ending.CHANGED.value[:40] in " ".join(renamed["texts"][1].split())


@pytest.mark.parametrize("options", [[], ["--owners", "16"], ["--set", "samples-per-owner=2"]])
def test_a_real_fit_of_owners_needs_both_public_numbers(options, tmp_path):
    table_of_visits(tmp_path / "a", ["p3,40,b,1"])
    left = left_by(tmp_path / "a", *options)
    assert left["code"] == 1
    assert "Expected two public numbers" in left["texts"][1]
    assert left["beside"] == ["people.csv", "schema.toml"]


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize(("rows", "epsilon"), [(920, 2.0), (3000, 4.0), (20000, 2.0)])
def test_forecast_of_the_figure_is_the_interval_that_follows(rows, epsilon, owners, tmp_path):
    """And it is said only where half of the interval is more than ten points."""
    schema = Schema.model_validate(tomllib.loads(SCHEMA))
    evaluated = {**evaluated_privately(schema), "epsilon": epsilon}
    if owners:
        evaluated |= {"samples-per-owner": 3, "strategy": "full-batch"}
    config = RunConfig.from_mapping(evaluated)
    said = figure_forecast(config, schema, rows)
    count = rows // 10
    random = np.random.Generator(np.random.Philox(key=rows))
    halves = []
    for _ in range(200):
        query = EvaluationRows(bins=config.score_bins)
        total = query.rows(Measured(random.random(count) < 0.8)).sum(axis=0)
        std = (2 if owners else math.sqrt(2)) / divided_mu(config.mu, config.private_evaluation)[0]
        found = query.read(
            QuerySum(total + std * random.normal(size=len(total)), count, 1, std, ((std, 1.0, float(owners)),))
        )
        halves.append((found.interval[1] - found.interval[0]) / 2)
    assert bool(said) == (np.mean(halves) > 0.1)
    if said:
        shown = float(re.search(r"about (\d+) points", said)[1]) / 100
        assert shown == pytest.approx(np.mean(halves), rel=0.25)
        assert f"it will count {f'the persons in {count:,} places' if owners else f'{count:,} rows'}" in said


@pytest.mark.parametrize("options", [(), ("--set", "evaluation.share=0")])
def test_a_useless_figure_is_left_out_and_all_of_epsilon_trains_the_model(options, tmp_path):
    table_of(tmp_path / "a", "33,a,1")
    left = left_by(tmp_path / "a", *options, evaluated=False)
    assert left["code"] == 0, left["texts"]
    begun, said = left["texts"][1].removesuffix("\n").split("\n")
    assert begun + "\n" == BEGUN
    assert "4 rows that are held out" in said
    assert said.endswith(real_fit.FIGURE_OPTION + ".")
    assert left["files"]["result.json"]["private_evaluation"] is None
    knots, training = read_ledger(tmp_path / "a" / "people.csv.ledger").sessions
    assert not any(one.session.endswith("evaluation") for one in (knots, training))
    assert training.loss.mu == pytest.approx(math.sqrt(0.9) * gdp_mu(2, 1e-5))
    assert training.terms["max_participations"] == 2


def test_a_real_fit_without_a_figure_is_not_said_to_have_diverged(tmp_path):
    table_of(tmp_path, "33,a,1")
    settings = {"strategy": "full-batch", "num_rounds": 2, "epsilon": 2}
    result = fit(tmp_path / "people.csv", schema=tmp_path / "schema.toml", real=True, **settings)
    result_files.write_record(result, tmp_path / "run")
    assert result.outcome.private_evaluation is None
    assert "<img" not in result._repr_html_()
    page = make_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert UNRELEASED in page
    assert "diverged" not in page
    simulated = result.outcome.model_copy(update={"engine": "cohort"})
    assert "diverged" in shown_accuracy(simulated), "a simulation has a test set"


@pytest.mark.parametrize("asked", [EVALUATED, ("--set", "evaluation.held-out=0.3"), ("--set", "evaluation.share=0.2")])
def test_a_useless_figure_is_released_and_paid_for_where_somebody_asks(asked, tmp_path):
    table_of(tmp_path / "a", "33,a,1")
    left = left_by(tmp_path / "a", *asked, evaluated=False)
    assert left["files"]["result.json"]["private_evaluation"] is not None
    sessions = read_ledger(tmp_path / "a" / "people.csv.ledger").sessions
    assert len(sessions) == 3
    assert math.hypot(*(one.loss.mu for one in sessions)) == pytest.approx(gdp_mu(2, 1e-5))


def test_whether_the_figure_is_left_out_follows_from_public_numbers_alone(tmp_path):
    """A row of another label, or one that does not fit, changes nothing: the table of either is left alike."""
    schema = Schema.model_validate(tomllib.loads(SCHEMA))
    found = {
        (rows, epsilon): bool(real_fit.why_no_figure(RunConfig.from_mapping({"epsilon": epsilon}), schema, rows))
        for rows in (920, 3000, 20000)
        for epsilon in (2.0, 8.0)
    }
    assert found == {
        (920, 2.0): True,
        (920, 8.0): True,
        (3000, 2.0): False,
        (3000, 8.0): False,
        (20000, 2.0): False,
        (20000, 8.0): False,
    }
    numbers = schema.model_copy(update={"label": Label(column="ill", bounds=(0, 1))})
    assert not real_fit.why_no_figure(RunConfig.from_mapping({"epsilon": 2.0}), numbers, 920), "numbers have none"


def test_real_fits_write_no_time(tmp_path, same_noise):
    table_of(tmp_path / "a", "33,a,1")
    same_noise()
    assert left_by(tmp_path / "a")["files"]["result.json"]["seconds"] is None


class Panic(BaseException):
    """What an extension in Rust raises."""


class Unprintable(Exception):
    """An error that cannot be shown."""

    def __str__(self):
        raise RuntimeError(SECRET)


def raised(error):
    """Say the secret everywhere, then raise."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        stream.write(SECRET)
    os.write(1, SECRET.encode())
    os.write(2, SECRET.encode())
    logging.getLogger("somebody").critical(SECRET)
    logging.getLogger("flwr").critical(SECRET)
    warnings.warn(SECRET, stacklevel=1)
    thread = threading.Thread(target=int, args=(SECRET + "x",))
    thread.start()
    thread.join()
    raise error


AGE = "77.125"
"""Age of the strange row, of which there is no other."""


def has_strange(ages):
    return bool(np.isclose(np.asarray(ages, np.float64), 2 * float(AGE) / 100 - 1, atol=1e-6).any())


def failing(owner, name, finds):
    """A way to make a method fail where ``finds`` sees the strange row in its arguments."""

    def inject(monkeypatch, error, seen):
        original = getattr(owner, name)

        def fails(self, *arguments):
            if finds(self, *arguments):
                seen.append(name)
                raised(error)
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, fails)

    return inject


def is_clipped(bound, rows, *_):
    """Whether its gradient is among rows: weights of class 0, of class 1, biases."""
    with np.errstate(all="ignore"):
        return np.shape(rows)[1:] == (10,) and has_strange(rows[:, 0] / rows[:, 8])


INJECTED = {
    "line": failing(CsvLines, "cells_of", lambda rows, line: AGE.encode() in line),
    "row": failing(Schema, "read", lambda schema, item, *_: AGE in str(item)),
    "cell": failing(Column, "value_of", lambda column, cell: cell == AGE),
    "label": failing(Label, "encode", lambda label, cell: cell == "01"),
    "knots": failing(KnotRows, "rows", lambda rows, samples: (samples[0] == float(AGE)).any()),
    "features": failing(KnotRows, "features", lambda rows, values, *_: (values == float(AGE)).any()),
    "gradient": failing(SoftmaxRegression, "__call__", lambda model, at, samples: has_strange(samples[0][:, 0])),
    "clipping": failing(RowBound, "total", is_clipped),
    "evaluation": failing(SoftmaxRegression, "logits", lambda model, at, features: has_strange(features[:, 0])),
}
OF_LINEAR = ("gradient", "clipping", "evaluation")
"""Places that know the strange row by its features, which only a linear model has without noise."""
OF_ONE_QUERY = ("knots", "features")
"""Places where a row is zero in one of two queries, so that released figures may differ."""
ERRORS = {
    "ValueError": ValueError(SECRET),
    "MemoryError": MemoryError(SECRET),
    "RecursionError": RecursionError(SECRET),
    "SystemExit": SystemExit(SECRET),
    "GeneratorExit": GeneratorExit(SECRET),
    "Panic": Panic(SECRET),
    "Unprintable": Unprintable(),
    "OSError": OSError(5, SECRET, SECRET),
    "ConfigurationError": ConfigurationError(SECRET),
    "LedgerError": LedgerError(SECRET),
    "SealedError": SealedError(Ending.CHANGED),
    "StopIteration": StopIteration(SECRET),
}
CASES = [(place, error) for number, error in enumerate(ERRORS) for place in list(INJECTED)[number % 2 :: 2]]


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize(("place", "error"), CASES)
def test_error_of_one_row_makes_it_zero_and_shows_nowhere(place, error, tmp_path, same_noise, monkeypatch, capfd):
    at = int(dealt_order([ROWS])[-1 if place == "evaluation" else 0])
    label = "01" if place == "label" else "1"
    seen, left = [], []
    for name, line in (("missing", "33,a,"), ("strange", f"{AGE},a,{label}")):
        if name == "strange":
            INJECTED[place](monkeypatch, ERRORS[error], seen)
        table_of(tmp_path / name, line, at=at)
        same_noise()
        options = {"released": place not in OF_ONE_QUERY, "capfd": capfd}
        left.append(left_by(tmp_path / name, *(LINEAR if place in OF_LINEAR else ()), **options))
    assert seen
    assert left[0]["code"] == 0
    assert left[1] == left[0]


def failing_later(monkeypatch, error):
    """Fail after rows were read, in code that is of no row."""

    def fail(*_, **__):
        raised(error)

    monkeypatch.setattr(real_fit, "run_experiment", fail)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("error", [ValueError(SECRET), ConfigurationError(SECRET), OSError(5, SECRET), Panic(SECRET)])
def test_failure_after_rows_were_read_has_one_fixed_text(error, tmp_path, same_noise, monkeypatch, capfd):
    table_of(tmp_path / "a", "33,a,1")
    failing_later(monkeypatch, error)
    same_noise()
    left = left_by(tmp_path / "a", capfd=capfd)
    assert left["code"] == 1
    assert left["texts"] == ["", f"{FORECAST}murmurfl: {Ending.FAILED.value}\n", "", ""]
    assert left["files"] == {}


def test_keyboard_interrupt_says_that_and_nothing_else(tmp_path, same_noise, monkeypatch, capfd):
    table_of(tmp_path / "a", "33,a,1")
    failing_later(monkeypatch, KeyboardInterrupt(SECRET))
    same_noise()
    left = left_by(tmp_path / "a", capfd=capfd)
    assert (left["code"], left["texts"]) == (130, ["", f"{FORECAST}murmurfl: Interrupted.\n", "", ""])


def fitted(home, **options):
    usual = {"schema": home / "schema.toml", "real": True, "epsilon": 2, "strategy": "full-batch", "num_rounds": 2}
    return fit(home / "people.csv", **{**usual, **options})


def test_raised_error_holds_nothing_of_a_row(tmp_path, monkeypatch):
    table_of(tmp_path / "a", f"{AGE},a,1")
    failing_later(monkeypatch, ValueError(SECRET))
    with pytest.raises(SealedError) as caught:
        fitted(tmp_path / "a")
    error = caught.value
    assert error.__cause__ is error.__context__ is None
    shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert SECRET not in shown
    assert AGE not in shown


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("age,ill\n1,1\n", {}, "Expected each column of the schema once in the table, got ward missing or twice"),
        ("", {}, "ward"),
        ("age,ward,ill\n", {}, "Expected rows in people.csv that end with a line break, got none"),
        (None, {"learning_rate": -1.0}, "learning-rate"),
        (None, {"strategy": "nothing"}, "strategy"),
        (None, {"mechanism": "none"}, "noise"),
        (None, {"epsilon": 1e9}, "mu is too large"),
        (None, {"budget": 1.0}, "covers this call's epsilon = 2, got 1: raise it"),
    ],
)
def test_failure_before_rows_are_read_says_why_and_leaves_nothing(lines, options, message, tmp_path):
    table = table_of(tmp_path / "a", "33,a,1")
    if lines is not None:
        table.write_text(lines)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=message):
        fitted(tmp_path / "a", **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_command_with_a_budget_below_its_epsilon_leaves_nothing(tmp_path):
    table = table_of(tmp_path / "a", "33,a,1")
    before = sorted(tmp_path.rglob("*"))
    asked = ["fit", table, "--schema", table.with_name("schema.toml"), "--real", "--epsilon", 2, "--budget", 1]
    done = CliRunner().invoke(cli, [str(one) for one in [*asked, "--out", tmp_path / "runs" / "deep"]])
    assert (done.exit_code, "epsilon = 2" in done.stderr) == (1, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_private_log_is_for_the_operator_alone_and_changes_nothing_else(tmp_path, same_noise, of_invalid, capfd):
    log = tmp_path / "private.log"
    table_of(tmp_path / "strange", "33,a,")
    same_noise()
    assert left_by(tmp_path / "strange", "--private-log", log, capfd=capfd) == of_invalid
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().startswith(PRIVATE_FIRST_LINE)
    assert "accuracy" not in log.read_text(), "of rows that are nobody's"
    assert "1 with ill: a missing label" in log.read_text()
    with raises(ConfigurationError, "exists", match="a private log"):
        fitted(tmp_path / "strange", private_log=log)
    with raises(ConfigurationError, "conflict", "real"):
        fit(tmp_path / "strange" / "people.csv", label="ill", private_log=tmp_path / "other.log")


def test_private_log_keeps_why_a_fit_failed(tmp_path, monkeypatch):
    log = tmp_path / "private.log"
    table_of(tmp_path / "a", "33,a,1")
    failing_later(monkeypatch, ValueError(SECRET))
    with pytest.raises(SealedError):
        fitted(tmp_path / "a", private_log=log)
    kept = log.read_text()
    assert f"ValueError: {SECRET}" in kept
    assert f"CRITICAL somebody: {SECRET}" in kept
    assert f"UserWarning: {SECRET}" in kept


def test_a_refused_fit_leaves_no_private_log_so_that_a_retry_may_make_it(tmp_path):
    log = tmp_path / "private.log"
    table_of(tmp_path / "a", "33,a,1")
    for _ in range(2):
        with raises(ConfigurationError, "out-of-range", "budget"):
            fitted(tmp_path / "a", private_log=log, budget=1)
        assert not log.exists()
    fitted(tmp_path / "a", private_log=log)
    assert log.read_text().startswith(PRIVATE_FIRST_LINE)
    with raises(ConfigurationError, "exists"):
        fitted(tmp_path / "a", private_log=log)
    assert log.exists()


class Kept(logging.Handler):
    """A handler of a program's own."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        self.kept.append(record.getMessage())


def test_nothing_reaches_handlers_hooks_or_streams_of_the_program(capfd):
    handlers, warned, failed = [Kept(), Kept()], [], []
    root, later = logging.getLogger(), logging.getLogger("made.while.sealed")
    root.addHandler(handlers[0])
    before = sys.stdout, sys.stderr, warnings.showwarning, threading.excepthook, logging.Logger.handle
    threading.excepthook = failed.append

    def work(seal):
        later.propagate = False
        later.addHandler(handlers[1])
        later.critical(SECRET)
        with pytest.raises(ValueError, match=SECRET):
            raised(ValueError(SECRET))
        subprocess.run([sys.executable, "-c", f"print({SECRET})"], check=True)
        ctypes.CDLL(None).puts(SECRET.encode())
        faulthandler.dump_traceback(file=2)
        seal.show(lambda: sys.stdout.write("a round is over\n"))
        seal.show(lambda: root.error("of a callback"))
        return 7

    try:
        with warnings.catch_warnings(record=True) as warned:
            assert run_sealed(work) == 7
    finally:
        threading.excepthook = before[3]
        root.removeHandler(handlers[0])
        later.handlers.clear()
    assert capfd.readouterr() == ("a round is over\n", "")
    assert (handlers[0].kept, handlers[1].kept, warned, failed) == (["of a callback"], [], [], [])
    assert (sys.stdout, sys.stderr, warnings.showwarning, threading.excepthook, logging.Logger.handle) == before
    sys.stdout.write("afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"


def test_seal_is_opened_again_after_an_error(capfd):
    with raises(SealedError, "failed", match="This call failed"):
        run_sealed(lambda seal: (seal.begin_rows(), raised(ConfigurationError(SECRET))))
    with raises(ConfigurationError, "invalid", match="of settings"):
        run_sealed(lambda _: (_ for _ in ()).throw(ConfigurationError("of settings")))
    with pytest.raises(SealedError):  # nobody expected it, so nobody knows what is in it
        run_sealed(lambda _: raised(ValueError(SECRET)))
    assert capfd.readouterr() == ("", "")
    sys.stdout.write("afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"


def test_only_one_fit_is_sealed_at_a_time():
    with raises(ConfigurationError, "wrong-order"):
        run_sealed(lambda _: run_sealed(lambda _: 1))
    assert run_sealed(lambda _: 1) == 1


def test_result_reaches_no_row(tmp_path):
    table_of(tmp_path / "a", f"{AGE},a,1")
    result = fitted(tmp_path / "a")
    seen, todo = set(), [result]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(one))
        assert not isinstance(one, Rows | Records | Dealt | SQLiteLedger), type(one)
        todo += gc.get_referents(one)
    assert AGE not in repr(result) + result._repr_html_()


SCRIPT = """
import ctypes, os, sys, faulthandler, logging
from murmurfl.clients import Schema
from murmurfl.app.commands.main import cli
faulthandler.enable()
read = Schema.read
def strange(self, item, *others):
    if "77.125" in str(item):
        print("5551234"); sys.__stdout__.write("5551234"); os.write(2, b"5551234"); ctypes.CDLL(None).puts(b"5551234")
        logging.getLogger("x").critical("5551234"); faulthandler.dump_traceback()
        raise SystemExit("5551234")
    return read(self, item, *others)
Schema.read = strange
cli()
"""


def test_a_process_of_its_own_says_what_one_in_this_process_says(tmp_path, same_noise, of_invalid):
    table_of(tmp_path / "strange", f"{AGE},a,1")
    home = tmp_path / "strange"
    asked = ["fit", home / "people.csv", "--schema", home / "schema.toml", "--real", "--out", home, "--name", "run"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, asked), *QUICK, *EVALUATED],
        capture_output=True,
        text=True,
        check=False,
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}, "COLUMNS": ""},
    )
    assert (done.returncode, done.stderr) == (0, FORECAST), done.stderr
    said = [line for line in done.stdout.replace(str(home), "HOME").splitlines() if not line.startswith("figure")]
    usual = [line for line in of_invalid["texts"][0].splitlines() if not line.startswith("figure")]
    assert [line for line in said if not line.startswith("The released")] == [
        line for line in usual if not line.startswith("The released")
    ]


def appended(table, count):
    """Put sorted rows at a table's end."""
    table.write_bytes(table.read_bytes() + b"".join(b"%d,a,1\n" % (40 + i % 50) for i in range(count)))


def test_rows_at_the_end_can_be_added_and_none_before_them_changed(tmp_path):
    table = table_of(tmp_path / "a", "33,a,1")
    fitted(tmp_path / "a", budget=9)
    for count in (7, 1):
        appended(table, count)
        result = fitted(tmp_path / "a")
    ledger = Path(f"{table}.ledger")
    assert SQLiteLedger(ledger).data == "people.csv; rows dealt: 40 47 48"
    assert result.table.rows == 48
    text = table.read_text()
    table.write_text(text.replace("\n33,a,1\n", "\n34,a,1\n", 1))
    spent = read_ledger(ledger).spent.mu
    with raises(SealedError, "mismatch", match="unchanged and in their order"):
        fitted(tmp_path / "a")
    assert read_ledger(ledger).spent.mu == spent
    table.write_text(text)
    fitted(tmp_path / "a")
    table.write_text("".join(text.splitlines(keepends=True)[:41]))
    with raises(LedgerError, "mismatch", match=r"at least the 48 rows .* got 40"):
        fitted(tmp_path / "a")


def test_rows_that_nothing_was_released_of_may_go_again(tmp_path, monkeypatch):
    table = table_of(tmp_path / "a", "33,a,1")
    fitted(tmp_path / "a", budget=9)
    text = table.read_text()
    appended(table, 7)
    with monkeypatch.context() as patch:
        failing_later(patch, ValueError(SECRET))
        with pytest.raises(SealedError):
            fitted(tmp_path / "a")
    table.write_text(text)
    appended(table, 3)
    fitted(tmp_path / "a")
    assert SQLiteLedger(f"{table}.ledger").data == "people.csv; rows dealt: 40 43"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).map(sorted))
def test_a_row_keeps_its_place_when_others_are_added(counts):
    order = dealt_order(counts)
    assert sorted(order.tolist()) == list(range(counts[-1]))
    for number, end in enumerate(counts, 1):
        assert np.array_equal(order[:end], dealt_order(counts[:number]))


def test_what_is_held_out_of_rows_added_is_mixed_among_them():
    held_out = dealt_order([1000, 2000])[-200:]
    assert held_out.min() >= 1000
    assert 1400 < held_out.mean() < 1600, "of sorted rows some of every kind"


def test_a_monitors_file_has_no_times_of_a_real_fit(tmp_path, monkeypatch):
    table_of(tmp_path / "a", "33,a,1")
    (tmp_path / "monitor").mkdir()
    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path / "monitor"))
    fitted(tmp_path / "a")
    assert not list((tmp_path / "monitor").iterdir())
    assert os.environ[FIGURES_VARIABLE] == str(tmp_path / "monitor")


@pytest.mark.parametrize("option", [{"site": "ward"}, {"clients": 3}, {"trust": "trusted-server"}])
def test_a_real_fit_names_the_option_of_a_rehearsal_that_it_refuses(option, tmp_path):
    table_of(tmp_path / "a", "33,a,1")
    ((name, value),) = option.items()
    with raises(ConfigurationError, "conflict", name, got=value):
        fitted(tmp_path / "a", **option)


def test_a_real_fit_says_nothing_of_clients_alone_and_takes_no_partition(tmp_path, monkeypatch):
    """Rows would tell; its table is in one place, so there is no verdict on federating."""
    monkeypatch.setattr(result_files, "alone", lambda *_: pytest.fail("looked at rows"))
    table_of(tmp_path / "a", "33,a,1")
    with raises(ConfigurationError, "conflict", "partition"):
        fitted(tmp_path / "a", partition="label-skew")
    made = fitted(tmp_path / "a")
    assert not [line for line in fit_lines(made, made.table, None) if "client alone" in line]


def test_a_rehearsal_prints_the_command_of_a_real_fit_which_works(tmp_path):
    table = tmp_path / "a table.csv"
    table.write_text(
        "age,ward,ill\n" + "".join(f"{20 + i % 60},{'ab'[i % 2]},{int(i % 60 > 30)}\n" for i in range(400))
    )
    asked = ["fit", str(table), "--site", "ward", "--epsilon", "3", "--out", str(tmp_path / "runs"), "--name", "one"]
    settings = ["--set", "num-rounds=2", "--set", "trust=untrusted-server"]
    done = CliRunner().invoke(cli, [*asked, *settings])
    assert done.exit_code == 0, done.stderr
    (command,) = re.findall(r"`murmurfl (fit [^`]+)`", done.stdout)
    words = shlex.split(command)
    assert "--site" not in words
    assert words[words.index("--epsilon") + 1] == "3"
    assert words[words.index("--set") + 1 :] == ["num-rounds=2"]
    schema = Path(words[words.index("--schema") + 1])
    schema.write_text(schema.read_text().replace("reviewed = false", "reviewed = true"))
    done = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "runs")])
    assert done.exit_code == 0, done.stderr
    assert read_ledger(f"{table}.ledger").spent.assumed.epsilon(1e-5) == pytest.approx(3.0)


def test_another_ledger_is_refused_while_the_tables_own_is_there(tmp_path):
    table = table_of(tmp_path / "a", "33,a,1")
    other = tmp_path / "other.ledger"
    SQLiteLedger.create(other, budget_mu=1.0, delta=1e-5)
    fitted(tmp_path / "a")
    alias = tmp_path / "alias.csv"
    alias.symlink_to(table)
    for name, ledger in ((table, other), (table, tmp_path / "new.ledger"), (alias, other), (alias, f"{alias}.ledger")):
        with raises(ConfigurationError, "mismatch", "ledger"):
            fit(name, schema=tmp_path / "a" / "schema.toml", real=True, epsilon=0.1, ledger=ledger)
    with raises(ConfigurationError, "exhausted", "budget", match="room for epsilon"):
        fit(alias, schema=tmp_path / "a" / "schema.toml", real=True, epsilon=2)
    assert read_ledger(other).spent.mu == 0.0
    assert not (tmp_path / "new.ledger").exists()


def test_a_refusal_and_the_ledger_name_an_epsilon_that_is_left_and_can_be_spent(tmp_path):
    """A budget of 2 of which 0.5 are spent has room for 1.8877: rounded up, it would be refused."""
    path = table_of(tmp_path / "a", "33,a,1")
    fitted(tmp_path / "a", epsilon=0.5, budget=2)
    shown = CliRunner().invoke(cli, ["ledger", "show", f"{path}.ledger"]).stdout
    listed = float(re.search(r"left +epsilon ([\d.]+\d)", shown)[1])
    with raises(ConfigurationError, "exhausted", "budget") as caught:
        fitted(tmp_path / "a", epsilon=2)
    named = float(re.search(r"epsilon = ([\d.]+\d) is left", str(caught.value))[1])
    exact = read_ledger(f"{path}.ledger").left.assumed.epsilon(1e-5)
    assert 0.999 * exact < named == listed <= exact
    fitted(tmp_path / "a", epsilon=named)
    with raises(ConfigurationError, "exhausted", "budget"):
        fitted(tmp_path / "a", epsilon=0.1)


def test_output_and_card_have_what_all_calls_spent_and_the_condition(tmp_path):
    table_of(tmp_path / "a", "33,a,1")
    for call in range(2):
        asked = ["fit", tmp_path / "a" / "people.csv", "--schema", tmp_path / "a" / "schema.toml", "--real", *QUICK]
        done = CliRunner().invoke(cli, [*map(str, asked), *([] if call else ["--budget", "9"]), "--out", str(tmp_path)])
        assert done.exit_code == 0, done.stderr
    one, both = gdp_mu(2, 1e-5), np.sqrt(2) * gdp_mu(2, 1e-5)
    spent = f"have spent mu = {rounded_up(both)}, epsilon = {rounded_up(gdp_epsilon(both, 1e-5))} at delta = 1e-05 on"
    condition = "given a schema that does not come from these rows"
    ledger = CliRunner().invoke(cli, ["ledger", "show", str(tmp_path / "a" / "people.csv.ledger")]).stdout
    (said,) = [line for line in ledger.splitlines() if line.startswith("that is")]
    assert "against everybody but the computer that trained, a trusted curator; independent noise of that" in said
    assert "the server" not in said
    folder = max(tmp_path.glob("fit-people-*"), key=lambda path: path.name)
    outcome = Outcome.read(folder)
    assert outcome.mu == pytest.approx(one)
    shown = card([Group("run", [RecordedRun("run", outcome, None)])])
    for text in (done.stdout, (folder / "model" / "card.json").read_text(), outcome.guarantee, shown["full"][0][0]):
        assert spent in text
        assert f"epsilon = {rounded_up(2.0)} at delta" in text
        assert condition in text
        assert "the server" not in text, "there is none"
        assert "against everybody but the computer that trained, a trusted curator; independent noise of that" in text
    words = " ".join((folder / "model" / "CARD.md").read_text().split())
    assert words.count(spent) == 1
    assert words.index(spent) < words.index(f"mu = {rounded_up(one)} Gaussian DP")  # the total comes first
    head, first, *_ = shown["figures"]
    assert first[1:] == [rounded_up(gdp_epsilon(both, 1e-5)), right_at_most(both)]
    assert head[0] == OF_ALL_CALLS
    assert right_at_most(both) in shown["plain"][0][0]
    assert right_at_most(one) not in shown["plain"][0][0]
    assert shown["who"]["Given"][0][0].startswith("a schema that does not come from")
    assert shown["who"]["From whom"][0][0] == "everybody but the computer that trained, a trusted curator"
    assert "server" not in json.dumps([shown["who"], shown["whence"], outcome.privacy.meaning])


def test_a_folder_that_cannot_hold_the_model_is_found_before_anything_is_released(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    table = table_of(tmp_path / "home", "33,a,1")
    monkeypatch.setattr(result_files.os, "fsync", full)
    asked = ["fit", str(table), "--real", "--schema", str(table.parent / "schema.toml"), *QUICK]
    said = CliRunner().invoke(cli, [*asked, "--out", str(tmp_path / "runs"), "--name", "one"])
    assert said.exit_code == 1
    assert "No space left on device" in said.output
    assert "nothing was released" in said.output
    assert not Path(f"{table}.ledger").exists()
    assert not (tmp_path / "runs").exists()


def test_a_folder_on_a_full_disk_still_has_room_for_the_model(tmp_path):
    folder = tmp_path / "runs" / "one"
    with result_files.room_kept(folder):
        assert sum(one.stat().st_size for one in folder.iterdir()) >= 1 << 20
    assert not list(folder.iterdir())


def test_an_interrupt_while_an_error_is_noted_leaves_without_that_error(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def work(seal):
        seal.begin_rows()
        raise ValueError(SECRET)

    with monkeypatch.context() as patched:
        patched.setattr(traceback, "format_exception", interrupted)
        with pytest.raises(KeyboardInterrupt) as left:
            run_sealed(work)
    assert left.value.__context__ is None
    assert left.value.__cause__ is None


def test_an_error_of_settings_leaves_without_what_caused_it():
    def work(_):
        rows = [SECRET]
        try:
            raise ValueError(rows)
        except ValueError as error:
            raise ConfigurationError("Expected a file, got none.") from error

    with pytest.raises(ConfigurationError) as left:
        run_sealed(work)
    assert left.value.__cause__ is None
    assert left.value.__context__ is None
    assert "rows" not in {name for frame, _ in traceback.walk_tb(left.value.__traceback__) for name in frame.f_locals}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_few_rows_are_fitted_or_refused_with_the_reason(rows, tmp_path):
    path = tmp_path / "few.csv"
    path.write_text("age,ward,ill\n" + "33,a,1\n34,b,0\n50,a,1\n51,a,0\n66,b,1\n"[: 7 * rows])
    (tmp_path / "schema.toml").write_text(SCHEMA)
    if rows == 1:
        with raises(ConfigurationError, "out-of-range", match="at least two samples"):
            fit(path, real=True, schema=tmp_path / "schema.toml")
        return
    assert fit(path, real=True, schema=tmp_path / "schema.toml").table.rows == rows


def test_a_real_fits_result_leads_to_no_row(tmp_path):
    gc.collect()
    others = [one for one in gc.get_objects() if type(one) is Dealt]  # of other tests, kept alive so that none is new
    table = table_of(tmp_path / "home", "33,a,1")
    result = fit(table, real=True, schema=table.parent / "schema.toml", strategy="full-batch", num_rounds=2)
    gc.collect()
    assert result.table.rows == ROWS
    assert len([one for one in gc.get_objects() if type(one) is Dealt]) == len(others)
