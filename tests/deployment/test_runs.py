"""Nodes that take runs of one owner's permits only, under a real SuperLink that anybody may submit to."""

import json
import os
import signal
import time
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.nodes.run_admission import REFUSAL
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import SQLiteOpeningRecord, protocol, read_ledger
from murmurfl.privacy.permits import OwnerKey
from murmurfl.privacy.setting import by_key

from tests.deployment.test_faults import after_round

pytestmark = pytest.mark.deployment

OWNER, STRANGER = OwnerKey.generate(), OwnerKey.generate()
SESSION = "night1"
SETTINGS = {
    "num-clients": 2,
    "clients-per-round": 2,
    "batch-size": 32,
    "num-rounds": 4,
    "node-deadline-s": 20.0,
    "round-timeout-s": 30.0,
}


def permit(owner=OWNER, *sessions, ends=600, **options):
    now = int(time.time())
    return owner.permit(sessions or [SESSION], not_before=now - 60, until=now + ends, **options)


def submit(running, folder, **changes):
    """Submit a run under the folder's name; what it said of its failure, or nothing."""
    settings = {**SETTINGS, **by_key(changes, run_keys())}
    config = RunConfig.from_mapping({**settings, "out-dir": str(folder.parent), "run-name": folder.name})
    try:
        running.submit(config.to_mapping())
    except LaunchError as error:
        failure = folder / "failure.json"
        return json.loads(failure.read_text())["reason"] if failure.exists() else f"killed: {error}"
    return ""


def sessions(running):
    ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
    return [[(session.session, session.releases) for session in ledger.sessions] for ledger in ledgers]


def logs(running):
    return [files.log.read_text() for files in running.nodes.values()]


@contextmanager
def nodes(folder, table, beside=(), **changes):
    settings = {**SETTINGS, **by_key(changes, run_keys())}
    config, lines = RunConfig.from_mapping(settings), []
    experiment, own = prepare(config), {} if beside else {"max-participations": 10, "budget-mu": 16.0}
    with deployment(folder, timeout_s=900, on_line=lines.append) as running:
        running.seen = lines
        named = {f"node-{i}": {**node_settings(experiment, i), **own} for i in range(config.num_clients)}
        running.add_nodes(named, beside)
        for name in (*named, *beside):
            with running.files_of(name).config.open("a") as file:
                file.write(f"\n[runs]\n{table}\n")
            running.start_node(name)
        everybody = [running.files_of(name).log for name in (*named, *beside)]
        while not all("Connected to " in log.read_text() for log in everybody):  # else a refusal could pass for absence
            running.check_time()
            time.sleep(0.5)
        yield running


def kill_the_server_app(running):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            ours = os.fsencode(str(running.home)) in path.with_name("environ").read_bytes()
        except OSError:
            continue
        if ours and any(word.endswith(b"flwr-serverapp") for word in words):
            os.kill(int(path.parent.name), signal.SIGKILL)


HOSTILE_SERVER = """
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    permit, points, seen = context.run_config["permit"], ArrayRecord([np.zeros((10, 64)), np.zeros(10)]), {}
    base = {"protocol-version": 1, "server-round": 1, "ack": 0}
    attacks = {
        "another session": [{**base, "session": "stolen1", "permit": permit}],
        "two records": [{**base, "session": "stolen2"}, {**base, "session": SESSION, "permit": permit}],
        "records in turn": [{**base, "session": SESSION, "permit": permit}, {**base, "session": "stolen3"}],
        "no permit": [{**base, "session": SESSION}],
        "a changed one": [{**base, "session": SESSION, "permit": permit[:-6] + "AAAAAA"}],
        "a greeting without": [{"protocol-version": 1, "ask": "hello"}],
        "the session itself": [{**base, "session": SESSION, "permit": permit}],
    }
    for name, records in attacks.items():
        kind = "query" if "ask" in records[0] else "train"
        named = {key: ConfigRecord(record) for key, record in zip(("config", "other"), records)}
        content = {"arrays": points, "previous-arrays": points, **named}
        messages = [Message(RecordDict(dict(content)), dst_node_id=node, message_type=kind) for node in nodes]
        replies = grid.send_and_receive(messages, timeout=60)
        seen[name] = [[r.error.code, r.error.reason] if r.has_error() else [0, ""] for r in replies]
    Path(context.run_config["answers"]).write_text(json.dumps(seen))
"""


