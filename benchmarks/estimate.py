"""What 100,000,000 clients would take on a cluster: a paper estimate, from the parts that :mod:`.scale` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLIENTS = 10**8
CORES, NODE_GIB = 16, 64
"""Of a node: a common size, of the kind that is rented by the hour."""
USABLE = 0.8
"""The share of a node's memory that the simulation may take."""
EFFICIENCY = 0.8
"""Of many cores over one."""
NETWORK = 1e9
"""Bytes a second between nodes."""
LATENCY_S = 0.02
"""Of asking all workers and hearing from them, beside what the bytes take."""

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Parts:
    """What was measured, in bytes and seconds a client.

    Parameters
    ----------
    partition, engine : float
        Of a client that was never asked: who has which samples; and that there is such a client, in each process.
    asked : float
        Of one that was asked, beside that, all together.
    acks : float
        What the server's half remembers of one that was asked; a part of ``asked``.
    data : float
        Its samples.
    before_s, after_s : float
        Before the first round, data included, and after the last one.
    updates_per_second : float
        Of one core, at the largest M.
    parameters : int
        d.
    imports : float
        Bytes of a process that has done nothing.
    """

    partition: float
    engine: float
    asked: float
    acks: float
    data: float
    before_s: float
    after_s: float
    updates_per_second: float
    parameters: int
    imports: float

    @property
    def state(self) -> float:
        """Of a client that was never asked."""
        return self.partition + self.engine


def parts(rows: Rows) -> Parts | None:
    """Return the parts, from differences of rows; None if the rows do not say enough."""
    largest = max(row["clients"] for row in rows)
    alike = [row for row in rows if row.get("kept") == 1]
    most = [row for row in alike if row["clients"] == largest]
    fewer = sorted((row for row in alike if row["clients"] < largest), key=lambda row: row["rounds"])
    dear = [row for row in rows if row["clients"] == largest and row.get("kept") == 0]
    if not most or len(fewer) != 2 or not dear:
        return None
    many, (few, longer), wide = most[0], fewer, dear[0]
    clients, asked = many["clients"] - few["clients"], longer["asked"] - few["asked"]

    def between(end: str, start: str) -> float:
        return 2**20 * ((many[end] - many[start]) - (few[end] - few[start])) / clients

    data = 2**20 * (many["data_mib"] - few["data_mib"]) / clients
    return Parts(
        partition=between("prepared_mib", "import_mib") - data,
        engine=between("last_mib", "prepared_mib"),
        asked=2**20 * (longer["last_mib"] - few["last_mib"]) / asked,
        acks=longer["acks_bytes"] / longer["asked"],
        data=2**20 * wide["data_mib"] / wide["clients"],
        before_s=(wide["prepare_s"]) / wide["clients"],
        after_s=(many["state_s"] + many["write_s"]) / many["clients"],
        updates_per_second=wide["updates_per_second"],
        parameters=int(wide["parameters"]),
        imports=2**20 * many["import_mib"],
    )


@dataclass(frozen=True)
class Cluster:
    """A cluster that is large enough.

    Parameters
    ----------
    nodes : int
    node_gib : float
        What a node takes when every client was asked; the one with the server's half has fewer clients.
    round_s : float
        Of a round.
    """

    nodes: int
    node_gib: float
    round_s: float


def cluster(found: Parts, per_round: int) -> Cluster:
    """Return the fewest nodes that have memory for all clients, and how long a round takes on them."""
    # On every node, once for all of its processes, and once for each of them.
    every = CLIENTS * found.partition + CORES * (found.imports + CLIENTS * found.engine)
    split = CLIENTS * (found.asked - found.acks + found.data)
    server = CLIENTS * found.acks
    room = USABLE * NODE_GIB * 2**30
    nodes = math.ceil((split + server) / (room - every))
    workers = CORES * nodes
    compute = per_round / (found.updates_per_second * min(workers, per_round) * EFFICIENCY)
    travel = LATENCY_S + 8 * found.parameters * (2 + workers) / NETWORK  # two query points, and a sum of each worker
    return Cluster(nodes, (every + (split + server) / nodes) / 2**30, compute + travel)


def paragraphs(rows: Rows) -> str:
    """Return the parts and the estimate, in words and a table; empty where the rows do not say enough."""
    found = parts(rows)
    if found is None:
        return ""
    shown = [(m, cluster(found, m)) for m in (1_000, 100_000)]
    nodes = shown[0][1].nodes
    lines = [
        f"A client that was never asked takes {found.state:,.0f} bytes: {found.partition:,.0f} for which samples are "
        f"its own, {found.engine:,.0f} for the rest, and no object. One that was asked takes {found.asked:,.0f} "
        f"more, {found.acks:,.0f} of them on the server's side. Its samples come on top of that.",
        "",
        f"**{CLIENTS:,} clients, on paper**: nobody ran this. From the parts above, on nodes with {CORES} cores and "
        f"{NODE_GIB} GiB, d = {found.parameters:,}, one sample a client, every client asked once:",
        "",
        "| clients a round | nodes | memory of a node, GiB | seconds a round |",
        "|---|---|---|---|",
        *(f"| {m:,} | {one.nodes} | {one.node_gib:,.0f} | {one.round_s:,.2f} |" for m, one in shown),
        "",
        f"Before the first round it takes {CLIENTS * found.before_s / nodes / 60:,.1f} minutes, if every node makes "
        f"its own clients' data, and after the last one {CLIENTS * found.after_s / 60:,.1f}. Assumed, not measured: "
        "memory and time grow with M as between the rows above. Which samples are whose lies once on every node, the "
        "rest of a client that was never asked in each of its processes, and data and streams on one node only; the "
        f"first node has the server's half and fewer clients. {100 * USABLE:.0f} % of a node's memory can be used. A "
        f"core among many does {100 * EFFICIENCY:.0f} % of what one alone does. A round's messages take "
        f"{1000 * LATENCY_S:.0f} ms and travel at {NETWORK / 1e9:g} GB a second, and the first node adds up the sums "
        "of all workers.",
    ]
    return "\n".join(lines)
