"""Noise streams beside jax_privacy's for the same mechanisms, in one run, in batches that take turns.

Run with ``python -m benchmarks.streams``. A row is what one release needs: its normals (here of ``fast`` quality) and
the mechanism's increment in float32, with the state carried on. jax_privacy gets an environment of its own in
``build/bench-jax``, made when it is missing, one core (affinity), one thread (XLA's flags) and the same parameters;
see :mod:`benchmarks.peers.jax_streams`. This project's streams use one thread anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
import venv
from pathlib import Path
from typing import IO, Any

from murmurfl.privacy import Mechanism, make_mechanism, row_key, standard_normals
from murmurfl.privacy.mechanisms import BandedNoise, BltNoise

SIZE = 1_000_000
BUFFERS, BANDS = 3, 16
RELEASES = 1000
ROWS_PER_BATCH = 10

_ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = _ROOT / "build" / "bench-jax"
_JAX_PRIVACY = "jax-privacy>=2,<3"
_SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Stream:
    """A stream of this project, its state carried on.

    Parameters
    ----------
    mechanism : Mechanism
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._state = mechanism.initial_state(SIZE)
        self._release = 0

    def seconds(self, rows: int) -> list[float]:
        """Return the time of each of the next rows."""
        times = []
        for _ in range(rows):
            start = time.perf_counter()
            self._release += 1
            normals = standard_normals(row_key(bytes(32), self._release.to_bytes(16, "little")), SIZE, "fast")
            self._state = self._mechanism.increment(self._state, self._release, normals).state
            times.append(time.perf_counter() - start)
        return times


def jax_python() -> Path:
    """Return the interpreter of jax_privacy's environment, which is made when it is missing."""
    python = _ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
    works = [str(python), "-c", "import jax_privacy.matrix_factorization"]
    if not python.exists() or subprocess.run(works, check=False, capture_output=True).returncode:
        venv.create(_ENVIRONMENT, clear=True, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", _JAX_PRIVACY], check=True)
    return python


def measure(batches: int = 10) -> dict[str, Any]:
    """Median seconds of a row, here and in jax_privacy, of every stream."""
    blt, banded = BltNoise(RELEASES, buffers=BUFFERS), BandedNoise(RELEASES, bands=BANDS)
    ours = {mechanism.name: Stream(mechanism) for mechanism in (make_mechanism("independent", RELEASES), blt, banded)}
    for stream in ours.values():
        stream.seconds(BANDS + ROWS_PER_BATCH)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ours}
    command = [str(jax_python()), str(_ROOT / "benchmarks" / "peers" / "jax_streams.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **_SINGLE_THREAD}
    ) as peer:
        parameters = {"size": SIZE, "theta": blt.theta.tolist(), "omega": blt.omega.tolist()}
        versions = _answer(peer, parameters | {"band": banded.band.tolist()})
        for _ in range(batches):
            for name, stream in ours.items():
                times[name][0].extend(stream.seconds(ROWS_PER_BATCH))
                times[name][1].extend(_answer(peer, [name, ROWS_PER_BATCH]))
        _pipe(peer.stdin).close()
    return {
        "versions": versions,
        "size": SIZE,
        "rows": batches * ROWS_PER_BATCH,
        "seconds": {
            name: {"murmurfl": statistics.median(here), "jax_privacy": statistics.median(there)}
            for name, (here, there) in times.items()
        },
    }


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    titles = {"independent": "independent", "blt": f"blt, {BUFFERS} buffers", "banded": f"banded, {BANDS} bands"}
    version = document["versions"]["jax-privacy"]
    lines = [
        f"| stream, {document['size']:,} values a row | murmurfl, ms | jax_privacy {version}, ms | ratio |",
        "|---|---|---|---|",
    ]
    for name, seconds in document["seconds"].items():
        here, there = seconds["murmurfl"], seconds["jax_privacy"]
        lines.append(f"| {titles[name]} | {1e3 * here:.1f} | {1e3 * there:.1f} | {here / there:.2f} |")
    return "\n".join(lines)


def _answer(peer: subprocess.Popen[str], request: Any) -> Any:
    stdin = _pipe(peer.stdin)
    stdin.write(json.dumps(request) + "\n")
    stdin.flush()
    return json.loads(_pipe(peer.stdout).readline())


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("Expected the peer to have been started with pipes.")
    return stream


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--batches", type=int, default=10)
    arguments = parser.parse_args()
    document = measure(arguments.batches)
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
