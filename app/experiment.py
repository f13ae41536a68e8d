"""A run configuration worked out on its data, with the machines and the strategy that its method makes of it.

The same code serves every engine: in simulation an engine builds the machines here, with policies from the run
configuration; on real nodes only the strategy is built, and the machines come from their operators' files.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy.typing import NDArray

from ..clients import Centring, PrivateClient
from ..privacy import (
    ConfigurationError,
    Ledger,
    NoisePlan,
    PrivacyPolicy,
    RowCache,
    SimulatedKeys,
    centred,
    divided_mu,
)
from ..privacy.masking import Masking
from ..privacy.roster import MachineKey, Roster
from ..strategies import MeanOfFeatures, ReleaseStrategy, SecureAggregation
from .centring import beside_mean, features_bound, is_centred, make_centring
from .config import RunConfig
from .methods import METHODS, Method, Problem
from .methods.largest_mu import plan_or_largest_mu
from .methods.presets import feature_bound
from .models import make_model
from .rounds import Shortage, refuse_closed, refuse_shortage, replies_left, shortage
from .tasks.loading import load_dataset, load_shards
from .trust import SECURE, helper_names

_FOR_EVER = 2**31
"""Rounds in which helpers are waited for, where that is never given up."""


class Experiment(Problem):
    """A problem and its method: everything that both sides need before the first round. Parameters are Problem's."""

    @cached_property
    def method(self) -> Method:
        """The method of its configuration."""
        return METHODS[self.config.strategy]

    @property
    def asked_rounds(self) -> range:
        """The rounds in which machines are asked."""
        return self.method.asked_rounds(self.config, self.num_rounds)

    def policy(self, machine: int | None = None) -> PrivacyPolicy:
        """The policy an engine gives a simulated machine; None for the machine with the most samples."""
        size = max(self.sizes) if machine is None else self.sizes[machine]
        # Machines with as many samples have the same policy; a simulation builds a machine for every message.
        if size not in self._policies:
            policy = self.method.policy(self.trained, size)
            self._policies[size] = beside_mean(policy, self.config.mu) if self.is_centred else policy
        return self._policies[size]

    @cached_property
    def is_centred(self) -> bool:
        """Whether machines release the mean of their features first."""
        return is_centred(self.config)

    @cached_property
    def trained(self) -> Problem:
        """What the method is about: everything but the mean of the features, with what mu^2 is left for it."""
        if not self.is_centred:
            return self
        return Problem(trained_config(self.config), self.data, self.shards, self.model, self.num_rounds, self.values)

    @cached_property
    def centring(self) -> Centring | None:
        """The centring of every simulated machine, the same for all; None without."""
        if not self.is_centred:
            return None
        config, num_features = self.config, self.model.num_features - 1
        bound = features_bound(config.task, config.features, num_features, feature_bound(config))
        return make_centring(self.policy(), bound, num_features, mu=config.mu, share=config.centring_share)

    @cached_property
    def mean_plan(self) -> NoisePlan | None:
        """The noise of the mean of the features; None without centring."""
        if self.centring is None:
            return None
        return plan_or_largest_mu(self.centring.policy, self.centring.num_features)

    @cached_property
    def _policies(self) -> dict[int, PrivacyPolicy]:
        return {}

    @cached_property
    def shortage(self) -> Shortage | None:
        """The simulated machine that is asked once too often first, if one is."""
        return shortage(self.method, self, self.num_rounds)

    def check_rounds(self) -> None:
        """Refuse more rounds than samples and caps of simulated machines allow.

        Without ``num-rounds`` a run is one pass over all samples, in which one machine may use up its samples before
        others do. That is allowed, and :func:`~murmurfl.app.run.run_experiment` says so. With ``run-dry`` everything
        is.

        Raises
        ------
        ConfigurationError
            With the number of rounds that is possible.
        """
        config, found = self.config, self.shortage
        if found is not None and not config.run_dry and (config.num_rounds or config.max_participations):
            raise refuse_shortage(self.method, self, found)
        refuse_closed(self, self.replies_left)

    @cached_property
    def replies_left(self) -> list[int]:
        """How many replies each round that asks will have, as far as is known; empty where no round can stay closed."""
        return replies_left(self.method, self) if self.config.secure and self.config.lost_replies else []

    def plans(self) -> list[NoisePlan]:
        """The different noise plans of the machines."""
        return self.method.plans(self.trained)

    @cached_property
    def roster(self) -> Roster:
        """The machines and helpers of a simulation under secure aggregation; their keys are the seed's.

        Raises
        ------
        ConfigurationError
            Under another trust model.

        Notes
        -----
        **Formal guarantees.** None: whoever knows the seed knows every key. Real machines have rosters of their own.
        """
        if not self.config.secure:
            raise ConfigurationError(f"Expected trust = {SECURE!r} for a roster, got {self.config.trust_model!r}.")
        machines = tuple(str(machine) for machine in range(self.config.num_clients))
        return Roster.simulated(self.config.seed, machines, helper_names(self.config.helpers))

    def masking(self, machine: int) -> Masking:
        """A simulated machine's masks.

        Raises
        ------
        ConfigurationError
            Under another trust model than secure aggregation.

        Notes
        -----
        **Formal guarantees.** None, as of :attr:`roster`.
        """
        name = str(machine)
        return Masking(name, MachineKey.simulated(self.config.seed, name), self.roster)

    def client(
        self, machine: int, ledger: Ledger, rows: RowCache | None = None, *, masked: bool = False
    ) -> PrivateClient:
        """A simulated machine, with seeded keys. For engines only.

        Parameters
        ----------
        machine : int
        ledger : Ledger
        rows : RowCache, optional
            Of noise rows.
        masked : bool
            Whether it hides its releases under secure aggregation, as it must where it answers messages. Masks cancel
            exactly, so an engine without messages leaves them out.
        """
        name = str(machine)
        keys = SimulatedKeys(self.config.seed, name)
        parts = (self.model, self.shards[machine], self.policy(machine), ledger, keys)
        options = dict(self.method.client_options(self.trained, machine))
        if self.centring is not None:
            options["centring"] = self.centring
        if masked and self.config.secure:
            options["masking"] = self.masking(machine)
        return self.method.client(*parts, name=name, rows=rows, **options)

    def strategy(
        self, *, deployed: bool = False, centre: NDArray[np.float32] | None = None, **options: Any
    ) -> ReleaseStrategy[Any]:
        """The server's half.

        Parameters
        ----------
        deployed : bool
            For real machines. Then the session has a fresh random name, because their ledgers know every session they
            ever took part in, and a trusted server's noise key comes from the operating system.
        centre : ndarray, optional
            What machines see their samples from (:meth:`mean_strategy`).
        **options
            The strategy's own.
        """
        config, values = self.config, self.values
        common = {
            "num_clients": config.num_clients,
            "clients_per_round": config.clients_per_round,
            "learning_rate": values.learning_rate,
            "seed": config.seed,
            "sampling": values.sampling,
            "session": None if deployed else self.session,
            "largest_value": max(plan.largest_value for plan in self.plans()),
            "node_deadline_s": config.node_deadline_s,
            # What simulated machines can do is known without asking them.
            "run_dry": config.run_dry or not deployed,
            **({} if centre is None else {"centre": centre}),
            **self._summation(deployed),
            **options,
        }
        return self.method.strategy(self.trained, common, deployed=deployed)

    def mean_strategy(self, *, deployed: bool = False, checkpoint: Path | None = None) -> MeanOfFeatures:
        """The server's half of the mean of the features, which comes before the training.

        Raises
        ------
        ConfigurationError
            Without centring.
        """
        if self.centring is None or self.mean_plan is None:
            raise ConfigurationError("Expected centring = 'private' for a mean of features, got a run without.")
        return MeanOfFeatures(
            num_features=self.centring.num_features,
            num_clients=self.config.num_clients,
            seed=self.config.seed,
            session=None if deployed else hashlib.sha256(f"mean, seed {self.config.seed}".encode()).hexdigest()[:32],
            largest_value=self.mean_plan.largest_value,
            node_deadline_s=self.config.node_deadline_s,
            checkpoint=checkpoint,
            **self._summation(deployed),
        )

    def seen_from(self, centre: NDArray[np.float32]) -> Experiment:
        """The same, with what is evaluated on as machines see it; their own samples stay as they are."""
        if self.centring is None:
            raise ConfigurationError("Expected centring = 'private' for a centre, got a run without.")
        seen = partial(centred, centre=centre, constant=self.centring.constant)
        data = replace(self.data, test_features=seen(self.data.test_features))
        if self.config.gradient_norm:  # which a simulation computes from all samples
            data = replace(data, train_features=seen(data.train_features))
        return replace(self, data=data)

    def _summation(self, deployed: bool) -> dict[str, SecureAggregation]:
        """What a strategy is told of secure aggregation, if anything."""
        config = self.config
        if not config.secure:
            return {}
        told = SecureAggregation(
            min_cohort=config.cohort_floor,
            helpers=config.helpers,
            patience=config.give_up_after or _FOR_EVER,
            roster="" if deployed else self.roster.digest,
        )
        return {"secure_aggregation": told}

    def initial_arrays(self) -> ArrayRecord:
        """The public model training starts from, with the names of its parts."""
        parameters = self.model.initial_parameters(self.config.seed)
        record = ArrayRecord(parameters)
        return ArrayRecord(dict(zip(self.model.names, record.values(), strict=True)))

    def evaluate(self, arrays: ArrayRecord) -> MetricRecord:
        """What the method minimises, and the accuracy, on the test set, which is public."""
        parameters = arrays.to_numpy_ndarrays()
        loss, accuracy = self.model.evaluate(parameters, (self.data.test_features, self.data.test_labels))
        return MetricRecord({"loss": self.method.objective(self, parameters, loss), "accuracy": accuracy})

    def guaranteed_mu(self) -> float:
        """Mu of everything a run may release: the largest of its machines', or the trusted server's.

        Notes
        -----
        **Formal guarantees.** For replacement of one sample of one machine, over all releases the caps allow. With an
        untrusted server it holds against the server; with a trusted one, against everybody else. Infinite without
        noise, whatever the configured mu is.
        """
        if not self.asked_rounds:
            return 0.0  # nobody is asked
        if not self.config.private:
            return math.inf
        mean = 0.0 if self.mean_plan is None else self.mean_plan.mu
        if self.method.trusted:
            server: Any = self.strategy()
            return math.hypot(mean, server.guaranteed_mu(self.model.num_parameters))
        return math.hypot(mean, max(plan.mu for plan in self.plans()))

    def local_mu(self) -> float | None:
        """Mu_local of everything a machine may release, under secure aggregation; None under another trust model.

        Notes
        -----
        **Formal guarantees.** For replacement of one sample of one machine, over all releases the caps allow, whatever
        server, helpers and other machines do. Infinite without noise.
        """
        if not self.config.secure:
            return None
        if not self.asked_rounds:
            return 0.0
        mean = 0.0 if self.mean_plan is None else self.mean_plan.mu_local
        return math.hypot(mean, max(plan.mu_local for plan in self.plans())) if self.config.private else math.inf


