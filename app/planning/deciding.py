"""The decision: every strategy tried on made-up data of a situation's shape, and the best one (``strategy = auto``).

A situation is public: sizes and wishes, never samples. When every sample may be used in every round, independent noise
and few full batches win: a sample that moves all rounds together shifts what the model rests on by the sum of what it
does in each, whatever the noise's correlation, and independent noise attains the least that this takes
(docs/proofs/full-batches.md). Noise that cancels is for streams, for samples that may be used once or in few rounds,
and for clients that are seldom asked. So each situation has a usual way; a few neighbours are rehearsed beside it
(:mod:`.rehearsal`), and one of them is taken where it keeps clearly more of what can be learnt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.amplification import Amplification, amplification_of
from ...privacy.accounting.loss import Gaussian, Loss
from ...privacy.accounting.noise_plan import NoisePlan
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import noise_is_memoryless
from ...privacy.release.policy import PrivacyPolicy, Trust
from ...privacy.release.tables import NONE, POISSON, PRIVATE
from ...privacy.setting import Value
from ..data.features.colour import usual_colours
from ..data.task import Dataset
from ..methods import METHODS, ResolvedRun
from ..methods.full_batch_method import has_table, usual_quantile
from ..methods.method import worth_of_order
from ..methods.presets import Resolve, the_task, tuned, wanted_mu
from ..methods.queries import trained_samples
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys
from .rehearsal import ALIKE, SKEWED, LocalBaseline, declared_mix, local_baselines, mean_retained_utility

SAMPLE_USES = {"once": 1, "few": 4, "any": None}
"""The most releases of a sample, by the run-config key ``strategy.sample-uses``; None for any number."""

FEATURES_TRIED = ("strokes", "soft-gradients", "oriented-gradients", "pixels")
"""Features of grey images that are tried where none are named, those that teach most first."""
_SIDE_OF_STROKES = 16
"""Images with fewer pixels a side have few strokes: on digits of 8 x 8 centred soft gradients teach more."""

_OF_AUTO = ("strategy", "strategy.sample-uses", "strategy.stream")


@dataclass(frozen=True)
class PlanRequest:
    """Request for a decision: what is wanted of a run, and the public sizes of its data."""

    # What is wanted, with `strategy = auto`: clients, mu, trust, attendance, `strategy.sample-uses`,
    # `strategy.stream`, and how many
    # rounds are possible in `num-rounds`, 0 for any number
    config: RunConfig
    sizes: tuple[int, ...] = ()  # Samples of each client; none where all data of a client are one unit
    num_features: int = 0  # Of the data as they are, before any features are made of them
    num_classes: int = 0
    resolve: Resolve | None = None  # Works out a run; needed to choose a strategy
    num_parameters: int = 0  # Values of a project's own updates, for which no strategy is chosen
    declares_mix: bool = False  # Whether the partition says how real sites differ, or was left as it is

    def __post_init__(self) -> None:
        config = self.config
        if self.num_parameters and not self.sizes:
            return
        if len(self.sizes) != config.num_clients or min(self.sizes, default=0) < 1:
            raise ConfigurationError(
                f"Expected sizes of num-clients = {config.num_clients} clients, each of 1 sample at least, got "
                f"{len(self.sizes)} with {min(self.sizes, default=0)} samples at least.",
                kind="out-of-range",
                setting="sizes",
            )
        if not config.stream:
            return
        object.__setattr__(self, "config", replace(config, sample_uses="once"))
        possible = self.clients * self.fewest // self.asked
        if config.num_rounds > possible:
            raise ConfigurationError(
                f"Expected rounds <= {possible} for a stream of {self.fewest} samples a client, got "
                f"{config.num_rounds}: with {self.asked} of {self.clients} clients asked in a round, each has not "
                "one sample for every round. Use fewer rounds, ask fewer clients a round, or wait for more samples.",
                kind="exhausted",
                setting="num-rounds",
                got=config.num_rounds,
            )

    @property
    def clients(self) -> int:
        """M."""
        return self.config.num_clients

    @property
    def asked(self) -> int:
        """Clients asked in a round, m."""
        return self.config.asked_per_round

    @property
    def fewest(self) -> int:
        """Samples that the client with the fewest trains on."""
        return trained_samples(self.config, min(self.sizes))

    @property
    def most_uses(self) -> int | None:
        """The most releases that a sample may be in; None for any number."""
        return SAMPLE_USES[self.config.sample_uses]

    @property
    def most_rounds(self) -> int | None:
        """The most rounds; None for any number."""
        return self.config.num_rounds or None

    def features(self, *, centred: bool = True) -> tuple[str, ...]:
        """Return features to choose from: those that the run configuration names, or all that are fit for its images.

        Without centring, features that want it are left out: their common mean would be most of what noise is scaled
        for.
        """
        task = registry("task")[self.config.task]
        if self.config.features != run_keys()["features"].default or not task.has_images:
            return (self.config.features,)
        able = [name for name in (self._of_colour() if task.in_colour else FEATURES_TRIED) if self._can_have(name)]
        if not centred:
            return tuple(name for name in able if registry("features")[name].centring != PRIVATE)
        small = min(task.image_shape) < _SIDE_OF_STROKES
        return tuple(name for name in able if not (small and name == "strokes"))

    def _of_colour(self) -> tuple[str, ...]:
        """Return features of colour images, those that teach most first under the noise in a sum of all clients."""
        mu = wanted_mu(self.config) / math.sqrt(1.0 if self.config.trust_model == "trusted-server" else self.clients)
        return usual_colours(sum(self.sizes), max(self.num_classes, 1), mu), "pixels"

    def can_centre(self, strategy: str) -> bool:
        """Return True if a strategy's clients may release the mean of their features first."""
        config = self.config
        allowed = self.most_uses != 1 and config.centring != NONE and not config.samples_per_owner
        return allowed and METHODS[strategy].centres

    def _can_have(self, features: str) -> bool:
        try:
            registry("features")[features].check(replace(self.config, features=features))
        except ConfigurationError:
            return False
        return True

    def with_settings(self, settings: Mapping[str, Value]) -> RunConfig:
        """Return the run configuration with a strategy's settings, and nothing left in it that only ``auto`` reads."""
        own = {name: run_keys()[name].default for name in _OF_AUTO}
        return RunConfig.from_mapping({**self.config.to_mapping(), **own, **settings})

    def problem(self, settings: Mapping[str, Value]) -> ResolvedRun:
        """Return the run with a strategy's settings, worked out on sizes.

        It has the rounds, clip, step and noise to come.
        """
        config = self.with_settings(settings)
        width, empty = self._width(config), np.zeros(0, np.int64)
        none = np.zeros((0, width), np.float32)
        outline = Dataset(none, empty, none, empty, self.num_classes)
        return self.work_out(config, outline, [range(size) for size in self.sizes])

    @property
    def work_out(self) -> Resolve:
        """Function that resolves a run."""
        if self.resolve is None:
            raise ConfigurationError("Expected resolve in a request for a strategy.", kind="missing")
        return self.resolve

    def _width(self, config: RunConfig) -> int:
        """Values of a sample's features: the map says it of a blank image."""
        shape = registry("task")[config.task].image_shape
        if shape is None or config.features == self.config.features:
            return self.num_features
        return int(registry("features")[config.features].of_any(np.zeros((1, *shape), np.uint8)).shape[1])


