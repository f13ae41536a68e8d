"""What a client does: Flower's own pattern, and one mod."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy

from .task import Net, load_data, train

# Before: app = ClientApp()
POLICY = UpdatePolicy(clip_norm=1.0, epsilon=4.0, max_participations=5)
app = ClientApp(mods=[CorrelatedNoiseMod(simulation=POLICY)])


@app.train()
def train_on_a_client(msg: Message, context: Context) -> Message:
    """Train the model on this client's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(net, data, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(data[1])}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
