"""How many clients a useful model takes, and what forecasts are worth: ``python -m benchmarks.forecast``.

The first is arithmetic. For the second small trainings run with so much noise that their forecast is a given one, and
what they keep of what is learnt without noise is written down (:mod:`.small_trainings`). ``verdict`` measures how often
the planner is right about whether federating is worth it: its rehearsals on made-up data are held against trainings and
against single clients on real and made-up tables, by how labels are dealt. Finished situations lie in the document and
are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from murmurfl.app.engines.start import run_cohort
from murmurfl.app.planning import decide
from murmurfl.app.planning.rehearsal import ALIKE, SKEWED, LocalBaseline, SiteMix, judged, local_baselines
from murmurfl.app.runs.experiment import plan_request_of
from murmurfl.app.runs.simulated_figures import alone
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import UpdatePolicy
from murmurfl.clients.adapters.update_policy import update_guarantee
from murmurfl.privacy import Forecast, Guarantee, PrivacyPolicy, caption, gdp_mu, policy_guarantee
from murmurfl.privacy.accounting.noise_forecast import TYPICAL, kept_share
from murmurfl.privacy.forecast_text import rounded_count
from threadpoolctl import threadpool_limits

from .situations import Situation
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


# ------------------------------------------------------------------------------------------- worth federating, or not
VERDICT_DATA: Mapping[str, tuple[int, ...]] = {
    "digits": (5, 20, 50),
    "breast-cancer": (5, 20),
    "clouds-of-10": (20, 100),
    "people-b": (20, 200),
    "texts": (20, 100),
    "recidivism": (10, 50),
}
"""Data of the verdict's situations, and numbers of clients."""
VERDICT_EPSILONS = (0.5, 2.0, 8.0)
VERDICT_TRUSTS = ("untrusted-server", "secure-aggregation")
MIXES = (ALIKE, SiteMix("label-skew", 1.0), SiteMix("label-skew", 0.3), SiteMix("label-skew", 0.1))
"""How labels are dealt, the least skewed first."""
_VERDICT_SEEDS, _ALONE_SEEDS = (301, 302, 303, 304, 305), (301, 302)
_NO_DIFFERENCE, _ERRORS = 1.0, 2.0
"""Points, and standard errors, by which a federation and one client must differ to be told apart."""


def _verdict_settings(data: str, clients: int, epsilon: float, trust: str) -> dict[str, Any]:
    """Return the run-config keys of a situation."""
    found = Situation(data, clients, epsilon).settings
    if data == "digits":
        found = {**found, "task": "digits", "features": "soft-gradients"}
    return {**found, "trust": trust, "strategy": "auto", "partition": "iid"}


def _dealt(config: RunConfig, sites: SiteMix, seed: int) -> RunConfig:
    return replace(sites.configured(config), seed=seed)


def verdict(data: str, clients: int, epsilon: float, trust: str) -> dict[str, Any]:
    """Return what the planner foretells in a situation, and what trainings and single clients reach, in percent."""
    wanted = plan_request_of(RunConfig.from_mapping(_verdict_settings(data, clients, epsilon, trust)))
    chosen = decide(wanted).chosen
    foretold = local_baselines(chosen.problem, wanted.work_out, MIXES)
    federation = [run_cohort(replace(chosen.config, seed=seed)).accuracy or 0.0 for seed in _VERDICT_SEEDS]
    singles = [[alone(_dealt(chosen.config, sites, seed)) for seed in _ALONE_SEEDS] for sites in MIXES]
    return {
        "strategy": chosen.strategy,
        "kept": [_written([one.federation, one.alone, one.own_lead]) for one in foretold],
        "federation": _written([100 * one for one in federation]),
        "alone": [_written([100 * (one.accuracy or 0.0) for one in each]) for each in singles],
        "alone_on_own": [_written([100 * (one.own_mix or 0.0) for one in each]) for each in singles],
    }


def _written(figures: Sequence[float]) -> str:
    """Return figures in one line of the document."""
    return " ".join(f"{one:.4g}" for one in figures)


def _read(line: str) -> list[float]:
    return [float(one) for one in line.split()]


def _verdict_name(data: str, clients: int, epsilon: float, trust: str) -> str:
    return f"{data}, {clients} clients, epsilon {epsilon:g}, {trust}"


