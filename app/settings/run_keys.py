"""The keys of a run configuration, each declared once: its type, range, choices and sentence (:mod:`.run_key`).

Checks, pyproject's table, ``--help``, completion and the documentation's page on the keys are made from these.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...clients.adapters.per_sample_gradients import GRADIENT_MEMORY_MIB
from ...privacy import (
    ACCOUNTINGS,
    CENTRING_SHARE,
    CLIP_UNITS,
    MECHANISMS,
    NO_NOISE,
    NOISE_QUALITIES,
    ORDERS,
    RELEASE_RULES,
    SCHEDULES,
    SHARES,
    TRUST_MODELS,
)
from ...privacy.machine.clipping import CLIPPINGS
from ...privacy.side.clipped_share import QUANTILE_SHARE
from ...privacy.sums.roster import MOST_HELPERS
from ...strategies import AVERAGES, REGULARIZERS, SAMPLINGS, VARIANTS
from .run_key import key

PRESETS = ("practical", "paper")
PRIVATE, NONE = "private", "none"
CENTRINGS = ("", NONE, PRIVATE)
HELD_OUT = 0.1
"""The share of a machine's samples that are set aside by default, where a run is evaluated privately."""

_PRESETS = "the preset's"


def _mechanisms() -> tuple[str, ...]:
    return ("", NO_NOISE, *MECHANISMS)


