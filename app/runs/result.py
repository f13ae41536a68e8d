"""The result of a run: all that its own process has of it, and what of that it leaves."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import Forecast, Guarantee
from ...privacy.machine.clipping_figures import TrainingFigures
from ...privacy.machine.tables import NONE, PRIVATE
from ...strategies import EvaluationResult, FullBatch, ReleaseStrategy
from ...strategies.side.private_evaluation import EVALUATION_FIGURES
from ..methods.presets import constant_feature, feature_bound, the_task
from ..models.model import CENTRE_ARRAY, CONSTANT_ARRAY
from .alone import alone
from .experiment import Experiment
from .machine_statements import releases_made, stated
from .outcome import Alone, Outcome
from .progress import Progress
from .run_guarantees import Figures, epsilon_of, run_guarantee
from .run_summary import plot_accuracy, shown, shown_measure
from .side_releases import FeatureMean

if TYPE_CHECKING:
    from ..data.table_task import FittedTable
    from ..models.trained_model import TrainedClassifier, TrainedModel, TrainedRegressor

WORKED_OUT = ("num-rounds", "clip-norm", "learning-rate", "diameter", "centring", "schedule", "sampling")
"""Keys of ``config`` under which a result has what preset and data made of them; ``asked`` has what was asked for."""


SCALED = "It includes private statistics by which columns are scaled, a tenth of mu^2; other shares are of the rest."


def _recorded(name: str, words: str) -> Any:
    """A field of the outcome as an attribute of the result."""
    return property(lambda result: getattr(result.outcome, name), doc=words)


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Parameters
    ----------
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
        (:meth:`murmurfl.app.runs.simulated_figures.OnlineLosses.document`).
    deployed : bool
        Whether the machines were real ones.
    gradient_norms : dict or None
        The norms of the training loss's gradient, where they were asked for: ``rounds`` and ``values``.
    training : dict of int to TrainingFigures
        What clipping did in each round of a simulation: not private.
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
    table : FittedTable or None
        The table that it was fitted to, where it was one (:func:`murmurfl.app.fit`).

    Notes
    -----
    ``mu`` covers everything the run released, in simulation by the policies of the run configuration, on real machines
    by what they state; :attr:`guarantee` says of what and against whom. Nothing here is more than the server knows, but
    for ``training``, ``gradient_norms`` and ``online``: only a simulation has them, and they are marked as not private
    where they are written.
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
    table: FittedTable | None = None

    delta = _recorded("delta", "Where epsilon is shown.")
    rounds = _recorded("rounds", "How many rounds were made.")
    num_clients = _recorded("num_clients", "Machines in all.")
    releases = _recorded("releases", "Releases that the machines say they made.")
    refusals = _recorded("refusals", "Requests that machines refused.")
    lost_replies = _recorded("lost_replies", "Replies that did not come.")
    config = _recorded("config", "The run configuration, with what preset and data made of it.")
    per_round = _recorded("per_round", "What became of every round.")
    accuracy = _recorded("accuracy", "On the test set, after the last round; None where the model has none.")
    auc = _recorded("auc", "The area under the ROC curve, likewise; None unless there are two classes.")

    def __repr__(self) -> str:
        """The run in a few lines, its guarantee among them."""
        rows = [f"  {name:<9}  {text}" for name, text in self._rows]
        return "\n".join([f"RunResult of {self._named}", *rows, f"  {self.guarantee}"])

    def _repr_html_(self) -> str:
        """A small table and a plot, for notebooks."""
        picture = io.BytesIO()
        plot_accuracy(self.outcome, picture)
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows)
        plot = f'<img alt="" width="480" src="data:image/png;base64,{b64encode(picture.getvalue()).decode()}">'
        return f"<b>{escape(self._named)}</b><table>{rows}</table><p>{escape(str(self.guarantee))}</p>{plot}"

    @property
    def _named(self) -> str:
        config = self.config
        return f"{config['strategy']} on {config['task']}"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("accuracy" if self.accuracy is not None else "test loss", shown_measure(self.outcome)),
            ("epsilon", f"{shown(self.outcome.epsilon)} at delta = {self.delta:g}"),
            ("machines", f"{self.num_clients:,}"),
            ("rounds", f"{self.rounds:,}"),
        ]

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee, in figures and words; no epsilon is shown without it."""
        figures = Figures(self.mu, self.mu_local, self.min_honest, self.min_cohort)
        said = run_guarantee(self.experiment, figures, deployed=self.deployed, statements=self.statements)
        return replace(said, notes=(*said.notes, SCALED)) if self.table is not None and self.table.scaled else said

    @property
    def arrays(self) -> dict[str, Any]:
        """The model's arrays by name, with what its inputs are seen from: the contents of ``model.npz``."""
        arrays: dict[str, Any] = dict(zip(self.experiment.model.names, self.parameters, strict=True))
        if self.mean is not None:  # without which nobody could use the model
            arrays |= {CENTRE_ARRAY: self.mean.centre, CONSTANT_ARRAY: np.float64(self.mean.constant)}
        return arrays

    @cached_property
    def model(self) -> TrainedModel:
        """The trained model with its card, for predictions and to be saved."""
        from ..models.trained_model import TrainedModel
        from .model_card import card

        experiment = self.experiment
        model, config = experiment.model, experiment.config
        data = {"task": config.task} if self.table is None else self.table.document()
        return TrainedModel(
            kind=config.model,
            num_features=model.num_features,
            num_classes=model.num_classes,
            feature_bound=feature_bound(config),
            constant=constant_feature(config) or self.mean is not None,
            arrays=self.arrays,
            schema=None if self.table is None else self.table.schema,
            card=card(self.outcome, deployed=self.deployed, data=data),
        )

    def predict(self, rows: Any) -> NDArray[Any]:
        """The class, or the number, that the model predicts for each row.

        Parameters
        ----------
        rows : path, DataFrame, list of mappings, or array of shape (rows, features)
            Of a run of :func:`murmurfl.app.fit` rows of a table like its own; of another run features as its task
            gives them.
        """
        return self.model.predict(rows)

    def save(self, folder: Path | str) -> Path:
        """Write the model into a folder: weights, schema and a card of what was promised; no figure without noise."""
        from .model_card import card_text

        return self.model.save(folder, card_text(self.model.card))

    @staticmethod
    def load(folder: Path | str) -> TrainedClassifier | TrainedRegressor:
        """A model that :meth:`save` wrote, as a scikit-learn estimator with ``predict`` and ``predict_proba``."""
        from ..models.trained_model import load_model

        return load_model(folder)

    @property
    def forecast(self) -> Forecast | None:
        """The forecast, made before the first round, of how much of the model is noise; None without noise."""
        return self.strategy.forecast

    @property
    def epsilon_local(self) -> float | None:
        """Epsilon of :attr:`mu_local`, at the configuration's delta."""
        return epsilon_of(self.mu_local, self.experiment.config.delta)

    @property
    def loss(self) -> float:
        """Loss on the test set, after the last round."""
        return float(next(p.loss for p in reversed(self.progress) if p.loss is not None))

    @cached_property
    def alone(self) -> Alone | None:
        """What one machine reaches alone, without noise: of a simulation, and not private; None of real machines."""
        return None if self.deployed else alone(self.experiment.config)

    @cached_property
    def outcome(self) -> Outcome:
        """The contents of ``result.json``."""
        experiment, values, config = self.experiment, self.experiment.values, self.experiment.config
        return Outcome.made(
            self.guarantee,
            self.strategy.history,
            {p.report.server_round: vars(p) for p in self.progress},
            engine=self.engine or None,
            device=self.device or None,
            chosen_by=experiment.chosen_by or None,
            chosen_because=experiment.chosen_because or None,
            **{name: getattr(self, name) for name in ("mu", "epsilon", "mu_local", "epsilon_local", "min_honest")},
            min_cohort=self.min_cohort,
            helpers=config.helpers if config.secure else None,
            delta=config.delta,
            forecast=None if self.forecast is None else self.forecast.document(),
            num_clients=config.num_clients,
            releases=releases_made(self.statements),
            num_parameters=experiment.model.num_parameters,
            seconds=self.seconds,
            skipped_noise=self.strategy.skipped_noise,
            ended=self.strategy.ended,
            config={
                **config.shown(),
                "num-rounds": experiment.num_rounds,
                "clip-norm": values.clip_norm,
                "learning-rate": values.learning_rate,
                "diameter": values.diameter,
                "centring": PRIVATE if experiment.is_centred else NONE,
                "schedule": values.schedule,
                "sampling": values.sampling,
            },
            asked={name: config.to_mapping()[name] for name in WORKED_OUT},
            centring=self._centring(),
            private_evaluation=self._evaluation(),
            warnings=self._warnings(),
            clip=self._clip(),
            online=self.online,
            gradient_norms=self.gradient_norms,
            training=self._training(),
            **stated(self.statements),
        )

    def _warnings(self) -> list[str]:
        """What is odd about the model's loss and, in a simulation alone, about the length of the samples."""
        experiment, found = self.experiment, []
        classes, config = experiment.model.num_classes, experiment.config
        penalty = experiment.method.objective(experiment, self.parameters, 0.0)
        loss = next((p.loss for p in reversed(self.progress) if p.loss is not None), 0.0) - penalty
        if classes > 1 and loss > math.log(classes):
            found.append(
                f"The loss on the test set ends at {loss:.3g}, above log({classes}) = {math.log(classes):.3g}, which "
                "equal probabilities have: rely on no probability of this model. A shorter step (learning-rate), more "
                "machines or a larger epsilon may help."
            )
        if (longer := experiment.data.far_longer) and not self.deployed:
            declared = config.feature_bound or the_task(config).feature_bound
            what = f"the declared {declared:.3g} and were cut to it" if declared else "values from -1 to 1 would be"
            found.append(
                f"{longer:,} training samples are more than twice as long as {what}: scale their columns by public "
                "bounds, or declare feature-bound."
            )
        return found

    def _clip(self) -> dict[str, Any] | None:
        """The first and last clip, where it followed the gradients; arithmetic on releases."""
        strategy, config = self.strategy, self.experiment.config
        if not isinstance(strategy, FullBatch) or not strategy.options.quantile or strategy.state is None:
            return None
        last = float(strategy.state.clip)
        return {
            "quantile": config.quantile,
            "share": config.quantile_share,
            "first": strategy.options.first_clip,
            "last": last,
        }

    def _centring(self) -> dict[str, Any] | None:
        """The figures of the mean of the features; its mu is by the run configuration."""
        if self.mean is None or self.experiment.mean is None:
            return None
        counts = {name: getattr(self.mean.report, name) for name in ("asked", "aggregated", "samples")}
        return {**self.experiment.mean.recorded, "constant": self.mean.constant, **counts}

    def _evaluation(self) -> dict[str, Any] | None:
        """The figures of the private evaluation; its mu is by the run configuration."""
        if self.experiment.evaluation is None:
            return None
        return {
            **self.experiment.evaluation.recorded,
            **(dict.fromkeys(EVALUATION_FIGURES) if self.evaluation is None else self.evaluation.document),
            "failure": self.evaluation_failure or None,
        }

    def _training(self) -> dict[str, Any] | None:
        """The figures of clipping in a simulation; not private, and marked so."""
        if not self.training:
            return None
        figures = list(self.training.values())
        whole = TrainingFigures.together(figures)
        names = ("not_finite", "clipped", "median_ratio", "largest_ratio")
        return {
            **whole.document(),
            "sentence": whole.sentence,
            "worrying": whole.worrying,
            "rounds": list(self.training),
            **{f"{name}_per_round": [getattr(one, name) for one in figures] for name in names},
        }
