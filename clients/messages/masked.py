"""What a machine sends under secure aggregation: its release under masks, and never the release itself.

The order is always the same: the release is made and recorded, then it is masked, and only then anything is sent. If
masking fails nothing is sent, and the machine's next release carries what this one had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ...privacy import ConfigurationError, PrivacyPolicy, Release, protocol
from ...privacy.sums.masking import Masking
from ..adapters.per_sample_gradients import unflatten

_TRUST = "secure-aggregation"


def check_masking(policy: PrivacyPolicy, masking: Masking | None, name: str, *, simulated: bool) -> None:
    """Refuse masks that do not belong to the policy or the machine, and a real machine that lacks them.

    Parameters
    ----------
    policy : PrivacyPolicy
    masking : Masking or None
    name : str
        The machine's.
    simulated : bool
        Whether its keys are a simulation's. Without masks such a machine can be made, for engines that carry no
        messages; it sends none either.

    Raises
    ------
    ConfigurationError
    """
    if policy.trust != _TRUST:
        if masking is not None:
            raise ConfigurationError(
                f"Expected masking only with trust {_TRUST!r}, got it with {policy.trust!r}: a server that is to see "
                "each release could not read this machine's."
            )
        return
    if masking is None:
        if not simulated:
            raise _without_masks()
        return
    masking.check_policy(policy)
    if masking.name != name:
        raise ConfigurationError(
            f"Expected masking for machine {name!r}, got that of {masking.name!r}: a release says whose it is once."
        )


def outgoing_reply(
    release: Release,
    shapes: Sequence[tuple[int, ...]],
    *,
    masking: Masking | None,
    session: str,
    policy: PrivacyPolicy,
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """A recorded release as it is sent: the arrays of a reply, and what belongs into its config beside them.

    Parameters
    ----------
    release : Release
        As the ledger has it.
    shapes : sequence of tuple of int
        The model's.
    masking : Masking or None
        The machine's, under secure aggregation.
    session : str
        The session it was made in.
    policy : PrivacyPolicy
        By which it was made.

    Returns
    -------
    tuple
        Under secure aggregation the masked counts, uint64, with header, seals and signature; otherwise the release's
        values, float64, and nothing.

    Raises
    ------
    ConfigurationError
        Under secure aggregation without masks.

    Notes
    -----
    Under secure aggregation nothing is sent that :class:`~murmurfl.privacy.sums.masking.Masking` did not mask, on a
    real machine and in a simulation. All entries but the arrays are independent of data.
    """
    if policy.trust != _TRUST:
        return unflatten(release.values, shapes), {}
    if masking is None:
        raise _without_masks()
    masked = masking.mask(release, session, policy)
    entries = {
        protocol.HEADER: masked.sealed.header,
        protocol.SEALS: list(masked.sealed.seals),
        protocol.SIGNATURE: masked.sealed.signature,
    }
    return unflatten(masked.counts, shapes), entries


def check_can_send(policy: PrivacyPolicy, masking: Masking | None) -> None:
    """Refuse to make a release that could not be sent: it would spend what nobody gets.

    Raises
    ------
    ConfigurationError
    """
    if policy.trust == _TRUST and masking is None:
        raise _without_masks()


def _without_masks() -> ConfigurationError:
    return ConfigurationError(
        f"Expected masking under trust {_TRUST!r}, got none: nothing leaves this machine without masks. Pass "
        "masking=Masking(name, key, roster), with the machine's own key and the roster its operator pinned."
    )
