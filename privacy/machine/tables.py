"""Settings of a machine's privacy, in tables that run configurations and operators' files share."""

from __future__ import annotations

from ..mechanisms import MECHANISMS
from ..setting import setting, table
from ..side.centring_query import CENTRING_SHARE
from ..side.clipped_share import QUANTILE_SHARE
from .clipping import CLIPPINGS
from .policy import NO_NOISE, TRUST_MODELS

PRIVATE, NONE = "private", "none"
CENTRINGS = ("", NONE, PRIVATE)
HELD_OUT = 0.1
"""The share of a machine's samples that are set aside by default, where a run is evaluated privately."""


def _mechanisms() -> tuple[str, ...]:
    return ("", NO_NOISE, *MECHANISMS)


@table("privacy")
class Wanted:
    """How private a run is to be."""

    mu: float = setting(4.0, "The privacy wanted, for one sample replaced: mu-GDP, shown as epsilon at delta.", above=0)
    epsilon: float = setting(
        0.0, "The privacy wanted as an epsilon at delta; it stands in the place of mu.", at_least=0, zero="mu"
    )
    delta: float = setting(1e-5, "Where epsilon is shown.", above=0, below=1)


@table("clip")
class Clip:
    """How gradients are bounded."""

    clip_norm: float = setting(0.0, "S, the L2 norm that is clipped to.", at_least=0, zero="the preset's")
    clipping: str = setting(
        "",
        "How gradients are bounded: cut to S where they are longer, or with `automatic` all brought to nearly S, "
        "S g / (||g|| + gamma); empty for `clip`.",
        choices=("", *CLIPPINGS),
        read_by="strategy",
    )
    clip_stability: float = setting(
        0.01, "gamma of automatic clipping, in the gradients' own units.", above=0, read_by="strategy"
    )
    quantile_share: float = setting(
        QUANTILE_SHARE, "Share of mu^2 spent on how many gradients are clipped.", above=0, below=1, read_by="strategy"
    )


@table("noise")
class Noise:
    """How noise is made."""

    mechanism: str = setting(
        "",
        "How noise is correlated over releases; empty for the method's own. `none` adds no noise anywhere, to see what "
        "noise costs: nothing is private then, mu stands for the largest there is, and real machines refuse it.",
        choices=_mechanisms,
        own=True,
    )


@table("releases")
class Releases:
    """How many releases a machine makes, and of which samples."""

    batch_size: int = setting(
        8,
        "b, samples a release; where machines take local steps tau, one step for each.",
        at_least=1,
        read_by="strategy",
    )
    samples_per_owner: int = setting(
        0,
        "j, the most samples of an owner that are used; a batch is then one of b owners, each owner's gradients are "
        "clipped as one, and all samples of an owner are protected together.",
        at_least=0,
        zero="samples by themselves",
        read_by="strategy",
    )
    passes: int = setting(
        1, "How often every machine goes through its samples; the noise covers that they return.", at_least=1
    )
    max_participations: int = setting(
        0, "K, the cap of a machine's releases.", at_least=0, zero="as many as rounds and samples allow"
    )
    secret_order: bool = setting(
        False,
        "Whether each sample draws the release it is in, and only its machine knows which; a release then takes as "
        "long as a pass, and its epsilon is shown beside the one that holds whoever knows.",
        read_by="strategy",
    )


@table("mean")
class Mean:
    """The mean of the features, which machines may release before everything else."""

    centring: str = setting(
        "",
        "Whether machines release the mean of their features first, and see samples from it; empty: as features say.",
        choices=CENTRINGS,
    )
    centring_share: float = setting(
        CENTRING_SHARE, "Share of mu^2 spent on the mean of the features.", above=0, below=1
    )


@table("evaluation")
class Evaluating:
    """A private evaluation, after everything else."""

    private_evaluation: float = setting(
        0.0,
        "Share of mu^2 spent on a private evaluation: machines count, with noise, which samples the model gets right.",
        at_least=0,
        below=1,
        zero="none",
    )
    held_out: float = setting(
        HELD_OUT,
        "Which share of a machine's samples is set aside for its private evaluation, and never trained on.",
        at_least=0,
        below=1,
        zero="an evaluation of those that were trained on",
    )
    score_bins: int = setting(
        0,
        "Bins of scores for each of two classes, counted in a private evaluation for the AUC.",
        at_least=0,
        zero="no AUC",
    )


@table("secure-aggregation")
class Sums:
    """Who is trusted, and what the sums of secure aggregation are of."""

    trust: str = setting(
        "",
        "Who is trusted, and with what; empty for the method's own. Under `secure-aggregation` the server sees only "
        "sums of releases, as long as one helper is honest; under `trusted-server` it sees them all and adds noise.",
        choices=("", *TRUST_MODELS),
    )
    min_cohort: int = setting(
        0,
        "n, the fewest releases of a sum; a round with fewer stays closed, and machines carry theirs over.",
        at_least=0,
        zero="four fifths of clients-per-round, rounded up",
        read_by="trust",
    )
