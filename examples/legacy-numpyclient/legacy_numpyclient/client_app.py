"""A machine on Flower's legacy interface: the client and its client_fn are as they were."""

from flwr.app import Context
from flwr.client import Client, NumPyClient
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy, numpy_client_app

from .task import Arrays, Data, load_data, train

ROUNDS = 10
"""As many parts as rounds: no sample is used twice."""


class DigitsClient(NumPyClient):
    """Trains on one part of its data a round."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def fit(self, parameters: Arrays, config: dict) -> tuple[Arrays, int, dict]:
        """Train on one part of the data: which one is the machine's own count, for a server could repeat its rounds."""
        part = slice(config["part"], None, ROUNDS)
        features, labels = (values[part] for values in self.data)
        model = train(parameters, (features, labels), config["lr"])
        return model, len(labels), {"labels-seen": len(set(labels))}


def client_fn(context: Context) -> Client:
    """The client of one machine."""
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return DigitsClient(data).to_client()


# Before: app = ClientApp(client_fn)
POLICY = UpdatePolicy(clip_norm=0.7, mu=4.0, max_participations=ROUNDS, releases_per_pass=ROUNDS)
app = numpy_client_app(client_fn, mods=[CorrelatedNoiseMod(simulation=POLICY)])
