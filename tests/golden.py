"""Record what trainings exchange and compare two recordings: a redesign must not change any bit by accident.

``python tests/golden.py record FILE`` runs a table of trainings (rule x aggregator x engine, with replies that are
lost, late or wrong, rounds that are closed, skipped and mended, servers that are killed and resumed). It writes every
message, every entry of a ledger, every round and the model. ``python tests/golden.py compare OLD NEW`` prints where two
recordings differ and exits with 1 if they do. ``make golden SINCE=COMMIT`` records a commit and the working tree and
compares them. Arrays are compared bit for bit, by digests; ledgers and entries are compared by value. Names that
changed on purpose stand in ``golden.toml``, which a person reviews.

Bits depend on the processor's libraries, so both recordings are made on one computer and the repository keeps none.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RENAMED = ROOT / "tests" / "golden.toml"
_SHOWN = 12
"""Differences that ``compare`` prints for a case."""
_LONGEST_BYTES = 64
"""Longer byte strings are recorded by their digest."""
_UNTIMED = {"date", "seconds", "seconds_left", "started", "version", "versions", "engine_seconds"}
"""Entries of a result that a clock or an installation decides."""
_RANDOM = {
    "nonce",
    "signature",
    "seals",
    "header",
    "roster",
    "opening",
    "set-digest",
    "opened-total",
    "opened-signature",
}
"""Entries whose bytes no seed decides: seals and what is signed with them."""
_RANDOM_LISTS = {"digests"}
"""Lists of such bytes, whose lengths are compared: the digests of sets in a helper's record cover seals."""


@dataclass(frozen=True)
class Fault:
    """What happens to replies, to helpers and to the server in a training.

    Parameters
    ----------
    lost, late, wrong : mapping of int to tuple of str
        Clients whose reply of a round never comes, comes one round later, or has other counts.
    closed : frozenset of int
        Rounds in which no helper answers.
    killed : tuple of int
        Rounds in which the server is killed after it has asked, once each, and started again from its checkpoint.
    """

    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    late: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    wrong: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    killed: tuple[int, ...] = ()


BASE: dict[str, Any] = {
    "num-clients": 6,
    "clients-per-round": 6,
    "num-rounds": 6,
    "training-samples": 300,
    "validation-samples": 60,
    "mu": 2.0,
    "give-up-after": 0,
    "checkpoint": False,
    "seed": 5,
}
BATCHES: dict[str, Any] = {"batch-size": 3}
SUMS: dict[str, Any] = {"trust": "secure-aggregation", "trust.min-cohort": 4, "trust.colluders": 1}
SMALL: dict[str, Any] = {"task": "synthetic-logistic", "model": "logistic", "partition": "own"}
SMALL |= {"task.samples": 360, "task.features": 12, "training-samples": 0, "validation-samples": 0}
SHUFFLED: dict[str, Any] = {
    **SMALL,
    "strategy": "shuffled",
    "partition": "iid",
    "num-clients": 1,
    "clients-per-round": 1,
}
SHUFFLED |= {"num-rounds": 4, "task.samples": 60, "task.features": 5, "strategy.public-samples": 30, "batch-size": 8}
SHUFFLED |= {"strategy.regularizer": "l1", "strategy.regularizer-strength": 0.02, "learning-rate": 0.005}

