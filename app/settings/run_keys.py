"""The keys of a run configuration, each declared once, in tables (:mod:`murmurfl.privacy.setting`).

Those that operators' files share about a machine's privacy stand in :mod:`murmurfl.privacy.machine.tables`.
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
from .registry import registry

PRESETS = ("practical", "paper")
_PRESETS = "the preset's"


def named(key: str, default: str, sentence: str) -> Any:
    """A setting that names something registered, or ``package.module:Thing`` of one's own."""
    return setting(default, sentence, names=True, choices=partial(registry, key))


@table("data")
class Data:
    """The data, and how they are split among machines; an operator's file may say the same."""

    task: str = named("task", "digits", "The data set.")
    features: str = named("features", "pixels", "A fixed map of a task's images, which costs no privacy.")
    data_root: str = setting(
        "", "Folder with the data sets; empty for the environment variable MURMURFL_DATA.", file=True
    )
    partition: str = named("partition", "iid", "How samples are split among the machines.")


@table("training")
class Trained:
    """What is trained, and how; an operator's file may say the same."""

    strategy: str = named("strategy", "mu2", "The method: how machines and server train.")
    model: str = named("model", "softmax", "What is trained.")
    feature_bound: float = setting(
        0.0, "R, a public bound on a sample's norm.", at_least=0, zero="the task's", read_by="model"
    )
    learning_rate: float = setting(0.0, "eta, the step.", at_least=0, zero=_PRESETS)


@table("data")
class DataOfRun:
    """Data of a simulation."""

    dirichlet_alpha: float = setting(
        0.5, "Concentration of the label-skewed partition; small is more skewed.", above=0, read_by="partition"
    )
    download: bool = setting(False, "Whether a missing data set may be downloaded into the data root.")
    public_samples: int = setting(
        0,
        "Training samples that count as public, for tasks without public samples of their own.",
        at_least=0,
        read_by="strategy",
    )
    synthetic_samples: int = setting(6000, "Training samples of a synthetic task.", at_least=1, read_by="task")
    synthetic_features: int = setting(784, "Values of a sample of a synthetic task.", at_least=1, read_by="task")
    synthetic_alpha: float = setting(
        0.1, "How far machines differ in their rules: a variance.", at_least=0, read_by="task"
    )
    synthetic_beta: float = setting(
        0.1, "How far machines differ in their features: a variance.", at_least=0, read_by="task"
    )
    validation_samples: int = setting(
        0, "Training samples held out and evaluated on in place of the test set, for tuning.", at_least=0
    )
    training_samples: int = setting(
        0, "How many training samples are used, the same ones in every run.", at_least=0, zero="all"
    )
    stream: bool = setting(
        False, "Whether samples come while rounds go on, each to be used as it comes.", read_by="strategy"
    )
    sample_uses: str = setting(
        "any",
        "In how many releases a sample may be: `any` number, `few`, which is 4, or `once`.",
        choices=("any", "few", "once"),
        read_by="strategy",
    )


@table("rounds")
class Rounds:
    """Who is asked, how often, and how long a round waits."""

    num_clients: int = setting(10, "M, machines in all.", at_least=1)
    clients_per_round: int = setting(10, "m, machines asked in a round.", at_least=1)
    wait_for: float = setting(
        1.0,
        "The share of clients-per-round whose answers end a round; late ones count when they come, where they can. "
        "Simulated machines are never late.",
        above=0,
        at_most=1,
    )
    ask: float = setting(1.0, "How many times clients-per-round machines a round asks, rounded up.", at_least=1)
    num_rounds: int = setting(
        0,
        "T; more than the machines' samples and caps last for are refused.",
        at_least=0,
        zero="one pass over the data; with full batches the preset's",
    )
    run_dry: bool = setting(
        False, "Whether rounds go on when machines have used up their samples or reached their cap: these refuse then."
    )
    sampling: str = setting(
        "", "How the machines of a round are drawn; empty for the preset's.", choices=("", *SAMPLINGS)
    )
    lost_replies: float = setting(0.0, "Share of replies lost at random, to see what happens.", at_least=0, below=1)
    seed: int = setting(
        1, "Of partition, sampling, simulated losses and, in simulation, noise.", at_least=0, below=2**63
    )
    round_timeout_s: float = setting(600.0, "Longest wait for a round's replies, in seconds.", above=0)
    node_deadline_s: float = setting(120.0, "Longest wait for enough machines, in seconds.", above=0)
    give_up_after: int = setting(
        3,
        "Rounds in a row without anything to aggregate after which a run ends with an error.",
        at_least=0,
        zero="never",
    )
    permit: str = setting(
        "",
        "On real machines, the permit of the run's owner (`murmurfl owner permit`), for those that take no other runs.",
        zero="none",
    )
    schema: str = setting(
        "",
        "On real machines, the digest of what a record is (`murmurfl schema FILE --digest`): others are not asked.",
        zero="any",
    )


