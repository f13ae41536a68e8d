"""What a method refuses of a run configuration, whichever method it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...privacy import NO_NOISE
from ..config import RunConfig
from ..keys import refusal
from ..registry import registry
from ..trust import refused_trust
from .bounding import bounding
from .secret_order import check_secret_order

if TYPE_CHECKING:
    from .base import Method


def refuse_unserved(method: Method, config: RunConfig) -> None:
    """Refuse a run configuration whose keys a method cannot serve.

    Parameters
    ----------
    method : Method
    config : RunConfig

    Raises
    ------
    ConfigurationError
    """
    if config.trust_model not in method.trusts:
        others = [name for name, one in registry("strategy").items() if config.trust in one.trusts]
        raise refused_trust(config.trust, config.strategy, ("", *method.trusts), others)
    one_of = "one of {} with this strategy"
    if config.preset not in method.presets:
        raise refusal("preset", one_of.format(", ".join(map(repr, method.presets))), config.preset)
    if method.mechanisms is not None:
        allowed = ("", NO_NOISE, *method.mechanisms)
        if config.mechanism not in allowed:
            raise refusal("mechanism", one_of.format(", ".join(map(repr, allowed))), config.mechanism)
    units = ("", *method.clip_units)
    if config.clip_unit not in units:
        raise refusal("clip_unit", one_of.format(", ".join(map(repr, units))), config.clip_unit)
    if method.everybody and config.clients_per_round != config.num_clients:
        expected = f"num-clients = {config.num_clients} with this strategy"
        raise refusal("clients_per_round", expected, config.clients_per_round)
    if not method.may_lose and config.lost_replies:
        raise refusal("lost_replies", "0 with this strategy: it ends with the first lost reply", config.lost_replies)
    if not method.may_lose and config.run_dry:
        raise refusal("run_dry", "false with this strategy: it ends with the first refusal", config.run_dry)
    if method.strategy_type.late_answers == "refused":
        for name in ("wait_for", "ask"):
            if getattr(config, name) != 1:
                expected = "1 with this strategy: it has no use for a late answer, whose budget would be spent"
                raise refusal(name, expected, getattr(config, name))
    bounding(config, method.keys)
    check_secret_order(config)
    if not method.samples_return and config.passes > 1:
        raise refusal("passes", "1 with this strategy", config.passes)
    cancelling = method.mechanism(config) in ("cancelling", NO_NOISE)
    if config.schedule and not cancelling:
        raise refusal("schedule", "unset unless mechanism = 'cancelling'", config.schedule)
    if registry("task")[config.task].public and not method.uses_public:
        able = [repr(name) for name, one in registry("strategy").items() if one.uses_public]
        raise refusal("strategy", f"{' or '.join(able)} for this task", config.strategy)
