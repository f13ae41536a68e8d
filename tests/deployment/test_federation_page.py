"""The short way of docs/deployment.md, typed as it stands there: a coordinator, five clients and two helpers.

Each member has a folder that stands for a computer of its own; files go between them as operators send them. The test
counts what is typed, looks for keys that travelled, and trains over what was started. Four hospitals do the same
without helpers, with their tables of patients.
"""

import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app import load_model
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import Processes
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import MemoryLedger, SQLiteOpeningRecord, read_ledger

from tests.deployment.submitting import submitted
from tests.harness.schemas import write_table

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
CLIENTS, HELPERS = [f"client-{i}" for i in range(1, 6)], ["helper-1", "helper-2"]
MEMBERS = [*CLIENTS, *HELPERS]
MOST_COMMANDS = 17


def section():
    """Commands and TOML of the page's short way."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    part = text.split("## The short way\n")[1].split("\n## ")[0]
    blocks = {"sh": [], "toml": []}
    for language, block in re.findall(r"^ *```(sh|toml)\n(.*?)^ *```", part, flags=re.DOTALL | re.MULTILINE):
        blocks[language].append(block)
    return blocks["sh"], blocks["toml"]


class Site:
    """Everybody's computers, and how often something was typed on them."""

    def __init__(self, folder, members=MEMBERS, more=""):
        self.folder, self.port, self.typed = folder, launch.free_port(), []
        self.members, self.more = members, more
        self.environment = {**launch.launch_environment(folder / "home", {}), "COLUMNS": "200"}
        self.environment["TMPDIR"] = str(folder / "tmp")  # what killed processes leave there goes with the folder
        for name in ("home", "tmp", "coordinator", *members):
            (folder / name).mkdir()

    def said(self, line, member):
        line = line.replace("fl.example.org:8000", f"localhost:{self.port}").replace("/path/to/murmurfl", str(ROOT))
        return line.replace("client-1", member).replace("/var/lib/murmurfl", str(self.folder / "out"))

    def type(self, line, where, *, counts=True):
        if counts:
            self.typed.append(line)
        ended = self.ended(line, where)
        assert ended.returncode == 0, f"{line}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
        return ended.stdout

    def submit(self, lines, where, *, counts=True):
        if counts:
            self.typed.append(lines)
        submitted(lambda typed: self.ended(typed, where), lines, 'export FLWR_HOME="$PWD/ours/flower"')

    def ended(self, line, where):
        return subprocess.run(
            ["bash", "-euc", line], cwd=where, env=self.environment, capture_output=True, text=True, timeout=300
        )

    def start(self, line, where):
        self.typed.append(line)
        with (where / "log").open("wb") as log:
            command = ["bash", "-euc", f"exec {line}"]
            return subprocess.Popen(command, cwd=where, env=self.environment, stdout=log, stderr=log)

    def stop(self):
        for process in Processes(f"{launch.MARKER}={self.environment[launch.MARKER]}").living(set()):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("site"), more=" --set num-rounds=2")
    try:
        yield made
    finally:
        made.stop()


def records_of(number):
    experiment = prepare(RunConfig(num_clients=len(CLIENTS), clients_per_round=len(CLIENTS), batch_size=32))
    features, labels = experiment.client(number, MemoryLedger()).samples[:]
    return np.tile(features, (2, 1)), np.tile(labels, 2)


def wait_until(answers, what):
    limit = time.monotonic() + 240
    while not answers():
        assert time.monotonic() < limit, what
        time.sleep(0.5)


