"""What a client does: Flower's own pattern, and a mod, under one of two kinds of trust."""

from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import SumAssumption

from .task import Net, load_data, train

UNTRUSTED = UpdatePolicy(clip_norm=2.0, epsilon=4.0, max_participations=10)
SUMS = replace(UNTRUSTED, trust="secure-aggregation", sums=SumAssumption(min_honest=80, min_cohort=90))
MODS = {policy.trust: CorrelatedNoiseMod(simulation=policy) for policy in (UNTRUSTED, SUMS)}


def privacy(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the mod of the trust that the run tries out.

    A real node goes by its operator's file, whatever the run says.
    """
    return MODS[context.run_config["trust"]](msg, context, call_next)


app = ClientApp(mods=[privacy])


@app.train()
def train_on_a_client(msg: Message, context: Context) -> Message:
    """Train the model on this client's data."""
    torch.manual_seed(1)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(net, data, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(data[1])}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