def hostile_app(folder):
    """A Flower App that asks with somebody's permit for what the permit does not say."""
    package = folder / "hostile"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(HOSTILE_SERVER.replace("SESSION", '"night0"'))
    (package / "client_app.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "hostile"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n[tool.flwr.app]\npublisher = "tests"\n'
        '[tool.flwr.app.components]\nserverapp = "hostile.server_app:app"\nclientapp = "hostile.client_app:app"\n'
        '[tool.flwr.app.config]\npermit = ""\nanswers = ""\n'
    )
    return folder


def test_only_the_owners_permit_begins_or_continues_a_session(tmp_path):
    """Runs without a permit of the owner's; a hostile server with one; the owner's own, killed and gone on with."""
    with nodes(tmp_path / "run", f'owners = ["{OWNER.public.hex()}"]') as running:
        ours = running.app_dir
        for number, text in enumerate(["", permit(STRANGER), permit(bundle="ab" * 32)]):
            assert "run-not-allowed" in submit(running, tmp_path / f"refused-{number}", permit=text)
        assert sessions(running) == [[], []]

        answers = tmp_path / "answers.json"
        told = {"permit": permit(OWNER, "night0"), "answers": str(answers)}
        running.submit(told, hostile_app(tmp_path / "hostile-app"))
        seen = json.loads(answers.read_text())
        assert seen.pop("the session itself") == [[0, ""]] * 2, "its own session is what a permit is for"
        assert list(seen.values()) == [[[protocol.RUN_NOT_ALLOWED, REFUSAL]] * 2] * 6
        assert sessions(running) == [[("night0", 1)]] * 2
        for log in logs(running):
            for why in ("it carries no permit", "none of [runs] owners", "for another bundle", "for other sessions"):
                assert why in log

        running.app_dir = ours
        digest = sha256(build_fab_from_disk(ours)).hexdigest()
        first, renewed = permit(bundle=digest), permit(ends=900, bundle=digest)
        after_round(running, 2, lambda: kill_the_server_app(running))
        assert submit(running, tmp_path / "owned", permit=first, node_deadline_s=60.0).startswith("killed")
        assert submit(running, tmp_path / "owned", permit=renewed, node_deadline_s=60.0) == ""
        text = (tmp_path / "owned" / "result.json").read_text()
        assert json.loads(text)["aggregated"] == 2 * SETTINGS["num-rounds"]
        assert first not in text
        assert renewed not in text
        # One session; and the round that was asked twice, under two permits, got the same release twice.
        assert [ledger[1:] for ledger in sessions(running)] == [[(SESSION, SETTINGS["num-rounds"])]] * 2
        # The same permit for another training: the session has begun, and no other may be.
        assert submit(running, tmp_path / "again", permit=renewed)
        assert [len(ledger) for ledger in sessions(running)] == [2, 2]


def test_a_node_takes_the_bundle_that_it_knows_and_says_nothing_to_another(tmp_path):
    from murmurfl.app.engines.start import app_folder

    digest = sha256(build_fab_from_disk(app_folder())).hexdigest()
    with nodes(tmp_path / "run", f'bundles = ["{digest}"]\nhours = "00:00-24:00"') as running:
        ours, answers = running.app_dir, tmp_path / "answers.json"
        told = {"permit": permit(OWNER, "night0"), "answers": str(answers)}
        running.submit(told, hostile_app(tmp_path / "hostile-app"))
        assert list(json.loads(answers.read_text()).values()) == [[[protocol.RUN_NOT_ALLOWED, REFUSAL]] * 2] * 7
        assert sessions(running) == [[], []]
        running.app_dir = ours
        assert submit(running, tmp_path / "known", num_rounds=1, node_deadline_s=60.0) == ""
        assert [len(ledger) for ledger in sessions(running)] == [1, 1]


def test_a_helper_opens_sums_of_permitted_sessions_only(tmp_path):
    """Clients and a helper with `[runs]`: without a permit of the owner's no sum is ever opened."""
    sums = {
        "trust": "secure-aggregation",
        "num_clients": 3,
        "clients_per_round": 3,
        "min_cohort": 2,
        "colluders": 0,
        "helpers": 1,
        "num_rounds": 1,
    }
    with nodes(tmp_path / "run", f'owners = ["{OWNER.public.hex()}"]', ["helper-0"], **sums) as running:
        record = SQLiteOpeningRecord(running.helpers["helper-0"].config.parent / "record.sqlite")
        assert "run-not-allowed" in submit(running, tmp_path / "refused", permit=permit(STRANGER), **sums)
        assert record.sets == 0
        assert "none of [runs] owners" in running.helpers["helper-0"].log.read_text()
        assert submit(running, tmp_path / "owned", permit=permit(), node_deadline_s=60.0, **sums) == ""
        assert record.sets == 1
