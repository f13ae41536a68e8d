"""Settings of a paper, beside others that somebody wants in the place of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings.registry import mechanism_options_of, registry
from ..settings.run_config import run_keys
from ..settings.trust_settings import keys_of_trust


def without_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by hyphenated key, without those that nothing they name reads.

    For settings that were made for another method, task, partition or model than those that are now named beside them,
    such as a paper's when somebody changes its task.
    """
    chosen = {one.name: values.get(one.name, one.default) for one in run_keys().values() if one.names}
    reads = frozenset[str]().union(*(registry(name)[str(thing)].keys for name, thing in chosen.items()))
    own = {
        "mechanism": frozenset(mechanism_options_of(str(values.get("mechanism", "")))),
        "trust": keys_of_trust(values.get("trust", "")),
    }

    def is_read(name: str) -> bool:
        one = run_keys().get(name)
        return one is None or not one.read_by or one.name in own.get(one.read_by, reads)

    return {name: value for name, value in values.items() if is_read(name)}
