"""Keyed noise against torch's and NumPy's normals, and every mechanism's stream, in one run, medians over repeats.

Run with ``python -m benchmarks.noise``; one thread. Short rows are drawn fifty at a time by everybody, as the clients
of a round need them: seconds are those of one row. A stream's row is what one release needs: its normals from key and
nonce, and the mechanism's increment, with the state kept; "regenerated" draws the state anew as well, as a client
does that keeps a nonce and no array.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from murmurfl.privacy import MECHANISMS, make_mechanism, row_key, standard_normals
from murmurfl.privacy.noise import NoiseQuality, each_normal_row
from numpy.typing import NDArray

ROWS_AT_ONCE = {7_850: 50, 100_000: 1, 1_000_000: 1}
"""Values of a row, and how many rows a round needs of that size."""
TORCH = "torch.randn float32"
STREAM_SIZE = 1_000_000
RELEASES = 16
REFERENCE = "NumPy PCG64 float32"
VERSION_1 = "exact, version 1"


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that a slow moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def version_1(key: bytes, size: int) -> NDArray[np.float64]:
    """Return normals as murmurfl 0.1 made them, with 53 bits in the radius: what today's cost is measured against.

    An observer of both halves of a pair could refute a data set under them (tests/privacy/test_noise.py).
    """
    pairs = (size + 1) // 2
    normals, block = np.empty(2 * pairs), 1 << 14
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    for start in range(0, pairs, block):
        count = min(block, pairs - start)
        keystream = np.empty(16 * count + 16, np.uint8)
        encryptor.update_into(memoryview(bytes(16 * count)), keystream.data)
        words = keystream[:-16].view("<u8")
        halves = normals[2 * start : 2 * start + count], normals[2 * start + count : 2 * (start + count)]
        version_1_pairs(words[:count], words[count:], *halves)
    return normals[:size]


def version_1_pairs(
    radius_words: NDArray[np.uint64],
    angle_words: NDArray[np.uint64],
    cosines: NDArray[np.float64],
    sines: NDArray[np.float64],
) -> None:
    """Write the pairs of :func:`version_1`, from two words each."""
    radius = (radius_words >> np.uint64(11)).astype(np.float64)
    radius += 0.5
    radius *= 2.0**-53
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = (angle_words >> np.uint64(11)).astype(np.float64)
    angle *= 2 * np.pi * 2.0**-53
    np.cos(angle, out=cosines)
    np.sin(angle, out=sines)
    cosines *= radius
    sines *= radius


def _normals(release: int, draws: int = 1) -> Any:
    return standard_normals(row_key(bytes(32), release.to_bytes(16, "little")), draws * STREAM_SIZE, "fast")


def _stream(name: str, regenerated: bool) -> Callable[[], object]:
    mechanism = make_mechanism(name, RELEASES)
    state = mechanism.initial_state(STREAM_SIZE)
    for release in range(1, RELEASES):
        state = mechanism.increment(state, release, _normals(release, mechanism.draws(release))).state or ()

    def last_release() -> object:
        before = state
        if regenerated:
            before = mechanism.state_after(RELEASES - 1, lambda releases: _normals(releases[0])[None])
        return mechanism.increment(before, RELEASES, _normals(RELEASES, mechanism.draws(RELEASES)))

    return last_release


def _keyed(size: int, rows: int, quality: NoiseQuality) -> None:
    for _ in each_normal_row([row_key(bytes(32), bytes([row] * 16)) for row in range(rows)], size, quality):
        pass


def _version_1(size: int, rows: int) -> None:
    for row in range(rows):
        version_1(row_key(bytes(32), bytes([row] * 16)), size)


def _row_of(size: int, together: int, repeats: int) -> dict[str, Any]:
    """One row of the table: everybody's seconds for one row of normals."""
    import torch

    shape = (together, size)
    generator = torch.Generator().manual_seed(1)
    pcg, philox = np.random.Generator(np.random.PCG64(1)), np.random.Generator(np.random.Philox(1))
    calls: dict[str, Callable[[], object]] = {
        "fast": lambda: _keyed(size, together, "fast"),
        TORCH: lambda: torch.randn(shape, generator=generator),
        "exact": lambda: _keyed(size, together, "exact"),
        VERSION_1: lambda: _version_1(size, together),
        REFERENCE: lambda: pcg.standard_normal(shape, dtype=np.float32),
        "NumPy PCG64 float64": lambda: pcg.standard_normal(shape),
        "NumPy Philox float64": lambda: philox.standard_normal(shape),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = medians(calls, repeats)
    finally:
        torch.set_num_threads(threads)
    return {"size": size, "together": together, "seconds": {name: one / together for name, one in seconds.items()}}


def measure(repeats: int = 30) -> dict[str, Any]:
    """Rows of normals of several sizes, and a row of every mechanism's stream."""
    rows = [_row_of(size, together, repeats) for size, together in ROWS_AT_ONCE.items()]
    generator = np.random.Generator(np.random.PCG64(1))
    streams: dict[str, Callable[[], object]] = {
        REFERENCE: lambda: generator.standard_normal(STREAM_SIZE, dtype=np.float32)
    }
    for name, kind in MECHANISMS.items():
        streams[name] = _stream(name, regenerated=False)
        if kind.memory == "last":
            streams[f"{name}, regenerated"] = _stream(name, regenerated=True)
    return {"rows": rows, "stream size": STREAM_SIZE, "streams": medians(streams, repeats)}


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    names = list(document["rows"][0]["seconds"])
    lines = [
        "| values | " + " | ".join(names) + " | fast / torch | fast / float64 | exact / version 1 |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in document["rows"]:
        seconds = row["seconds"]
        times = " | ".join(f"{1e6 * value:,.0f} µs" for value in seconds.values())
        fast = seconds["fast"]
        # Documents of before have no torch in them.
        to_torch = f"{fast / seconds[TORCH]:.2f}" if TORCH in seconds else ""
        ratios = fast / seconds["NumPy PCG64 float64"], seconds["exact"] / seconds[VERSION_1]
        together = f", {row['together']} rows at once" if row.get("together", 1) > 1 else ""
        lines.append(f"| {row['size']:,}{together} | {times} | {to_torch} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    reference = document["streams"][REFERENCE]
    lines += ["", f"| stream, {document['stream size']:,} values a row | ms | times NumPy's float32 |", "|---|---|---|"]
    lines += [
        f"| {name} | {1e3 * seconds:.1f} | {seconds / reference:.2f} |" for name, seconds in document["streams"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    document = measure()
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
