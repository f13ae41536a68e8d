"""A query of one file and one registry line: on all engines, under every trust, with owners, in ledger and result.

The file is tests/app/weighted_count.py. Nothing of murmurfl knows it.
"""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.methods.queries import RUN_QUERIES
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Cohort
from murmurfl.privacy import MemoryLedger, RefusedError

from ..weighted_count import LABEL, MOST, NAME, SHARE, weight_of

FOLDER, ROOT = Path(__file__).parents[1], Path(__file__).parents[3]
TRUSTS = {"untrusted": {}, "sums": {"trust": "secure-aggregation"}, "trusted": {"strategy": "trusted-full-batch"}}
UNITS = {"records": {}, "owners": {"samples_per_owner": 4}}
ENGINES = {"in process": run_in_process, "cohort": run_cohort}


@pytest.fixture(scope="module", autouse=True)
def own_file():
    """The folder of the file is importable, as the current one is; nothing of it is left behind."""
    registered = dict(RUN_QUERIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("PYTHONPATH", str(FOLDER))
        yield
    sys.modules.pop(NAME.partition(":")[0], None)
    RUN_QUERIES.clear()
    RUN_QUERIES.update({name: kind for name, kind in registered.items() if name != "weighted"})
    prepare.cache_clear()


def config(**changes):
    settings = {"task": NAME, "strategy": "full-batch", "num_rounds": 2, "num_clients": 5, "clients_per_round": 5}
    return RunConfig(**{**settings, "mu": 4.0, "checkpoint": False, "learning_rate": 0.1, "clip_norm": 1.0, **changes})


def truth(result):
    """What the clients whose answers came hold together, without noise."""
    experiment, report = result.experiment, result.answers["weighted"].report
    data, most = experiment.data, experiment.config.samples_per_owner
    if report.aggregated < experiment.config.num_clients:
        return None
    if not most:
        return weight_of(data.train_features, data.train_labels, [[row] for row in range(len(data.train_labels))])
    total = 0.0
    for client in range(experiment.config.num_clients):
        features, labels, present = experiment.shards[client][0 : len(experiment.shards[client])]
        total += sum(weight_of(features[i], labels[i], [present[i]]) for i in range(len(present)))
    return total


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_answers_it_within_its_noise(engine, trust, unit):
    """Five standard deviations: by chance once in a million and a half."""
    result = ENGINES[engine](config(**TRUSTS[trust], **UNITS[unit]))
    found = result.answers["weighted"].answer
    assert 0 < found.std < 10
    assert abs(found.value - truth(result)) < 5 * found.std
    document = json.loads(json.dumps(result.outcome.document()))
    assert document["queries"]["weighted"]["answer"] == found.document
    assert document["queries"]["weighted"]["share"] == SHARE
    assert "a weighted count of records" in document["guarantee"]
    assert result.mu == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("trust", TRUSTS)
def test_the_engines_give_one_answer_to_the_last_bit(trust, unit):
    chosen = config(**TRUSTS[trust], **UNITS[unit])
    one, other = (run(chosen).answers["weighted"].answer for run in ENGINES.values())
    assert one == other


@pytest.mark.parametrize("trust", TRUSTS)
def test_lost_replies_are_in_neither_the_sum_nor_the_count(trust):
    sums = {"min_cohort": 3, "colluders": 1} if trust == "sums" else {}
    chosen = config(**TRUSTS[trust], **sums, lost_replies=0.3, num_clients=10, clients_per_round=10, mechanism="none")
    result = run_in_process(replace(chosen, seed=2))
    outcome, experiment = result.answers["weighted"], result.experiment
    assert 0 < outcome.report.aggregated < 10
    every = weight_of(experiment.data.train_features, experiment.data.train_labels, [[i] for i in range(400)])
    assert 0.3 * every < outcome.answer.value < every
    assert outcome.report.samples < 400


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_clients_ledgers_count_it_with_the_training(trust):
    result = run_in_process(config(**TRUSTS[trust]))
    spent = list(result.statements.values())
    assert spent
    if trust != "trusted":  # whose clients add no noise
        assert [one["mu-guaranteed"] for one in spent] == pytest.approx([4.0] * len(spent), rel=1e-6)
    experiment = result.experiment
    assert experiment.query("weighted").mu == pytest.approx(4.0 * math.sqrt(SHARE), rel=1e-6)
    ledger = MemoryLedger()
    client = experiment.client(0, ledger)
    part = client.parts["weighted"]
    before = spent_of(ledger)
    request = {"session": "another"}
    cohort = Cohort(["0"], lambda _: client)
    (answer,) = cohort.releases(1, request["session"], {"0": 0}, (), {"of": "weighted"})
    assert answer[1].samples == part.samples
    assert spent_of(ledger) == pytest.approx(math.hypot(before, part.privatizer.policy.mu), rel=1e-9)
    (again,) = cohort.releases(1, "another", {"0": 0}, (), {"of": "weighted"})
    assert isinstance(again[1], RefusedError)


def spent_of(ledger):
    with ledger.exclusive() as page:
        return page.account().spent.mu


def test_the_summary_shows_it():
    outcome = run_cohort(config()).outcome
    (line,) = (line for line in summary_lines(outcome, Path("runs")) if line.strip().startswith("weighted"))
    assert re.search(r"value [\d.]+, std [\d.]+, 10 % of mu\^2 \(mu = 1\.265\)", line)


def test_a_client_that_is_not_configured_for_it_refuses():
    experiment = prepare(config(task="digits"))
    cohort = Cohort(["0"], lambda _: experiment.client(0, MemoryLedger()))
    ((_, refusal),) = cohort.releases(1, "session", {"0": 0}, (), {"of": "weighted"})
    assert isinstance(refusal, RefusedError)


def test_an_owner_s_records_weigh_at_most_as_much_as_one():
    result = run_in_process(config(samples_per_owner=4, mechanism="none"))
    owners = sum(len(shard) for shard in result.experiment.shards)
    assert 0 < result.answers["weighted"].answer.value <= owners * MOST
    assert LABEL in result.experiment.data.train_labels


@pytest.mark.long
def test_ray_gives_the_same_answer(tmp_path):
    chosen = config(out_dir=str(tmp_path), run_name="weighted")
    run_flower_app(ROOT, run_config=chosen.to_mapping(), num_supernodes=3, on_line=lambda _: None, timeout_s=300)
    document = json.loads((tmp_path / "weighted" / "result.json").read_text())
    assert document["queries"]["weighted"]["answer"] == run_in_process(chosen).answers["weighted"].answer.document
