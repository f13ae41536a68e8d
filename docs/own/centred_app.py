"""Both sides of a training that sees samples from their mean: full batches of least squares on three clients."""

import numpy as np
from flwr.app import ArrayRecord
from murmurfl.clients import Centring, ContextLedger, FullBatchClient, numpy_client_app
from murmurfl.privacy import PrivacyPolicy, SimulatedKeys, centring_policy, divided_mu
from murmurfl.strategies import FullBatch, MeanOfFeatures

MU, FEATURES = 1.0, 4
mean_mu, rest_mu = divided_mu(MU, 0.05)  # one budget, whose squares add up


class LeastSquares:
    """Per-sample gradients of a linear model."""

    shapes = ((FEATURES + 1,),)  # one more: the constant that stands beside the features

    def __call__(self, parameters, samples):
        features, labels = samples
        return (features @ parameters[0] - labels)[:, None] * features


class Samples:
    """One client's samples, made up."""

    def __init__(self, name):
        rows = np.random.default_rng(int(name)).random((500, FEATURES)).astype(np.float32)
        self.features = rows / np.linalg.norm(rows, axis=1)[:, None]  # no negative values, norm 1

    def __len__(self):
        return len(self.features)

    def __getitem__(self, chosen):
        return self.features[chosen], self.features[chosen, 0] > 0.5


def client_fn(context):
    """One client: its mean first, then its gradients, from one budget."""
    name = str(context.node_config["partition-id"])
    rest = PrivacyPolicy(
        clip_norm=1.0,
        batch_size=1,
        max_participations=3,
        mu=rest_mu,
        budget_mu=MU,
        mechanism="independent",
        release_rule="paper",
        batch_selection="full_batch",
    )
    mean = centring_policy(1.0, nonnegative=True, mu=mean_mu, budget_mu=MU)
    return FullBatchClient(
        LeastSquares(),
        Samples(name),
        rest,
        ContextLedger(context.state, name),
        SimulatedKeys(1, name),
        name=name,
        queries=[Centring(mean, FEATURES)],
    )


def train(grid):
    """Return the server: the mean of the features, then a training that sees samples from it."""
    centre = MeanOfFeatures(num_features=FEATURES, num_clients=3).collect(grid)
    strategy = FullBatch(num_clients=3, clients_per_round=3, learning_rate=0.5, public_inputs={"centre": centre})
    return centre, strategy.start(grid, ArrayRecord([np.zeros(FEATURES + 1)]), num_rounds=3)


app = numpy_client_app(client_fn)  # of a ClientApp; a ServerApp's main calls train(grid)
