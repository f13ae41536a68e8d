"""Private statistics of a table as a rehearsal: simulated clients on one computer, with seeded keys.

What is released and what it costs stands in :mod:`murmurfl.privacy.queries.statistics`. Real clients release the
same by the strategy :class:`~murmurfl.strategies.Statistics`, each from a ledger and a key of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.one_shot_client import StatisticsClient
from ...clients.records.client_records import Items, check_columns, file_items, items_of
from ...clients.records.places import TableRows
from ...clients.records.schema import Schema, text_of
from ...privacy.accounting.gdp import check_count
from ...privacy.accounting.guarantee import SIMULATED, Guarantee, policy_guarantee, server_guarantee
from ...privacy.accounting.loss import NOTHING_ASSUMED, SumAssumption
from ...privacy.errors import ConfigurationError, InvalidRecordError
from ...privacy.ledger.ledger_records import MemoryLedger
from ...privacy.noise import SimulatedKeys
from ...privacy.queries.statistics import statistics_policy
from ...privacy.release.policy import PrivacyPolicy, Trust
from ...strategies.queries import Statistics, TableStatistics, noise_on_answers
from ...strategies.sums.secure_aggregation import SecureAggregation
from ..engines.direct import DirectClients

_SESSION = "statistics"


def counted_clients(
    rows: TableRows, parts: Sequence[NDArray[np.float64]], policy: PrivacyPolicy, seed: int
) -> DirectClients:
    """Return simulated clients that release statistics of their parts of a table."""

    def client(name: str) -> StatisticsClient:
        keys = SimulatedKeys(seed, name)
        return StatisticsClient(rows, parts[int(name)], policy, MemoryLedger(), keys, name=name)

    return DirectClients(len(parts), client)


def private_statistics(
    table: Any,
    schema: Schema,
    *,
    epsilon: float | None = None,
    mu: float = 0.0,
    delta: float = 1e-5,
    clients: int = 1,
    site: str = "",
    trust: Trust = "untrusted-server",
    min_honest: int = 0,
    mechanism: str = "",
    seed: int = 0,
) -> TableStatistics:
    """Return counts, means, histograms and quantiles of a table's columns, as simulated clients would release them.

    Parameters
    ----------
    table : path, DataFrame or list of mappings
        Records; of a file ``.csv``, ``.csv.gz`` or ``.parquet``.
    schema : Schema
        Names the columns and their public bounds and categories.
    epsilon, mu : float
        Privacy of the release; exactly one of them. Epsilon is at ``delta``.
    clients : int
        Over how many clients records are dealt, in turn.
    site : str
        In place of ``clients``: the column whose value says on which client a record is. It is public then, and not
        counted.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
    min_honest : int
        Clients that add their noise, under ``secure-aggregation``; default half of them.
    mechanism : str
        ``none`` for no noise, to compare with.
    seed : int
        Seed of the clients' keys.

    Returns
    -------
    TableStatistics
        ``found["age"].mean``, ``.quantile(0.5)``, ``.histogram``, and ``.bounds`` to scale by.

    Raises
    ------
    ConfigurationError
        If the table lacks a column, or a value is impossible.

    Notes
    -----
    It is a rehearsal: keys follow from ``seed``, so it protects nobody and is not to be published. Clients with keys
    of the operating system release the same for :class:`~murmurfl.strategies.Statistics`, which says what is promised.

    Examples
    --------
    >>> from murmurfl.clients import Column, Label, Schema
    >>> schema = Schema(columns={"age": Column(kind="integer", bounds=(0, 100))}, label=Label(column="ill", classes=2))
    >>> table = [{"age": str(20 + i % 41), "ill": i % 2} for i in range(4100)]
    >>> round(private_statistics(table, schema, epsilon=4)["age"].mean.value)
    40
    """
    check_count("clients", clients)
    if site and clients != 1:
        raise ConfigurationError(
            f"Expected a site column or a number of clients, got {site!r} and {clients}.", kind="conflict"
        )
    items = file_items(Path(table), schema) if isinstance(table, str | Path) else items_of(table)
    rows = TableRows(_without(schema, site))
    places, parts = _dealt(items, rows, clients, site)
    summed = trust == "secure-aggregation"
    sums = SumAssumption(min_honest or -(-len(parts) // 2), len(parts)) if summed else NOTHING_ASSUMED
    policy = statistics_policy(mu, epsilon=epsilon, delta=delta, trust=trust, mechanism=mechanism, sums=sums)
    options: dict[str, Any] = {
        "columns": rows.rows.columns,
        "num_clients": len(parts),
        "seed": seed,
        "session": _SESSION,
    }
    if summed:
        options["secure_aggregation"] = SecureAggregation(min_cohort=len(parts), helpers=1)
    keys = SimulatedKeys(seed, f"server, {_SESSION}")
    if trust == "trusted-server":
        options |= {"policy": policy, "noise_keys": keys}
    strategy = Statistics(**options)
    found = strategy.collect(counted_clients(rows, [places[part] for part in parts], policy, seed))
    return replace(found, guarantee=_guarantee(policy, strategy, keys))


def _guarantee(policy: PrivacyPolicy, strategy: Statistics, keys: SimulatedKeys) -> Guarantee:
    """Return what clients of this policy would guarantee with keys that nobody knows."""
    width = strategy.query.width
    if policy.trust == "trusted-server":
        mu = noise_on_answers(strategy.query, policy, keys).guaranteed_mu(width)
        return server_guarantee(policy, mu, "fresh", notes=(SIMULATED,))
    return policy_guarantee(policy, policy.plan(width).loss, notes=(SIMULATED,))


def _without(schema: Schema, site: str) -> Schema:
    """Return the schema of the columns that are counted: which client a record is on is known."""
    if site == schema.label.column and site:
        raise ConfigurationError(
            f"Expected another column than the label as site, got {site!r}.", kind="conflict", setting="site", got=site
        )
    if site not in schema.columns:
        return schema
    kept = {name: column for name, column in schema.columns.items() if name != site}
    return Schema(**{**dict(schema), "columns": kept})


def _dealt(
    items: Items, rows: TableRows, clients: int, site: str
) -> tuple[NDArray[np.float64], list[NDArray[np.intp]]]:
    """Return the places of all records, and which of them each client has."""
    columns = getattr(items, "columns", None)
    if columns is not None:
        check_columns(columns, rows.schema)
        if site and site not in columns:
            raise ConfigurationError(
                f"Expected a column {site!r} for the sites, got none of that name.", kind="unknown-name", setting="site"
            )
    places, sites = np.empty((len(items), len(rows.rows.columns))), []
    for number in range(len(items)):
        try:
            item = items[number]
            sites.append(text_of(item[site]) if site else "")
        except (InvalidRecordError, KeyError, TypeError):
            item = None
            sites.append("")
        places[number] = rows.places.of(item)
    if not site:
        parts = [np.arange(len(items))[number::clients] for number in range(min(clients, len(items)))]
    else:
        names = np.array(sites)
        parts = [np.flatnonzero(names == name) for name in sorted(set(sites))]
    if len(parts) < clients:
        raise ConfigurationError(
            f"Expected a record for each of {clients} clients, got {len(items)} records.",
            kind="out-of-range",
            setting="clients",
        )
    return places, parts
