"""A node that dies, dawdles or forgets where a test wants it to: ``rigged_node.py PLAN.json node CONFIG [options]``.

It is the `murmurfl` command with hooks around the steps of a message, put in here and nowhere in the product. The plan
is a JSON file: ``folder`` for what is noted, ``kills`` (pairs of a step and the first round to die there; one after the
other, each once), ``delay`` (share of the replies that are held back, for how many seconds, seed, the round from which
none is), ``clock`` (a file with the seconds its clock is ahead), ``lies`` (by round, which of :data:`LIES` is sent in
place of the reply), and ``bug``, a planted one.

Noted before anything else happens, as lines of JSON: in ``made`` which request a release answers and with which
samples, in ``drawn`` its nonce, in ``sent`` the digest of every release that is handed to the SuperNode.
"""

import functools
import hashlib
import json
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from murmurfl.app.commands import main as cli
from murmurfl.app.nodes import executor
from murmurfl.app.nodes import supernode as supernode
from murmurfl.clients.private_client import PrivateClient
from murmurfl.privacy import Opener, Privatizer, SQLiteLedger, SystemKeys, derived_seed, protocol
from murmurfl.privacy.ledger import sqlite as ledger_page
from murmurfl.privacy.ledger import store
from murmurfl.privacy.release.prefix_sums import ReleaseRule
from murmurfl.privacy.sums import opening_file

PLAN = json.loads(Path(sys.argv.pop(1)).read_text())
FOLDER = Path(PLAN["folder"])
FOLDER.mkdir(exist_ok=True)
# A step may say what dies there; without a word it is the node, and its SuperNode signs off. With any other word than
# this, "power cut: sent" for one, both die.
SUPERNODE_ALONE = "the SuperNode alone"


def lines_of(name):
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()] if (FOLDER / name).exists() else []


def note(name, line):
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


# The round that is being answered or, between two, that is expected next.
now = {"round": max((line["round"] + 1 for line in lines_of("sent")), default=1), "answering": 0}


def child():
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"flower_supernode" in status.with_name("cmdline").read_bytes():
                return int(status.parent.name)
    raise RuntimeError("Expected a SuperNode, got none.")


def here(step):
    """Die, if this is the step and the time."""
    done, kills = lines_of("killed"), PLAN.get("kills", [])
    if len(done) == len(kills):
        return
    wanted, round_ = kills[len(done)]
    how, _, at = wanted.rpartition(": ")
    if at != step or now["round"] < round_:
        return
    note("killed", [wanted, now["round"]])
    if how:
        os.kill(child(), signal.SIGKILL)
    if how != SUPERNODE_ALONE:
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner, name, before=None, after=None):
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*arguments, **options):
        here(before)
        result = real(*arguments, **options)
        here(after)
        return result

    setattr(owner, name, wrapped)


# Flower's SuperNode looks for messages every three seconds, which would be most of a test's time.
os.environ.update({"MURMURFL_TEST_CLOCK": PLAN["clock"]} if "clock" in PLAN else {})
start = supernode.subprocess.Popen


def start_quick(command, **options):
    at = command.index(f"{supernode.__package__}.flower_process")
    quick = str(Path(__file__).with_name("quick_flower_supernode.py"))
    return start([*command[: at - 1], quick, *command[at + 1 :]], **options)


supernode.subprocess = SimpleNamespace(**{**vars(supernode.subprocess), "Popen": start_quick})


# The message, on its way in.
around(executor, "_pull", "fetch", "fetched")
around(executor, "context_from_proto", "fetching")
around(PrivateClient, "_read", "read")
read = PrivateClient._read


def noted_read(self, parameters, config):
    request = read(self, parameters, config)
    now["round"] = now["answering"] = request.server_round
    return request


PrivateClient._read = noted_read

# The release.
around(Privatizer, "_admit", "admit", "admitted")
around(Privatizer, "_contribution_counts", "gradient", "gradient made")
mean_counts = Privatizer._mean_counts


def counted_rows(self, rows):
    now["rows"] = now.get("rows", 0) + 1
    if now["rows"] % self.policy.batch_size == self.policy.batch_size // 2:
        here("half a gradient")
    return mean_counts(self, rows)


Privatizer._mean_counts = counted_rows
answer = Privatizer._answer


def noted_answer(self, session, ack, compute, record):
    def noted(admission, counts):
        samples = [admission.samples.start, admission.samples.stop]
        line = {"session": admission.session, "release": admission.release, "round": now["round"], "samples": samples}
        note("made", line)
        return record(admission, counts)

    return answer(self, session, ack, compute, noted)


Privatizer._answer = noted_answer
draw_nonce = SystemKeys.nonce


def noted_nonce(self, session, release):
    nonce = draw_nonce(self, session, release)
    note("drawn", {"session": session, "release": release, "nonce": nonce.hex()})
    return nonce


SystemKeys.nonce = noted_nonce
around(ReleaseRule, "advance", "noise", "noise made")
around(ledger_page.SQLiteTransaction, "_write_stream", "write", "written")
around(store.StoreTransaction, "move_mark", "mark", "marked")
around(Path, "replace", "mark written", "mark renamed")
connect = store.connect


def traced(*arguments):
    connection, seen = connect(*arguments), []

    def trace(statement):
        if statement.startswith("UPDATE state SET seal"):
            here("seal")
        if statement == "COMMIT":
            here("commit")
            seen.append(statement)
        if statement == "BEGIN IMMEDIATE" and seen:
            here("committed")

    connection.set_trace_callback(trace)
    return connection


