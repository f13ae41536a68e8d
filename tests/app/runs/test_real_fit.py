"""A real fit: nothing leaves it but what was released or is public, and its ledger counts every call on the rows."""

import faulthandler
import gc
import hashlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.reports.card import card
from murmurfl.app.reports.groups import Group
from murmurfl.app.runs import result as result_files
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.real_fit import Dealt, dealt_order
from murmurfl.app.runs.sealed import PRIVATE_FIRST_LINE, Ending, SealedError, run_sealed
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records import schema as schemas
from murmurfl.clients.records.machine_records import CsvLines, Records, Rows
from murmurfl.privacy.machine.clipping import RowBound
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, gdp_epsilon, gdp_mu
from murmurfl.privacy.ledger.ledger_history import read_ledger
from murmurfl.privacy.side.evaluation_query import EvaluationRows
from typer.testing import CliRunner

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
NOISY = ("accuracy", "interval", "noise_interval", "auc", "auc_interval", "auc_noise_interval", "sentence")
"""What a private evaluation releases, by its keys in ``result.json``."""

MISFITS = [
    *(
        f"33,a,{label}"
        for label in ("", " ", "NA", "nan", "none", "2", "-1", "1e999", "yes", f"x{SECRET}", "\u0661", "1,")
    ),
    *(
        f"{age},a,1"
        for age in ("", "text", "nan", "inf", "-inf", "1e999", "0x10", "1_0", "--1", f"{SECRET}x", "9" * 401)
    ),
    *("33,a", "33", "", " ", ",", ",,", ",,,", "33,a,1,1", f"{SECRET}", "33;a;1", "33\ta\t1"),
    *('"33,a,1', '33,"a,1', '33,a,"1', '"33",a,"1"x', '3"3,a,1"', '"', '""', '"""'),
    *(b"\xff,a,1", b"33,a,\xfe", b"\xef\xbb\xbf,a,1", b"33,a,\x00", b"\x00\x00", b"33\x0033,a,1", b"\xed\xa0\x80,a,1"),
    *("33,a," + "9" * 100_000, "9" * 200_000 + ",a,1", "33,a,1" + "\r1", "\r", "33,a,\r", "33,a," + "1" * 5_000),
    *(
        f"=cmd|' /C {SECRET}'!A0,a,1",
        "{0},a,1",
        "%s,a,1",
        "\x1b[2J,a,1",
        "\u2028,a,1",
        "33,a,\u202e1",
        "<b>,a,<script>",
    ),
]
"""Lines that do not fit the schema: each is a row that counts as zero."""
FITTING = [
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
    """A way to have the same key and the same nonces in each of several fits, in which nobody draws a picture."""
    monkeypatch.setattr(result_files, "plot_accuracy", lambda outcome, path: Path(path).write_bytes(b""))
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
                document["private_evaluation"] |= dict.fromkeys(NOISY)
            elif not released and "private_evaluation" in document:
                document["private_evaluation"] = "noisy"
            found[name] = document
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tobytes() if released else arrays[key].shape for key in arrays.files}
        elif path.name == "CARD.md":
            text = path.read_text().partition("* **made**")[0]
            found[name] = text if released else text.partition("* **measured**")[0] + text.partition("* **data**")[2]
        else:
            found[name] = path.read_bytes()
    return found


def left_by(home, *arguments, released=True, capfd=None):
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
def of_misfit(tmp_path, same_noise, capfd):
    """What leaves a fit in which one row is missing its label."""
    table_of(tmp_path / "missing", "33,a,")
    same_noise()
    left = left_by(tmp_path / "missing", capfd=capfd)
    assert left["code"] == 0, left["texts"]
    assert "result.json" in left["files"]
    return left


@pytest.mark.parametrize("line", MISFITS, ids=range(len(MISFITS)))
def test_rows_that_do_not_fit_are_alike_in_all_that_leaves(line, tmp_path, same_noise, of_misfit, capfd):
    table_of(tmp_path / "strange", line)
    same_noise()
    assert left_by(tmp_path / "strange", capfd=capfd) == of_misfit


@pytest.mark.parametrize("line", FITTING, ids=range(len(FITTING)))
def test_rows_that_fit_differ_from_others_in_released_figures_alone(line, tmp_path, same_noise, capfd):
    left = []
    for name, one in (("fits", line), ("missing", "33,a,")):
        table_of(tmp_path / name, one)
        same_noise()
        left.append(left_by(tmp_path / name, released=False, capfd=capfd))
    assert left[0] == left[1]
    assert left[0]["code"] == 0


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
    print(SECRET)
    print(SECRET, file=sys.stderr)
    print(SECRET, file=sys.__stderr__)
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
    "line": failing(CsvLines, "_cells", lambda rows, line: AGE.encode() in line),
    "row": failing(Schema, "read", lambda schema, item: AGE in str(item)),
    "cell": failing(Column, "encode", lambda column, cell: cell == AGE),
    "label": failing(Label, "encode", lambda label, cell: cell == "01"),
    "gradient": failing(SoftmaxRegression, "__call__", lambda model, at, samples: has_strange(samples[0][:, 0])),
    "clipping": failing(RowBound, "total", is_clipped),
    "evaluation": failing(SoftmaxRegression, "logits", lambda model, at, features: has_strange(features[:, 0])),
}
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
        left.append(left_by(tmp_path / name, capfd=capfd))
    assert seen
    assert left[0]["code"] == 0
    assert left[1] == left[0]
