"""Runs under secure aggregation from which too little comes to open a sum: they end, and say why."""

import pytest
from flwr.app import MessageType
from murmurfl.app.client_app import app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.runs.training_run import NoReleasesError, run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

SUMS = {"trust": "secure-aggregation", "num-clients": 4, "clients-per-round": 4, "min-cohort": 4}
MISSING = r"closed \(3 of at least 4 releases\)"


class OneIsNeverHeard(InProcessGrid):
    """Of four machines and, after them, two helpers, the first machine's releases are lost."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        first = min(self.get_node_ids())
        return [
            reply
            for reply in replies
            if reply.metadata.message_type != MessageType.TRAIN or reply.metadata.src_node_id != first
        ]


def run(**changes):
    config = RunConfig.from_mapping({**SUMS, **changes})
    run_experiment(OneIsNeverHeard(app, 6, config.to_mapping()), config)


def test_a_run_whose_rounds_are_all_closed_ends_with_what_was_missing():
    with pytest.raises(NoReleasesError, match=rf"none in 2 rounds in a row, .* round 2: it was {MISSING}; no machine"):
        run(**{"num-rounds": 4, "give-up-after": 2})


def test_a_short_run_whose_rounds_were_all_closed_is_no_result():
    with pytest.raises(ConfigurationError, match=rf"none in 2 rounds: a round was {MISSING}; see the machines' logs"):
        run(**{"num-rounds": 2})
