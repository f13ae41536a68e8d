"""The short way of docs/deployment.md, typed as it stands there: a coordinator, five machines and two helpers.

Each member has a folder that stands for a computer of its own; files go between them as operators send them. The test
counts what is typed, looks for keys that travelled, and trains over what was started.
"""

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
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import Processes
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import MemoryLedger, SQLiteOpeningRecord, read_ledger

from tests.harness.schemas import write_table

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
MACHINES, HELPERS = [f"machine-{i}" for i in range(1, 6)], ["helper-1", "helper-2"]
MEMBERS = [*MACHINES, *HELPERS]
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

    def __init__(self, folder):
        self.folder, self.port, self.typed = folder, launch.free_port(), []
        self.environment = {**launch.launch_environment(folder / "home", {}), "COLUMNS": "200"}
        self.environment["TMPDIR"] = str(folder / "tmp")  # what killed processes leave there goes with the folder
        for name in ("home", "tmp", "coordinator", *MEMBERS):
            (folder / name).mkdir()

    def said(self, line, member):
        line = line.replace("fl.example.org:8000", f"localhost:{self.port}").replace("/path/to/murmurfl", str(ROOT))
        return line.replace("machine-1", member).replace("/var/lib/murmurfl", str(self.folder / "out"))

    def type(self, line, where, *, counts=True):
        if counts:
            self.typed.append(line)
        ended = subprocess.run(
            ["bash", "-euc", line], cwd=where, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, f"{line}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
        return ended.stdout

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
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        yield made
    finally:
        made.stop()


def records_of(number):
    experiment = prepare(RunConfig(num_clients=len(MACHINES), clients_per_round=len(MACHINES), batch_size=32))
    features, labels = experiment.client(number, MemoryLedger()).samples[:]
    return np.tile(features, (2, 1)), np.tile(labels, 2)


def wait_until(answers, what):
    limit = time.monotonic() + 240
    while not answers():
        assert time.monotonic() < limit, what
        time.sleep(0.5)


def test_seventeen_commands_and_one_edited_file_make_a_federation_that_trains(site):
    new, join, accept, serve, start, status, submit = section()[0]
    (edited,) = section()[1]
    coordinator = site.folder / "coordinator"
    write_table(coordinator, *records_of(0))  # the schema; the rows are nobody's
    site.type(site.said(new, ""), coordinator)
    for member in MEMBERS:
        shutil.copy(coordinator / "ours" / "kits" / f"{member}.kit", site.folder / member)
        said = site.type(site.said(join, member), site.folder / member)
        assert "public keys only" in said
        shutil.copy(site.folder / member / member / f"{member}.answer", coordinator)
    said = site.type(site.said(accept, ""), coordinator)
    digest = re.search(r"^digest +([0-9a-f]{64})$", said, flags=re.MULTILINE).group(1)
    site.start(site.said(serve, ""), coordinator)
    for number, member in enumerate(MACHINES):
        edit(site.folder / member / member, number, edited)
    wait_until(lambda: "Registered the node of helper-2" in (coordinator / "log").read_text(), "nothing was registered")
    for member in MEMBERS:
        site.start(site.said(start, member).replace("DIGEST", digest), site.folder / member)
    assert len(site.typed) == MOST_COMMANDS
    wait_until(
        lambda: site.type(site.said(status, ""), coordinator, counts=False).count("online") == len(MEMBERS),
        [(site.folder / member / "log").read_text()[-500:] for member in MEMBERS],
    )
    trained(site, submit, coordinator)
    assert site.type(site.said(status, ""), coordinator, counts=False).count("mu 2 of 4") == len(MACHINES)


def edit(folder, number, edited):
    """Write the page's lines in the place of those that the file has, and put the records where they say."""
    features, labels = records_of(number)
    write_table(folder.parent, features, labels)
    shutil.move(folder.parent / "patients.csv", folder / "patients.csv")
    text = (folder / "node.toml").read_text()
    for line in edited.strip().splitlines():
        name, _, value = line.partition("#")[0].partition(" = ")
        value = {"samples": '"patients.csv"', "rows": str(len(labels))}.get(name.strip(), value.strip())
        text, count = re.subn(rf"(?m)^{name.strip()} = .*$", f"{name.strip()} = {value}", text)
        assert count == 1, f"the file has no line for {name}"
    (folder / "node.toml").write_text(text)


def trained(site, submit, coordinator):
    site.type(site.said(submit, ""), coordinator, counts=False)
    result = json.loads((site.folder / "out" / "first" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"]) == (2, 2 * len(MACHINES))
    assert result["mu"] == pytest.approx(2.0)
    assert result["mu_local"] == pytest.approx(2.0 * 2**0.5)
    for member in MACHINES:
        (session,) = read_ledger(site.folder / member / member / "ledger.sqlite").sessions
        assert session.releases == 2
    for member in HELPERS:
        assert SQLiteOpeningRecord(site.folder / member / member / "openings.sqlite").sets == 2
    wait_until(lambda: "ended: completed" in (coordinator / "log").read_text(), "the run's end was not logged")


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
    site.type("murmurfl federation leave machine-5 --in ours", coordinator)
    later = site.folder / "later"
    later.mkdir()
    shutil.copy(coordinator / "ours" / "kits" / "machine-1.kit", later / "machine-6.kit")
    site.type("murmurfl federation join machine-6.kit --name machine-6", later)
    renewing = site.folder / "helper-2"
    before = (renewing / "helper-2" / "helper-2.answer").read_text()
    site.type("murmurfl federation renew helper-2", renewing)
    for member, there in (("machine-6", later), ("helper-2", renewing)):
        shutil.copy(there / member / f"{member}.answer", coordinator)
    assert (coordinator / "helper-2.answer").read_text() != before
    said = site.type("murmurfl federation accept machine-6.answer helper-2.answer", coordinator)
    assert "machine-5" not in said
    log = coordinator / "log"
    wait_until(lambda: log.read_text().count("Unregistered a node") == 2, "the old nodes are still registered")
    wait_until(lambda: "Registered the node of machine-6" in log.read_text(), "the new one is not registered")
