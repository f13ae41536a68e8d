"""Rates: fitted powers, the problem they are measured on, the theorems' constants, and the recorded document."""

import json
import math

import numpy as np
import pytest
from murmurfl.app.methods import METHODS
from murmurfl.app.methods.presets import PaperConstants
from murmurfl.app.models.linear import RidgeRegression, SoftmaxRegression
from murmurfl.app.papers import PAPERS, rates
from murmurfl.app.papers.least_squares import RULE_NORM, LeastSquares, curvatures, starting_excess, starting_gradient
from murmurfl.app.papers.rates import (
    ConvexConstants,
    Point,
    bound_power,
    fitted_power,
    fitted_slope,
    leading_terms,
    measured_rate,
)
from murmurfl.app.papers.reproduction import plan_runs, run_cells, write_reproduction
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig

from benchmarks import pages


def test_a_fitted_slope_and_error_match_line_and_noise():
    """500 fits to noise of standard deviation 0.2: errors of three standard errors in about 0.5 % of 13 degrees.

    More than 3 % of them would be a false alarm in less than one case in 10^6; an error stated half as large is seen.
    """
    x = np.repeat(np.log([0.5, 1, 2, 4, 8]), 3)
    exact = fitted_slope(x, 1.0 - 0.5 * x)
    assert exact["slope"] == pytest.approx(-0.5)
    assert exact["standard_error"] < 1e-9
    rng, wrong, halved = np.random.default_rng(6), 0, 0
    for _ in range(500):
        fit = fitted_slope(x, 1.0 - 0.5 * x + 0.2 * rng.normal(size=len(x)))
        ratio = abs(fit["slope"] + 0.5) / fit["standard_error"]
        wrong, halved = wrong + (ratio > 3), halved + (ratio > 1.5)
    assert wrong < 15
    assert halved > 15


@pytest.mark.parametrize("power", [-4 / 3, -1.0, 0.0, 0.5])
def test_a_power_law_has_its_power_whatever_its_factor(power):
    cells = [(value, [3.0 * value**power, 5.0 * value**power]) for value in (0.2, 1.0, 7.0, 40.0)]
    assert fitted_power(cells)["slope"] == pytest.approx(power, abs=1e-12)
    # The planted bug: values that are not seen on a logarithmic scale give another power.
    pairs = [(value, math.log(one)) for value, measured in cells for one in measured]
    assert power == 0.0 or fitted_slope(*zip(*pairs, strict=True))["slope"] != pytest.approx(power, rel=0.2)


def test_a_whole_bound_has_a_power_between_those_of_its_terms():
    def points(weight):
        return [Point(n, [1.0], {"noise": 1.0 / n, "sampling": weight / math.sqrt(n)}) for n in (10.0, 100.0, 1000.0)]

    assert bound_power(points(0.0)) == pytest.approx(-1.0)
    assert bound_power(points(1e6)) == pytest.approx(-0.5, abs=1e-3)
    assert -1.0 < bound_power(points(0.1)) < -0.5
    assert leading_terms(points(0.1)) == ["noise", "sampling"]


def test_a_line_says_why_it_is_outside_the_regime():
    def line(start, sampling):
        points = [Point(n, [0.1 / n], {"noise": 1.0 / n, "sampling": sampling}) for n in (1.0, 2.0, 4.0)]
        return measured_rate(points, [start] * 3, "noise", -1.0)

    assert line(1.0, 1e-3)["outside"] == []
    assert line(1.0, 0.4)["outside"] == ["sampling leads at some values"]
    assert line(0.15, 1e-3)["outside"] == ["up to 67 % of the start is left"]
    assert line(1.0, 1e-3)["slope"] == pytest.approx(-1.0)
    assert line(1.0, 0.4)["bound"] > -0.6
    assert line(1.0, 1e-3)["share of bound"] == pytest.approx([0.1 / 1.001, 0.025 / 0.251])


def least_squares(**settings):
    config = RunConfig(
        task=rates.LEAST_SQUARES,
        model="ridge",
        partition="own",
        num_clients=4,
        clients_per_round=4,
        synthetic_samples=400,
        **settings,
    )
    return config, LeastSquares().load(config, "")


