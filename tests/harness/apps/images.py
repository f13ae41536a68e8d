"""A small convolutional network on images, with batches that are mappings."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from tests.harness.apps import partition


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.fc = torch.nn.Linear(8 * 4 * 4, 10)

    def forward(self, images):
        hidden = torch.nn.functional.max_pool2d(torch.relu(self.conv(images)), 2)
        return self.fc(hidden.flatten(1))


def load(context):
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    parts = partition(images, digits.target, context)
    sets = [[{"img": torch.from_numpy(x), "label": int(y)} for x, y in zip(*part, strict=True)] for part in parts]
    return DataLoader(sets[0], batch_size=16, shuffle=True), DataLoader(sets[1], batch_size=64)


app = ClientApp()


@app.train()
def train(message, context):
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["img"]), batch["label"])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.eval()
    _, loader = load(context)
    right = count = 0
    with torch.no_grad():
        for batch in loader:
            y = batch["label"]
            right += int((model(batch["img"]).argmax(1) == y).sum())
            count += len(y)
    metrics = MetricRecord({"eval_acc": right / count, "num-examples": count})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0)
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=4)
