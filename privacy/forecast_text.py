"""A forecast in words: the sentences that servers, clients and commands show to people.

The figures are those of a :class:`~murmurfl.privacy.Forecast`; nothing here computes another.
"""

from __future__ import annotations

import math
import sys
import textwrap
from typing import Any

from .accounting.gdp import gdp_epsilon
from .accounting.guarantee import UNIT_WORDS, rounded_up
from .accounting.noise_forecast import Change, Forecast

HELD = "which held in 4 of 5 other situations"
"""Frequency with which a rehearsed range held (docs/tuning.md)."""
_NOT_KNOWN = (
    "Whether these steps learn enough without noise it cannot know:",
    "see that first, in a simulation on public data, epsilon=1000.",
)
"""Advice where one release is one step of gradients: a user of many local steps a round easily has too few."""
_LITTLE = 20.0
"""An epsilon above this is said to protect little."""
_NEXT_TO_NOTHING = 3.0
"""Percent of what can be learnt."""
_DIGITS_BEFORE = 10


def forecast_sentence(forecast: Forecast) -> str:
    """Return what to expect, in one sentence or two."""
    if forecast.rehearsed is not None:
        low, high = (100 * share for share in forecast.rehearsed)
        return (
            f"Forecast before the first round: {forecast.verdict}. Rehearsed on made-up data of its shape, with its "
            f"noise, the run keeps {low:.0f} to {high:.0f} % of what can be learnt beyond always giving the usual "
            f"answer: an estimate, {HELD}. The noise in the average of all releases is {shortest(forecast.ratio)} "
            "times as long as the longest update."
        )
    percent = 100 * forecast.kept
    left = "next to nothing" if percent < _NEXT_TO_NOTHING else f"about {percent:.0f} %"
    return (
        f"Forecast before the first round: {forecast.verdict}. Over the whole training the noise in the average is "
        f"{shortest(forecast.ratio)} times as long as the longest update it can have, and an estimated "
        f"{shortest(forecast.typical_ratio)} times as long as a typical one; of what would be learnt without noise "
        f"{left} is likely to be left, an estimate too."
    )


def forecast_basis(forecast: Forecast) -> str:
    """Return the sentence with the numbers behind the forecast; mu is shown as an epsilon too."""
    epsilon = ""
    if math.isfinite(forecast.mu):
        known = rounded_up(gdp_epsilon(forecast.mu, forecast.delta))
        epsilon = f" (epsilon = {known} at delta = {forecast.delta:g})"
    honest = f", of which {forecast.honest:,} are honest" if forecast.trust == "secure-aggregation" else ""
    return (
        f"From {forecast.num_parameters:,} values, {forecast.clients:,} clients ({forecast.per_round:,} a "
        f"round{honest}), {forecast.rounds:,} rounds and noise for mu = {shortest(forecast.mu, up=True)}{epsilon} to "
        f"protect {UNIT_WORDS[forecast.unit]}."
    )


def forecast_advice(forecast: Forecast) -> list[str]:
    """Return what to change first, one change a line; of a useful model only what no forecast knows."""
    if forecast.verdict == "useful":
        return list(_NOT_KNOWN) if forecast.clip_unit == "sample" else []
    rows = [("as it is", forecast.typical_ratio)]
    rows += [(change_words(forecast, change), change.ratio) for change in forecast.changes()]
    room = max(len(words) for words, _ in rows)
    lines = (f"  {words:<{room}}  {shortest(ratio)}" for words, ratio in rows)
    return ["What would help, each alone: the noise over a typical update", *lines]


def change_words(forecast: Forecast, change: Change) -> str:
    """Return a change that would lessen the noise of a forecast, in a few words."""
    amount = change.amount
    match change.kind:
        case "sample":
            return f"privacy for one sample instead, {amount:,.0f} a client"
        case "sums":
            return f"secure aggregation, half of the clients honest{'' if forecast.alone else ', at best'}"
        case "both":
            return "both"
        case "clients":
            return f"{rounded_count(amount)} clients like these"
        case "samples":
            return f"{shortest(amount, up=True)} times as many samples on each client"
        case "parameters":
            return f"{rounded_count(amount, up=False)} values to train (frozen features)"
        case "epsilon":
            little = ", which protects little" if amount > _LITTLE else ""
            return f"epsilon = {shortest(amount, up=True)}{little}"


def forecast_lines(forecast: Forecast, width: int = 80) -> list[str]:
    """Return sentence, basis and advice, in lines of at most ``width`` characters."""
    sentences = (forecast_sentence(forecast), forecast_basis(forecast))
    return [*(line for one in sentences for line in textwrap.wrap(one, width)), *forecast_advice(forecast)]


def forecast_banner(forecast: Forecast, width: int = 80) -> list[str]:
    """Return the lines of a warning that cannot be missed."""
    useless = forecast.verdict == "useless"
    title = "THIS MODEL IS LIKELY TO BE USELESS" if useless else "MUCH OF THIS MODEL WILL BE NOISE"
    bar = "=" * width
    return [bar, title.center(width).rstrip(), bar, *forecast_lines(forecast, width), bar]


def forecast_document(forecast: Forecast) -> dict[str, Any]:
    """Return the figures as plain values, with the sentence and, unless it is useful, the changes that would help."""
    changes = [] if forecast.verdict == "useful" else forecast.changes()
    return {
        **forecast.document(),
        "sentence": forecast_sentence(forecast),
        "changes": [{"words": change_words(forecast, one), "ratio": one.ratio} for one in changes],
    }


def own_forecast_sentence(forecast: Forecast) -> str:
    """Return what a client's noise alone comes to, of a forecast for one client."""
    return (
        f"By itself, over all its releases, its noise is {shortest(forecast.ratio)} times as long as its longest "
        f"update; an average over {rounded_count(forecast.clients_needed)} clients like it is likely to be useful, "
        "an estimate."
    )


def shortest(value: float, *, up: bool = False) -> str:
    """Return a figure in two digits, for people; thousands and more with commas.

    Examples
    --------
    >>> shortest(0.0461), shortest(36.4), shortest(36.4, up=True), shortest(1234.5)
    ('0.046', '36', '37', '1,200')
    """
    if not (sys.float_info.min <= abs(value) < math.inf):  # also 0, NaN, and what has no second digit
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    rounded = (math.ceil(value / unit * (1 - 1e-9)) if up else round(value / unit)) * unit
    return f"{rounded:,.0f}" if rounded >= _DIGITS_BEFORE else f"{rounded:.2g}"


def rounded_count(value: float, *, up: bool = True) -> str:
    """Return a number of things for people, in two digits, rounded up or down."""
    unit = 10 ** max(math.floor(math.log10(max(value, 1))) - 1, 0)
    return f"{(math.ceil(value / unit) if up else math.floor(value / unit)) * unit:,}"
