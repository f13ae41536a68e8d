"""The run configuration: typed, validated, and refused with one clear line before the first round.

Its keys are those of ``[tool.flwr.app.config]`` in pyproject.toml; ``flwr run . -c "mu=2 num-clients=20"`` and
``murmurfl run --set mu=2 --set num-clients=20`` override them. Each key is declared once (:mod:`.run_keys`) and
described nowhere else. A method, task, partition, model or mechanism says itself what it reads beyond the common keys;
a key that none of the chosen ones reads must be left at its default.

Checks of several keys together stand below: those of secure aggregation and those of queries.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any

from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.loss import MOST_SUMMED, NOTHING_ASSUMED, SumAssumption
from ...privacy.errors import ConfigurationError
from ...privacy.queries.mean_of_features import CENTRING_SHARE
from ...privacy.release.policy import MOST_CLIENTS, NO_NOISE, Trust
from ...privacy.release.tables import HELD_OUT, POISSON, PRIVATE, SHUFFLED
from ...privacy.setting import Setting, flat, mu_and_epsilon, not_read, refusal, settings, settings_of, unknown_key
from ...strategies.rounds.participation import ParticipationConfig
from .registry import own_mechanism_options, registry
from .run_keys import PRESETS as PRESETS
from .run_keys import RunKeys, RunSums

_LONGEST_RUN_NAME = 200
"""Bytes; file systems take 255, and files that are being written have longer names for a moment."""


def check_run_name(name: str) -> None:
    """Refuse a run's name that is not simply the name of a folder."""
    simple = name.isprintable() and not set(name) & set("/\\:") and name.strip() == name
    if not simple or name in ("", ".", "..") or len(name.encode("utf-8", "replace")) > _LONGEST_RUN_NAME:
        raise ConfigurationError(
            f"Expected a run's name to be the name of a folder, of 1 to {_LONGEST_RUN_NAME} bytes that can be printed, "
            f"without / \\ or :, got {name[:_LONGEST_RUN_NAME]!r}: --out (or out-dir) says where folders are made.",
            kind="malformed",
            setting="run-name",
        )


USUAL_MU = 4.0
"""Mu of a configuration that sets neither mu nor epsilon; the default run sets epsilon."""

TRACKERS = ("tensorboard", "mlflow", "wandb")


