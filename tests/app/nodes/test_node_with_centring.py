"""An operator's file with private centring: its share of mu is the operator's, and so is what bounds the mean."""

import math

import numpy as np
import pytest
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.nodes.node_app import describe
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.privacy import ConfigurationError, RefusedError, SQLiteLedger, protocol

from tests.harness.machines import training_config
from tests.harness.schemas import write_samples

FEATURES, SAMPLES, MU = 4, 12, 1.0
BASE = {"machine": "clinic", "ledger": "ledger.sqlite"}
BASE |= {"strategy": "full-batch", "clip-norm": 1.0, "batch-size": 1, "mu": MU, "max-participations": 3}
CENTRED = {"centring": "private", "centring-norm": 2.0, "centring-nonnegative": True}
TASK = {"task": "digits", "num-partitions": 4, "partition-id": 0, "features": "soft-gradients"}


def made(folder, **changes):
    named = {name.replace("_", "-"): value for name, value in changes.items()}
    values = {name: value for name, value in {**BASE, **named}.items() if value is not None}
    features = np.abs(np.random.Generator(np.random.Philox(key=1)).normal(size=(SAMPLES, FEATURES)))
    own = write_samples(folder, features.astype(np.float32), np.arange(SAMPLES) % 2)
    if "task" not in values:
        values |= own
    SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=MU, delta=1e-5)
    (folder / "node.toml").write_text(toml_document(values))
    return NodeConfig.read(folder / "node.toml")


def of_task(folder, **changes):
    return made(folder, **{**TASK, **changes})


def test_the_file_decides_the_means_share_and_bound(tmp_path):
    client = made(tmp_path, **CENTRED, centring_share=0.2).client()
    mean, rest = client.centred.centring.policy, client.machine.policy
    assert (mean.mu, rest.mu) == (pytest.approx(math.sqrt(0.2)), pytest.approx(math.sqrt(0.8)))
    assert mean.budget_mu == rest.budget_mu == MU
    assert (mean.clip_norm, mean.clip_unit, mean.noise_quality) == (2.0, "nonnegative", "exact")
    assert client.gradients.shapes == [(2, FEATURES + 1)]
    said = describe(client)
    assert "mu = 1 Gaussian DP" in said
    assert "Of it mu = 0.4473 is for the mean of its features, which it releases first." in said


def test_mean_and_training_spend_exactly_the_budget(tmp_path):
    client = made(tmp_path, **CENTRED).client()
    arrays, examples, _ = client.fit([], training_config(session="m", **{protocol.RELEASE_OF: protocol.OF_MEAN}))
    assert (arrays[0].shape, examples) == ((FEATURES,), SAMPLES)
    centre = {protocol.CENTRE: (arrays[0] / examples).astype("<f4").tobytes()}
    for t in (1, 2, 3):
        assert np.concatenate(client.fit([np.zeros((2, FEATURES + 1))], training_config(t, **centre))[0]).any()
    assert client.statement("s")["mu-guaranteed"] == pytest.approx(MU)
    with pytest.raises(RefusedError, match="budget"):
        client.fit([], training_config(session="again", **{protocol.RELEASE_OF: protocol.OF_MEAN}))
    with pytest.raises(RefusedError, match="budget"):
        client.fit([np.zeros((2, FEATURES + 1))], training_config(1, session="other", **centre))
    # The same from the file again: the ledger is what remembers.
    again = NodeConfig.read(tmp_path / "node.toml").client()
    with pytest.raises(RefusedError, match="cap"):
        again.fit([], training_config(session="m", **{protocol.RELEASE_OF: protocol.OF_MEAN}))


def test_built_in_features_declare_bounds_and_centring(tmp_path):
    client = of_task(tmp_path).client()
    mean = client.centred.centring.policy
    assert (mean.clip_norm, mean.clip_unit) == (1.0, "nonnegative")
    assert client.centred.centring.num_features == 192
    other = tmp_path / "other"
    other.mkdir()
    assert of_task(other, centring="none").client().centred is None


def test_a_machine_that_trusts_its_server_says_that_its_mean_goes_without_noise(tmp_path):
    client = of_task(tmp_path, strategy="trusted-full-batch").client()
    assert client.centred.centring.policy.trust == "trusted-server"
    assert "and to the mean of its features before them" in describe(client)
    assert "keep mu = 1 a run" in describe(client)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"centring": "private"}, "centring-norm to be set with centring and `samples`"),
        ({"centring-norm": 1.0}, "centring-norm"),
        ({"centring-nonnegative": True}, "centring-nonnegative to be unset"),
        ({"centring-share": 0.1}, "centring-share to be unset without centring"),
        ({**CENTRED, "centring-share": 1.0}, "centring-share to be a number > 0 and < 1"),
        ({**CENTRED, "strategy": "online", "learning-rate": 0.1}, "centring to be 'none' or empty"),
        ({"centring": "public"}, "centring"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path, changes, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        made(tmp_path, **changes)
    assert "\n" not in str(error.value)
