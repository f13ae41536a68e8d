"""The options of every strategy: their types, their checks, and refusals of Flower's own that take none of them.

Strategies list all parameters in their constructors, and hand those that all of them have on as one
:class:`RoundOptions`, where they are checked and described. A permit is signed by the session's owner away from the
server (:mod:`murmurfl.privacy.permits`), which shows it with every message; whether it fits is checked here before
anybody is asked.
"""

from __future__ import annotations

import difflib
import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.accounting.gdp import check_count, check_positive
from ...privacy.errors import ConfigurationError
from ...privacy.permits import read_permit, shown_time
from ...privacy.queries import QUERIES
from ..callbacks.callback import Callback, check_callbacks
from ..sums.secure_aggregation import SecureAggregation
from .participation import ParticipationConfig
from .replies import LARGEST_VALUE


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundOptions(ParticipationConfig):
    """Options that every strategy takes, checked; None for those that were left out.

    Parameters
    ----------
    num_clients : int, optional
        M, the clients of the training; default all that are connected when it begins. Later ones take no part.
    clients_per_round : int, optional
        m, clients asked in a round, without replacement; default all.
    fraction_train : float, optional
        Share of the clients that a round asks, in place of ``clients_per_round``, as in FedAvg.
    min_train_nodes : int, optional
        Fewest clients that a round asks with ``fraction_train``, as in FedAvg; default 2.
    min_available_nodes : int, optional
        The fewest connected clients with which a round begins once ``node_deadline_s`` has passed: a client
        that is off ends no training. Default half of ``clients_per_round``, rounded up, or the quorum if that
        is less. Without ``num_clients`` also, as in FedAvg, the fewest that the training begins with (default
        2).
    quorum : float
        Share of ``clients_per_round`` whose answers end a round; 1, the default, waits for all, at most for the
        timeout of :meth:`~murmurfl.strategies.ReleaseStrategy.start`. A client is not asked again before it has
        answered, and a late answer counts where it can
        (:attr:`~murmurfl.strategies.ReleaseStrategy.late_answers`). Steps divide by ``clients_per_round``
        however many answer, so that fewer answers are a smaller step with less noise, and no client's guarantee
        changes.
    over_selection : float
        A round asks this many times ``clients_per_round`` clients, >= 1. Steps divide by as many.
    excluded : collection of str
        Names of clients that the operator has taken out: they are not asked, and what they still send is not
        looked at. M, m and what helpers have signed stay. A resumed training may exclude others.
    seed : int, optional
        Seed of the sampler; default from the operating system.
    sampling : {"uniform", "balanced"}
        How a round's clients are drawn (:func:`~murmurfl.strategies.rounds.sampling.sample_clients`).
    session : str, optional
        Name of the training, letters and digits; default random. For every new session a client opens a new
        private stream and reserves its whole budget share.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds. A training begins with all M, and goes on
        without those that are missing; it waits for each of them once, and again after they have answered.
    checkpoint : Path or str, optional
        Written after every round; a training whose file exists is resumed.
    largest_value : float
        Largest magnitude in an honest release (:attr:`murmurfl.privacy.NoisePlan.largest_value` of a public
        policy); a reply beyond it is malformed. The default only keeps sums finite: one broken client can spoil
        the model.
    evaluate_every : int
        Rounds between central evaluations of the published model; the last round is always evaluated.
    allow_exhaustion : bool
        Whether clients may reach their cap, or the end of their samples, before the last round and refuse from
        then on. By default :meth:`~murmurfl.strategies.ReleaseStrategy.start` refuses a training that asks a
        client for more releases than it can make.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums. A round whose sum stays closed says why in its
        report; nothing of it is acknowledged, and clients carry over what they released.
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that every request brings to clients that are configured for these queries, by
        :attr:`murmurfl.privacy.Query.gives`: ``{"centre": centre}`` of :class:`~murmurfl.strategies.MeanOfFeatures`.
    permit : str, optional
        Permit of the session's owner (``murmurfl owner permit``), sent with every message to clients that
        require one. Without ``session`` the permit's first session is used. A resumed training may have a
        renewed permit.
    schema : str, optional
        Digest of the schema of records (``murmurfl schema FILE --digest``); clients that state another are not
        asked. Default any, with a warning where they differ.

    Examples
    --------
    >>> RoundOptions(num_clients=20, clients_per_round=10, seed=1).clients_per_round
    10
    """

    session: str | None = None
    node_deadline_s: float = 120.0
    checkpoint: Path | str | None = None
    largest_value: float = LARGEST_VALUE
    evaluate_every: int = 1
    allow_exhaustion: bool = False
    secure_aggregation: SecureAggregation | None = None
    public_inputs: Mapping[str, NDArray[np.floating]] | None = None
    permit: str | None = None
    schema: str | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in fields(self):
            if one.type in ("float", float):  # Python's own, which JSON has, for whatever else is a number
                object.__setattr__(self, one.name, float(getattr(self, one.name)))
        check_count("evaluate_every", self.evaluate_every)
        session = self.session
        if session is not None and not (session.isalnum() and len(session) <= protocol.LONGEST_SESSION_NAME):
            raise ConfigurationError(
                f"Expected a session of up to 64 letters and digits, got {session!r}.",
                kind="malformed",
                setting="session",
                got=session,
            )
        check_callbacks(self.callbacks)
        if not self.largest_value > 0:
            raise ConfigurationError(
                f"Expected largest_value > 0, got {self.largest_value!r}.",
                kind="out-of-range",
                setting="largest_value",
                got=self.largest_value,
            )


