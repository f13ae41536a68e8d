"""The run configuration: typed, validated, and refused with one clear line before the first round.

Its keys are those of ``[tool.flwr.app.config]`` in pyproject.toml; ``flwr run . -c "mu=2 num-clients=20"`` and
``murmurfl run --set mu=2 --set num-clients=20`` override them. Each key is declared here once (:mod:`.keys`) and
described nowhere else. A method, task, partition, model or mechanism says itself what it reads beyond the common keys;
a key that none of the chosen ones reads must be left at its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

from ..privacy import (
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
    ConfigurationError,
    Trust,
    gdp_mu,
)
from ..privacy.roster import MOST_HELPERS
from ..privacy.row_bound import CLIPPINGS
from ..strategies import AVERAGES, REGULARIZERS, SAMPLINGS, VARIANTS
from .centring import CENTRINGS, check_centring
from .keys import Key, key, keys_of, mu_and_epsilon, refusal, unknown_key
from .mechanisms import mechanism_options_of
from .registry import registry
from .run_names import check_run_name
from .trust import SECURE, check_cohorts, check_lost_replies, cohort_floor, honest_machines, keys_of_trust

PRESETS = ("practical", "paper")
TRACKERS = ("tensorboard", "mlflow", "wandb")

_PRESETS = "the preset's"


def _mechanisms() -> tuple[str, ...]:
    return ("", NO_NOISE, *MECHANISMS)


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is started with: one field a run-config key, with underscores for hyphens.

    What each key means, its range and who reads it stand in its declaration below; ``murmurfl keys`` and the
    documentation's page on the keys show the same.

    Raises
    ------
    ConfigurationError
        If a value is out of its range, a name unknown, a key set that none of the chosen method, task, partition, model
        and mechanism reads, or they do not go together.

    Notes
    -----
    ``epsilon`` stands for a mu: it is worked out at ``delta`` and put in the place of ``mu``; the field is then zero. A
    method that has a sister for a trusted server, such as ``mu2``, becomes that one with ``trust = trusted-server``.
    """

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
    model: str = key("softmax", "What is trained.", names=True)
    partition: str = key("iid", "How samples are split among the machines.", names=True)
    dirichlet_alpha: float = key(
        0.5, "Concentration of the label-skewed partition; small is more skewed.", above=0, read_by="partition"
    )
    data_root: str = key("", "Folder with the data sets; empty for the environment variable MURMURFL_DATA.")
    download: bool = key(False, "Whether a missing data set may be downloaded into the data root.")
    num_clients: int = key(10, "M, machines in all.", at_least=1)
    clients_per_round: int = key(10, "m, machines asked in a round.", at_least=1)
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
    feature_bound: float = key(
        0.0, "R, a public bound on a sample's norm.", at_least=0, zero="the task's", read_by="model"
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

    def __post_init__(self) -> None:
        for one in run_keys().values():
            one.check(getattr(self, one.attribute))
        self._settle_mu()
        self._settle_trust()
        if self.clients_per_round > self.num_clients:
            raise refusal("clients_per_round", f"at most num-clients = {self.num_clients}", self.clients_per_round)
        if self.passes > 1 and self.max_participations:
            raise refusal("max_participations", "0 with passes > 1: they settle it", self.max_participations)
        if any(name not in TRACKERS for name in self.trackers):
            raise refusal("track", f"names among {', '.join(TRACKERS)}, separated by commas", self.track)
        if self.run_name:
            check_run_name(self.run_name)
        chosen = {
            one.name: registry(one.name)[getattr(self, one.attribute)] for one in run_keys().values() if one.names
        }
        self._check_read(frozenset().union(*(thing.keys for thing in chosen.values())))
        if self.trust == SECURE:
            check_cohorts(self.num_clients, self.clients_per_round, self.min_cohort, self.colluders)
            check_lost_replies(self.clients_per_round, self.cohort_floor, self.lost_replies)
        for thing in chosen.values():
            thing.check(self)
        check_centring(self)

    def _settle_mu(self) -> None:
        if not self.epsilon:
            return
        if self.mu != run_keys()["mu"].default:
            raise mu_and_epsilon(self.mu, self.epsilon)
        object.__setattr__(self, "mu", gdp_mu(self.epsilon, self.delta))
        object.__setattr__(self, "epsilon", 0.0)

    def _settle_trust(self) -> None:
        methods = registry("strategy")
        # A subclass of one's own inherits the sister's name, and is another method.
        sister = methods[self.strategy].with_trusted_server if self.strategy in methods else ""
        if sister and self.trust == "trusted-server":
            object.__setattr__(self, "strategy", sister)

    def _check_read(self, reads: frozenset[str]) -> None:
        """Refuse keys that are set and that nothing that was chosen reads."""
        for one in run_keys().values():
            value = getattr(self, one.attribute)
            if not one.read_by or value == one.default:
                continue
            chosen = getattr(self, one.read_by)
            own = {"mechanism": mechanism_options_of(self.mechanism), "trust": keys_of_trust(self.trust)}
            if one.name not in own.get(one.read_by, reads):
                readers = readers_of(one)
                by = f"; it is read by {one.read_by} = {', '.join(readers)}" if readers else ""
                raise ConfigurationError(
                    f"Expected {one.name} to be left at {one.default!r} with {one.read_by} = {chosen!r}, which does "
                    f"not read it, got {value!r}{by}."
                )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in :attr:`track`, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.track.split(",") if name.strip()))

    @property
    def label(self) -> str:
        """A name for this run's folder: its strategy, task and seed, in characters that any folder may have."""
        return re.sub(r"[^\w.-]+", "-", f"{self.strategy}-{self.task}-seed{self.seed}")

    @property
    def private(self) -> bool:
        """Whether anything is private: nothing is without noise."""
        return self.mechanism != NO_NOISE

    @property
    def trust_model(self) -> Trust:
        """Who is trusted, and with what: as set, or the method's own."""
        return self.trust or registry("strategy")[self.strategy].own_trust  # type: ignore[return-value]

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums."""
        return self.trust_model == SECURE

    @property
    def cohort_floor(self) -> int:
        """n, the fewest releases of a sum; 1 where the server sees every release by itself."""
        return cohort_floor(self.clients_per_round, self.min_cohort) if self.secure else 1

    @property
    def min_honest(self) -> int:
        """h, how many machines of every sum are taken to be honest; 1 where the server sees every release by itself."""
        return honest_machines(self.clients_per_round, self.cohort_floor, self.colluders) if self.secure else 1

    @property
    def mechanism_options(self) -> dict[str, str | int | float]:
        """The mechanism's options that are set."""
        names = [one.attribute for one in run_keys().values() if one.read_by == "mechanism"]
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """A configuration from hyphenated keys, such as Flower's run configuration.

        Raises
        ------
        ConfigurationError
            One line that names the key, what was expected and what came.
        """
        try:
            return _from_items(tuple(values.items()), tuple(map(type, values.values())))
        except TypeError:  # a value that cannot be hashed is of no type a key has; say which
            return cls._read(values)

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> RunConfig:
        known = run_keys()
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise unknown_key(unknown[0], known)
        return cls(**{known[name].attribute: known[name].read(value) for name, value in values.items()})  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, bool | int | float | str]:
        """The configuration with hyphenated keys."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}


@cache
def run_keys() -> Mapping[str, Key]:
    """Every run-config key by its hyphenated name."""
    return keys_of(RunConfig)


def readers_of(one: Key) -> list[str]:
    """The built-in names of those that read a key; empty for one that every run reads."""
    if one.read_by == "mechanism":
        return [name for name in MECHANISMS if one.name in mechanism_options_of(name)]
    if one.read_by == "trust":
        return [name for name in TRUST_MODELS if one.name in keys_of_trust(name)]
    return registry(one.read_by).reading(one.name) if one.read_by else []


@lru_cache(maxsize=16)
def _from_items(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> RunConfig:  # noqa: ARG001 - 1 == True
    return RunConfig._read(dict(items))  # every message of a simulation reads the same configuration
