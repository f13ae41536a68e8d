"""The words for noise: whose it is and of which mechanism, as a sentence about a guarantee says it.

A policy says its own words (:attr:`murmurfl.privacy.PrivacyPolicy.words`), made of the functions here. Whoever knows
only a part of a policy, such as the caption of a table, calls them directly.
"""

from __future__ import annotations

from collections.abc import Iterable

NO_NOISE = "none"
"""The mechanism of a simulated machine that adds no noise, to see what noise costs."""

NO_NOISE_WORDS = "no noise was added anywhere"
"""Words for the mechanism ``none``: neither the machines nor the server add noise."""

TRUSTING_WORDS = "no noise on the machine"
"""Words for a machine under a trusted server, as far as the machine itself can tell."""

NOBODY_ASKED = "nobody was asked"
"""Words for a run in which no machine makes a release."""

_ACCOUNTS = {"amplified": "amplification by iteration", "composed": "plain composition"}


def noise_words(
    mechanism: str,
    options: Iterable[object] = (),
    *,
    where: str = "on each machine",
    sensitivity: str = "",
    participations: int = 1,
    masked: bool = False,
    secret: bool = False,
    clipping: str = "",
    per_owner: int = 0,
) -> str:
    """Words for noise that machines put on their own releases.

    Parameters
    ----------
    mechanism : str
        Its name.
    options : iterable
        Values of its options, a schedule first; what is empty is left out.
    where : str
        Whose noise it is.
    sensitivity : str
        What is clipped, if not each sample's own row: ``update`` or ``contractive``.
    participations : int
        In how many releases a sample may be.
    masked : bool
        Whether only sums of these releases are seen.
    secret : bool
        Whether each sample is in a release that only its machine knows.
    clipping : str
        How samples' rows are bounded, if not by cutting them: ``automatic``.
    per_owner : int
        How many samples of an owner are clipped together, at most; 0 where each is clipped by itself.

    Examples
    --------
    >>> noise_words("banded", (None, 4), sensitivity="update", participations=2)
    'banded (4) noise on each machine, update sensitivity, every sample in up to 2 releases'
    """
    named = ", ".join(str(value) for value in options if value)
    words = f"{mechanism}{f' ({named})' if named else ''} noise {where}"
    words += ", under masks" if masked else ""
    words += f", {clipping} clipping" if clipping else ""
    words += f", up to {per_owner} samples of an owner clipped together" if per_owner else ""
    words += f", {sensitivity} sensitivity" if sensitivity else ""
    words += ", samples in a secret order" if secret else ""
    return words + (f", every sample in up to {participations} releases" if participations > 1 else "")


def epoch_words(accounting: str, epochs: int | None = None) -> str:
    """Words for noise inside the epochs of a machine, which the paper and its readers call a silo.

    ``accounting`` is the account the guarantee rests on (:attr:`murmurfl.privacy.ShuffledPolicy.accounting_used`),
    ``epochs`` how many use private samples, where that is known.
    """
    which = "the epochs" if epochs is None else f"{epochs} epochs"
    return (
        f"noise on every step of {which} of each silo that use private samples, {_ACCOUNTS[accounting]}, only their "
        "ends released"
    )


def server_noise_words(noise: str, rounds: int | None = None) -> str:
    """Words for noise that a trusted server adds: of a mechanism, or ``fresh`` where rounds are independent."""
    return f"{noise} noise of the server in each {'round' if rounds is None else f'of {rounds} rounds'}"


def stated_words(mechanisms: Iterable[str], *, masked: bool = False) -> str:
    """Words for the noise of real machines, from the mechanisms they state; empty if none states any."""
    names = " or ".join(sorted(set(mechanisms) - {""}))
    return f"{names} noise on each machine{', under masks' if masked else ''}, by its own account" if names else ""
