"""Rounds that do not wait for the slowest: rounds an hour on real nodes, and accuracy by a clock that nobody waits for.

A fifth of the clients answers 10 to 60 s late. On real nodes, processes with TLS and ledgers of their own, rounds are
counted from the end of the first to the end of the last. Accuracy is that of the same protocol in one process, with the
same lateness by a virtual clock, over several seeds that both candidates share: real rounds would take hours.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType
from flwr.clientapp import ClientApp
from murmurfl.app.client_app import app as client_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.fleet.deployment import Deployment, deployment, node_settings
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import protocol
from murmurfl.strategies.rounds.in_flight import Clock

from .slow_node import delay

LEAST_S, MOST_S, FAST_S = 10.0, 60.0, 3.0
REAL = RunConfig(num_clients=5, clients_per_round=5, num_rounds=3, batch_size=8, mu=4.0, evaluate_every=100)
PATIENT_ROUNDS = 12
VIRTUAL = RunConfig(
    task="mnist", num_clients=20, clients_per_round=20, num_rounds=90, batch_size=32, mu=1.0, evaluate_every=1000
)
SEEDS = (1, 2, 3, 4, 5)
_ROUND = re.compile(r"round (\d+)/(\d+)")


def measure(seeds: Iterable[int] = SEEDS) -> dict[str, Any]:
    """Both, for waiting for all and for four fifths; over-sampling by the virtual clock."""
    return {"real": measure_real(), "virtual": measure_virtual(seeds)}


def measure_real() -> list[dict[str, Any]]:
    """Return rounds an hour on real nodes, one of five late: two runs over the same nodes."""
    configs = (REAL, replace(REAL, quorum=0.8, num_rounds=PATIENT_ROUNDS))
    experiment, package = prepare(configs[-1]), str(Path(__file__).resolve().parents[1])
    log = _Log()
    with (
        tempfile.TemporaryDirectory() as made,
        deployment(Path(made), timeout_s=1200.0, on_line=log.look, environment={"PYTHONPATH": package}) as running,
    ):
        names = [f"node-{i}" for i in range(REAL.num_clients)]
        budget = {"budget-mu": REAL.mu * len(configs)}
        running.add_nodes({name: {**node_settings(experiment, i), **budget} for i, name in enumerate(names)})
        for number, name in enumerate(names):
            slow = [sys.executable, "-m", "benchmarks.slow_node", str(LEAST_S), str(MOST_S), "1"]
            running.start_node(name, slow if number % 5 == 0 else ())
        return [_real(running, config, Path(made) / f"{config.num_rounds}", log) for config in configs]


class _Log:
    """When the log had a line of each round, by its number; of some rounds it has none."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def look(self, line: str) -> None:
        if found := _ROUND.search(line):
            self.ended.setdefault(int(found[1]), time.monotonic())


def _real(running: Deployment, config: RunConfig, folder: Path, log: _Log) -> dict[str, Any]:
    log.ended.clear()
    running.submit({**_changed(config), "out-dir": str(folder.parent), "run-name": folder.name})
    result = json.loads((folder / "result.json").read_text())
    first, last = min(log.ended), max(log.ended)
    seconds = (log.ended[last] - log.ended[first]) / (last - first)
    return {
        "quorum": config.quorum,
        "clients": config.num_clients,
        "rounds": config.num_rounds,
        "seconds_a_round": seconds,
        "rounds_an_hour": 3600 / seconds,
        "aggregated": result["aggregated"],
        "late": result["late_replies"],
        "lost": result["lost_replies"],
    }


def _changed(config: RunConfig) -> dict[str, Any]:
    """Return the keys that are not at their defaults."""
    usual = RunConfig().to_mapping()
    return {name: value for name, value in config.to_mapping().items() if value != usual[name]}


