"""Rounds of a training: whom they ask, which replies count, waiting, checkpoints, and the strategy around them."""
