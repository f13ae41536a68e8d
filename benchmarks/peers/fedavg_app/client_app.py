"""The Flower ClientApp: it reads what came and answers with arrays of the model's shapes."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's interface
    """Half of the model that came, and every other record read."""
    model, *others = (record.to_numpy_ndarrays() for record in message.content.array_records.values())
    read = sum(float(values.sum()) for record in others for values in record)
    names = message.content.array_records["arrays"]
    halves = {name: Array(np.multiply(values, 0.5)) for name, values in zip(names, model, strict=True)}
    metrics = MetricRecord({"num-examples": 1, "read": read})
    return Message(RecordDict({"arrays": ArrayRecord(halves), "metrics": metrics}), reply_to=message)
