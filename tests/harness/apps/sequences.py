"""A recurrent network whose loss is a negative log-likelihood."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.apps import partition


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.linear = torch.nn.GRU(1, 8, batch_first=True), torch.nn.Linear(8, 2)

    def forward(self, x):
        return torch.log_softmax(self.linear(self.gru(x)[1][0]), dim=1)


def waves():
    random = np.random.Generator(np.random.Philox(key=13))
    labels = random.integers(0, 2, size=1500)
    steps = np.arange(10)[None] * np.where(labels, 0.9, 0.3)[:, None] + random.uniform(0, 6, size=(1500, 1))
    return (np.sin(steps) + 0.1 * random.normal(size=(1500, 10))).astype(np.float32)[..., None], labels


def load(context):
    sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in partition(*waves(), context)]
    return DataLoader(sets[0], batch_size=16, shuffle=True), DataLoader(sets[1], batch_size=256)


app = ClientApp()


@app.train()
def train(message, context):
    model = Recurrent()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model.train()
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            x, y = batch
            loss = torch.nn.functional.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model = Recurrent()
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
    strategy.start(grid, ArrayRecord(Recurrent().state_dict()), num_rounds=4)
