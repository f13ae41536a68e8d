"""What a machine states of its noise, for a forecast: public numbers, which a server cannot check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import protocol
from ..machine.policy import CLIP_UNITS, ClipUnit, PrivacyPolicy
from ..machine.shuffled_machine import ShuffledPolicy
from ..mechanisms import noise_stands_alone
from .noise_plan import NoisePlan


@dataclass(frozen=True)
class StatedNoise:
    """What a forecast needs of one machine: public numbers, which it states.

    Parameters
    ----------
    longest : float
        L: no contribution to a release is longer.
    noise : float
        The standard deviation of one value of the noise in all of its releases together.
    releases : int
        K, how many these are.
    mu, delta : float
        What is guaranteed of them.
    clip_unit : str
        What is clipped (:class:`~murmurfl.privacy.PrivacyPolicy`).
    unit : {"sample", "owner", "machine"}
        What is protected as a whole.
    trust : str
        Whom the machine trusts.
    honest : int
        Under secure aggregation, h; else 1.
    alone : bool
        Whether each release has noise of its own, so that fewer releases have less in them.

    Notes
    -----
    Arithmetic on a policy, the same for every data set of a size.
    """

    longest: float
    noise: float
    releases: int
    mu: float
    delta: float
    clip_unit: ClipUnit = "sample"
    unit: str = "sample"
    trust: str = "untrusted-server"
    honest: int = 1
    alone: bool = True

    @classmethod
    def read(cls, statement: Mapping[str, Any]) -> StatedNoise | None:
        """What a machine's statement says of it; None if it says too little."""
        numbers = [statement.get(key) for key in (protocol.LONGEST_RELEASE, protocol.NOISE_IN_ALL, "mu-guaranteed")]
        releases, honest = statement.get("max-participations"), statement.get(protocol.MIN_HONEST, 1)
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not one >= 0 for one in numbers):
            return None
        longest, noise, mu = (float(one) for one in numbers if one is not None)
        delta = statement.get("delta")
        if not (longest > 0 and math.isfinite(longest) and math.isfinite(noise)):
            return None
        if not isinstance(releases, int) or releases < 1 or not isinstance(honest, int) or honest < 1:
            return None
        if not isinstance(delta, float) or not 0 < delta < 1:
            return None
        words = {key: str(statement.get(key, "")) for key in (protocol.CLIP_UNIT, "unit", "trust", "mechanism")}
        units: dict[str, ClipUnit] = {one: one for one in CLIP_UNITS}
        return cls(
            longest,
            noise,
            releases,
            mu,
            delta,
            clip_unit=units.get(words[protocol.CLIP_UNIT], "sample"),
            unit=words["unit"] if words["unit"] in ("machine", "owner") else "sample",
            trust=words["trust"] or "untrusted-server",
            honest=honest,
            alone=noise_stands_alone(words["mechanism"]),
        )

    def after(self, releases: float) -> float:
        """The noise in so many releases; of correlated noise no less than in all of them."""
        return self.noise * math.sqrt(min(releases / self.releases, 1.0)) if self.alone else self.noise


def stated_noise(policy: PrivacyPolicy, plan: NoisePlan, num_samples: int) -> dict[str, float | str]:
    """The entries of a machine's statement that a forecast is made from.

    Parameters
    ----------
    policy : PrivacyPolicy
    plan : NoisePlan
        The policy worked out.
    num_samples : int
        The machine's samples, a public number.

    Notes
    -----
    Nothing in it depends on data, the number of samples excepted, which is public.
    """
    releases, steps = plan.mechanism.num_releases, 1
    longest = policy.bound.longest
    if isinstance(policy, ShuffledPolicy):
        steps = policy.steps  # a release is the sum of clipped steps, each with noise of its own
        longest *= steps
    elif policy.order == "all":
        longest *= num_samples
    elif policy.order == "secret":  # on average over the releases: each sample is in one of them
        longest *= num_samples / (releases * policy.batch_size)
    noise = plan.noise_std * plan.mechanism.row_std(releases) * math.sqrt(steps)
    return {
        protocol.LONGEST_RELEASE: longest,
        protocol.NOISE_IN_ALL: noise,
        # The steps of an epoch are gradients.
        protocol.CLIP_UNIT: "sample" if steps > 1 else policy.clip_unit,
    }