_MOST_DENSE = 2048
"""Releases beyond which B is too large to write out."""


@dataclass(frozen=True)
class Candidate:
    """One plan: a strategy with its settings, or one mechanism for the releases of a run, and its figures.

    Figures of noise are standard deviations of one value, in the units of the clip norm. There are two errors: of the
    prefix sums that a client releases, and of the sums of these, by which DP-mu^2-FL moves its model (its momentum is a
    prefix sum, its model a sum of momenta).
    """

    request: PlanRequest
    strategy: str
    settings: Mapping[str, Value]  # Run-config keys that it sets beyond the request's own
    problem: ResolvedRun  # The run, worked out on sizes
    # A client's; of a mechanism under a trusted server that of one client, whose noise the server makes
    policy: PrivacyPolicy
    num_values: int  # Values of a release, d
    samples: int  # Of the client that the policy is for
    # How much more than the usual strategy it must keep to be taken: by so much what is kept differs from one kind of
    # data to the next
    prior_penalty: float = 0.0
    # What differs from the decision's: `taken`, `default`, `strategy`, `rounds`, `batch`, `order`, `trust`, `mechanism`
    varied: str = ""
    mark: str = ""  # What it is to whoever reads a list of them, such as a mechanism's name; often empty
    accuracy: float | None = None  # On the test set, where it was tried out

    @cached_property
    def retained_utility(self) -> float:
        """Share of what can be learnt that it keeps, averaged over synthetic data; 0 where it cannot be rehearsed."""
        return mean_retained_utility(self.problem, self.request.work_out)

    @cached_property
    def local_baselines(self) -> list[LocalBaseline]:
        """Shares that it and one client alone keep, by how sites differ; empty without a rehearsal.

        The first is of sites that are alike, the second of the mix that is declared, or of skewed labels where none is.
        """
        mix = (declared_mix(self.problem.config) if self.request.declares_mix else None) or SKEWED
        mixes = (ALIKE,) if mix.is_alike else (ALIKE, mix)
        return local_baselines(self.problem, self.request.work_out, mixes)

    @property
    def measure(self) -> str:
        """The unit of what is kept, in words; nothing for accuracy."""
        if self.problem.data.num_classes == 1:
            return ", in R^2"
        return ", in AUC" if the_task(self.problem.config).majority else ""

    @property
    def score(self) -> float:
        """The rank of a candidate, less is better: the share that is lost, and the prior_penalty."""
        return 1.0 - self.retained_utility + self.prior_penalty

    @property
    def whole(self) -> bool:
        """Whether all samples of a client are in every release."""
        return METHODS[self.strategy].sums_samples

    @property
    def features(self) -> str:
        """The features that are learnt from."""
        return self.problem.config.features

    @property
    def rounds(self) -> int:
        """T."""
        return self.problem.num_rounds

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.problem.config

    @property
    def trust(self) -> Trust:
        """Trust model of the clients."""
        return self.config.trust_model

    @property
    def batch(self) -> int:
        """Samples of a client in one release."""
        return min(self.problem.sizes) if self.whole else self.config.batch_size

    @property
    def training_uses(self) -> int:
        """The number of training releases that a sample is in."""
        return self.policy.participations

    @property
    def uses(self) -> int:
        """The number of releases that a sample is in."""
        return self.policy.participations + self.problem.uses_beside

    @cached_property
    def noise_to_signal(self) -> float:
        """The noise in the mean gradient of the last step (:func:`noise_to_signal`)."""
        return noise_to_signal_of(self.problem)

    @cached_property
    def amplification(self) -> Amplification | None:
        """Amplification of epsilon by secret batches; None without them."""
        problem, method = self.problem, METHODS[self.strategy]
        if method.trusted:
            return method.server_amplification(problem)
        policies = [method.policy(problem.trained, size) for size in problem.sizes]
        return worth_of_order(policies, method.release_size(problem))

    @cached_property
    def noise(self) -> NoisePlan:
        """The noise plan of the policy."""
        return self.policy.plan(self.num_values)

    @property
    def _trusted(self) -> bool:
        """Whether a trusted server makes the noise, once for all clients of a round."""
        return self.settings.get("trust") == "trusted-server"

    @property
    def loss(self) -> Loss:
        """The loss of all K releases; a trusted server guarantees nothing against itself."""
        return Loss(self.noise.loss.assumed, Gaussian(math.inf)) if self._trusted else self.noise.loss

    @property
    def noise_std(self) -> float:
        """The standard deviation on each client, in front of the mechanism's rows."""
        return 0.0 if self._trusted else self.noise.noise_std

    @cached_property
    def _prefix_errors(self) -> NDArray[np.float64]:
        """Standard deviations of a client's prefix sums, release by release."""
        releases = range(1, self.noise.mechanism.num_releases + 1)
        return np.array([self.noise.mechanism.row_std(release) for release in releases]) * self.noise.noise_std

    @cached_property
    def _mu2_errors(self) -> NDArray[np.float64] | None:
        """Standard deviations of the sums of the prefix sums; None for too many releases to write B out."""
        if self.policy.max_participations > _MOST_DENSE:
            return None
        decoder = self.noise.mechanism.decoder()
        return np.linalg.norm(np.cumsum(decoder, axis=0), axis=1) * self.noise.noise_std

    @property
    def prefix_rmse(self) -> float:
        """The noise of a client's released prefix sums: root mean square over its releases."""
        return _rms(self._prefix_errors)

    @property
    def prefix_last(self) -> float:
        """The noise of a client's last prefix sum."""
        return float(self._prefix_errors[-1])

    @property
    def mu2_rmse(self) -> float | None:
        """The noise of the sums of the prefix sums, root mean square."""
        return None if self._mu2_errors is None else _rms(self._mu2_errors)

    @property
    def mu2_last(self) -> float | None:
        """The noise of the last sum of prefix sums."""
        return None if self._mu2_errors is None else float(self._mu2_errors[-1])

    @property
    def server_prefix_rmse(self) -> float:
        """The noise of the prefix sums of the server's averages over m clients."""
        return self._at_server(self.prefix_rmse)

    @property
    def server_mu2_rmse(self) -> float | None:
        """The noise of the sums of the prefix sums of the server's averages."""
        return None if self.mu2_rmse is None else self._at_server(self.mu2_rmse)

    def _at_server(self, error: float) -> float:
        """Return an error of one client's sums as that of the server's running sums of averages.

        Each of the M clients has a prefix in them, divided by m; a trusted server has one noise for all of them.
        """
        every = math.sqrt(self.config.num_clients)
        found = every / self.config.asked_per_round * error
        return found / every if self._trusted else found

    @property
    def memory_bytes(self) -> int:
        """Bytes that the mechanism makes a stream remember between releases."""
        return self.noise.mechanism.memory_bytes(self.num_values)

    @cached_property
    def amplified(self) -> Amplification | None:
        """Amplification of this mechanism's epsilon by a secret order; None without one, and where none is known."""
        return amplification_of(self.policy, self.noise)


