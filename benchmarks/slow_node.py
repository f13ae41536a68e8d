"""A node that takes its time: ``python -m benchmarks.slow_node LEAST MOST SEED node CONFIG [options]``.

It is the `murmurfl` command, and holds every release back for LEAST to MOST seconds before it is sent.
"""

import sys
import time

import numpy as np
from flwr.app import Message
from murmurfl.app.commands import main as cli
from murmurfl.app.nodes import executor
from murmurfl.privacy import derived_seed, protocol


def delay(least: float, most: float, seed: int, number: int) -> float:
    """Seconds by which a client's release with this number is late."""
    coin = np.random.Generator(np.random.Philox(key=derived_seed("straggler", seed, number))).random()
    return least + (most - least) * float(coin)


if __name__ == "__main__":
    LEAST, MOST, SEED = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:4]
    push = executor.push_message

    def slowly(client: object, message: Message, context: object) -> None:
        """Send, releases after a while."""
        if not message.has_error() and protocol.METRICS in message.content:
            time.sleep(delay(LEAST, MOST, SEED, int(message.content[protocol.METRICS][protocol.RELEASE])))  # type: ignore[arg-type]
        push(client, message, context)  # type: ignore[arg-type]

    executor.push_message = slowly  # type: ignore[assignment]
    cli.main()