RULES: dict[str, dict[str, Any]] = {
    "mu2": BATCHES,
    "mu2 anytime": {**BATCHES, "strategy.steps": "anytime"},
    "mu2 cancelling": {**BATCHES, "mechanism": "cancelling"},
    "mu2 blt passes": {"mechanism": "blt", "passes": 2, "num-rounds": 0, "batch-size": 25},
    "mu2 banded": {**BATCHES, "mechanism": "banded", "mechanism.bands": 3},
    "mu2 paper": {"preset": "paper", "strategy.release-rule": "paper", "mechanism": "independent", "batch-size": 1},
    "noisy-sgd": {**BATCHES, "strategy": "noisy-sgd"},
    "noisy-sgd passes": {"strategy": "noisy-sgd", "passes": 2, "num-rounds": 0, "batch-size": 25},
    "full-batch": {"strategy": "full-batch", "num-rounds": 4},
    "full-batch quantile": {"strategy": "full-batch", "num-rounds": 4, "clipping.quantile": 0.6},
    "full-batch evaluated": {"strategy": "full-batch", "num-rounds": 3, "evaluation.share": 0.05},
    "full-batch centred": {"strategy": "full-batch", "num-rounds": 3, "centring": "private"},
    "one-shot": {"strategy": "one-shot", "num-rounds": 1},
    "online": {**BATCHES, "strategy": "online"},
    "owners": {"strategy": "full-batch", "num-rounds": 3, "samples-per-owner": 5},
}
TRUSTED: dict[str, dict[str, Any]] = {
    "trusted mu2": {**BATCHES, "strategy": "mu2", "trust": "trusted-server"},
    "trusted full-batch": {"strategy": "full-batch", "trust": "trusted-server", "num-rounds": 4},
    "trusted sgd": {**BATCHES, "strategy": "trusted-sgd"},
    "tree momentum": {**BATCHES, "strategy": "tree-momentum", **SMALL},
    "reduced tree momentum": {**BATCHES, "strategy": "reduced-tree-momentum", **SMALL},
    "correlated momentum": {**BATCHES, "strategy": "correlated-momentum"},
    "delayed momentum": {**BATCHES, "strategy": "delayed-momentum"},
    "isrl-dp": {**BATCHES, "strategy": "isrl-dp"},
    "shuffled": SHUFFLED,
}
"""Trainings that have one kind of trust only."""

FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "lost": ({}, Fault(lost={2: ("1", "4"), 3: ("1",), 5: ("0", "2", "3")})),
    "late": ({"quorum": 0.5}, Fault(late={2: ("1",), 3: ("5",), 4: ("1", "2")})),
    "killed": ({"checkpoint": True}, Fault(lost={2: ("3",)}, killed=(2, 4))),
    "closed": ({**SUMS, "trust.min-cohort": 6}, Fault(lost={2: ("1",), 4: ("0", "5")})),
    "helpers away": (SUMS, Fault(closed=frozenset({2, 3}), lost={4: ("2",)})),
    "skipped": (SUMS, Fault(wrong={2: ("1",)}, lost={3: ("2",)})),
    "killed sums": ({**SUMS, "checkpoint": True}, Fault(killed=(1, 3), closed=frozenset({2}), wrong={4: ("0",)})),
}


def cases() -> Iterator[tuple[str, dict[str, Any], str, Fault]]:
    """Yield each case: its name, its run configuration, its engine and its faults."""
    for name, settings in RULES.items():
        for trust, sums in (("untrusted", {}), ("sums", SUMS)):
            for engine in ("messages", "cohort"):
                yield f"{name}, {trust}, {engine}", {**BASE, **settings, **sums}, engine, Fault()
    for name, settings in TRUSTED.items():
        for engine in ("messages", "cohort"):
            yield f"{name}, {engine}", {**BASE, **settings}, engine, Fault()
    for engine in ("messages", "cohort"):
        yield f"mu2, lost replies, {engine}", {**BASE, **BATCHES, "lost-replies": 0.3}, engine, Fault()
        yield f"mu2, lost replies, sums, {engine}", {**BASE, **BATCHES, **SUMS, "lost-replies": 0.2}, engine, Fault()
    for name, (settings, fault) in FAULTS.items():
        for rule in ("mu2", "mu2 cancelling", "noisy-sgd", "full-batch", "online"):
            yield f"{rule}, {name}", {**BASE, **RULES[rule], **settings}, "messages", fault
    for rule in ("trusted mu2", "trusted full-batch", "tree momentum"):
        yield f"{rule}, killed", {**BASE, **TRUSTED[rule], "checkpoint": True}, "messages", Fault(killed=(2,))


class ServerKilledError(BaseException):
    """The server of a recorded training is killed."""


