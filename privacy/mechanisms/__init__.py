"""Correlated Gaussian noise, one file a mechanism, all on the same factorisation (see :mod:`.mechanism`)."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from .blt import BltNoise, optimise_blt
from .cancelling import SCHEDULES, CancellingNoise, Schedule
from .independent import SHARES, IndependentNoise
from .mechanism import PATTERNS, Draw, Increment, Mechanism, Memory, Pattern, Sensitivity, State, check_mechanism
from .optimal import WORKLOADS, OptimalNoise, Workload, optimal_encoder
from .toeplitz import (
    BandedNoise,
    BisrNoise,
    DecayNoise,
    SqrtNormalisedNoise,
    SqrtToeplitzNoise,
    best_decay,
    optimise_band,
)
from .tree import DECODERS, Decoder, TreeNoise

MECHANISMS: dict[str, type[Mechanism]] = {
    kind.name: kind
    for kind in (
        IndependentNoise,
        CancellingNoise,
        DecayNoise,
        TreeNoise,
        SqrtToeplitzNoise,
        SqrtNormalisedNoise,
        BisrNoise,
        BandedNoise,
        BltNoise,
        OptimalNoise,
    )
}


def register_mechanism(kind: type[Mechanism]) -> type[Mechanism]:
    """Register a mechanism of your own under its name; a decorator. Its options, if any, have defaults.

    Notes
    -----
    **Formal guarantees.** The guarantee of a stream is that of C (:meth:`Mechanism.materialize`). The check holds the
    stream against C for a few releases; a mechanism that deviates from C later has no guarantee.

    Examples
    --------
    >>> from murmurfl.privacy import MECHANISMS
    >>> @register_mechanism
    ... class Plain(MECHANISMS["independent"]):
    ...     name = "plain"
    >>> MECHANISMS["plain"](num_releases=2).materialize().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> del MECHANISMS["plain"]  # for the examples that follow
    """
    if kind.name in MECHANISMS:
        raise ConfigurationError(
            f"Expected a name that is not taken, got {kind.name!r}: {sorted(MECHANISMS)}.",
            kind="duplicate",
            setting="name",
        )
    for releases in (1, 2, 6):
        check_mechanism(kind(releases))
    MECHANISMS[kind.name] = kind
    return kind


def make_mechanism(name: str, num_releases: int, **options: Any) -> Mechanism:
    """Make the mechanism of a name in :data:`MECHANISMS`, for at most ``num_releases`` releases of one stream.

    ``options`` are its own, such as ``schedule`` for ``cancelling``.

    Notes
    -----
    **Formal guarantees.** The sensitivity is that of the mechanism's own C, for one sample that keeps to the declared
    pattern (:meth:`Mechanism.sensitivity_bound`); options change how much noise there is, and mu follows from it.
    Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> make_mechanism("cancelling", 4, schedule="uniform").sensitivity()
    1.0
    """
    if name not in MECHANISMS:
        raise ConfigurationError(
            f"Expected mechanism one of {sorted(MECHANISMS)}, got {name!r}.",
            kind="unknown-name",
            setting="mechanism",
            got=name,
        )
    try:
        return MECHANISMS[name](num_releases, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"Expected options that mechanism {name!r} knows, got {sorted(options)}.", kind="unknown-name"
        ) from error


def noise_is_memoryless(name: str) -> bool:
    """Say whether a mechanism's releases have independent noise, as its own class says; a parent's word does not count.

    :func:`check_mechanism` holds a mechanism that says so against its C.
    """
    kind = MECHANISMS.get(name)
    return kind is not None and bool(vars(kind).get("is_memoryless", False))


__all__ = [
    "DECODERS",
    "MECHANISMS",
    "PATTERNS",
    "SCHEDULES",
    "SHARES",
    "WORKLOADS",
    "BandedNoise",
    "BisrNoise",
    "BltNoise",
    "CancellingNoise",
    "DecayNoise",
    "Decoder",
    "Draw",
    "Increment",
    "IndependentNoise",
    "Mechanism",
    "Memory",
    "OptimalNoise",
    "Pattern",
    "Schedule",
    "Sensitivity",
    "SqrtNormalisedNoise",
    "SqrtToeplitzNoise",
    "State",
    "TreeNoise",
    "Workload",
    "best_decay",
    "check_mechanism",
    "make_mechanism",
    "noise_is_memoryless",
    "optimal_encoder",
    "optimise_band",
    "optimise_blt",
    "register_mechanism",
]