store.connect = traced

# A helper's record, and what it opens.
around(opening_file.SQLiteOpeningTransaction, "commit", "record", "recorded")
opened = Opener.open


def noted_open(self, session, name, releases):
    now["round"] = int(name)
    here("open")
    answer = opened(self, session, name, releases)
    digest = hashlib.sha256(answer.total.tobytes()).hexdigest()
    note("opened", {"session": session, "opening": name, "set": answer.set_digest, "total": digest})
    return answer


Opener.open = noted_open

# The reply, on its way out.
push = executor.push_message


def late(round_):
    share, seconds, seed, punctual_from = PLAN.get("delay", (0.0, 0.0, 0, 0))
    coin = np.random.Generator(np.random.Philox(key=derived_seed("late", seed, FOLDER.name, round_))).random()
    return seconds if coin < share and round_ < punctual_from else 0.0


def noted_push(client, message, context):
    if message.has_error() or protocol.ARRAYS not in message.content:
        push(client, message, context)
        return
    here("send")
    if protocol.METRICS not in message.content:  # a helper's
        push(client, message, context)
        here("sent")
        return
    metrics, config = message.content[protocol.METRICS], message.content[protocol.CONFIG]
    digest = hashlib.sha256(b"".join(a.numpy().tobytes() for a in message.content[protocol.ARRAYS].values()))
    line = {"release": metrics[protocol.RELEASE], "ack": metrics[protocol.ACK], "client": config[protocol.CLIENT]}
    note("sent", {**line, "round": now["answering"], "digest": digest.hexdigest()})
    time.sleep(late(now["answering"]))
    push(client, message, context)
    here("sent")
    now["round"] = now["answering"] + 1


# A node that is not honest: it sends Flower's objects by itself, and what it likes in them.
def message_that_does_not_parse(message):
    return with_bodies(message, {"Message": b"\xff" * 9})


def record_that_does_not_parse(message):
    return with_bodies(message, {"ConfigRecord": b"\xff" * 9})


def endless_text(message):
    return with_bodies(message, {"ConfigRecord": b"x" * 10_000_000})


def endless_array(message):
    return with_bodies(message, {"ArrayChunk": bytes(PLAN["bytes"])})


def never_uploaded(message):
    root, objects = with_bodies(message, {})
    return root, {one: content for one, content in objects.items() if not content.startswith(b"ArrayChunk")}


def huge_release(message):
    message.content[protocol.METRICS][protocol.RELEASE] = 2**62
    return with_bodies(message, {})


def another_sender(message):
    vars(message.metadata)["_src_node_id"] += 1
    return with_bodies(message, {})


LIES = {
    lie.__name__.replace("_", " "): lie
    for lie in (
        *(message_that_does_not_parse, record_that_does_not_parse, endless_text, endless_array, never_uploaded),
        *(huge_release, another_sender),
    )
}


def with_bodies(message, bodies):
    """The id of a message's first object and all its objects, some kinds with other bodies; ids are true digests."""
    made, names, root = {}, {}, ""
    for old, part in get_all_nested_objects(message).items():  # children before their parents
        head, _, body = part.deflate().partition(b"\0")
        for before, after in names.items():
            head, body = head.replace(before.encode(), after.encode()), body.replace(before.encode(), after.encode())
        kind, below, _ = head.split(b" ")
        body = bodies.get(kind.decode(), body)
        content = b" ".join((kind, below, str(len(body)).encode())) + b"\0" + body
        root = names[old] = hashlib.sha256(content).hexdigest()
        made[root] = content
    return root, made


def tree_of(root, whole):
    below = whole[root].partition(b"\0")[0].split(b" ")[1].decode()
    return ObjectTree(object_id=root, children=[tree_of(one, whole) for one in below.split(",") if one])


def push_lie(client, message, context, lie):
    header = message_to_proto(remove_content_from_message(message))
    honest = with_bodies(message, {})[1]
    root, objects = LIES[lie](message)
    header.metadata.message_id = root
    tree = tree_of(root, {**honest, **objects})
    pushed = client.PushMessages(PushAppMessagesRequest(messages_list=[header], message_object_trees=[tree]))
    sent = {"node": Node(node_id=context.node_id), "run_id": context.run_id, "session_id": pushed.session_id}
    for one, content in objects.items():
        client.PushObject(PushObjectRequest(object_id=one, object_content=content, **sent))
    note("lied", [now["answering"], lie])


def lying_push(client, message, context):
    lie = PLAN.get("lies", {}).get(str(now["answering"]))
    if lie is None or message.has_error() or protocol.METRICS not in message.content:
        noted_push(client, message, context)
    else:
        push_lie(client, message, context, lie)


executor.push_message = lying_push
around(executor, "push_task_output", None, "answered")


# Planted bugs.
if PLAN.get("bug") == "commits after sending":
    exclusive, kept = SQLiteLedger.exclusive, []

    @contextmanager
    def lazy(self):
        with exclusive(self) as page:

            def commit(session, stream, account):
                kept.append((self, (session, stream, account)))
                page.account = lambda: account  # what this transaction has committed it reads again

            page.commit = commit
            yield page

    def push_and_commit(client, message, context):
        noted_push(client, message, context)
        while kept:
            ledger, record = kept.pop(0)
            with exclusive(ledger) as page:
                page.commit(*record)

    SQLiteLedger.exclusive = lazy
    executor.push_message = push_and_commit

cli.main()
