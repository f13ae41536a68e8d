"""A whole training in this process, from Python: :func:`simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..engines import run_cohort, run_in_process
from ..engines.device.backend import checked_device
from ..engines.pool import checked_workers
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .progress import Progress
from .result import RunResult

_ENGINES = ("cohort", "inprocess")
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
    **settings: Value,
) -> RunResult:
    """Train with simulated machines in this process, to the end; nothing is written.

    Parameters
    ----------
    config : RunConfig or mapping, optional
        A run configuration, or its hyphenated keys, such as those of a TOML file; default every key's default.
    engine : {"cohort", "inprocess"}
        ``cohort`` asks machines together and without messages, and is the faster one; ``inprocess`` sends the app's
        messages. The noise and the ledgers are the same, and the model is up to the rounding of gradients.
    on_progress : callable, optional
        Called after every round with its :class:`~murmurfl.app.runs.progress.Progress`.
    workers : int, optional
        Over how many processes the cohort engine's machines are spread; the model is the same to the last bit.
    ray_address : str
        A Ray cluster on which they are (:func:`~murmurfl.app.engines.run_cohort`); default this computer.
    device : str
        What computes the cohort engine's gradients and noise: ``cuda`` for a GPU; default NumPy. The noise of a device
        has other bits, and the same law.
    **settings
        Run-config keys with underscores for hyphens, such as ``num_rounds=5``; they win over ``config``. ``epsilon``
        may stand for ``mu``. A task, model, features, method or mechanism of one's own is named as everywhere,
        ``task="package.module:make_task"``.

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
    Machines have seeded keys: whoever knows the seed can take the noise out again. :attr:`RunResult.guarantee` says
    what the same run on real machines would guarantee, and protects no data by itself.

    Examples
    --------
    >>> result = simulate(num_rounds=2, epsilon=8.0)
    >>> result.guarantee.trust, round(result.epsilon, 3)
    ('untrusted-server', 8.0)
    """
    if engine not in _ENGINES:
        reason = f" {_RAY}" if engine == "ray" else ""
        raise ConfigurationError(f"Expected engine 'cohort' or 'inprocess', got {engine!r}.{reason}")
    given = config.to_mapping() if isinstance(config, RunConfig) else config or {}
    own = {name.replace("_", "-"): value for name, value in settings.items()}
    checked_workers(workers, engine, ray_address)
    checked_device(device, engine, workers, ray_address)
    settled = RunConfig.from_mapping(layered(given, own))
    if engine == "cohort":
        spread: dict[str, Any] = {"workers": workers, "ray_address": ray_address, "device": device}
        return run_cohort(settled, on_progress=on_progress, rehearsed=True, **spread)
    return run_in_process(settled, on_progress=on_progress, rehearsed=True)
