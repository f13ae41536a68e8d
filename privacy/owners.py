r"""Whose samples are whose: what a mu is worth to somebody with several samples, and data of which owners are the rows.

Two answers to the same question. :func:`person_mu` says what a guarantee *for one sample* becomes for a person with
several of them, on one machine or on many. :class:`Owners` makes the question go away on one machine: it groups a
machine's samples by owner, at most so many of each, so that what a machine admits, clips and counts is an owner and
not a sample. Every proof about a machine's samples then is one about its owners, word for word: nothing in the rule of
admission, the noise or the ledger knows what a row of data is (docs/proofs/owners.md).

Formal guarantees
-----------------
Both are functions of public numbers, or of one owner's samples each: which rows of an owner are kept depends on that
owner's own rows and their order, and on nobody else's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .asked import check_count
from .errors import ConfigurationError

if TYPE_CHECKING:
    from .policy import PrivacyPolicy, Trust

OWNER_KINDS = "iuSU"
"""What an owner may be called by: integers or texts, as NumPy's kinds have them."""


def person_mu(
    mu: float,
    *,
    machines: int = 1,
    samples: int = 1,
    trust: Trust = "untrusted-server",
    mu_local: float | None = None,
) -> float:
    """What a mu for one sample becomes for a person with samples on several machines.

    Parameters
    ----------
    mu : float
        Of one sample, the same on each of these machines, >= 0.
    machines : int
        j, machines with samples of that person.
    samples : int
        How many samples on each of them.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
        What mu rests on.
    mu_local : float, optional
        Under ``secure-aggregation``, what holds whatever happens; required there.

    Returns
    -------
    float

    Raises
    ------
    ConfigurationError
        If a number is impossible, or ``mu_local`` is missing.

    Notes
    -----
    **Formal guarantees.** For replacement of all of that person's samples by any others, on all these machines at once.
    Machines that add their own noise are independent, so their mus add in squares: samples x sqrt(machines) x mu.
    Where mu counts on other machines' noise, or on the server's, one sample after the other is replaced: samples x
    machines x mu; under secure aggregation no more than samples x sqrt(machines) x mu_local, which needs nobody. All
    of these are upper bounds that some placement of the samples attains. The machines must be honest, as mu asks of
    the machine that it is of. Of a secret order's epsilon nothing is said.
    Proof: docs/proofs/owners.md.

    Examples
    --------
    >>> person_mu(1.0, machines=4), person_mu(1.0, samples=3), person_mu(1.0, machines=4, trust="trusted-server")
    (2.0, 3.0, 4.0)
    >>> person_mu(1.0, machines=100, trust="secure-aggregation", mu_local=5.0)  # 25 honest machines of each sum
    50.0
    """
    for name, value in (("machines", machines), ("samples", samples)):
        check_count(name, value)
    if not mu >= 0:
        raise ConfigurationError(f"Expected mu >= 0, got {mu!r}.")
    if trust == "untrusted-server":
        return samples * math.sqrt(machines) * mu
    if trust == "trusted-server":
        return samples * machines * mu
    if mu_local is None:
        raise ConfigurationError("Expected mu_local under secure aggregation, got None.")
    return min(samples * machines * mu, samples * math.sqrt(machines) * mu_local)


@dataclass(frozen=True, eq=False)
class Owners:
    """Which rows of data are whose, at most so many of each owner.

    Parameters
    ----------
    rows : ndarray of int
        The rows that are kept, owner after owner.
    ends : ndarray of int
        Where each owner's end in ``rows``.
    most : int
        How many rows of an owner are kept, at most.

    Notes
    -----
    **Formal guarantees.** What :meth:`places` gives of an owner depends on that owner's rows alone. The number of
    owners and their order are public, as the number and the order of samples are elsewhere.
    Proof: docs/proofs/owners.md.
    """

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    most: int

    @classmethod
    def of(cls, owner: Any, most: int) -> Owners:
        """Rows by who owns them.

        Parameters
        ----------
        owner : array of shape (n,)
            Whose each row is: integers or texts. Rows with equal values are one owner's.
        most : int
            j: of each owner's rows the first j are kept, the others are left out.

        Raises
        ------
        ConfigurationError
            If these are no names, or there is no row. The text says nothing of any one row.

        Notes
        -----
        **Formal guarantees.** Those of the class. Owners are in the order of their first rows, so that rows may be
        added at the end: nobody's place changes.
        """
        check_count("most", most)
        names = np.asarray(owner)
        if names.ndim != 1 or names.dtype.kind not in OWNER_KINDS or not len(names):
            raise ConfigurationError(
                f"Expected one owner a row, integers or texts, got an array of {names.dtype} of shape {names.shape}."
            )
        _, first, named = np.unique(names, return_index=True, return_inverse=True)
        place = np.empty(len(first), dtype=np.int64)
        place[np.argsort(first, kind="stable")] = np.arange(len(first))
        return cls._of_places(place[named.reshape(-1)], most)

    @classmethod
    def in_turn(cls, rows: int, most: int) -> Owners:
        """Every ``most`` rows one owner's, one after the other: stand-ins, for data that do not say whose they are."""
        check_count("most", most)
        check_count("rows", rows)
        return cls._of_places(np.arange(rows) // most, most)

    @classmethod
    def _of_places(cls, place: NDArray[np.int64], most: int) -> Owners:
        """The rows of owners 0, 1, ..., each of whom has one."""
        rows, counts = np.argsort(place, kind="stable"), np.bincount(place)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(rows[number < most], np.cumsum(np.minimum(counts, most)), most)

    def __len__(self) -> int:
        return len(self.ends)

    def taken_from(self, rows: NDArray[np.integer]) -> Owners:
        """The same owners, whose rows are those of a larger table: row i is ``rows[i]`` there."""
        return Owners(np.asarray(rows, dtype=np.int64)[self.rows], self.ends, self.most)

    def places(self, owners: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows of some owners, each owner's repeated until there are ``most``, and which are no repetitions.

        Returns
        -------
        tuple of ndarray of shape (owners, most)

        Notes
        -----
        **Formal guarantees.** Row i depends on owner i alone, and has as many entries whoever that is: how many samples
        somebody has settles neither shapes nor how much is computed.
        """
        ends = self.ends[owners]
        starts = np.concatenate([[0], self.ends])[:-1][owners]
        counts, number = (ends - starts)[:, None], np.arange(self.most)
        return self.rows[starts[:, None] + number % counts], number < counts


def check_owned(policy: PrivacyPolicy, samples: Any) -> None:
    """Refuse a policy whose unit is the owner with samples that are not grouped by owner, and the other way round.

    Parameters
    ----------
    policy : PrivacyPolicy
    samples : Any
        A machine's; grouped ones say how many of an owner they hold at most, as ``samples_per_owner``.

    Raises
    ------
    ConfigurationError

    Notes
    -----
    **Formal guarantees.** None of its own: what a policy says of owners is true of machines whose rows are owners.
    """
    held = getattr(samples, "samples_per_owner", 0)
    if policy.samples_per_owner != held:
        raise ConfigurationError(
            f"Expected samples grouped by owner, at most {policy.samples_per_owner} of each, as the policy says, got "
            f"{f'at most {held} of each' if held else 'samples by themselves'}: group them with OwnedSamples, and set "
            "samples_per_owner of the policy to the same number (0 for samples by themselves)."
        )