@table("training")
class TrainedByServer:
    """What server and machines of a run make of releases."""

    preset: str = setting("practical", "Where clip, step, ball and schedule come from.", choices=PRESETS)
    diameter: float = setting(
        0.0, "D, diameter of the ball the model stays in.", at_least=0, zero=_PRESETS, read_by="strategy"
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
        "What one shot raises smaller eigenvalues to, in units of the noise on a value.",
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
        "Which model full batches publish: the last iterate, or an average of all, weighted by their round; empty for "
        "the preset's.",
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
        "What a network's gradients of several samples may take in memory at a time, in MiB.",
        above=0,
        read_by="model",
    )
    variant: str = setting("interleaved", "What is done with public samples.", choices=VARIANTS, read_by="strategy")
    order: str = setting("RR", "The order of the private samples in an epoch.", choices=ORDERS, read_by="strategy")
    private_share: float = setting(
        0.5, "p, the share of steps on private samples.", above=0, at_most=1, read_by="strategy"
    )
    accounting: str = setting(
        "amplified",
        "How an epoch is accounted for; `amplified` is refused where it does not hold.",
        choices=ACCOUNTINGS,
        read_by="strategy",
    )
    release_rule: str = setting(
        "acknowledged",
        "What a release is built on: the last one acknowledged, or, as in the papers, the last one.",
        choices=RELEASE_RULES,
        read_by="strategy",
    )


@table("clip")
class ClipOfRun:
    """How a run chooses what is clipped."""

    clip_unit: str = setting(
        "",
        "What is clipped; empty for the method's own.",
        choices=("", *CLIP_UNITS),
        read_by="strategy",
    )
    quantile: float = setting(
        0.0,
        "Which share of gradients is not to be clipped: the clip of full batches follows from how many are, which is "
        "released with the same noise, and `clip-norm` is where it starts.",
        at_least=0,
        below=1,
        zero="a clip that stays",
        read_by="strategy",
    )


@table("noise")
class NoiseOfRun:
    """Options of mechanisms."""

    decay: float = setting(
        0.0,
        "How much of its last noise a release takes out.",
        at_least=0,
        at_most=1,
        zero="the best",
        read_by="mechanism",
    )
    decoder: str = setting("", "Decoder of the tree.", zero="its default", read_by="mechanism")
    workload: str = setting("", "What the noise is optimal for.", zero="its default", read_by="mechanism")
    bands: int = setting(
        0, "Diagonals of the encoder, or of its inverse.", at_least=0, zero="its default", read_by="mechanism"
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
        "Which part of mu^2 each round of full batches gets; empty for the same.",
        choices=("", *SHARES),
        read_by="strategy",
    )
    noise_quality: str = setting("exact", "`fast` is for long simulations and no guarantee.", choices=NOISE_QUALITIES)


@table("secure-aggregation")
class SumsOfRun:
    """Sums as a run has them."""

    helpers: int = setting(
        2, "Helpers, each of whom must open every sum.", at_least=1, at_most=MOST_HELPERS, read_by="trust"
    )
    colluders: int = setting(
        -1,
        "Machines of a sum that may work with the server: mu is for the h = min-cohort - colluders others; -1 for what "
        "leaves half of clients-per-round.",
        at_least=-1,
        read_by="trust",
    )


@table("results")
class Results:
    """What is measured and written."""

    gradient_norm: bool = setting(
        False,
        "Whether every evaluation computes the norm of the training loss's gradient: a simulation's, not private.",
    )
    evaluate_every: int = setting(1, "Rounds between evaluations; the last round is always evaluated.", at_least=1)
    checkpoint: bool = setting(
        True, "On real machines, whether the server saves its state after every round; a simulation leaves none."
    )
    out_dir: str = setting("", "Where results are written, an absolute path; empty for runs/ where the server runs.")
    run_name: str = setting("", "Folder under out-dir; empty for one made of strategy, task and seed.")
    track: str = setting(
        "", "Where the run is logged as well: tensorboard, mlflow, wandb, separated by commas; empty for nowhere."
    )


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
    """One field a run-config key, with underscores for hyphens; :class:`.run_config.RunConfig` checks them."""