@pytest.mark.parametrize("features", [8, 16])
def test_loss_on_the_test_set_is_the_excess_risk(features):
    _, data = least_squares(synthetic_features=features, synthetic_alpha=0.0)
    model, test = RidgeRegression(features, 1.0), (data.test_features, data.test_labels)
    rule = np.full(features, RULE_NORM / math.sqrt(features))
    point = np.random.default_rng(1).normal(size=features) / 5
    excess = float(curvatures(features) @ np.square(point - rule))
    assert model.evaluate([point], test)[0] == pytest.approx(excess, rel=1e-4)
    assert model.evaluate([rule], test)[0] < 1e-12
    assert model.evaluate([np.zeros(features)], test)[0] == pytest.approx(starting_excess(features), rel=1e-4)
    gradient = model.loss_and_gradient if hasattr(model, "loss_and_gradient") else None
    assert gradient is None, "zhang-2025's regret here is the cumulative loss, because every round's least loss is 0"
    norm = np.linalg.norm(model.mean_gradient([np.zeros(features)], test))
    assert norm == pytest.approx(starting_gradient(features), rel=1e-4)


def test_clients_rules_differ_by_alpha_around_one_mean_and_no_gradient_is_clipped():
    _, data = least_squares(synthetic_features=8, synthetic_alpha=4.0)
    found = []
    for client in range(4):
        mine = slice(100 * client, 100 * (client + 1))
        rule, *_ = np.linalg.lstsq(data.train_features[mine], data.train_labels[mine], rcond=None)
        found.append(rule)
    own = np.array(found) - RULE_NORM / math.sqrt(8)
    assert np.abs(own.mean(axis=0)).max() < 1e-4
    # Signs less their mean over four clients: 3/4 of alpha is left on average.
    assert np.square(own).sum(axis=1).mean() == pytest.approx(3.0, rel=0.4)
    federation = rates._Federation(1.0, 4, 10, features=8, spread=4.0)
    points = np.random.default_rng(2).normal(size=(50, 8))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    model = RidgeRegression(8, 1.0)
    for point in points:
        gradients = model([point], (data.train_features, data.train_labels))
        assert np.linalg.norm(gradients, axis=1).max() <= federation.problem.lipschitz


@pytest.mark.parametrize(
    ("strategy", "clients", "asked"), [("mu2", 100, 100), ("mu2", 100, 20), ("trusted-mu2", 10, 10)]
)
def test_steps_are_those_of_the_paper_preset(strategy, clients, asked):
    """The constants of softmax regression on MNIST give the step that ``preset = paper`` takes."""
    model, rounds, rho = SoftmaxRegression(784, 10), 600, 8.0
    constants = PaperConstants.of(model)
    problem = ConvexConstants(7850, constants.diameter, constants.lipschitz, constants.smoothness, 1.0, 1.0)
    config = RunConfig(
        strategy=strategy, preset="paper", task="mnist", mu=rho, num_clients=clients, clients_per_round=asked
    )
    found = METHODS[strategy].preset(config, rounds, model)
    assert problem.sensitivity == pytest.approx(found.clip_norm)
    step = problem.step(rho, clients, asked, rounds, trusted=strategy == "trusted-mu2")
    assert step == pytest.approx(found.learning_rate)


def test_the_noise_term_is_twice_that_of_its_step():
    """4 D noise is 2 D^2 / (eta T^2) and as much noise: the step balances the two (proof of theorem 5.2)."""
    problem = ConvexConstants(16, 2.0, 3.6, 2.0, 0.0, 6.0)
    sizes = 0.1, 64, 64, 1024
    assert problem.step(*sizes) < 1 / (4 * problem.smoothness * 1024)
    bias = 2 * problem.diameter**2 / (problem.step(*sizes) * 1024**2)
    assert problem.bound(*sizes)["noise"] == pytest.approx(2 * bias)


@pytest.mark.parametrize("rate", PAPERS["rates"].rates, ids=lambda rate: rate.table)
def test_every_cell_is_at_its_theorems_constants(rate):
    """Noise of each client (or server) as the theorem has it, one value of the quantity each, no client cut short."""
    for value, instance in rate.instances.items():
        settings = {**instance.settings, "strategy": rate.algorithm}
        config = RunConfig.from_mapping({**settings, "seed": 1})
        assert value > 0
        assert instance.start > 0
        assert config.task == rates.LEAST_SQUARES
        if rate.paper.startswith("reshef-levy"):
            assert config.clip_norm > 0
            assert config.batch_size == 1
            expected = "uniform" if config.clients_per_round == config.num_clients else "paper"
            assert rate.algorithm == "trusted-mu2" or config.schedule == expected
    values = list(rate.instances)
    assert len(values) >= 3
    assert values == sorted(values)


