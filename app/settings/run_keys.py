"""The keys of a run configuration, in tables (:mod:`murmurfl.privacy.setting`).

Keys about a machine's privacy are in :mod:`murmurfl.privacy.machine.tables`, which operators' files share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...clients.adapters.per_sample_gradients import GRADIENT_MEMORY_MIB
from ...privacy import ACCOUNTINGS, CLIP_UNITS, NOISE_QUALITIES, ORDERS, RELEASE_RULES, SCHEDULES, SHARES
from ...privacy.machine.tables import Clip, Evaluating, Mean, Noise, Releases, Sums, Wanted
from ...privacy.setting import setting, table
from ...privacy.sums.roster import MOST_HELPERS
from ...strategies import AVERAGES, REGULARIZERS, SAMPLINGS, VARIANTS
from ...strategies.sums.secure_aggregation import MOST_CULPRITS
from .registry import registry

PRESETS = ("practical", "paper")
_PRESETS = "the preset's"


def named(key: str, default: str, sentence: str) -> Any:
    """Declare a key whose value is a registered name or a user's ``package.module:Thing``."""
    return setting(default, sentence, names=True, choices=partial(registry, key))


@table("data")
class Data:
    """Data and partition; operators' files have this table too."""

    task: str = named(
        "task", "digits", "The data set; on real machines also the path of a schema, whose records only they have."
    )
    features: str = named("features", "pixels", "Fixed map applied to a task's images; costs no privacy.")
    data_root: str = setting(
        "", "Folder with the data sets; empty for the environment variable MURMURFL_DATA.", file=True
    )
    partition: str = named("partition", "iid", "How samples are split among machines.")


@table("training")
class Trained:
    """Method and model; operators' files have this table too."""

    strategy: str = named("strategy", "mu2", "The method: how machines and server train.")
    model: str = named("model", "softmax", "The model to train.")
    feature_bound: float = setting(
        0.0, "R, a public bound on a sample's norm.", at_least=0, zero="the task's", read_by="model"
    )
    learning_rate: float = setting(0.0, "eta, the step.", at_least=0, zero=_PRESETS)


@table("data")
class DataOfRun:
    """Data of a simulated run."""

    dirichlet_alpha: float = setting(
        0.5, "Concentration of the label-skewed partition; small is more skewed.", above=0, read_by="partition"
    )
    download: bool = setting(False, "Whether a missing data set may be downloaded into the data root.")
    public_samples: int = setting(
        0,
        "Training samples treated as public, for tasks that have no public samples.",
        at_least=0,
        read_by="strategy",
    )
    synthetic_samples: int = setting(6000, "Training samples of a synthetic task.", at_least=1, read_by="task")
    synthetic_features: int = setting(784, "Values of a sample of a synthetic task.", at_least=1, read_by="task")
    synthetic_alpha: float = setting(
        0.1, "Variance of the labelling rule between machines.", at_least=0, read_by="task"
    )
    synthetic_beta: float = setting(0.1, "Variance of the features between machines.", at_least=0, read_by="task")
    validation_samples: int = setting(0, "Training samples held out for tuning; they replace the test set.", at_least=0)
    training_samples: int = setting(
        0,
        "Training samples used, the same in every run; with a schema as task, about how many all machines have.",
        at_least=0,
        zero="all",
    )
    stream: bool = setting(False, "Whether samples arrive during training, each used on arrival.", read_by="strategy")
    sample_uses: str = setting(
        "any",
        "Releases that a sample may be in: `any` number, `few` (4) or `once`.",
        choices=("any", "few", "once"),
        read_by="strategy",
    )


