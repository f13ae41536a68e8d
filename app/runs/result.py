"""The result of a run: all that its own process has of it, and the files that it leaves."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import sys
import textwrap
import time
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.guarantee import Guarantee
from ...privacy.accounting.loss import NO_LOSS
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.errors import ConfigurationError, MurmurflError
from ...privacy.files import not_written, replace_durably
from ...privacy.forecast_text import forecast_document
from ...privacy.queries.evaluation import EvaluationRows
from ...privacy.release.admission import ROUNDING
from ...privacy.release.clipping import TrainingFigures
from ...privacy.release.tables import NONE, PRIVATE
from ...strategies.full_batch import FullBatch
from ...strategies.queries import EvaluationResult
from ...strategies.rounds.checkpoint import checkpoint_header
from ...strategies.rounds.client_registry import restored_names
from ...strategies.rounds.strategy import ReleaseStrategy
from ..data.partition import shard_sizes
from ..methods.presets import constant_feature, feature_bound, the_task
from ..methods.queries import QueryOutcome
from ..models.model import TEMPERATURE_ARRAY
from ..settings.run_config import check_run_name
from .client_statements import Participation, is_named, releases_made, stated, statement_groups
from .experiment import Experiment
from .outcome import CHECKPOINT_NAME, FAILURE_NAME, RESULT_NAME, AllCalls, Alone, Outcome, OwnMixes, Round
from .progress import Progress
from .run_guarantees import Figures, epsilon_of, run_guarantee
from .run_summary import plot_accuracy, shown, shown_measure
from .simulated_figures import alone, own_mixes

if TYPE_CHECKING:
    from sklearn.frozen import FrozenEstimator

    from ...clients.records.client_records import Table
    from ..data.table_task import FittedTable
    from ..models.curves import Coefficient, ColumnCurve
    from ..models.trained_model import TrainedModel

logger = logging.getLogger("flwr")

UNCALIBRATED = (
    "Probabilities of this model are not calibrated: on the test set they were worse than equal ones. Rely on their "
    "order and not on their values."
)
_WIDTH = 100

WORKED_OUT = (
    "num-rounds",
    "clip-norm",
    "learning-rate",
    "strategy.projection-radius",
    "centring",
    "mechanism.schedule",
    "sampling",
)
"""Keys of ``config`` that preset and data settle; ``asked`` has what the run configuration said."""


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
        What each client says it has spent, by name.
    figures : Figures
        The guarantee in numbers: mu and, under secure aggregation, what it rests on.
    seconds : float or None
        Wall-clock time of the rounds; None for a table fitted for real, whose rows it depends on.
    online : dict or None
        Cumulative loss and regrets, where they were computed
        (:meth:`murmurfl.app.runs.simulated_figures.OnlineLosses.document`).
    deployed : bool
        Whether the clients were real ones.
    gradient_norms : dict or None
        The norms of the training loss's gradient, where they were asked for: ``rounds`` and ``values``.
    training : dict of int to TrainingFigures
        What clipping did in each round of a simulation: not private.
    engine : str
        What carried the messages: ``cohort``, ``inprocess``, ``ray`` or ``real-nodes``; empty for a grid of one's own.
    device : str
        Which of PyTorch's devices computed gradients and noise; empty for NumPy.
    answers : mapping
        What became of each query beside the training, by its name: ``mean`` with centring, ``evaluation`` with a
        private one.
    table : FittedTable or None
        The table that it was fitted to, where it was one (:func:`murmurfl.app.fit`).

    Notes
    -----
    ``mu`` covers everything the run released, in simulation by the policies of the run configuration, on real clients
    by what they state; :attr:`guarantee` says of what and against whom. Nothing here is more than the server knows, but
    for ``training``, ``gradient_norms`` and ``online``: only a simulation has them, and they are marked as not private
    where they are written.

    Examples
    --------
    >>> from murmurfl import simulate
    >>> result = simulate(num_rounds=1, epsilon=2.0)
    >>> result.rounds, result.guarantee.trust
    (1, 'secure-aggregation')
    """

    experiment: Experiment
    strategy: ReleaseStrategy[Any]
    parameters: list[NDArray[Any]]
    progress: list[Progress]
    statements: Mapping[str, Mapping[str, Any]]
    figures: Figures
    seconds: float | None
    online: dict[str, Any] | None = None
    deployed: bool = False
    gradient_norms: dict[str, Any] | None = None
    training: Mapping[int, TrainingFigures] = field(default_factory=dict)
    engine: str = ""
    device: str = ""
    answers: Mapping[str, QueryOutcome] = field(default_factory=dict)
    table: FittedTable | None = None

    @property
    def delta(self) -> float:
        """Delta at which epsilon is shown."""
        return self.outcome.delta

    @property
    def rounds(self) -> int:
        """Number of rounds that were made."""
        return self.outcome.rounds

    @property
    def num_clients(self) -> int:
        """Number of clients in all."""
        return self.outcome.num_clients

    @property
    def releases(self) -> int:
        """Number of releases that the clients say they made."""
        return self.outcome.releases

    @property
    def refusals(self) -> int:
        """Number of requests that clients refused."""
        return self.outcome.refusals

    @property
    def lost_replies(self) -> int:
        """Number of replies that did not arrive."""
        return self.outcome.lost_replies

    @property
    def min_honest(self) -> int | None:
        """Honest clients that each sum is assumed to have, h; None without secure aggregation."""
        return self.outcome.min_honest

    @property
    def min_cohort(self) -> int | None:
        """Fewest releases of a sum; None without secure aggregation."""
        return self.outcome.min_cohort

    @property
    def config(self) -> dict[str, Any]:
        """Run configuration, with what preset and data made of it."""
        return self.outcome.config

    @property
    def per_round(self) -> list[Round]:
        """Rows of the table of rounds."""
        return self.outcome.per_round

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set after the last round; None if the model has none."""
        return self.outcome.accuracy

    @property
    def auc(self) -> float | None:
        """Area under the ROC curve on the test set; None unless there are two classes."""
        return self.outcome.auc

    def __repr__(self) -> str:
        """Return the run in a few lines, its guarantee among them."""
        notes, rows = self._summary()
        wide = max(len(name) for name, _ in rows)
        indent = " " * (wide + 2)
        lines = [(line, "") for line in (self._heading, *notes)]
        lines += [(f"{name:<{wide}}  {text}", indent) for name, text in rows]
        columns = min(_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _WIDTH
        return "\n".join(part for line, rest in lines for part in textwrap.wrap(line, columns, subsequent_indent=rest))

    def _repr_html_(self) -> str:
        """Return a small table for notebooks, with a plot if a round has an accuracy or a loss."""
        notes, named = self._summary()
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in named)
        paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
        plot = ""
        if self.outcome.has_curve:
            picture = io.BytesIO()
            plot_accuracy(self.outcome, picture)
            plot = f'<img alt="" width="480" src="data:image/png;base64,{b64encode(picture.getvalue()).decode()}">'
        return f"<b>{escape(self._heading)}</b>{paragraphs}<table>{rows}</table>{plot}"

    @property
    def _heading(self) -> str:
        """The first line of a result: whether anybody was protected."""
        named = f"{self.config['strategy']} on {self.config['task'] if self.table is None else self.table.name}"
        return f"REAL: {named}" if self.deployed else f"REHEARSAL: {named}; nobody was protected"

    def _summary(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Return notes that must be read before any figure, and the named rows of text and table."""
        return [], [
            ("accuracy" if self.accuracy is not None else "test loss", shown_measure(self.outcome)),
            ("epsilon", f"{shown(self.outcome.epsilon)} at delta = {self.delta:g}"),
            ("clients", f"{self.num_clients:,}"),
            ("rounds", f"{self.rounds:,}"),
            *(("warning", words) for words in self.outcome.warnings),
            ("privacy", str(self.guarantee)),
        ]

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee, in figures and words; no epsilon is shown without it."""
        curated = self.deployed and self.table is not None
        guarantee = run_guarantee(
            self.experiment, self.figures, deployed=self.deployed, statements=self.statements, curated=curated
        )
        return (
            guarantee
            if self.table is None
            else replace(guarantee, notes=(*guarantee.notes, *self.table.notes(guarantee.delta)))
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """The model's arrays by name, with the centre of its inputs: the contents of ``model.npz``."""
        arrays: dict[str, Any] = dict(zip(self.experiment.model.names, self.parameters, strict=True))
        if (temperature := self.experiment.model.temperature) != 1.0:
            arrays[TEMPERATURE_ARRAY] = np.float64(temperature)
        for name, outcome in self.answers.items():  # without which nobody could use the model
            arrays |= self.experiment.query(name).arrays(outcome.answer)
        return arrays

    @cached_property
    def model(self) -> TrainedModel:
        """The trained model with its card, for predictions and to be saved."""
        from ..models.trained_model import TrainedModel
        from .model_card import card, noise_in_model

        experiment = self.experiment
        model, config = experiment.model, experiment.config
        task = the_task(config)
        data = {"task": config.task} if self.table is None else self.table.document()
        if task.schema is not None and self.table is None:
            data = {"label": task.schema.label.column, "schema": f"given, digest {task.schema.digest}"}
        return TrainedModel(
            kind=config.model,
            num_features=model.num_features,
            num_classes=model.num_classes,
            feature_bound=feature_bound(config),
            constant=constant_feature(config) or experiment.is_centred,
            arrays=self.arrays,
            schema=task.schema if self.table is None else self.table.schema,
            card=card(
                self.outcome,
                deployed=self.deployed,
                data=data,
                warnings=self._lasting_warnings(),
                noise_std=noise_in_model(self.strategy, self.statements, config.shares),
                temperature=model.temperature,
                all_calls="" if self.table is None else self.table.spent(self.delta),
                weighted=model.class_weights is not None,
            ),
        )

    def predict(self, rows: Table | NDArray[Any]) -> NDArray[Any]:
        """Return the class, or the number, that the model predicts for each row.

        Parameters
        ----------
        rows : path, DataFrame, list of mappings, or array of shape (rows, features)
            Of a run of :func:`murmurfl.app.fit` rows of a table like its own; of another run features as its task
            gives them.
        """
        return self.model.predict(rows)

    def curves(self) -> dict[str, ColumnCurve]:
        """Return each column's curve, with bands for the noise, of an additive model (``model = additive``)."""
        return self.model.curves()

    def importance(self) -> dict[str, float]:
        """Return the mean absolute effect of each column of an additive model, the largest first."""
        return self.model.importance()

    def coefficients(self) -> list[Coefficient]:
        """Return the coefficients of an additive model by name, each with the standard deviation of its noise."""
        return self.model.coefficients()

    def save(self, folder: Path | str) -> Path:
        """Write the model into a folder: weights, schema and a card of what was promised; no figure without noise.

        With skops installed there is also a scikit-learn pipeline, ``pipeline.skops``, which predicts without murmurfl.
        """
        from .model_card import card_text

        entries = {**self.model.card, "pipeline": self.model.pipeline.document()}
        return self.model.save(folder, card_text(entries))

    @staticmethod
    def load(folder: Path | str) -> FrozenEstimator:
        """Return a model that :meth:`save` wrote.

        As a frozen scikit-learn estimator with ``predict`` and ``predict_proba``.
        """
        from ..models.trained_model import load_model

        return load_model(folder)

    @property
    def forecast(self) -> Forecast | None:
        """The forecast, made before the first round, of how much of the model is noise; None without noise."""
        return self.strategy.forecast

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of everything that was released; infinite without noise."""
        return self.figures.loss.mu

    @property
    def epsilon(self) -> float:
        """Epsilon of :attr:`mu`, at the configuration's delta."""
        return epsilon_of(self.mu, self.experiment.config.delta)

    @property
    def evaluation(self) -> EvaluationResult | None:
        """Accuracy of the model on the clients' samples, where there is a private evaluation."""
        found = self.answers.get(EvaluationRows.name)
        return None if found is None else found.answer

    @property
    def mu_local(self) -> float | None:
        """Loss that holds whatever server, helpers and other clients do, under secure aggregation; otherwise None."""
        return self.figures.loss.mus[1]

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
        """Score of one client alone, without noise: of a simulation, and not private; None for real clients."""
        return None if self.deployed else alone(self.experiment.config)

    @cached_property
    def own_mixes(self) -> OwnMixes | None:
        """Accuracy in each client's mix of classes: of a simulation, and not private; None for real clients."""
        experiment, task = self.experiment, the_task(self.experiment.config)
        if self.deployed or not (task.has_records and task.is_tested):
            return None
        data = experiment.seen_by(self.answers).data
        return own_mixes(experiment.config, data, partial(experiment.model.logits, self.parameters))

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
            mu=self.mu,
            mu_local=self.mu_local,
            **({} if self.figures.sums is None else vars(self.figures.sums)),
            epsilon=self.epsilon,
            epsilon_local=self.epsilon_local,
            helpers=config.summing.helpers if config.secure else None,
            delta=config.delta,
            forecast=None if self.forecast is None else forecast_document(self.forecast),
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
                "strategy.projection-radius": values.diameter / 2,
                "centring": PRIVATE if experiment.is_centred else NONE,
                "mechanism.schedule": values.schedule,
                "sampling": values.sampling,
            },
            asked={name: config.to_mapping()[name] for name in WORKED_OUT},
            **self._answers(),
            all_calls=self._all_calls(),
            warnings=self._warnings(),
            clip=self._clip(),
            own_mixes=self.own_mixes,
            online=self.online,
            gradient_norms=self.gradient_norms,
            training=self._training(),
            **stated(self.statements),
        )

    def _all_calls(self) -> AllCalls | None:
        """Return what all calls with a real fit's ledger released, if that is more than this call did."""
        total = NO_LOSS if self.table is None else self.table.all_calls
        if not (total.mu > self.mu * (1 + ROUNDING) or total.added_delta):
            return None
        meaning = replace(self.guarantee, loss=total).meaning
        return AllCalls(mu=total.mu, added_delta=total.added_delta, meaning=meaning)

    def _plain_loss(self) -> float:
        """Return the last loss on the test set, without the penalty that the strategy adds."""
        penalty = self.experiment.method.objective(self.experiment, self.parameters, 0.0)
        return next((p.loss for p in reversed(self.progress) if p.loss is not None), 0.0) - penalty

    def _is_uncalibrated(self) -> bool:
        """Return True if the probabilities are worse than equal ones, by the loss on the test set."""
        classes = self.experiment.model.num_classes
        return classes > 1 and self._plain_loss() > math.log(classes)

    def _lasting_warnings(self) -> list[str]:
        """Return warnings for those who use the model: no figure that was not released is in them."""
        return [UNCALIBRATED] if self._is_uncalibrated() and not self.deployed else []

    def _warnings(self) -> list[str]:
        """Return warnings about the model's loss and, in a simulation, about samples far longer than declared."""
        experiment, found = self.experiment, []
        classes, config, loss = experiment.model.num_classes, experiment.config, self._plain_loss()
        if self._is_uncalibrated():
            found.append(
                f"The loss on the test set ends at {loss:.3g}, above log({classes}) = {math.log(classes):.3g}, which "
                "equal probabilities have: rely on no probability of this model. A step shorter than learning-rate = "
                f"{experiment.values.learning_rate:.3g}, more records or a larger epsilon may help."
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
        """Return the first and last clip norm, where it followed the gradients; computed from releases."""
        strategy, config = self.strategy, self.experiment.config
        if not isinstance(strategy, FullBatch) or not strategy.full_batch.quantile or strategy.state is None:
            return None
        last = float(strategy.state.clip)
        return {
            "quantile": config.quantile,
            "share": config.quantile_share,
            "first": strategy.full_batch.first_clip,
            "last": last,
        }

    def _answers(self) -> dict[str, Any]:
        """Return the figures of queries beside the training, by the keys that they have in a result."""
        found: dict[str, Any] = {}
        for name, outcome in self.answers.items():
            query = self.experiment.query(name)
            place = found if query.result_key else found.setdefault("queries", {})
            place[query.result_key or name] = query.figures(outcome)
        return found

    def _training(self) -> dict[str, Any] | None:
        """Return the figures of clipping in a simulation; not private, and marked so."""
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


CLIENTS_NAME, END_NAME, EXCLUDED_NAME = "clients.json", "end", "excluded.json"

_MOST_POINTS = 200


@contextmanager
def folder_for(out: Path, name: str | None, beginning: str) -> Iterator[Path]:
    """Choose the folder of a run: ``out / name``, or without a name a new one named by the time.

    The latter is unique even among runs that start in the same second, and is removed if it stays empty. Raises
    ConfigurationError if the name would leave ``out`` (:func:`~murmurfl.app.settings.run_config.check_run_name`).
    """
    if name is not None:
        check_run_name(name)
        yield out / name
        return
    with new_folder(out / f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}") as folder:
        yield folder


@contextmanager
def new_folder(wanted: Path) -> Iterator[Path]:
    """Make a new folder: the wanted one, or with a number behind its name.

    It is removed, with those above that were made, if it stays empty.
    """
    number, folder, made = 1, wanted, False
    above = [parent for parent in wanted.parents if not parent.exists()]
    while not made:
        try:
            folder.mkdir(parents=True)
            made = True
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            for empty in (folder, *above):
                empty.rmdir()


class RecordError(MurmurflError):
    """The result of a run cannot be written."""

    kind = "failed"


_RECORD_BYTES = 1 << 20


@contextmanager
def room_kept(folder: Path) -> Iterator[None]:
    """Keep 1 MiB on the disk of a run's folder while the run goes on; RecordError before it if there is none.

    A model for which a budget was spent is then not lost to a folder that cannot be written to.
    """
    kept = folder / ".room"
    above = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with kept.open("wb") as file:
                file.write(bytes(_RECORD_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as reason:
            raise RecordError(f"{not_written('the result of a run', folder, reason)}; nothing was released.") from None
        yield
    except BaseException:
        with suppress(OSError):
            kept.unlink(missing_ok=True)
            for empty in above:
                empty.rmdir()
        raise
    with suppress(OSError):
        kept.unlink()


def write_record(result: RunResult, folder: Path) -> dict[str, Any]:
    """Write what a run leaves into a folder; return the contents of ``result.json``.

    Raises
    ------
    RecordError
        If the folder cannot be written to, because the disk is full for example.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "model.npz", **result.arrays)
        write_clients(result, folder / CLIENTS_NAME)
        write_outcome(result.outcome, folder)  # last: whoever finds a result.json finds a finished run
    except OSError as reason:
        raise RecordError(
            f"{not_written('the result of a run', folder, reason)}, and run it again; over real nodes under the same "
            "run-name, so that it goes on from its last checkpoint."
        ) from reason
    return result.outcome.document()


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Write ``result.json``, whole or not at all, and remove what an earlier try left."""
    temporary = folder / f"{RESULT_NAME}.part"
    temporary.write_text(json.dumps(outcome.document(), indent=2, allow_nan=False) + "\n")
    temporary.replace(folder / RESULT_NAME)
    for name in (FAILURE_NAME, END_NAME):
        (folder / name).unlink(missing_ok=True)


def write_failure(error: BaseException, folder: Path) -> None:
    """Leave the reason why a run ended without a result in ``failure.json``; its checkpoint stays where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT_NAME
    reason = str(error) if isinstance(error, MurmurflError) else f"{type(error).__name__}: {error}"
    document = {
        "reason": reason,
        "kind": error.kind if isinstance(error, MurmurflError) else None,
        "setting": error.setting if isinstance(error, MurmurflError) else None,
        "checkpoint": str(checkpoint) if checkpoint.exists() else None,
    }
    (folder / FAILURE_NAME).write_text(json.dumps(document, indent=2) + "\n")


def ask_to_end(folder: Path) -> None:
    """Ask the run on real clients that writes into a folder to end after its round, with its model so far.

    Raises ConfigurationError if no such run is under way there.
    """
    _check_under_way(folder)
    (folder / END_NAME).touch(mode=0o600)


def excluded_clients(folder: Path) -> list[str]:
    """Return the clients that the run of a folder does not ask; none where its file cannot be read, which is logged."""
    path = folder / EXCLUDED_NAME
    try:
        names = json.loads(path.read_bytes()) if path.exists() else []
    except (OSError, ValueError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        logger.warning("Nobody is excluded by %s: expected a JSON list of names in it. Write it by exclude.", path)
        return []
    return names


def exclude_clients(folder: Path, names: Collection[str], *, back: bool = False) -> list[str]:
    """Take clients out of the run of a folder from its next round on, or ``back`` in; returns all that are out.

    Neither M nor m nor what helpers have signed changes. Raises ConfigurationError if no such run is under way, or has
    no clients of these names.
    """
    _check_under_way(folder)
    _, plain = checkpoint_header(folder / CHECKPOINT_NAME)
    known = list(restored_names(plain.get("clients", [])))
    if unknown := sorted(set(names).difference(known)):
        raise ConfigurationError(
            f"Expected clients of this run, {', '.join(known)}, got {', '.join(unknown)}.",
            kind="unknown-name",
            setting="exclude",
        )
    before = set(excluded_clients(folder))
    excluded = sorted(before.difference(names) if back else before.union(names))
    replace_durably(folder / EXCLUDED_NAME, json.dumps(excluded).encode() + b"\n", error=ConfigurationError)
    return excluded


def _check_under_way(folder: Path) -> None:
    """Refuse a folder without an unfinished run on real clients."""
    if not (folder / CHECKPOINT_NAME).exists() or (folder / RESULT_NAME).exists():
        raise ConfigurationError(
            f"Expected the folder of a run on real clients that has ended a round and goes on, got {folder}: name "
            "OUT-DIR/RUN-NAME of the run, on the server.",
            kind="not-found",
            setting="folder",
        )


def write_clients(result: RunResult, path: Path) -> None:
    """Write ``clients.json``: who was asked when, and what a client's releases cost one after the other.

    A server knows all of it: whom it asked, whose release it aggregated, and the policies that clients state. ``mu``
    is bookkeeping, true of a number of releases fixed in advance (:meth:`murmurfl.privacy.NoisePlan.spent_mu`). Rounds
    are written one by one: those of very many clients need not be in memory at once.
    """
    with path.open("w") as file:
        file.write('{"rounds": {')
        for number, (server_round, asked) in enumerate(_rounds(result)):
            file.write(f"{', ' if number else ''}{json.dumps(server_round)}: {json.dumps(asked)}")
        file.write(f'}}, "streams": {json.dumps(_streams(result), allow_nan=False)}}}\n')


def _rounds(result: RunResult) -> Iterator[tuple[str, dict[str, int | None]]]:
    for progress in result.progress:
        if asked := progress.clients:
            plain = asked.plain() if isinstance(asked, Participation) else dict(asked)
            yield str(progress.report.server_round), plain


def _streams(result: RunResult) -> list[dict[str, Any]]:
    """Return the cost of releases for every kind of noise, with the names of its clients.

    Or of very many their number.
    """
    streams: dict[tuple[Any, ...], dict[str, Any]] = {}
    experiment = result.experiment
    size = experiment.method.release_size(experiment)
    clients = {samples: client for client, samples in enumerate(shard_sizes(experiment.shards))}.values()
    for policy in map(experiment.policy, clients):
        plan, cap = policy.plan(size), policy.max_participations
        key = (plan.noise_std, plan.sensitivity, cap, policy.mechanism)
        if not math.isfinite(plan.mu) or key in streams:
            continue
        releases = sorted({round(cap * i / _MOST_POINTS) for i in range(_MOST_POINTS + 1)} | {0, 1, cap})
        streams[key] = {
            "clients": [],
            "count": 0,
            "noise_std": plan.noise_std,
            "sensitivity": plan.sensitivity,
            "releases": releases,
            "mu": [plan.spent_mu(k) for k in releases],
            "prefix_std": [plan.noise_std * plan.mechanism.row_std(k) if k else 0.0 for k in releases],
        }
    for group in statement_groups(result.statements):
        if (stream := streams.get(_stream_of(group.statement))) is not None:
            stream["count"] += group.count
    if is_named(result.statements):
        for name, statement in result.statements.items():
            if (stream := streams.get(_stream_of(statement))) is not None:
                stream["clients"].append(name)
    return [stream for stream in streams.values() if stream["count"]]


def _stream_of(statement: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(statement.get(key) for key in ("noise-std", "sensitivity", "max-participations", "mechanism"))