def prefix_stds(instance):
    """Return the standard deviation of each y_k of a client: of the noise in the sum of its first k releases."""
    config = RunConfig.from_mapping({**instance.settings, "strategy": "mu2", "seed": 1})
    experiment = prepare(config)
    plan = METHODS["mu2"].policy(experiment, experiment.sizes[0]).plan(8)
    return config, plan.noise_std * np.linalg.norm(plan.mechanism.decoder(), axis=1)


def test_noise_has_the_theorems_variance():
    """4 S^2 T / rho^2 for all clients (2024), and for some of them 4 S^2 (1 + ln T) k / rho^2 (2025)."""
    config, found = prefix_stds(rates._Federation(0.4, 4, 32, features=8).instance())
    assert found == pytest.approx([2 * config.clip_norm * math.sqrt(32) / 0.4] * 32, rel=1e-3)
    config, found = prefix_stds(rates._Federation(0.4, 4, 32, 2, features=8).instance())
    k = np.arange(1, len(found) + 1)
    assert found == pytest.approx(2 * config.clip_norm * np.sqrt((1 + math.log(32)) * k) / 0.4, rel=1e-3)


def walk_excess(step, smoothness, samples, epochs, noise):
    """Return the excess risk, exact, of epochs of noisy steps on L w^2 / 2 from its optimum."""
    kept = (1 - step * smoothness) ** 2
    return smoothness / 2 * (step * noise) ** 2 * (1 - kept ** (samples * epochs)) / (1 - kept)


def noise_term(step, smoothness, samples, epochs, noise):
    """Return the noise term of jiang-2026's corollary 4.1 (E.1) for d = 1."""
    return 12 * step**2 * samples * noise**2 * smoothness * (1 + math.log(epochs))


@pytest.mark.parametrize(("epochs", "holds"), [(20, True), (100, True), (200, False), (1000, False)])
def test_noise_of_many_epochs_exceeds_the_shuffled_bound(epochs, holds):
    """docs/results.md: from the optimum, noise alone makes an excess above corollary 4.1's whole bound.

    Every sample's loss is L w^2 / 2, so sigma_any = 0, and the start is the optimum, so only the noise term is left.
    """
    smoothness, samples, noise = 2.0, 50, 3.0
    longest = 1 / (2 * samples * smoothness * math.sqrt(10 * (1 + math.log(epochs))))
    step = 1e-3 * longest
    exact = walk_excess(step, smoothness, samples, epochs, noise)
    assert (exact <= noise_term(step, smoothness, samples, epochs, noise)) is holds
    # The exact figure against a simulated walk: 2,000 walks, whose mean is off by 3.2 % (one standard error).
    if epochs == 20:
        normals = np.random.default_rng(3).normal(size=(samples * epochs, 2000))
        at = np.zeros(2000)
        for row in normals:
            at = at - step * (smoothness * at + noise * row)
        assert smoothness / 2 * np.square(at).mean() == pytest.approx(exact, rel=0.13)


def recursion_regret(rounds):
    """Return the mean excess of zhang-2025's cells without noise, exact: gradient descent on each direction."""
    moments, step = curvatures(16), rates._online(rounds).settings["learning-rate"] * 4
    kept = (1 - step * 2 * moments) ** 2
    return float((moments * RULE_NORM**2 / 16 * (1 - kept**rounds) / (1 - kept)).sum() / rounds)


@pytest.mark.parametrize(("times", "power"), [(1, -0.39), (64, -0.59)])
def test_regret_without_noise_has_the_powers_of_the_page(times, power):
    found = fitted_power((rounds * times, [recursion_regret(rounds * times)]) for rounds in (128, 256, 512, 1024))
    assert found["slope"] == pytest.approx(power, abs=0.005)
    shown = (pages.ROOT / "docs" / "results.md").read_text()
    assert f"−{abs(power)}" in shown