class Recording:
    """Messages, ledgers, rounds and the model of one training, as plain values."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def note(self, kind: str, value: Any) -> None:
        """Append an entry."""
        self.lines.append({kind: plain(value)})


def digest(content: bytes) -> str:
    """Return a short digest of bytes."""
    return hashlib.sha256(content).hexdigest()[:24]


def plain(value: Any) -> Any:
    """Return a value as JSON would have it: arrays and long byte strings as digests, numbers with all their bits."""
    if isinstance(value, Mapping):
        entries = sorted(value.items(), key=lambda pair: str(pair[0]))
        return {str(key): "..." if str(key).rpartition("/")[2] in _RANDOM else plain(one) for key, one in entries}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return value.hex() if len(value) <= _LONGEST_BYTES else f"{len(value)} bytes {digest(value)}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{list(value.shape)} {digest(value.tobytes())}"
    return str(value)


def records_of(content: Any, masked: bool = False) -> dict[str, Any]:
    """Return the records of a message by their key, without what no seed decides, such as the bits under masks."""
    found: dict[str, Any] = {}
    for key, record in content.items():
        if hasattr(record, "to_numpy_ndarrays"):
            hidden = masked or "header" in _of(content, "config")
            found[key] = {
                name: f"{array.dtype}{list(array.shape)} {'masked' if hidden else digest(array.data)}"
                for name, array in record.items()
            }
        else:
            found[key] = dict(record)
    return found


def _of(content: Any, key: str) -> Any:
    record = content.get(key, None)
    return {} if record is None else record


def recorded(settings: Mapping[str, Any], engine: str, fault: Fault) -> list[Any]:
    """Run a training and return what it exchanged."""
    recording = Recording()
    try:
        if engine == "cohort":
            _without_messages(settings, recording)
        else:
            _with_messages(settings, fault, recording)
    except Exception as error:  # a refusal is a result as well
        recording.note("error", f"{type(error).__name__}: {error}")
    return recording.lines


def _configuration(settings: Mapping[str, Any]) -> Any:
    """Return the run configuration of settings in today's names."""
    from murmurfl.app.settings.run_config import RunConfig, run_keys

    old = {new: name for name, new in _renamed("names").items()}
    known = set(run_keys())
    return RunConfig.from_mapping({name if name in known else old.get(name, name): v for name, v in settings.items()})


def _without_messages(settings: Mapping[str, Any], recording: Recording) -> None:
    from murmurfl.app.engines import run_cohort

    _finish(run_cohort(_configuration(settings)), recording)


def _with_messages(settings: Mapping[str, Any], fault: Fault, recording: Recording) -> None:
    from murmurfl.app import client_app
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.runs.training_run import run_experiment

    config = _configuration(settings)
    experiment = prepare(config)
    grid = _grid(client_app.app, experiment, fault, recording)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint" if config.checkpoint else None
        for _ in range(len(fault.killed) + 1):
            with suppress(ServerKilledError):
                if fault.late:
                    _patient(grid, experiment, recording)
                else:
                    _finish(run_experiment(grid, config, checkpoint=checkpoint), recording)
                break
            recording.note("killed", True)
    for node_id, context in grid.contexts.items():
        recording.note(f"state of node {node_id}", {key: dict(one) for key, one in context.state.items()})


def _patient(grid: Any, experiment: Any, recording: Recording) -> None:
    """Run a strategy whose rounds end before all have answered, as on real nodes."""
    strategy = experiment.strategy()
    result = strategy.start(grid, experiment.initial_arrays(), num_rounds=experiment.num_rounds, timeout=20.0)
    recording.note("history", [vars(report) for report in strategy.history])
    recording.note("model", result.arrays.to_numpy_ndarrays())