def _rms(values: NDArray[np.float64]) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def noise_to_signal(
    plan: NoisePlan,
    *,
    longest: float,
    num_values: int,
    rounds: int,
    asked: int,
    clients: int,
    is_memoryless: bool,
    samples_summed: float = 1.0,
) -> float:
    """Return the expected length of the noise in the mean gradient of the last step, over the clip norm.

    What a strategy has of the mean gradient in its last step is

    * the mean of the last round's releases, where releases stand alone: its noise is that of one release, over sqrt(m);
    * the running sum of all of them over their number (mu^2's q_T / T), where they build on each other: its noise is
      that of a client's last prefix sum over its number of releases and over sqrt(M).

    Below 0.1 noise hardly shows; at 1 it is as long as a clipped gradient, and little is learnt. Where clients release
    another thing than gradients, such as second moments, it is the noise in their mean over the longest there is.

    Parameters
    ----------
    plan : NoisePlan
        Of one client; under secure aggregation it has the client's share.
    longest : float
        S: no sample's contribution is longer (:attr:`~murmurfl.privacy.release.clipping.RowBound.longest`).
    num_values : int
        d, values of a release.
    rounds, asked, clients : int
        T, m and M.
    is_memoryless : bool
        Whether a release has noise of its own, and not one that takes out what was added before.
    samples_summed : float
        Samples that a release is the *sum* of, mean over clients; 1 where it is a mean.

    Returns
    -------
    float
        0 without noise.
    """
    row_std = plan.mechanism.row_std
    made = min(max(round(rounds * asked / clients), 1), plan.mechanism.num_releases)
    if is_memoryless:
        before = row_std(made - 1) if made > 1 else 0.0
        value = plan.noise_std * math.sqrt(max(row_std(made) ** 2 - before**2, 0.0)) / math.sqrt(asked)
    else:
        value = plan.noise_std * row_std(made) / (made * math.sqrt(clients))
    return value / samples_summed * math.sqrt(num_values) / longest


