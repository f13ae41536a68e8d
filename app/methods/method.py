"""The base of all methods: :class:`Method`, all that the application knows of an algorithm.

A method says which run-config keys it reads and what they may be, which constants its presets have, what policy its
clients get, and which client and strategy carry it out. Nothing else in the application asks for a method's name. A
user's own is a subclass, named ``strategy=package.module:MyMethod``; it sets ``client_type`` and ``strategy_type``, and
everything else has a default.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ...clients.algorithms import ALGORITHMS, Algorithm
from ...clients.mu2_client import Mu2Client
from ...clients.private_client import PrivateClient
from ...privacy.accounting.amplification import Amplification, amplification_of_all
from ...privacy.accounting.guarantee import Guarantee, policy_guarantee, server_guarantee
from ...privacy.accounting.loss import Loss, SumAssumption, as_loss
from ...privacy.accounting.noise_plan import NoisePlan
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import noise_is_memoryless
from ...privacy.noise import SimulatedKeys
from ...privacy.release.policy import NO_NOISE, PrivacyPolicy, Trust
from ...privacy.release.tables import SHUFFLED
from ...privacy.setting import refusal
from ...strategies.mu2 import Mu2
from ...strategies.rounds.strategy import ReleaseStrategy
from ..models.model import Model
from ..settings.registry import known_mechanism, registry
from ..settings.run_config import AUTO, SECURE, RunConfig, refused_trust, run_keys
from .presets import Hyperparameters, ResolvedRun, sgd_preset
from .queries import plan_or_largest_mu

_SERVER_NOISE = "server"
_CHARGED = (
    "clip_norm",
    "clip_unit",
    "batch_size",
    "sample_participations",
    "min_separation",
    "release_rule",
    "sampling_rate",
)
"""Fields of a policy that settle a trusted server's noise."""


