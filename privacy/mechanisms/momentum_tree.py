r"""The weighted tree of private momentum (tran-cutkosky-2022, algorithms 1 and 3; ALGORITHMS section 4).

Momentum m_t = sum_{s <= t} alpha (1 - alpha)^{t-s} g_s is made from sums over dyadic intervals ("nodes")

    F_[y,z] = sum_{s=y..z} alpha (1 - alpha)^{z-s} g_s
    m_t     = sum over [y,z] in COMPOSE(1, t) of (1 - alpha)^{t-z} F_[y,z]

so only the nodes are noised, and a momentum has the noise of log2(t) + 1 nodes. Of the nodes that end at a step t,
prefixes only ever use the longest, so only these nodes are released. A sample that takes part once in an epoch of N
steps, always in the same place, changes a node by at most Delta times the sum of its weights there.

The paper has a count of nodes V and sensitivities that are upper bounds of the values computed here from the weights
themselves. (The sensitivity as printed there leaves the leaves without noise: ALGORITHMS section 4.)
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError

Node = tuple[int, int]
"""An interval [y, z] of steps, both ends included."""


def compose(first: int, last: int) -> list[Node]:
    """Disjoint dyadic intervals that make up [first, last], in order: COMPOSE of algorithm 3; 1 <= ``first``."""
    if first < 1:
        raise ConfigurationError(f"Expected steps counted from 1, got {first}.")
    nodes = []
    while first <= last:
        size = (first - 1) & -(first - 1) or 1 << last.bit_length()
        while first + size - 1 > last:
            size //= 2
        nodes.append((first, first + size - 1))
        first += size
    return nodes


def node_weights(size: int, alpha: float) -> NDArray[np.float64]:
    """The weights alpha (1 - alpha)^{z-s} of a node's steps, in their order."""
    return alpha * (1 - alpha) ** np.arange(size - 1, -1, -1, dtype=np.float64)


class MomentumTree:
    """The nodes of T steps, their weights, and the noise they need.

    Parameters
    ----------
    num_steps : int
        T >= 1.
    epoch_length : int
        N >= 1: a sample takes part in the steps c, c + N, c + 2 N, ... for one c.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    """

    def __init__(self, num_steps: int, epoch_length: int, alpha: float) -> None:
        if num_steps < 1 or epoch_length < 1:
            raise ConfigurationError(
                f"Expected num_steps >= 1 and epoch_length >= 1, got {num_steps} and {epoch_length}."
            )
        if not 0 < alpha <= 1:
            raise ConfigurationError(f"Expected 0 < alpha <= 1, got {alpha!r}.")
        self.num_steps, self.epoch_length, self.alpha = num_steps, epoch_length, float(alpha)

    def node(self, step: int) -> Node:
        """The node a step completes."""
        return step - (step & -step) + 1, step

    def materialize(self) -> NDArray[np.float64]:
        """The encoder C, shape (T, T): row t has the weights of the node that step t completes."""
        encoder = np.zeros((self.num_steps, self.num_steps))
        for step in range(1, self.num_steps + 1):
            first, last = self.node(step)
            encoder[step - 1, first - 1 : last] = node_weights(last - first + 1, self.alpha)
        return encoder

    def decoder(self) -> NDArray[np.float64]:
        """B, shape (T, T): row t makes m_t from the nodes."""
        rows = np.zeros((self.num_steps, self.num_steps))
        for step in range(1, self.num_steps + 1):
            for _, last in compose(1, step):
                rows[step - 1, last - 1] = (1 - self.alpha) ** (step - last)
        return rows

    @cached_property
    def changes(self) -> NDArray[np.float64]:
        """The change of each node for a sample in place c of the epoch, in units of one gradient: shape (T, N)."""
        changes = np.zeros((self.num_steps, self.epoch_length))
        for step in range(1, self.num_steps + 1):
            first, last = self.node(step)
            places = (np.arange(first, last + 1) - 1) % self.epoch_length
            np.add.at(changes[step - 1], places, node_weights(last - first + 1, self.alpha))
        return changes

    def noise_stds(self, change: float, mu: float, *, rounding: float = 0.0) -> NDArray[np.float64]:
        """Standard deviation of the noise on each node, shape (T,), so that all of them are mu-GDP.

        ``change`` is the L2 change of one step's gradient when one sample is replaced, ``rounding`` what rounding a
        node adds to its change.

        Notes
        -----
        **Formal guarantees.** The whole adaptively chosen sequence of noisy nodes, and whatever is made from it, is
        mu-GDP for replacement of one sample that takes part in no step but c, c + N, ...: sum over the nodes of
        (change of the node / its standard deviation)^2 is at most mu^2 for every c. Nothing is promised under
        reshuffling. Each standard deviation is in proportion to its node's largest change, as in the paper.
        Proof: docs/proofs/sensitivities.md.
        """
        if not (change > 0 and mu > 0 and math.isfinite(change) and math.isfinite(mu) and rounding >= 0):
            raise ConfigurationError(f"Expected change > 0, mu > 0 and rounding >= 0, got {change}, {mu}, {rounding}.")
        moved = self.changes * change + rounding * (self.changes > 0)
        largest = moved.max(axis=1)
        nodes = float(((moved / largest[:, None]) ** 2).sum(axis=0).max())
        return largest * (math.sqrt(nodes) / mu)
