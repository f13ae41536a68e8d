"""Reproduce a paper's tables: which runs they are made of, the runs, and the document, tables and picture from them.

A cell is a set of run-config overrides; an algorithm is one more. Every run is the ordinary app on an engine, so a
table shows the code that users run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ...privacy.accounting.amplification import Amplification
from ...privacy.accounting.guarantee import SIMULATED, Guarantee, caption
from ...privacy.accounting.loss import Loss
from ...privacy.errors import ConfigurationError
from ..data.loading import give, loaded, wanted_by
from ..data.task import Dataset, Shard
from ..engines.pool import HerePool, Pool, WorkerState, checked_workers, computing_alone, opened_pool, say_nothing
from ..engines.start import ENGINES, run_document
from ..methods import METHODS, ResolvedRun
from ..methods.method import AUTO
from ..methods.presets import constant_feature
from ..models.linear import SoftmaxRegression
from ..reports.table import Table, statistics
from ..runs.experiment import prepare
from ..runs.simulated_figures import alone
from ..settings.run_config import NO_NOISE, USUAL_MU, RunConfig, is_centred, run_keys, without_unread
from .accuracy import FIGURES, Document, Run, TableKind, Trial, entries_of, with_alone
from .paper import VALIDATION_SEEDS, Cell, Overrides, Paper, Settings, is_without_noise
from .sweep import CURVES, run_sweep, sweep_of


class RunKey(NamedTuple):
    """One run of a reproduction; a step of None is that of the cell or of the preset."""

    cell: int
    algorithm: str
    seed: int
    step: float | None = None


Choices = Mapping[tuple[int, str], Sequence[Mapping[str, Any]]]
"""The steps tried for each cell and algorithm and what they were judged by, the best first."""


def plan_runs(cells: Sequence[Cell], seeds: int, engine: str, kind: TableKind | None = None) -> dict[RunKey, RunConfig]:
    """Return the configuration of every run whose figures are shown."""
    if engine not in ENGINES:
        raise ConfigurationError(
            f"Expected engine one of {', '.join(ENGINES)}, got {engine!r}.",
            kind="unknown-name",
            setting="engine",
            got=engine,
        )
    if seeds < 1:
        raise ConfigurationError(f"Expected seeds >= 1, got {seeds}.", kind="out-of-range", setting="seeds", got=seeds)
    runs = {
        RunKey(index, label, seed, step): _configured(cell, label, step, {"seed": seed})
        for index, cell in enumerate(cells)
        for label in cell.algorithms
        for step in cell.steps or (None,)
        for seed in range(1, seeds * cell.times + 1)
    }
    if kind is not None:
        for config in runs.values():
            kind.check(config)
    return runs


def plan_validation(cells: Sequence[Cell], kind: TableKind) -> dict[RunKey, RunConfig]:
    """Return the runs that choose steps, on seeds that no result is made with."""
    runs = {}
    for index, cell in enumerate(cells):
        if cell.grids:
            kind.measure(held_out=cell.holds_out)
        for label, grid in cell.grids.items():
            for step in grid if label in cell.algorithms else ():
                for seed in VALIDATION_SEEDS:
                    config = _configured(cell, label, step, {**cell.validation, "seed": seed})
                    kind.check(config)
                    runs[RunKey(index, label, seed, step)] = config
    return runs


def _configured(cell: Cell, label: str, step: float | None, more: Overrides) -> RunConfig:
    settings = {**cell.settings, **cell.algorithms[label], **more}
    return RunConfig.from_mapping(settings if step is None else {**settings, "learning-rate": step})


def choose_steps(cells: Sequence[Cell], kind: TableKind, results: Mapping[RunKey, Run]) -> Choices:
    """Return the steps tried for each algorithm of a cell and what they were judged by, the best first."""
    tried: dict[tuple[int, str], dict[float | None, list[float]]] = {}
    for key, run in results.items():
        measured = kind.measure(held_out=cells[key.cell].holds_out).of(run)
        tried.setdefault((key.cell, key.algorithm), {}).setdefault(key.step, []).append(measured)
    choices = {}
    for (index, label), steps in tried.items():
        name = kind.measure(held_out=cells[index].holds_out).name
        entries = [{"step": step, name: fmean(values)} for step, values in steps.items()]
        choices[index, label] = sorted(entries, key=lambda entry: entry[name])
    return choices


def with_chosen_steps(cells: Sequence[Cell], choices: Choices) -> list[Cell]:
    """Return the cells, their algorithms with the best of the steps that were tried."""
    return [
        replace(
            cell,
            algorithms={
                label: {**options, "learning-rate": choices[i, label][0]["step"]} if (i, label) in choices else options
                for label, options in cell.algorithms.items()
            },
        )
        for i, cell in enumerate(cells)
    ]


WITHOUT = "without noise"
"""The twin's name among the algorithms of its cell."""
_OF_NOISE = ("batch-selection", "epsilon")
"""Keys beside the mechanisms' own that mean nothing without noise."""


