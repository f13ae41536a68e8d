"""A strategy's rule, step by step."""

import numpy as np
from murmurfl.strategies.rounds.rule import Turn


def begun(strategy, start):
    """The state of a strategy's rule before its first round."""
    return strategy.rule.init(np.asarray(start), [])


def stepped(strategy, state, total, number, **facts):
    """The state after a round with the sum ``total``."""
    return strategy.rule.update(state, total, Turn(number, strategy.clients_per_round, **facts))
