"""How many clients a useful model takes, and what forecasts are worth: ``python -m benchmarks.forecast``.

The first is arithmetic. For the second small trainings run with so much noise that their forecast is a given one, and
what they keep of what is learnt without noise is written down (:mod:`.small_trainings`).
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from murmurfl.clients import UpdatePolicy
from murmurfl.clients.adapters.update_policy import update_guarantee
from murmurfl.privacy import Forecast, Guarantee, PrivacyPolicy, caption, gdp_mu, policy_guarantee
from murmurfl.privacy.accounting.noise_forecast import TYPICAL, kept_share
from murmurfl.privacy.forecast_text import rounded_count

from .small_trainings import RATIOS, SAMPLES, UPDATES, SampleTraining, UpdateTraining

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "forecast.json"
SEEDS = (1, 2, 3)

_PARAMETERS = (100, 10_000, 1_000_000)
_EPSILONS = (2.0, 4.0, 8.0)
_DELTA = 1e-5
_CLIENTS = 1000
"""Of the forecasts that are scaled to the number that is needed; any would do."""
_FEWEST_SUMMED = 4
"""Clients of which half are honest, and more than one."""
_SAMPLES = (100, 1000)


def _over_longest(parameters: int, mu: float) -> float:
    """Return updates with all data of a client protected."""
    return 2.0 * math.sqrt(parameters / _CLIENTS) / mu


def _clients(ratio: float, parameters: int, mu: float, *, unit: str, summed: bool) -> str:
    """How many clients make it useful, as people read it."""
    of_sample = unit == "sample"
    made = Forecast(
        ratio,
        parameters,
        _CLIENTS,
        _CLIENTS,
        rounds=10,
        mu=mu,
        delta=_DELTA,
        clip_unit="sample" if of_sample else "update",
        unit=unit,
    )
    sums = made.summed() if summed else None
    needed = made.clients_needed if sums is None else max(sums.clients_needed, _FEWEST_SUMMED)
    return rounded_count(needed)


def needed() -> str:
    """Return the table of docs/swap-in.md: clients by the model's size and epsilon, for each of the ways."""
    few, many = _SAMPLES
    lines = [
        f"| values, d | ε | all data of a client | the same, sums only | one sample of {few} | one of {many:,} | "
        f"one of {many:,}, sums only |",
        "|---|---|---|---|---|---|---|",
    ]
    for parameters in _PARAMETERS:
        for epsilon in _EPSILONS:
            mu = gdp_mu(epsilon, _DELTA)
            ratio = _over_longest(parameters, mu)
            cells = [
                _clients(ratio, parameters, mu, unit="client", summed=False),
                _clients(ratio, parameters, mu, unit="client", summed=True),
                *(_clients(ratio / samples, parameters, mu, unit="sample", summed=False) for samples in _SAMPLES),
                _clients(ratio / many, parameters, mu, unit="sample", summed=True),
            ]
            lines.append(f"| {parameters:,} | {epsilon:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _caption()])


def _caption() -> str:
    """Return what the table's epsilons are true of: any epsilon of it, for ten updates or full batches."""
    rounds = 10
    updates = {"clip_norm": 1.0, "mu": 1.0, "max_participations": rounds, "delta": _DELTA}
    samples = {
        **updates,
        "batch_selection": "full_batch",
        "batch_size": 1,
        "mechanism": "independent",
        "release_rule": "paper",
    }
    told: list[tuple[str, Guarantee]] = [
        ("all data of a client", update_guarantee(UpdatePolicy(**updates), 1.0)),
        ("one sample", policy_guarantee(PrivacyPolicy(**samples), 1.0)),
    ]
    sums = "Sums only: the same if one helper and h clients of each sum are honest, h half of the clients"
    return f"{caption(told)} {sums}; sqrt(h) times the mu in the worst case."


def _one(training: UpdateTraining | SampleTraining) -> dict[str, Any]:
    """Return what a training keeps at each ratio."""
    kept: dict[str, list[float]] = {}
    for ratio in RATIOS:
        outcomes = [training.at(ratio, seed) for seed in SEEDS]
        kept[f"{ratio:g}"] = [outcome.kept for outcome in outcomes]
    forecast = outcomes[0].forecast
    typical = training.noiseless()[1] if isinstance(training, UpdateTraining) else None
    return {
        "name": training.name,
        "parameters": forecast.num_parameters,
        "clients": forecast.clients,
        "typical": typical,
        "kept": kept,
    }


def measure() -> dict[str, Any]:
    """Every training at every ratio."""
    logging.disable(logging.CRITICAL)
    return {"rows": [_one(training) for training in (*UPDATES, *SAMPLES)], "seeds": len(SEEDS)}


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    typical = row["typical"]
    yield f"{row['parameters']:,}"
    yield f"{row['clients']:,}"
    yield "" if typical is None else f"{typical:.2f}"
    for values in row["kept"].values():
        yield f"{100 * statistics.mean(values):.0f}"


def table(document: Mapping[str, Any]) -> str:
    """Return the table of docs/swap-in.md: what was left, beside the forecast."""
    expected = " | ".join(f"{100 * kept_share(ratio):.0f}" for ratio in RATIOS)
    heads = " | ".join(f"ratio {ratio:g}" for ratio in RATIOS)
    parts = f"{TYPICAL['update']:g} / {TYPICAL['sample']:g}"
    return "\n".join(
        [
            f"| training | d | M | typical | {heads} |",
            f"|---|---|---|---|{'---|' * len(RATIOS)}",
            f"| **forecast**, of updates / samples | | | {parts} | {expected} |",
            *(f"| {row['name']} | {' | '.join(_cells(row))} |" for row in document["rows"]),
        ]
    )


def main() -> None:
    """Measure and write."""
    DEFAULT.write_text(json.dumps(measure(), indent=1) + "\n")
    print(table(json.loads(DEFAULT.read_text())))


if __name__ == "__main__":
    main()
