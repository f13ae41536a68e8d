"""What is planned for: a few numbers, or what a run's configuration comes to on its data (:mod:`.noise_plans`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...privacy import ConfigurationError, PrivacyPolicy, Trust, gdp_epsilon, gdp_mu
from ...privacy.machine.policy import ClipUnit, ReleaseRule
from ..runs.experiment import prepare
from ..settings.run_config import RunConfig
from ..settings.trust_settings import SECURE, cohort_floor, honest_machines


@dataclass(frozen=True)
class PlanRequest:
    """What is planned for.

    Parameters
    ----------
    machines : int
        M.
    samples : int
        Samples of each machine.
    rounds : int
        T.
    batch_size : int
        b, samples a release.
    epsilon, delta : float
        The guarantee wanted for one sample of one machine, over all its releases.
    per_round : int
        m, machines asked in a round.
    passes : int
        How often a machine goes through its samples.
    clip_norm : float
        S.
    parameters : int
        d.
    mu : float
        The same guarantee as Gaussian DP, where that was wanted; default what epsilon at delta allows.
    cap : int
        Most releases of a machine, where it is set; 0 for as many as rounds and samples allow.
    clip_unit, release_rule, trust, min_honest, min_cohort : str or int
        As in :class:`~murmurfl.privacy.PrivacyPolicy`.
    secret_order : bool
        Whether each sample draws its release.
    after_mean : bool
        Whether machines release the mean of their features before all that is planned here, with a part of mu^2 that
        is not in ``mu`` and ``epsilon``.
    samples_per_owner : int
        As in :class:`~murmurfl.privacy.PrivacyPolicy`; where it is not 0, samples are owners.
    """

    machines: int
    samples: int
    rounds: int
    batch_size: int
    epsilon: float
    delta: float
    per_round: int
    passes: int = 1
    clip_norm: float = 1.0
    parameters: int = 1000
    mu: float = 0.0
    cap: int = 0
    clip_unit: ClipUnit = "sample"
    release_rule: ReleaseRule = "acknowledged"
    trust: Trust = "untrusted-server"
    min_honest: int = 1
    min_cohort: int = 1
    secret_order: bool = False
    after_mean: bool = False
    samples_per_owner: int = 0

    def __post_init__(self) -> None:
        if not self.mu:
            object.__setattr__(self, "mu", gdp_mu(self.epsilon, self.delta))
        for name in ("machines", "samples", "rounds", "batch_size", "per_round", "passes", "parameters"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Expected {name} >= 1, got {getattr(self, name)}.")
        if self.per_round > self.machines:
            raise ConfigurationError(f"Expected per_round <= machines = {self.machines}, got {self.per_round}.")
        if self.batch_size > self.samples:
            raise ConfigurationError(
                f"Expected batch_size <= the {self.samples} samples of a machine, got {self.batch_size}."
            )

    def check_rounds(self) -> None:
        """Refuse more rounds than the machines' samples last for, however their turns are drawn; as a run would.

        Raises
        ------
        ConfigurationError
            With the number of rounds that is possible.
        """
        possible = self.machines * self.passes * self.separation // self.per_round
        if self.rounds > possible:
            often = f", each {self.passes} times" if self.passes > 1 else ""
            raise ConfigurationError(
                f"Expected rounds <= {possible}, got {self.rounds}: {self.samples} samples in batches of "
                f"{self.batch_size}{often} last for {self.passes * self.separation} releases of a machine, and so many "
                f"rounds ask each for {self.rounds * self.per_round / self.machines:.4g}. Use fewer rounds, smaller "
                "batches, more passes, or ask fewer machines a round."
            )

    @property
    def separation(self) -> int:
        """Releases of one pass."""
        return self.samples // self.batch_size

    @property
    def releases(self) -> int:
        """K, the most releases of a machine."""
        return self.cap or (self.separation if self.secret_order else min(self.rounds, self.passes * self.separation))

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums."""
        return self.trust == SECURE

    def trusting(self, trust: Trust) -> PlanRequest:
        """The same under another trust model; for sums with h as set or, where none is, half of a round's machines."""
        numbers = {"min_honest": self.min_honest, "min_cohort": self.min_cohort}
        if trust != SECURE:
            numbers = {"min_honest": 1, "min_cohort": 1}
        elif not self.secure:
            floor = cohort_floor(self.per_round, 0)
            numbers = {"min_honest": honest_machines(self.per_round, floor, -1), "min_cohort": floor}
        return replace(self, trust=trust, **numbers)

    def policy(self, mechanism: str, options: dict[str, str]) -> PrivacyPolicy:
        """A machine's policy."""
        paper = options.get("schedule") == "paper"
        return PrivacyPolicy(
            clip_norm=self.clip_norm,
            batch_size=self.batch_size,
            max_participations=self.releases,
            mu=self.mu,
            delta=self.delta,
            mechanism=mechanism,
            mechanism_options=options,
            num_rounds=max(self.rounds, self.releases) if paper else None,
            sample_participations=self.passes,
            min_separation=self.separation if self.passes > 1 else 1,
            clip_unit=self.clip_unit,
            release_rule=self.release_rule,
            trust=self.trust,
            min_honest=self.min_honest,
            min_cohort=self.min_cohort,
            samples_per_owner=self.samples_per_owner,
            order="secret" if self.secret_order and self.trust != "trusted-server" else "in-turn",
        )


def request_of(config: RunConfig, *, check_rounds: bool = True) -> PlanRequest:
    """What a run asks for: its machine with the most samples, its clip norm and its model, on its data.

    Parameters
    ----------
    config : RunConfig
    check_rounds : bool
        Whether more rounds than its machines' samples last for are refused.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible, or its machines release no stream with noise of their own.
    """
    experiment = prepare(config)
    policy = experiment.policy()
    if not policy.adds_noise or "batch-size" not in experiment.method.keys:
        got = f"strategy = {config.strategy!r}" + ("" if config.private else f", mechanism = {config.mechanism!r}")
        raise ConfigurationError(
            f"Expected machines that add noise to a stream of releases, each of a batch, got {got}: a plan compares "
            "mechanisms for such noise."
        )
    if check_rounds:
        experiment.check_rounds()
    return PlanRequest(
        machines=config.num_clients,
        # Machines that share sums all have the cap of the one with the fewest samples.
        samples=min(experiment.sizes) if config.secure else max(experiment.sizes),
        rounds=experiment.num_rounds,
        batch_size=config.batch_size,
        # With centring what is left for the stream, after the mean of the features.
        epsilon=gdp_epsilon(policy.mu, config.delta),
        delta=config.delta,
        per_round=config.asked_per_round,
        passes=config.passes,
        clip_norm=experiment.values.clip_norm,
        parameters=experiment.method.release_size(experiment),
        mu=policy.mu,
        cap=config.max_participations,
        clip_unit=policy.clip_unit,
        release_rule=policy.release_rule,
        trust=policy.trust,
        min_honest=policy.min_honest,
        min_cohort=policy.min_cohort,
        secret_order=config.secret_order,
        after_mean=experiment.is_centred,
        samples_per_owner=policy.samples_per_owner,
    )
