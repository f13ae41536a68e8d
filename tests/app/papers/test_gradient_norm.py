"""Stationary points: rates fitted to gradient norms, steps chosen on seeds of their own, and the reproduction."""

import json
import math
import os

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from murmurfl.app.methods import METHODS
from murmurfl.app.models import make_model
from murmurfl.app.papers import PAPERS, Cell
from murmurfl.app.papers.paper import VALIDATION_SEEDS
from murmurfl.app.papers.reproduction import plan_runs, run_cells, write_reproduction
from murmurfl.app.papers.tran_cutkosky_2022 import UNSAMPLED_SGD, GradientNormTable
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import gdp_mu

from benchmarks import pages
from tests.app.run_table import GRADIENT_NORMS

needs_mnist = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set: no MNIST")

SMALL = {**GRADIENT_NORMS, "partition": "iid", "preset": "practical"}

KIND = GradientNormTable(rates={"algorithm 1": -0.5})


def cells():
    def cell(epsilon):
        grids = {"algorithm 1": (0.02, 0.2), "noisy SGD without sampling": (0.3,)}
        algorithms = {
            "algorithm 1": {"strategy": "tree-momentum"},
            "noisy SGD without sampling": {"strategy": "trusted-sgd"},
        }
        settings = {**SMALL, "mu": gdp_mu(epsilon, 1e-5), "training-samples": 300}
        return Cell(f"epsilon = {epsilon:g}", settings, algorithms, grids=grids)

    return [cell(epsilon) for epsilon in (1.0, 4.0, 16.0)]


@pytest.mark.long
def test_steps_are_chosen_on_seeds_of_their_own_and_runs_are_kept(tmp_path):
    seen = []
    made = run_cells(
        cells(), KIND, seeds=2, out=tmp_path, workers=1, on_run=lambda done, total: seen.append((done, total))
    )
    assert (seen[0], seen[-1]) == ((0, 21), (21, 21)), "9 validation runs, 12 of the table"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not set(VALIDATION_SEEDS) & {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
    for cell in made["cells"]:
        for label, entry in cell["algorithms"].items():
            tried = entry["validation"]
            assert len(tried) == len(cells()[0].grids[label])
            assert entry["settings"]["learning-rate"] == tried[0]["step"]
            assert tried[0]["gradient_norm"] == min(step["gradient_norm"] for step in tried)
            assert tried[0]["gradient_norm"] not in entry["gradient_norm"]["runs"]
            assert len(entry["gradient_norm"]["runs"]) == 2
    assert {(line["algorithm"], line["against"]) for line in made["slopes"]} == {
        ("algorithm 1", "epsilon"),
        ("noisy SGD without sampling", "epsilon"),
    }
    seen.clear()
    again = run_cells(
        cells(), KIND, seeds=2, out=tmp_path, workers=1, on_run=lambda done, total: seen.append((done, total))
    )
    assert seen == [(9, 21), (21, 21)]
    assert again == made

    document = {"reproduction": "small", "seeds": 2, **made}
    table, powers = write_reproduction(document, "small", KIND, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == document
    assert (tmp_path / "out" / "small.png").read_bytes().startswith(b"\x89PNG")
    assert len(table.markdown().splitlines()) == 2 + len(table.rows) == 8
    assert all(row["epsilon"] > 0 for row in table.rows)
    assert len(powers.markdown().splitlines()) == 4
    written = (tmp_path / "out" / "small.md").read_text()
    assert table.markdown() in written
    assert powers.markdown() in written


def test_the_reproduction_has_the_algorithms_of_the_paper_at_equal_terms():
    made = PAPERS["tran-cutkosky-2022"].cells()
    for cell in made:
        if not cell.grids:
            assert list(cell.algorithms) == ["algorithm 1, theorem 6"]
            continue
        assert set(cell.algorithms) == set(cell.grids) == {
            "algorithm 1", "algorithm 2", "sqrt_toeplitz", "blt", "noisy SGD without sampling",
        }  # fmt: skip
        assert len({len(grid) for grid in cell.grids.values()}) == 1, "as many steps for each"
    configs = plan_runs(made, 1, "cohort").values()
    assert all(config.gradient_norm and config.passes > 1 for config in configs)
    logistic = [config for config in configs if config.model == "nonconvex-logistic"]
    model = make_model("nonconvex-logistic", 49, 2, logistic[0].feature_bound)
    assert all(config.clip_norm >= model.gradient_bound for config in logistic), "nothing is clipped"


@pytest.mark.parametrize(("epsilon", "times"), [(0.5, 7.3), (8.0, 3.0)])
def test_noisy_sgd_without_sampling_has_the_noise_of_plain_composition(epsilon, times):
    """3 to 7.3 times that of DP-SGD with the same batches, both for adding or removing a sample."""
    (cell,) = (
        cell for cell in PAPERS["tran-cutkosky-2022"].cells() if f"epsilon = {epsilon:g}, N = 6000" in cell.table
    )
    config = RunConfig.from_mapping({**cell.settings, **cell.algorithms[UNSAMPLED_SGD]})
    steps, share = config.passes * 6000 // config.batch_size, config.batch_size / 6000
    ours = math.sqrt(config.passes) / config.mu  # of the sum, for gradients of length 1

    def of_sampled(noise):
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        event = PoissonSampledDpEvent(share, GaussianDpEvent(noise))
        return accountant.compose(SelfComposedDpEvent(event, steps)).get_epsilon(config.delta)

    assert of_sampled(ours / (times - 0.05)) < epsilon < of_sampled(ours / (times + 0.05))


def test_nothing_without_sampling_is_called_dp_sgd():
    method = METHODS["trusted-sgd"]
    assert "DP-SGD" not in method.sentence
    made = [PAPERS["tran-cutkosky-2022"].cells(), pages.document("tran-cutkosky-2022")["cells"]]
    labels = {label for cell in made[0] for label in cell.algorithms}
    labels |= {label for cell in made[1] for label in cell["algorithms"]}
    assert not [label for label in labels if "DP-SGD" in label]


def test_theorem_6_has_its_own_numbers():
    """T = eps N^2 / (log2 T sqrt(d ln 1/delta)), alpha = eps N / (T log2 T sqrt(...)) = 1 / N, eta = 1 / sqrt(N T)."""
    (cell,) = (c for c in PAPERS["tran-cutkosky-2022"].cells() if "theorem 6" in c.table and "N = 500" in c.table)
    n, t = 500, cell.settings["num-rounds"]
    spread = math.sqrt(49 * math.log(1e5))
    assert t == pytest.approx(2 * n**2 / (math.log2(t) * spread), rel=1e-3)
    assert cell.settings["strategy.alpha"] == pytest.approx(1 / n, rel=1e-3)
    assert cell.settings["learning-rate"] == pytest.approx(1 / math.sqrt(n * t))
    assert cell.settings["batch-size"] == 1
    assert cell.settings["passes"] * n >= t
