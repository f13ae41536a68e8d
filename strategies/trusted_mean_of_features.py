"""Private centring with a trusted server, which adds the noise of the mean for everybody.

Machines send the sums of their features without noise. One sample changes the sum of all of them by at most Delta,
which :mod:`murmurfl.privacy.centring` derives, so noise of Delta / mu on the sum makes the centre mu-GDP.
"""

from __future__ import annotations

from typing import Required, Unpack

from ..privacy import NoiseKeys, PrivacyPolicy
from .mean_of_features import MeanOfFeatures, MeanState
from .options import RoundOptions
from .trusted_one_answer import TrustedOneAnswer


class TrustedMeanOptions(RoundOptions, total=False):
    """Options of :class:`TrustedMeanOfFeatures`: those of both of its bases."""

    num_features: Required[int]
    num_clients: Required[int]
    policy: Required[PrivacyPolicy]
    noise_keys: NoiseKeys | None


class TrustedMeanOfFeatures(TrustedOneAnswer[MeanState], MeanOfFeatures):
    """The mean of the features, of machines that trust the server to add the noise.

    Parameters
    ----------
    **options
        See :class:`~murmurfl.strategies.trusted_server.TrustedServer`, whose policy is one of
        :func:`~murmurfl.privacy.centring_policy`, and :class:`MeanOfFeatures`.

    Notes
    -----
    **Formal guarantees.** The centre is mu-GDP for replacement of one sample of one machine, against everybody but the
    server itself, provided machines are honest and links are private. Replies that state a larger sensitivity or
    another grid than the policy's are dropped. A run that is interrupted and resumed has the same guarantee
    (:class:`~murmurfl.strategies.trusted_server.TrustedServer`). With mechanism ``none``, which is refused unless the
    keys are simulated, nothing is guaranteed.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, **options: Unpack[TrustedMeanOptions]) -> None:
        # TrustedOneAnswer takes its own and hands the rest on; a type checker sees the first alone.
        super().__init__(**options)