def with_twins(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with one more algorithm: the first that can be run without noise, without noise.

    A cell that has an algorithm without noise already gets no other. A twin is not private, and every caption says so.
    """
    return [_with_twin(cell) for cell in cells]


def _with_twin(cell: Cell) -> Cell:
    if any(is_without_noise({**cell.settings, **options}) for options in cell.algorithms.values()):
        return cell
    for label, options in cell.algorithms.items():
        made = _twin(cell.settings, options)
        if made is not None:
            grids = {**cell.grids, **({WITHOUT: cell.grids[label]} if label in cell.grids else {})}
            return replace(cell, algorithms={**cell.algorithms, WITHOUT: made}, grids=grids)
    return cell


def _twin(shared: Overrides, options: Overrides) -> Settings | None:
    """Return an algorithm's settings without noise; None where it cannot be run without.

    Mu is that of the default, so that cells that differ in it alone share their runs.
    """
    keys, settings = run_keys(), {**shared, **options}
    of_mechanisms = [one.name for one in keys.values() if one.choice == "mechanism"]
    unset = {name: keys[name].default for name in (*of_mechanisms, *_OF_NOISE) if name in settings}
    own: Settings = {**options, **unset, "mu": USUAL_MU, "mechanism": NO_NOISE}
    try:
        RunConfig.from_mapping({**shared, **own})
    except ConfigurationError:
        return None
    return own


@dataclass(frozen=True)
class Workplace:
    """Location and settings of the runs: the parameters of :func:`run_cells`."""

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
                "engine starts a Ray of its own for each run.",
                kind="conflict",
                setting="engine",
            )

    def kept_in(self, group: Sequence[RunConfig]) -> Path:
        """Return the file of runs that are made together, in ``out/runs``."""
        names = [_run_name(config, self.engine) for config in group]
        name = names[0] if len(names) == 1 else hashlib.sha256("".join(names).encode()).hexdigest()[:24]
        return self.out / "runs" / f"{name}.json"


def made_together(configs: Mapping[RunKey, RunConfig], kind: TableKind, engine: str) -> list[list[RunKey]]:
    """Return runs that are made at once.

    A run whose step the guarantee does not cover is made in a sweep only, and marked: clients would refuse it, and a
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

    A worker makes whole runs, one after the other. Data are loaded here, once, and sent to it.
    """
    results: dict[RunKey, Run] = {}
    waiting: list[tuple[list[RunKey], list[RunConfig], Path]] = []
    for keys in made_together(configs, kind, workplace.engine):
        group = [configs[key] for key in keys]
        path = workplace.kept_in(group)
        if (kept := _kept(path, kind)) is None:
            waiting.append((keys, group, path))
        else:
            results |= zip(keys, kept, strict=True)
    on_run(len(results))
    (workplace.out / "runs").mkdir(parents=True, exist_ok=True)
    if not waiting:
        return results
    # The longest first, so that no worker is left with one at the end: a run costs its releases. Then by seed:
    # data that are made from it are made, and sent, once.
    waiting.sort(key=lambda item: (-item[1][0].num_clients / max(item[1][0].clients_per_round, 1), item[1][0].seed))
    workers = 1 if workplace.engine == "ray" else workplace.workers  # Ray uses the cores itself
    options = {"most": len(waiting), "of": "runs to make", "say": workplace.say}
    with opened_pool(workers, workplace.ray_address, **options) as pool:
        groups = [group for _, group, _ in waiting]
        tasks = ((group, kind, workplace.engine, data) for group, data in zip(groups, _data(groups, pool), strict=True))
        with computing_alone() if isinstance(pool, HerePool) else nullcontext():
            for number, made in pool.each(make_on_worker, tasks):
                keys, _, path = waiting[number]
                results |= zip(keys, made, strict=True)
                path.with_suffix(".part").write_text(json.dumps(made if len(made) > 1 else made[0]))
                path.with_suffix(".part").replace(path)
                on_run(len(results))
    return results


def _data(groups: Iterable[Sequence[RunConfig]], pool: Pool) -> Iterable[Any]:
    """Yield a reference to the data of each group, sent once for all in a row that have the same.

    None in this process.
    """
    last: tuple[Hashable, Any] = "", None
    for config, *_ in groups:
        if isinstance(pool, HerePool):
            yield None
            continue
        if last[0] != (wanted := wanted_by(config)):
            last = wanted, pool.share(loaded(config))
        yield last[1]


def make_on_worker(
    state: WorkerState,  # noqa: ARG001 - every run starts anew
    group: Sequence[RunConfig],
    kind: TableKind,
    engine: str,
    data: Dataset | None,
) -> list[Run]:
    """Return runs that go together, or the one run, of data that were sent to a worker."""
    if data is not None:
        give(group[0], data)
    if _swept(group[0], kind, engine):
        return list(run_sweep(group))
    return [make_run(group[0], kind, engine)]


def make_run(config: RunConfig, kind: TableKind, engine: str) -> Run:
    """One run on an engine: the figures that every table needs, and the curves that its kind wants."""
    document = run_document(config, engine)
    return {**{name: document[name] for name in FIGURES}, "curves": kind.curves(document)}


def _swept(config: RunConfig, kind: TableKind, engine: str) -> bool:
    # A sweep computes what clients would, without clients, and keeps few curves.
    return engine == "cohort" and kind.curves_needed <= CURVES and METHODS[config.strategy].sweeps(config)


def _kept(path: Path, kind: TableKind) -> list[Run] | None:
    if not path.exists():
        return None
    made = json.loads(path.read_text())
    runs = made if isinstance(made, list) else [made]
    # A run that another kind of table kept may lack the curves that this one shows; one of an older version, figures.
    enough = (kind.curves_needed <= set(run.get("curves") or ()) and set(FIGURES) <= set(run) for run in runs)
    return runs if all(enough) else None


def _run_name(config: RunConfig, engine: str) -> str:
    default: dict[str, Any] = RunConfig().to_mapping()
    settings = replace(config, data_root="", download=False).to_mapping()
    changed = sorted((key, value) for key, value in settings.items() if value != default[key])
    return hashlib.sha256(repr((engine, changed)).encode()).hexdigest()[:24]


def run_cells(
    cells: Sequence[Cell],
    kind: TableKind,
    *,
    seeds: int,
    out: Path,
    engine: str = "cohort",
    workers: int | None = None,
    ray_address: str = "",
    say: Callable[[str], None] | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run every algorithm of every cell with seeds 1 .. seeds, or ``times`` as many.

    Finished runs in ``out``/runs are not run again. Runs are made by ``workers`` processes at once, by default as many
    as cores, on this computer or on the Ray cluster at ``ray_address``, whose nodes get the data from here; runs on the
    ray engine are made one after the other, because it uses the cores itself. ``say`` is told what is waited for,
    ``on_run`` the runs done and the runs in all.

    Returns
    -------
    dict
        The document of the reproduction: its ``cells``, and in words what their epsilons are true of.

    Raises
    ------
    ConfigurationError
        If a setting is impossible, the engine unknown, or all steps of an algorithm are beyond its guarantee.
    WorkerError
        If a worker could not be started, or is gone; finished runs are kept.
    """
    tried = plan_validation(cells, kind)
    final = plan_runs(cells, seeds, engine, kind)
    _check_covered(cells, final, kind, engine)
    report = on_run or (lambda done, total: None)  # noqa: ARG005
    workplace, total = Workplace(out, engine, workers, ray_address, say or say_nothing), len(tried) + len(final)

    def make(configs: Mapping[RunKey, RunConfig], before: int) -> dict[RunKey, Run]:
        return make_runs(configs, kind, workplace, lambda done: report(before + done, total))

    choices = choose_steps(cells, kind, make(tried, 0)) if tried else {}
    chosen = with_chosen_steps(cells, choices)
    results = make(plan_runs(chosen, seeds, engine, kind), len(tried))
    made = [_cell_document(i, cell, kind, results, choices) for i, cell in enumerate(chosen)]
    document: dict[str, Any] = {"cells": made}
    caption = table_caption(document, in_columns=kind.honest_in_columns)
    return {"guarantee": caption, **document, **kind.summary(document)}


def _check_covered(cells: Sequence[Cell], runs: Mapping[RunKey, RunConfig], kind: TableKind, engine: str) -> None:
    # The steps of algorithms with a grid of their own are not chosen yet.
    of_grids = {(i, label) for i, cell in enumerate(cells) for label in cell.grids}
    planned = {key: config for key, config in runs.items() if (key.cell, key.algorithm) not in of_grids}
    left = {(key.cell, key.algorithm) for group in made_together(planned, kind, engine) for key in group}
    for key in planned:
        if (key.cell, key.algorithm) not in left:
            raise ConfigurationError(
                f"Expected a step that the guarantee covers for {key.algorithm!r} in {cells[key.cell].table!r}, got "
                f"none: on the {engine} engine clients refuse all of them.",
                kind="missing",
            )


def _cell_document(
    index: int, cell: Cell, kind: TableKind, results: Mapping[RunKey, Run], choices: Choices
) -> dict[str, Any]:
    algorithms = {}
    for label, options in cell.algorithms.items():
        trials = _trials(index, label, cell, results)
        best = kind.best(trials)
        algorithms[label] = {
            **{name: statistics([run[name] for run in best.runs], kind.digits) for name in FIGURES},
            "settings": dict(options),
            "paper": dict(cell.paper.get(label, {})),
            **kind.entry(best, trials, choices.get((index, label), [])),
        }
    made = {"table": cell.table, "settings": dict(cell.settings), "algorithms": algorithms}
    return {**made, "alone": _alone(cell)} if kind.has_alone else made


def _alone(cell: Cell) -> dict[str, Any] | None:
    """Return what one client reaches alone with the data of the first seed.

    None of models that have no such figures.
    """
    settings = next(iter(cell.algorithms.values()), {})
    found = alone(RunConfig.from_mapping({**cell.settings, **settings, "seed": 1}))
    return None if found.reason else {name: getattr(found, name) for name in ("accuracy", "auc", "loss")}


def _trials(index: int, label: str, cell: Cell, results: Mapping[RunKey, Run]) -> list[Trial]:
    trials = []
    for step in cell.steps or (None,):
        seeds = sorted(key.seed for key in results if (key.cell, key.algorithm, key.step) == (index, label, step))
        if seeds:
            settings = {**cell.settings, **cell.algorithms[label], "seed": seeds[0]}
            config = RunConfig.from_mapping(settings if step is None else {**settings, "learning-rate": step})
            trials.append(
                Trial(
                    config,
                    METHODS[config.strategy].covers(config, prepare),
                    [results[RunKey(index, label, s, step)] for s in seeds],
                )
            )
    return trials


_NOMINAL = 1000
"""Batches of a client where only words are wanted of a policy."""


def caption_guarantee(
    config: RunConfig, worst_case_mu: float = math.inf, amplified: Amplification | None = None
) -> Guarantee:
    """Return the guarantee of a simulated run for a caption: without its data, and without what differs between runs.

    The words are those of the policy that the method makes for a problem of some size. The size does not show in them.
    ``amplified`` is what the runs' secret order was worth.

    Notes
    -----
    **Formal guarantees.** Mu is what the run configuration asks for, for replacement of one sample of one client, and
    infinite for a run without noise: what real clients would guarantee, for keys of a simulation protect nobody's
    data.
    """
    if config.strategy == AUTO:  # the words are those of what was chosen
        config = prepare(config).config
    method = METHODS[config.strategy]
    rounds = config.passes * _NOMINAL
    # As a run's: what has a constant among its features needs no bias.
    model = SoftmaxRegression(1, 2, bias=not (constant_feature(config) or is_centred(config)))
    values = method.settled(config, rounds, model, [config.batch_size * _NOMINAL]).overridden(config)
    nothing = np.zeros((config.batch_size * _NOMINAL, 1), np.float32), np.zeros(config.batch_size * _NOMINAL, np.int64)
    data = Dataset(*nothing, *nothing, num_classes=2)
    shards = [Shard(data, np.arange(len(data.train_labels)))]
    problem = ResolvedRun(replace(config, max_participations=0), data, shards, model, rounds, values)
    loss = Loss.of(config.mu if config.private else math.inf, worst_case_mu if config.secure else None)
    made = method.guarantee(problem, loss, notes=(SIMULATED,), brief=True)
    return replace(made, amplified=amplified)


def table_caption(document: Mapping[str, Any], *, in_columns: bool = False) -> str:
    """Return the caption of a reproduction's table: what its epsilons are true of.

    With ``in_columns`` the table has columns for what secure aggregation rests on (:func:`~murmurfl.privacy.caption`).
    """
    guarantees, noiseless = cell_guarantees(document)
    sentences = [caption(guarantees, in_columns=in_columns)] if guarantees else []
    if noiseless:
        sentences.append(f"Without noise, and not private: {' / '.join(noiseless)}.")
    return " ".join(sentences) or "No epsilon: nothing private was released."


def cell_guarantees(document: Mapping[str, Any]) -> tuple[list[tuple[str, Guarantee]], list[str]]:
    """Return the guarantee of each private line of a reproduction's cells, and the names of the lines without noise.

    Notes
    -----
    **Formal guarantees.** Each is what its line's own settings give, for replacement of one record of one client, as
    :func:`caption_guarantee` has it; a line without noise is among the names, and has none.
    """
    guarantees, noiseless = [], dict[str, None]()
    for cell, label, entry in entries_of(document):
        # Documents of the first version name the strategy in the label alone.
        given = entry.get("settings") or {"strategy": label.partition(",")[0]}
        # Those before version 0.2 may hold settings that some of a cell's algorithms do not read.
        config = RunConfig.from_mapping(without_unread({**cell["settings"], **given}))
        if not config.private:
            noiseless[label] = None
        elif entry["epsilon"]["mean"] != 0:
            local = entry.get("mu_local", {}).get("mean")
            hidden = _amplified(entry, config.num_clients)
            guarantees.append((label, caption_guarantee(config, math.inf if local is None else local, hidden)))
    return guarantees, list(noiseless)


def _amplified(entry: Document, clients: int) -> Amplification | None:
    """Return what the secret order of an entry's runs was worth, which only a proof puts there; None without one.

    In a reproduction every client makes all its releases, so they are the places that a sample hides in.
    """
    found = entry.get("epsilon_amplified")
    if found is None:
        return None
    return Amplification(max(found["runs"]), round(entry["releases"]["mean"] / clients), proved=True)


def write_reproduction(document: Mapping[str, Any], name: str, kind: TableKind, out: Path) -> list[Table]:
    """Write ``<name>.json``, ``.csv``, ``.md`` and ``.png`` into a folder; what the Markdown holds is returned."""
    out.mkdir(parents=True, exist_ok=True)
    first, *further = tables = tables_of(document, name, kind)
    (out / f"{name}.json").write_text(json.dumps(document, indent=kind.indent) + "\n")
    with (out / f"{name}.csv").open("w", newline="") as file:
        file.write(first.csv())
    below = "".join(f"\n{table.title}\n\n{table.markdown()}" for table in further)
    (out / f"{name}.md").write_text(f"{first.caption}\n\n{first.markdown()}{below}")
    if first.draw is not None:
        first.draw(out / f"{name}.png")
    return tables


def tables_of(document: Mapping[str, Any], name: str, kind: TableKind) -> list[Table]:
    """Return the tables of a reproduction's document, the one with its figures first."""
    document = with_alone(document) if kind.has_alone else document
    caption = table_caption(document, in_columns=kind.honest_in_columns)
    captioned = {"seeds": 1, **document, "guarantee": caption}
    return [kind.table(captioned, name), *kind.further_tables(captioned)]


def reproduce(
    paper: Paper, cells: Sequence[Cell], out: Path, *, seeds: int, engine: str, **options: Any
) -> dict[str, Any]:
    """Return the document of a paper's cells, with its files written; the options are those of :func:`run_cells`."""
    document = run_cells(cells, paper.table, seeds=seeds, out=out, engine=engine, **options)
    document = {"reproduction": paper.name, "engine": engine, "seeds": seeds, **document}
    write_reproduction(document, paper.name, paper.table, out)
    return document