def trained_config(config: RunConfig) -> RunConfig:
    """A run configuration with the mu that is left for the training, after that of the mean of the features."""
    if not is_centred(config):
        return config
    return replace(config, mu=divided_mu(config.mu, config.centring_share)[1])


@lru_cache(maxsize=2)
def prepare(config: RunConfig) -> Experiment:
    """Work out a run configuration on its data; cached, so every message of a simulation pays for it once.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible for these data; one line.
    """
    data, method = load_dataset(config), METHODS[config.strategy]
    shards = load_shards(config, data)
    inputs = data.num_features + is_centred(config)  # a constant beside the features that are seen from their mean
    model = make_model(config.model, inputs, data.num_classes, feature_bound(config))
    per_round = config.clients_per_round * config.batch_size
    num_rounds = config.num_rounds or config.passes * method.rounds_of_a_pass(config, [len(shard) for shard in shards])
    if num_rounds < 1:
        raise ConfigurationError(
            f"Expected at least one round in one pass, got {len(data.train_labels)} samples for clients-per-round x "
            f"batch-size = {per_round}."
        )
    if config.max_participations > num_rounds:
        raise ConfigurationError(
            f"Expected max-participations <= num-rounds = {num_rounds}, got {config.max_participations}."
        )
    values = method.preset(trained_config(config), num_rounds, model).overridden(config)
    return Experiment(config, data, shards, model, num_rounds, values)
