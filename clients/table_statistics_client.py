"""Private statistics of a table as a run of its own, the machine's half: one release, and nothing after it.

Beside a training they are a side release (:class:`~murmurfl.clients.Counting`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, PrivacyPolicy, protocol
from .adapters.per_sample_gradients import PerSampleGradients
from .adapters.private_model import MachineModel
from .messages.requests import Request
from .private_client import PrivateClient
from .records.schema import Schema
from .side.evaluation_client import Measure
from .side.statistics_client import TableRows, check_statistics_policy


class StatisticsClient(PrivateClient):
    """A machine that releases statistics of its records, for :class:`~murmurfl.strategies.Statistics`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`; :class:`TableRows` takes the place of the
    gradients, and the policy is a :func:`~murmurfl.privacy.statistics_policy`.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the one release of a session is mu-GDP, those of all sessions
    budget_mu-GDP, for replacement of one record, whatever stands in its cells.
    Proof: docs/proofs/sensitivities.md.
    """

    query_points: ClassVar[int] = 0
    summable: ClassVar[bool] = True
    centres: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.machine.fits = None  # what a model cannot take has its places all the same

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        check_statistics_policy(policy)

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        if not isinstance(gradients, TableRows):
            raise ConfigurationError(f"Expected TableRows for statistics, got {type(gradients).__name__}.")

    def batch(self, request: Request, samples: slice) -> NDArray[np.float64]:
        """The places of a slice of the records."""
        rows: Any = self.gradients
        return rows.places.batch(self.samples, samples)

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """The rows of records with these places, row i from record i alone."""
        return self.gradients((), samples)

    def public_entries(self, of: str) -> dict[str, Any]:
        return {**super().public_entries(of), protocol.NOISE_STD: float(self.machine.plan.noise_std)}


def statistics_model(schema: Schema) -> MachineModel:
    """The rows of a table's statistics in the place of an app's model."""

    def check_schema(found: Schema, measure: Measure | None) -> None:  # noqa: ARG001 - an app's interface
        if TableRows(found).rows != rows.rows:
            raise ConfigurationError(
                "Expected the columns that the app's statistics are of, got a schema with others: use one schema.toml."
            )

    rows = TableRows(schema)
    return MachineModel(rows, ("statistics",), check_schema, schema=schema)