@dataclass(frozen=True)
class RunKeys:
    """One field a run-config key, with underscores for hyphens; :class:`.run_config.RunConfig` checks them."""

    strategy: str = key("mu2", "The method: how machines and server train.", names=True)
    preset: str = key("practical", "Where clip, step, ball and schedule come from.", choices=PRESETS)
    task: str = key("digits", "The data set.", names=True)
    features: str = key("pixels", "A fixed map of a task's images, which costs no privacy.", names=True)
    centring: str = key(
        "",
        "Whether machines release the mean of their features first, and see samples from it; empty: as features say.",
        choices=CENTRINGS,
    )
    centring_share: float = key(CENTRING_SHARE, "Of mu^2, for the mean of the features.", above=0, below=1)
    private_evaluation: float = key(
        0.0,
        "Of mu^2, for a private evaluation: machines count, with noise, which of their samples the model gets right.",
        at_least=0,
        below=1,
        zero="none",
    )
    held_out: float = key(
        HELD_OUT,
        "Which share of a machine's samples is set aside for its private evaluation, and never trained on.",
        at_least=0,
        below=1,
        zero="an evaluation of those that were trained on",
    )
    score_bins: int = key(
        0,
        "Bins of scores for each of two classes, counted in a private evaluation for the AUC.",
        at_least=0,
        zero="no AUC",
    )
    model: str = key("softmax", "What is trained.", names=True)
    partition: str = key("iid", "How samples are split among the machines.", names=True)
    dirichlet_alpha: float = key(
        0.5, "Concentration of the label-skewed partition; small is more skewed.", above=0, read_by="partition"
    )
    data_root: str = key("", "Folder with the data sets; empty for the environment variable MURMURFL_DATA.")
    download: bool = key(False, "Whether a missing data set may be downloaded into the data root.")
    num_clients: int = key(10, "M, machines in all.", at_least=1)
    clients_per_round: int = key(10, "m, machines asked in a round.", at_least=1)
    wait_for: float = key(
        1.0,
        "The share of clients-per-round whose answers end a round; late ones count when they come, where they can. "
        "Simulated machines are never late.",
        above=0,
        at_most=1,
    )
    ask: float = key(1.0, "How many times clients-per-round machines a round asks, rounded up.", at_least=1)
    num_rounds: int = key(
        0,
        "T; more than the machines' samples and caps last for are refused.",
        at_least=0,
        zero="one pass over the data; with full batches the preset's",
    )
    batch_size: int = key(
        8,
        "b, samples a release; where machines take local steps tau, one step for each.",
        at_least=1,
        read_by="strategy",
    )
    samples_per_owner: int = key(
        0,
        "j, the most samples of an owner that are used; a batch is then one of b owners, each owner's gradients are "
        "clipped as one, and all samples of an owner are protected together.",
        at_least=0,
        zero="samples by themselves",
        read_by="strategy",
    )
    passes: int = key(
        1, "How often every machine goes through its samples; the noise covers that they return.", at_least=1
    )
    max_participations: int = key(
        0, "K, the cap of a machine's releases.", at_least=0, zero="as many as rounds and samples allow"
    )
    trust: str = key(
        "",
        "Who is trusted, and with what; empty for the method's own. Under `secure-aggregation` the server sees only "
        "sums of releases, as long as one helper is honest; under `trusted-server` it sees them all and adds noise.",
        choices=("", *TRUST_MODELS),
    )
    helpers: int = key(
        2, "Helpers, each of whom must open every sum.", at_least=1, at_most=MOST_HELPERS, read_by="trust"
    )
    min_cohort: int = key(
        0,
        "n, the fewest releases of a sum; a round with fewer stays closed, and machines carry theirs over.",
        at_least=0,
        zero="four fifths of clients-per-round, rounded up",
        read_by="trust",
    )
    colluders: int = key(
        -1,
        "Machines of a sum that may work with the server: mu is for the h = min-cohort - colluders others; -1 for what "
        "leaves half of clients-per-round.",
        at_least=-1,
        read_by="trust",
    )
    secret_order: bool = key(
        False,
        "Whether each sample draws the release it is in, and only its machine knows which; a release then takes as "
        "long as a pass, and its epsilon is shown beside the one that holds whoever knows.",
        read_by="strategy",
    )
    sample_uses: str = key(
        "any",
        "In how many releases a sample may be: `any` number, `few`, which is 4, or `once`.",
        choices=("any", "few", "once"),
        read_by="strategy",
    )
    stream: bool = key(
        False, "Whether samples come while rounds go on, each to be used as it comes.", read_by="strategy"
    )
    run_dry: bool = key(
        False, "Whether rounds go on when machines have used up their samples or reached their cap: these refuse then."
    )
    mu: float = key(4.0, "The privacy wanted, for one sample replaced: mu-GDP, shown as epsilon at delta.", above=0)
    epsilon: float = key(
        0.0, "The privacy wanted as an epsilon at delta; it stands in the place of mu.", at_least=0, zero="mu"
    )
    delta: float = key(1e-5, "Where epsilon is shown.", above=0, below=1)
    clip_norm: float = key(0.0, "S, the L2 norm that is clipped to.", at_least=0, zero=_PRESETS)
    learning_rate: float = key(0.0, "eta, the step.", at_least=0, zero=_PRESETS)
    diameter: float = key(
        0.0, "D, diameter of the ball the model stays in.", at_least=0, zero=_PRESETS, read_by="strategy"
    )
    class_weight: float = key(
        1.0, "a, the weight of classes in a release of second moments.", above=0, at_most=1.4142, read_by="strategy"
    )
    ridge: float = key(
        0.0,
        "What one shot raises smaller eigenvalues to, in units of the noise on a value.",
        at_least=0,
        zero=_PRESETS,
        read_by="strategy",
    )
    global_learning_rate: float = key(1.0, "eta_g: the server's step is eta eta_g tau.", above=0, read_by="strategy")
    momentum: float = key(
        0.0, "beta, Nesterov's momentum of full batches.", at_least=0, below=1, zero=_PRESETS, read_by="strategy"
    )
    average: str = key(
        "",
        "Which model full batches publish: the last iterate, or an average of all, weighted by their round; empty for "
        "the preset's.",
        choices=("", *AVERAGES),
        read_by="strategy",
    )
    l2: float = key(
        0.0,
        "lambda of lambda ||w||^2 / 2, which the server adds to the loss.",
        at_least=0,
        zero=_PRESETS,
        read_by="strategy",
    )
    shares: str = key(
        "",
        "Which part of mu^2 each round of full batches gets; empty for the same.",
        choices=("", *SHARES),
        read_by="strategy",
    )
    alpha: float = key(0.1, "Weight of a new gradient in a momentum.", above=0, at_most=1, read_by="strategy")
    mechanism: str = key(
        "",
        "How noise is correlated over releases; empty for the method's own. `none` adds no noise anywhere, to see what "
        "noise costs: nothing is private then, mu stands for the largest there is, and real machines refuse it.",
        choices=_mechanisms,
        own=True,
    )
    decay: float = key(
        0.0,
        "How much of its last noise a release takes out.",
        at_least=0,
        at_most=1,
        zero="the best",
        read_by="mechanism",
    )
    decoder: str = key("", "Decoder of the tree.", zero="its default", read_by="mechanism")
    workload: str = key("", "What the noise is optimal for.", zero="its default", read_by="mechanism")
    bands: int = key(
        0, "Diagonals of the encoder, or of its inverse.", at_least=0, zero="its default", read_by="mechanism"
    )
    buffers: int = key(0, "Buffers of the linear recurrence.", at_least=0, zero="its default", read_by="mechanism")
    clip_unit: str = key(
        "",
        "What is clipped; empty for the method's own.",
        choices=("", *CLIP_UNITS),
        read_by="strategy",
    )
    clipping: str = key(
        "",
        "How gradients are bounded: cut to S where they are longer, or with `automatic` all brought to nearly S, "
        "S g / (||g|| + gamma); empty for `clip`.",
        choices=("", *CLIPPINGS),
        read_by="strategy",
    )
    clip_stability: float = key(
        0.01, "gamma of automatic clipping, in the gradients' own units.", above=0, read_by="strategy"
    )
    quantile: float = key(
        0.0,
        "Which share of gradients is not to be clipped: the clip of full batches follows from how many are, which is "
        "released with the same noise, and `clip-norm` is where it starts.",
        at_least=0,
        below=1,
        zero="a clip that stays",
        read_by="strategy",
    )
    quantile_share: float = key(
        QUANTILE_SHARE, "Of mu^2, for how many gradients are clipped.", above=0, below=1, read_by="strategy"
    )
    feature_bound: float = key(
        0.0, "R, a public bound on a sample's norm.", at_least=0, zero="the task's", read_by="model"
    )
    gradient_memory_mib: float = key(
        GRADIENT_MEMORY_MIB,
        "What a network's gradients of several samples may take in memory at a time, in MiB.",
        above=0,
        read_by="model",
    )
    variant: str = key("interleaved", "What is done with public samples.", choices=VARIANTS, read_by="strategy")
    order: str = key("RR", "The order of the private samples in an epoch.", choices=ORDERS, read_by="strategy")
    private_share: float = key(0.5, "p, the share of steps on private samples.", above=0, at_most=1, read_by="strategy")
    public_samples: int = key(
        0,
        "Training samples that count as public, for tasks without public samples of their own.",
        at_least=0,
        read_by="strategy",
    )
    regularizer: str = key(
        "", "psi, applied once an epoch; empty for the task's.", choices=("", *REGULARIZERS), read_by="strategy"
    )
    regularizer_strength: float = key(
        0.0, "lambda or radius of psi.", at_least=0, zero="the task's", read_by="strategy"
    )
    accounting: str = key(
        "amplified",
        "How an epoch is accounted for; `amplified` is refused where it does not hold.",
        choices=ACCOUNTINGS,
        read_by="strategy",
    )
    schedule: str = key(
        "",
        "Noise schedule of the cancelling mechanism; empty for the preset's.",
        choices=("", *SCHEDULES),
        read_by="strategy",
    )
    sampling: str = key("", "How the machines of a round are drawn; empty for the preset's.", choices=("", *SAMPLINGS))
    noise_quality: str = key("exact", "`fast` is for long simulations and no guarantee.", choices=NOISE_QUALITIES)
    release_rule: str = key(
        "acknowledged",
        "What a release is built on: the last one acknowledged, or, as in the papers, the last one.",
        choices=RELEASE_RULES,
        read_by="strategy",
    )
    lost_replies: float = key(0.0, "Share of replies lost at random, to see what happens.", at_least=0, below=1)
    seed: int = key(1, "Of partition, sampling, simulated losses and, in simulation, noise.", at_least=0, below=2**63)
    synthetic_samples: int = key(6000, "Training samples of a synthetic task.", at_least=1, read_by="task")
    synthetic_features: int = key(784, "Values of a sample of a synthetic task.", at_least=1, read_by="task")
    synthetic_alpha: float = key(0.1, "How far machines differ in their rules: a variance.", at_least=0, read_by="task")
    synthetic_beta: float = key(
        0.1, "How far machines differ in their features: a variance.", at_least=0, read_by="task"
    )
    validation_samples: int = key(
        0, "Training samples held out and evaluated on in place of the test set, for tuning.", at_least=0
    )
    training_samples: int = key(
        0, "How many training samples are used, the same ones in every run.", at_least=0, zero="all"
    )
    gradient_norm: bool = key(
        False,
        "Whether every evaluation computes the norm of the training loss's gradient: a simulation's, not private.",
    )
    evaluate_every: int = key(1, "Rounds between evaluations; the last round is always evaluated.", at_least=1)
    permit: str = key(
        "",
        "On real machines, the permit of the run's owner (`murmurfl owner permit`), for those that take no other runs.",
        zero="none",
    )
    schema: str = key(
        "",
        "On real machines, the digest of what a record is (`murmurfl schema FILE --digest`): others are not asked.",
        zero="any",
    )
    round_timeout_s: float = key(600.0, "Longest wait for a round's replies, in seconds.", above=0)
    node_deadline_s: float = key(120.0, "Longest wait for enough machines, in seconds.", above=0)
    give_up_after: int = key(
        3,
        "Rounds in a row without anything to aggregate after which a run ends with an error.",
        at_least=0,
        zero="never",
    )
    checkpoint: bool = key(
        True, "On real machines, whether the server saves its state after every round; a simulation leaves none."
    )
    out_dir: str = key("", "Where results are written, an absolute path; empty for runs/ where the server runs.")
    run_name: str = key("", "Folder under out-dir; empty for one made of strategy, task and seed.")
    track: str = key(
        "", "Where the run is logged as well: tensorboard, mlflow, wandb, separated by commas; empty for nowhere."
    )