@pytest.mark.long
def test_measured_rates_come_from_runs_of_every_measure(tmp_path):
    paper = PAPERS["rates"]
    cells = [
        rates.Rate(
            "reshef-levy-2024", "theorem 5.2", "mu2", "n a client", "noise", -1.0,
            rates._Federation(0.5, 4, 16).varied("rounds", (16, 32, 64)),
        ),
        rates.Rate(
            "zhang-2025", "theorem IV.10", "online", "R", "initialisation", -2 / 3,
            rates._varied(rates._online, "rounds", (64, 96, 128)),
        ),
        rates.Rate(
            "tran-cutkosky-2022", "theorem 6", "tree-momentum", "N", "noise", -1 / 2,
            rates._varied(rates._momentum, "samples", (40, 60, 80)),
        ),
    ]  # fmt: skip
    kind = rates.RateTable({one.table: (one.term, one.power) for one in cells})
    made = run_cells([cell for one in cells for cell in one.cells()], kind, seeds=2, out=tmp_path, workers=1)
    assert [line["table"] for line in made["slopes"]] == [one.table for one in cells]
    for line in made["slopes"]:
        assert min(line["left"]) > 0
        assert math.isfinite(line["slope"])
    first, cells_table = write_reproduction({"seeds": 2, **made}, "rates", kind, tmp_path)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert len(first.rows) == 3
    assert len(cells_table.rows) == 9
    assert paper.seeds >= 5


def test_what_the_page_says_of_the_slopes_is_so():
    """The words of docs/results.md on the papers of Reshef and Levy, and on jiang-2026 and tran-cutkosky-2022."""
    lines = {line["table"]: line for line in pages.document("rates")["slopes"]}

    def off(line, power):
        return abs(line["slope"] - line[power]) / line["standard_error"]

    noise = {name: line for name, line in lines.items() if name.startswith("reshef-levy") and ": xi" not in name}
    fixed_rounds = "reshef-levy-2025, theorem 5.2: m, T fixed"
    for name, line in noise.items():
        assert off(line, "theorem") <= 2.0 or name == fixed_rounds, name
    assert off(lines[fixed_rounds], "theorem") > 2.0
    assert off(lines[fixed_rounds], "bound") <= 2.0
    assert lines[fixed_rounds]["slope"] < 0
    spread = lines["reshef-levy-2025, theorem 5.2: xi"]
    assert spread["slope"] < 0.3
    assert off(spread, "bound") <= 2.0
    for name in ("n", "epsilon"):
        line = lines[f"jiang-2026, corollary 4.1: {name}"]
        assert line["slope"] == pytest.approx(line["theorem"], abs=0.15)
        assert line["leading"] == ["initialisation"]
    for name in ("n", "tau", "epsilon"):
        line = lines[f"zhang-2025, theorem IV.10: {name}"]
        assert line["theorem"] < line["slope"] < 0
    assert lines["zhang-2025, theorem IV.10: R"]["slope"] == pytest.approx(-0.39, abs=0.03)
    for name in ("N", "epsilon"):
        assert min(lines[f"tran-cutkosky-2022, theorem 6: {name}"]["left"]) > 0.7
    assert max(share for line in lines.values() for share in line["share of bound"]) < 0.1


def test_the_recorded_document_is_that_of_the_theorems_and_of_the_page():
    """Its slopes are those of its runs, its bounds those of the code, and docs/results.md shows every line."""
    made = pages.document("rates")
    paper = PAPERS["rates"]
    assert made["seeds"] >= 5
    assert json.loads(json.dumps(paper.table.summary(made))) == {"slopes": made["slopes"]}
    planned = {
        (cell.table, cell.paper[label]["value"]): cell.paper[label]
        for cell in paper.cells()
        for label in cell.algorithms
    }
    recorded = {
        (cell["table"], entry["paper"]["value"]): entry["paper"]
        for cell in made["cells"]
        for entry in cell["algorithms"].values()
    }
    assert recorded.keys() == planned.keys()
    for key, terms in planned.items():
        assert recorded[key] == pytest.approx(terms), key
    shown = pages.built((pages.ROOT / "docs" / "results.md").read_text(), pages.BLOCKS["docs/results.md"])
    assert "up to 86 % of the start is left" in shown
    for line in made["slopes"]:
        row = rates.rate_row(line)
        assert f"| {row['theorem']} | {row['against']} | {row['slope']:.2f} ± {row['± slope']:.2f} |" in shown
    assert len(plan_runs(paper.cells(), 1, "cohort", paper.table)) == len(planned)
