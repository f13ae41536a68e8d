"""What secure aggregation costs: a round with masks beside one without, in one run. ``python -m benchmarks.masks``.

A round is computed in this process, one client after the other, with what real nodes call at both ends: the release
with exact noise and a ledger in memory, the reply, the server's sum, and with masks the helpers' answers and what the
server does with them. Not timed are gradients, disks and the network. Bytes are those of the messages' contents as
Flower writes them. A helper of the largest round is measured once more by itself: in a process of its own on one core,
with its record on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.clients.messages import outgoing_reply
from murmurfl.clients.sums_helper import TOTAL, answer_helper
from murmurfl.privacy import (
    MemoryLedger,
    Opener,
    Opening,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SumAssumption,
    protocol,
    row_key,
    standard_normals,
)
from murmurfl.privacy.sums.masking import Masking, Sealed, add_mask, checked_header
from murmurfl.privacy.sums.opening_rule import MemoryOpeningRecord, OpeningRecord, is_opening, set_digest
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from numpy.typing import NDArray

from .noise import medians

SIZES = (7_850, 1_000_000)
COHORTS = (50, 1_000)
HELPERS = ("helper-0", "helper-1")
REPEATS = 3
# A round of so many values takes minutes: once is enough.
ONCE = 10**8
SEED = 1
SESSION = "0123456789abcdef" * 2  # as long as those of strategies
OPENING = "1"


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add what passes meanwhile to ``name``."""
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start


def measure(repeats: int = REPEATS) -> dict[str, Any]:
    """Masks beside noise, whole rounds, and a helper by itself."""
    rounds, sealed = [], list[Sealed]()
    for size in SIZES:
        for clients in COHORTS:
            made = [whole_round(clients, size) for _ in range(1 if clients * size > ONCE else repeats)]
            rounds.append({name: statistics.median(one[0][name] for one in made) for name in made[0][0]})
            sealed = made[-1][1]
    return {
        "helpers": len(HELPERS),
        "masks": [mask_and_noise(size) for size in SIZES],
        "rounds": rounds,
        "helper": helper_apart(max(COHORTS), sealed),
    }


def mask_and_noise(size: int, repeats: int = 30) -> dict[str, float]:
    """Seconds of one mask, and of the exact normals of one release."""
    counts = np.zeros(size, np.uint64)
    calls: dict[str, Callable[[], object]] = {
        "mask": lambda: add_mask(counts, bytes(32)),
        "noise": lambda: standard_normals(row_key(bytes(32), bytes(16)), size, "exact"),
    }
    return {"size": size, **medians(calls, 500 if size < 50_000 else repeats)}


def whole_round(clients: int, size: int) -> tuple[dict[str, float], list[Sealed]]:
    """Seconds and bytes of one round with and without masks, from the same releases; and what helpers were shown.

    Raises
    ------
    RuntimeError
        If the two sums differ.
    """
    names, clock, lengths = tuple(map(str, range(clients))), Clock(), dict[str, float]()
    roster = Roster.simulated(SEED, names, HELPERS)
    policy = _policy(clients)
    plain, masked, sealed = np.zeros(size), np.zeros(size, np.uint64), list[Sealed]()
    for name in names:
        privatizer = Privatizer(policy, size, policy.max_participations, MemoryLedger(), SimulatedKeys(SEED, name))
        masking, row = Masking(name, ClientKey.simulated(SEED, name), roster), np.zeros((1, size))
        # The client is made anew for each release and then dropped: so many fit into no memory.
        with clock("releases"):
            release = privatizer.release(SESSION, 0, lambda samples, row=row: row)  # noqa: ARG005
        with clock("values"):
            (values,), _ = outgoing_reply(release, [(size,)], masking=None, session=SESSION, policy=_policy(0))
        with clock("plain sum"):
            np.add(plain, values, out=plain)
        with clock("masks"):
            (counts,), entries = outgoing_reply(release, [(size,)], masking=masking, session=SESSION, policy=policy)
        sealed.append(Sealed(entries[protocol.HEADER], tuple(entries[protocol.SEALS]), entries[protocol.SIGNATURE]))
        with clock("masked sum"):
            checked_header(sealed[-1], roster)
            np.add(masked, counts, out=masked)
        if not lengths:  # all replies are as long, to a digit of a name
            lengths |= {"plain reply": _length(values, {}), "masked reply": _length(counts, entries)}
    total = _opened(masked, sealed, roster, clock, lengths)
    if not np.array_equal(total * policy.plan(size).grid.spacing, plain):
        raise RuntimeError("Expected the same sum with and without masks, got another.")
    return {"clients": clients, "size": size, **clock.parts, **lengths}, sealed