def started(site, tables):
    """Type the page up to the last node, whose operators have ``tables`` of so many rows; return the submission."""
    new, join, accept, serve, start, status, submit = section()[0]
    (edited,) = section()[1]
    coordinator = site.folder / "coordinator"
    site.type(site.said(new, "").rstrip() + site.more, coordinator)
    for member in site.members:
        shutil.copy(coordinator / "ours" / "kits" / f"{member}.kit", site.folder / member)
        said = site.type(site.said(join, member), site.folder / member)
        assert "public keys only" in said
        shutil.copy(site.folder / member / member / f"{member}.answer", coordinator)
    said = site.type(site.said(accept, ""), coordinator)
    digest = re.search(r"^digest +([0-9a-f]{64})$", said, flags=re.MULTILINE).group(1)
    site.start(site.said(serve, ""), coordinator)
    for member, rows in tables.items():
        edit(site.folder / member / member, rows, edited)
    last = site.members[-1]
    wait_until(lambda: f"Registered the node of {last}" in (coordinator / "log").read_text(), "nothing was registered")
    for member in site.members:
        site.start(site.said(start, member).replace("DIGEST", digest), site.folder / member)
    wait_until(
        lambda: site.type(site.said(status, ""), coordinator, counts=False).count("online") == len(site.members),
        [
            (site.folder / member / "log").read_text()[-500:]
            for member in site.members
            if (site.folder / member / "log").exists()
        ],
    )
    return submit, status


HEART = "heart-four-sites.csv.gz"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART_SCHEMA = """reviewed = true

[label]
column = "ill"
classes = ["no", "yes"]

[columns]
age = { kind = "number", bounds = [20, 90], missing = 55 }
sex = { kind = "yes/no", missing = true }
cp = { kind = "category", values = ["1", "2", "3", "4"] }
trestbps = { kind = "number", bounds = [80, 200], missing = 130 }
chol = { kind = "number", bounds = [0, 500], missing = 220 }
thalach = { kind = "number", bounds = [60, 210], missing = 140 }
exang = { kind = "yes/no", missing = false }
oldpeak = { kind = "number", bounds = [-3, 7], missing = 0 }
"""