@settings
class RunConfig(RunKeys):
    """Everything a run is started with: one field a run-config key, with underscores for hyphens.

    What each key means, its range and who reads it stand in its declaration (:mod:`.run_keys`); ``murmurfl keys``
    and the documentation's page on the keys show the same.

    Raises
    ------
    ConfigurationError
        If a value is out of its range, a name unknown, a key set that none of the chosen method, task, partition, model
        and mechanism reads, or they do not go together.

    Notes
    -----
    ``epsilon`` stands for a mu: it is worked out at ``delta`` and put in the place of ``mu``; the field is then zero.
    With ``batch_selection = "poisson"`` it is what secret batches leave of a larger mu, which depends on rounds and
    batches; it stays beside the mu of the same epsilon until a run is worked out on its data.
    ``clients_per_round = 0`` becomes ``num_clients``. A
    method that has a sister for a trusted server, such as ``mu2``, becomes that one with ``trust = trusted-server``.

    Examples
    --------
    >>> config = RunConfig(num_clients=20, epsilon=2.0, num_rounds=10)
    >>> config.clients_per_round, round(config.mu, 3)
    (10, 0.502)
    """

    def __post_init__(self) -> None:
        self._settle_mu()
        self._settle_trust()
        if not self.clients_per_round:
            object.__setattr__(self, "clients_per_round", self.num_clients)
        if self.clients_per_round > self.num_clients:
            raise refusal(
                "clients_per_round",
                f"at most num-clients = {self.num_clients}",
                self.clients_per_round,
                kind="out-of-range",
            )
        if self.asked_per_round > self.num_clients:
            most = f"{self.num_clients} clients over clients-per-round = {self.clients_per_round}"
            raise refusal("over_selection", f"at most {most}", self.over_selection, kind="out-of-range")
        if self.min_available_nodes > self.num_clients:
            raise refusal(
                "min_available_nodes",
                f"at most num-clients = {self.num_clients}",
                self.min_available_nodes,
                kind="out-of-range",
            )
        if self.passes > 1 and self.max_participations:
            raise refusal("max_participations", "0 with passes > 1: they settle it", self.max_participations)
        if any(name not in TRACKERS for name in self.trackers):
            raise refusal(
                "track", f"names among {', '.join(TRACKERS)}, separated by commas", self.track, kind="unknown-name"
            )
        if self.run_name:
            check_run_name(self.run_name)
        chosen = {one.name: registry(one.name)[one.of(self)] for one in run_keys().values() if one.names}
        refuse_unread(self, frozenset().union(*(thing.keys for thing in chosen.values())))
        if self.secure:
            check_cohorts(self)
            check_lost_replies(self.clients_per_round, self.sums.min_cohort, self.lost_replies)
            check_end_of_rounds(self.answers_needed, self.sums.min_cohort)
        for thing in chosen.values():
            thing.check(self)
        check_sides(self)

    def _settle_mu(self) -> None:
        if not self.epsilon and (self.mu or not self.poisson_batches):
            object.__setattr__(self, "mu", self.mu or USUAL_MU)
            return
        if not self.epsilon:
            object.__setattr__(self, "epsilon", gdp_epsilon(USUAL_MU, self.delta))
        mu = gdp_mu(self.epsilon, self.delta)
        if self.poisson_batches:  # rounds and batches settle it (Method.calibrated)
            if self.mu and not math.isclose(self.mu, mu, rel_tol=1e-9):
                raise mu_and_epsilon(self.mu, self.epsilon)
            object.__setattr__(self, "mu", mu)
            return
        if self.mu:
            raise mu_and_epsilon(self.mu, self.epsilon)
        object.__setattr__(self, "mu", mu)
        object.__setattr__(self, "epsilon", 0.0)

    def _settle_trust(self) -> None:
        methods = registry("strategy")
        # A subclass of one's own inherits the sister's name, and is another method.
        sister = methods[self.strategy].with_trusted_server if self.strategy in methods else ""
        if sister and self.trust.kind == "trusted-server":
            object.__setattr__(self, "strategy", sister)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in :attr:`track`, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.track.split(",") if name.strip()))

    @property
    def shuffled_batches(self) -> bool:
        """Whether each sample draws the release it is in, and only its client knows which."""
        return self.batch_selection == SHUFFLED

    @property
    def poisson_batches(self) -> bool:
        """Whether each sample is in each round with a probability, and only its client and the server know."""
        return self.batch_selection == POISSON

    @property
    def secret_batches(self) -> bool:
        """Whether epsilon counts on nobody's knowing which samples a release is made from."""
        return self.shuffled_batches or self.poisson_batches

    @property
    def label(self) -> str:
        """A name for this run's folder: its strategy, task and seed, in characters that any folder may have."""
        return re.sub(r"[^\w.-]+", "-", f"{self.strategy}-{self.task}-seed{self.seed}")

    @property
    def private(self) -> bool:
        """Whether anything is private: nothing is without noise."""
        return self.mechanism.kind != NO_NOISE

    @property
    def schedule(self) -> str:
        """The noise schedule of the cancelling mechanism; empty for the preset's."""
        return getattr(self.mechanism, "schedule", "")

    @property
    def trust_model(self) -> Trust:
        """Trust model (who is trusted, and with what): as set, or the method's own."""
        return self.trust.kind or registry("strategy")[self.strategy].own_trust  # type: ignore[return-value]

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums."""
        return self.trust_model == SECURE

    @cached_property
    def asked_per_round(self) -> int:
        """n: how many clients a round asks, and what a step divides by."""
        return self._participation.asked(max(self.num_clients, math.ceil(self.over_selection * self.clients_per_round)))

    @property
    def answers_needed(self) -> int:
        """The number of answers that end a round."""
        return self._participation.needed(max(self.num_clients, self.asked_per_round))

    @property
    def _participation(self) -> ParticipationConfig:
        return ParticipationConfig(
            clients_per_round=self.clients_per_round, quorum=self.quorum, over_selection=self.over_selection
        )

    @property
    def sums(self) -> SumAssumption:
        """Assumption of mu about every sum; both numbers are 1 where the server sees every release by itself."""
        if not self.secure:
            return NOTHING_ASSUMED
        return sum_assumption(self.clients_per_round, self.summing.min_cohort, self.summing.colluders)

    @property
    def summing(self) -> RunSums:
        """The options of secure aggregation; their defaults under another trust model."""
        return self.trust if isinstance(self.trust, RunSums) else RunSums()

    @property
    def mechanism_options(self) -> dict[str, str | int | float]:
        """The mechanism's options that are set."""
        return {name: value for name, value in self.mechanism.options().items() if name != "schedule"}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return a configuration from hyphenated keys, such as Flower's run configuration."""
        try:
            return _from_items(tuple(values.items()), tuple(map(type, values.values())))
        except TypeError:  # a value that cannot be hashed is of no type a key has; say which
            return cls._read(values)

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> RunConfig:
        known, given = run_keys(), flat(values, run_keys())
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise unknown_key(unknown[0], known)
        return cls(**{known[name].attribute: known[name].read(value) for name, value in given.items()})

    def to_mapping(self) -> dict[str, bool | int | float | str]:
        """Return the configuration with hyphenated keys."""
        mapping = {name: one.of(self) for name, one in run_keys().items()}
        return {**mapping, "mu": 0.0} if self.epsilon else mapping  # which follows from it

    def shown(self) -> dict[str, bool | int | float | str]:
        """Return the configuration with hyphenated keys, a permit by its digest: whoever has a permit may use it."""
        digest = hashlib.sha256(self.permit.encode()).hexdigest()
        return {**self.to_mapping(), "permit": f"sha256:{digest}" if self.permit else ""}