def noise_to_signal_of(problem: ResolvedRun) -> float:
    """:func:`noise_to_signal` of a run, with the plan of its client with the fewest samples.

    Notes
    -----
    A trusted server makes one noise for all clients of a round: that of one client by itself, over sqrt(m). Where the
    mean of the features is released first, the noise is that of what is left of mu^2. With Poisson batches every sample
    may be in every sum, as in full batches, and a sum has ``sampling_rate`` of the samples on average.
    """
    config, method = problem.config, METHODS[problem.config.strategy]
    if not config.private:
        return 0.0
    policy, together = method.policy(problem.trained, min(problem.sizes)), 1.0
    drawn = policy.sampling_rate or 1.0
    if policy.batch_selection == POISSON:
        policy = replace(policy, batch_selection="full_batch", sampling_rate=0.0)
    if method.trusted:
        policy, together = replace(policy, trust="untrusted-server"), math.sqrt(config.asked_per_round)
    values = method.release_size(problem)
    found = noise_to_signal(
        policy.plan(values),
        longest=policy.bound.longest,
        num_values=values,
        rounds=problem.num_rounds,
        asked=config.asked_per_round,
        clients=config.num_clients,
        # Correlated noise is taken out again whatever a release is built on.
        is_memoryless=policy.release_mode == "independent" and noise_is_memoryless(policy.mechanism),
        # In a secret order a release is a sum over b, which about b samples are in.
        samples_summed=drawn * fmean(problem.sizes) if policy.batch_selection == "full_batch" else 1.0,
    )
    return found / together


