"""Real nodes with private centring, under a server that is killed in the round of the mean and right after it."""

import numpy as np
import pytest
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.privacy import read_ledger

from tests.deployment.rig import configuration, federation

pytestmark = pytest.mark.deployment

MU, ROUNDS = 2.0, 3
SETTINGS = {
    "features": "soft-gradients",
    "strategy": "full-batch",
    "num_clients": 2,
    "clients_per_round": 2,
    "num_rounds": ROUNDS,
    "mu": MU,
    "node_deadline_s": 120.0,
    "round_timeout_s": 30.0,
}
# With all sums of the mean heard and none in a checkpoint, and with the mean in its checkpoint before the first round.
KILLS = [["heard", 1], ["saved", 1]]


def test_a_server_killed_around_the_mean_costs_nothing_twice(tmp_path):
    folder = tmp_path / "run"
    with federation(configuration(folder, **SETTINGS), folder, 600) as real:
        real.start({"node-0": {}, "node-1": {}})
        for _ in KILLS:
            with pytest.raises(LaunchError):
                real.submit({"kills": KILLS})
            assert not (folder / "result.json").exists()
            assert (folder / "checkpoint-mean.npz").exists()
        real.submit({"kills": KILLS})
        assert (folder / "killed").read_text().splitlines() == [f"{step} {number}" for step, number in KILLS]
        result = real.result()
        assert result["rounds"] == ROUNDS
        assert result["mu"] == pytest.approx(MU, rel=1e-12)
        assert (result["centring"]["asked"], result["centring"]["aggregated"]) == (2, 2)
        assert result["refusals"] == 0
        for name in real.running.nodes:
            ledger = read_ledger(real.ledger(name))
            assert sorted(session.releases for session in ledger.sessions) == [1, ROUNDS]
            assert ledger.spent.mu == pytest.approx(MU, rel=1e-12)
            # What was lost with the server was sent again as it was, and not made again.
            digests = [line["digest"] for line in real.lines(name, "sent")]
            assert digests[0] == digests[1]
            assert len(set(digests)) == len(digests) - 1 == 1 + ROUNDS
        with np.load(folder / "model.npz") as model:
            assert model["weight"].shape == (10, model["centring.centre"].size + 1)
