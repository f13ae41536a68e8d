"""A trained model with the schema and centre of its inputs, and the folder that keeps it: weights, schema and card.

scikit-learn's users load the folder as an estimator with ``predict`` and ``predict_proba``.
"""

from __future__ import annotations

import difflib
import io
import json
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.frozen import FrozenEstimator

from ...clients.personal_head import PersonalHead
from ...clients.records.client_records import Rows, Table, table_rows
from ...clients.records.drafting import document
from ...clients.records.image_folders import rows_of_table
from ...clients.records.places import additive_rows
from ...clients.records.schema import Schema
from ...privacy.errors import ConfigurationError, InvalidRecordError
from ...privacy.files import create_private
from ...privacy.queries.knots import KnotRows
from ...privacy.queries.mean_of_features import centred
from . import curves, make_model
from .curves import Coefficient, ColumnCurve
from .model import CENTRE_ARRAY, CONSTANT_ARRAY, KNOTS_ARRAY, TEMPERATURE_ARRAY, Model
from .public_pipeline import PIPELINE, SavedPipeline, pipeline_file, saved_pipeline

WEIGHTS, SCHEMA, CARD, CARD_TEXT = "weights.npz", "schema.toml", "card.json", "CARD.md"
MODEL = "model"
"""The folder of a run's model, inside the run's own: there are no figures without noise in it."""
_FORMAT = 1
PERSONAL = "contains this site's records, do not publish"
"""The first words about a personalised model, wherever it is shown."""
PERSONAL_FORMAT, PERSONAL_WEIGHTS = "personal-1", "personal.npz"
"""Format and weights of a personalised model's folder: other names than a private one's, so that neither passes for
the other."""
_HEAD = "personal."


