r"""Tree aggregation: noise on every dyadic sum of releases (zhang-2025, MF (i); ALGORITHMS section 3, ``tree``).

C has one row for every dyadic interval (node) that is complete within the releases: ones on the interval, zeros
elsewhere. The prefix sum of k releases is a sum of nodes, one for each one among the binary digits of k. There are two
decoders, both causal:

``dyadic``
    Each of these nodes by its own noisy value: variance popcount(k) (Dwork et al. 2010; Chan, Shi and Song 2011).
``least-squares``
    Each by the best estimate from its own value and those below it (Honaker 2015, estimation from below; Kairouz et al.
    2021): with v_h the variance of an estimate at height h, own value and sum of the children's estimates are weighted
    by inverse variances, so v_0 = 1 and v_{h+1} = 2 v_h / (1 + 2 v_h) = 2^{h+1} / (2^{h+2} - 1).

The full least-squares decoder A C^+ uses nodes of the future and cannot be streamed.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .mechanism import Gram, Increment, Mechanism, Memory, State

Decoder = Literal["least-squares", "dyadic"]
DECODERS: tuple[Decoder, ...] = get_args(Decoder)


class TreeNoise(Mechanism):
    """Tree aggregation for any number of releases; ``decoder`` says how prefixes are made from nodes.

    Notes
    -----
    **Formal guarantees.** A sample in one release is in floor(log2 K) + 1 nodes at most, so mu = Delta
    sqrt(floor(log2 K) + 1) / noise_std, the same for both decoders: they only process what the nodes release. State:
    the estimates of the nodes that make up 1 .. k, at most one a height.
    Proof: docs/proofs/sensitivities.md.
    """

    name = "tree"
    memory: ClassVar[Memory] = "state"

    def __init__(self, num_releases: int, *, decoder: Decoder = "least-squares") -> None:
        super().__init__(num_releases)
        if decoder not in DECODERS:
            raise ConfigurationError(
                f"Expected decoder one of {DECODERS}, got {decoder!r}.",
                kind="unknown-name",
                setting="decoder",
                got=decoder,
            )
        self.decoder_name: Decoder = decoder

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        encoder = np.zeros((self._nodes(n), n))
        for release in range(1, n + 1):
            for height in range(self.draws(release)):
                encoder[self._nodes(release - 1) + height, release - 2**height : release] = 1.0
        return encoder

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        rows, state = np.zeros((n, self._nodes(n))), self.initial_state(self._nodes(n))
        for release in range(1, n + 1):
            own = np.zeros((self.draws(release), self._nodes(n)))
            own[:, self._nodes(release - 1) :][np.diag_indices(len(own))] = 1.0
            state = self.increment(state, release, own.ravel()).state or ()
            rows[release - 1] = np.sum(state, axis=0)
        return rows

    def draws(self, release: int) -> int:
        """Return the nodes a release completes: one, and one for every trailing zero of its number."""
        return (self._check_release(release) & -release).bit_length()

    def initial_state(self, size: int) -> State:
        return ()

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        nodes = normals.reshape(self.draws(release), -1) * normals.dtype.type(scale)
        estimate, completed = nodes[0], nodes[0]
        for height in range(1, len(nodes)):
            sibling = state[-height]
            own = normals.dtype.type(self._own_weight(height))
            estimate = own * nodes[height] + (1 - own) * (sibling + estimate)
            completed = estimate
        merged = len(nodes) - 1
        added = completed - np.sum(state[len(state) - merged :], axis=0) if merged else completed
        return Increment(added, None, (*state[: len(state) - merged], completed))

    def memory_bytes(self, size: int) -> int:
        return 8 * size * self.num_releases.bit_length()

    def row_std(self, release: int) -> float:
        digits = self._check_release(release)
        return math.sqrt(sum(self._variance(h) for h in range(digits.bit_length()) if digits >> h & 1))

    def row_std_range(self) -> tuple[float, float]:
        total, heights = self.num_releases, range(self.num_releases.bit_length())
        # The largest row is one of these: they trade a one of K for all ones below it; or that of K.
        rich = [(total >> h << h) - 1 for h in heights if total >> h & 1 and (total >> h << h) > 1]
        return min(self.row_std(1 << h) for h in heights), max(self.row_std(release) for release in (total, *rich))

    def increment_bound(self, release: int) -> float:
        reach, merged = 1.0, 0.0
        for height in range(1, self.draws(release)):
            merged += reach
            own = self._own_weight(height)
            reach = own + (1 - own) * 2 * reach
        return reach + merged

    def _sensitivity(self, n: int, num_participations: int, min_separation: int) -> float | None:
        # Complete nodes over release j: those of the first release are 1, 2, 4, ... long, and none is in more.
        return math.sqrt(n.bit_length()) if num_participations == 1 else None

    def _gram(self, n: int) -> Gram:
        def common_nodes(releases: NDArray[np.intp]) -> NDArray[np.float64]:
            shared = np.zeros((len(releases), len(releases)))
            for height in range(n.bit_length()):
                nodes = releases >> height
                shared += np.equal.outer(nodes, nodes) & (nodes < n >> height)
            return shared

        return common_nodes

    def _own_weight(self, height: int) -> float:
        if self.decoder_name == "dyadic":
            return 1.0
        children = 2 * self._variance(height - 1)
        return children / (1 + children)

    def _variance(self, height: int) -> float:
        return 1.0 if self.decoder_name == "dyadic" else 2.0**height / (2.0 ** (height + 1) - 1)

    @staticmethod
    def _nodes(releases: int) -> int:
        """Return the number of nodes complete within the first releases."""
        return 2 * releases - releases.bit_count()
