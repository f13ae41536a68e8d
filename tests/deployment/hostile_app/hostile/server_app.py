"""The hostile server over real nodes: what came back goes to a file, one line an answer."""

import json
import time
from pathlib import Path

from flwr.serverapp import ServerApp

from .attack import Attack

app = ServerApp()


@app.main()
def main(grid, context):
    """Attack all nodes."""
    config = context.run_config
    while len(nodes := sorted(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.5)
    attack = Attack(config["features"], config["seed"])
    partial = Path(config["answers"] + ".part")
    with partial.open("w") as file:
        for answer in attack.on(grid, nodes, config["requests"]):
            print(json.dumps(answer), file=file, flush=True)
    partial.rename(config["answers"])
