"""A search for clip and step that is paid for: trials on the same clients' ledgers, and a private choice among them.

Each trial is a session of its own on every client's ledger, trained with a part of mu^2, and so is the count of
correct predictions by which it is judged. The last training gets what is left. All sessions' mus add in squares to the
run configuration's mu, and ledgers refuse whatever would go beyond it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.guarantee import Guarantee
from ...privacy.accounting.loss import Loss
from ...privacy.errors import ConfigurationError
from ...privacy.noise import SimulatedKeys
from ...privacy.queries.evaluation import counted, counting_policy, release_count
from ...privacy.release.policy import PrivacyPolicy
from ...privacy.release.prefix_sums import Privatizer
from ..engines.pool import Pool, WorkerState, opened_pool, say_nothing
from ..engines.workers import EXPERIMENT, LEDGERS, WorkerClients, shared_samples
from ..methods.queries import QueryOutcome, beside_queries
from ..runs.experiment import Experiment, prepare
from ..runs.result import RunResult
from ..runs.run_guarantees import Figures, run_guarantee
from ..runs.training_run import run_experiment
from ..settings.run_config import RunConfig

MULTIPLES = ("clip_norm", "learning_rate")
"""Hyperparameters that may be searched for, as multiples of the preset's."""
_LEAST_TRIALS = 2


@dataclass(frozen=True)
class Trial:
    """One setting that was tried."""

    multiples: Mapping[str, float]  # Of the preset's clip and step
    clip_norm: float  # What they came to in this trial
    learning_rate: float
    score: float  # The share of predictions that are right: by the private count, noise and all, or on public samples


@dataclass(frozen=True)
class Search:
    """The findings of a search and the cost of all of it."""

    trials: list[Trial]
    chosen: int  # Which of them had the highest score
    result: RunResult  # Of the last training; its own mu is only the last part of `guarantee`'s
    guarantee: Guarantee  # Of everything that was released
    spent: float  # The largest mu that one client's ledger has recorded


@dataclass(frozen=True)
class Parts:
    """The mus of each trial's training, of its count (0 without one), and of the last training."""

    training: float
    count: float
    last: float


def divided(mu: float, trials: int, share: float, counting: float) -> Parts:
    """Mu of each part of a search.

    Parameters
    ----------
    mu : float
        Of all of it.
    share : float
        Of mu^2, for all trials together.
    counting : float
        Of a trial's part, for its count; 0 where public samples decide.

    Notes
    -----
    The parts are such that trials x (training^2 + count^2) + last^2 = mu^2.
    """
    if not (0 < share < 1 and 0 <= counting < 1):
        raise ConfigurationError(
            f"Expected shares between 0 and 1, got {share!r} for trials and {counting!r} for counts.",
            kind="out-of-range",
        )
    each = mu * math.sqrt(share / trials)
    return Parts(each * math.sqrt(1 - counting), each * math.sqrt(counting), mu * math.sqrt(1 - share))


@dataclass(frozen=True)
class OneOfSeveral(Experiment):
    """An experiment whose clients' ledgers hold other sessions beside its own: samples are used again in each."""

    budget_mu: float = 0.0  # Of all sessions together
    number: int = 0  # Which of them it is

    def policy(self, client: int | None = None) -> PrivacyPolicy:
        return beside_queries(super().policy(client), self.budget_mu)

    @cached_property
    def session(self) -> str:
        return _session(self.config.seed, f"training {self.number}")

    def query_session(self, name: str) -> str:
        return _session(self.config.seed, f"{name} {self.number}")


