"""scikit-learn's linear classifier by stochastic gradients, in passes of partial_fit."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier

from tests.harness.apps import partition


def data(context):
    features, labels = load_breast_cancer(return_X_y=True)
    features = (features - features.min(0)) / (features.max(0) - features.min(0)) * 2 - 1
    return partition(features, labels, context)


def estimator(arrays=None):
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=0)
    model.classes_ = np.array([0, 1])
    model.coef_, model.intercept_ = arrays or [np.zeros((1, 30)), np.zeros(1)]
    return model


app = ClientApp()


@app.train()
def train(message, context):
    model, (train_set, _) = estimator(message.content["arrays"].to_numpy_ndarrays()), data(context)
    model.partial_fit(*train_set)
    metrics = MetricRecord({"num-examples": len(train_set[1])})
    return Message(
        RecordDict({"arrays": ArrayRecord([model.coef_, model.intercept_]), "metrics": metrics}), reply_to=message
    )


@app.evaluate()
def evaluate(message, context):
    model, (_, test_set) = estimator(message.content["arrays"].to_numpy_ndarrays()), data(context)
    metrics = MetricRecord({"accuracy": float(model.score(*test_set)), "num-examples": len(test_set[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    FedAvg(fraction_train=1.0).start(grid, ArrayRecord([np.zeros((1, 30)), np.zeros(1)]), num_rounds=5)
