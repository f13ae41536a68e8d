"""The run configuration: typed, validated, and refused with one clear line before the first round.

The keys are those of ``[tool.flwr.app.config]`` in pyproject.toml; ``flwr run . -c "mu=2 num-clients=20"`` and
``murmurfl run --set mu=2 --set num-clients=20`` override them. A zero (or an empty text) where the table says "preset"
or "automatic" leaves the value to the preset or to the data.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from ..privacy import (
    ACCOUNTINGS,
    CLIP_UNITS,
    MECHANISMS,
    NO_NOISE,
    NOISE_QUALITIES,
    ORDERS,
    RELEASE_RULES,
    SCHEDULES,
    ConfigurationError,
)
from ..strategies import MOMENTUM_MECHANISMS, REGULARIZERS, SAMPLINGS, VARIANTS
from .registry import registry

STRATEGIES = (
    "mu2",
    "trusted-mu2",
    "delayed-momentum",
    "noisy-sgd",
    "isrl-dp",
    "isrl-dp-accelerated",
    "tree-momentum",
    "reduced-tree-momentum",
    "correlated-momentum",
    "trusted-sgd",
    "online",
    "shuffled",
)
MOMENTUM = ("tree-momentum", "reduced-tree-momentum", "correlated-momentum", "trusted-sgd")
"""Private momentum (tran-cutkosky-2022) and DP-SGD beside it: a trusted server, all machines in every round."""
TRUSTED = ("trusted-mu2", *MOMENTUM)
"""The server adds the noise."""
BASELINES = ("noisy-sgd", "isrl-dp", "isrl-dp-accelerated")
"""Fresh noise in every release, each of which stands alone."""
PRESETS = ("practical", "paper")
PUBLIC_TASKS = {
    "mnist-69": "mean",
    "cifar10-ridge": "ridge",
    "crime": "ridge",
    "compas": "logistic",
    "credit-card": "logistic",
}
"""Tasks that come with public samples beside the private ones, and the model of each (jiang-2026)."""
TASKS = ("digits", "mnist", "mnist-parity", "synthetic", "synthetic-logistic", *PUBLIC_TASKS)
FEATURES = ("pixels", "oriented-gradients", "means-2x2", "means-4x4")
MODELS = ("softmax", "mlp", "cnn", "logistic", "nonconvex-logistic", "ridge", "mean")
PARTITIONS = ("iid", "dirichlet", "half-by-label", "own")
TRACKERS = ("tensorboard", "mlflow", "wandb")

_CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "preset": PRESETS,
    "mechanism": ("", NO_NOISE, *MECHANISMS),
    "clip_unit": ("", *CLIP_UNITS),
    "schedule": ("", *SCHEDULES),
    "sampling": ("", *SAMPLINGS),
    "noise_quality": NOISE_QUALITIES,
    "release_rule": RELEASE_RULES,
    "variant": VARIANTS,
    "order": ORDERS,
    "regularizer": ("", *REGULARIZERS),
    "accounting": ACCOUNTINGS,
}

_LONGEST_RUN_NAME = 200
"""Bytes; file systems take 255, and files that are being written have longer names for a moment."""

_OPTION_OF = {"decoder": "tree", "workload": "optimal", "bands": "banded", "buffers": "blt"}


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is started with.

    Parameters
    ----------
    strategy, preset, task, features, model, partition : str
        What runs on what; see the tuples of this module.
    dirichlet_alpha : float
        Concentration of the label-skewed ``dirichlet`` partition; small is more skewed.
    data_root : str
        Folder with the data sets; empty for the environment variable MURMURFL_DATA. Digits need none.
    download : bool
        Whether a missing data set may be downloaded into the data root.
    num_clients, clients_per_round : int
        M and m.
    num_rounds : int
        T; 0 for one pass over the data. More than the machines' samples and caps last for are refused.
    batch_size : int
        b, samples a release; with ``online`` tau, one local step for each.
    passes : int
        How often every machine goes through its samples; the noise covers that they return.
    max_participations : int
        K, the cap; 0 for as many as rounds and samples allow.
    run_dry : bool
        Whether rounds may go on when machines have used up their samples or reached their cap: these refuse then.
    mu, delta : float
        The privacy wanted, for one sample replaced: mu-GDP, shown as epsilon at delta.
    clip_norm, learning_rate, diameter : float
        S, eta and D; 0 for the preset's.
    global_learning_rate : float
        eta_g of ``online``: the server's step is eta eta_g tau.
    alpha : float
        Weight of a new gradient in the strategies of private momentum.
    mechanism : str
        How a machine's noise is correlated over its releases; empty for the strategy's own: ``cancelling``, or
        ``independent`` for SGD. ``none`` adds no noise anywhere, to see what noise costs: nothing is private then,
        and mu only stands for the largest there is. For simulations only.
    decoder, workload : str
        Options of the mechanisms ``tree`` and ``optimal``; empty for their defaults.
    bands, buffers : int
        Options of ``banded`` and ``blt``; 0 for their defaults.
    clip_unit : str
        What is clipped: ``sample``, or with ``online`` ``update`` (the default) or ``contractive``.
    feature_bound : float
        R of the ``logistic`` models, a public bound on a sample's norm; 0 for the preset's.
    variant, order : str
        What ``shuffled`` does with public samples, and the order of the private ones in an epoch.
    private_share : float
        p of ``shuffled``: the share of steps on private samples.
    public_samples : int
        Training samples that count as public, for tasks without public samples of their own.
    regularizer, regularizer_strength : str, float
        psi of ``shuffled``, applied once an epoch, and its lambda or radius; empty and 0 for the task's.
    accounting : str
        ``amplified``, refused where it does not hold, or ``composed`` (:mod:`murmurfl.privacy.shuffled`).
    schedule : str
        Noise schedule of the cancelling mechanism; empty for the preset's.
    sampling : str
        How the machines of a round are drawn, ``uniform`` or ``balanced``; empty for the preset's.
    noise_quality : str
        ``exact``, or ``fast`` for long simulations.
    release_rule : str
        ``acknowledged`` (P_k - P_ack) or ``paper``.
    lost_replies : float
        Share of replies lost at random, to see what happens.
    seed : int
        Of partition, sampling, simulated losses and (in simulation) noise.
    synthetic_samples, synthetic_features : int
        Training samples of the synthetic tasks, and values of each.
    synthetic_alpha, synthetic_beta : float
        How far the machines of ``synthetic-logistic`` differ in their rules and in their features.
    validation_samples : int
        Training samples held out and evaluated on in place of the test set, for tuning.
    training_samples : int
        How many training samples are used, the same ones in every run; 0 for all.
    gradient_norm : bool
        Whether every evaluation computes the norm of the gradient of the training loss: a simulation's, it is not
        private.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    round_timeout_s, node_deadline_s : float
        Longest waits, in seconds, for a round's replies and for enough machines.
    give_up_after : int
        Rounds in a row without anything to aggregate after which a run ends with an error; 0 for never.
    checkpoint : bool
        On real machines, whether the server saves its state after every round. A simulation leaves no checkpoint: the
        ledgers of its machines end with it, so that nobody could go on from there.
    out_dir : str
        Where results are written, as an absolute path; empty for ``runs/`` where the server runs.
    run_name : str
        Folder under out_dir (:func:`check_run_name`); empty for one made of strategy, task and seed.
    track : str
        Where the run is logged as well, separated by commas: ``tensorboard``, ``mlflow``, ``wandb``
        (:mod:`murmurfl.app.trackers`); empty for nowhere.
    """

    strategy: str = "mu2"
    preset: str = "practical"
    task: str = "digits"
    features: str = "pixels"
    model: str = "softmax"
    partition: str = "iid"
    dirichlet_alpha: float = 0.5
    data_root: str = ""
    download: bool = False
    num_clients: int = 10
    clients_per_round: int = 10
    num_rounds: int = 0
    batch_size: int = 8
    passes: int = 1
    max_participations: int = 0
    run_dry: bool = False
    mu: float = 4.0
    delta: float = 1e-5
    clip_norm: float = 0.0
    learning_rate: float = 0.0
    diameter: float = 0.0
    global_learning_rate: float = 1.0
    alpha: float = 0.1
    mechanism: str = ""
    decoder: str = ""
    workload: str = ""
    bands: int = 0
    buffers: int = 0
    clip_unit: str = ""
    feature_bound: float = 0.0
    variant: str = "interleaved"
    order: str = "RR"
    private_share: float = 0.5
    public_samples: int = 0
    regularizer: str = ""
    regularizer_strength: float = 0.0
    accounting: str = "amplified"
    schedule: str = ""
    sampling: str = ""
    noise_quality: str = "exact"
    release_rule: str = "acknowledged"
    lost_replies: float = 0.0
    seed: int = 1
    synthetic_samples: int = 6000
    synthetic_features: int = 784
    synthetic_alpha: float = 0.1
    synthetic_beta: float = 0.1
    validation_samples: int = 0
    training_samples: int = 0
    gradient_norm: bool = False
    evaluate_every: int = 1
    round_timeout_s: float = 600.0
    node_deadline_s: float = 120.0
    give_up_after: int = 3
    checkpoint: bool = True
    out_dir: str = ""
    run_name: str = ""
    track: str = ""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise _refuse(name, f"one of {', '.join(repr(value) for value in allowed)}", getattr(self, name))
        for key in ("task", "features", "partition", "model"):
            registry(key)[getattr(self, key)]  # an unknown name is refused
        counts = ("num_clients", "clients_per_round", "batch_size", "passes", "evaluate_every")
        for name in (*counts, "synthetic_samples", "synthetic_features"):
            self._check(name, getattr(self, name) >= 1, "an integer >= 1")
        for name in (
            "num_rounds",
            "max_participations",
            "validation_samples",
            "training_samples",
            "seed",
            "bands",
            "buffers",
            "public_samples",
            "give_up_after",
        ):
            self._check(name, getattr(self, name) >= 0, "an integer >= 0")
        for name in ("mu", "dirichlet_alpha", "global_learning_rate", "round_timeout_s", "node_deadline_s"):
            self._check(name, getattr(self, name) > 0, "a number > 0")
        for name in ("synthetic_alpha", "synthetic_beta"):
            self._check(name, getattr(self, name) >= 0, "a variance >= 0")
        for name in ("clip_norm", "learning_rate", "diameter", "feature_bound", "regularizer_strength"):
            self._check(name, getattr(self, name) >= 0, "a number >= 0 (0: the preset's)")
        self._check("delta", 0 < self.delta < 1, "a number between 0 and 1")
        self._check("lost_replies", 0 <= self.lost_replies < 1, "a share >= 0 and < 1")
        self._check("seed", self.seed < 2**63, "an integer below 2^63")
        self._check(
            "clients_per_round", self.clients_per_round <= self.num_clients, f"at most num-clients = {self.num_clients}"
        )
        for key in ("task", "features", "partition", "model"):
            registry(key)[getattr(self, key)].check(self)
        online = self.strategy == "online"
        units = ("", "update", "contractive") if online else ("", "sample")
        self._check("clip_unit", self.clip_unit in units, f"one of {', '.join(map(repr, units))} with this strategy")
        shuffled = self.strategy == "shuffled"
        self._check("private_share", 0 < self.private_share <= 1, "a share > 0 and <= 1")
        self._check("public_samples", shuffled or not self.public_samples, "0 unless strategy = 'shuffled'")
        if registry("task")[self.task].public:
            self._check("strategy", shuffled, "'shuffled' for this task")
            self._check("public_samples", not self.public_samples, "0 for a task with public samples of its own")
        if shuffled:
            self._check("mechanism", self.mechanism in ("", NO_NOISE), f"left to this strategy, or {NO_NOISE!r}")
        self._check("global_learning_rate", online or self.global_learning_rate == 1.0, "1 unless strategy = 'online'")
        if self.strategy == "correlated-momentum":
            allowed = ("", NO_NOISE, *MOMENTUM_MECHANISMS)
            self._check("mechanism", self.mechanism in allowed, f"one of {', '.join(map(repr, allowed))}")
        elif self.strategy in (*TRUSTED, *BASELINES):
            allowed = ("", NO_NOISE) if self.strategy in TRUSTED else ("", NO_NOISE, "independent")
            self._check("mechanism", self.mechanism in allowed, f"left to this strategy, or {NO_NOISE!r}")
        for name, mechanism in _OPTION_OF.items():
            self._check(
                name, not getattr(self, name) or self.mechanism == mechanism, f"unset unless mechanism = {mechanism!r}"
            )
        unknown = [name for name in self.trackers if name not in TRACKERS]
        self._check("track", not unknown, f"names among {', '.join(TRACKERS)}, separated by commas")
        self._check("alpha", 0 < self.alpha <= 1, "a weight > 0 and <= 1")
        if self.run_name:
            check_run_name(self.run_name)
        if self.strategy == "reduced-tree-momentum":
            self._check(
                "lost_replies", not self.lost_replies, "0 with this strategy: it ends with the first lost reply"
            )
            self._check("run_dry", not self.run_dry, "false with this strategy: it ends with the first refusal")
        if self.strategy in MOMENTUM:
            everybody = self.clients_per_round == self.num_clients
            self._check("clients_per_round", everybody, f"num-clients = {self.num_clients} with this strategy")
        if self.strategy == "delayed-momentum":
            self._check("release_rule", self.release_rule == "acknowledged", "'acknowledged' with this strategy")
        if self.passes > 1:
            self._check("max_participations", self.max_participations == 0, "0 with passes > 1: they settle it")
            self._check("strategy", self.strategy != "trusted-mu2", "another one with passes > 1")

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in :attr:`track`, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.track.split(",") if name.strip()))

    @property
    def private(self) -> bool:
        """Whether anything is: not without noise."""
        return self.mechanism != NO_NOISE

    @property
    def mechanism_options(self) -> dict[str, str | int]:
        """The mechanism's options that are set."""
        return {name: getattr(self, name) for name in _OPTION_OF if getattr(self, name)}

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
        known = {f.name.replace("_", "-"): f for f in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise _unknown(unknown[0], known)
        return cls(**{known[key].name: typed_value(key, value, str(known[key].type)) for key, value in values.items()})

    def to_mapping(self) -> dict[str, bool | int | float | str]:
        """The configuration with hyphenated keys."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise _refuse(name, expected, getattr(self, name))


@lru_cache(maxsize=16)
def _from_items(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> RunConfig:  # noqa: ARG001 - 1 == True
    return RunConfig._read(dict(items))  # every message of a simulation reads the same configuration


def check_run_name(name: str) -> None:
    """Refuse a run's name that is not simply the name of a folder.

    Parameters
    ----------
    name : str

    Raises
    ------
    ConfigurationError
        If it is empty, too long, ``.`` or ``..``, begins or ends with a space, or has a separator or a character in it
        that cannot be printed: the files of a run stay in a folder of its own, below the one that was chosen for runs.
    """
    simple = name.isprintable() and not set(name) & set("/\\:") and name.strip() == name
    if not simple or name in ("", ".", "..") or len(name.encode("utf-8", "replace")) > _LONGEST_RUN_NAME:
        raise ConfigurationError(
            f"Expected a run's name to be the name of a folder, of 1 to {_LONGEST_RUN_NAME} bytes that can be printed, "
            f"without / \\ or :, got {name[:_LONGEST_RUN_NAME]!r}: --out (or out-dir) says where folders are made."
        )


def _refuse(name: str, expected: str, got: Any) -> ConfigurationError:
    return ConfigurationError(f"Expected {name.replace('_', '-')} to be {expected}, got {got!r}.")


def _unknown(key: str, known: Iterable[str]) -> ConfigurationError:
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
    return ConfigurationError(f"Expected a known run-config key, got {key!r}; {meant}")


def typed_value(key: str, value: Any, kind: str) -> Any:
    """A value as its key's type, or a refusal."""
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    names = {"bool": "true or false", "str": "a text", "int": "an integer", "float": "a finite number"}
    raise _refuse(key, names[kind], value)


def parse_assignments(assignments: list[str]) -> dict[str, bool | int | float | str]:
    """``key=value`` texts as a mapping, each value read as its key's type.

    Raises
    ------
    ConfigurationError
        If a text has no ``=``, the key is unknown or the value does not read as its type.
    """
    kinds = {f.name.replace("_", "-"): str(f.type) for f in fields(RunConfig)}
    values: dict[str, bool | int | float | str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key, text = key.strip(), text.strip()
        if not equals:
            raise ConfigurationError(f"Expected key=value, got {assignment!r}.")
        if key not in kinds:
            raise _unknown(key, kinds)
        values[key] = _parsed(key, text, kinds[key])
    return values


def _parsed(key: str, text: str, kind: str) -> bool | int | float | str:
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        pass
    return typed_value(key, text, kind)
