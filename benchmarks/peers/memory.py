"""Peak memory of a tree of processes, sampled from ``/proc`` (Linux)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_KIB_PER_MIB = 1024


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    born: str  # with the pid it names a process for good: pids come round again


class PeakMemory:
    """Samples the memory of a process's descendants while the context is open.

    Parameters
    ----------
    root : int, optional
        Id of the process the tree hangs from; default this one.
    include_root : bool
        Whether the root's own memory counts. Processes that were its descendants before the context was opened count
        in any case.
    interval_s : float
        Time between two samples.
    pss_every : int
        Samples between two sums of proportional set sizes, which the kernel takes milliseconds a process for; 0: none.

    Attributes
    ----------
    peak_mib : float
        Largest sum of resident set sizes. A page that several processes share counts once for each of them.
    peak_pss_mib : float
        Largest sum of proportional set sizes: a shared page is divided among all that share it, processes outside the
        tree included. Zero where the kernel does not tell.

    Notes
    -----
    What was a descendant in one sample stays in the tree when its parent ends before it.
    """

    def __init__(
        self, root: int | None = None, *, include_root: bool = False, interval_s: float = 0.2, pss_every: int = 10
    ) -> None:
        self._root = os.getpid() if root is None else root
        self._include_root = include_root
        self._interval_s = interval_s
        self._pss_every = pss_every
        self._known: set[tuple[int, str]] = set()
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peak-memory")
        self.peak_mib = 0.0
        self.peak_pss_mib = 0.0

    def __enter__(self) -> PeakMemory:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        tree = self._tree()
        self.peak_mib = max(self.peak_mib, sum(_field(pid, "status", "VmRSS:") for pid in tree))
        if self._pss_every and self._samples % self._pss_every == 0:
            self.peak_pss_mib = max(self.peak_pss_mib, sum(_field(pid, "smaps_rollup", "Pss:") for pid in tree))
        self._samples += 1

    def _tree(self) -> set[int]:
        table = list(_process_table())
        found = {p.pid for p in table if p.pid == self._root or (p.pid, p.born) in self._known}
        while children := {p.pid for p in table if p.parent in found} - found:
            found |= children
        self._known |= {(p.pid, p.born) for p in table if p.pid in found}
        return found if self._include_root else found - {self._root}


def _process_table() -> Iterator[_Process]:
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):  # it may end while it is read
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield _Process(int(folder.name), int(fields[1]), fields[19])


def _field(pid: int, file: str, name: str) -> float:
    """Return a size the kernel gives in KiB, in MiB; 0 for a process that is gone or another user's."""
    with suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / file).read_text(errors="replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) / _KIB_PER_MIB
    return 0.0
