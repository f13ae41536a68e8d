"""Settings of a client's privacy, in tables that run configurations and operators' files share.

Notes
-----
**Formal guarantees.** The options of a mechanism shape the noise and leave the guarantee as it is: whatever they are,
the releases of one session are mu-GDP together, for replacement of one sample (a record of the file), against whom the
trust model says (:class:`~murmurfl.privacy.PrivacyPolicy`).
Proof: docs/proofs/release-rule.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from ..errors import MOST_COUNTED
from ..mechanisms import DECODERS, MECHANISMS, SCHEDULES, WORKLOADS
from ..setting import Declaration, Kind
from .clipping import CLIPPINGS
from .policy import NO_NOISE

PRIVATE, NONE = "private", "none"
CENTRINGS = ("", NONE, PRIVATE)
SHUFFLED, POISSON = "shuffled", "poisson"
HELD_OUT = 0.1
"""The share of a client's samples that are set aside by default, where a run is evaluated privately."""


def _mechanisms() -> tuple[str, ...]:
    return ("", NO_NOISE, *MECHANISMS)


Mu = Annotated[
    float,
    Declaration(
        "The privacy wanted, for one sample replaced: mu-GDP, shown as epsilon at delta.",
        at_least=0,
        zero="unset",
    ),
]
Epsilon = Annotated[
    float,
    Declaration(
        "The privacy wanted as an epsilon at delta; it stands in the place of mu.",
        at_least=0,
        zero="mu",
    ),
]
Delta = Annotated[float, Declaration("Where epsilon is shown.", above=0, below=1)]
ClipNorm = Annotated[float, Declaration("S, the L2 norm that is clipped to.", at_least=0, zero="the preset's")]
Clipping = Annotated[
    str,
    Declaration(
        "How gradients are bounded: cut to S where they are longer, or with `automatic` all brought to nearly S, "
        "S g / (||g|| + gamma); empty for `clip`.",
        choices=("", *CLIPPINGS),
        read_by="strategy",
    ),
]
ClipStability = Annotated[
    float,
    Declaration(
        "gamma of automatic clipping, in the gradients' own units.",
        key="clipping.stability",
        above=0,
        read_by="strategy",
    ),
]
QuantileShare = Annotated[
    float,
    Declaration(
        "Share of mu^2 spent on how many gradients are clipped.",
        key="clipping.quantile-share",
        above=0,
        below=1,
        read_by="strategy",
    ),
]
_MECHANISM = Declaration(
    "How noise is correlated over releases; empty for the method's own. `none` adds no noise anywhere, to see what "
    "noise costs: nothing is private then, mu stands for the largest there is, and real clients refuse it.",
    choices=_mechanisms,
    own=True,
)
MechanismName = Annotated[str, _MECHANISM]
_Schedule = Annotated[
    str,
    Declaration(
        "Noise schedule of the cancelling mechanism; empty for the preset's.",
        choices=("", *SCHEDULES),
        read_by="strategy",
    ),
]
_Workload = Annotated[
    str, Declaration("Workload that the noise is optimal for; empty for its default.", choices=("", *WORKLOADS))
]


class OwnOfMethod(Kind):
    """The mechanism that a method has where none is named."""

    kind: Literal[""] = ""
    schedule: _Schedule = ""


class WithoutOptions(Kind):
    """A mechanism that has no options."""

    kind: Literal["none", "independent", "sqrt_toeplitz", "sqrt_normalised"]