def _grid(app: Any, experiment: Any, fault: Fault, recording: Recording) -> Any:
    """Return nodes in this process that record every message and do what ``fault`` says."""
    from flwr.app import Array, ArrayRecord, Context, RecordDict

    from tests.harness.grid import NodesGrid

    config = experiment.config
    helpers = config.summing.helpers if config.secure else 0
    nodes = config.num_clients + helpers

    class Nodes(NodesGrid):
        pull_interval = 0.0

        def __init__(self) -> None:
            super().__init__(app, nodes)
            for node_id in list(self.contexts):
                told = {"partition-id": node_id - self.first_node, "num-partitions": nodes}
                self.contexts[node_id] = Context(
                    run_id=1, node_id=node_id, node_config=told, state=RecordDict(), run_config=config.to_mapping()
                )
            self.round, self.killed, self.held = 0, set(), {}

        def push_messages(self, messages: Iterable[Any]) -> list[str]:
            messages = list(messages)
            rounds = [_of(one.content, "config").get("server-round", 0) for one in messages]
            self.round = max([0, *(one for one in rounds if isinstance(one, int))]) or self.round
            if self.held and any(rounds):  # late replies arrive with the next round
                self._replies |= self.held
                self.held = {}
            return super().push_messages(messages)

        def handle(self, message: Any, identifier: str) -> Any:
            asked, kind = _of(message.content, "config"), message.metadata.message_type
            training = kind == "train" and "ask" not in asked
            recording.note(f"to {message.metadata.dst_node_id}, {kind}", records_of(message.content))
            if asked.get("helper") is not None and self.round in fault.closed:
                recording.note("no answer", True)
                return None
            reply = super().handle(message, identifier)
            name, turn = (
                str(asked.get("client", asked.get("machine"))),
                asked.get("server-round"),
            )  # machine: before 0.2
            if training and name in fault.wrong.get(turn, ()) and not reply.has_error():
                reply.content["arrays"] = self._wrong(reply.content["arrays"])
            if reply.has_error():
                recording.note("refused", {"code": reply.error.code, "reason": reply.error.reason})
            else:
                recording.note("reply", records_of(reply.content, masked="helper" in asked))
            if training and name in fault.lost.get(turn, ()):
                return None
            if training and name in fault.late.get(turn, ()):
                self.held[identifier] = reply
                return None
            return reply

        def _wrong(self, arrays: Any) -> Any:
            changed = {key: array.numpy().copy() for key, array in arrays.items()}
            for values in changed.values():
                values.reshape(-1)[:1] += values.dtype.type(1 << 60 if values.dtype.kind == "u" else 1)
            return ArrayRecord({key: Array(values) for key, values in changed.items()})

        def tamper(self, replies: list[Any]) -> list[Any]:
            if self.round in fault.killed and self.round not in self.killed:
                self.killed.add(self.round)
                raise ServerKilledError
            return replies

    return Nodes()


