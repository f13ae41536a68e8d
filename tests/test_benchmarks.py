"""What the benchmarks say of what they measured: from small documents that are made up here."""

import json
import math
import sys

import numpy as np
import pytest
from murmurfl.privacy import gdp_epsilon, gdp_mu

import benchmarks.__main__ as benchmarks
from benchmarks import bare, collusion, glance, images, noise, pages, ray, unmeasured


def turn(seconds, updates=100, start_s=1.0):
    return {
        "updates": updates,
        "seconds": seconds,
        "processor_s": seconds,
        "process_s": start_s + seconds,
        "process_processor_s": start_s + seconds,
        "parameters": 7_850,
        "peak_mib": 500,
    }


def bare_row(loop, ours, plain):
    """The row of turns that took so many seconds."""
    runs = {bare.LOOP: [turn(s) for s in loop], bare.COHORT: [turn(s, start_s=0.5) for s in ours]}
    return bare.row(bare.SIZES[0], {**runs, bare.NUMPY: [turn(s) for s in plain]})


def of_ray(ours=200.0, plain=180.0):
    def candidate(rate):
        parts = dict.fromkeys(ray.PARTS, 0.1)
        return {
            "rate": rate, "range": [rate, rate], "start_s": 1.0, "median_round_s": 0.2, "peak_mib": 1_000,
            "bytes": dict.fromkeys(ray.SIZES, 64_000), "parts_ms": parts,
        }  # fmt: skip

    candidates = {"mu2": candidate(ours), "fedavg:mu2": candidate(plain)}
    return {
        "nodes": 100, "per_round": 50, "parameters": 7_850, "rounds": 40, "repeats": 1, "cores": 2,
        "candidates": candidates, "ratios": {"mu2": ours / plain},
    }  # fmt: skip


def in_process(ours=2_000.0, pfl=800.0):
    return {
        "pfl": {"version": "0.6.0", "peak_mib": [800, 900]},
        "peak_mib": {"noisy-sgd": 150},
        "updates_per_second": {"pfl": pfl, "noisy-sgd": ours},
        "inprocess / pfl": {"median": ours / pfl},
    }


WHOLE = {"inprocess": in_process(), "ray": of_ray(), "bare": [bare_row([1.0], [1.25], [2.0])]}


def test_a_ratio_to_the_bare_loop_is_that_of_each_turn():
    row = bare_row(loop=[1.0, 2.0, 4.0], ours=[1.2, 2.8, 4.8], plain=[2.0, 4.0, 8.0])
    ours = row["measured"][bare.COHORT]
    assert ours["times_bare"] == pytest.approx(1.2)
    assert ours["range"] == pytest.approx([1.2, 1.4])
    assert ours["updates_per_second"] == pytest.approx(100 / 2.8)
    text = bare.table([row])
    assert "1.20 (1.20 to 1.40)" in text
    assert ours["whole_times_bare"] == pytest.approx(5.3 / 5)  # of ratios 0.85, 1.1, 1.06
    assert "| 3.30 | 1.06 (0.85 to 1.10) | 1.06 |" in text
    assert "at most 0.9 at d = 7,850" in text


def test_peers_of_equal_work_stand_below_each_engine():
    names = [name for pair in glance.pairs(WHOLE, loop=True) for name, *_ in pair]
    assert ["pfl" in name or "FedAvg" in name or "torch loop" in name for name in names] == [False, True] * 3
    assert glance.pairs(WHOLE, loop=False) == glance.pairs(WHOLE, loop=True)[:2]
    lines = glance.table(WHOLE).splitlines()
    assert lines[2].endswith("| 2,000 | 2.50 | 150 |")
    assert lines[4].endswith("| 200 | 1.11 | 1,000 |")
    assert lines[6].endswith("| 80 | 0.80 | 500 |")


def test_parts_that_are_missing_are_no_rows_and_are_said_to_be_missing():
    failed = {unmeasured.WHY: "URLError"}
    assert len(glance.pairs({"bare": WHOLE["bare"], "inprocess": failed}, loop=True)) == 1
    assert unmeasured.shown(failed, bare.table) == "Not measured: URLError where the others ran."
    assert unmeasured.shown(None, bare.table) == "Not measured yet."


def test_pages_are_written_with_parts_missing(monkeypatch):
    found = pages.document("performance")
    monkeypatch.setattr(
        pages, "document", lambda name: {"computer": found["computer"]} if name == "performance" else {}
    )
    blocks = pages.BLOCKS["docs/performance.md"]
    others = {name: blocks[name] for name in blocks.keys() - {"footprint"}}
    said = {name: write() for name, write in others.items()}
    assert {said[name] for name in said.keys() - {"computer"}} == {"Not measured yet."}


def test_a_part_that_fails_is_noted_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def refuse():
        raise OSError("no network at /somewhere")

    made = {"peers": (refuse, str), "noise": (lambda: {"rows": 1}, str)}
    monkeypatch.setattr(benchmarks, "parts", lambda repeats: made)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--json", str(tmp_path / "all.json")])
    benchmarks.main()
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["peers"] == {unmeasured.WHY: "OSError"}
    assert document["noise"] == {"rows": 1}
    assert "Not measured: OSError where the others ran." in capsys.readouterr().out


