"""A private count: for how many of a machine's samples something holds, such as that a model predicts them right.

A sample's row is 1/2 or -1/2, so replacing one sample moves the sum by 1 and no more. Half the number of samples, which
is public, is added where the count is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..machine.outgoing import Release
from ..machine.policy import PrivacyPolicy
from ..machine.prefix_sums import PrivateMachine


def counting_policy(mu: float = 0.0, **fields: Any) -> PrivacyPolicy:
    """The policy of a machine that releases one count over all of its samples.

    Parameters
    ----------
    mu : float
        Of the count; or ``epsilon`` among the others.
    **fields
        Others of :class:`~murmurfl.privacy.PrivacyPolicy`: who is trusted, budgets, delta, the quality of the noise.

    Notes
    -----
    **Formal guarantees.** The count is mu-GDP for replacement of one sample: rows are cut to 1/2, so Delta = 1.
    Proof: docs/proofs/sensitivities.md.
    """
    settled = {"clip_norm": 0.5, "batch_size": 1, "max_participations": 1, "order": "all", "mechanism": "independent"}
    return PrivacyPolicy(**{**fields, **settled, "mu": mu, "release_rule": "paper"})


def release_count(machine: PrivateMachine, session: str, holds: Callable[[slice], NDArray[Any]]) -> Release:
    """One machine's count, with noise.

    Parameters
    ----------
    machine : PrivateMachine
        Of :func:`counting_policy`, with one parameter.
    session : str
        A session of its own in the machine's ledger.
    holds : callable
        Given a slice of samples, whether it holds for each of them, shape (samples,).

    Raises
    ------
    RefusedError
        If cap or budget forbid it. Nothing was released or spent.

    Notes
    -----
    **Formal guarantees.** Under the trust of the machine's policy the count is mu-GDP for replacement of one sample,
    whatever ``holds`` gives for a sample, and the ledger has it before it is returned.
    Proof: docs/proofs/sensitivities.md.
    """
    return machine.release(session, 0, lambda samples: np.asarray(holds(samples), dtype=np.float64)[:, None] - 0.5)


def counted(releases: Iterable[Release]) -> tuple[float, int]:
    """The count over all machines, noise and all, and the samples it is of."""
    total, samples = 0.0, 0
    for release in releases:
        total += float(release.values[0]) + release.samples / 2
        samples += release.samples
    return total, samples
