"""What a client does: as it was without privacy, and in the three ways that the run configuration can choose."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, Label, Part, Schema, UpdatePolicy, private_client_app
from murmurfl.privacy import SumAssumption

from .task import Net, load_data, train

ROUNDS, PLAIN_ROUNDS = 40, 10
# Of a hundred clients, fifty may work with the server; a sum of fewer than eighty is not opened.
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(min_honest=50, min_cohort=80), "helpers": 2}
# What everybody knows of an image and its label; the network is tried at once on some made from it.
RECORD = Schema(inputs=(Part(shape=(1, 28, 28), bounds=(-1, 3)),), label=Label(classes=10))


def private(**trust: object) -> ClientApp:
    """After: privacy for every single image. The client's training is no longer needed."""
    return private_client_app(
        Net,
        torch.nn.functional.cross_entropy,
        load_data,
        epsilon=4.0,
        rounds=ROUNDS,
        clip_norm=2.0,
        schema=RECORD,
        **trust,
    )


plain = ClientApp()  # before
swapped = ClientApp(  # privacy for all images of a client
    mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, epsilon=4.0, max_participations=PLAIN_ROUNDS))]
)


@plain.train()
@swapped.train()
def train_on_a_client(msg: Message, context: Context) -> Message:
    """Train the model on this client's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context)
    metrics = {"train_loss": train(net, data), "num-examples": len(data[1])}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


summed = private(**SUMS)
APPS = {"none": plain, "client": swapped, "untrusted-server": private(), "secure-aggregation": summed}


class Chosen(ClientApp):
    """The app that the run configuration names; a project of your own needs only one of them."""

    def __call__(self, message: Message, context: Context) -> Message:
        return APPS[str(context.run_config["privacy"])](message, context)


app = Chosen()