class Method(ABC):
    """An algorithm of clients and server, as the application sees it.

    Notes
    -----
    On a real client the policy is the operator's own, and what a method adds to it is who is trusted, the release rule
    and what is clipped.
    """

    name: ClassVar[str] = ""
    sentence: ClassVar[str] = "A method of one's own."
    keys: ClassVar[frozenset[str]] = frozenset({"batch-size"})
    """Run-config keys that this method reads and others need not."""
    trusted: ClassVar[bool] = False
    """Whether the server is trusted with what clients send and adds the noise."""
    sums_suffice: ClassVar[bool] = False
    """Whether the server needs nothing but sums of releases, and the clients can hide theirs in them. One of your own
    inherits it with client and strategy: it is true of no other ones."""
    with_trusted_server: ClassVar[str] = ""
    """The built-in method that this one is with ``trust = trusted-server``."""
    mechanisms: ClassVar[tuple[str, ...] | None] = None
    """Mechanisms that may be set; None for any. Clients' under an untrusted server, otherwise the server's."""
    default_mechanism: ClassVar[str] = "cancelling"
    batch_selections: ClassVar[tuple[str, ...]] = ("", SHUFFLED)
    """Batch selections that may be set, where it reads that key."""
    clip_units: ClassVar[tuple[str, ...]] = ("sample",)
    """Units that may be clipped; the first is the default."""
    release_rule: ClassVar[str] = ""
    """The release rule where it is not the configuration's to choose."""
    presets: ClassVar[tuple[str, ...]] = ("practical",)
    everybody: ClassVar[bool] = False
    """Whether all clients take part in every round, in epochs that they share."""
    tolerates_dropouts: ClassVar[bool] = True
    """Whether a round may lack a client's release."""
    sums_samples: ClassVar[bool] = False
    """Whether each release is a sum over all of a client's samples: there are no batches then, and no passes."""
    samples_return: ClassVar[bool] = True
    """Whether a sample may take part more than once in a session."""
    is_iterative: ClassVar[bool] = True
    """Whether its server takes steps, of a length that may be set."""
    uses_public: ClassVar[bool] = False
    """Whether clients or server train on public samples as well."""
    local_steps: ClassVar[bool] = False
    """Whether clients take steps of their own, with a step size of theirs."""
    has_regret: ClassVar[bool] = False
    """Whether a run is judged by the loss of each round's model on the samples that the round is about to use."""
    centres: ClassVar[bool] = True
    """Whether clients may see their samples from a mean that they release first."""
    evaluates: ClassVar[bool] = True
    """Whether clients may evaluate the model privately."""
    on_real_nodes: ClassVar[bool] = False
    client_type: ClassVar[type[PrivateClient]]
    strategy_type: ClassVar[type[ReleaseStrategy[Any]]]
    built_in: ClassVar[dict[str, type[Method]]] = {}
    """The classes of methods that are made for an algorithm of the registry, by its name."""

    def __init_subclass__(cls, *, algorithm: str = "", **options: Any) -> None:
        """Take the client's half from the registry of algorithms: ``class Mu2Method(Method, algorithm="mu2")``."""
        super().__init_subclass__(**options)
        if algorithm:
            cls.of_algorithm(ALGORITHMS[algorithm])

    @classmethod
    def of_algorithm(cls, known: Algorithm) -> None:
        """Be the method of an algorithm."""
        Method.built_in[known.name] = cls
        cls.name, cls.client_type, cls.default_mechanism = known.name, known.client, known.mechanism
        cls.clip_units, cls.release_rule, cls.sums_samples = known.clip_units, known.release_rule, known.sums_samples
        if "mechanisms" not in vars(cls):  # a server's own
            cls.mechanisms = known.mechanisms

    def check(self, config: RunConfig) -> None:
        """Refuse a run configuration whose keys this method cannot serve."""
        if config.trust_model not in self.trusts:
            others = [name for name, one in registry("strategy").items() if config.trust.kind in one.trusts]
            raise refused_trust(config.trust.kind, config.strategy, ("", *self.trusts), others)
        self._check_choices(config)
        self._check_participation(config)
        bounding(config, self.keys)
        self._check_passes(config)
        mechanism = self.mechanism(config)  # imports one of the user's own, or refuses what is none
        if config.schedule and mechanism not in ("cancelling", NO_NOISE):
            raise refusal("mechanism.schedule", "unset unless mechanism = 'cancelling'", config.schedule)
        if registry("task")[config.task].public and not self.uses_public:
            able = [repr(name) for name, one in registry("strategy").items() if one.uses_public]
            raise refusal("strategy", f"{' or '.join(able)} for this task", config.strategy)

    def _check_choices(self, config: RunConfig) -> None:
        """Refuse a preset, a mechanism or a unit of clipping that this method does not have."""
        mechanisms = (config.mechanism.kind,) if self.mechanisms is None else ("", NO_NOISE, *self.mechanisms)
        for name, value, known in (
            ("preset", config.preset, self.presets),
            ("mechanism", config.mechanism.kind, mechanisms),
            ("clip_unit", config.clip_unit, ("", *self.clip_units)),
            ("batch_selection", config.batch_selection, self.batch_selections),
        ):
            if value not in known:
                raise refusal(name, f"one of {', '.join(map(repr, known))} with this strategy", value)

    def _check_participation(self, config: RunConfig) -> None:
        """Refuse fewer clients in a round than this method needs, lost replies and late ones that it cannot use."""
        wanted: dict[str, tuple[object, str]] = {}
        if self.everybody:
            wanted["clients_per_round"] = (config.num_clients, f"num-clients = {config.num_clients} with this strategy")
        if not self.tolerates_dropouts:
            wanted["lost_replies"] = (0, "0 with this strategy: it ends with the first lost reply")
            wanted["allow_exhaustion"] = (False, "false with this strategy: it ends with the first refusal")
        if self.strategy_type.late_answers == "refused":
            late = "1 with this strategy: it has no use for a late answer, whose budget would be spent"
            wanted |= {"quorum": (1, late), "over_selection": (1, late)}
        for name, (value, expected) in wanted.items():
            if getattr(config, name) != value:
                raise refusal(name, expected, getattr(config, name))

    def _check_passes(self, config: RunConfig) -> None:
        """Refuse to go through samples more often than this method, or a secret order, allows."""
        if config.passes == 1:
            return
        if config.shuffled_batches:
            raise refusal("passes", "1 with batch-selection = 'shuffled': each sample is in one release", config.passes)
        if not self.samples_return:
            raise refusal("passes", "1 with this strategy", config.passes)

    @property
    def own_trust(self) -> Trust:
        """The trust model unless the run configuration sets another."""
        return "trusted-server" if self.trusted else "untrusted-server"

    @property
    def trusts(self) -> tuple[Trust, ...]:
        """The trust models it serves."""
        return (self.own_trust, SECURE) if self.sums_suffice else (self.own_trust,)

    def mechanism(self, config: RunConfig) -> str:
        """Return the mechanism of the clients' noise: the one that is set, or this method's own."""
        return NO_NOISE if not config.private else known_mechanism(config.mechanism.kind) or self.default_mechanism

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        """Clip, step, ball, schedule and sampling where the run configuration leaves them open.

        Notes
        -----
        The values come from public sizes and bounds alone, never from samples: no accounting would cover what a clip
        or a step said about samples.
        """
        return sgd_preset(config, num_rounds, model)

    def settled(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> Hyperparameters:
        """:meth:`preset` for clients of so many samples; public, too."""
        return self.preset(config, num_rounds, model)

    def calibrated(self, config: RunConfig, num_rounds: int, sizes: Sequence[int]) -> RunConfig:
        """Return a configuration whose mu is settled, where it depends on rounds and batches; public, too."""
        return config

    @property
    def weighs_classes(self) -> bool:
        """Whether a model may have gradients that are weighted by class."""
        return False

    def usual_temperature(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> float:
        """Return the temperature of a model that is trained with the clip and step of :meth:`settled`; public, too."""
        return 1.0

    def usual_rounds(self, config: RunConfig, sizes: Sequence[int], model: Model) -> int:
        """T where the run configuration leaves it open: so many passes over all samples."""
        return config.passes * self.rounds_of_a_pass(config, sizes)

    def rounds_of_a_pass(self, config: RunConfig, sizes: Sequence[int]) -> int:
        """Return the number of rounds that go once through all samples."""
        if self.everybody or self.has_regret:
            return self.common_batches(config, sizes)
        if config.secure:
            return len(sizes) * self.common_batches(config, sizes) // config.asked_per_round
        return max(sum(sizes) // (config.asked_per_round * config.batch_size), 1)

    def common_batches(self, config: RunConfig, sizes: Sequence[int]) -> int:
        """Return the number of batches into which all clients deal their samples, where they share rounds or sums.

        A client with fewer samples has smaller batches, whose missing samples count as zero; one with more leaves some
        unused. With so many batches, n samples are used in all, and each round has the noise of all clients. Noise that
        is fresh in each round grows with the root of their number: n / sqrt(batches) is largest here. Correlated noise
        grows more slowly, and the fourth root is what served it (docs/sites-that-differ.md). One batch more or less is
        how samples are split, and then nobody has a smaller one.
        """
        held = np.asarray(sizes, dtype=np.int64)
        full = held // config.batch_size
        if self.local_steps or (full.min() >= 1 and full.max() - full.min() <= 1):
            return int(full.min())
        possible = np.unique(np.maximum(full, 1))
        used = np.array([np.minimum(held, batches * config.batch_size).sum() for batches in possible], dtype=float)
        growth = 0.5 if noise_is_memoryless(self.mechanism(config)) else 0.25
        return int(possible[np.argmax(used / possible**growth)])

    def asked_rounds(self, config: RunConfig, num_rounds: int) -> range:
        """Return the rounds in which clients are asked."""
        return range(1, num_rounds + 1)

    def releases_of(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> tuple[float, str]:
        """Return how many releases a simulated client can make, and what limits it.

        Parameters
        ----------
        samples : int
            Samples of the client.
        sizes : sequence of int
            Samples of all clients.
        """
        if config.max_participations:
            return config.max_participations, f"max-participations = {config.max_participations}"
        batches = self._batches(config, samples, sizes)
        often = f", each of them {config.passes} times" if config.passes > 1 else ""
        held = f"{min(samples, batches * config.batch_size)} samples in {batches} batches"
        return config.passes * batches, f"{held} of at most {config.batch_size}{often}"

    def _batches(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> int:
        """Return the number of batches into which a simulated client deals its samples."""
        if self.everybody or config.secure:
            return self.common_batches(config, sizes)
        return max(samples // config.batch_size, 1)

    def policy(self, problem: ResolvedRun, samples: int) -> PrivacyPolicy:
        """Return the policy that a simulation gives a client with so many samples.

        Under secure aggregation all clients have the same: what shares a sum has one noise.
        """
        config = problem.config
        separation = self._batches(config, samples, problem.sizes)
        mechanism = self.mechanism(config)
        schedule = problem.values.schedule if mechanism == "cancelling" and "mechanism.schedule" in self.keys else None
        # In a secret order a release has b samples on average if there is one for every b of them, asked for or not.
        cap = separation if config.shuffled_batches else min(problem.num_rounds, config.passes * separation)
        return self.client_policy(
            clip_norm=problem.values.clip_norm,
            batch_size=config.batch_size,
            max_participations=config.max_participations or cap,
            mu=config.mu,
            delta=config.delta,
            mechanism=mechanism,
            mechanism_options=() if self.trusted else config.mechanism_options,
            schedule=schedule,
            num_rounds=max(problem.num_rounds, config.max_participations or cap) if schedule == "paper" else None,
            clip_unit=config.clip_unit,
            sample_participations=config.passes,
            min_separation=separation if config.passes > 1 else 1,
            noise_quality=config.noise_quality,
            release_rule=config.release_rule,
            trust=config.trust_model,
            batch_selection="shuffled" if config.shuffled_batches else "once",
            sums=config.sums,
            **bounding(config, self.keys),
        )

    def client_policy(
        self,
        *,
        mechanism: str = "",
        clip_unit: str = "",
        release_rule: str = "acknowledged",
        trust: str = "",
        **fields: Any,
    ) -> PrivacyPolicy:
        """Return a client's policy, a simulated or a real one's.

        Who is trusted, and what is not the client's to choose.

        Parameters
        ----------
        mechanism, clip_unit : str
            Empty for this method's own.
        release_rule : str
            Taken where this method has none of its own.
        trust : str
            One of :attr:`trusts`; empty for this method's own.
        **fields
            The others of :class:`~murmurfl.privacy.PrivacyPolicy`.

        Raises
        ------
        ConfigurationError
            If this method does not serve that trust, or the policy is impossible.
        """
        if trust and trust not in self.trusts:
            raise refusal("trust", f"one of {', '.join(map(repr, self.trusts))} with strategy {self.name!r}", trust)
        if self.sums_samples:
            fields["batch_selection"] = "full_batch"
        return PrivacyPolicy(
            mechanism=mechanism or self.default_mechanism,
            clip_unit=clip_unit or self.clip_units[0],  # type: ignore[arg-type]
            release_rule=self.release_rule or release_rule,  # type: ignore[arg-type]
            trust=trust or self.own_trust,  # type: ignore[arg-type]
            **fields,
        )

    def release_size(self, problem: ResolvedRun) -> int:
        """Return the number of values in a release, by default the model's."""
        return problem.model.num_parameters

    def policy_of_model(self, model: Model) -> Mapping[str, Any]:
        """Fields of a client's policy that its model settles."""
        return {}

    def plans(self, problem: ResolvedRun) -> list[NoisePlan]:
        """Return the different noise plans of a simulation's clients."""
        policies = dict.fromkeys(self.policy(problem, size) for size in dict.fromkeys(problem.sizes))
        return [plan_or_largest_mu(policy, self.release_size(problem)) for policy in policies]

    def client(self, *parts: Any, **options: Any) -> PrivateClient:
        """Return the client, simulated or real; the arguments are those of :class:`~murmurfl.clients.PrivateClient`."""
        return self.client_type(*parts, **options)

    def client_options(self, problem: ResolvedRun, client: int) -> Mapping[str, Any]:
        """Return further constructor options of a simulated client."""
        return {"learning_rate": problem.values.learning_rate} if self.local_steps else {}

    def clients_alike(self) -> bool:
        """Return True if clients with equally many samples differ only in name, samples, ledger and keys."""
        return type(self).client_options is Method.client_options

    def strategy(self, problem: ResolvedRun, common: Mapping[str, Any], *, deployed: bool) -> ReleaseStrategy[Any]:
        """Return the server's half.

        Parameters
        ----------
        common : mapping
            Options that every strategy has.
        deployed : bool
            Whether the clients are real ones: a trusted server's noise key then comes from the operating system.
        """
        return self.strategy_type(**common, **self.strategy_options(problem), **self._server_keys(problem, deployed))

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        """Options of this method's strategy beside the common ones."""
        return {"diameter": problem.values.diameter} if "strategy.projection-radius" in self.keys else {}

    def _server_keys(self, problem: ResolvedRun, deployed: bool) -> Mapping[str, Any]:
        if not self.trusted:
            return {}
        return {
            "policy": self._policy_of_all(problem),
            "num_rounds": problem.num_rounds,
            "noise_keys": None if deployed else SimulatedKeys(problem.config.seed, _SERVER_NOISE),
        }

    def _policy_of_all(self, problem: ResolvedRun) -> PrivacyPolicy:
        """Return the one policy by which a trusted server makes its noise: it must hold for every client."""
        policies = [self.policy(problem, size) for size in dict.fromkeys(problem.sizes)]
        for name in _CHARGED:
            values = {getattr(policy, name) for policy in policies}
            if len(values) > 1:
                raise ConfigurationError(
                    f"Expected clients with one {name} under a trusted server, which makes one noise for all of them, "
                    f"got {sorted(values)} with strategy = {problem.config.strategy!r}: set everybody = True in the "
                    "method, or split the data evenly.",
                    kind="conflict",
                    setting=name,
                )
        return self.policy(problem, max(problem.sizes))

    def server_noise(self, config: RunConfig) -> str:
        """Return the noise that a trusted server adds: a mechanism's name, or ``fresh``."""
        return "fresh"

    def guarantee(
        self,
        problem: ResolvedRun,
        loss: Loss | float,
        *,
        min_honest: int | None = None,
        notes: Iterable[str] = (),
        words: str = "",
        stated: bool = False,
        brief: bool = False,
    ) -> Guarantee:
        """Return the guarantee of a loss, in the words of the policy that is used.

        Parameters
        ----------
        loss : Loss or float
            Of everything the run may release; infinite without noise, 0 if nobody is asked. Of a number, which is a mu,
            the worst case under secure aggregation is what the policy's plan says.
        min_honest : int, optional
            Under secure aggregation, h where it is not the run configuration's: real clients have their own.
        notes : iterable of str
            What the figure rests on.
        words : str
            What real clients say of themselves, in the place of the policy's words.
        stated : bool
            Whether the loss is what real clients state.
        brief : bool
            For the caption of many runs: without what differs from one to the next, such as the number of rounds.
        """
        policy, loss = self.policy(problem, max(problem.sizes)), as_loss(loss)
        if self.trusted:
            rounds = None if brief else problem.num_rounds
            amplified = None if brief else self.server_amplification(problem)  # of its own noise: real clients' too
            noise = self.server_noise(problem.config)
            return server_guarantee(policy, loss.mu, noise, rounds, notes=notes, stated=stated, amplified=amplified)
        words, amplified = self.brief_words(policy) if brief else words, None
        if not (brief or stated):  # real clients have their own order, or none
            policies = [self.policy(problem, size) for size in dict.fromkeys(problem.sizes)]
            amplified = worth_of_order(policies, self.release_size(problem))
        if policy.trust == SECURE and not loss.conditional:
            loss = Loss(loss.assumed, policy.plan(self.release_size(problem)).loss.worst_case)
        if min_honest is not None:
            policy = replace(policy, sums=SumAssumption(min_honest, max(min_honest, policy.sums.min_cohort)))
        return policy_guarantee(policy, loss, notes=notes, words=words, stated=stated, amplified=amplified)

    def server_amplification(self, problem: ResolvedRun) -> Amplification | None:
        """Return what secret batches make of a trusted server's epsilon; None where there are none."""
        return None

    def brief_words(self, policy: PrivacyPolicy) -> str:
        """Return a policy's words for the caption of many runs, which may differ in their number of rounds."""
        if policy.batch_selection != "full_batch":
            return policy.words
        often = f"every sample in up to {policy.participations} releases"
        return policy.words.replace(often, "every sample in every release")

    def objective(self, problem: ResolvedRun, parameters: Sequence[NDArray[Any]], loss: float) -> float:
        """Return the minimised objective, from the model's loss on the test set."""
        return loss

    def sweeps(self, config: RunConfig) -> bool:
        """Whether runs that differ in variant, mu and step alone can be made together (:mod:`murmurfl.app.papers`)."""
        return False

    def covers(self, config: RunConfig, prepare: Callable[[RunConfig], ResolvedRun]) -> bool:
        """Return True if the guarantee holds for a run's step: papers show steps that it does not hold for."""
        return True


BOUNDING = frozenset({"clipping", "clipping.stability", "samples-per-owner"})
"""The keys, of methods whose guarantee needs of a gradient only that it is no longer than S."""


class Bounds(Protocol):
    """The settings of clipping in a run configuration or an operator's file."""

    @property
    def clipping(self) -> str: ...

    @property
    def clip_stability(self) -> float: ...

    @property
    def samples_per_owner(self) -> int: ...


def bounding(config: Bounds, keys: Collection[str]) -> Mapping[str, Any]:
    """Fields of a policy that say how gradients are bounded; none for a method that does not read these keys."""
    if "clipping" not in keys:
        return {}
    usual = run_keys()["clipping.stability"].default
    if config.clipping != "automatic" and config.clip_stability != usual:
        raise refusal("clipping.stability", f"{usual} unless clipping = 'automatic'", config.clip_stability)
    bounds = {"clipping": config.clipping or "clip", "clip_stability": config.clip_stability}
    return {**bounds, "samples_per_owner": config.samples_per_owner}


def worth_of_order(policies: Iterable[PrivacyPolicy], num_parameters: int) -> Amplification | None:
    """Return the amplification by a secret order, for the client that gains least; None without a secret order.

    Notes
    -----
    **Formal guarantees.** The epsilon bounds what every client's releases show for replacement of one sample, as long
    as the orders stay secret.
    """
    known = list(dict.fromkeys(policies))
    if not all(policy.batch_selection == "shuffled" and policy.adds_noise for policy in known):
        return None
    return amplification_of_all([(policy, policy.plan(num_parameters)) for policy in known])


class AutoMethod(Method):
    """Stands for the method that is chosen where a run is worked out (:mod:`murmurfl.app.planning`).

    Nothing is ever run with it: :func:`~murmurfl.app.runs.experiment.prepare` puts the chosen one in its place.
    """

    name = AUTO
    sentence = "What `murmurfl plan` would choose, from clients, samples, mu and how often a sample may be used."
    keys = frozenset({"strategy.sample-uses", "strategy.stream"})
    mechanisms = ()
    uses_public = False
    client_type = Mu2Client
    strategy_type = Mu2
    trusts = ("untrusted-server", SECURE, "trusted-server")  # type: ignore[assignment]

    def check(self, config: RunConfig) -> None:
        super().check(config)
        for name, value, usual in (("passes", config.passes, 1), ("max_participations", config.max_participations, 0)):
            if value != usual:
                expected = f"{usual} with strategy = {AUTO!r}, which settles it by strategy.sample-uses and num-rounds"
                raise refusal(name, expected, value)


def refuse_unsettled() -> ConfigurationError:
    """Refuse ``auto`` where operators' files fix the strategy."""
    return ConfigurationError(
        "Expected a strategy on real nodes, got strategy = 'auto': operators' files name the strategy that they serve. "
        "Decide first, with `murmurfl plan --clients M --samples N --epsilon E`, and set what it prints in the run "
        "configuration and in the operators' files.",
        kind="conflict",
        setting="strategy",
    )
