"""What a mu means to people who do not know what it is: how often the best guess about somebody is right."""

from __future__ import annotations

import math

from .gdp import gdp_best_guess

_GUESSED = {
    "sample": ("whether one sample of a machine was used, or another in its place,", "every other sample"),
    "owner": ("whether one owner's samples on a machine were used, or any others in their place,", "every other owner"),
    "machine": ("whether the samples of one machine were used, or any others in their place,", "every other machine's"),
}
_GUESSERS = {
    "untrusted-server": "the server and everybody else, even if they know",
    "secure-aggregation": "the server and everybody else, even if they know",
    "trusted-server": "everybody but the trusted server, even if they know",
}


def plain_meaning(
    mu: float,
    unit: str = "sample",
    trust: str = "untrusted-server",
    mu_local: float | None = None,
    min_honest: int | None = None,
) -> str:
    """What a mu means, in plain words; empty where nothing is guaranteed.

    Parameters
    ----------
    mu : float
        Gaussian-DP parameter.
    unit, trust, mu_local, min_honest : str, float or int
        As in :class:`~murmurfl.privacy.Guarantee`, whose :attr:`~murmurfl.privacy.Guarantee.meaning` this is.

    Notes
    -----
    Whoever holds two neighbouring data sets, equally likely before, and sees all that the mu is of, tells which of them
    was used with probability Phi(mu / 2) at most (:func:`~murmurfl.privacy.gdp_best_guess`), and with Gaussian noise in
    the worst case with no less. Percentages are rounded up. What is said of a single person is true where a person is
    one unit (:func:`~murmurfl.privacy.person_mu`).

    Examples
    --------
    >>> print(plain_meaning(1.0))  # doctest: +NORMALIZE_WHITESPACE
    The best guess whether one sample of a machine was used, or another in its place, is right at most 69.2 % of the
    time; tossing a coin is right 50 % of the time. This holds for the server and everybody else, even if they know
    every other sample.
    """
    if not math.isfinite(mu):
        return ""
    guessed, known = _GUESSED[unit]
    said = (
        f"The best guess {guessed} is right at most {_percent(mu)} of the time; tossing a coin is right 50 % of the "
        f"time. This holds for {_GUESSERS[trust]} {known}"
    )
    if mu_local is None or min_honest is None:
        return f"{said}."
    local = f"at most {_percent(mu_local)}" if math.isfinite(mu_local) else "nothing is promised"
    honest = f"{min_honest} machine{'s' * (min_honest != 1)}"
    return f"{said}, if one helper and {honest} of each sum are honest; if not, {local}."


def _percent(mu: float) -> str:
    return f"{math.ceil(1000 * gdp_best_guess(mu) - 1e-9) / 10:g} %"
