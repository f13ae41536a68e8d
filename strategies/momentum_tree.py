"""The weighted tree of private momentum (tran-cutkosky-2022, algorithms 1 and 3; ALGORITHMS section 4).

Momentum m_t = sum_{s <= t} alpha (1 - alpha)^{t-s} g_s is made from sums over dyadic intervals ("nodes")

    F_[y,z] = sum_{s=y..z} alpha (1 - alpha)^{z-s} g_s
    m_t     = sum over [y,z] in COMPOSE(1, t) of (1 - alpha)^{t-z} F_[y,z]

so only the nodes are noised, and a momentum has the noise of log2(t) + 1 nodes. Of the nodes that end at a step t,
prefixes only ever use the longest, so only these nodes are released. A sample that takes part once in an epoch of N
steps, always in the same place, changes a node by at most Delta times the sum of its weights there.

The paper has a count of nodes V and sensitivities that are upper bounds of the values computed here from the weights
themselves. (The sensitivity as printed there leaves the leaves without noise: ALGORITHMS section 4.)

The three trees of sensitivity-reduced momentum
-----------------------------------------------
They are those of algorithm 2 and lemma 17. Samples come in one order in every epoch of N steps; a_t is the iterate its
epoch began with. With the gradients of step t's sample, A_t at a_t, D_t = A_t - A_{t-N} and R_t at w_t minus A_t, and
the sums over dyadic intervals

    F^X_[y,z] = sum_{s=y..z} alpha (1 - alpha)^{z-s} X_s,    X = A, D, R

lemma 17 makes the momentum of the gradients A_t + R_t from a few nodes of each tree. With b = (1 - alpha)^N,
c_k = sum_{j<k} (1 - gamma)^j b^{k-1-j}, t = q N + r and the window W_e = [e - N + 1, e],

    m_t = b^q A_[1,r] + c_q A_{W_{r+N}} + sum_{k=1}^{q-1} c_k ((1 - gamma) D + gamma A)_{W_{t-(k-1)N}} + R_[1,t]

where COMPOSE makes up every interval. The identity holds for every gamma, so gamma only determines the noise: A has the
sensitivity of a gradient and counts in full only in the first 2 N steps, and D and R are small where the loss is smooth
and the path of an epoch is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError

Node = tuple[int, int]
"""An interval [y, z] of steps, both ends included."""


def compose(first: int, last: int) -> list[Node]:
    """Disjoint dyadic intervals that make up [first, last], in order: COMPOSE of algorithm 3; 1 <= ``first``."""
    if first < 1:
        raise ConfigurationError(f"Expected steps counted from 1, got {first}.", kind="out-of-range", setting="first")
    nodes = []
    while first <= last:
        size = (first - 1) & -(first - 1) or 1 << last.bit_length()
        while first + size - 1 > last:
            size //= 2
        nodes.append((first, first + size - 1))
        first += size
    return nodes


def node_weights(size: int, alpha: float) -> NDArray[np.float64]:
    """Return the weights alpha (1 - alpha)^{z-s} of a node's steps, in their order."""
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
                f"Expected num_steps >= 1 and epoch_length >= 1, got {num_steps} and {epoch_length}.",
                kind="out-of-range",
                setting="num_steps",
                got=num_steps,
            )
        if not 0 < alpha <= 1:
            raise ConfigurationError(
                f"Expected 0 < alpha <= 1, got {alpha!r}.", kind="out-of-range", setting="alpha", got=alpha
            )
        self.num_steps, self.epoch_length, self.alpha = num_steps, epoch_length, float(alpha)

    def node(self, step: int) -> Node:
        """Return the node a step completes."""
        return step - (step & -step) + 1, step

    def materialize(self) -> NDArray[np.float64]:
        """Return the encoder C, shape (T, T): row t has the weights of the node that step t completes."""
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
        """Return the standard deviation of the noise on each node, shape (T,), so that all of them are mu-GDP.

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
            raise ConfigurationError(
                f"Expected change > 0, mu > 0 and rounding >= 0, got {change}, {mu}, {rounding}.",
                kind="out-of-range",
                setting="change",
                got=change,
            )
        moved = self.changes * change + rounding * (self.changes > 0)
        largest = moved.max(axis=1)
        nodes = float(((moved / largest[:, None]) ** 2).sum(axis=0).max())
        return largest * (math.sqrt(nodes) / mu)


Series = Literal["anchored", "moved", "residual"]
SERIES: tuple[Series, ...] = get_args(Series)

_GAMMAS = (0.0, *np.geomspace(1e-3, 1.0, 25).tolist())


@dataclass(frozen=True)
class Changes:
    """Public bounds on how far one sample, replaced, moves a step's terms, in L2.

    Parameters
    ----------
    anchored : float
        Of A_t; > 0.
    moved : float
        Of D_t; >= 0.
    residual : tuple of float
        Of R_t, by the step's place in its epoch: N values >= 0.
    node_rounding : float
        What rounding the momentum adds to every node of the residuals' tree.
    """

    anchored: float
    moved: float
    residual: tuple[float, ...]
    node_rounding: float = 0.0

    def __post_init__(self) -> None:
        rest = (self.moved, *self.residual, self.node_rounding)
        if not (0 < self.anchored < math.inf and all(0 <= value < math.inf for value in rest)):
            raise ConfigurationError(
                f"Expected changes that are finite, and anchored > 0, got {self}.", kind="out-of-range"
            )


class ReconstructionTrees:
    """The nodes of T steps that lemma 17 uses, their weights, and the noise they need; 0 <= gamma <= 1.

    Nodes are numbered: those of ``anchored``, of ``moved``, then of ``residual``; within a tree by their last step and
    then by their length. Of the first two trees all dyadic intervals are nodes, of the third those of prefixes. The
    other parameters are those of :class:`~murmurfl.strategies.momentum_tree.MomentumTree`.
    """

    def __init__(self, num_steps: int, epoch_length: int, alpha: float, gamma: float) -> None:
        self.tree = MomentumTree(num_steps, epoch_length, alpha)
        if not 0 <= gamma <= 1:
            raise ConfigurationError(
                f"Expected 0 <= gamma <= 1, got {gamma!r}.", kind="out-of-range", setting="gamma", got=gamma
            )
        self.num_steps, self.epoch_length, self.alpha = num_steps, epoch_length, self.tree.alpha
        self.gamma = float(gamma)
        self._structure = _structure(num_steps, epoch_length, self.alpha)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all three trees, those that are never used among them."""
        return 2 * len(self._structure.ends) + self.num_steps

    def node(self, number: int) -> tuple[Series, int, int]:
        """Tree, first and last step of a node."""
        whole = len(self._structure.ends)
        if number >= 2 * whole:
            return ("residual", *self.tree.node(number - 2 * whole + 1))
        series, place = divmod(number, whole)
        end = int(self._structure.ends[place])
        return SERIES[series], end - int(self._structure.sizes[place]) + 1, end

    def row(self, step: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the nodes that lemma 17 makes m_t from, and their weights, for ``step`` t from 1 to T."""
        n, decay, structure = self.epoch_length, 1 - self.alpha, self._structure
        whole = len(structure.ends)
        q, r = divmod(step, n)
        numbers: list[NDArray[np.intp]] = []
        weights: list[NDArray[np.float64]] = []

        def add(first: int, weight: float, nodes: NDArray[np.intp], lags: NDArray[np.float64]) -> None:
            if weight:
                numbers.append(first + nodes)
                weights.append(weight * decay**lags)

        add(0, decay ** (step - r), *structure.composed(1, r))
        coefficients = self._coefficients
        if q:
            add(0, float(coefficients[q - 1]), *structure.composed(r + 1, r + n))
        for k in range(1, q):
            window = structure.composed(step - k * n + 1, step - (k - 1) * n)
            add(whole, float((1 - self.gamma) * coefficients[k - 1]), *window)
            add(0, float(self.gamma * coefficients[k - 1]), *window)
        prefix = np.array([last for _, last in compose(1, step)])
        add(2 * whole - 1, 1.0, prefix, np.asarray(step - prefix, dtype=np.float64))
        return np.concatenate(numbers), np.concatenate(weights)

    def materialize(self) -> NDArray[np.float64]:
        """Return the encoder C, shape (nodes, 3 T): what each node sums up of A_1 .. A_T, D_1 .. D_T and R_1 .. R_T."""
        encoder = np.zeros((self.num_nodes, 3 * self.num_steps))
        for number in range(self.num_nodes):
            series, first, last = self.node(number)
            start = SERIES.index(series) * self.num_steps + first - 1
            encoder[number, start : start + last - first + 1] = node_weights(last - first + 1, self.alpha)
        return encoder

    def decoder(self) -> NDArray[np.float64]:
        """B, shape (T, nodes): row t makes m_t from the nodes."""
        rows = np.zeros((self.num_steps, self.num_nodes))
        for step in range(1, self.num_steps + 1):
            numbers, weights = self.row(step)
            rows[step - 1, numbers] = weights
        return rows

    def moved(self, changes: Changes) -> NDArray[np.float64]:
        """Return each node's change for a sample in place c of the epoch: shape (nodes, N); 0 for nodes never used."""
        n = self.epoch_length
        if len(changes.residual) != n:
            raise ConfigurationError(
                f"Expected {n} residual changes, one a place, got {len(changes.residual)}.", kind="wrong-shape"
            )
        whole, prefixes = self._structure.by_place, self.tree.changes
        residual = prefixes * np.array(changes.residual) + changes.node_rounding
        moved = np.concatenate([whole * changes.anchored, whole * changes.moved, residual])
        return np.where(self._used[:, None] > 0, moved, 0.0)

    def noise_stds(self, changes: Changes, mu: float) -> NDArray[np.float64]:
        """Return the standard deviation of the noise on each node, shape (nodes,), so that all of them are mu-GDP.

        Notes
        -----
        **Formal guarantees.** The whole adaptively chosen sequence of noisy nodes, and whatever is made from it, is
        mu-GDP for replacement of one sample that takes part in no step but c, c + N, ... and moves the terms of a step
        no further than ``changes`` says: sum over the nodes of (change of the node / its standard deviation)^2 is at
        most mu^2 for every c. Nothing is promised under reshuffling, nor where a sample is missing from one of its
        steps, because D_t is then a whole gradient. Nodes that no momentum uses are never released.
        Proof: docs/proofs/sensitivities.md.

        The variance of a node is in proportion to its largest change over its weight in the momenta (root mean square
        over the steps), which makes their mean variance least for a sample that moves all nodes that much.
        """
        if not 0 < mu < math.inf:
            raise ConfigurationError(
                f"Expected mu > 0 and finite, got {mu!r}.", kind="out-of-range", setting="mu", got=mu
            )
        moved = self.moved(changes)
        largest = moved.max(axis=1)
        used = self._used > 0
        stds = np.zeros(self.num_nodes)
        stds[used] = np.sqrt(largest[used] / self._used[used])
        needed = stds > 0
        spent = ((moved[needed] / stds[needed, None]) ** 2).sum(axis=0).max()
        return stds * (math.sqrt(spent) / mu)

    def mean_variance(self, stds: NDArray[np.float64]) -> float:
        """Variance of the noise on a value of m_t with these standard deviations, mean over the steps."""
        return float(((self._used * stds) ** 2).sum())

    @cached_property
    def _coefficients(self) -> NDArray[np.float64]:
        """c_k = sum_{j<k} (1 - gamma)^j (1 - alpha)^{(k-1-j) N} for each complete epoch k."""
        discount, anchor, total = (1 - self.alpha) ** self.epoch_length, 1.0, 0.0
        coefficients = np.zeros(self.num_steps // self.epoch_length)
        for k in range(len(coefficients)):
            total = discount * total + anchor
            coefficients[k] = total
            anchor *= 1 - self.gamma
        return coefficients

    @cached_property
    def _used(self) -> NDArray[np.float64]:
        """Root mean square, over the steps, of each node's weight in the momenta."""
        structure, n, t = self._structure, self.epoch_length, self.num_steps
        whole = len(structure.ends)
        squares = np.zeros(self.num_nodes)
        later = np.cumsum(self._coefficients**2)
        decay = 1 - self.alpha
        for r in range(1, min(n, t + 1)):  # the first term: [1, r] in the steps r, r + N, ...
            nodes, lags = structure.composed(1, r)
            steps = np.arange(r, t + 1, n)
            squares[nodes] += float((decay ** (2.0 * (steps - r))).sum()) * decay ** (2 * lags)
        for end in range(n, t + 1):  # a window is used in the steps end, end + N, ... with c_1, c_2, ...
            nodes, lags = structure.composed(end - n + 1, end)
            used = float(later[(t - end) // n]) * decay ** (2 * lags)
            if end < 2 * n:
                squares[nodes] += used
            else:
                squares[nodes] += self.gamma**2 * used
                squares[whole + nodes] += (1 - self.gamma) ** 2 * used
        for step in range(1, t + 1):
            ends = np.array([last for _, last in compose(1, step)])
            squares[2 * whole + ends - 1] += decay ** (2.0 * (step - ends))
        return np.sqrt(squares / t)


def best_gamma(num_steps: int, epoch_length: int, alpha: float, changes: Changes) -> float:
    """Return the gamma of least noise for these changes, among a grid from 0 to 1: the guarantee does not depend on it.

    Theorem 9 has gamma = eta N, for which its bound is simplest.
    """

    def variance(gamma: float) -> float:
        trees = ReconstructionTrees(num_steps, epoch_length, alpha, gamma)
        return trees.mean_variance(trees.noise_stds(changes, 1.0))

    return min(_GAMMAS, key=variance)


class _Structure:
    """The dyadic intervals of T steps, and which of them make up an interval; independent of gamma."""

    def __init__(self, num_steps: int, epoch_length: int, alpha: float) -> None:
        heights = [(step & -step).bit_length() for step in range(1, num_steps + 1)]
        self._first = np.concatenate(([0], np.cumsum(heights)))  # of the nodes that end in a step
        self.ends = np.repeat(np.arange(1, num_steps + 1), heights)
        self.sizes = np.concatenate([2 ** np.arange(height) for height in heights])
        self.by_place = np.zeros((len(self.ends), epoch_length))
        for number, (end, size) in enumerate(zip(self.ends.tolist(), self.sizes.tolist(), strict=True)):
            np.add.at(self.by_place[number], np.arange(end - size, end) % epoch_length, node_weights(size, alpha))
        self._composed: dict[tuple[int, int], tuple[NDArray[np.intp], NDArray[np.float64]]] = {}

    def composed(self, first: int, last: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the numbers of COMPOSE(first, last) within a tree, and how many steps before ``last`` each ends."""
        key = first, last
        if key not in self._composed:
            nodes = compose(first, last)
            numbers = [self._first[z - 1] + (z - y + 1).bit_length() - 1 for y, z in nodes]
            self._composed[key] = np.array(numbers, dtype=np.intp), np.array([float(last - z) for _, z in nodes])
        return self._composed[key]


@lru_cache(maxsize=4)
def _structure(num_steps: int, epoch_length: int, alpha: float) -> _Structure:
    return _Structure(num_steps, epoch_length, alpha)