def _finish(result: Any, recording: Recording) -> None:
    """Note rounds, result and model of a training that has ended."""
    recording.note("history", [vars(report) for report in result.strategy.history])
    document = json.loads(json.dumps(result.outcome.document(), default=str))
    recording.note("result", _without_times(document))
    recording.note("model", list(result.parameters))


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(one) for name, one in value.items() if name not in _UNTIMED}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def _seeded_randomness() -> None:
    """Let the system's random bytes come from a counter, so that two recordings draw the same."""
    import secrets

    numbers = count()

    def drawn(size: int = 32) -> bytes:
        blocks = -(-size // 32)
        return b"".join(hashlib.sha256(b"golden %d" % next(numbers)).digest() for _ in range(blocks))[:size]

    os.urandom = drawn
    secrets.token_bytes = lambda size=32: drawn(size or 32)
    secrets.token_hex = lambda size=32: drawn(size or 32).hex()
    secrets.randbits = lambda bits: int.from_bytes(drawn(-(-bits // 8)), "big") >> (-bits % 8)


def record(path: Path, only: str = "") -> None:
    """Write a recording of all cases whose name contains ``only``."""
    logging.disable(logging.CRITICAL)
    found: dict[str, list[Any]] = {}
    for name, settings, engine, fault in cases():
        if only in name:
            _seeded_randomness()
            found[name] = recorded(settings, engine, fault)
            print(f"{name}: {len(found[name])} entries, {_ending(found[name])}", flush=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(found, file)


def _ending(lines: list[Any]) -> str:
    """Return the error that a case ended with, or the digest of what was recorded."""
    errors = [line["error"] for line in lines if "error" in line]
    return errors[0][:100] if errors else digest(json.dumps(lines).encode())


@cache
def _renamed(table: str) -> dict[str, Any]:
    """Return names, or words within names and texts, that changed on purpose: the new by the old one.

    ``added`` has what a recording without these names means by it, and ``computed`` figures that are new.
    """
    return tomllib.loads(RENAMED.read_text(encoding="utf-8"))[table] if RENAMED.exists() else {}


_ALTERED: Mapping[str, Callable[[Any], Any]] = {
    "diameter": lambda value: float.hex(float.fromhex(value) / 2) if isinstance(value, str) else value,
    "secret-order": lambda value: "shuffled" if value is True else "" if value is False else value,
}
"""The value under a new name of a key whose values changed with it, from that under the old one."""


def _in_new_names(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        made = {name: _ALTERED.get(name, lambda same: same)(one) for name, one in value.items()}
        return {_in_new_words(names.get(name, name)): _in_new_names(one, names) for name, one in made.items()}
    if isinstance(value, list):
        return [_in_new_names(one, names) for one in value]
    return _in_new_words(names.get(value, value)) if isinstance(value, str) else value


def _in_new_words(text: str) -> str:
    for old, new in _renamed("words").items():
        text = text.replace(old, new)
    return text


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield where two recordings differ, one line a value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            one, other = (side.get(name, "(absent)") for side in (old, new))
            if name in _RANDOM_LISTS and isinstance(one, list) and isinstance(other, list):
                one, other = len(one), len(other)
            if one == "(absent)" and name in _renamed("added"):
                one = _renamed("added")[name]
            if one == "(absent)" and name in _renamed("computed"):
                continue
            yield from differences(one, other, f"{where}/{name}")
    elif isinstance(old, list) and isinstance(new, list):
        for number, (one, other) in enumerate(zip_longest(old, new, fillvalue="(absent)")):
            yield from differences(one, other, f"{where}[{number}]")
    elif old != new:
        yield f"{where}: {str(old)[:160]} -> {str(new)[:160]}"


def compare(old: Path, new: Path, say: Callable[[str], None] = print) -> int:
    """Print where two recordings differ; return the number of cases that do."""
    before, after = (json.loads(gzip.decompress(path.read_bytes())) for path in (old, new))
    names, different = _renamed("names"), 0
    for case in sorted(before.keys() | after.keys()):
        if case not in before or case not in after:
            say(f"{case}: only in {'new' if case in after else 'old'}")
            different += 1
            continue
        found = list(differences(_in_new_names(before[case], names), _in_new_names(after[case], names)))
        different += bool(found)
        for line in found[:_SHOWN]:
            say(f"{case}: {line}")
        if len(found) > _SHOWN:
            say(f"{case}: {len(found) - _SHOWN} more")
    say(f"{len(before.keys() | after.keys())} cases, {different} differ")
    return different


def since(commit: str, only: str) -> int:
    """Record this checkout and another commit of it in turn, and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        tree, old, new = Path(folder) / "tree", Path(folder) / "old.gz", Path(folder) / "new.gz"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            for name in ("tests/golden.py", "tests/golden.toml", "tests/harness/grid.py"):
                if (ROOT / name).exists():
                    shutil.copy(ROOT / name, tree / name)
            for root, path in ((tree, old), (ROOT, new)):
                command = [sys.executable, "tests/golden.py", "record", str(path), "--only", only]
                subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        return compare(old, new)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare", "since"))
    parser.add_argument("what", nargs="+", help="the file to write, the two files to compare, or the commit")
    parser.add_argument("--only", default="", help="record cases whose name contains this")
    options = parser.parse_args()
    if options.action == "record":
        record(Path(options.what[0]), options.only)
        return 0
    if options.action == "compare":
        return 1 if compare(Path(options.what[0]), Path(options.what[1])) else 0
    return 1 if since(options.what[0], options.only) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