Settings = Mapping[str, Value]

_ROUNDS = (1, 4, 8, 16)
"""Rounds of one pass: few make a round's noise small, many follow the loss."""
_USUAL_ROUNDS = ((0.05, 16), (0.12, 8), (0.28, 4), (math.inf, 1))
"""The usual ones of corrected gradients, by the noise in the mean of all samples' gradients (docs/tuning.md)."""
_FULL_ROUNDS = (6, 12)
"""Rounds of full batches to try next to the preset's, which has few with much noise and many with little."""


FEW_POINTS = 0.05
"""Shares that differ by less are the same: made-up data differ by more."""
_OTHER = 0.05
"""Prior penalty of what is not the usual strategy."""
_OTHER_ROUNDS, _OTHER_ROUNDS_OF_A_PASS = 0.1, 0.15
"""Prior penalty of other rounds: the usual ones are near the best in all but the loudest noise."""
_ONE_STEP = 0.3
"""Prior penalty of one step along the mean gradient where more are usual: of Gaussian classes it tells nearly all."""
_ONCE = 0.3
"""Prior penalty of using samples once where they may be used in every round: the theorem says that it needs more."""
_GAUSSIAN = 0.5
"""Prior penalty of one shot: of Gaussian classes second moments tell everything, of real ones less."""


Attempt = tuple[str, Settings, float]
"""A strategy to try, its settings, and its prior penalty."""


