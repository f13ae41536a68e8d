"""What docs/operations.md says of bad days, over real nodes: a full disk, certificates that ended, upgrades in a run.

Two folders may be named for the upgrade, of an older checkout and of another version of Flower: MURMURFL_OLDER and
MURMURFL_OTHER_FLOWER. Without them it goes from what is installed to what is installed.
"""

import datetime
import os
import subprocess
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from murmurfl.clients.nodes.roster_files import read_roster
from murmurfl.privacy import SQLiteOpeningRecord, read_ledger

from tests.deployment.fleet import Fleet, lines_of, releases_of, wait
from tests.deployment.test_walkthrough import HELPERS, NODES, blocks, follow_secure_aggregation

pytestmark = pytest.mark.deployment


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.stop()


def enrolled(fleet, nodes=2):
    for number in range(nodes):
        fleet.prepare(number)
        fleet.follow("Enrol a node", number)


def begun(fleet, name, **settings):
    """A run of which every node has made a release."""
    run = fleet.submit(name, num_clients=2, clients_per_round=2, **settings)
    try:
        wait(lambda: min(releases_of(fleet.ledger(number)) for number in range(2)) >= 1, "the run did not begin", 120)
    except AssertionError:
        run.terminate()
        raise AssertionError(run.communicate()[0][-3000:]) from None
    return run


def refused(result):
    """Refusals of a run by reason."""
    return sum((Counter(report["refused"]) for report in result["per_round"]), Counter())


@contextmanager
def small_disk(folder, kibibytes):
    """A file system with so much room, with what is in ``folder`` on it."""
    kept = {file.name: (file.read_bytes(), file.stat().st_mode & 0o777) for file in folder.iterdir()}
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k,mode=700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        for name, (content, mode) in kept.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    """Take all the room there is."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_node_on_a_full_disk_refuses_and_goes_on_once_there_is_room(fleet):
    enrolled(fleet)
    folder = fleet.ledger(0).parent
    fleet.stop_node(0)
    with small_disk(folder, 4096):
        fleet.start_node(0)
        run = begun(fleet, "full", num_rounds=14)
        fill(folder / "logs")
        fleet.follow("A full disk", 0)
        before = fleet.log(0).count("Released: ")  # not by the ledger: SQLite needs room to read what is being written
        wait(lambda: "room on a disk that works" in fleet.log(0), "nothing was refused")
        full = fleet.log(0).count("Released: ")
        assert full <= before + 1, "one may have been under way"
        assert run.poll() is None
        (folder / "logs").unlink()
        result = fleet.ended(run, "full")
        after = read_ledger(fleet.ledger(0))
        fleet.stop_node(0)
    assert after.mark_problem == ""
    (session,) = after.sessions
    assert session.releases > full, "it goes on without a restart"
    assert result["rounds"] == 14
    assert refused(result).keys() == {"ledger-unusable"}
    assert result["aggregated"] == 28 - result["refusals"] - result["lost_replies"]
    assert session.ack >= session.releases - 1, "and nothing is owed"


def test_a_certificate_that_ended_keeps_nodes_away_until_it_is_renewed(fleet):
    """The page's commands; nodes come back by themselves."""
    fleet.stop_server()
    expire(fleet.server)
    fleet.start_server()
    for number in range(2):
        fleet.prepare(number)
        for line in ("ssh-keygen", "murmurfl ledger"):
            (typed,) = [text for text in lines_of("Enrol a node") if text.startswith(line)]
            fleet.type(typed, number)
        fleet.start_node(number)
    wait(lambda: all("expired" in fleet.log(number).lower() for number in range(2)), "no node said why")
    fleet.follow("Renew the server's certificate", 0)
    for number in range(2):
        (register,) = [line for line in lines_of("Enrol a node") if line.startswith("flwr")]
        fleet.type(register, number)
    result = fleet.ended(fleet.submit("renewed", num_clients=2, clients_per_round=2, num_rounds=1), "renewed")
    assert result["aggregated"] == 2


