"""A client on Flower's legacy interface: the client and its client_fn are as they were."""

from flwr.app import Context
from flwr.client import Client, NumPyClient
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy, numpy_client_app
from murmurfl.privacy import SumAssumption

from .task import Arrays, Data, load_data, train


class DigitsClient(NumPyClient):
    """Trains on all of its data in every round."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def fit(self, parameters: Arrays, config: dict) -> tuple[Arrays, int, dict]:
        """Return the trained model; the number of samples and the metrics beside it never leave the client."""
        labels = self.data[1]
        model = parameters
        for _ in range(config["epochs"]):
            model = train(model, self.data, config["lr"])
        return model, len(labels), {"labels-seen": len(set(labels))}


def client_fn(context: Context) -> Client:
    """Return the client of one client."""
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return DigitsClient(data).to_client()


# Before: app = ClientApp(client_fn)
POLICY = UpdatePolicy(
    clip_norm=1.0,
    epsilon=4.0,
    max_participations=15,
    trust="secure-aggregation",
    sums=SumAssumption(min_honest=90, min_cohort=95),
)
app = numpy_client_app(client_fn, mods=[CorrelatedNoiseMod(simulation=POLICY)])
