"""What an operator's file says of private centring, and what follows from it for the machine's model and its mu."""

from __future__ import annotations

from ...clients import Centring
from ...privacy import CENTRING_SHARE, PrivacyPolicy, divided_mu
from ..methods import Method
from ..methods.presets import feature_bound
from ..models import make_model
from ..models.model import Model
from ..runs.centring_settings import CENTRINGS, PRIVATE, features_bound, make_centring, without_being_asked
from ..settings.registry import registry
from ..settings.run_config import RunConfig


class CentredNode:
    """The part of an operator's file that centring is in; its fields are the file's."""

    strategy: str
    model: str
    mu: float
    task: str
    samples: str
    features: str
    feature_bound: float
    secret_order: bool
    centring: str
    centring_share: float
    centring_norm: float
    centring_nonnegative: bool
    private_evaluation: float

    @property
    def method(self) -> Method:
        """What the machine takes part in."""
        raise NotImplementedError

    def _check(self, name: str, holds: bool, expected: str) -> None:
        raise NotImplementedError

    def check_centring(self) -> None:
        """Refuse centring that the strategy cannot have, and keys of it that nothing reads."""
        able = self.method.centres and not self.secret_order
        self._check("centring", self.centring in (CENTRINGS if able else CENTRINGS[:2]), "'none' or empty here")
        self._check("centring_share", 0 < self.centring_share < 1, "a number > 0 and < 1")
        if not self.centred:
            self._check("centring_share", self.centring_share == CENTRING_SHARE, "unset without centring")
        own = self.centred and bool(self.samples)
        self._check("centring_norm", (self.centring_norm > 0) == own, "set with centring and `samples`, and only then")
        self._check("centring_nonnegative", own or not self.centring_nonnegative, "unset without centring of `samples`")

    @property
    def centred(self) -> bool:
        """Whether it releases the mean of its features first."""
        if self.centring or self.samples:
            return self.centring == PRIVATE
        return without_being_asked(self.strategy, self.features, secret_order=self.secret_order)

    @property
    def mean_share(self) -> float:
        """Of mu^2, for the mean of the features."""
        return self.centring_share if self.centred else 0.0

    @property
    def training_mu(self) -> float:
        """What of mu is for everything but the mean and an evaluation."""
        shares = self.mean_share + self.private_evaluation
        return divided_mu(self.mu, shares)[1] if shares else self.mu

    def centring_beside(self, policy: PrivacyPolicy, num_features: int) -> Centring:
        """The machine's centring, beside a policy of everything else."""
        bound = self.centring_norm, self.centring_nonnegative
        if self.task:
            bound = features_bound(self.task, self.features, num_features, self._feature_bound)
        return make_centring(policy, bound, num_features, mu=self.mu, share=self.centring_share)

    def make_model(self, num_features: int, num_classes: int) -> Model:
        # As a server has it that runs on the same features: with the constant beside what is seen from the mean.
        inputs = num_features + self.centred
        constant = self.centred or bool(getattr(registry("features")[self.features], "constant", False))
        return make_model(self.model, inputs, num_classes, self._feature_bound, constant=constant)

    @property
    def _feature_bound(self) -> float:
        return feature_bound(RunConfig(feature_bound=self.feature_bound))