@table("rounds")
class Rounds:
    """Which machines are asked, how often, and how long a round waits."""

    num_clients: int = setting(10, "M, machines in all.", at_least=1)
    clients_per_round: int = setting(10, "m, machines asked in a round.", at_least=1)
    quorum: float = setting(
        1.0,
        "Share of clients-per-round whose answers end a round. Later answers count in a later round where the method "
        "allows it; simulated machines are never late. A resumed run may have another.",
        above=0,
        at_most=1,
    )
    min_available_nodes: int = setting(
        0,
        "Fewest connected clients with which a round of real machines begins after node-deadline-s. A resumed run may "
        "have another.",
        at_least=0,
        zero="half of clients-per-round, rounded up, or the quorum if that is less",
    )
    over_selection: float = setting(
        1.0, "Machines asked in a round, as a multiple of clients-per-round, rounded up.", at_least=1
    )
    num_rounds: int = setting(
        0,
        "T, rounds; more than samples and caps allow are refused.",
        at_least=0,
        zero="one pass over the data, with full batches the preset's; real machines need a number",
    )
    allow_exhaustion: bool = setting(
        False,
        "Whether rounds go on after machines run out of samples or reach their cap, and so refuse; in a simulation of "
        "one pass they do.",
    )
    sampling: str = setting("", "How a round's machines are drawn; empty for the preset's.", choices=("", *SAMPLINGS))
    lost_replies: float = setting(0.0, "Share of replies that a simulation loses at random.", at_least=0, below=1)
    seed: int = setting(
        1, "Seed of partition, sampling, simulated losses and, in simulation, noise.", at_least=0, below=2**63
    )
    round_timeout_s: float = setting(600.0, "Longest wait for a round's replies, in seconds.", above=0)
    node_deadline_s: float = setting(120.0, "Longest wait for enough machines, in seconds.", above=0)
    give_up_after: int = setting(
        3,
        "Consecutive rounds with nothing to aggregate after which a run fails.",
        at_least=0,
        zero="never",
    )
    permit: str = setting(
        "",
        "On real machines, the owner's permit (`murmurfl owner permit`) for machines that demand one.",
        zero="none",
    )
    schema: str = setting(
        "",
        "On real machines, the digest of the record schema (`murmurfl schema FILE --digest`); others are not asked.",
        zero="any",
    )


@table("training")
class TrainedByServer:
    """How server and machines of a run train."""

    preset: str = setting("practical", "Source of the default clip, step, ball and schedule.", choices=PRESETS)
    diameter: float = setting(
        0.0, "D, diameter of the ball that holds the model.", at_least=0, zero=_PRESETS, read_by="strategy"
    )
    steps: str = setting(
        "constant",
        "What the server's steps of mu2 are for: the model after the last round, or the model after every round.",
        choices=("constant", "anytime"),
        read_by="strategy",
    )
    window: int = setting(
        0,
        "Rounds after which anytime steps forget the past, for streams that drift.",
        at_least=0,
        zero="nothing is forgotten",
        read_by="strategy",
    )
    class_weight: float = setting(
        1.0, "a, the weight of classes in a release of second moments.", above=0, at_most=1.4142, read_by="strategy"
    )
    ridge: float = setting(
        0.0,
        "Lower bound on the eigenvalues of one shot, in units of the noise on a value.",
        at_least=0,
        zero=_PRESETS,
        read_by="strategy",
    )
    global_learning_rate: float = setting(
        1.0, "eta_g: the server's step is eta eta_g tau.", above=0, read_by="strategy"
    )
    momentum: float = setting(
        0.0, "beta, Nesterov's momentum of full batches.", at_least=0, below=1, zero=_PRESETS, read_by="strategy"
    )
    average: str = setting(
        "",
        "Model that full batches publish: the last iterate, or the average of all weighted by round; empty for the "
        "preset's.",
        choices=("", *AVERAGES),
        read_by="strategy",
    )
    l2: float = setting(
        0.0,
        "lambda of lambda ||w||^2 / 2, which the server adds to the loss.",
        at_least=0,
        zero=_PRESETS,
        read_by="strategy",
    )
    alpha: float = setting(0.1, "Weight of a new gradient in a momentum.", above=0, at_most=1, read_by="strategy")
    regularizer: str = setting(
        "", "psi, applied once an epoch; empty for the task's.", choices=("", *REGULARIZERS), read_by="strategy"
    )
    regularizer_strength: float = setting(
        0.0, "lambda or radius of psi.", at_least=0, zero="the task's", read_by="strategy"
    )
    gradient_memory_mib: float = setting(
        GRADIENT_MEMORY_MIB,
        "Memory for a network's per-sample gradients, in MiB.",
        above=0,
        read_by="model",
    )
    variant: str = setting("interleaved", "How public samples are used.", choices=VARIANTS, read_by="strategy")
    order: str = setting("RR", "The order of the private samples in an epoch.", choices=ORDERS, read_by="strategy")
    private_share: float = setting(
        0.5, "p, the share of steps on private samples.", above=0, at_most=1, read_by="strategy"
    )
    accounting: str = setting(
        "amplified",
        "Accounting of an epoch; `amplified` is refused where it does not hold.",
        choices=ACCOUNTINGS,
        read_by="strategy",
    )
    release_rule: str = setting(
        "acknowledged",
        "The release that the next one builds on: the last acknowledged, or the last made, as in the papers.",
        choices=RELEASE_RULES,
        read_by="strategy",
    )