@dataclass(frozen=True)
class TrainedModel:
    """A model's arrays and how rows become its inputs.

    ``num_features`` counts a constant that stands beside the inputs in the place of a bias; one class stands for
    numbers. ``arrays`` are its parameters and, if its inputs were centred, their centre. ``card`` says what
    it was made from and what was promised.
    """

    kind: str
    num_features: int
    num_classes: int
    feature_bound: float
    constant: bool
    arrays: Mapping[str, NDArray[Any]]
    schema: Schema | None = None
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        """The model without its parameters."""
        own = self.num_features, self.num_classes, self.feature_bound
        made = make_model(self.kind, *own, constant=self.constant)
        return made.with_temperature(float(self.arrays.get(TEMPERATURE_ARRAY, 1.0)))

    @property
    def classes(self) -> NDArray[Any]:
        """Classes that it predicts, as the schema names them, else 0, 1, ...; empty where it predicts numbers."""
        if self.num_classes == 1:
            return np.array([])
        if self.schema is None or not isinstance(self.schema.label.classes, tuple):
            return np.arange(self.num_classes)
        names = [str(one) for one in self.schema.label.names]
        return np.array([int(one) for one in names]) if all(map(_is_whole, names)) else np.array(names)

    def inputs(self, rows: Table | NDArray[Any]) -> NDArray[np.floating]:
        """Rows as the model takes them; NaN throughout where a row does not fit the schema.

        Parameters
        ----------
        rows : path, DataFrame, list of mappings, or array of shape (rows, features)
            An array has the columns in the schema's order; without a schema, the features that the model was trained
            on.
        """
        if self.schema is not None and KNOTS_ARRAY in self.arrays:
            features = self.additive.features(_read(rows, self.schema.of_values()), self.arrays[KNOTS_ARRAY])
        elif self.schema is None:
            features = np.asarray(rows, dtype=np.float32)
        else:
            features = _read(rows, self.schema)
            if self.num_classes == 1:
                features = np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1)
        if CENTRE_ARRAY in self.arrays:
            features = centred(features, self.arrays[CENTRE_ARRAY], float(self.arrays[CONSTANT_ARRAY]))
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ConfigurationError(
                f"Expected rows of {self.num_features} features for this model, got an array of shape "
                f"{features.shape}.",
                kind="wrong-shape",
            )
        return features

    def scores(self, rows: Table | NDArray[Any]) -> NDArray[np.float64]:
        """Scores, shape (rows, classes)."""
        with np.errstate(invalid="ignore"):
            return self.scores_of_inputs(self.inputs(rows))

    def scores_of_inputs(self, inputs: NDArray[np.floating]) -> NDArray[np.float64]:
        """Scores of rows as :meth:`inputs` gives them, shape (rows, classes); NaN where a row does not fit."""
        parameters = [self.arrays[name] for name in self.model.names]
        fits = np.isfinite(inputs).all(axis=1, keepdims=True)
        found = np.asarray(self.model.logits(parameters, np.where(fits, inputs, 0.0)), dtype=np.float64)
        return np.where(fits, found, np.nan)

    def predict(self, rows: Table | NDArray[Any]) -> NDArray[Any]:
        """Predict the class or number of each row; None or NaN where a row does not fit the schema."""
        scores = self.scores(rows)
        if self.num_classes == 1:
            return self.numbers(scores[:, 0])
        fits = np.isfinite(scores).all(axis=1)
        found = self.classes[np.where(np.isnan(scores), -np.inf, scores).argmax(axis=1)]
        if not fits.all():
            found = found.astype(object)
            found[~fits] = None
        return found

    def predict_proba(self, rows: Table | NDArray[Any]) -> NDArray[np.float64]:
        """Predict the probability of each class, shape (rows, classes); NaN where a row does not fit the schema.

        Warns if the model's card says that probabilities are not calibrated.
        """
        if self.num_classes == 1:
            raise ConfigurationError(
                "Expected a model of classes for shares of them, got one of numbers: use predict.", kind="unsupported"
            )
        for words in self.card.get("warnings", ()):
            warnings.warn(words, stacklevel=2)
        scores = self.scores(rows)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    @property
    def guarantee(self) -> str:
        """Promise of the model's card in one sentence, which begins with ``No guarantee`` if there is none."""
        if self.card.get("epsilon") is None:
            return f"No guarantee: {self.card.get('what', 'the model has no card')}."
        return str(self.card["sentence"])

    @cached_property
    def pipeline(self) -> SavedPipeline:
        """The model as a scikit-learn pipeline that needs no murmurfl, or why there is none."""
        return saved_pipeline(self)

    def curves(self) -> dict[str, ColumnCurve]:
        """Return :func:`murmurfl.app.models.curves.curves` of an additive model."""
        return curves.curves(self)

    def importance(self) -> dict[str, float]:
        """Return :func:`murmurfl.app.models.curves.importance` of an additive model."""
        return curves.importance(self)

    def coefficients(self) -> list[Coefficient]:
        """Return :func:`murmurfl.app.models.curves.coefficients` of an additive model."""
        return curves.coefficients(self)

    def save(self, folder: Path | str, text: str = "") -> Path:
        """Write the model's folder: weights, schema, a pipeline, and the card, as ``text`` for people too.

        The pipeline is one of scikit-learn alone, where the model can be expressed as one and skops is installed;
        otherwise the card says why there is none.
        """
        where = Path(folder).expanduser()
        where.mkdir(parents=True, exist_ok=True)
        np.savez(where / WEIGHTS, **self.arrays)  # type: ignore[arg-type]
        if self.schema is not None:
            (where / SCHEMA).write_text(document(self.schema), encoding="utf-8")
        (where / PIPELINE).unlink(missing_ok=True)
        if (pipeline := self.pipeline.made) is not None:
            (where / PIPELINE).write_bytes(pipeline_file(pipeline))
        own = {name: getattr(self, name) for name in _SAVED}
        card = {"format": _FORMAT, "model": own, **self.card, "pipeline": self.pipeline.document()}
        (where / CARD).write_text(json.dumps(card, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if text:
            (where / CARD_TEXT).write_text(text, encoding="utf-8")
        return where

    @classmethod
    def read(cls, folder: Path | str) -> TrainedModel:
        """Read the model of a folder; raise ConfigurationError if :meth:`save` did not write it.

        A folder that ``murmurfl personalise`` wrote is refused: nothing that shows or publishes a model may take it for
        a private one.
        """
        own, arrays, schema, card = _read_folder(folder, _FORMAT, WEIGHTS)
        return TrainedModel(**own, arrays=arrays, schema=schema, card=card)

    @property
    def additive(self) -> KnotRows:
        """Query of an additive model's knots, with as many of them as it has."""
        if self.schema is None:
            raise ConfigurationError("Expected the schema of an additive model, got none.", kind="missing")
        numbers = sum(column.bounds is not None for column in self.schema.columns.values())
        knots = (len(self.arrays[KNOTS_ARRAY]) - 1 - 2 * (self.num_classes == 1)) // numbers
        return additive_rows(self.schema, knots)

    def numbers(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return scores of numbers, shape (rows,), in the label's unit."""
        if KNOTS_ARRAY in self.arrays:
            return self.additive.unscaled(scores, self.arrays[KNOTS_ARRAY])
        if self.schema is None or self.schema.label.bounds is None:
            return scores
        low, high = self.schema.label.bounds
        return low + (np.clip(scores, -1.0, 1.0) + 1.0) / 2.0 * (high - low)


def model_folder(folder: Path | str) -> Path:
    """Return the folder of a model: the one of that name, or the one inside a run's folder."""
    where = Path(folder).expanduser()
    inside = not (where / CARD).exists() and (where / MODEL / CARD).exists()
    return where / MODEL if inside else where


def _read_folder(folder: Path | str, expected: int | str, weights: str) -> tuple[dict[str, Any], Any, Any, Any]:
    """Return the settings, arrays, schema and card in a model's folder of that format."""
    where = model_folder(folder)
    try:
        card = json.loads((where / CARD).read_text(encoding="utf-8"))
        found = card["format"]
        if found == PERSONAL_FORMAT and found != expected:
            raise ConfigurationError(
                f"Expected a private model in {where}, got a personalised one, which {PERSONAL}. Inside that site, "
                "`murmurfl predict` and `load_model` use it.",
                kind="unsupported",
            )
        if found != expected:
            raise ConfigurationError(
                f"Expected a model of format {expected} in {where}, got {found!r}: use the murmurfl that wrote it.",
                kind="other-format",
            )
        own = {name: card["model"][name] for name in _SAVED}
        with np.load(where / weights, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except ConfigurationError:  # a ValueError, too
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        near = [] if where.exists() else difflib.get_close_matches(where.name, _neighbours(where), n=1)
        raise ConfigurationError(
            f"Expected a model's folder at {where} (`murmurfl fit` and RunResult.save write one), got: {reason}."
            f"{f' Did you mean {where.with_name(near[0])}?' if near else ''}",
            kind="unreadable",
        ) from error
    schema = Schema.read_file(where / SCHEMA) if (where / SCHEMA).exists() else None
    return own, arrays, schema, card


def _neighbours(where: Path) -> list[str]:
    """Return the names next to a path."""
    return sorted(one.name for one in where.parent.iterdir()) if where.parent.is_dir() else []


@dataclass(frozen=True, repr=False)
class PersonalModel(TrainedModel):
    """A common model with a head that was fitted to the rows of one site: it contains that site's records.

    Notes
    -----
    It has no epsilon. :meth:`write` keeps it in files of a format of their own, which only their owner can read and
    which :meth:`TrainedModel.read` refuses. It has neither a pipeline nor curves, which would be shown without the
    warning.
    """

    head: PersonalHead = field(kw_only=True)

    def __repr__(self) -> str:
        return f"PersonalModel ({PERSONAL})"

    @property
    def guarantee(self) -> str:
        """Sentence that nothing is guaranteed but what the common model promises."""
        common: Mapping[str, Any] = self.card["common_model"]
        kept = f"keeps its guarantee: {common['sentence']}" if common.get("epsilon") is not None else "has none either."
        if common.get("epsilon") is None and common.get("what"):
            kept = f"has none either ({common['what']})."
        return f"No guarantee: this model {PERSONAL}. The common model that it was adapted from {kept}"

    def scores_of_inputs(self, inputs: NDArray[np.floating]) -> NDArray[np.float64]:
        """Scores of rows as :meth:`inputs` gives them, shape (rows, classes); NaN where a row does not fit."""
        return self.head.scores(super().scores_of_inputs(inputs), inputs if self.head.weights.size else None)

    @cached_property
    def pipeline(self) -> SavedPipeline:
        """No pipeline: one would be used without the card."""
        return SavedPipeline(None, [f"none, because the model {PERSONAL}"])

    def curves(self) -> dict[str, ColumnCurve]:
        """Raise ConfigurationError: curves are drawn with bands for noise, and this model has none."""
        raise self._refused("curves")

    def importance(self) -> dict[str, float]:
        """Raise ConfigurationError, as :meth:`curves` does."""
        raise self._refused("importance")

    def coefficients(self) -> list[Coefficient]:
        """Raise ConfigurationError, as :meth:`curves` does."""
        raise self._refused("coefficients")

    def save(self, folder: Path | str, text: str = "") -> Path:
        """Raise ConfigurationError: only private models are saved for others."""
        raise self._refused("save")

    def write(self, folder: Path | str) -> Path:
        """Write the model into a new folder that only its owner can read; raise ConfigurationError if it is there."""
        where = Path(folder).expanduser()
        try:
            where.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ConfigurationError(
                f"Expected a new folder for a personalised model, got {where}, which exists.", kind="exists"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"Expected a folder in which {where} can be made, got: {error.strerror}.", kind="not-found"
            ) from error
        head = {"share": self.head.share, "weights": self.head.weights, "offsets": self.head.offsets}
        head |= {"common": self.head.common}
        file = io.BytesIO()
        arrays: dict[str, Any] = {**self.arrays, **{f"{_HEAD}{name}": value for name, value in head.items()}}
        np.savez(file, **arrays)
        error = ConfigurationError
        create_private(where / PERSONAL_WEIGHTS, "a personalised model", file.getvalue(), error=error)
        if self.schema is not None:
            create_private(where / SCHEMA, "its schema", document(self.schema).encode(), error=error)
        own = {name: getattr(self, name) for name in _SAVED}
        card = {"what": self.card["what"], "format": PERSONAL_FORMAT, "model": own, **self.card}
        text = json.dumps(card, indent=2, allow_nan=False) + "\n"
        create_private(where / CARD, "its card", text.encode(), error=error)
        create_private(where / CARD_TEXT, "its card", self.card_text().encode(), error=error)
        return where

    def card_text(self) -> str:
        """Return the card for people, in Markdown; its first words are those that matter."""
        lines = [f"# {PERSONAL[0].upper()}{PERSONAL[1:]}", "", "A common model, personalised inside one site.", ""]
        lines += textwrap.wrap(f"* **guarantee**: {self.guarantee}", 100, subsequent_indent="  ")
        adapted = 100 * (1 - self.head.common)
        lines += [f"* **adapted**: {adapted:.0f} % of the mixture, {100 - adapted:.0f} % is the common model itself"]
        lines += [f"* **made**: {self.card['date']} by murmurfl {self.card['murmurfl']}"]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, folder: Path | str) -> PersonalModel:
        """Read a personalised model; raise ConfigurationError if :meth:`write` did not write the folder."""
        own, arrays, schema, card = _read_folder(folder, PERSONAL_FORMAT, PERSONAL_WEIGHTS)
        head = {name.removeprefix(_HEAD): arrays.pop(name) for name in list(arrays) if name.startswith(_HEAD)}
        made = PersonalHead(float(head["share"]), head["weights"], head["offsets"], float(head["common"]))
        return PersonalModel(**own, arrays=arrays, schema=schema, card=card, head=made)

    @staticmethod
    def _refused(what: str) -> ConfigurationError:
        return ConfigurationError(
            f"Expected a private model for {what}, got a personalised one, which {PERSONAL}. Use the common model that "
            "it was adapted from.",
            kind="unsupported",
        )


def read_model(folder: Path | str) -> TrainedModel:
    """Read the model of a folder for predictions: a private one, or a :class:`PersonalModel`.

    Everything that is not about predictions calls :meth:`TrainedModel.read`, which refuses personalised models.
    """
    try:
        card = json.loads((model_folder(folder) / CARD).read_text(encoding="utf-8"))
        personal = card["format"] == PERSONAL_FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        personal = False  # what is wrong is said below
    return PersonalModel.read(folder) if personal else TrainedModel.read(folder)


def _read(rows: Table | NDArray[Any], schema: Schema) -> NDArray[np.floating]:
    """Rows of a table without a label as numbers; NaN throughout where a row does not fit."""
    found: Rows | list[dict[str, Any]]
    if isinstance(rows, np.ndarray):
        if rows.ndim != 2 or rows.shape[1] != len(schema.columns):
            raise ConfigurationError(
                f"Expected rows of the {len(schema.columns)} columns that the model was trained on, in their order, "
                f"got an array of shape {rows.shape}.",
                kind="wrong-shape",
                setting="rows",
            )
        found = [dict(zip(schema.columns, row, strict=True)) for row in rows.tolist()]
    elif isinstance(rows, str | Path):
        found = rows_of_table(Path(rows), schema)
    else:
        found = table_rows(rows)
    columns = getattr(found, "columns", list(schema.columns))
    missing = [name for name in schema.columns if name not in columns]
    if missing:
        raise ConfigurationError(
            f"Expected the columns that the model was trained on, got none named {', '.join(map(repr, missing))}.",
            kind="missing",
        )
    twice = [name for name in schema.columns if list(columns).count(name) > 1]
    if twice:
        raise ConfigurationError(
            f"Expected each column that the model was trained on once, got several named "
            f"{', '.join(map(repr, twice))}: rename those that are not meant.",
            kind="duplicate",
            setting="rows",
        )
    label = schema.label.names[0] if schema.label.names else (schema.label.bounds or (0.0, 1.0))[0]
    of_nobody = {schema.label.column: label, **({schema.owner: "nobody"} if schema.owner else {})}
    kind = np.float32 if schema.inputs_are == "scaled" else np.float64
    made = np.full((len(found), schema.num_features), np.nan, dtype=kind)
    for number in range(len(found)):
        try:
            made[number] = schema.read({**found[number], **of_nobody}).inputs
        except InvalidRecordError:
            continue
    return made


_SAVED = ("kind", "num_features", "num_classes", "feature_bound", "constant")


def _is_whole(name: str) -> bool:
    return name.lstrip("-").isdigit() and str(int(name)) == name


class _Loaded(BaseEstimator):
    """A saved model, fitted already: ``fit`` changes nothing, so that it can stand in a pipeline."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    @cached_property
    def model(self) -> TrainedModel:
        """Trained model in the folder."""
        return read_model(self.folder)

    @property
    def guarantee(self) -> str:
        """Return :attr:`TrainedModel.guarantee`."""
        return self.model.guarantee

    @property
    def n_features_in_(self) -> int:
        """Number of columns of a row."""
        schema = self.model.schema
        return self.model.num_features if schema is None else len(schema.columns)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns of a row, in the schema's order."""
        if self.model.schema is None:
            raise AttributeError("Expected a model of a table, which has names of columns, got one of arrays.")
        return np.array(list(self.model.schema.columns), dtype=object)

    def fit(self, rows: object = None, labels: object = None) -> Self:
        """Leave the model as it is."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, rows: Table | NDArray[Any]) -> NDArray[Any]:
        """Return the predictions of :meth:`TrainedModel.predict`."""
        return self.model.predict(rows)


class TrainedClassifier(ClassifierMixin, _Loaded):
    """A saved model of classes as a scikit-learn estimator."""

    @property
    def classes_(self) -> NDArray[Any]:
        """Classes that it predicts."""
        return self.model.classes

    def predict_proba(self, rows: Table | NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of :meth:`TrainedModel.predict_proba`."""
        return self.model.predict_proba(rows)


class TrainedRegressor(RegressorMixin, _Loaded):
    """A saved model of numbers as a scikit-learn estimator."""


class PersonalisedClassifier(TrainedClassifier):
    """A personalised model of classes as a scikit-learn estimator: it contains one site's records."""


class PersonalisedRegressor(TrainedRegressor):
    """A personalised model of numbers as a scikit-learn estimator: it contains one site's records."""


def load_model(folder: Path | str) -> FrozenEstimator:
    """Load a saved model as a frozen scikit-learn estimator: ``fit`` changes nothing, and ``clone`` keeps it.

    Parameters
    ----------
    folder : path
        As :meth:`murmurfl.app.RunResult.save` and ``murmurfl fit`` write it. One that ``murmurfl personalise`` wrote is
        loaded with a warning.

    Returns
    -------
    FrozenEstimator
        Around a :class:`TrainedClassifier` or :class:`TrainedRegressor`, with ``predict``, ``score``,
        ``n_features_in_``, ``guarantee`` (a sentence) and, if it predicts classes, ``predict_proba`` and ``classes_``.
        It takes rows as a file, DataFrame or list of mappings, by name, or as an array in the schema's order.

    Raises
    ------
    ConfigurationError
        If there is no such model.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl import fit
    >>> rows = [{"age": float(age), "ill": "yes" if age > 50 else "no"} for age in range(20, 80)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = load_model(fit(rows, label="ill", clients=2, epsilon=8).save(folder))
    >>> model.classes_.tolist(), model.n_features_in_
    (['no', 'yes'], 1)
    """
    where = str(Path(folder).expanduser())
    model = read_model(where)
    if isinstance(model, PersonalModel):
        warnings.warn(f"{where} {PERSONAL}: nor its predictions.", stacklevel=2)
        made = PersonalisedRegressor(where) if model.num_classes == 1 else PersonalisedClassifier(where)
    else:
        made = TrainedRegressor(where) if model.num_classes == 1 else TrainedClassifier(where)
    vars(made)["model"] = model  # where its cached property looks first
    return FrozenEstimator(made)