@pytest.fixture
def patients():
    """Rows of each hospital, in a shuffled order, without the last fifth, and those of all that were left out."""
    path = Path(os.environ.get("MURMURFL_DATA", ""), "tables", HEART)
    if not os.environ.get("MURMURFL_DATA") or not path.is_file():
        pytest.skip(f"MURMURFL_DATA names no folder with tables/{HEART}")
    with gzip.open(path, "rt") as file:
        rows = [{**row, "ill": "no" if row["num"] == "0" else "yes"} for row in csv.DictReader(file)]
    names = [name for name in rows[0] if name not in ("site", "num")]
    kept, held = {}, []
    for number, hospital in enumerate(HOSPITALS):
        own = [
            {n: "" if row[n] in ("-9", "-9.0") else row[n] for n in names} for row in rows if row["site"] == hospital
        ]
        own = [own[i] for i in np.random.Generator(np.random.Philox(key=number)).permutation(len(own))]
        kept[f"client-{number + 1}"], held = own[len(own) // 5 :], held + own[: len(own) // 5]
    return kept, held


def test_four_hospitals_train_on_their_tables_by_the_page_and_beat_the_usual_answer(patients, tmp_path):
    """Noise is the operating system's: in 60 rehearsals at this mu the model was right in 78 to 81 % of the others.

    The limit, 5 points above the usual answer's 57 %, is 30 of their standard deviations away.
    """
    kept, held = patients
    site = Site(tmp_path, tuple(kept), " --helpers 0 --clients 4 --num-records 180 --set num-rounds=6")
    (tmp_path / "coordinator" / "schema.toml").write_text(HEART_SCHEMA)
    for member, rows in kept.items():
        with (tmp_path / member / "patients.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        (tmp_path / member / "patients.csv").chmod(0o600)
    try:
        submit, status = started(site, {member: len(rows) for member, rows in kept.items()})
        coordinator = tmp_path / "coordinator"
        site.submit(site.said(submit, ""), coordinator)
        assert site.type(site.said(status, ""), coordinator).count("mu 2 of 4") == len(kept)
    finally:
        site.stop()
    outcome = Outcome.read(tmp_path / "out" / "first")
    assert (outcome.rounds, outcome.aggregated, outcome.mu) == (6, 24, pytest.approx(2.0))
    labels = np.array([row["ill"] for row in held])
    majority = max(np.mean(labels == one) for one in ("no", "yes"))
    found = load_model(tmp_path / "out" / "first").predict(held)
    assert np.mean(found == labels) > majority + 0.05


def test_seventeen_commands_and_one_edited_file_make_a_federation_that_trains(site):
    coordinator = site.folder / "coordinator"
    write_table(coordinator, *records_of(0))  # the schema; the rows are nobody's
    tables = {}
    for number, member in enumerate(CLIENTS):
        features, labels = records_of(number)
        write_table(site.folder / member, features, labels)
        tables[member] = len(labels)
    submit, status = started(site, tables)
    assert len(site.typed) == MOST_COMMANDS
    trained(site, submit, coordinator)
    assert site.type(site.said(status, ""), coordinator, counts=False).count("mu 2 of 4") == len(CLIENTS)


def edit(folder, rows, edited):
    """Write the page's lines in the place of those that the file has, and put the records where they say."""
    shutil.move(folder.parent / "patients.csv", folder / "patients.csv")
    text = (folder / "node.toml").read_text()
    for line in edited.strip().splitlines():
        name, _, value = line.partition("#")[0].partition(" = ")
        value = {"samples": '"patients.csv"', "num-records": str(rows)}.get(name.strip(), value.strip())
        text, count = re.subn(rf"(?m)^{name.strip()} = .*$", f"{name.strip()} = {value}", text)
        assert count == (1 if name.strip() != "budget-local-mu" else "secure-aggregation" in text), name
    (folder / "node.toml").write_text(text)


def trained(site, submit, coordinator):
    site.submit(site.said(submit, ""), coordinator, counts=False)
    result = json.loads((site.folder / "out" / "first" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"], result["config"]["model"]) == (2, 2 * len(CLIENTS), "additive")
    assert result["mu"] == pytest.approx(2.0)
    assert result["mu_local"] == pytest.approx(2.0 * 2**0.5)
    assert (result["accuracy"], result["loss"]) == (None, None)
    assert result["private_evaluation"]["samples"] == sum(len(records_of(number)[1]) for number in range(len(CLIENTS)))
    for member in CLIENTS:
        sessions = read_ledger(site.folder / member / member / "ledger.sqlite").sessions
        assert sorted(session.releases for session in sessions) == [
            1,
            1,
            2,
        ]  # of the knots, the evaluation, the training
    for member in HELPERS:
        assert SQLiteOpeningRecord(site.folder / member / member / "openings.sqlite").sets == 4
    wait_until(lambda: "ended: completed" in (coordinator / "log").read_text(), "the run's end was not logged")
    lines = [line for line in (coordinator / "log").read_text().splitlines() if "Round 1 of 2" in line]
    assert lines
    assert all("of run " in line for line in lines)


def test_no_private_key_left_its_members_folder(site):
    """Looks for each of them in every file of everybody else; the public halves do travel."""
    secrets = {}
    for member in MEMBERS:
        document = json.loads((site.folder / member / member / "roster.key").read_text())
        secrets[member] = [value for key, value in document.items() if "secret" in key]
        # The secret number stands at the end of OpenSSH's text; what is before it is public.
        secrets[member].append((site.folder / member / member / "node.key").read_text().splitlines()[-3])
    for owner in ("coordinator", *MEMBERS):
        content = b"".join(path.read_bytes() for path in (site.folder / owner).rglob("*") if path.is_file())
        for member, found in secrets.items():
            for secret in found:
                assert (secret.encode() in content) == (owner == member)


def test_a_member_leaves_another_comes_and_a_third_exchanges_its_keys(site):
    coordinator = site.folder / "coordinator"
    site.type("murmurfl federation leave client-5 --in ours", coordinator)
    later = site.folder / "later"
    later.mkdir()
    shutil.copy(coordinator / "ours" / "kits" / "client-1.kit", later / "client-6.kit")
    site.type("murmurfl federation join client-6.kit --name client-6", later)
    renewing = site.folder / "helper-2"
    before = (renewing / "helper-2" / "helper-2.answer").read_text()
    site.type("murmurfl federation renew helper-2", renewing)
    for member, there in (("client-6", later), ("helper-2", renewing)):
        shutil.copy(there / member / f"{member}.answer", coordinator)
    assert (coordinator / "helper-2.answer").read_text() != before
    said = site.type("murmurfl federation accept client-6.answer helper-2.answer", coordinator)
    assert "client-5" not in said
    log = coordinator / "log"
    wait_until(lambda: log.read_text().count("Unregistered a node") == 2, "the old nodes are still registered")
    wait_until(lambda: "Registered the node of client-6" in log.read_text(), "the new one is not registered")