@table("clip")
class ClipOfRun:
    """Clipping as a run chooses it."""

    clip_unit: str = setting(
        "",
        "What is clipped; empty for the method's own.",
        choices=("", *CLIP_UNITS),
        read_by="strategy",
    )
    quantile: float = setting(
        0.0,
        "Target share of unclipped gradients: full batches adapt the clip, from `clip-norm` on, to the clipped share, "
        "released with the same noise.",
        at_least=0,
        below=1,
        zero="a fixed clip",
        read_by="strategy",
    )


@table("noise")
class NoiseOfRun:
    """Options of noise mechanisms."""

    decay: float = setting(
        0.0,
        "Share of its previous noise that a release removes.",
        at_least=0,
        at_most=1,
        zero="the best",
        read_by="mechanism",
    )
    decoder: str = setting("", "Decoder of the tree.", zero="its default", read_by="mechanism")
    workload: str = setting("", "Workload that the noise is optimal for.", zero="its default", read_by="mechanism")
    bands: int = setting(
        0, "Non-zero diagonals of the encoder or of its inverse.", at_least=0, zero="its default", read_by="mechanism"
    )
    buffers: int = setting(0, "Buffers of the linear recurrence.", at_least=0, zero="its default", read_by="mechanism")
    schedule: str = setting(
        "",
        "Noise schedule of the cancelling mechanism; empty for the preset's.",
        choices=("", *SCHEDULES),
        read_by="strategy",
    )
    shares: str = setting(
        "",
        "Share of mu^2 for each round of full batches; empty for equal shares.",
        choices=("", *SHARES),
        read_by="strategy",
    )
    noise_quality: str = setting(
        "exact", "`fast` is for long simulations and guarantees nothing.", choices=NOISE_QUALITIES
    )


@table("secure-aggregation")
class SumsOfRun:
    """Secure aggregation as a run chooses it."""

    helpers: int = setting(
        2, "Helpers; each must take part in opening every sum.", at_least=1, at_most=MOST_HELPERS, read_by="trust"
    )
    colluders: int = setting(
        -1,
        "Machines of a sum that may collude with the server: mu protects the other h = min-cohort - colluders; -1 sets "
        "h to half of clients-per-round.",
        at_least=-1,
        read_by="trust",
    )
    culprits: int = setting(
        2,
        "The most machines that are taken to lie: after a wrong sum so many are left out in turns.",
        at_least=1,
        at_most=MOST_CULPRITS,
        read_by="trust",
    )
    most_skipped: int = setting(
        16, "Wrong sums after which a training ends with the model it has.", at_least=1, read_by="trust"
    )
    most_noise: float = setting(
        4.0,
        "Likewise, how many times its planned variance the noise that wrong sums left may have.",
        above=1,
        read_by="trust",
    )


@table("results")
class Results:
    """Evaluation, checkpoints and files of a run."""

    gradient_norm: bool = setting(
        False,
        "Whether evaluations compute the norm of the training loss's gradient: simulation only, not private.",
    )
    evaluate_every: int = setting(1, "Rounds between evaluations; the last is always evaluated.", at_least=1)
    checkpoint: bool = setting(True, "On real machines, whether the server saves its state after every round.")
    out_dir: str = setting("", "Folder for results, an absolute path; empty for runs/ where the server runs.")
    run_name: str = setting("", "Folder in out-dir; empty for strategy, task and seed.")
    track: str = setting("", "Trackers, separated by commas: tensorboard, mlflow, wandb; empty for none.")


@table()
class RunKeys(
    Results,
    SumsOfRun,
    Sums,
    NoiseOfRun,
    Noise,
    ClipOfRun,
    Clip,
    Wanted,
    Evaluating,
    Mean,
    Releases,
    Rounds,
    DataOfRun,
    Data,
    TrainedByServer,
    Trained,
):
    """All run-config keys, with underscores for hyphens; :class:`.run_config.RunConfig` checks them."""
