"""How far private statistics are off: ``python -m benchmarks.statistics_errors``, a few minutes on one core.

100 clients of 600 records, epsilon 0.5 at delta 1e-5, columns of five shapes: even, one-sided, two-sided, with three
tenths of its values in one place, and narrow. It prints the largest error over columns, of the mean (percent of the
range) and of five quantiles (points of rank; beside a value that many records have, of the place next to it).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from murmurfl.app.runs.private_statistics import counted_clients
from murmurfl.clients import Column, Label, Schema, TableRows
from murmurfl.privacy import SumAssumption, Trust, statistics_policy
from murmurfl.strategies import SecureAggregation, Statistics
from numpy.typing import NDArray

CLIENTS, RECORDS, EPSILON = 100, 600, 0.5
COLUMNS = (3, 10, 50)
ORDERS = (0.05, 0.25, 0.5, 0.75, 0.95)
TRUSTS: tuple[tuple[Trust, dict[str, SumAssumption]], ...] = (
    ("secure-aggregation", {"sums": SumAssumption(CLIENTS // 2, CLIENTS)}),
    ("untrusted-server", {}),
)


def values(number: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return the values of a column, from 0 to 1."""
    count = CLIENTS * RECORDS
    even = random.random(count)
    shapes = (
        even,
        random.beta(2, 8, count),
        random.beta(0.5, 0.5, count),
        np.where(random.random(count) < 0.3, 0.123, even),
        np.clip(random.normal(0.5, 0.05, count), 0.0, 1.0),
    )
    return shapes[number % len(shapes)]


def errors(columns: int, trust: Trust, sums: dict[str, SumAssumption]) -> tuple[float, float]:
    """Return the largest error of a mean in percent of the range, and of a quantile in points of rank."""
    random = np.random.Generator(np.random.Philox(key=columns))
    data = np.stack([values(number, random) for number in range(columns)], axis=1)
    named = {f"x{number}": Column(kind="number", bounds=(0, 1)) for number in range(columns - 1)}
    rows = TableRows(Schema(columns=named, label=Label(column=f"x{columns - 1}", bounds=(0, 1))))
    policy = statistics_policy(epsilon=EPSILON, trust=trust, **sums)
    options: dict[str, Any] = {"secure_aggregation": SecureAggregation(CLIENTS, 1)} if sums else {}
    strategy = Statistics(columns=rows.rows.columns, num_clients=CLIENTS, seed=1, session="statistics", **options)
    places = data * (rows.rows.columns[0].places - 1)
    found = strategy.collect(counted_clients(rows, [places[one::CLIENTS] for one in range(CLIENTS)], policy, 1))
    means, ranks, beside = [], [], 1.0 / (rows.rows.columns[0].places - 1)
    for number, one in enumerate(found.columns):
        mean = one.mean
        means.append(np.inf if mean is None else abs(mean.value - data[:, number].mean()))
        reach = beside if number % 5 == 3 else 0.0
        for order in ORDERS:
            quantile = one.quantile(order)
            value = np.inf if quantile is None else quantile.value
            low, high = np.mean(data[:, number] < value - reach), np.mean(data[:, number] <= value + reach)
            ranks.append(max(low - order, order - high, 0.0))
    return 100 * float(max(means)), 100 * float(max(ranks))


def table() -> str:
    """Return the table of docs/swap-in.md."""
    lines = ["| columns | sums only: mean | quantile | untrusted server: mean | quantile |", "|---|---|---|---|---|"]
    for columns in COLUMNS:
        cells = [f"{error:.1f}" for trust, sums in TRUSTS for error in errors(columns, trust, sums)]
        lines.append(f"| {columns} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print(table())
