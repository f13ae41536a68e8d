"""The Flower ServerApp: FedAvg as it comes, with as many arrays a request as asked for; its rounds' ends as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg whose requests may carry further records of the model's shapes; it notes when rounds end.

    Parameters
    ----------
    points : int
        Records of arrays in a request. One that stood twice in a message would travel once, so each is another.
    options
        FedAvg's.
    """

    def __init__(self, points: int, **options: Any) -> None:
        super().__init__(**options)
        self.points = points
        self.ended: list[float] = []
        self.answered: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages, with one record of arrays for each point."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        others = {
            f"arrays-{point}": ArrayRecord({name: Array(values.numpy() + point) for name, values in arrays.items()})
            for point in range(1, self.points)
        }
        for message in messages:
            message.content.update(others)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedAvg's step, and the time when it was taken."""
        replies = list(replies)
        step = super().aggregate_train(server_round, replies)
        self.answered.append(sum(reply.has_content() for reply in replies))
        self.ended.append(time.perf_counter())
        return step


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and write when rounds ended."""
    started = time.perf_counter()
    config = context.run_config
    per_round, rows, columns = (int(config[name]) for name in ("clients-per-round", "rows", "columns"))
    start = ArrayRecord({"weight": Array(np.zeros((rows, columns))), "bias": Array(np.zeros(rows))})
    strategy = TimedFedAvg(
        int(config["points"]),
        fraction_train=per_round / int(config["num-clients"]),
        min_train_nodes=per_round,
        min_available_nodes=int(config["num-clients"]),
        fraction_evaluate=0.0,
    )
    strategy.start(grid, start, num_rounds=int(config["num-rounds"]))
    document = {"started": started, "ended": strategy.ended, "answered": strategy.answered}
    (Path(str(config["out-dir"])) / "rounds.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
