"""How machines bound gradients, where the run configuration may choose it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ...privacy.setting import refusal
from ..settings.run_config import run_keys

BOUNDING = frozenset({"clipping", "clip-stability", "samples-per-owner"})
"""The keys, of methods whose guarantee needs of a gradient only that it is no longer than S."""


class Bounds(Protocol):
    """What says how gradients are bounded: a run configuration, or an operator's file."""

    @property
    def clipping(self) -> str: ...

    @property
    def clip_stability(self) -> float: ...

    @property
    def samples_per_owner(self) -> int: ...


def bounding(config: Bounds, keys: Collection[str]) -> Mapping[str, Any]:
    """Fields of a policy that say how gradients are bounded; none for a method that does not read these keys.

    Raises
    ------
    ConfigurationError
        If there is a gamma and nothing that has one.
    """
    if "clipping" not in keys:
        return {}
    usual = run_keys()["clip-stability"].default
    if config.clipping != "automatic" and config.clip_stability != usual:
        raise refusal("clip_stability", f"{usual} unless clipping = 'automatic'", config.clip_stability)
    bounds = {"clipping": config.clipping or "clip", "clip_stability": config.clip_stability}
    return {**bounds, "samples_per_owner": config.samples_per_owner}
