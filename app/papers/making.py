"""Making a reproduction's runs in worker processes; finished ones are kept in files and not made again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..engines.start import run_document
from ..experiment import prepare
from ..methods import METHODS
from .kind import FIGURES, Run, TableKind
from .runs import RunKey
from .sweep import CURVES, run_sweep, sweep_of


@dataclass(frozen=True)
class Workplace:
    """Where and how runs are made.

    Parameters
    ----------
    out : Path
        Folder for ``runs/*.json``, one for the finished runs that were made together.
    engine : {"cohort", "inprocess", "ray"}
    jobs : int, optional
        Worker processes; default as many as cores. Ray has one, because it uses the cores itself.
    """

    out: Path
    engine: str
    jobs: int | None = None

    @property
    def workers(self) -> int:
        """Processes at once."""
        return 1 if self.engine == "ray" else self.jobs or os.cpu_count() or 1

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
    """Every run's figures and curves; those that are kept are not made again.

    Parameters
    ----------
    configs : mapping of RunKey to RunConfig
    kind : TableKind
        Says which curves it wants.
    workplace : Workplace
    on_run : callable
        Called with the number of runs done.
    """
    results, waiting = _found(configs, kind, workplace)
    on_run(len(results))
    (workplace.out / "runs").mkdir(parents=True, exist_ok=True)
    workers = min(workplace.workers, max(len(waiting), 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures = {
            pool.submit(make_group, group, kind, workplace.engine): (keys, path) for keys, group, path in waiting
        }
        try:
            for future in as_completed(futures):
                keys, path = futures[future]
                made = future.result()
                results |= zip(keys, made, strict=True)
                _keep(made, path)
                on_run(len(results))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


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
    # data that are made from it are made once.
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


def _one_thread() -> None:
    """As many workers as cores leave no core for a second thread of any."""
    from threadpoolctl import threadpool_limits

    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    threadpool_limits(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