def search(
    config: RunConfig,
    candidates: Sequence[Mapping[str, float]],
    *,
    share: float = 0.3,
    counting: float = 0.1,
    public: bool = False,
    on_trial: Callable[[Trial], None] | None = None,
    workers: int | None = None,
    ray_address: str = "",
    say: Callable[[str], None] | None = None,
) -> Search:
    """Try clips and steps, choose one privately, and train with it; in simulation.

    Parameters
    ----------
    config : RunConfig
        Its mu is that of everything together.
    candidates : sequence of mapping
        Of each trial, multiples of the preset's ``clip_norm`` and ``learning_rate``. The preset's own values are for
        the mu that a training has, and multiples carry over from a trial's to the last one's.
    share : float
        Of mu^2, for all trials together.
    counting : float
        Of a trial's part of mu^2, for the count of correct predictions.
    public : bool
        Whether the samples that runs are evaluated on are nobody's secret and may choose: then nothing is counted. What
        is said of the last model on the same samples is then better than it would be on others.
    on_trial : callable, optional
        Called after every trial.
    workers, ray_address, say
        Over what the clients of each training are spread, as for :func:`~murmurfl.app.engines.run_cohort`. Trials come
        one after the other: they share the clients' ledgers.

    Raises
    ------
    WorkerError
        If a worker could not be started, or is gone.
    ConfigurationError
        If something else is to be searched for, or the configuration has no ledgers against the server that several
        sessions could share.

    Notes
    -----
    Every trial, every count and the last training together are mu-GDP (:attr:`Search.guarantee`) for replacement of one
    sample, against the server that sees all of them and chooses by them; mu is infinite where the range of the noise
    cannot serve one of them. Each is a session on the client's ledger, which admits none beyond the budget; what to
    try was settled before anything was seen.
    """
    _check(config, candidates)
    parts = divided(config.mu, len(candidates), share, 0.0 if public else counting)
    spread = opened_pool(
        1 if workers is None and not ray_address else workers,
        ray_address,
        most=config.num_clients,
        of="clients",
        say=say or say_nothing,
    )
    with spread as pool:
        trials: list[Trial] = []
        samples = None
        for number, multiples in enumerate(candidates):
            experiment = _experiment(config, parts.training, multiples, number)
            samples = shared_samples(experiment, pool) if samples is None else samples
            result = _trained(pool, experiment, samples)
            score = result.progress[-1].accuracy if public else _private_score(pool, result, parts.count, number)
            values = experiment.values
            trials.append(Trial(dict(multiples), values.clip_norm, values.learning_rate, float(score or 0.0)))
            if on_trial is not None:
                on_trial(trials[-1])
        chosen = int(np.argmax([trial.score for trial in trials]))
        experiment = _experiment(config, parts.last, candidates[chosen], len(candidates))
        result = _trained(pool, experiment, samples)
        spent = max(pool.on_all(most_reserved, pool.size))
    # A session of noise that guarantees nothing reserves everything; a real client would not begin it.
    mu = config.mu if math.isfinite(spent) else math.inf
    return Search(trials, chosen, result, _guarantee(experiment, mu, len(trials), share, public=public), spent)


def _check(config: RunConfig, candidates: Sequence[Mapping[str, float]]) -> None:
    if len(candidates) < _LEAST_TRIALS:
        raise ConfigurationError(
            f"Expected at least two candidates to choose from, got {len(candidates)}.",
            kind="out-of-range",
            setting="candidates",
        )
    wrong = sorted({name for multiples in candidates for name in multiples} - set(MULTIPLES))
    if wrong:
        raise ConfigurationError(
            f"Expected multiples of {' and '.join(MULTIPLES)}, got {', '.join(wrong)}.",
            kind="unknown-name",
            setting="multiples",
        )
    if any(not (math.isfinite(value) and value > 0) for multiples in candidates for value in multiples.values()):
        raise ConfigurationError("Expected multiples > 0 and finite.", kind="out-of-range", setting="multiples")
    if config.trust_model != "untrusted-server" or not config.private or config.shuffled_batches:
        raise ConfigurationError(
            "Expected an untrusted server, noise, and no secret order for a search, got trust = "
            f"{config.trust_model!r}, mechanism = {config.mechanism.kind!r}, batch-selection = "
            f"{config.batch_selection!r}: its sessions share ledgers whose budget is against the server.",
            kind="conflict",
        )
    if config.samples_per_owner:
        raise ConfigurationError(
            f"Expected samples-per-owner = 0 for a search, got {config.samples_per_owner}: what it chooses by counts "
            "samples, of which an owner has several.",
            kind="conflict",
            setting="samples-per-owner",
            got=config.samples_per_owner,
        )
    if config.clip_norm or config.learning_rate:
        raise ConfigurationError(
            "Expected clip-norm and learning-rate left to the preset, whose multiples are tried.",
            kind="conflict",
            setting="clip-norm",
        )


