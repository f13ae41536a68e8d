"""Keys that are set and that nothing that was chosen reads: refused, with who would read them."""

from __future__ import annotations

from collections.abc import Iterable

from ..privacy import MECHANISMS, TRUST_MODELS, ConfigurationError
from .keys import Key
from .mechanisms import mechanism_options_of
from .registry import registry
from .run_keys import RunKeys
from .trust import keys_of_trust


def refuse_unread(config: RunKeys, keys: Iterable[Key], reads: frozenset[str]) -> None:
    """Refuse keys that are set and that nothing that was chosen reads.

    Parameters
    ----------
    config : RunKeys
    keys : iterable of Key
        All there are.
    reads : frozenset of str
        Those that what was chosen reads beyond the common ones.

    Raises
    ------
    ConfigurationError
    """
    for one in keys:
        value = getattr(config, one.attribute)
        if not one.read_by or value == one.default:
            continue
        chosen = getattr(config, one.read_by)
        own = {"mechanism": mechanism_options_of(config.mechanism), "trust": keys_of_trust(config.trust)}
        if one.name not in own.get(one.read_by, reads):
            readers = readers_of(one)
            by = f"; it is read by {one.read_by} = {', '.join(readers)}" if readers else ""
            raise ConfigurationError(
                f"Expected {one.name} to be left at {one.default!r} with {one.read_by} = {chosen!r}, which does "
                f"not read it, got {value!r}{by}."
            )


def readers_of(one: Key) -> list[str]:
    """The built-in names of those that read a key; empty for one that every run reads."""
    if one.read_by == "mechanism":
        return [name for name in MECHANISMS if one.name in mechanism_options_of(name)]
    if one.read_by == "trust":
        return [name for name in TRUST_MODELS if one.name in keys_of_trust(name)]
    return registry(one.read_by).reading(one.name) if one.read_by else []
