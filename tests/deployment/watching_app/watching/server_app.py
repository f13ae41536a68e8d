"""The installed murmurfl's server over real nodes, with everything written down that it asks and hears.

``plan`` may hold ``drop`` (a share of the replies), ``repeat`` (a share of the requests, and of the replies, twice and
once more in the next round), ``seed`` and ``punctual_from`` (a round) for both, ``late`` (whether replies that come
after their round are handed on in the next), and ``kills``: a step and a round to die there, one after the other.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import ServerApp
from murmurfl.app.runs.outcome import CHECKPOINT_NAME
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import derived_seed, protocol
from murmurfl.strategies.rounds import loop as rounds
from murmurfl.strategies.rounds.guarded_grid import GuardedGrid
from murmurfl.strategies.sums.secure_aggregation import Helpers

app = ServerApp()
# Rounds hand on replies that were pulled before those that they waited for: these are numbered from here.
_AWAITED = 1000


class WatchedGrid(GuardedGrid):
    """A guarded grid: its train messages are written down, and some of them lost, repeated or handed on late."""

    def __init__(self, grid, folder, plan, here):
        super().__init__(grid)
        self._folder, self._plan, self._here = folder, plan, here
        self._late = {}
        self._old = []
        self._number = self._pulled = 0
        self._attempts, self._pushed = {}, {}

    def push_messages(self, messages):
        """Requests to clients that rounds do not wait for are pushed, and their answers pulled: they are noted too."""
        messages = list(messages)
        configs = [dict(message.content.config_records.get(protocol.CONFIG, {})) for message in messages]
        if configs and protocol.SERVER_ROUND in configs[0]:
            self._number = configs[0][protocol.SERVER_ROUND]
            attempt = self._attempt(self._number)
            self._write(f"asked-{self._number}-{attempt}", messages[0].content.array_records, configs)
            ids = list(super().push_messages(messages))
            self._pushed |= {one: (self._number, config) for one, config in zip(ids, configs, strict=False) if one}
            return ids
        return super().push_messages(messages)

    def _attempt(self, number):
        """Which attempt at a round this process makes: all of its requests belong together."""
        if number not in self._attempts:
            self._attempts[number] = sum(1 for _ in self._folder.glob(f"asked-{number}-*.npz"))
        return self._attempts[number]

    def pull_messages(self, message_ids):
        replies = []
        for reply in super().pull_messages(message_ids):
            number, config = self._pushed.pop(reply.metadata.reply_to_message_id, (0, None))
            dropped = config is not None and self._coin("drop", number, config)
            replies.append(_unreached(reply) if dropped else reply)
            if config is not None and not replies[-1].has_error() and protocol.METRICS in reply.content:  # a release
                line = {**reply.content[protocol.METRICS], **reply.content[protocol.CONFIG]}
                self._pulled += 1
                name = f"heard-{self._number}-{self._attempt(self._number)}-{self._pulled}"
                self._write(name, reply.content.array_records, [line])
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return super().send_and_receive(messages, timeout=timeout)
        configs = [dict(message.content[protocol.CONFIG]) for message in messages]
        number = configs[0][protocol.SERVER_ROUND]
        self._number, attempt = number, self._attempt(number)
        self._write(f"asked-{number}-{attempt}", messages[0].content.array_records, configs)
        repeated = [m for m, c in zip(messages, configs, strict=True) if self._coin("repeat", number, c)]
        waiting = {}
        for message, config in zip(messages, configs, strict=True):
            copies = [message]
            if message in repeated:  # the same request under another id
                copies.append(_copy(message))
            for copy in copies:
                (message_id,) = super().push_messages([copy])
                if message_id:
                    waiting[message_id] = config
        self._here("asked", number)
        late = list(super().pull_messages(list(self._late))) if self._late and self._plan.get("late") else []
        for reply in late:
            self._late.pop(reply.metadata.reply_to_message_id, None)
        replies, again, end = [], [], time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            for reply in super().pull_messages(list(waiting)):
                config = waiting.pop(reply.metadata.reply_to_message_id)
                if self._coin("drop", number, config):
                    continue
                replies.append(reply)
                if self._coin("twice", number, config):
                    replies.append(reply)
                    again.append(reply)
            time.sleep(0.3)
        self._late |= waiting
        # Of the round before once more, as a network might; then what was late; then what was asked for.
        replies, self._old = [*self._old, *late, *replies], again
        for i, reply in enumerate(replies):
            if not reply.has_error():
                line = {**reply.content[protocol.METRICS], **reply.content[protocol.CONFIG]}
                self._write(f"heard-{number}-{attempt}-{_AWAITED + i}", reply.content.array_records, [line])
        self._here("heard", number)
        return replies

    def _coin(self, kind, number, config):
        share = self._plan.get("repeat" if kind == "twice" else kind, 0.0)
        if number >= self._plan.get("punctual_from", 0):
            return False
        seed = derived_seed(kind, self._plan.get("seed", 0), number, config[protocol.CLIENT])
        return np.random.Generator(np.random.Philox(key=seed)).random() < share

    def _write(self, name, records, lines):
        arrays = {f"{key} {name}": a.numpy() for key, r in records.items() for name, a in r.items()}
        header = json.dumps(lines, default=bytes.hex)  # header, seals and signature of a masked release
        part = self._folder / f"part-{name}.npz"  # whole or not at all: this process may be killed at any moment
        np.savez(part, header=header, **arrays)
        part.replace(self._folder / f"{name}.npz")


def _unreached(reply):
    """What Flower says where a node has died."""
    request = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type=MessageType.TRAIN)
    request.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return Message(Error(ErrorCode.NODE_UNAVAILABLE), reply_to=request)


def _copy(message):
    records = {key: message.content[key] for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)}
    content = RecordDict({**records, protocol.CONFIG: ConfigRecord(dict(message.content[protocol.CONFIG]))})
    return Message(content, dst_node_id=message.metadata.dst_node_id, message_type=MessageType.TRAIN)


def _rig_the_checkpoint(here):
    save, replace = rounds.save_checkpoint, Path.replace

    def saving(path, settings, state):
        held = state.get("held")  # under secure aggregation there is a set to be opened in some checkpoints
        number, saved = (held["server_round"], "held") if held else (state["server_round"], "saved")
        here("saving", number)

        def renamed(self, target):
            here(f"half {saved}", number)
            return replace(self, target)

        Path.replace = renamed
        try:
            save(path, settings, state)
        finally:
            Path.replace = replace
        here(saved, number)

    rounds.save_checkpoint = saving


def _rig_the_opening(here):
    opening = Helpers.open

    def rigged(self, grid, session, cohort, timeout):
        here("opening", cohort.server_round)
        total = opening(self, grid, session, cohort, timeout)
        here("opened", cohort.server_round)
        return total

    Helpers.open = rigged


@app.main()
def main(grid, context):
    """Run murmurfl's strategy over a grid that is watched."""
    folder, plan = Path(context.run_config["folder"]), json.loads(context.run_config["plan"])
    killed = folder / "killed"

    def here(step, number):
        done = killed.read_text().splitlines() if killed.exists() else []
        kills = plan.get("kills", [])
        if len(done) < len(kills) and kills[len(done)] == [step, number]:
            with killed.open("a") as file:
                file.write(f"{step} {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    (folder / "pid").write_text(str(os.getpid()))
    _rig_the_checkpoint(here)
    _rig_the_opening(here)
    config = RunConfig.from_mapping(json.loads(context.run_config["settings"]))
    watched = WatchedGrid(grid, folder, plan, here)
    write_record(run_experiment(watched, config, checkpoint=folder / CHECKPOINT_NAME, deployed=True), folder)
