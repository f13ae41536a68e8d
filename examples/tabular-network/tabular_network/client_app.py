"""What a bank does: as it was without privacy, and in the ways that the run configuration can choose."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, Label, Part, Schema, UpdatePolicy, private_client_app
from murmurfl.privacy import PrivacyPolicy, SumAssumption

from .task import FEATURES, load_data, make_net, train

ROUNDS, PLAIN_ROUNDS = 40, 10
# Of twenty banks, ten may work with the server; a sum of fewer than sixteen is not opened.
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(min_honest=10, min_cohort=16)}
HELPERS = 2
# What everybody knows of a customer's features; the network is tried at once on some made from it.
RECORD = Schema(inputs=(Part(shape=(FEATURES,), bounds=(-5, 5)),), label=Label(classes=2))


def private(mechanism: str = "independent", **trust: object) -> ClientApp:
    """After: privacy for every single customer. The bank's own training is no longer needed."""
    policy = PrivacyPolicy(
        clip_norm=1.0,
        batch_size=1,
        max_participations=ROUNDS,
        epsilon=4.0,
        batch_selection="full_batch",  # every customer in every release
        mechanism=mechanism,
        release_rule="paper",
        **trust,
    )
    loss = torch.nn.functional.cross_entropy
    return private_client_app(make_net, loss, load_data, policy=policy, helpers=HELPERS, schema=RECORD)


plain = ClientApp()  # before
swapped = ClientApp(  # privacy for all customers of a bank
    mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, epsilon=4.0, max_participations=PLAIN_ROUNDS))]
)


@plain.train()
@swapped.train()
def train_in_a_bank(msg: Message, context: Context) -> Message:
    """Train the model on this bank's customers."""
    net = make_net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context)
    metrics = {"train_loss": train(net, data), "num-examples": len(data[1])}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


summed = private(**SUMS)
APPS = {
    "none": plain,
    "client": swapped,
    "without-noise": private("none"),
    "untrusted-server": private(),
    "secure-aggregation": summed,
}


class Chosen(ClientApp):
    """The app that the run configuration names; a project of your own needs only one of them."""

    def __call__(self, message: Message, context: Context) -> Message:
        return APPS[str(context.run_config["privacy"])](message, context)


app = Chosen()
