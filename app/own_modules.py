"""Things of one's own that a run configuration names, ``package.module:Thing``, found in the current folder.

A command that is started as ``murmurfl`` does not look for modules where its user stands, as ``python -m`` does. So
where a run configuration names something of one's own, and only there, the current folder comes first in the search,
in this process and in those that an engine starts. On real nodes nothing of this applies: there such names come from
the operator's file and from nowhere else (:mod:`.nodes.config`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from .config import RunConfig, run_keys
from .keys import Value


def names_own(settings: Mapping[str, Value]) -> bool:
    """Whether settings, by hyphenated key, name something of one's own."""
    own = (one.name for one in run_keys().values() if one.names or one.own)
    return any(":" in str(settings.get(name, "")) for name in own)


def search_here() -> None:
    """Look for modules in the current folder first, as ``python -m`` does."""
    folder = str(Path.cwd())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def environment_for(config: RunConfig) -> dict[str, str]:
    """What the environment of an engine's processes needs, so that they find things of one's own where this one does.

    Parameters
    ----------
    config : RunConfig
    """
    if not names_own(config.to_mapping()):
        return {}
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *([before] if before else [])])}