def positive(name: str, value: float) -> float:
    """Return a value as Python's own float, which JSON has; refuse one that is not positive and finite."""
    value = float(value)
    check_positive(name, value)
    return value


def refusing_others(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a strategy's constructor, with its own signature, that says what takes the place of other arguments.

    Those that ask for nothing are left out (:func:`refuse_arguments`).
    """

    @wraps(constructor)
    def made(self: object, *args: object, **given: object) -> None:
        known = _arguments(type(self), constructor)
        refuse_arguments(type(self), {name: value for name, value in given.items() if name not in known})
        constructor(self, *args, **{name: value for name, value in given.items() if name in known})

    return made


def refuse_sums(option: SecureAggregation, refusing: str) -> None:
    """Refuse what is no SecureAggregation, and any where the strategy named ``refusing`` needs more than sums."""
    if not isinstance(option, SecureAggregation):
        raise ConfigurationError(
            f"Expected secure_aggregation to be a SecureAggregation, got {type(option).__name__}: write "
            "secure_aggregation=SecureAggregation(min_cohort=3, helpers=2).",
            kind="wrong-type",
            setting="secure_aggregation",
        )
    if refusing:
        raise ConfigurationError(
            f"Expected no secure_aggregation for {refusing}, got one: it is not made for sums of masked releases. Mu2, "
            "OnlineFedSGD, FullBatch, NoisySGD and CorrelatedFedAvg are.",
            kind="conflict",
            setting="secure_aggregation",
        )


def input_entries(inputs: Mapping[str, NDArray[np.floating]]) -> dict[str, bytes]:
    """Encode public inputs as entries of requests, by name; refuse one that is not a row of finite values."""
    kinds = {kind.gives: kind for kind in QUERIES.values() if kind.gives}
    found = {}
    for name, values in inputs.items():
        if name not in kinds:
            raise ConfigurationError(
                f"Expected public_inputs that a query gives ({', '.join(kinds)}), got {name!r}.",
                kind="unknown-name",
                setting="public_inputs",
                got=name,
            )
        with np.errstate(over="ignore"):
            row = np.asarray(values).astype(kinds[name].gives_type)
        if row.ndim != 1 or not len(row) or not np.isfinite(row).all():
            raise ConfigurationError(
                f"Expected the public input {name!r} to be one row of finite values, got shape {np.shape(values)}.",
                kind="wrong-shape",
                setting="public_inputs",
            )
        found[name] = row.tobytes()
    return found


def session_of(permit: str | None, session: str | None) -> str:
    """Return the session of a training: the given one, its permit's first, or a fresh one; refuse a useless permit."""
    if not permit:
        return secrets.token_hex(16) if session is None else session
    read = read_permit(permit)
    if time.time() >= read.until:
        raise ConfigurationError(
            f"Expected a permit that has not ended, got one until {shown_time(read.until)}. Have the owner sign "
            "another: `murmurfl owner permit KEY --renew PERMIT`, away from this server.",
            kind="not-permitted",
            setting="permit",
        )
    settled = read.sessions[0] if session is None else session
    check_permitted(permit, settled)
    return settled


def check_permitted(permit: str, session: str) -> None:
    """Refuse a permit for other sessions than the training's."""
    sessions = read_permit(permit).sessions
    if session not in sessions:
        raise ConfigurationError(
            f"Expected a permit for session {session!r}, got one for {', '.join(sessions)}. A training that "
            f"goes on from its checkpoint stays in its session: have the owner sign for it (`murmurfl owner permit KEY "
            f"--session {session}`), or begin a new training.",
            kind="not-permitted",
            setting="permit",
        )


class UnexpectedArgumentError(ConfigurationError, TypeError):
    """An argument that a strategy does not take; a ``TypeError`` as well, as of any other function."""

    kind = "unsupported"


_EVALUATION = (
    "clients are not asked to evaluate, for what they would measure has no noise. Give start(..., evaluate_fn=...), "
    "which evaluates on the server's own data, or have a noised count of correct predictions with PrivateEvaluation"
)
_ON_CLIENTS = (
    "; CorrelatedFedAvg(evaluate_on_clients=True) asks clients all the same, without privacy, where they allow it"
)
_METRICS = (
    "clients send no metrics of their training (loss, accuracy, counts): those have no noise. Look at the model, with "
    "start(..., evaluate_fn=...)"
)
_ROBUST = (
    "single updates are noise and cannot be told apart or left out. A client's influence is bounded by its clip, and "
    "largest_value drops what no honest client can send. Leave it out"
)
_BY_LOSS = "weights by a client's loss would publish something about its data. All clients count the same. Leave it out"
_NOISE = (
    "clip and noise are each client's own, and no server's: UpdatePolicy(clip_norm=..., mu=..., "
    "max_participations=...), or the operator's file. Leave it out"
)
_SUMMATION = "releases are added up in one way, exactly. Leave it out"
_ADAPTIVE = "write CorrelatedFedAvg(optimizer=ServerAdam(beta_1=..., beta_2=..., tau=...)) or ServerYogi"

# By names of FedAvg, FedProx, FedAdam, ..., of the Message API and of the legacy one, and of other strategies here.
_INSTEAD: dict[str, str] = {
    "weighted_by_key": (
        "all clients count the same. A weight, such as the number of examples, would publish a number that depends on "
        "a client's data, and a client that counts for more would need more noise. Leave it out"
    ),
    **dict.fromkeys(
        (
            *("fraction_evaluate", "min_evaluate_nodes", "min_evaluate_clients", "evaluate_metrics_aggr_fn"),
            *("evaluate_metrics_aggregation_fn", "on_evaluate_config_fn"),
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(("train_metrics_aggr_fn", "fit_metrics_aggregation_fn"), _METRICS),
    **dict.fromkeys(("inplace", "aggregation"), _SUMMATION),
    "accept_failures": "a client that fails costs its round one update, and the training goes on. Leave it out",
    **dict.fromkeys(
        ("min_completion_rate_fit", "min_completion_rate_evaluate"),
        "a round takes what came. Under secure aggregation SecureAggregation(min_cohort=...) is the fewest",
    ),
    "fraction_fit": "it is called fraction_train here",
    "min_fit_clients": "it is called min_train_nodes here",
    "min_available_clients": "it is called min_available_nodes here",
    "on_fit_config_fn": (
        "give start(..., train_config=ConfigRecord({...})); the round's number reaches clients as 'server-round'"
    ),
    "on_round": "give callbacks=[...] with a Callback whose after_round is called",
    **dict.fromkeys(
        ("clients_per_round", "fraction_train", "min_train_nodes"), "all clients are asked once. Leave it out"
    ),
    **dict.fromkeys(
        ("quorum", "over_selection"),
        "it has no use for a late answer, whose budget would be spent for nothing. The timeout says how long its round "
        "waits. Leave it out",
    ),
    "centre": "it is called public_inputs={'centre': centre}",
    "public_inputs": "MeanOfFeatures makes one, and statistics count records as they are. Leave it out",
    "wait_for": "it is called quorum",
    "ask": "it is called over_selection",
    "run_dry": "it is called allow_exhaustion",
    "initial_parameters": "give start(grid, initial_arrays=ArrayRecord(...))",
    **dict.fromkeys(
        ("evaluate_fn", "evaluate_function"),
        "give start(..., evaluate_fn=...), called with the round and the model's ArrayRecord",
    ),
    "num_rounds": "give start(..., num_rounds=...)",
    "proximal_mu": (
        "the proximal term is part of what clients do: send it to them, start(..., "
        "train_config=ConfigRecord({'proximal-mu': ...})), as FedProx does"
    ),
    "eta": "the server's step is learning_rate=...",
    "server_learning_rate": "the server's step is learning_rate=...",
    "eta_l": "clients train with a rate of their own: start(..., train_config=ConfigRecord({'lr': ...}))",
    "server_momentum": "write CorrelatedFedAvg(optimizer=ServerMomentum(momentum=...))",
    **dict.fromkeys(("beta_1", "beta_2", "tau"), _ADAPTIVE),
    **dict.fromkeys(
        (
            *("beta", "num_malicious_nodes", "num_malicious_clients", "num_nodes_to_select", "num_clients_to_keep"),
            *("selection_rule", "first_aggregation_rule"),
        ),
        _ROBUST,
    ),
    **dict.fromkeys(("q", "q_param", "client_learning_rate", "qffl_learning_rate", "train_loss_key"), _BY_LOSS),
    **dict.fromkeys(
        (
            *(
                "strategy",
                "noise_multiplier",
                "clipping_norm",
                "initial_clipping_norm",
                "target_clipped_quantile",
                "clip_norm_lr",
            ),
            *("clipped_count_stddev", "init_clip_norm", "clip_norm_target_quantile", "clip_count_stddev"),
            *("server_side_noising", "num_sampled_clients", "accountant", "clip_norm", "mu", "epsilon", "delta"),
        ),
        _NOISE,
    ),
    **dict.fromkeys(
        ("arrayrecord_key", "configrecord_key"),
        "murmurfl's own clients read 'arrays' and 'config'; CorrelatedFedAvg alone takes other keys. Leave it out",
    ),
}


def refuse_arguments(strategy: type, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that none of a strategy's constructors takes, unless they ask for nothing.

    None asks for nothing, and neither does ``fraction_evaluate = 0``: clients do not evaluate anyway.
    """
    refused = {name: value for name, value in arguments.items() if not _asks_for_nothing(name, value)}
    if refused:
        raise UnexpectedArgumentError(" ".join(_refusal(strategy, name, value) for name, value in refused.items()))


def _asks_for_nothing(name: str, value: object) -> bool:
    if name not in _INSTEAD:
        return False
    none_evaluates = name in ("fraction_evaluate", "min_evaluate_nodes", "min_evaluate_clients") and value == 0
    return value is None or (none_evaluates and not isinstance(value, bool))


def _refusal(strategy: type, name: str, value: object) -> str:
    received = repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
    if name not in _INSTEAD:
        close = difflib.get_close_matches(name, _arguments(strategy, strategy.__init__), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        return f"Expected an argument that {strategy.__name__} has, got {name!r}{hint}"
    instead = _INSTEAD[name]
    if instead is _EVALUATION and "evaluate_on_clients" in _arguments(strategy, strategy.__init__):
        instead += _ON_CLIENTS
    return f"Expected no {name} for {strategy.__name__}, got {received}: {instead}."


def _arguments(strategy: type, constructor: Callable[..., None]) -> set[str]:
    """Return the names of a constructor's arguments, those that it hands on among them."""
    parameters = inspect.signature(constructor).parameters.values()
    names = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        names |= {one.name for one in fields(RoundOptions)}
        for base in strategy.__mro__:
            if "__init__" in vars(base) and base is not object:
                names |= set(inspect.signature(base.__init__).parameters)
    return names - {"self"}