def _policy(cohort: int) -> PrivacyPolicy:
    """Of clients whose sums have so many releases; 0 for clients without masks."""
    sums: dict[str, Any] = {"trust": "secure-aggregation", "sums": SumAssumption(cohort // 2, cohort)}
    return PrivacyPolicy(1.0, 1, 100, 1.0, **(sums if cohort else {}))


def _opened(
    masked: NDArray[np.uint64], sealed: Sequence[Sealed], roster: Roster, clock: Clock, lengths: dict[str, float]
) -> NDArray[np.int64]:
    """Return the sum without its masks, by the helpers' answers."""
    total = masked.copy()
    with clock("unmasking"):
        digest = set_digest(SESSION, OPENING, sealed)
    for entry in roster.helpers:
        opener = Opener(entry.name, HelperKey.simulated(SEED, entry.name), roster, MemoryOpeningRecord())
        request = opening_request(entry.name, sealed)
        with clock("helpers"):
            reply = answer_helper(opener, request)
        with clock("unmasking"):
            answer = _answer(reply)
            if not is_opening(entry, SESSION, answer) or answer.set_digest != digest:
                raise RuntimeError("Expected a helper's answer to the set, got another.")
            np.subtract(total, answer.total, out=total)
        lengths |= {"to a helper": _bytes(request.content), "from a helper": _bytes(reply.content)}
    return total.view(np.int64)


def opening_request(helper: str, sealed: Sequence[Sealed]) -> Message:
    """Return what a server sends a helper to have a set opened."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower makes no message without
    entries: dict[str, Any] = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.SESSION: SESSION,
        protocol.OPENING: OPENING,
        protocol.HELPER: helper,
        protocol.HEADER: [one.header for one in sealed],
        protocol.SEALS: [seal for one in sealed for seal in one.seals],
        protocol.SIGNATURE: [one.signature for one in sealed],
    }
    content = RecordDict({protocol.CONFIG: ConfigRecord(entries)})
    return Message(content, dst_node_id=1, message_type=protocol.QUERY_OPEN)


def _answer(reply: Message) -> Opening:
    if reply.has_error():
        raise RuntimeError(reply.error.reason)
    config = reply.content.config_records[protocol.CONFIG]
    total = reply.content.array_records[protocol.ARRAYS][TOTAL].numpy()
    said: Any = [config[name] for name in (protocol.HELPER, protocol.OPENING, protocol.SET_DIGEST)]
    return Opening(*said, total=total, signature=config[protocol.SIGNATURE])  # type: ignore[arg-type]


def _length(array: NDArray[Any], entries: dict[str, Any]) -> float:
    config = ConfigRecord({protocol.CLIENT: "0", **entries})
    return _bytes(RecordDict({protocol.ARRAYS: ArrayRecord([array]), protocol.CONFIG: config}))


def _bytes(content: RecordDict) -> float:
    return float(recorddict_to_proto(content).ByteSize())


def helper_apart(clients: int, sealed: Sequence[Sealed]) -> dict[str, float]:
    """Return a helper's answer to a set in a process of its own: seconds, and the most memory it ever had."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "set"
        path.write_bytes(pickle.dumps((clients, list(sealed))))
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.masks", "--helper", str(path)], check=True, capture_output=True,
            text=True, timeout=600, cwd=Path(__file__).resolve().parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).stdout  # fmt: skip
    return json.loads(output.splitlines()[-1])


def helper_here(path: Path) -> dict[str, float]:
    """:func:`helper_apart` in this process: its record on disk, everything on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clients, sealed = pickle.loads(path.read_bytes())
    roster = Roster.simulated(SEED, tuple(map(str, range(clients))), HELPERS)
    name = HELPERS[0]
    before = _peak_mib()
    opener = Opener(name, HelperKey.simulated(SEED, name), roster, _record_on_disk(path.parent, roster))
    request = opening_request(name, sealed)
    start = time.perf_counter()
    answer = _answer(answer_helper(opener, request))
    seconds = time.perf_counter() - start
    return {
        "clients": clients,
        "size": len(answer.total),
        "seconds": seconds,
        "peak_mib": _peak_mib(),
        "import_mib": before,
    }


def _record_on_disk(folder: Path, roster: Roster) -> OpeningRecord:
    from murmurfl.privacy.sums.opening_file import SQLiteOpeningRecord

    return SQLiteOpeningRecord.create(folder / "record.sqlite", helper=roster.helpers[0])


def _peak_mib() -> float:
    # Not ru_maxrss: a process starts with that of the one it was forked from.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def plain_seconds(row: dict[str, float]) -> float:
    """Of a round without masks."""
    return row["releases"] + row["values"] + row["plain sum"]


def masked_seconds(row: dict[str, float]) -> float:
    """Of a round with masks and its opening."""
    return row["releases"] + row["masks"] + row["masked sum"] + row["helpers"] + row["unmasking"]


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    helpers = document["helpers"]
    lines = [
        "| d | m | a round, s | with masks, s | ratio | clients' masks, s | server, s | each helper, s | replies | "
        "with masks | to and from helpers |",
        "|---" * 11 + "|",
    ]
    for row in document["rounds"]:
        plain, masked, m = plain_seconds(row), masked_seconds(row), row["clients"]
        parts = row["masks"], row["masked sum"] + row["unmasking"], row["helpers"] / helpers
        seconds = " | ".join(f"{one:.3g}" for one in (plain, masked, masked / plain, *parts))
        opening = helpers * (row["to a helper"] + row["from a helper"])
        sizes = " | ".join(_size(one) for one in (m * row["plain reply"], m * row["masked reply"], opening))
        lines.append(f"| {row['size']:,.0f} | {m:,.0f} | {seconds} | {sizes} |")
    lines += ["", "| d | one mask, ms | exact noise of a release, ms | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {row['size']:,} | {1e3 * row['mask']:.3g} | {1e3 * row['noise']:.3g} | {row['mask'] / row['noise']:.2f} |"
        for row in document["masks"]
    ]
    one = document["helper"]
    return "\n".join(
        [
            *lines,
            "",
            f"A helper by itself, m = {one['clients']:,}, d = {one['size']:,}, on one core and with its record on "
            f"disk: {one['seconds']:.1f} s and at most {one['peak_mib']:,.0f} MiB, {one['import_mib']:,.0f} of them "
            "before it was asked.",
        ]
    )


def _size(number: float) -> str:
    return f"{number / 1e6:,.2f} MB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helper", type=Path, default=None, help="a set for one helper, in this process")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.helper:
        print(json.dumps(helper_here(arguments.helper)))
        return
    document = measure()
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