class VirtualGrid(InProcessGrid):
    """Nodes in this process whose releases are on their way for a while, by a clock that runs when somebody waits.

    Parameters
    ----------
    app : ClientApp
    config : RunConfig
        Every fifth of its clients is late, and works on one request at a time.
    """

    def __init__(self, app: ClientApp, config: RunConfig) -> None:
        super().__init__(app, config.num_clients, config.to_mapping())
        self.now, self.clock = 0.0, Clock(lambda: self.now, self._sleep)
        self._due: dict[str, float] = {}
        self._seed = config.seed

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, one in zip(messages, ids, strict=True):
            if message.metadata.message_type == MessageType.TRAIN:
                config = message.content[protocol.CONFIG]
                name, server_round = str(config[protocol.CLIENT]), int(config[protocol.SERVER_ROUND])  # type: ignore[arg-type]
                number = int(name)
                late = delay(LEAST_S, MOST_S, self._seed * 1000 + number, server_round) if number % 5 == 0 else 0.0
                self._due[one] = self.now + FAST_S + late
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages([one for one in message_ids if self._due.get(one, 0.0) <= self.now])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        self.now = max([self.now, *(self._due.get(one, 0.0) for one in ids)])
        return self.pull_messages(ids)


CANDIDATES: dict[str, dict[str, Any]] = {
    "all": {},
    "quorum = 0.8": {"quorum": 0.8},
    "all, 10 of 20 a round": {"clients_per_round": 10, "num_rounds": 180, "sampling": "balanced"},
    "over-selection = 1.2, 10 of 20 a round": {
        "clients_per_round": 10, "over_selection": 1.2, "num_rounds": 150, "sampling": "balanced",
    },
}  # fmt: skip


def measure_virtual(seeds: Iterable[int] = SEEDS) -> list[dict[str, Any]]:
    """Accuracy and rounds an hour by the virtual clock."""
    seeds, rows = list(seeds), []
    for name, changes in CANDIDATES.items():
        made = [_virtual(replace(VIRTUAL, seed=seed, **changes)) for seed in seeds]
        accuracies = [accuracy for accuracy, _, _ in made]
        rows.append(
            {
                "ends": name,
                "accuracy": statistics.mean(accuracies),
                "deviation": statistics.stdev(accuracies) if len(seeds) > 1 else 0.0,
                "rounds_an_hour": statistics.mean(pace for _, pace, _ in made),
                "aggregated": statistics.mean(share for _, _, share in made),
                "seeds": len(seeds),
            }
        )
    return rows


def _virtual(config: RunConfig) -> tuple[float, float, float]:
    """Accuracy, rounds an hour, and which share of what could be aggregated was."""
    experiment = prepare(config)
    grid = VirtualGrid(client_app, config)
    strategy = experiment.strategy(allow_exhaustion=True)
    strategy.requests.clock = grid.clock
    result = strategy.start(grid, experiment.initial_arrays(), num_rounds=experiment.num_rounds, timeout=600.0)
    accuracy = float(experiment.evaluate(result.arrays)["accuracy"])  # type: ignore[arg-type]
    share = sum(report.aggregated for report in strategy.history) / (config.asked_per_round * experiment.num_rounds)
    return accuracy, experiment.num_rounds / grid.now * 3600, share


def table(made: dict[str, Any]) -> str:
    """Both as tables."""
    real, virtual = made["real"], made["virtual"]
    pace = real[1]["rounds_an_hour"] / real[0]["rounds_an_hour"]
    lines = [
        "| real nodes | rounds | seconds a round | rounds an hour | releases aggregated |",
        "|---|---|---|---|---|",
        *(
            f"| `quorum = {row['quorum']:g}`, {row['clients']} nodes, one late | {row['rounds']} | "
            f"{row['seconds_a_round']:.1f} | {row['rounds_an_hour']:,.0f} | {row['aggregated']} |"
            for row in real
        ),
        "",
        f"{pace:.1f} times as many rounds an hour.",
        "",
        "| a round ends with | accuracy | rounds an hour | releases aggregated |",
        "|---|---|---|---|",
        *(
            f"| {row['ends']} | {100 * row['accuracy']:.2f} ± {100 * row['deviation']:.2f} | "
            f"{row['rounds_an_hour']:,.0f} | {100 * row['aggregated']:.0f} % |"
            for row in virtual
        ),
        "",
        f"MNIST, 20 clients, mu = {VIRTUAL.mu:g}, means over {virtual[0]['seeds']} seeds, by a virtual clock.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stragglers", description=__doc__)
    parser.add_argument("--only", choices=["real", "virtual"])
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    if arguments.only:
        print(json.dumps(measure_real() if arguments.only == "real" else measure_virtual(seeds), indent=2))
    else:
        print(table(measure(seeds)))


if __name__ == "__main__":
    main()
