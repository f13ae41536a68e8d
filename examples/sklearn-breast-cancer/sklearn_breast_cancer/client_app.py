"""What a client does: as it was without privacy, and in the three ways that the run configuration can choose."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, LinearEstimator, UpdatePolicy, private_client_app
from murmurfl.privacy import SumAssumption

from .task import load_data, make_model

ROUNDS, PLAIN_ROUNDS = 10, 3
# What nobody learns from data here: how many features there are, which classes, and how many samples altogether.
MODEL = LinearEstimator(make_model(), num_features=30, classes=(0, 1), num_samples=450)
# Of ten clients, two may work with the server; a sum of fewer than nine is not opened.
SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(min_honest=8, min_cohort=9), "helpers": 2}


def private(**trust: object) -> ClientApp:
    """After: privacy for every single sample. The client's training is no longer needed."""
    return private_client_app(MODEL, samples=load_data, epsilon=4.0, rounds=ROUNDS, clip_norm=1.5, **trust)


plain = ClientApp()  # before
swapped = ClientApp(  # privacy for all samples of a client
    mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, epsilon=4.0, max_participations=PLAIN_ROUNDS))]
)


@plain.train()
@swapped.train()
def train_on_a_client(msg: Message, context: Context) -> Message:
    """Fit the model to this client's data, from where the server's is."""
    model = MODEL.fitted(msg.content["arrays"]).set_params(warm_start=True)
    features, labels = load_data(context)
    model.fit(features, labels)
    arrays = ArrayRecord({"coef_": Array(model.coef_), "intercept_": Array(model.intercept_)})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})}), reply_to=msg)


summed = private(**SUMS)
APPS = {"none": plain, "client": swapped, "untrusted-server": private(), "secure-aggregation": summed}


class Chosen(ClientApp):
    """The app that the run configuration names; a project of your own needs only one of them."""

    def __call__(self, message: Message, context: Context) -> Message:
        return APPS[str(context.run_config["privacy"])](message, context)


app = Chosen()