def test_every_part_has_its_place_on_the_page():
    assert benchmarks.parts(1).keys() <= pages.BLOCKS["docs/performance.md"].keys()
    assert set(benchmarks.NEED_PEERS) <= benchmarks.parts(1).keys()


def test_noise_stands_beside_torch_and_documents_of_before_are_read():
    seconds = {"fast": 2e-5, noise.TORCH: 4e-5, "exact": 1e-4, noise.VERSION_1: 1e-4, "NumPy PCG64 float64": 8e-5}
    streams = {noise.REFERENCE: 1e-3}
    document = {
        "rows": [{"size": 7_850, "together": 50, "seconds": seconds}],
        "stream size": 10,
        "streams": streams,
    }
    assert "| 7,850, 50 rows at once |" in noise.table(document)
    assert "| 0.50 | 0.25 | 1.00 |" in noise.table(document)
    del seconds[noise.TORCH]
    assert "|  | 0.25 | 1.00 |" in noise.table(document)


def test_a_message_on_ray_stands_beside_one_of_flowers():
    assert "Beside transport a message takes 0.90 and 0.90 ms." in ray.table(of_ray())


@pytest.mark.long  # PyTorch takes seconds to import
@pytest.mark.parametrize("dense", [False, True])
def test_the_bare_loop_and_written_out_gradients_agree(dense):
    size = bare.Size(features=5, clients=4, per_round=2, rounds=3, dense=dense, target=1.3)
    found = bare.bare(size)
    assert (found["updates"], found["parameters"]) == (6, 60)


def test_written_out_gradients_are_those_of_softmax_regression():
    rng = np.random.Generator(np.random.Philox(key=1))
    model = bare.written_out(5, 10)
    points = [[rng.normal(size=(10, 5)), rng.normal(size=10)] for _ in range(2)]
    samples = rng.random((3, 5), dtype=np.float32), np.array([0, 3, 9])
    dense, known = (
        stacked(points, [3.0, -2.0], samples) for stacked in (model.stacked, super(bare.WrittenOut, model).stacked)
    )
    np.testing.assert_allclose(dense.norms(), known.norms(), rtol=1e-6)
    rows = np.empty((2, 60))
    for one, row in zip((dense, known), rows, strict=True):
        one.write(1, 0.5, row)
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("honest", collusion.HONEST)
def test_epsilon_against_a_coalition_is_that_of_the_honest_clients_noise(honest):
    """h' honest clients of h hide a sample as if noise were planned for h', and one client alone as its own does."""
    plan = collusion.plan_of(honest)
    alone = collusion.plan_of()
    assert collusion.epsilon_against(plan, honest) == pytest.approx(collusion.EPSILON, rel=1e-6)
    assert collusion.epsilon_against(plan, 1) == pytest.approx(plan.loss.worst_case.epsilon(collusion.DELTA), rel=1e-6)
    found = [collusion.epsilon_against(plan, left) for left in range(1, honest + 1)]
    assert found == sorted(found, reverse=True)
    # The same noise of each of h' clients is that of one alone with mu = planned mu x sqrt(h / h').
    for left in (2, honest // 2):
        mu = gdp_mu(collusion.EPSILON, collusion.DELTA) * math.sqrt(honest / left)
        assert collusion.epsilon_against(plan, left) == pytest.approx(gdp_epsilon(mu, collusion.DELTA), rel=1e-4)
    assert collusion.epsilon_against(alone, 1) == collusion.epsilon_against(alone, 50), "nobody else counts"


def test_the_table_of_coalitions_names_no_guarantee_against_a_trusted_server():
    lines = [line.split(" | ") for line in collusion.table().splitlines() if line.startswith("| ")]
    trusted = {line[0].removeprefix("| "): line[-1].removesuffix(" |") for line in lines}
    for who, figure in trusted.items():
        if "the server" in who:
            assert figure == "none", who
    assert trusted["readers of the model"] == "1"


def test_networks_have_cells_of_their_own_beside_frozen_features():
    data = "digits, 1,797 images"
    cells = list(images.cells([data, "docstrings, 2,100 texts"], networks=True))
    assert {(one, features) for one, features, _, _ in cells} == {(data, network) for network in images.OF_NETWORKS}
    assert {epsilon for *_, epsilon in cells} == {0.0, 3.0, 8.0}
    assert 85 < images.measured(data, images.NETWORK, "alone", 0.0, 0) < 97, "a tenth of the images, without noise"


def test_images_are_measured_cell_by_cell_and_shown_with_their_error():
    data = "digits, 1,797 images"
    assert images.measured(data, "soft-gradients", "central", 3.0, 0) > 85
    one, other = images.split(data, "soft-gradients", 0), images.split(data, "soft-gradients", 1)
    assert len(one.train_labels) == len(other.train_labels) == 1797 - len(one.test_labels)
    assert not np.array_equal(one.test_features, other.test_features)
    made = {data: {"soft-gradients": {"sums": {"3": {"0": 90.0, "1": 92.0}}, "no noise": {"0": {"0": 98.0}}}}}
    assert f"| {data} | soft-gradients | 3 |  | 91.0 ± 1.0 |  |  | 98.0 |  |" in images.table(made)