def _attempts(request: PlanRequest, refused: dict[str, str]) -> Iterator[Attempt]:
    """Yield what to try, the usual strategy first; add those that are ruled out to ``refused``, with the reason."""
    trusted, once = request.config.trust_model == "trusted-server", request.most_uses is not None
    full, cancelling, fresh = (
        ("trusted-full-batch", "trusted-mu2", "trusted-sgd") if trusted else ("full-batch", "mu2", "noisy-sgd")
    )
    shots = () if trusted else ("one-shot",)
    if once:
        yield from _one_pass(request, cancelling, refused)
        for strategy, settings, penalty in _one_pass(request, fresh, refused):
            yield strategy, settings, penalty + _OTHER
    if request.config.stream:
        refused |= dict.fromkeys((full, *shots), "samples come as a stream, and it uses every sample in every round")
        return
    clip = {} if trusted else _following(request)
    yield full, clip, _OTHER if once else 0.0
    for number in _full_rounds(request):
        yield full, {**clip, "num-rounds": number}, _OTHER_ROUNDS
    for strategy in shots:
        yield strategy, {"num-rounds": 0}, _GAUSSIAN
    if not once:
        for name in (cancelling, fresh):
            for strategy, settings, _ in _one_pass(request, name, refused):
                yield strategy, settings, _ONCE


def _following(request: PlanRequest) -> Settings:
    """Return a clip that follows the gradients, where it cuts them: nobody may know whether the bound R is near.

    It becomes shorter where few gradients reach it, for 2 % of mu^2.
    """
    config = request.config
    if has_table(config) or config.stream or config.clipping != run_keys()["clipping"].default:
        return {}
    try:
        return {"clipping.quantile": usual_quantile(request.problem({"strategy": "full-batch"}))}
    except ConfigurationError:  # of full batches themselves, which are refused for it
        return {}


def _full_rounds(request: PlanRequest) -> list[int]:
    """Return rounds of full batches to try beside the preset's; none where its constants are for images."""
    config, uses = request.config, request.most_uses
    most = min(request.most_rounds or max(_FULL_ROUNDS), uses or max(_FULL_ROUNDS))
    return [] if has_table(config) else [rounds for rounds in _FULL_ROUNDS if rounds <= most]