class Cancelling(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.CancellingNoise`."""

    kind: Literal["cancelling"] = "cancelling"
    schedule: _Schedule = ""


class Decay(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.DecayNoise`."""

    kind: Literal["decay"] = "decay"
    decay: Annotated[
        float,
        Declaration("Share of its previous noise that a release removes.", at_least=0, at_most=1, zero="the best"),
    ] = 0.0
    workload: _Workload = ""


class Optimal(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.OptimalNoise`."""

    kind: Literal["optimal"] = "optimal"
    workload: _Workload = ""


class Tree(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.TreeNoise`."""

    kind: Literal["tree"] = "tree"
    decoder: Annotated[str, Declaration("Decoder of the tree; empty for its default.", choices=("", *DECODERS))] = ""


class Banded(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.BandedNoise` and of ``BisrNoise``."""

    kind: Literal["banded", "bisr"] = "banded"
    bands: Annotated[
        int,
        Declaration("Non-zero diagonals of the encoder or of its inverse.", at_least=0, zero="its default"),
    ] = 0


class Blt(Kind):
    """Options of :class:`~murmurfl.privacy.mechanisms.BltNoise`."""

    kind: Literal["blt"] = "blt"
    buffers: Annotated[int, Declaration("Buffers of the linear recurrence.", at_least=0, zero="its default")] = 0


class OwnMechanism(Decay, Tree, Banded, Blt):
    """A mechanism of one's own, which reads the options that its class takes."""

    kind: Annotated[MechanismName, pydantic.Field(json_schema_extra={"pattern": ":"})]  # type: ignore[assignment]


Mechanism = Annotated[
    OwnOfMethod | WithoutOptions | Cancelling | Decay | Tree | Banded | Blt | Optimal | OwnMechanism, _MECHANISM
]
BatchSize = Annotated[
    int,
    Declaration(
        "b, samples a release; where clients take local steps tau, one step for each.",
        at_least=1,
        read_by="strategy",
    ),
]
SamplesPerOwner = Annotated[
    int,
    Declaration(
        "j, the most samples of an owner that are used; a batch is then one of b owners, each owner's gradients are "
        "clipped as one, and all samples of an owner are protected together.",
        at_least=0,
        zero="samples by themselves",
        read_by="strategy",
    ),
]
Passes = Annotated[
    int,
    Declaration(
        "How often every client goes through its samples; the noise covers that they return.",
        at_least=1,
    ),
]
MaxParticipations = Annotated[
    int,
    Declaration(
        "K, the cap of a client's releases.",
        at_least=0,
        at_most=MOST_COUNTED,
        zero="as many as rounds and samples allow",
    ),
]
BatchSelection = Annotated[
    str,
    Declaration(
        "Which samples a release is made from. With `shuffled` each sample draws the release it is in, and only its "
        "client knows which; a release then takes as long as a pass, and its epsilon is shown next to the one that "
        "holds for whoever knows. With `poisson`, for `trusted-sgd`, each sample is in each round with the probability "
        "that makes b samples of a client on average, and only the server and its client know; epsilon is then what "
        "that is worth, and mu what holds for whoever knows. Empty for the strategy's own.",
        choices=("", SHUFFLED, POISSON),
        read_by="strategy",
    ),
]
Centring = Annotated[
    str,
    Declaration(
        "Whether clients release the mean of their features first, and see samples from it; empty: as features say.",
        choices=CENTRINGS,
    ),
]
CentringShare = Annotated[
    float, Declaration("Share of mu^2 spent on the mean of the features.", key="centring.share", above=0, below=1)
]
PrivateEvaluation = Annotated[
    float,
    Declaration(
        "Share of mu^2 spent on a private evaluation: clients count, with noise, which samples the model gets right.",
        key="evaluation.share",
        at_least=0,
        below=1,
        zero="none",
    ),
]
HeldOut = Annotated[
    float,
    Declaration(
        "Which share of a client's samples is set aside for its private evaluation, and never trained on.",
        key="evaluation.held-out",
        at_least=0,
        below=1,
        zero="an evaluation of those that were trained on",
    ),
]
ScoreBins = Annotated[
    int,
    Declaration(
        "Bins of scores for each of two classes, counted in a private evaluation for the AUC.",
        key="evaluation.score-bins",
        at_least=0,
        zero="no AUC",
    ),
]
TRUST = Declaration(
    "Who is trusted, and with what; empty for the method's own. Under `secure-aggregation` the server sees only sums "
    "of releases, as long as one helper is honest; under `trusted-server` it sees them all and adds noise."
)


class TrustOfMethod(Kind):
    """The trust model that a method has where none is named."""

    kind: Literal[""] = ""


class UntrustedServer(Kind):
    """The server sees every release, and is trusted with nothing."""

    kind: Literal["untrusted-server"] = "untrusted-server"


class TrustedServer(Kind):
    """The server sees every release before there is noise, and adds it."""

    kind: Literal["trusted-server"] = "trusted-server"


class SecureAggregation(Kind):
    """The server sees only sums; runs and clients each have options of their own."""

    kind: Literal["secure-aggregation"] = "secure-aggregation"
    min_cohort: Annotated[
        int,
        Declaration(
            "n, the fewest releases of a sum; a round with fewer stays closed, and clients carry theirs over.",
            at_least=0,
            zero="four fifths of clients-per-round, rounded up",
        ),
    ] = 0