@cache
def run_keys() -> Mapping[str, Setting]:
    """Every run-config key by its hyphenated name."""
    return settings_of(RunConfig)


@lru_cache(maxsize=1024)
def _from_items(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> RunConfig:  # noqa: ARG001 - 1 == True
    return RunConfig._read(dict(items))  # every message of a simulation reads the same configuration


def refuse_unread(config: RunConfig, reads: frozenset[str]) -> None:
    """Refuse a key that is set although nothing that the configuration names reads it.

    ``reads`` are the keys that methods and other things read; of options of a choice, the kind that is chosen knows.
    """
    values = config.to_mapping()
    for one in run_keys().values():
        if values[one.name] != one.default and not _is_read(one, values, reads):
            by = one.read_by or one.table
            raise not_read(one, values[one.name], by, str(values[by]), readers_of(one))


def without_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by hyphenated key, without those that no thing they name reads.

    For settings that were made for another method, task, partition or model than those that are now named beside them,
    such as a paper's when somebody changes its task.
    """
    known = run_keys()
    named = (registry(one.name)[str(values.get(one.name, one.default))] for one in known.values() if one.names)
    reads = frozenset[str]().union(*(thing.keys for thing in named))
    return {name: value for name, value in values.items() if name not in known or _is_read(known[name], values, reads)}


def _is_read(one: Setting, values: Mapping[str, Any], reads: frozenset[str]) -> bool:
    """Return True if a key is read by the kind of its choice, or by other things, which read the keys ``reads``."""
    if one.choice:
        kind = str(values.get(one.table, run_keys()[one.table].default))
        if not one.read_with(kind) and not (one.table == "mechanism" and one.attribute in own_mechanism_options(kind)):
            return False
    return not one.read_by or one.name in reads


def readers_of(one: Setting) -> list[str]:
    """Return the built-in names of those that read a key; empty for one that every run reads."""
    return registry(one.read_by).reading(one.name) if one.read_by else list(one.kinds)


AUTO = "auto"
"""Strategy that stands for what the planner chooses where a run is worked out."""
SECURE: Trust = "secure-aggregation"
_ROUNDING = 1e-9


def helper_names(helpers: int) -> tuple[str, ...]:
    """Return the names of a simulation's helpers."""
    return tuple(f"helper-{number}" for number in range(helpers))


def sum_assumption(clients_per_round: int, floor: int = 0, colluders: int = -1) -> SumAssumption:
    """Return what mu assumes of every sum of a run.

    A sum has ``floor`` releases at least; 0 stands for four fifths of the clients asked, rounded up. Those of clients
    that do not work with the server are honest; negative ``colluders`` leave half of the clients asked honest. It is
    an assumption, which nobody can check: mu holds if it does.
    """
    fewest = floor or -(-4 * clients_per_round // 5)
    return SumAssumption(fewest - colluders if colluders >= 0 else max(clients_per_round // 2, 1), fewest)


def check_cohorts(config: RunConfig) -> None:
    """Refuse numbers of clients with which no sum could be opened, or in which nobody would be honest.

    A sum has at most the clients that a round asks: ``over_selection`` times ``clients_per_round``.
    """
    num_clients, clients_per_round, asked = config.num_clients, config.clients_per_round, config.asked_per_round
    if num_clients > MOST_CLIENTS:
        raise refusal(
            "num_clients", f"at most {MOST_CLIENTS} with trust = {SECURE!r}", num_clients, kind="out-of-range"
        )
    if asked > MOST_SUMMED:
        expected = (
            f"at most {MOST_SUMMED} clients a round, with over-selection, for trust = {SECURE!r}, or sums could wrap"
        )
        raise refusal("clients_per_round", expected, asked, kind="out-of-range")
    if config.summing.min_cohort > clients_per_round:
        expected = f"at most clients-per-round = {clients_per_round}"
        raise refusal("trust.min-cohort", expected, config.summing.min_cohort, kind="out-of-range")
    colluders, floor = config.summing.colluders, config.sums.min_cohort
    if colluders >= floor:
        raise refusal(
            "trust.colluders", f"below the {floor} releases of the smallest sum: one of them is honest", colluders
        )
    half = sum_assumption(clients_per_round).min_honest
    if colluders < 0 and floor < half:
        raise ConfigurationError(
            f"Expected trust.colluders beside trust.min-cohort = {floor}, which is below the {half} honest clients "
            f"that are assumed where it is left out: set trust.colluders to a number below {floor}, or "
            f"trust.min-cohort to {half} at least.",
            kind="conflict",
            setting="trust.colluders",
        )


def check_lost_replies(clients_per_round: int, floor: int, lost_replies: float) -> None:
    """Refuse so many lost replies that the usual round would have too few releases for a sum."""
    expected = clients_per_round * (1 - lost_replies)
    if expected >= floor - _ROUNDING:
        return
    most = math.floor(1000 * (clients_per_round - floor) / clients_per_round) / 1000
    raise ConfigurationError(
        f"Expected replies for a sum of trust.min-cohort = {floor}, got {expected:.4g} of {clients_per_round} a round "
        f"with lost-replies = {lost_replies:g}: most rounds would stay closed. Here lost-replies may be at most "
        f"{most:g}, or trust.min-cohort at most {math.floor(expected + _ROUNDING)}.",
        kind="conflict",
        setting="trust.min-cohort",
        got=expected,
    )


def check_end_of_rounds(needed: int, floor: int) -> None:
    """Refuse rounds that wait for fewer clients than a sum must have."""
    if needed < floor:
        raise ConfigurationError(
            f"Expected rounds that wait for at least trust.min-cohort = {floor} clients, got quorum x "
            f"clients-per-round = {needed}: raise quorum, or lower trust.min-cohort.",
            kind="out-of-range",
            setting="quorum",
        )


def nothing_gained(min_honest: int) -> str:
    """Return the warning if ``min_honest`` is 1, else an empty string."""
    if min_honest > 1:
        return ""
    return (
        "Secure aggregation saves no noise here: of each sum one client only is taken to be honest (h = "
        "trust.min-cohort - trust.colluders = 1), so mu is what each client's own noise gives without it. Lower "
        "trust.colluders, raise trust.min-cohort, or leave trust out."
    )


def refused_trust(trust: str, strategy: str, able: Iterable[str], others: Iterable[str]) -> ConfigurationError:
    """Return the refusal of a trust model.

    What the method serves instead, and which built-in methods serve this one.
    """
    served = " or ".join(repr(one) if one else "left out" for one in able)
    return ConfigurationError(
        f"Expected trust to be {served} with strategy = {strategy!r}, got {trust!r}; that is served by "
        f"{', '.join(others)}.",
        kind="conflict",
        setting="trust",
        got=trust,
    )


def is_centred(config: RunConfig) -> bool:
    """Return True if clients release the mean of their features first: as set, or else as the features want it."""
    if config.centring:
        return config.centring == PRIVATE
    if config.samples_per_owner:  # the mean counts samples, not owners
        return False
    return centred_by_default(config.strategy, config.features, secret_batches=config.secret_batches)


def centred_by_default(strategy: str, features: str, *, secret_batches: bool) -> bool:
    """Return True if features want centring where nothing is set, and the method can have it."""
    wanted = registry("features")[features].centring == PRIVATE
    return wanted and registry("strategy")[strategy].centres and not secret_batches


def is_additive(config: RunConfig) -> bool:
    """Return True if clients release counts for the knots of their columns first, and train on additive features."""
    return registry("model")[config.model].takes_knots


def is_evaluated(config: RunConfig) -> bool:
    """Return True if clients say privately, after the training, how good the model is."""
    return config.private_evaluation > 0


def check_sides(config: RunConfig) -> None:
    """Refuse a query that the method cannot have, and settings of a query that is not asked."""
    _check_centring(config)
    if is_additive(config):
        _check_additive(config)
    if is_evaluated(config):
        _check_evaluation(config)
    elif config.held_out != HELD_OUT:
        raise refusal("evaluation.held-out", f"{HELD_OUT} without evaluation.share", config.held_out)
    elif config.score_bins:
        raise refusal("evaluation.score-bins", "0 without evaluation.share", config.score_bins)


def _check_centring(config: RunConfig) -> None:
    if config.centring == PRIVATE:
        expected = ""
        if not registry("strategy")[config.strategy].centres:
            able = ", ".join(name for name, one in registry("strategy").items() if one.centres)
            expected = (
                f"strategy = {config.strategy!r}, which takes samples as they come or has public ones beside them "
                f"(strategies with centring: {able})"
            )
        elif config.secret_batches:
            expected = f"batch-selection = {config.batch_selection!r}: the mean shows every sample"
        elif config.samples_per_owner:
            expected = "samples-per-owner: the mean is one of samples"
        if expected:
            raise refusal("centring", f"'none' or empty with {expected}", config.centring)
    if config.centring_share != CENTRING_SHARE and not is_centred(config):
        raise refusal("centring.share", f"{CENTRING_SHARE} without centring = {PRIVATE!r}", config.centring_share)


def _check_additive(config: RunConfig) -> None:
    expected = ""
    if not registry("strategy")[config.strategy].centres:
        able = ", ".join(name for name, one in registry("strategy").items() if one.centres)
        expected = f"another one with strategy = {config.strategy!r} (strategies with additive models: {able})"
    elif config.secret_batches:
        expected = f"another one with batch-selection = {config.batch_selection!r}: the knots show every sample"
    elif is_centred(config):
        expected = "another one with centring: additive features have a public mean"
    if expected:
        raise refusal("model", expected, config.model)


def _check_evaluation(config: RunConfig) -> None:
    before = config.centring_share if is_centred(config) else config.knots_share if is_additive(config) else 0.0
    expected = ""
    if not registry("strategy")[config.strategy].evaluates:
        able = ", ".join(name for name, one in registry("strategy").items() if one.evaluates)
        expected = (
            f"0 with strategy = {config.strategy!r}, whose epochs go through all samples (strategies with a private "
            f"evaluation: {able})"
        )
    elif config.secret_batches:
        expected = f"0 with batch-selection = {config.batch_selection!r}: the evaluation shows every sample"
    elif before + config.private_evaluation >= 1:
        first = "model.knots-share" if is_additive(config) else "centring.share"
        expected = f"below {1 - before:g}, what {first} leaves of mu^2"
    if expected:
        raise refusal("evaluation.share", expected, config.private_evaluation)


def check_classes(config: RunConfig, num_classes: int) -> None:
    """Refuse an evaluation of data without classes, and scores of more than two."""
    if is_evaluated(config) and num_classes < 2:
        expected = f"0 for task = {config.task!r}, which has no classes"
        raise refusal("evaluation.share", expected, config.private_evaluation)
    if config.score_bins and num_classes != 2:
        raise refusal("evaluation.score-bins", f"0 for {num_classes} classes: an AUC is of two", config.score_bins)