def _one_pass(request: PlanRequest, strategy: str, refused: dict[str, str]) -> Iterator[Attempt]:
    """Yield one pass over all samples, cut into rounds; the usual number has no penalty."""
    share, most = request.asked / request.clients, request.most_rounds
    known = tuned(replace(request.config, features=chosen_features(request, strategy))) is not None
    numbers: dict[int, int] = {}  # of rounds, by batch
    for rounds in sorted({*_ROUNDS, min(most or 1, max(_ROUNDS))}):
        batch = int(request.fewest // max(rounds * share, 1.0))
        if batch >= 1 and (most is None or rounds <= most):
            numbers.setdefault(batch, rounds)
    if not numbers:
        refused[strategy] = (
            f"{request.fewest} samples of a client are too few for {most} rounds in which each is used once"
        )
        return
    wanted = _usual_rounds(request, strategy, max(numbers))
    best = min(numbers, key=lambda batch: abs(math.log(numbers[batch] / wanted)))
    anytime = "strategy.steps" in METHODS[strategy].keys and not known
    for batch, rounds in numbers.items():
        penalty = _ONE_STEP if rounds == 1 else _OTHER_ROUNDS_OF_A_PASS
        steps = {"strategy.steps": "anytime"} if anytime and rounds > 1 else {}
        yield strategy, {"batch-size": batch, "num-rounds": rounds, **steps}, 0.0 if batch == best else penalty


def _usual_rounds(request: PlanRequest, strategy: str, batch: int) -> int:
    """Return how many rounds a pass usually has, by the noise that one mean gradient of all samples would have."""
    settings: Settings = {"batch-size": batch, "num-rounds": 1, "features": chosen_features(request, strategy)}
    try:
        found = tried(request, strategy, settings).noise_to_signal
    except ConfigurationError:
        return 1
    noise = found * math.sqrt(request.asked / request.clients)
    return next(rounds for most, rounds in _USUAL_ROUNDS if noise <= most)


def candidates_of(request: PlanRequest) -> tuple[list[Candidate], dict[str, str]]:
    """Return every strategy for the request's kind of server at its best, and why the others cannot be had.

    They come in the order in which they are preferred where they score alike.
    """
    made: dict[str, list[Candidate]] = {}
    refused: dict[str, str] = {}
    for strategy, settings, penalty in _attempts(request, refused):
        own = {**settings, "features": chosen_features(request, strategy)}
        try:
            candidate = tried(request, strategy, own, prior_penalty=penalty)
        except ConfigurationError as error:
            refused.setdefault(strategy, str(error))
        else:
            made.setdefault(strategy, []).append(candidate)
    if len(made) == 1 and all(len(found) == 1 for found in made.values()):  # nothing to choose from
        return [found[0] for found in made.values()], refused
    best = [min(found, key=lambda candidate: candidate.score) for found in made.values()]
    return best, {strategy: why for strategy, why in refused.items() if strategy not in made}


def chosen_features(request: PlanRequest, strategy: str, *, centred: bool = True) -> str:
    """Return the features that teach most, of those that a strategy's clip and step are known for.

    They are fixed maps of one image, so they cost no privacy. Where a strategy cannot centre them, or is not
    ``centred``, they are the first that do without: this gains more than a clip and step that were searched.
    """
    if not (centred and request.can_centre(strategy)):
        return request.features(centred=False)[0]
    found = request.features()
    tuned = registry("task")[request.config.task].tuned
    known = [name for name in found if name in tuned or METHODS[strategy].sums_samples]
    return (known or list(found))[0]


def tried(request: PlanRequest, strategy: str, settings: Settings, *, prior_penalty: float = 0.0) -> Candidate:
    """Return a strategy with some settings, in as many rounds as it takes and as are possible."""

    def made(**more: Value) -> Candidate:
        chosen = {"strategy": strategy, **settings, **more}
        if request.most_uses == 1:  # the mean of the features is one use more
            chosen["centring"] = "none"
        problem = request.problem(chosen)
        if request.most_uses == 1 and problem.uses_beside:
            raise ConfigurationError(
                "a private evaluation with evaluation.held-out = 0 uses every sample once more", kind="conflict"
            )
        chosen["num-rounds"] = problem.num_rounds
        known = request.config.to_mapping()
        own = {name: value for name, value in chosen.items() if name != "strategy" and known[name] != value}
        policy = METHODS[strategy].policy(problem.trained, min(problem.sizes))
        values, samples = METHODS[strategy].release_size(problem), min(problem.sizes)
        found = Candidate(request, strategy, own, problem, policy, values, samples, prior_penalty)
        found.noise_to_signal  # noqa: B018 - refused if there is no such noise
        return found

    if strategy not in METHODS:
        raise ConfigurationError(
            f"Expected one of {', '.join(METHODS)}, got {strategy!r}.",
            kind="unknown-name",
            setting="strategy",
            got=strategy,
        )
    first = made()
    uses, rounds, whole = request.most_uses, request.most_rounds, METHODS[strategy].sums_samples
    if not whole or (first.uses <= (uses or first.uses) and first.rounds <= (rounds or first.rounds)):
        return first
    left = None if uses is None else uses - first.problem.uses_beside
    most = min(one for one in (left, rounds) if one is not None)
    if most < 1:
        raise ConfigurationError("it needs a sample in more releases than one", kind="conflict")
    return made(**{"num-rounds": most})


@dataclass(frozen=True)
class PlanResult:
    """Answer to a request: the chosen candidate, the alternatives, and what ``murmurfl plan`` says of them."""

    request: PlanRequest
    chosen: Candidate
    others: Sequence[Candidate]  # Other strategies that are possible, the best first
    impossible: Mapping[str, str]  # Those that are not, and why
    asked: Mapping[str, Value] = field(default_factory=dict)  # Run-config keys as they were given
    made_up: bool = False  # Whether its task stands in for data that nobody has named
    # The choice next to other passes, batches and trust, and to the run that would be made if nobody decided
    ways: Sequence[Candidate] = ()
    noise: PlanResult | None = None  # Of every mechanism; None where clients release no stream with noise
    # Loss of a person by clients and samples on each
    persons: Mapping[tuple[int, int], Loss] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Value]:
        """The run-config keys that the choice sets."""
        return {"strategy": self.chosen.strategy, **self.chosen.settings}

    @property
    def mechanisms(self) -> list[Candidate]:
        """The candidates that differ in their mechanism."""
        return [one for one in self.ways if one.varied == "mechanism"]

    @property
    def trusts(self) -> dict[str, Candidate]:
        """The candidates that differ in whom clients trust."""
        return {str(one.settings["trust"]): one for one in self.ways if one.varied == "trust"}

    @property
    def best_for_mu2(self) -> str | None:
        """The mechanism with the least error of the sums of prefix sums."""
        known = [(one.mu2_rmse, one.mark) for one in self.mechanisms if one.mu2_rmse is not None]
        return min(known)[1] if known else None

    @property
    def reason(self) -> str:
        """Reason for this choice, in a sentence."""
        config, chosen = self.request.config, self.chosen
        case = "samples come as a stream" if config.stream else f"samples may be used {_OFTEN[config.sample_uses]}"
        why = _WHY.get(chosen.strategy, "it keeps most of what can be learnt")
        return f"{case}, and {why}; noise-to-signal {chosen.noise_to_signal:.2g} in {chosen.rounds} rounds."

    @cached_property
    def longer(self) -> Candidate | None:
        """The choice in twice as many rounds; None where these are not possible."""
        chosen, most = self.chosen, self.request.most_rounds
        rounds, settings = 2 * chosen.rounds, dict(chosen.settings)
        if not METHODS[chosen.strategy].is_iterative or (most is not None and rounds > most):
            return None
        if not chosen.whole:
            settings["batch-size"] = chosen.problem.config.batch_size // 2
        try:
            found = tried(self.request, chosen.strategy, {**settings, "num-rounds": rounds})
        except ConfigurationError:
            return None
        return found if found.rounds == rounds and found.uses <= (self.request.most_uses or found.uses) else None

    def why_not(self, candidate: Candidate) -> str:
        """Return why a candidate that is possible was not taken."""
        favoured = "" if METHODS[candidate.strategy].is_iterative else ", whose Gaussian classes favour it,"
        return (
            f"on made-up data{favoured} it keeps {100 * candidate.retained_utility:.0f} % of what can be learnt, "
            f"{self.chosen.strategy} {100 * self.chosen.retained_utility:.0f} %"
        )


