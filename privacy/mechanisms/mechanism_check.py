"""Whether a mechanism's stream of noise is what its matrices say: for mechanisms that others write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .mechanism import Mechanism, State
from .sensitivity import PATTERNS, worst_pattern

_TOLERANCE = 1e-9


def check_mechanism(mechanism: Mechanism) -> None:
    """Raise if a mechanism's stream, sensitivity, deviations or bounds contradict its C and B.

    All of its ``num_releases`` releases are made, so few are enough. A mechanism that passes releases, for so many
    releases, A G + B Z with B C = A and causal C and B, so its sensitivity is C's (:meth:`Mechanism.sensitivity`).
    Proof: docs/proofs/returning-samples.md.
    """
    n, name = mechanism.num_releases, mechanism.name
    encoder, decoder = mechanism.materialize(n), mechanism.decoder(n)
    counts = [mechanism.draws(k) for k in range(1, n + 1)]
    drawn = np.cumsum(counts)
    _expect(encoder.shape == (drawn[-1], n) and decoder.shape == (n, drawn[-1]), name, "C and B of matching shapes")
    _expect(np.allclose(decoder @ encoder, np.tri(n), atol=_TOLERANCE), name, "B C to be the lower triangle of ones")
    for k in range(n):
        _expect(not decoder[k, drawn[k] :].any(), name, "B to use no noise of later releases")
        first = 0 if k == 0 else drawn[k - 1]
        _expect(not encoder[first : drawn[k], k + 1 :].any(), name, "C to look at no later release")
    if vars(type(mechanism)).get("stands_alone", False):
        diagonal = encoder.shape == (n, n) and np.array_equal(encoder, np.diag(np.diag(encoder)))
        _expect(diagonal, name, "a diagonal C, for it says that its releases stand alone")
    _check_sensitivity(mechanism, encoder.T @ encoder)
    # One value a row of Z: the increments then are rows of the inverse.
    rows = np.split(np.eye(drawn[-1]), drawn[:-1])
    inverse, size = mechanism.inverse(n), int(drawn[-1])
    state, last = mechanism.initial_state(size), None
    for k in range(1, n + 1):
        increment = mechanism.increment(state, k, rows[k - 1].ravel(), 2.0)
        removed = 0.0 if increment.removed is None else increment.removed
        if mechanism.removes_last:
            whole = increment.removed is None if last is None else np.array_equal(removed, last)
            _expect(whole, name, f"increment {k} to remove what the last one added, to the last bit")
            alone = mechanism.increment((), k, rows[k - 1].ravel(), 2.0)
            _expect(np.array_equal(alone.added, increment.added), name, "an increment with an empty state, for a cache")
        last = increment.added.copy()
        _expect(np.allclose(increment.added - removed, 2.0 * inverse[k - 1], atol=_TOLERANCE), name, f"increment {k}")
        bound, parts = mechanism.increment_bound(k), (increment.added, removed)
        largest = max(float(np.abs(part).sum()) for part in parts) / 2.0
        _expect(bound is None or largest <= bound * (1 + _TOLERANCE), name, f"increment {k} within its bound")
        _expect(
            bool(np.isclose(mechanism.row_std(k), np.linalg.norm(decoder[k - 1]), rtol=1e-6)), name, f"row_std({k})"
        )
        state = _state(mechanism, increment.state, k, rows)


def _check_sensitivity(mechanism: Mechanism, gram: NDArray[np.float64]) -> None:
    """Check a formula of the mechanism's own against changes that are all alike, which are possible ones."""
    n = len(gram)
    for participations in range(1, n + 1):
        for separation in range(1, n + 1):
            chains = [np.arange(start, n, separation)[:participations] for start in range(n)]
            least = {
                "epochs": max(float(gram[np.ix_(chosen, chosen)].sum()) for chosen in chains),
                "separated": worst_pattern(gram, participations, separation),
            }
            for pattern in PATTERNS:
                stated = mechanism.sensitivity(participations, separation, pattern=pattern)
                enough = stated**2 >= least[pattern] * (1 - _TOLERANCE)
                _expect(enough, mechanism.name, f"sensitivity({participations}, {separation}, {pattern!r})")


def _state(mechanism: Mechanism, kept: State | None, release: int, rows: list[NDArray[np.float64]]) -> State:
    if mechanism.memory == "state":
        _expect(kept is not None, mechanism.name, "a state to keep")
        return kept or ()
    again = mechanism.state_after(release, lambda chosen: np.stack([rows[k - 1].ravel() for k in chosen]), 2.0)
    same = kept is None or (
        len(kept) == len(again) and all(np.array_equal(a, b) for a, b in zip(kept, again, strict=True))
    )
    _expect(same, mechanism.name, f"the state after release {release} to be made again to the last bit")
    return again


def _expect(holds: bool, name: str, expected: str) -> None:
    if not holds:
        raise ConfigurationError(f"Expected of mechanism {name!r}: {expected}; its matrices and its stream differ.")
