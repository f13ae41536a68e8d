"""Hooks between the rounds of a training, in a list that users extend.

No guarantee depends on a callback. What does (checkpoints, acknowledgements, permits, noise) belongs to the rounds
themselves, and no callback can change its order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ...privacy.accounting.guarantee import Statements
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.errors import ConfigurationError
from ..rounds.replies import DirectReplies, RoundReport
from ..sums.secure_aggregation import SecureAggregation


class Training(Protocol):
    """View of a training for callbacks: a strategy between two rounds."""

    @property
    def num_clients(self) -> int:
        """M, clients of the training."""
        ...

    @property
    def clients_per_round(self) -> int:
        """Clients that a round asks."""
        ...

    @property
    def history(self) -> Sequence[RoundReport]:
        """Reports of the rounds that are over."""
        ...

    @property
    def participation(self) -> Mapping[str, int | None]:
        """Number of the release aggregated of each client that the last round asked, or None."""
        ...

    @property
    def stated(self) -> Statements:
        """Statement of each client before the first round."""
        ...

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the noise in the model; None without noise."""
        ...

    @property
    def secure_aggregation(self) -> SecureAggregation | None:
        """Options of secure aggregation; None where sums are not masked."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether the clients are known to be simulated; False where nobody can tell."""
        ...

    @property
    def ended(self) -> str:
        """Reason for which the training ended before its last round; empty if it did not."""
        ...

    @property
    def excluded(self) -> Collection[str]:
        """Names of the clients that are excluded now."""
        ...

    def ask_privacy(self, grid: Grid | DirectReplies, timeout: float | None = None) -> Mapping[str, Mapping[str, Any]]:
        """Return what each client states about its privacy now."""
        ...


class Callback:
    """Base class for what a training calls between its rounds; every hook does nothing by default.

    Pass callbacks to a strategy as ``callbacks=[...]``. Hooks are called in the order of the list. A hook that raises
    ends the training, which goes on from its checkpoint when it is started again.

    A ``training`` is read as far as :class:`Training` goes. With a trusted server it leads to sums without noise as
    well, and so does the grid: there only ``arrays`` and ``result`` may be shown to anybody.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, MetricRecord
    >>> class GoodEnough(Callback):
    ...     accuracy = 0.0
    ...     def evaluate(self, training, server_round, arrays):
    ...         self.accuracy = float(np.mean(arrays.to_numpy_ndarrays()[0] > 0))  # your own, on public data
    ...         return MetricRecord({"accuracy": self.accuracy})
    ...     def should_stop(self, training, server_round):
    ...         return self.accuracy > 0.95
    >>> good_enough = GoodEnough()  # Mu2(learning_rate=0.1, callbacks=[good_enough])
    >>> metrics = good_enough.evaluate(None, 1, ArrayRecord([np.ones(3)]))
    >>> good_enough.should_stop(None, 1)
    True
    """

    handles_no_progress: ClassVar[bool] = False
    """Whether this callback decides what becomes of a training in which no release is aggregated; without such a
    callback it ends with :class:`~murmurfl.strategies.NothingAggregatedError`."""

    def on_start(self, training: Training, grid: Grid | DirectReplies, num_rounds: int) -> None:
        """Note that a training begins, or goes on from its checkpoint; clients have been asked for statements."""

    def on_forecast(self, training: Training, forecast: Forecast) -> Forecast | None:
        """Return a forecast of the noise to log in place of this one, or None to keep it."""
        return None

    def exclude(self, training: Training) -> Collection[str]:
        """Return names of clients that the next round must not ask, in addition to those of the strategy's options."""
        return ()

    def should_stop(self, training: Training, server_round: int) -> bool:
        """Return True if the training should end after this round, whose model has been evaluated where it is."""
        return False

    def evaluate(self, training: Training, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return metrics of the model published after a round, on data that are not private; round 0 is the start."""
        return None

    def after_round(self, training: Training, report: RoundReport, metrics: MetricRecord | None) -> None:
        """Take note of a round: its report, and the metrics of the model where it was evaluated."""

    def on_end(self, training: Training, grid: Grid | DirectReplies, result: Result) -> None:
        """Take note of the end of a training that went well."""


class CallbackList(Callback):
    """Callbacks as one, which calls the hooks of all in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    @property
    def evaluates(self) -> bool:
        """Whether any callback evaluates the model."""
        return any(type(one).evaluate is not Callback.evaluate for one in self._callbacks)

    @property
    def handles_no_progress(self) -> bool:  # type: ignore[override]
        """Whether any callback decides what becomes of a training without progress."""
        return any(one.handles_no_progress for one in self._callbacks)

    def on_start(self, training: Training, grid: Grid | DirectReplies, num_rounds: int) -> None:
        for one in self._callbacks:
            one.on_start(training, grid, num_rounds)

    def on_forecast(self, training: Training, forecast: Forecast) -> Forecast:
        for one in self._callbacks:
            forecast = one.on_forecast(training, forecast) or forecast
        return forecast

    def exclude(self, training: Training) -> Collection[str]:
        return {name for one in self._callbacks for name in one.exclude(training)}

    def should_stop(self, training: Training, server_round: int) -> bool:
        asked = [one.should_stop(training, server_round) for one in self._callbacks]  # each of them is called
        return any(asked)

    def evaluate(self, training: Training, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        found = [one.evaluate(training, server_round, arrays) for one in self._callbacks]
        metrics = [record for record in found if record is not None]
        if len(metrics) < 2:
            return metrics[0] if metrics else None
        return MetricRecord({name: value for record in metrics for name, value in record.items()})

    def after_round(self, training: Training, report: RoundReport, metrics: MetricRecord | None) -> None:
        for one in self._callbacks:
            one.after_round(training, report, metrics)

    def on_end(self, training: Training, grid: Grid | DirectReplies, result: Result) -> None:
        for one in self._callbacks:
            one.on_end(training, grid, result)


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is no list of callbacks."""
    wrong = (
        callbacks
        if isinstance(callbacks, Callback)
        else next((c for c in callbacks if not isinstance(c, Callback)), None)
    )
    if wrong is not None:
        raise ConfigurationError(
            f"Expected callbacks to be a list of Callback objects, got {type(wrong).__name__}: write callbacks=[...] "
            "with objects of subclasses of murmurfl.strategies.Callback.",
            kind="wrong-type",
            setting="callbacks",
        )