_OFTEN = {"once": "once", "few": "in few rounds", "any": "in every round"}
_WHY = {
    "full-batch": "independent noise and few full batches win",
    "trusted-full-batch": "few full batches win, with one noise for all clients",
    "one-shot": "one release of second moments has less noise in it than any steps would",
    "noisy-sgd": "fresh noise in few rounds leaves least",
    "mu2": "noise that cancels leaves least in the running sum of corrected gradients",
    "trusted-mu2": "corrected gradients that add up need least noise of a trusted server",
}


def decide(request: PlanRequest) -> PlanResult:
    """Choose the strategy for a request, by its sizes and wishes alone: server and clients choose the same."""
    found, refused = candidates_of(request)
    ranked = sorted(found, key=lambda candidate: candidate.score)
    if not ranked:
        reasons: dict[str, list[str]] = {}
        for strategy, why in refused.items():
            reasons.setdefault(why, []).append(strategy)
        if len(reasons) == 1 and (why := next(iter(reasons))).startswith("Expected"):  # and says what to do
            raise ConfigurationError(why, kind="conflict")
        listed = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        raise ConfigurationError(
            f"Expected a situation that some strategy can serve, got none ({listed}). Ask fewer clients a round, use "
            "fewer rounds, let samples be used more often, or raise mu.",
            kind="missing",
        )
    return PlanResult(request, ranked[0], ranked[1:], refused)
