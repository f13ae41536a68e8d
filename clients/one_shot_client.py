"""Clients of a single release, asked at no point: what it says depends on their samples alone.

* **One shot**: the second moments of all samples. The client hands features and marks of classes to the client of
  releases (:mod:`murmurfl.privacy.release.clipping`), which bounds them and makes rows of them by itself.
* **Statistics** of a table, as a run of its own. Beside a training they are another query
  (:class:`~murmurfl.clients.Counting`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.errors import ConfigurationError
from ..privacy.ledger.ledger_records import Ledger
from ..privacy.mechanisms import noise_is_memoryless
from ..privacy.noise import NoiseKeys
from ..privacy.release.clipping import Moments
from ..privacy.release.policy import NO_NOISE, PrivacyPolicy
from ..privacy.release.prefix_sums import RowCache
from ..privacy.sums.masking import Masking
from .adapters.per_sample_gradients import PerSampleGradients, Samples
from .messages import Request
from .private_client import PrivateClient
from .queries import ClientQuery
from .records.places import TableRows


class LabelledFeatures:
    """The rows of a release of moments: each sample's features, a constant where there is one, a mark at its class.

    It takes the place of a model's :class:`~murmurfl.clients.PerSampleGradients`. Labels count from 0; a ``constant``
    above 0 is appended to the features, so that the model gets a bias.

    Examples
    --------
    >>> LabelledFeatures(num_features=64, num_classes=10).shapes
    [(2656,)]
    """

    def __init__(self, num_features: int, num_classes: int, constant: float = 0.0) -> None:
        if not (math.isfinite(constant) and constant >= 0):
            raise ConfigurationError(
                f"Expected constant >= 0 and finite, got {constant!r}.",
                kind="out-of-range",
                setting="constant",
                got=constant,
            )
        self.num_features = num_features
        self.num_classes = num_classes
        self.constant = float(constant)
        self.shapes = [(Moments(num_classes).num_values(num_features + (constant > 0)),)]

    def __call__(self, parameters: Any, samples: Any) -> NDArray[np.float64]:
        """Features and marks, shape (b, k + C); a label that is no class has no mark."""
        features = np.asarray(samples[0], dtype=np.float64)
        marks = np.asarray(samples[1])[:, None] == np.arange(self.num_classes)
        columns = [features, np.full((len(features), 1), self.constant)] if self.constant else [features]
        return np.concatenate([*columns, marks], axis=1)


class OneShotClient(PrivateClient):
    """A client of one release, for :class:`~murmurfl.strategies.OneShot`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`; :class:`LabelledFeatures` takes the place of the
    gradients. The policy's ``clip_unit`` must be ``moments``, its mechanism ``independent`` (or ``none``).

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the one release of a session is mu-GDP, those of all sessions
    budget_mu-GDP, for replacement of one sample. Whatever features and marks it is handed,
    :class:`~murmurfl.privacy.Privatizer` bounds them and makes the rows.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import LabelledFeatures
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> class Rows:
    ...     def __len__(self):
    ...         return 20
    ...     def __getitem__(self, samples):
    ...         return np.ones((20, 3))[samples], np.zeros(20, dtype=int)[samples]
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=1, max_participations=1, mu=1.0, mechanism="independent",
    ...     release_rule="paper", batch_selection="full_batch", clip_unit="moments", classes=2,
    ... )
    >>> rows = LabelledFeatures(num_features=3, num_classes=2)
    >>> client = OneShotClient(rows, Rows(), policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.statement("session")["max-participations"]
    1
    """

    query_points: ClassVar[int] = 0
    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.mechanism != NO_NOISE and not noise_is_memoryless(policy.mechanism):
            raise ConfigurationError(
                f"Expected mechanism 'independent' for one shot, got {policy.mechanism!r}.",
                kind="conflict",
                setting="mechanism",
                got=policy.mechanism,
            )
        if policy.clip_unit != "moments":
            raise ConfigurationError(
                f"Expected clip_unit 'moments' for one shot, got {policy.clip_unit!r}.",
                kind="conflict",
                setting="clip_unit",
                got=policy.clip_unit,
            )

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        classes = getattr(gradients, "num_classes", None)
        if classes != policy.classes:
            raise ConfigurationError(
                f"Expected as many classes as the policy has, {policy.classes}, got {classes} of LabelledFeatures.",
                kind="mismatch",
                setting="classes",
            )

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """Features and marks of a batch, row i from sample i alone."""
        return self.gradients((), samples)


class StatisticsClient(PrivateClient):
    """A client that releases statistics of its records, for :class:`~murmurfl.strategies.Statistics`.

    Parameters
    ----------
    gradients : TableRows
        The public places of the columns, in place of a model's gradients.
    samples : Samples
        The client's records.
    policy : PrivacyPolicy
        A :func:`~murmurfl.privacy.statistics_policy`.
    ledger : Ledger
        Where the release is recorded before it leaves.
    keys : NoiseKeys
        The client's noise key.
    name : str
        The client's public name, such as its partition id.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.Privatizer`).
    masking : Masking, optional
        The client's masks; required under ``trust="secure-aggregation"``, and refused otherwise.
    queries : sequence of ClientQuery
        What it answers in addition to the training (:class:`~murmurfl.clients.PrivateClient`).

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the one release of a session is mu-GDP, those of all sessions
    budget_mu-GDP, for replacement of one record, whatever stands in its cells.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import Column, Label, Request, Schema, TableRows
    >>> from murmurfl.privacy import MemoryLedger, SimulatedKeys, statistics_policy
    >>> age = Column(kind="integer", bounds=(0, 120))
    >>> rows = TableRows(Schema(label=Label(column="ill", classes=("no", "yes")), columns={"age": age}))
    >>> places = np.array([rows.places.of({"age": "44", "ill": "no"}), rows.places.of({"age": "61", "ill": "yes"})])
    >>> policy = statistics_policy(mu=0.5)
    >>> client = StatisticsClient(rows, places, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> release = client.release(Request(server_round=1, session="s", ack=0, query_points=()))
    >>> release.values.shape == (rows.rows.width,), release.samples
    (True, 2)
    """

    query_points: ClassVar[int] = 0
    summable: ClassVar[bool] = True
    takes_inputs: ClassVar[bool] = False
    answers_queries: ClassVar[bool] = False

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        rows: RowCache | None = None,
        masking: Masking | None = None,
        queries: Sequence[ClientQuery] = (),
    ) -> None:
        super().__init__(
            gradients,
            samples,
            policy,
            ledger,
            keys,
            name=name,
            rows=rows,
            masking=masking,
            queries=queries,
        )
        self.privatizer.fits = None  # what a model cannot take has its places all the same

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        if not isinstance(gradients, TableRows):
            raise ConfigurationError(
                f"Expected TableRows for statistics, got {type(gradients).__name__}.",
                kind="wrong-type",
                setting="gradients",
            )
        gradients.rows.check_policy(policy)

    def batch(self, request: Request, samples: slice) -> NDArray[np.float64]:
        """Return the places of a slice of the records."""
        rows: Any = self.gradients
        return rows.places.batch(self.samples, samples)

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """Return the rows of records with these places, row i from record i alone."""
        return self.gradients((), samples)

    def public_entries(self, of: str) -> dict[str, Any]:
        return {**super().public_entries(of), protocol.NOISE_STD: float(self.privatizer.plan.noise_std)}
