"""The default run: what ``murmurfl run`` starts where nothing else is asked for.

The defaults of run-config keys are plain ones that suit any task and method. The default run is a good one on the data
that come along, and what it sets beside them is listed here. Whoever names another task, method, model, preset or
partition starts from the plain defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...privacy.setting import Value
from .layers import layered
from .run_config import run_keys

DEFAULT_RUN: Mapping[str, Value] = {
    "mu": 1.0,
    "features": "soft-gradients",
    "passes": 4,
    "mechanism": "decay",
    "decay": 0.5,  # samples return: more of the noise is better kept than where each is used once
}
"""Settings of the default run beside ``batch-size``; how they were chosen: docs/tuning.md."""

RELEASES_A_PASS = 2
"""Its ``batch-size`` is half of a machine's samples, however many machines there are."""

_SAMPLES = 1438
"""Training samples of scikit-learn's digits."""
_OF_ANOTHER = ("strategy", "task", "model", "preset", "partition", "max-participations")
"""Keys of which another value makes another run."""


def started_with(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Settings of a run with what the default run sets beside them, where it is that one with a few changes.

    Parameters
    ----------
    settings : mapping
        By hyphenated key, as they were given; they win.

    Notes
    -----
    Policies of simulated machines follow from the result as from any settings.
    """
    if not is_default_run(settings):
        return dict(settings)
    own: dict[str, Value] = {**DEFAULT_RUN, "batch-size": _batch_size(settings)}
    if "mechanism" in settings:  # and with it go its options
        own = {name: value for name, value in own.items() if run_keys()[name].read_by != "mechanism"}
    return layered(own, settings)


def is_default_run(settings: Mapping[str, Value]) -> bool:
    """Whether settings are those of the default run, up to changes that leave it the same run."""
    return all(_given(settings, name) == run_keys()[name].default for name in _OF_ANOTHER)


def _batch_size(settings: Mapping[str, Value]) -> int:
    samples = int(_given(settings, "training-samples")) or _SAMPLES - int(_given(settings, "validation-samples"))
    return max(samples // (RELEASES_A_PASS * max(int(_given(settings, "num-clients")), 1)), 1)


def _given(settings: Mapping[str, Value], name: str) -> Value:
    return settings.get(name, run_keys()[name].default)
