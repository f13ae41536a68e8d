"""A regression that the server evaluates on data of its own."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.apps import partition


class House(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x)


def prices():
    random = np.random.Generator(np.random.Philox(key=11))
    features = random.uniform(-1, 1, size=(6000, 5)).astype(np.float32)
    prices = features @ np.array([1.0, -0.5, 0.3, 0.0, 0.8]) + 0.2 * random.normal(size=6000)
    return features, prices.astype(np.float32)[:, None]


def load(context):
    sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in partition(*prices(), context)]
    return DataLoader(sets[0], batch_size=32, shuffle=True), DataLoader(sets[1], batch_size=256)


def central(server_round, arrays):
    model = House()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = (torch.from_numpy(part) for part in prices())
    with torch.no_grad():
        return MetricRecord({"r2": float(1 - (model(x) - y).square().sum() / (y - y.mean()).square().sum())})


app = ClientApp()


@app.train()
def train(message, context):
    model = House()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(1):
        for batch in loader:
            optimizer.zero_grad()
            x, y = batch
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(House().state_dict()), num_rounds=3, evaluate_fn=central)