def measure_verdicts() -> None:
    """Measure the situations that are missing, and write each down."""
    logging.disable(logging.CRITICAL)
    document = json.loads(DEFAULT.read_text())
    made = document.setdefault("verdicts", {})
    many = [(data, clients) for data, sizes in VERDICT_DATA.items() for clients in sizes]
    with threadpool_limits(limits=1):
        for (data, clients), epsilon, trust in itertools.product(many, VERDICT_EPSILONS, VERDICT_TRUSTS):
            name = _verdict_name(data, clients, epsilon, trust)
            if name not in made:
                made[name] = verdict(data, clients, epsilon, trust)
                DEFAULT.write_text(json.dumps(document, indent=1) + "\n")


class _Cell(NamedTuple):
    """One situation with one way of dealing labels, judged on everybody's data or on clients' own mixes."""

    truth: bool
    said: tuple[bool, ...]  # The verdict by the mix that is declared
    undeclared: bool  # The verdict without a declaration, for sites that are alike or for skewed ones


def _verdict_cells(document: Mapping[str, Any], *, own: bool) -> tuple[list[tuple[int, _Cell]], int]:
    """Return cells with the place of their mix in :data:`MIXES`, and how many more make no difference."""
    found, alike = [], 0
    for row in document["verdicts"].values():
        foretold = [LocalBaseline(sites, *_read(line)) for sites, line in zip(MIXES, row["kept"], strict=True)]
        nearer = [judged(foretold[0], one) for one in foretold]
        said = tuple(one.own_lead < 0 if own else one.is_worth for one in nearer)
        undeclared = tuple(
            judge.own_lead < 0 if own else one.is_worth for one, judge in zip(foretold, nearer, strict=True)
        )
        federation = _read(row["federation"])
        for place, singles in enumerate(map(_read, row["alone_on_own" if own else "alone"])):
            gain = statistics.mean(federation) - statistics.mean(singles)
            errors = [statistics.variance(one) / len(one) for one in (federation, singles)]
            if abs(gain) < max(_NO_DIFFERENCE, _ERRORS * math.sqrt(sum(errors))):
                alike += 1
            else:
                found.append((place, _Cell(gain > 0, said, undeclared[MIXES.index(SKEWED) if place else 0])))
    return found, alike


def _balanced(told: Sequence[tuple[bool, bool]]) -> str:
    """Return the mean of the shares that are right of either truth, with both; empty where one truth is missing."""
    shares = []
    for truth in (True, False):
        right = [said == truth for is_true, said in told if is_true == truth]
        if not right:
            return "one answer only"
        shares.append((100 * statistics.mean(right), len(right)))
    (yes, many), (no, few) = shares
    return f"{(yes + no) / 2:.0f} ({yes:.0f} of {many} worth it, {no:.0f} of {few} not)"


def verdict_table(document: Mapping[str, Any]) -> str:
    """Return the table of docs/tuning.md: balanced accuracy of the verdict, by what is declared."""
    lines = ["| declared | on everybody's data | on a site's own mix |", "|---|---|---|"]
    kinds: dict[str, Callable[[int], Sequence[int]]] = {
        "the true mix": lambda place: [place],
        "one step off": lambda place: [one for one in (place - 1, place + 1) if 0 <= one < len(MIXES)],
        "any wrong mix": lambda place: [one for one in range(len(MIXES)) if one != place],
    }
    both = [_verdict_cells(document, own=own) for own in (False, True)]
    nothing = ([(cell.truth, cell.undeclared) for _, cell in cells] for cells, _ in both)
    lines.append(f"| nothing: it says both, and each counts where it is true | {' | '.join(map(_balanced, nothing))} |")
    for name, declared in kinds.items():
        told = ([(cell.truth, cell.said[one]) for place, cell in cells for one in declared(place)] for cells, _ in both)
        lines.append(f"| {name} | {' | '.join(map(_balanced, told))} |")
    counts = " and ".join(f"{alike} of {alike + len(cells)}" for cells, alike in both)
    terms = f"In {counts} cells a federation and one client differ by less than a point or two standard errors."
    return "\n".join([*lines, "", terms])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("forecast", "verdict"), default="forecast")
    if parser.parse_args().part == "verdict":
        measure_verdicts()
        print(verdict_table(json.loads(DEFAULT.read_text())))
        return
    document = json.loads(DEFAULT.read_text()) if DEFAULT.exists() else {}
    DEFAULT.write_text(json.dumps({**document, **measure()}, indent=1) + "\n")
    print(table(json.loads(DEFAULT.read_text())))


if __name__ == "__main__":
    main()
