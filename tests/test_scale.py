"""The estimate that is made from measured rows: planted parts are found, and what it says follows from them."""

from dataclasses import replace

import pytest

from benchmarks import estimate, scale

MIB = 2**20


def row(clients, rounds, *, kept=1, partition=50, engine=20, asked=800, data=600, parameters=790, own=1_000):
    """A row of a simulation that takes so many bytes a client."""
    took_part = min(clients, rounds * 1_000)
    prepared = 190 + clients * (partition + data) / MIB
    last = prepared + (clients * engine + took_part * asked) / MIB
    return {
        "clients": clients, "per_round": 1_000, "parameters": parameters, "rounds": rounds, "kept": kept,
        "asked": took_part, "acks_bytes": 90 * took_part, "data_mib": clients * data / MIB, "import_mib": 190,
        "prepared_mib": prepared, "engine_mib": prepared, "last_mib": last, "peak_mib": last + 5,
        "prepare_s": clients * 1e-5, "state_s": clients * 1e-6, "write_s": clients * 1e-6,
        "updates_per_second": own, "seconds": rounds,
    }  # fmt: skip


ROWS = [
    row(1_000, 20, kept=0),
    row(1_000_000, 20, kept=0, data=3_000, parameters=7_850, own=6_000),
    row(100_000, 20),
    row(100_000, 120),
    row(1_000_000, 20),
]


def test_parts_that_were_planted_are_found():
    found = estimate.parts(ROWS)
    assert found.partition == pytest.approx(50)
    assert found.engine == pytest.approx(20)
    assert found.asked == pytest.approx(800)
    assert found.acks == pytest.approx(90)
    assert found.data == pytest.approx(3_000)
    assert (found.before_s, found.after_s) == pytest.approx((1e-5, 2e-6))
    assert (found.updates_per_second, found.parameters) == (6_000, 7_850)


def test_a_cluster_has_room_for_what_was_measured_and_not_a_node_more():
    found = estimate.parts(ROWS)
    made = estimate.cluster(found, 1_000)
    room = estimate.USABLE * estimate.NODE_GIB
    every = (1e8 * 50 + estimate.CORES * (190 * MIB + 1e8 * 20)) / 2**30
    split = 1e8 * (800 + 3_000) / 2**30
    assert made.node_gib == pytest.approx(every + split / made.nodes)
    assert made.node_gib <= room < every + split / (made.nodes - 1)
    busier = estimate.cluster(replace(found, updates_per_second=60), 1_000)
    updates = 1_000 / min(estimate.CORES * made.nodes, 1_000) / estimate.EFFICIENCY  # of one core
    assert busier.round_s - made.round_s == pytest.approx(updates * (1 / 60 - 1 / 6_000))


def test_the_table_says_what_follows_and_nothing_where_rows_are_missing():
    text = scale.table(ROWS)
    assert "takes 70 bytes: 50 for which samples are its own, 20 for the rest" in text
    assert "**100,000,000 clients, on paper**: nobody ran this" in text
    assert "| 1,000,000 | 1,000 | 7,850 | 20 | 6,000 |" in text
    assert "on paper" not in scale.table(ROWS[:-1])
    assert scale.table(ROWS[:1]).count("\n") == 2
