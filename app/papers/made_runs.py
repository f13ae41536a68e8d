"""Making a reproduction's runs on a pool of workers; finished ones are kept in files and not made again.

A worker makes whole runs, one after the other. Data are loaded here, once, and sent to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError
from ..data.loading import give, loaded, wanted_by
from ..data.task import Dataset
from ..engines.pool import HerePool, Pool, WorkerState, checked_workers, computing_alone, opened_pool, say_nothing
from ..engines.start import run_document
from ..methods import METHODS
from ..runs.experiment import prepare
from ..settings.run_config import RunConfig
from .kind import FIGURES, Run, TableKind
from .planned_runs import RunKey
from .sweep import CURVES, run_sweep, sweep_of


@dataclass(frozen=True)
class Workplace:
    """Where and how runs are made.

    Parameters
    ----------
    out : Path
        Folder for ``runs/*.json``, one for the finished runs that were made together.
    workers : int, optional
        Runs at once, each in a process of its own; default as many as cores. With one, runs are made in this process,
        and so are those of the ray engine, which uses the cores itself.
    ray_address : str
        A Ray cluster on which the workers are; default this computer.
    say : callable
        Told what is waited for.
    """

    out: Path
    engine: str
    workers: int | None = None
    ray_address: str = ""
    say: Callable[[str], None] = say_nothing

    def __post_init__(self) -> None:
        checked_workers(self.workers)
        if self.engine == "ray" and self.ray_address:
            raise ConfigurationError(
                f"Expected engine 'cohort' or 'inprocess' on the Ray cluster at {self.ray_address}, got 'ray': that "
                "engine starts a Ray of its own for each run."
            )

    def pool(self, tasks: int) -> AbstractContextManager[Pool]:
        """Workers for so many tasks, until the block ends."""
        workers = 1 if self.engine == "ray" else self.workers
        return opened_pool(workers, self.ray_address, most=tasks, of="runs to make", say=self.say)

    def kept_in(self, group: Sequence[RunConfig]) -> Path:
        """The file of runs that are made together."""
        names = [_run_name(config, self.engine) for config in group]
        name = names[0] if len(names) == 1 else hashlib.sha256("".join(names).encode()).hexdigest()[:24]
        return self.out / "runs" / f"{name}.json"


def made_together(configs: Mapping[RunKey, RunConfig], kind: TableKind, engine: str) -> list[list[RunKey]]:
    """Runs that are made at once.

    A run whose step the guarantee does not cover is made in a sweep only, and marked: machines would refuse it, and a
    sweep does not ask them.
    """
    groups: dict[object, list[RunKey]] = {}
    for key, config in configs.items():
        if _swept(config, kind, engine):
            groups.setdefault(sweep_of(config), []).append(key)
        elif METHODS[config.strategy].covers(config, prepare):
            groups[key] = [key]
    return list(groups.values())


def make_runs(
    configs: Mapping[RunKey, RunConfig], kind: TableKind, workplace: Workplace, on_run: Callable[[int], None]
) -> dict[RunKey, Run]:
    """Every run's figures and curves; those that are kept are not made again."""
    results, waiting = _found(configs, kind, workplace)
    on_run(len(results))
    (workplace.out / "runs").mkdir(parents=True, exist_ok=True)
    if not waiting:
        return results
    with workplace.pool(len(waiting)) as pool:
        shared = _Shared(pool)
        tasks = ((group, kind, workplace.engine, shared.data(group[0])) for _, group, _ in waiting)
        with computing_alone() if isinstance(pool, HerePool) else nullcontext():
            for number, made in pool.each(make_on_worker, tasks):
                keys, _, path = waiting[number]
                results |= zip(keys, made, strict=True)
                _keep(made, path)
                on_run(len(results))
    return results


class _Shared:
    """The data of runs, sent to the workers of a pool once for all runs in a row that have the same."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last: tuple[Hashable, Any] = ("", None)

    def data(self, config: RunConfig) -> Any:
        """A reference to a run's data; None in this process, which has them."""
        if isinstance(self._pool, HerePool):
            return None
        wanted = wanted_by(config)
        if self._last[0] != wanted:
            self._last = wanted, self._pool.share(loaded(config))
        return self._last[1]


def make_on_worker(
    state: WorkerState,  # noqa: ARG001 - every run starts anew
    group: Sequence[RunConfig],
    kind: TableKind,
    engine: str,
    data: Dataset | None,
) -> list[Run]:
    """:func:`make_group` on a worker, of data that were sent to it."""
    if data is not None:
        give(group[0], data)
    return make_group(group, kind, engine)


def _found(
    configs: Mapping[RunKey, RunConfig], kind: TableKind, workplace: Workplace
) -> tuple[dict[RunKey, Run], list[tuple[list[RunKey], list[RunConfig], Path]]]:
    """The runs that are kept, and what is to be made: keys, configurations and the file of each group."""
    results: dict[RunKey, Run] = {}
    waiting = []
    for keys in made_together(configs, kind, workplace.engine):
        group = [configs[key] for key in keys]
        path = workplace.kept_in(group)
        kept = _kept(path, kind)
        if kept is None:
            waiting.append((keys, group, path))
        else:
            results |= zip(keys, kept, strict=True)
    # The longest first, so that no worker is left with one at the end: a run costs its releases. Then by seed:
    # data that are made from it are made, and sent, once.
    waiting.sort(key=lambda item: (-item[1][0].num_clients / max(item[1][0].clients_per_round, 1), item[1][0].seed))
    return results, waiting


def make_group(group: Sequence[RunConfig], kind: TableKind, engine: str) -> list[Run]:
    """Runs that go together, or the one run."""
    if _swept(group[0], kind, engine):
        return list(run_sweep(group))
    return [make_run(group[0], kind, engine)]


def make_run(config: RunConfig, kind: TableKind, engine: str) -> Run:
    """One run on an engine: the figures that every table needs, and the curves that its kind wants."""
    document = run_document(config, engine)
    return {**{name: document[name] for name in FIGURES}, "curves": kind.curves(document)}


def _swept(config: RunConfig, kind: TableKind, engine: str) -> bool:
    # A sweep computes what machines would, without machines, and keeps few curves.
    return engine == "cohort" and kind.curves_needed <= CURVES and METHODS[config.strategy].sweeps(config)


def _kept(path: Path, kind: TableKind) -> list[Run] | None:
    if not path.exists():
        return None
    made = json.loads(path.read_text())
    runs = made if isinstance(made, list) else [made]
    # A run that another kind of table kept may lack the curves that this one shows; one of an older version, figures.
    enough = (kind.curves_needed <= set(run.get("curves") or ()) and set(FIGURES) <= set(run) for run in runs)
    return runs if all(enough) else None


def _keep(made: Sequence[Run], path: Path) -> None:
    path.with_suffix(".part").write_text(json.dumps(made if len(made) > 1 else made[0]))
    path.with_suffix(".part").replace(path)


def _run_name(config: RunConfig, engine: str) -> str:
    default: dict[str, Any] = RunConfig().to_mapping()
    told = replace(config, data_root="", download=False).to_mapping()
    changed = sorted((key, value) for key, value in told.items() if value != default[key])
    return hashlib.sha256(repr((engine, changed)).encode()).hexdigest()[:24]
