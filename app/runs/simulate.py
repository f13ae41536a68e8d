"""Whole trainings in this process: :func:`simulate`, and what a recorded run is compared with.

A private run is compared with the same run without noise, made on the simulated run's data, and with one client alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ...privacy.errors import ConfigurationError
from ...privacy.setting import Value, by_key, flat
from ..engines.pool import checked_workers
from ..engines.start import ENGINES, checked_device, run_cohort, run_in_process
from ..nodes.flower_internals import without_log
from ..settings.layers import layered, names_own, search_here, with_defaults
from ..settings.registry import registry
from ..settings.run_config import NO_NOISE, RunConfig, run_keys, without_unread
from .experiment import prepare
from .outcome import Outcome, Twin
from .progress import Progress
from .result import RunResult, write_outcome
from .run_summary import is_better
from .simulated_figures import NOTE, alone

if TYPE_CHECKING:
    from ..settings.keyword_arguments import RunSettings

_ENGINES = ("cohort", "inprocess")
_WIDTH = 24
_RAY = (
    "Ray runs the app in processes of its own, which leave files and no result in this one: use `murmurfl run`, or "
    "murmurfl.app.engines.run_on_ray for its result.json. For one seed every engine gives the same model."
)


def simulate(
    config: RunConfig | Mapping[str, Value] | None = None,
    *,
    engine: Literal["cohort", "inprocess"] = "cohort",
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
    ray_address: str = "",
    device: str = "",
    verbose: bool = False,
    **settings: Unpack[RunSettings],
) -> RunResult:
    """Train with simulated clients in this process, to the end; nothing is written.

    Parameters
    ----------
    config : RunConfig or mapping, optional
        A whole run configuration, or hyphenated keys, such as those of a TOML file, on top of the default run's.
    engine : {"cohort", "inprocess"}
        ``cohort`` asks clients together and without messages, and is the faster one; ``inprocess`` sends the app's
        messages. The noise and the ledgers are the same, and the model is up to the rounding of gradients.
    on_progress : callable, optional
        Called after every round with its :class:`~murmurfl.app.runs.progress.Progress`; default a bar, in a notebook or
        on a terminal.
    workers : int, optional
        Over how many processes the cohort engine's clients are spread; the model is the same to the last bit.
    ray_address : str
        A Ray cluster on which they are (:func:`~murmurfl.app.engines.run_cohort`); default this computer.
    device : str
        What computes the cohort engine's gradients and noise: ``cuda`` for a GPU; default NumPy. The noise of a device
        has other bits, and the same law.
    **settings
        Run-config keys with underscores for hyphens, such as ``num_rounds=5``; they win over ``config``. ``epsilon``
        may stand for ``mu``. A task, model, features or method of one's own is given as it is, ``task=make_task``,
        ``task=(train_features, train_labels, test_features, test_labels)``, ``model=module``, or named as everywhere,
        ``task="package.module:make_task"``, which other processes need.

    Returns
    -------
    RunResult
        The trained model, its guarantee in words and figures, and what became of every round.

    Raises
    ------
    MurmurflError
        If a key is unknown or its value impossible, with one line that says what was expected; if nothing could be
        aggregated for too long; if a worker is gone (:class:`~murmurfl.app.engines.WorkerError`).

    Notes
    -----
    Clients have seeded keys: whoever knows the seed can take the noise out again. :attr:`RunResult.guarantee` says
    what the same run on real clients would guarantee, and protects no data by itself.

    Examples
    --------
    >>> result = simulate(num_rounds=2, epsilon=2.0)
    >>> result.guarantee.trust, round(result.epsilon, 3)
    ('secure-aggregation', 2.0)
    """
    if engine not in _ENGINES:
        reason = f" {_RAY}" if engine == "ray" else ""
        raise ConfigurationError(
            f"Expected engine 'cohort' or 'inprocess', got {engine!r}.{reason}",
            kind="unknown-name",
            setting="engine",
            got=engine,
        )
    if config is not None and not isinstance(config, RunConfig | Mapping):
        got = f"{config!r}" if isinstance(config, str) else type(config).__name__
        raise ConfigurationError(
            f"Expected a run configuration or a mapping of its keys, got {got}: data are simulate(task=...), and "
            "murmurfl.app.fit(table, label=...) takes a table with a column of labels.",
            kind="wrong-type",
        )
    whole = isinstance(config, RunConfig)
    given = _named(config.to_mapping() if isinstance(config, RunConfig) else flat(config or {}, run_keys()))
    own = _named(by_key(settings, run_keys()))
    checked_workers(workers, engine, ray_address)
    checked_device(device, engine, workers, ray_address)
    merged = layered(given, own)
    settled = RunConfig.from_mapping(merged if whole else with_defaults(merged))
    with nullcontext() if verbose else _warnings_alone():
        if on_progress is None and not verbose:
            on_progress = bar_of_rounds()
        if engine == "cohort":
            spread: dict[str, Any] = {"workers": workers, "ray_address": ray_address, "device": device}
            return run_cohort(settled, on_progress=on_progress, rehearsed=True, **spread)
        return run_in_process(settled, on_progress=on_progress, rehearsed=True)


def _named(settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return settings with a name for each thing of this process, such as a function in the place of a task."""
    things = {name for name, one in run_keys().items() if one.names}
    return {
        name: registry(name).named(value) if name in things and not isinstance(value, str) else value
        for name, value in settings.items()
    }


