"""An operator's file with a mean of the features or a private evaluation: its shares of mu and what bounds them."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.journal import Journal, noting
from murmurfl.app.nodes.node_app import describe
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients import Column, Label, Schema, numpy_client_app
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import ConfigurationError, RefusedError, SQLiteLedger, protocol
from murmurfl.privacy.setting import by_key, settings_of

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node
from tests.harness.schemas import write_samples

FEATURES, SAMPLES, MU = 4, 20, 1.0
BASE = {"client": "clinic", "ledger": "ledger.sqlite"}
BASE |= {"strategy": "full-batch", "clip-norm": 1.0, "batch-size": 1, "mu": MU, "max-participations": 3}
CENTRED = {"centring": "private", "centring.norm": 2.0, "centring.nonnegative": True}
TASK = {"task": "digits", "num-partitions": 4, "partition-id": 0, "features": "soft-gradients"}
MODEL = [np.zeros((2, FEATURES)), np.zeros(2)]
OF_MEAN = {protocol.RELEASE_OF: protocol.OF_MEAN}


def made(folder, classes=2, **changes):
    values = {**BASE, **by_key(changes, settings_of(NodeConfig))}
    features = np.abs(np.random.Generator(np.random.Philox(key=1)).normal(size=(SAMPLES, FEATURES)))
    own = write_samples(folder, features.astype(np.float32), np.arange(SAMPLES) % 2, classes=classes)
    values |= {} if "task" in values else own
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=MU, delta=1e-5)
    (folder / "node.toml").write_text(toml_document(values))
    return NodeConfig.read(folder / "node.toml")


def of_evaluation(session="e"):
    return MODEL, training_config(session=session, **{protocol.RELEASE_OF: protocol.OF_EVALUATION})


def test_the_file_decides_the_means_share_and_bound(tmp_path):
    client = made(tmp_path, **CENTRED, centring_share=0.2).make_client()
    mean, rest = client.parts["mean"].asked.policy, client.privatizer.policy
    assert (mean.mu, rest.mu) == (pytest.approx(math.sqrt(0.2)), pytest.approx(math.sqrt(0.8)))
    assert mean.budget_mu == rest.budget_mu == MU
    assert (mean.clip_norm, mean.clip_unit, mean.noise_quality) == (2.0, "nonnegative", "exact")
    assert client.gradients.shapes == [(2, FEATURES + 1)]
    said = describe(client)
    assert "mu = 1 Gaussian DP" in said
    assert "Of it mu = 0.4473 is for the mean of its features, which it releases first." in said


def test_the_file_decides_the_evaluations_share_and_samples(tmp_path):
    client = made(tmp_path, private_evaluation=0.2, held_out=0.25, score_bins=4).make_client()
    own, rest = client.parts["evaluation"].asked.policy, client.privatizer.policy
    assert (own.mu, rest.mu) == (pytest.approx(math.sqrt(0.2)), pytest.approx(math.sqrt(0.8)))
    assert (own.budget_mu, rest.budget_mu, own.noise_quality) == (MU, MU, "exact")
    assert (
        client.privatizer.num_samples,
        client.parts["evaluation"].samples,
        client.parts["evaluation"].asked.bins,
    ) == (
        15,
        5,
        4,
    )
    said = describe(client)
    assert "mu = 1 Gaussian DP" in said
    assert "Of it mu = 0.4473 is for a private evaluation of the model, which it releases last." in said


def test_mean_and_training_spend_exactly_the_budget(tmp_path):
    client = made(tmp_path, **CENTRED).make_client()
    arrays, examples, _ = client.fit([], training_config(session="m", **OF_MEAN))
    assert (arrays[0].shape, examples) == ((FEATURES,), SAMPLES)
    centre = {protocol.CENTRE: (arrays[0] / examples).astype("<f4").tobytes()}
    for t in (1, 2, 3):
        assert np.concatenate(client.fit([np.zeros((2, FEATURES + 1))], training_config(t, **centre))[0]).any()
    assert client.statement("s")["mu-guaranteed"] == pytest.approx(MU)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        client.fit([], training_config(session="again", **OF_MEAN))
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        client.fit([np.zeros((2, FEATURES + 1))], training_config(1, session="other", **centre))
    # The same from the file again: the ledger is what remembers.
    again = NodeConfig.read(tmp_path / "node.toml").make_client()
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        again.fit([], training_config(session="m", **OF_MEAN))


def test_training_and_evaluation_spend_exactly_the_budget(tmp_path):
    client = made(tmp_path, private_evaluation=0.2).make_client()
    for t in (1, 2, 3):
        client.fit(MODEL, training_config(t))
    arrays, examples, metrics = client.fit(*of_evaluation())
    assert (arrays[0].shape, examples, metrics[protocol.HELD_OUT]) == ((2,), 2, 1)
    for session in ("other", "e"):
        with pytest.raises(RefusedError, match=r"budget|cap"):
            client.fit(*of_evaluation(session))
    # The same from the file again: the ledger is what remembers.
    again = NodeConfig.read(tmp_path / "node.toml").make_client()
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        again.fit(*of_evaluation())
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        again.fit(MODEL, training_config(1, session="new"))


def test_mean_evaluation_and_training_are_one_mu(tmp_path):
    centred = {"centring": "private", "centring_norm": 2.0, "centring_share": 0.1}
    client = made(tmp_path, private_evaluation=0.2, held_out=0.0, **centred).make_client()
    mus = [client.privatizer.plan.mu, *(privatizer.plan.mu for privatizer in client.beside)]
    assert math.hypot(*mus) == pytest.approx(MU, rel=1e-9)
    assert client.parts["evaluation"].samples == SAMPLES
    assert describe(client).count("Of it mu") == 2


def test_built_in_features_declare_bounds_and_centring(tmp_path):
    client = made(tmp_path, **TASK).make_client()
    mean = client.parts["mean"].asked.policy
    assert (mean.clip_norm, mean.clip_unit) == (1.0, "nonnegative")
    assert client.parts["mean"].asked.num_features == 192
    other = tmp_path / "other"
    other.mkdir()
    assert made(other, **TASK, centring="none").make_client().giver is None


def test_a_client_that_trusts_its_server_says_that_answers_go_without_noise(tmp_path):
    client = made(tmp_path, **TASK, strategy="trusted-full-batch", private_evaluation=0.2).make_client()
    assert client.parts["mean"].asked.policy.trust == client.parts["evaluation"].asked.policy.trust == "trusted-server"
    said = describe(client)
    assert "and to the mean of its features before them" in said
    assert "and to how good a model is on its samples after them" in said
    assert "keep mu = 1 a run" in said


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"centring": "private"}, "centring.norm to be set with centring and `samples`"),
        ({"centring.norm": 1.0}, "centring.norm"),
        ({"centring.nonnegative": True}, "centring.nonnegative to be unset"),
        ({"centring.share": 0.1}, "centring.share to be unset without centring"),
        ({**CENTRED, "centring.share": 1.0}, "centring.share to be a number > 0 and < 1"),
        ({**CENTRED, "strategy": "online", "learning-rate": 0.1}, "centring to be 'none' or empty"),
        ({"centring": "public"}, "centring"),
        ({"held_out": 0.2}, "held-out"),
        ({"score_bins": 4}, "score-bins"),
        ({"private_evaluation": 1.0}, "evaluation.share"),
        ({"private_evaluation": -0.1}, "evaluation.share"),
        ({"private_evaluation": 0.1, "held_out": 1.0}, "held-out"),
        ({"private_evaluation": 0.96, "centring": "private", "centring_norm": 1.0}, "evaluation.share"),
        ({"private_evaluation": 0.1, "strategy": "noisy-sgd", "batch_selection": "shuffled"}, "evaluation.share"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path, changes, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        made(tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_bins_of_scores_are_for_two_classes(tmp_path):
    with raises(ConfigurationError, "conflict", "evaluation.score-bins", match="two classes"):
        made(tmp_path, classes=3, private_evaluation=0.1, score_bins=4).make_client()


def test_what_is_released_beside_the_training_is_noted_as_what_it_is(tmp_path):
    centred = {"centring": "private", "centring_norm": 2.0, "centring_share": 0.1}
    client = made(tmp_path, private_evaluation=0.2, held_out=0.0, **centred).make_client()
    journal, entries = Journal(), []
    journal.listen(entries.append)
    app = noting(numpy_client_app(lambda context: client), journal)
    model = [np.zeros(shape) for shape in client._shapes]
    requests = [
        ([], OF_MEAN),
        (model, {protocol.CENTRE: bytes(4 * FEATURES)}),
        (model, {protocol.RELEASE_OF: protocol.OF_EVALUATION, protocol.CENTRE: bytes(4 * FEATURES)}),
    ]
    for session, (arrays, entry) in zip("abc", requests, strict=True):
        records = {protocol.ARRAYS: ArrayRecord(list(arrays))}
        content = RecordDict({**records, protocol.CONFIG: ConfigRecord(training_config(session=session, **entry))})
        reply = ask_real_node(app, content, "train")
        assert not reply.has_error(), reply.error
    assert [(entry.kind, entry.facts.get("of"), entry.facts["release"]) for entry in entries] == [
        ("released", "mean", 1),
        ("released", None, 1),
        ("released", "evaluation", 1),
    ]


# An additive model of a table.


def made_of_table(folder, rows=None, **changes):
    """A node whose samples are a table with ages, of which some are missing, and wards."""
    lines = [f"{20 + i},{'ab'[i % 2]},{'no' if i % 3 else 'yes'}" for i in range(SAMPLES)]
    lines[4] = ",a,no"
    lines = lines if rows is None else [*lines[:7], *rows, *lines[8:]]
    (folder / "patients.csv").write_text("\n".join(["age,ward,ill", *lines]) + "\n")
    columns = {"age": Column(kind="number", bounds=(0, 100)), "ward": Column(kind="category", values=("a", "b"))}
    schema = Schema(columns=columns, label=Label(column="ill", classes=("no", "yes")), reviewed=True)
    (folder / "schema.toml").write_text(document(schema))
    values = {**BASE, "model": "additive", "samples": str(folder / "patients.csv")}
    values |= {
        "schema": str(folder / "schema.toml"),
        "num-records": SAMPLES,
        **by_key(changes, settings_of(NodeConfig)),
    }
    for name in ("patients.csv", "schema.toml"):
        (folder / name).chmod(0o600)
    if not (folder / "ledger.sqlite").exists():
        SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=MU, delta=1e-5)
    (folder / "node.toml").write_text(toml_document(values))
    return NodeConfig.read(folder / "node.toml")


COUNTS = {protocol.RELEASE_OF: protocol.OF_KNOTS}
KNOTS = np.array([0.3, 10.0, 30.0, 60.0, 90.0])
ADDITIVE = [np.zeros((2, 9)), np.zeros(2)]


def test_an_additive_node_counts_first_and_spends_exactly_the_budget(tmp_path):
    client = made_of_table(tmp_path, knots=4).make_client()
    counts, rest = client.parts["knots"].asked.policy, client.privatizer.policy
    assert (counts.mu, rest.mu) == (pytest.approx(math.sqrt(0.1)), pytest.approx(math.sqrt(0.9)))
    assert (counts.clip_norm, counts.clip_unit, counts.noise_quality) == (1.0, "nonnegative", "exact")
    assert client.gradients.shapes == [(2, 4 + 2 + 3), (2,)]
    assert "is for the counts for the knots of its columns, which it releases first." in describe(client)
    arrays, examples, _ = client.fit([], training_config(session="k", **COUNTS))
    assert (arrays[0].shape, examples) == ((client.parts["knots"].query.width,), SAMPLES)
    knots = {protocol.KNOTS: KNOTS.astype("<f8").tobytes()}
    for t in (1, 2, 3):
        assert np.concatenate([part.ravel() for part in client.fit(ADDITIVE, training_config(t, **knots))[0]]).any()
    assert client.statement("s")["mu-guaranteed"] == pytest.approx(MU)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        client.fit([], training_config(session="again", **COUNTS))


def test_the_ledger_of_a_node_knows_records_whichever_model_is_trained(tmp_path):
    made_of_table(tmp_path, knots=4, mu=0.5).make_client().fit([], training_config(session="k", **COUNTS))
    made_of_table(tmp_path, model="softmax", mu=0.5)
    client = NodeConfig.read(tmp_path / "node.toml").make_client()
    assert client.gradients.shapes == [(2, 4), (2,)]


@pytest.mark.parametrize(
    ("changes", "setting"),
    [({"strategy": "online", "learning_rate": 0.1}, "model"), ({"centring": "private", "centring_norm": 1.0}, "model")],
)
def test_an_additive_model_that_a_strategy_cannot_have_is_refused(changes, setting, tmp_path):
    with raises(ConfigurationError, "conflict", setting):
        made_of_table(tmp_path, knots=4, **changes)


def test_knots_of_another_model_are_refused(tmp_path):
    with raises(ConfigurationError, "conflict", "model.knots"):
        made(tmp_path, knots=4)
