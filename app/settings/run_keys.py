"""The keys of a run configuration (:mod:`murmurfl.privacy.setting`).

Keys about a client's privacy are in :mod:`murmurfl.privacy.release.tables`, which operators' files share.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ...clients.adapters.per_sample_gradients import GRADIENT_MEMORY_MIB
from ...privacy.mechanisms import SHARES
from ...privacy.noise import NOISE_QUALITIES
from ...privacy.queries.clipped_share import QUANTILE_SHARE
from ...privacy.queries.knots import KNOTS, KNOTS_SHARE, MOST_KNOTS
from ...privacy.queries.mean_of_features import CENTRING_SHARE
from ...privacy.release import tables
from ...privacy.release.policy import CLIP_UNITS, RELEASE_RULES
from ...privacy.release.shuffled_privatizer import ACCOUNTINGS, ORDERS
from ...privacy.setting import Declaration, settings
from ...privacy.sums.roster import MOST_HELPERS
from ...strategies.full_batch import AVERAGES
from ...strategies.rounds.participation import SAMPLINGS
from ...strategies.shuffled import REGULARIZERS, VARIANTS
from ...strategies.sums.secure_aggregation import MOST_BYZANTINE
from .registry import registry

PRESETS = ("practical", "paper")
MOST_AUGMENTATIONS = 17
"""The most augmentations of an image: itself, and moved by one or two pixels."""
_PRESETS = "the preset's"


TaskName = Annotated[
    str,
    Declaration(
        "The data set; on real clients also the path of a schema, whose records only they have.",
        names=True,
        choices=partial(registry, "task"),
    ),
]
FeaturesName = Annotated[
    str,
    Declaration(
        "Fixed map applied to a task's images; costs no privacy.",
        names=True,
        choices=partial(registry, "features"),
    ),
]
DataRoot = Annotated[
    str,
    Declaration("Folder with the data sets; empty for the environment variable MURMURFL_DATA.", file=True),
]
PartitionName = Annotated[
    str,
    Declaration("How samples are split among clients.", names=True, choices=partial(registry, "partition")),
]
StrategyName = Annotated[
    str,
    Declaration(
        "The method: how clients and server train.",
        names=True,
        choices=partial(registry, "strategy"),
    ),
]
ModelName = Annotated[str, Declaration("The model to train.", names=True, choices=partial(registry, "model"))]
FeatureBound = Annotated[
    float,
    Declaration("R, a public bound on a sample's norm.", at_least=0, zero="the task's", read_by="model"),
]
Knots = Annotated[
    int,
    Declaration(
        "Knots of each number of an additive model.", key="model.knots", at_least=2, at_most=MOST_KNOTS, read_by="model"
    ),
]
KnotsShare = Annotated[
    float,
    Declaration(
        "Share of mu^2 spent on the knots of an additive model.",
        key="model.knots-share",
        above=0,
        below=1,
        read_by="model",
    ),
]
Augmentations = Annotated[
    int,
    Declaration(
        "Augmentations of each image over which a network's gradient is averaged, before it is clipped.",
        key="model.augmentations",
        at_least=0,
        at_most=MOST_AUGMENTATIONS,
        zero="the model's",
        read_by="model",
    ),
]
LearningRate = Annotated[float, Declaration("eta, the step.", at_least=0, zero=_PRESETS)]


class RunSums(tables.SecureAggregation):
    """Secure aggregation in a run configuration."""

    helpers: Annotated[
        int,
        Declaration(
            "Helpers; each must take part in opening every sum.",
            at_least=1,
            at_most=MOST_HELPERS,
        ),
    ] = 2
    colluders: Annotated[
        int,
        Declaration(
            "Clients of a sum that may collude with the server: mu protects the other h = min-cohort - colluders; -1 "
            "sets h to half of clients-per-round.",
            at_least=-1,
        ),
    ] = -1
    max_byzantine: Annotated[
        int,
        Declaration(
            "The most clients that are taken to lie: after a wrong sum so many are left out in turns.",
            at_least=1,
            at_most=MOST_BYZANTINE,
        ),
    ] = 2
    max_failed_aggregations: Annotated[
        int,
        Declaration(
            "Wrong sums after which a training ends with the model it has.",
            at_least=1,
        ),
    ] = 16
    max_noise: Annotated[
        float,
        Declaration(
            "Likewise, how many times its planned variance the noise that wrong sums left may have.",
            above=1,
        ),
    ] = 4.0


Trust = Annotated[tables.TrustOfMethod | tables.UntrustedServer | tables.TrustedServer | RunSums, tables.TRUST]


@settings
class RunKeys:
    """All run-config keys, with underscores for hyphens; :class:`.run_config.RunConfig` checks them."""

    strategy: StrategyName = "mu2"
    model: ModelName = "softmax"
    feature_bound: FeatureBound = 0.0
    knots: Knots = KNOTS
    knots_share: KnotsShare = KNOTS_SHARE
    augmentations: Augmentations = 0
    rank_share: Annotated[
        float,
        Declaration(
            "Share of a number's additive features that its rank has; 1 is a line, less has more of a curve.",
            key="model.rank-share",
            at_least=0,
            at_most=1,
            zero="the one that fits the noise",
            read_by="model",
        ),
    ] = 0.0
    learning_rate: LearningRate = 0.0
    preset: Annotated[str, Declaration("Source of the default clip, step, ball and schedule.", choices=PRESETS)] = (
        "practical"
    )
    projection_radius: Annotated[
        float,
        Declaration(
            "D / 2, radius of the ball that the model is projected onto.",
            key="strategy.projection-radius",
            at_least=0,
            zero=_PRESETS,
            read_by="strategy",
        ),
    ] = 0.0
    steps: Annotated[
        str,
        Declaration(
            "What the server's steps of mu2 are for: the model after the last round, or the model after every round.",
            key="strategy.steps",
            choices=("constant", "anytime"),
            read_by="strategy",
        ),
    ] = "constant"
    window: Annotated[
        int,
        Declaration(
            "Rounds after which anytime steps forget the past, for streams that drift.",
            key="strategy.window",
            at_least=0,
            zero="nothing is forgotten",
            read_by="strategy",
        ),
    ] = 0
    class_weight: Annotated[
        float,
        Declaration(
            "a, the weight of classes in a release of second moments.",
            key="strategy.class-weight",
            above=0,
            at_most=1.4142,
            read_by="strategy",
        ),
    ] = 1.0
    ridge: Annotated[
        float,
        Declaration(
            "Lower bound on the eigenvalues of one shot, in units of the noise on a value.",
            key="strategy.ridge",
            at_least=0,
            zero=_PRESETS,
            read_by="strategy",
        ),
    ] = 0.0
    global_learning_rate: Annotated[
        float,
        Declaration(
            "eta_g: the server's step is eta eta_g tau.",
            key="strategy.global-learning-rate",
            above=0,
            read_by="strategy",
        ),
    ] = 1.0
    momentum: Annotated[
        float,
        Declaration(
            "beta, Nesterov's momentum of full batches.",
            key="strategy.momentum",
            at_least=0,
            below=1,
            zero=_PRESETS,
            read_by="strategy",
        ),
    ] = 0.0
    average: Annotated[
        str,
        Declaration(
            "Model that full batches publish: the last iterate, the mean of the last two, or the average of all "
            "weighted by round; empty for the preset's.",
            key="strategy.average",
            choices=("", *AVERAGES),
            read_by="strategy",
        ),
    ] = ""
    l2: Annotated[
        float,
        Declaration(
            "lambda of lambda ||w||^2 / 2, which the server adds to the loss.",
            key="strategy.l2",
            at_least=0,
            zero=_PRESETS,
            read_by="strategy",
        ),
    ] = 0.0
    alpha: Annotated[
        float,
        Declaration(
            "Weight of a new gradient in a momentum.", key="strategy.alpha", above=0, at_most=1, read_by="strategy"
        ),
    ] = 0.1
    regularizer: Annotated[
        str,
        Declaration(
            "psi, applied once an epoch; empty for the task's.",
            key="strategy.regularizer",
            choices=("", *REGULARIZERS),
            read_by="strategy",
        ),
    ] = ""
    regularizer_strength: Annotated[
        float,
        Declaration(
            "lambda or radius of psi.",
            key="strategy.regularizer-strength",
            at_least=0,
            zero="the task's",
            read_by="strategy",
        ),
    ] = 0.0
    gradient_memory_mib: Annotated[
        float,
        Declaration(
            "Memory for a network's per-sample gradients, in MiB.",
            key="model.gradient-memory-mib",
            above=0,
            read_by="model",
        ),
    ] = GRADIENT_MEMORY_MIB
    variant: Annotated[
        str, Declaration("How public samples are used.", key="strategy.variant", choices=VARIANTS, read_by="strategy")
    ] = "interleaved"
    order: Annotated[
        str,
        Declaration(
            "The order of the private samples in an epoch.", key="strategy.order", choices=ORDERS, read_by="strategy"
        ),
    ] = "RR"
    private_share: Annotated[
        float,
        Declaration(
            "p, the share of steps on private samples.",
            key="strategy.private-share",
            above=0,
            at_most=1,
            read_by="strategy",
        ),
    ] = 0.5
    accounting: Annotated[
        str,
        Declaration(
            "Accounting of an epoch; `amplified` is refused where it does not hold.",
            key="strategy.accounting",
            choices=ACCOUNTINGS,
            read_by="strategy",
        ),
    ] = "amplified"
    release_rule: Annotated[
        str,
        Declaration(
            "The release that the next one builds on: the last acknowledged, or the last made, as in the papers.",
            key="strategy.release-rule",
            choices=RELEASE_RULES,
            read_by="strategy",
        ),
    ] = "acknowledged"
    task: TaskName = "digits"
    features: FeaturesName = "pixels"
    data_root: DataRoot = ""
    partition: PartitionName = "iid"
    dirichlet_alpha: Annotated[
        float,
        Declaration(
            "Concentration of a label-skewed partition; small is more skewed.",
            key="partition.alpha",
            above=0,
            read_by="partition",
        ),
    ] = 0.5
    classes_per_client: Annotated[
        int,
        Declaration(
            "Number of classes of which each client has samples.",
            key="partition.classes",
            at_least=1,
            read_by="partition",
        ),
    ] = 2
    download: Annotated[bool, Declaration("Whether a missing data set may be downloaded into the data root.")] = False
    public_samples: Annotated[
        int,
        Declaration(
            "Training samples treated as public, for tasks that have no public samples.",
            key="strategy.public-samples",
            at_least=0,
            read_by="strategy",
        ),
    ] = 0
    synthetic_samples: Annotated[
        int, Declaration("Training samples of a synthetic task.", key="task.samples", at_least=1, read_by="task")
    ] = 6000
    synthetic_features: Annotated[
        int, Declaration("Values of a sample of a synthetic task.", key="task.features", at_least=1, read_by="task")
    ] = 784
    synthetic_alpha: Annotated[
        float,
        Declaration("Variance of the labelling rule between clients.", key="task.alpha", at_least=0, read_by="task"),
    ] = 0.1
    synthetic_beta: Annotated[
        float, Declaration("Variance of the features between clients.", key="task.beta", at_least=0, read_by="task")
    ] = 0.1
    validation_samples: Annotated[
        int, Declaration("Training samples held out for tuning; they replace the test set.", at_least=0)
    ] = 0
    training_samples: Annotated[
        int,
        Declaration(
            "Training samples used, the same in every run; with a schema as task, about how many all clients have.",
            at_least=0,
            zero="all",
        ),
    ] = 0
    stream: Annotated[
        bool,
        Declaration(
            "Whether samples arrive during training, each used on arrival.", key="strategy.stream", read_by="strategy"
        ),
    ] = False
    sample_uses: Annotated[
        str,
        Declaration(
            "Releases that a sample may be in: `any` number, `few` (4) or `once`.",
            key="strategy.sample-uses",
            choices=("any", "few", "once"),
            read_by="strategy",
        ),
    ] = "any"
    batch_size: tables.BatchSize = 8
    samples_per_owner: tables.SamplesPerOwner = 0
    passes: tables.Passes = 1
    max_participations: tables.MaxParticipations = 0
    batch_selection: tables.BatchSelection = ""
    num_clients: Annotated[int, Declaration("M, clients in all.", at_least=1)] = 10
    clients_per_round: Annotated[
        int, Declaration("m, clients asked in a round.", at_least=0, zero="all num-clients of them")
    ] = 10
    quorum: Annotated[
        float,
        Declaration(
            "Share of clients-per-round whose answers end a round. Later answers count in a later round where the "
            "method allows it; simulated clients are never late. A resumed run may have another.",
            above=0,
            at_most=1,
        ),
    ] = 1.0
    min_available_nodes: Annotated[
        int,
        Declaration(
            "Fewest connected clients with which a round of real clients begins after node-deadline-s. A resumed run "
            "may have another.",
            at_least=0,
            zero="half of clients-per-round, rounded up, or the quorum if that is less",
        ),
    ] = 0
    over_selection: Annotated[
        float,
        Declaration(
            "Clients asked in a round, as a multiple of clients-per-round, rounded up.", at_least=1, at_most=2**31 - 1
        ),
    ] = 1.0
    num_rounds: Annotated[
        int,
        Declaration(
            "T, rounds; more than samples and caps allow are refused.",
            at_least=0,
            zero="one pass over the data, with full batches the preset's; real clients need a number",
        ),
    ] = 0
    allow_exhaustion: Annotated[
        bool,
        Declaration(
            "Whether rounds go on after clients run out of samples or reach their cap, and so refuse; in a "
            "simulation of one pass they do.",
        ),
    ] = False
    sampling: Annotated[
        str,
        Declaration("How a round's clients are drawn; empty for the preset's.", choices=("", *SAMPLINGS)),
    ] = ""
    lost_replies: Annotated[
        float, Declaration("Share of replies that a simulation loses at random.", at_least=0, below=1)
    ] = 0.0
    seed: Annotated[
        int,
        Declaration(
            "Seed of partition, sampling, simulated losses and, in simulation, noise.",
            at_least=0,
            below=2**63,
        ),
    ] = 1
    round_timeout_s: Annotated[float, Declaration("Longest wait for a round's replies, in seconds.", above=0)] = 600.0
    node_deadline_s: Annotated[float, Declaration("Longest wait for enough clients, in seconds.", above=0)] = 120.0
    give_up_after: Annotated[
        int,
        Declaration(
            "Consecutive rounds with nothing to aggregate after which a run fails.",
            at_least=0,
            zero="never",
        ),
    ] = 3
    permit: Annotated[
        str,
        Declaration(
            "On real clients, the owner's permit (`murmurfl owner permit`) for clients that demand one.",
            zero="none",
        ),
    ] = ""
    schema: Annotated[
        str,
        Declaration(
            "On real clients, the digest of the record schema (`murmurfl schema FILE --digest`); others are not asked.",
            zero="any",
        ),
    ] = ""
    centring: tables.Centring = ""
    centring_share: tables.CentringShare = CENTRING_SHARE
    private_evaluation: tables.PrivateEvaluation = 0.0
    held_out: tables.HeldOut = tables.HELD_OUT
    score_bins: tables.ScoreBins = 0
    mu: tables.Mu = 0.0
    epsilon: tables.Epsilon = 0.0
    delta: tables.Delta = 1e-5
    clip_norm: tables.ClipNorm = 0.0
    clipping: tables.Clipping = ""
    clip_stability: tables.ClipStability = 0.01
    quantile_share: tables.QuantileShare = QUANTILE_SHARE
    clip_unit: Annotated[
        str,
        Declaration("What is clipped; empty for the method's own.", choices=("", *CLIP_UNITS), read_by="strategy"),
    ] = ""
    quantile: Annotated[
        float,
        Declaration(
            "Target share of unclipped gradients: full batches adapt the clip, from `clip-norm` on, to the clipped "
            "share, released with the same noise.",
            key="clipping.quantile",
            at_least=0,
            below=1,
            zero="a fixed clip",
            read_by="strategy",
        ),
    ] = 0.0
    mechanism: tables.Mechanism = tables.OwnOfMethod()
    shares: Annotated[
        str,
        Declaration(
            "Share of mu^2 for each round of full batches; empty for equal shares.",
            key="strategy.shares",
            choices=("", *SHARES),
            read_by="strategy",
        ),
    ] = ""
    noise_quality: Annotated[
        str,
        Declaration("`fast` is for long simulations and guarantees nothing.", choices=NOISE_QUALITIES),
    ] = "exact"
    trust: Trust = tables.TrustOfMethod()
    gradient_norm: Annotated[
        bool,
        Declaration(
            "Whether evaluations compute the norm of the training loss's gradient: simulation only, not private.",
        ),
    ] = False
    evaluate_every: Annotated[
        int, Declaration("Rounds between evaluations; the last is always evaluated.", at_least=1)
    ] = 1
    checkpoint: Annotated[
        bool, Declaration("On real clients, whether the server saves its state after every round.")
    ] = True
    out_dir: Annotated[
        str,
        Declaration("Folder for results, an absolute path; empty for runs/ where the server runs."),
    ] = ""
    run_name: Annotated[str, Declaration("Folder in out-dir; empty for strategy, task and seed.")] = ""
    track: Annotated[str, Declaration("Trackers, separated by commas: tensorboard, mlflow, wandb; empty for none.")] = (
        ""
    )