@contextmanager
def _warnings_alone() -> Iterator[None]:
    """Hold back what Flower's logger says below a warning, until the block ends."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(max(logging.WARNING, before))
    try:
        yield
    finally:
        logger.setLevel(before)


def bar_of_rounds() -> Callable[[Progress], None] | None:
    """Return what draws a bar after each round, in a notebook or on a terminal; None elsewhere."""
    return _bar if "ipykernel" in sys.modules or sys.stdout.isatty() else None


def _bar(progress: Progress) -> None:
    """Draw one line of a notebook or terminal anew after each round."""
    done, rounds = progress.report.server_round, progress.num_rounds
    measured = "" if progress.accuracy is None else f"  accuracy {100 * progress.accuracy:.1f} %"
    full = _WIDTH * done // rounds
    line = f"\r{'█' * full}{'░' * (_WIDTH - full)}  round {done}/{rounds}{measured}  "
    sys.stdout.write(line + "\n" * (done == rounds))
    sys.stdout.flush()


_FIGURES = ("accuracy", "auc", "loss", "rounds", "seconds")
_FINAL_ONLY = 1_000_000
"""``evaluate-every``: the last round alone."""
_OF_FILES = ("track", "out-dir", "run-name", "checkpoint", "gradient-norm")
"""Keys that say what a run leaves, and where: this one leaves nothing."""
_STEPS = 2
"""Configurations that differ in their steps alone: the preset's for no noise, and the run's own. The better counts."""
_OF_NOISE = ("epsilon", "noise-quality", "batch-selection")


def configs_without_noise(outcome: Outcome) -> list[RunConfig]:
    """Return the configurations that a recorded run's twin without noise may have.

    In the first the preset chooses anew what it chose for the noise, in the second everything is the run's own, and in
    the third the rounds are the preset's as well: few rounds may be too few for steps that are not afraid of noise.
    Raises ConfigurationError if the run cannot be made again here, or not without noise.
    """
    if outcome.engine not in (*ENGINES, None):
        raise ConfigurationError(
            "Expected a simulated run, got one of real clients: their data are in no one place, so there is no run "
            "without noise to compare with.",
            kind="unsupported",
        )
    if "mechanism" not in outcome.config:
        raise ConfigurationError(
            "Expected a run of murmurfl's own app, got one of another program, which alone can make it without noise.",
            kind="unsupported",
        )
    asked = _asked(outcome)
    resolve = {name: outcome.config[name] for name in outcome.asked}  # null: without bound, as an unset diameter is
    chosen = without_unread({**asked, **{name: value for name, value in resolve.items() if value is not None}})
    made: list[RunConfig] = []
    refused: ConfigurationError | None = None
    for settings in (asked, chosen, {**asked, "num-rounds": 0, "max-participations": 0}):
        try:
            config = RunConfig.from_mapping(_noiseless(settings))
            prepare(config).check_rounds()
        except ConfigurationError as error:
            refused = refused or error
        else:
            made += [] if config in made else [config]
    if refused is not None and not made:
        raise refused
    return made


def _noiseless(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings of a run without noise that leaves nothing, and without what belongs to the noise."""
    of_noise = [one.name for one in run_keys().values() if one.choice == "mechanism"]
    plain = {name: run_keys()[name].default for name in (*of_noise, *_OF_NOISE, *_OF_FILES)}
    return {**settings, **plain, "mechanism": NO_NOISE, "evaluate-every": _FINAL_ONLY}


def without_noise(outcome: Outcome) -> Twin:
    """Return the twin of a recorded run without noise: of simulated data, and not private."""
    if names_own(outcome.config):
        search_here()
    best: Outcome | None = None
    tried: list[object] = []
    with without_log():  # that nothing is private is what these runs are for
        for number, config in enumerate(configs_without_noise(outcome)):
            if number == _STEPS and best is not None and is_better(best, outcome):
                break  # noise cost something, and that is what there was to see
            steps = prepare(config).num_rounds, prepare(config).values
            if steps in tried:
                continue
            tried.append(steps)
            made = run_cohort(config).outcome
            best = made if best is None or is_better(made, best) else best
    return Twin(note=NOTE, **{name: getattr(best, name) for name in _FIGURES})


def add_alone(folder: Path) -> Outcome:
    """Put what one client reaches alone into a simulated run's files; any other run stays as it is."""
    outcome = Outcome.read(folder)
    if outcome.engine not in ENGINES or outcome.alone is not None:
        return outcome
    if names_own(outcome.config):
        search_here()
    outcome = outcome.model_copy(update={"alone": alone(RunConfig.from_mapping(_asked(outcome)))})
    write_outcome(outcome, folder)
    return outcome


def _asked(outcome: Outcome) -> dict[str, Value]:
    """Return the run configuration as it was asked for."""
    return {**{name: value for name, value in outcome.config.items() if name in run_keys()}, **outcome.asked}


def add_without_noise(folder: Path) -> Outcome:
    """Make a run's twin without noise, and put it into the run's files.

    A run that has one already, or that had no noise itself, stays as it is.
    """
    outcome = Outcome.read(folder)
    if outcome.config.get("mechanism") == NO_NOISE or outcome.without_noise is not None:
        return outcome
    outcome = outcome.model_copy(update={"without_noise": without_noise(outcome)})
    write_outcome(outcome, folder)
    return outcome