def _experiment(config: RunConfig, mu: float, multiples: Mapping[str, float], number: int) -> OneOfSeveral:
    usual = prepare(replace(config, mu=mu))
    own = {name: getattr(usual.values, name) * multiple for name, multiple in multiples.items()}
    made = prepare(replace(config, mu=mu, **own))
    kept = {f.name: getattr(made, f.name) for f in fields(Experiment)}
    return OneOfSeveral(**kept, budget_mu=config.mu, number=number)


def _trained(pool: Pool, experiment: OneOfSeveral, samples: Any) -> RunResult:
    """One training, a session of its own on the ledgers that the pool's workers keep."""
    clients = WorkerClients(experiment, pool, samples=samples, keeps_ledgers=True)
    return run_experiment(clients, experiment.config, experiment=experiment, engine="cohort")


def _private_score(pool: Pool, result: RunResult, mu: float, number: int) -> float:
    """Return the share of all clients' samples that a model predicts right, by counts with noise."""
    session = _session(result.experiment.config.seed, f"count {number}")
    model = pool.share((result.parameters, result.answers))
    made = pool.on_all(counts_released, pool.size, model, mu, session)
    right, samples = counted([release for releases in made for release in releases])
    return right / samples


def counts_released(
    state: WorkerState,
    worker: int,
    workers: int,
    model: tuple[list[NDArray[Any]], Mapping[str, QueryOutcome]],
    mu: float,
    session: str,
) -> list[Any]:
    """Return the counts of a worker's clients: how many of their samples a model predicts right, with noise."""
    experiment, ledgers = state[EXPERIMENT], state[LEDGERS]
    parameters, answers = model
    releases = []
    for client in range(worker, experiment.config.num_clients, workers):
        own, shard = experiment.policy(client), experiment.shards[client]
        policy = counting_policy(mu, budget_mu=own.budget_mu, delta=own.delta, noise_quality=own.noise_quality)
        keys = SimulatedKeys(experiment.config.seed, str(client))
        counter = Privatizer(policy, 1, len(shard), ledgers[str(client)], keys)
        releases.append(
            release_count(
                counter, session, lambda chosen, shard=shard: _right(experiment, parameters, answers, shard[chosen])
            )
        )
    return releases


def most_reserved(state: WorkerState, worker: int, workers: int) -> float:
    """Return the largest mu that the ledger of one of a worker's clients has recorded."""
    most = 0.0
    for client in range(worker, state[EXPERIMENT].config.num_clients, workers):
        with state[LEDGERS][str(client)].exclusive() as page:
            most = max(most, page.account().spent.mu)
    return most


def _right(
    experiment: Experiment, parameters: list[NDArray[Any]], answers: Mapping[str, QueryOutcome], samples: Any
) -> NDArray[np.bool_]:
    for name, outcome in answers.items():
        samples = experiment.query(name).largest.seen(samples, outcome.answer)
    features, labels = samples
    return np.asarray(experiment.model.logits(parameters, features)).argmax(axis=1) == labels


def _session(seed: int, name: str) -> str:
    return hashlib.sha256(f"seed {seed}, {name} of a search".encode()).hexdigest()[:32]


def _guarantee(experiment: Experiment, mu: float, trials: int, share: float, *, public: bool) -> Guarantee:
    """Return the guarantee of everything together: the last training's words, with the mu of all."""
    last = run_guarantee(experiment, Figures(Loss.of(mu)))
    counts = "which public samples chose from" if public else "with the counts that chose from them"
    note = f"It includes {trials} trials, {100 * share:.4g} % of mu^2, {counts}."
    return replace(last, covers="over all sessions of the search", notes=(note, *last.notes))
