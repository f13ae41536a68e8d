"""A member of real processes that sends what it likes: rounds go on with the others, and their sum is unharmed."""

import pytest

from tests.deployment.rig import assert_nothing_is_missing_or_left_over, configuration, federation

pytestmark = pytest.mark.deployment

CLIENTS = 4
LIAR = "node-3"
LIES = (
    *("message that does not parse", "record that does not parse", "endless text", "huge release", "another sender"),
    *("endless array", "never uploaded"),
)
TIMEOUT_S = 20.0


def test_no_lie_of_a_member_ends_or_spoils_a_training(tmp_path):
    """The sum of all releases is that of the honest ones, to the last bit; the liar was honest in the first round."""
    rounds = len(LIES) + 1
    settings = {"clients_per_round": CLIENTS, "num_rounds": rounds, "batch_size": 10, "round_timeout_s": TIMEOUT_S}
    config = configuration(tmp_path / "run", num_clients=CLIENTS, evaluate_every=rounds, **settings)
    with federation(config, tmp_path / "run", 600) as real:
        plans = {name: {} for name in real.running.nodes}
        plans[LIAR] = {"lies": {str(2 + place): lie for place, lie in enumerate(LIES)}, "bytes": 100 * 2**20}
        real.start(plans)
        real.submit()
        assert [lie for _, lie in real.lines(LIAR, "lied")] == list(LIES)
        history = real.history()
        assert [report["aggregated"] for report in history] == [CLIENTS, *[CLIENTS - 1] * len(LIES)]
        # The last one is late, and so is the one before where the server refuses or is slow to take 100 MiB.
        assert [report["malformed"] for report in history][:6] == [0, 1, 1, 1, 1, 1]
        assert real.result()["rounds"] == rounds
        assert_nothing_is_missing_or_left_over(real)
