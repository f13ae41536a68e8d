"""A network with batch normalisation, which no single sample has."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.apps import partition, two_classes


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def load(context):
    sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in partition(*two_classes(), context)]
    return DataLoader(sets[0], batch_size=32, shuffle=True), DataLoader(sets[1], batch_size=256)


app = ClientApp()


@app.train()
def train(message, context):
    model = Normed()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(1):
        for batch in loader:
            optimizer.zero_grad()
            x, y = batch
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model = Normed()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.eval()
    _, loader = load(context)
    right = count = 0
    with torch.no_grad():
        for batch in loader:
            x, y = batch
            right += int((model(x).argmax(1) == y).sum())
            count += len(y)
    metrics = MetricRecord({"eval_acc": right / count, "num-examples": count})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0)
    strategy.start(grid, ArrayRecord(Normed().state_dict()), num_rounds=3)