def expire(server):
    """The server's certificate as it is one day after its end."""
    authority = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((server / "ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate((server / "server.pem").read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(authority.subject, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=3)).not_valid_after(
        now - datetime.timedelta(days=1)
    )
    for extension in old.extensions:
        if extension.oid != x509.ExtensionOID.AUTHORITY_KEY_IDENTIFIER:
            builder = builder.add_extension(extension.value, extension.critical)
    made = builder.sign(key, hashes.SHA256())
    (server / "server.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def halves(section):
    """A section's commands on the nodes, and those on the server."""
    lines = lines_of(section)
    cut = lines.index("systemctl stop murmurfl-server")
    return lines[:cut], lines[cut:]


def test_murmurfl_and_flower_are_upgraded_within_a_run_and_nothing_is_lost(fleet):
    """A node at a time, then the server: the run is submitted again under its name and goes on in its session."""
    older, flower = os.environ.get("MURMURFL_OLDER", ""), os.environ.get("MURMURFL_OTHER_FLOWER", "")
    now = fleet.environment.get("PYTHONPATH", "")
    if older:
        fleet.environment["PYTHONPATH"] = older
        fleet.stop_server()
        fleet.start_server()
    enrolled(fleet)
    run = begun(fleet, "upgraded", num_rounds=12)
    fleet.environment["PYTHONPATH"] = now
    for number in range(2):
        for line in halves("Upgrade murmurfl or Flower")[0]:
            fleet.type(line, number)
    assert run.poll() is None, "the nodes were upgraded within the run"
    made = [releases_of(fleet.ledger(number)) for number in range(2)]
    fleet.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (flower, now)))
    for line in halves("Upgrade murmurfl or Flower")[1]:
        fleet.type(line, 0)
    run.communicate(timeout=120)
    again = fleet.submit("upgraded", num_clients=2, clients_per_round=2, num_rounds=12)
    result = fleet.ended(again, "upgraded")
    assert result["rounds"] == 12
    for number in range(2):
        (session,) = read_ledger(fleet.ledger(number)).sessions
        assert session.releases >= max(12 - result["lost_replies"], made[number])
        assert session.loss.mu == 2.0, "one session, counted once"
        assert (fleet.ledger(number).parent / "before-upgrade.sqlite").exists()


def test_a_rotated_noise_key_leaves_the_node_out(fleet):
    enrolled(fleet)
    run = begun(fleet, "rotated", num_rounds=14)
    fleet.follow("Rotate the noise key", 0)
    result = fleet.ended(run, "rotated")
    assert result["rounds"] == 14
    assert refused(result)["policy-changed"] >= 1
    (session,) = read_ledger(fleet.ledger(0)).sessions
    assert (session.closed, session.loss.mu) == (True, 2.0)
    again = fleet.ended(fleet.submit("again", num_clients=2, clients_per_round=2, num_rounds=1), "again")
    assert again["aggregated"] == 2


def test_new_keys_make_a_new_roster_for_the_next_run(tmp_path):
    fleet = Fleet(tmp_path)
    try:
        follow_secure_aggregation(fleet)
        rotate_keys_of_sums(fleet)
    finally:
        fleet.stop()


def rotate_keys_of_sums(fleet):
    typed = lines_of("Rotate the keys of secure aggregation")
    server, clinic, auditor = (fleet.folder / name for name in ("server", "operator-0", "auditor"))
    for line, folder in zip(typed, (clinic, auditor), strict=True):
        fleet.run(fleet.text(line, folder.name), folder)
    old = read_roster(server / "roster.json", None).digest
    (server / "clinic-0.card").write_bytes((clinic / "etc" / "clinic-0-2.card").read_bytes())
    (server / "auditor.card").write_bytes((auditor / "etc" / "auditor-2.card").read_bytes())
    (server / "roster.json").unlink()
    (make,) = [block for block in blocks("deployment.md", "sh") if "roster make" in block]
    fleet.run(make, server)
    new = read_roster(server / "roster.json", None).digest
    assert new != old
    names = {**{f"operator-{i}": "node.toml" for i in range(NODES)}, **dict.fromkeys(HELPERS, "helper.toml")}
    for who, name in names.items():
        etc = fleet.folder / who / "etc"
        (etc / "roster.json").write_bytes((server / "roster.json").read_bytes())
        text = (etc / name).read_text().replace(old, new)
        if who == "operator-0":
            text = text.replace("clinic-0.key", "clinic-0-2.key")
        if who == "auditor":
            text = text.replace("auditor.key", "auditor-2.key").replace("openings.sqlite", "openings-2.sqlite")
        (etc / name).write_text(text)
        said = fleet.run(f"murmurfl roster check {etc / name}", fleet.folder / who)
        assert "WRONG" not in said
    for who in names:
        fleet.halt(fleet.folder / who)
        fleet.start_again(fleet.folder / who)
    (submit,) = [block for block in blocks("deployment.md", "sh") if "trust.kind=" in block]
    fleet.run(fleet.text(submit, "server").replace('"sums"', '"sums-2"'), Path(__file__).parents[2])
    for helper, sets in {"auditor": ("openings-2.sqlite", 3), "ward": ("openings.sqlite", 6)}.items():
        record = fleet.folder / helper / "lib" / "murmurfl" / sets[0]
        assert SQLiteOpeningRecord(record).sets == sets[1]
