"""Trees that travel as bytes, as bagging of boosted trees does."""

import pickle

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from sklearn.tree import DecisionTreeClassifier

from tests.harness.apps import partition, two_classes

app = ClientApp()


@app.train()
def train(message, context):
    (features, labels), _ = partition(*two_classes(), context)
    tree = DecisionTreeClassifier(max_depth=3).fit(features, labels)
    arrays = ArrayRecord({"tree": Array(np.frombuffer(pickle.dumps(tree), dtype=np.uint8))})
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})}), reply_to=message
    )


server = ServerApp()


@server.main()
def main(grid, context):
    empty = ArrayRecord({"tree": Array(np.zeros(1, dtype=np.uint8))})
    messages = [Message(RecordDict({"arrays": empty}), node, "train") for node in grid.get_node_ids()]
    assert all(not reply.has_error() for reply in grid.send_and_receive(messages))
