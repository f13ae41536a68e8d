"""Speed at a glance: each engine beside a peer that does equal work, measured in turns in one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from . import bare
from .peers import in_process
from .unmeasured import is_missing

Row = tuple[str, float, float | None, float | None]
"""A name, updates a second, times its peer's, and peak memory in MiB, where they are known."""


def pairs(document: Mapping[str, Any], *, loop: bool) -> list[tuple[Row, Row]]:
    """Ours and its peer, for every pair that was measured; the bare loop, which is no framework, only where asked."""
    makers = {"inprocess": _in_process, "ray": _on_ray, **({"bare": _cohort} if loop else {})}
    return [make(document[name]) for name, make in makers.items() if not is_missing(document.get(name))]


def _in_process(measured: Mapping[str, Any]) -> tuple[Row, Row]:
    rates, peer = measured["updates_per_second"], measured["pfl"]
    times, peaks = measured["inprocess / pfl"]["median"], measured["peak_mib"]
    ours = ("murmurfl in process, noisy SGD", rates[in_process.EQUAL], times, peaks[in_process.EQUAL])
    return ours, (
        f"pfl {peer['version']}, the same work",
        rates[in_process.PFL],
        None,
        statistics.median(peer["peak_mib"]),
    )


def _on_ray(measured: Mapping[str, Any]) -> tuple[Row, Row]:
    strategy, times = next(iter(measured["ratios"].items()))
    ours, plain = (measured["candidates"][name] for name in (strategy, f"fedavg:{strategy}"))
    name = "Flower's FedAvg on Ray, as many bytes, no privacy"
    return (
        ("murmurfl on Flower's Ray, DP-μ²-FL", ours["rate"], times, ours["peak_mib"]),
        (name, plain["rate"], None, plain["peak_mib"]),
    )


def _cohort(measured: list[Mapping[str, Any]]) -> tuple[Row, Row]:
    found = measured[0]["measured"]
    ours, loop = found[bare.COHORT], found[bare.LOOP]
    times = 1 / ours["times_bare"]
    name = "a bare torch loop, the arithmetic alone, no privacy"
    return (
        ("murmurfl, cohort engine, DP-μ²-FL", ours["updates_per_second"], times, ours["peak_mib"]),
        (name, loop["updates_per_second"], None, loop["peak_mib"]),
    )


def table(document: Mapping[str, Any], *, loop: bool = True) -> str:
    """Return the pairs as Markdown."""
    lines = ["| | updates/s | times its peer below | peak memory MiB |", "|---|---|---|---|"]
    for name, rate, times, peak in (row for pair in pairs(document, loop=loop) for row in pair):
        beside = "" if times is None else f"{times:.2f}"
        lines.append(f"| {name} | {rate:,.0f} | {beside} | {'' if peak is None else f'{peak:,.0f}'} |")
    return "\n".join(lines)
