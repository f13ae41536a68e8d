"""An app that would steal raw gradients, with a server that asks for them and for other things it must not get."""

import json

import pytest

STEALING_CLIENT = """
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

Path("{marker}").touch()  # on import already
app = ClientApp()

@app.train()
@app.query()
def train(message, context):
    Path("{marker}").write_text("executed")
    gradient = np.full(10, 42.0)  # stands for the raw gradient, which code on the client can always compute
    return Message(RecordDict({{"arrays": ArrayRecord([gradient]), "metrics": MetricRecord({{"num-examples": 1}})}}),
                   reply_to=message)
"""

ASKING_SERVER = """
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < {nodes}:
        time.sleep(0.5)
    # Two lots, each sent all at once: a round trip costs seconds.
    lots = [
        {{
            "raw": ("train", {{}}),
            "other-version": ("query", {{"ask": "hello", "protocol-version": 99}}),
            "unknown-kind": ("train.other", {{}}),
            "evaluate": ("evaluate", {{"protocol-version": 1}}),
            "weaker": ("train", {{
                "protocol-version": 1, "server-round": 1, "session": "attack", "ack": 0, "mu": 1e9, "clip-norm": 1e9,
                "noise-quality": "fast", "mechanism": "none", "trust": "trusted-server", "max-participations": 10**6,
            }}),
        }},
        {{
            "forged-ack": ("train", {{"protocol-version": 1, "server-round": 2, "session": "attack", "ack": 7}}),
            "other-session": ("train", {{"protocol-version": 1, "server-round": 1, "session": "attack2", "ack": 0}}),
        }},
    ]
    points = [np.zeros((10, 64)), np.zeros(10)]
    seen = {{}}
    for requests in lots:
        messages = [
            Message(
                RecordDict({{
                    "arrays": ArrayRecord(points), "previous-arrays": ArrayRecord(points),
                    "config": ConfigRecord(config),
                }}),
                dst_node_id=node, message_type=kind, group_id=name,
            )
            for name, (kind, config) in requests.items() for node in nodes
        ]
        for reply in grid.send_and_receive(messages, timeout=60):
            if reply.has_error():
                answer = {{"code": reply.error.code, "reason": reply.error.reason}}
            else:
                arrays = [a.numpy().ravel().tolist() for r in reply.content.array_records.values() for a in r.values()]
                answer = {{"arrays": arrays}}
            seen.setdefault(reply.metadata.group_id, []).append(answer)
    Path("{answers}").write_text(json.dumps(seen))
"""

PROJECT = """
[project]
name = "stealing-app"
version = "1.0.0"
description = "Asks for raw gradients"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "stealing.server_app:app"
clientapp = "stealing.client_app:app"

[tool.flwr.app.config]
mu = 1000000.0
clip-norm = 1000000.0
noise-quality = "fast"
"""


class StealingApp:
    """A Flower App in ``folder`` whose ClientApp would send raw gradients."""

    def __init__(self, folder, nodes):
        self.folder = folder / "app"
        self.marker = folder / "executed"
        self.answers = folder / "answers.json"
        package = self.folder / "stealing"
        package.mkdir(parents=True)
        (self.folder / "pyproject.toml").write_text(PROJECT)
        (package / "__init__.py").touch()
        (package / "client_app.py").write_text(STEALING_CLIENT.format(marker=self.marker))
        (package / "server_app.py").write_text(ASKING_SERVER.format(answers=self.answers, nodes=nodes))

    def seen(self):
        return json.loads(self.answers.read_text())


@pytest.fixture(scope="session")
def make_stealing_app(tmp_path_factory):
    return lambda nodes: StealingApp(tmp_path_factory.mktemp("stealing"), nodes)
