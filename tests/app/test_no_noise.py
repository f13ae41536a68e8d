"""`mechanism = none`: every strategy without any noise, for comparison, and never called private."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app import server_app
from murmurfl.app.auditing.run_audit import audit_run
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.fleet.deployment import node_settings
from murmurfl.app.methods import METHODS
from murmurfl.app.papers import Cell
from murmurfl.app.papers import reproduction as reproduce
from murmurfl.app.papers.accuracy import ALONE, AccuracyTable
from murmurfl.app.papers.reproduction import caption_guarantee, make_run
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_guarantees import expected_guarantee
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import UpdatePolicy
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys, SystemKeys
from murmurfl.strategies import CorrelatedMomentum, ReducedTreeMomentum, TreeMomentum, TrustedMu2

from tests.harness.errors import raises

MU = 0.37
"""What is configured, and must be nowhere in what is shown; its epsilon at delta = 1e-5 is 1.426."""


def config(strategy: str, **changes) -> RunConfig:
    more = {}
    if strategy == "shuffled":
        more = {"task": "digits", "model": "softmax", "accounting": "composed", "public_samples": 400}
    rounds = 1 if strategy == "one-shot" else 6
    return replace(RunConfig(strategy=strategy, mechanism="none", mu=MU, num_rounds=rounds), **more, **changes)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", METHODS)
def test_noiseless_runs_claim_no_privacy_on_any_engine(strategy):
    ours = config(strategy)
    result, alone = run_cohort(ours), run_in_process(ours)
    for one, other in zip(result.parameters, alone.parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    assert (result.mu, result.epsilon) == (math.inf, math.inf)
    assert {s["noise-std"] for s in result.statements.values()} == {0.0}
    assert {s["mu-guaranteed"] for s in result.statements.values()} == {math.inf}
    document = result.outcome.document()
    assert document["mu"] is document["epsilon"] is document["privacy"]["mu"] is document["privacy"]["epsilon"] is None
    for sentence in (result.guarantee.sentence, expected_guarantee(ours).sentence, document["guarantee"]):
        assert sentence.startswith("Nothing is guaranteed, epsilon is infinite")
        assert "no noise was added anywhere" in sentence
        assert "Not private: for comparison only." in sentence
    assert math.isinf(caption_guarantee(ours).mu)
    # Neither the noise nor the step come from the configured mu: there is none of the one and the other is bounded.
    other = run_cohort(replace(ours, mu=50.0))
    assert all(np.array_equal(a, b) for a, b in zip(result.parameters, other.parameters, strict=True))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", sorted(name for name, method in METHODS.items() if "paper" in method.presets))
def test_the_papers_constants_have_steps_without_noise_too(strategy):
    result = run_cohort(config(strategy, preset="paper"))
    assert result.accuracy > 0.3, "far from the tenth that guessing gives"


def test_without_noise_a_run_is_the_limit_of_large_mus():
    exact = run_cohort(config("mu2", num_rounds=0)).parameters
    near = run_cohort(replace(config("mu2", num_rounds=0), mechanism="", mu=1e7)).parameters
    assert max(np.abs(a - b).max() for a, b in zip(exact, near, strict=True)) < 1e-3
    assert max(np.abs(a).max() for a in exact) > 0.1


def test_without_noise_all_momenta_are_one():
    """Lemma 17: trees only change the noise."""
    kinds = ("tree-momentum", "reduced-tree-momentum", "correlated-momentum")
    models = [run_cohort(config(kind, num_rounds=0, passes=2, batch_size=30)).parameters for kind in kinds]
    for other in models[1:]:
        for one, two in zip(models[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)


def test_files_report_and_pictures_say_that_nothing_is_private(tmp_path):
    document = write_record(run_cohort(config("trusted-mu2")), tmp_path / "none")
    stored = json.loads((tmp_path / "none" / "result.json").read_text())
    assert stored["mu"] is stored["epsilon"] is None
    assert ["epsilon", "infinite"] in [
        line.split()[:2] for line in summary_lines(Outcome.model_validate(document), tmp_path)
    ]
    make_report([tmp_path / "none"], tmp_path / "report")
    for path in (tmp_path / "report").iterdir():
        if path.suffix in (".html", ".svg"):
            assert not re.search(r"(?<![\d.])1\.4[23]", path.read_text()), path.name
    assert "Not private: for comparison only." in (tmp_path / "report" / "index.html").read_text()


def test_a_reproductions_table_shows_no_epsilon_for_it(tmp_path, monkeypatch):
    settings = {"preset": "practical", "num-rounds": 2, "mu": MU}
    settings |= {"num-clients": 10, "clients-per-round": 10, "batch-size": 8}
    algorithms = {"mu2": {"strategy": "mu2"}, "no noise": {"strategy": "mu2", "mechanism": "none"}}
    # Without worker processes, which take seconds to start.
    monkeypatch.setattr(
        reproduce,
        "make_runs",
        lambda configs, kind, *_: {key: make_run(value, kind, "cohort") for key, value in configs.items()},
    )
    document = reproduce.run_cells([Cell("small", settings, algorithms, {})], AccuracyTable(), seeds=1, out=tmp_path)
    (made,) = reproduce.write_reproduction(document, "small", AccuracyTable(), tmp_path)
    rows = {row["algorithm"]: row for row in made.rows}
    assert rows["no noise"]["epsilon"] is rows["no noise"]["mu asked"] is None
    assert rows["no noise"]["noise"] == "none"
    table = made.markdown()
    line = next(line for line in table.splitlines() if "no noise" in line)
    assert "| none |" in line
    assert "0.37" not in line
    assert "| 1.427 |" in table, "of the run with noise"
    assert f"Without noise, and not private: no noise / {ALONE}." in (tmp_path / "small.md").read_text()


def test_it_is_refused_on_real_clients_by_the_server_and_by_each_client(tmp_path):
    ours = config("mu2")
    grid = InProcessGrid(None, 10, {})  # type: ignore[arg-type]
    with raises(ConfigurationError, "conflict", "mechanism"):
        run_experiment(grid, ours, deployed=True)
    with raises(ConfigurationError, "conflict", "mechanism"):
        server_app._run(grid, ours, tmp_path / "run", deployed=True)
    assert not (tmp_path / "run").exists()
    with raises(ConfigurationError, "conflict", "mechanism"):
        node_settings(prepare(ours), 0)
    policy = PrivacyPolicy(1.0, 2, 3, 1.0, mechanism="none")

    class Durable(MemoryLedger):
        durable = True

    Privatizer(policy, 3, 10, Durable(), SimulatedKeys(1, "a"))
    with raises(ConfigurationError, "conflict", "mechanism"):
        Privatizer(policy, 3, 10, Durable(), SystemKeys.generate())
    with raises(ConfigurationError, "conflict", "mechanism"):
        UpdatePolicy(clip_norm=1.0, mu=1.0, max_participations=3, mechanism="none")


def test_a_trusted_server_with_a_key_of_its_own_refuses_to_add_none():
    policy = PrivacyPolicy(1.0, 2, 3, 1.0, mechanism="none", trust="trusted-server", release_rule="paper")
    common = {"num_clients": 2, "clients_per_round": 2, "learning_rate": 0.1, "policy": policy, "num_rounds": 3}
    for kind in (TrustedMu2, TreeMomentum, ReducedTreeMomentum, CorrelatedMomentum):
        more = {} if kind is TrustedMu2 else {"alpha": 0.5}
        with raises(ConfigurationError, "conflict", "mechanism"):
            kind(**common, **more)
        made = kind(**common, **more, noise_keys=SimulatedKeys(1, "server"))
        assert math.isinf(made.aggregator.mu)
        assert math.isinf(made.aggregator.epsilon())


def test_an_audit_of_it_is_refused():
    with raises(ConfigurationError, "conflict", match="nothing to audit"):
        audit_run(config("mu2"), 20)


def test_a_mu_that_is_too_large_is_refused_with_the_largest_and_with_the_way_to_do_without():
    with raises(ConfigurationError, "out-of-range", "mu", match="set mechanism=none") as refusal:
        expected_guarantee(RunConfig(mu=1e12, noise_quality="fast"))
    assert "\n" not in str(refusal.value)
    told = re.search(r"Here mu may be at most (\S+);", str(refusal.value))
    assert told is not None
    assert float(told[1]) > 1e4
    assert float(told[1]) >= expected_guarantee(RunConfig(mu=float(told[1]), noise_quality="fast")).mu > 0
    exact = expected_guarantee(RunConfig(mu=1000.0))
    assert math.isinf(exact.mu), "beyond the range of exact noise nothing is guaranteed, and the run goes on"
    assert "mu = 1000 at delta = 1e-05 is more than this noise can be vouched for" in exact.sentence
