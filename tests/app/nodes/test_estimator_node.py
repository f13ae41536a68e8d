"""``murmurfl node`` with an estimator of scikit-learn: one sample's failure counts as zero, and shows nowhere."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from murmurfl.app.nodes.node_app import client_of, read_node
from murmurfl.clients import LinearEstimator
from murmurfl.privacy import SQLiteLedger
from sklearn.linear_model import SGDClassifier

from tests.harness.clients import training_config
from tests.harness.grid import ask_real_node
from tests.harness.schemas import write_schema

SECRET = "patient 4711"
PROJECT = """
import numpy as np
from murmurfl.clients import LinearEstimator, private_client_app
from sklearn.linear_model import SGDClassifier

FEATURES = np.array([[i % 6, 1.0] for i in range(60)], dtype=object)
LABELS = np.array(["benign", "malignant"] * 30, dtype=object)
BROKEN = FEATURES.copy(), LABELS.copy()
BROKEN[0][2::6, 0], BROKEN[1][3::6], BROKEN[0][4::6, 1] = "SECRET", "SECRET", np.nan

MODEL = LinearEstimator(SGDClassifier(), num_features=2, classes=("benign", "malignant"))
whole = private_client_app(MODEL, samples=lambda context: (FEATURES, LABELS), mu=1e3, rounds=9)
broken = private_client_app(MODEL, samples=lambda context: BROKEN, mu=1e3, rounds=9)
""".replace("SECRET", SECRET)

FILE = """
client = "clinic-0"
ledger = "ledger.sqlite"
method = "full-batch"
clip-norm = 2.0
mu = 10.0
max-participations = 1
schema = "schema.toml"
num-records = 60
app = "{app}"
"""


def clipped_sum(numbers):
    """By hand: the hinge's gradient at zero is -y (features, 1)."""
    total = np.zeros(3)
    for i in [*numbers] * 10:
        row = (1.0 if i % 2 == 0 else -1.0) * np.array([i, 1.0, 1.0])
        total += row * min(1.0, 2.0 / np.linalg.norm(row))
    return total


@pytest.mark.parametrize(("app", "counted"), [("whole", range(6)), ("broken", (0, 1, 5))])
def test_samples_that_cannot_be_read_count_as_zero_and_nothing_shows(app, counted, tmp_path, monkeypatch, hushed_noise):
    name = f"estimator_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("MURMURFL_NODE_CONFIG", raising=False)
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=10.0, delta=1e-5)
    write_schema(tmp_path / "schema.toml", (2,), bounds=(0, 10), classes=("benign", "malignant"))
    (tmp_path / "node.toml").write_text(FILE.format(app=f"{name}:{app}"))
    answers, _ = client_of(read_node(tmp_path / "node.toml"))
    arrays = LinearEstimator(SGDClassifier(), 2, ("benign", "malignant")).initial_arrays()
    reply = ask_real_node(answers, RecordDict({"arrays": arrays, "config": ConfigRecord(training_config())}))
    assert not reply.has_error(), reply.error
    sent = np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])
    assert sent == pytest.approx(clipped_sum(counted), abs=2.0)  # 5 standard deviations: one of 10^6 runs is beyond
    assert SECRET not in repr(reply.content)
    others = {"whole": (0, 1, 5), "broken": range(6)}[app]
    assert np.abs(clipped_sum(counted) - clipped_sum(others)).max() > 8.0
