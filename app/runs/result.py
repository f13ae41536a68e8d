"""Where a run stands after a round, and what came out of it in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ...privacy import Forecast, Guarantee
from ...privacy.machine.clipping_figures import TrainingFigures
from ...strategies import EvaluationResult, ReleaseStrategy, RoundReport
from .experiment import Experiment
from .run_guarantees import Figures, epsilon_of, run_guarantee


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round.

    Parameters
    ----------
    report : RoundReport
    num_rounds : int
    loss, accuracy, auc : float or None
        Of the central evaluation, in rounds that have one; the area under the ROC curve where there are two classes.
    mu, epsilon : float
        The guarantee of the whole run.
    mu_local, epsilon_local : float or None
        Under secure aggregation, what holds whatever server, helpers and other machines do.
    seconds_left : float or None
        Until the last round, if the others take as long as those after the first; None after the first, which waits
        for the machines to start.
    machines : mapping
        The machines that were asked, and of each the number of its release that was aggregated, or None.
    """

    report: RoundReport
    num_rounds: int
    loss: float | None
    accuracy: float | None
    mu: float
    epsilon: float
    seconds_left: float | None = None
    machines: Mapping[str, int | None] = field(default_factory=dict)
    mu_local: float | None = None
    epsilon_local: float | None = None
    auc: float | None = None


@dataclass(frozen=True)
class FeatureMean:
    """What a run with centring saw samples from.

    Parameters
    ----------
    centre : ndarray of shape (k,), float32
        The mean of the features, as machines released it.
    constant : float
        What was appended to features seen from there (:func:`murmurfl.privacy.centred`).
    report : RoundReport
        Of the round in which machines released it.
    """

    centre: NDArray[Any]
    constant: float
    report: RoundReport


@dataclass(frozen=True)
class RunResult:
    """What came out of a run.

    Parameters
    ----------
    experiment : Experiment
    strategy : ReleaseStrategy
        After its last round.
    parameters : list of ndarray
        The published model.
    progress : list of Progress
        One a round.
    statements : mapping
        What each machine says it has spent, by name.
    mu, epsilon : float
        The guarantee, at the configuration's delta.
    seconds : float
        Wall-clock time of the rounds.
    online : dict or None
        Cumulative loss and regrets, where they were computed
        (:meth:`murmurfl.app.runs.online_losses.OnlineLosses.document`).
    deployed : bool
        Whether the machines were real ones.
    training : dict of int to TrainingFigures
        What clipping did in each round of a simulation: not private.
    gradient_norms : dict or None
        The norms of the training loss's gradient, where they were asked for: ``rounds`` and ``values``.
    engine : str
        What carried the messages: ``cohort``, ``inprocess``, ``ray`` or ``real-nodes``; empty for a grid of one's own.
    device : str
        Which of PyTorch's devices computed gradients and noise; empty for NumPy.
    mu_local : float or None
        Under secure aggregation, what holds whatever server, helpers and other machines do; None under another trust.
    min_honest, min_cohort : int or None
        Under secure aggregation, h, which mu rests on, and the fewest releases of a sum.
    mean : FeatureMean or None
        With centring, what the model's inputs were seen from: whoever uses the model needs it.
    evaluation : EvaluationResult or None
        With a private evaluation, how good the model is on the machines' samples.
    evaluation_failure : str
        Why there is none, though it was asked for.

    Notes
    -----
    ``mu`` is what everything the run released guarantees, in simulation by the policies of the run configuration, on
    real machines by what they state; :attr:`guarantee` says of what and against whom. Nothing here is more than the
    server knows, but for ``training``, ``gradient_norms`` and ``online``, which only a simulation has and which are
    marked as not private where they are written.
    """

    experiment: Experiment
    strategy: ReleaseStrategy[Any]
    parameters: list[NDArray[Any]]
    progress: list[Progress]
    statements: Mapping[str, Mapping[str, Any]]
    mu: float
    epsilon: float
    seconds: float
    online: dict[str, Any] | None = None
    deployed: bool = False
    gradient_norms: dict[str, Any] | None = None
    training: Mapping[int, TrainingFigures] = field(default_factory=dict)
    engine: str = ""
    device: str = ""
    mu_local: float | None = None
    min_honest: int | None = None
    min_cohort: int | None = None
    mean: FeatureMean | None = None
    evaluation: EvaluationResult | None = None
    evaluation_failure: str = ""

    @property
    def guarantee(self) -> Guarantee:
        """What the run guarantees, in figures and words; no epsilon is shown without it."""
        figures = Figures(self.mu, self.mu_local, self.min_honest, self.min_cohort)
        return run_guarantee(self.experiment, figures, deployed=self.deployed, statements=self.statements)

    @property
    def forecast(self) -> Forecast | None:
        """How much of the model was likely to be noise, as it was said before the first round; None without noise."""
        return self.strategy.forecast

    @property
    def epsilon_local(self) -> float | None:
        """Of :attr:`mu_local`, at the configuration's delta."""
        return epsilon_of(self.mu_local, self.experiment.config.delta)

    @property
    def accuracy(self) -> float | None:
        """On the test set, after the last round; None where the model has none."""
        return next((p.accuracy for p in reversed(self.progress) if p.accuracy is not None), None)

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve, as :attr:`accuracy`; None unless there are two classes."""
        return next((p.auc for p in reversed(self.progress) if p.auc is not None), None)

    @property
    def loss(self) -> float:
        """On the test set, after the last round."""
        return float(next(p.loss for p in reversed(self.progress) if p.loss is not None))
