"""A trained model with the schema and centre of its inputs, and the folder that keeps it: weights, schema and card.

scikit-learn's users load the folder as an estimator with ``predict`` and ``predict_proba``.
"""

from __future__ import annotations

import json
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

from ...clients.records.client_records import Rows, Table, table_file, table_rows
from ...clients.records.drafting import document
from ...clients.records.places import additive_rows
from ...clients.records.schema import Schema
from ...privacy.errors import ConfigurationError, InvalidRecordError
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
        parameters = [self.arrays[name] for name in self.model.names]
        with np.errstate(invalid="ignore"):
            features = self.inputs(rows)
            fits = np.isfinite(features).all(axis=1, keepdims=True)
            found = np.asarray(self.model.logits(parameters, np.where(fits, features, 0.0)), dtype=np.float64)
        return np.where(fits, found, np.nan)

    def predict(self, rows: Table | NDArray[Any]) -> NDArray[Any]:
        """Predict the class or number of each row; None or NaN where a row does not fit the schema."""
        scores = self.scores(rows)
        if self.num_classes == 1:
            return self._number(scores[:, 0])
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
        """Read the model of a folder; raise ConfigurationError if :meth:`save` did not write it."""
        where = Path(folder).expanduser()
        if not (where / CARD).exists() and (where / MODEL / CARD).exists():  # a run's folder has its model in another
            where = where / MODEL
        try:
            card = json.loads((where / CARD).read_text(encoding="utf-8"))
            if card["format"] != _FORMAT:
                raise ConfigurationError(
                    f"Expected a model of format {_FORMAT} in {where}, got {card['format']!r}: use the murmurfl that "
                    "wrote it.",
                    kind="other-format",
                )
            own = {name: card["model"][name] for name in _SAVED}
            with np.load(where / WEIGHTS, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"Expected a model's folder at {where} (`murmurfl fit` and RunResult.save write one), got: {reason}.",
                kind="unreadable",
            ) from error
        schema = Schema.read_file(where / SCHEMA) if (where / SCHEMA).exists() else None
        return cls(**own, arrays=arrays, schema=schema, card=card)

    @property
    def additive(self) -> KnotRows:
        """Query of an additive model's knots, with as many of them as it has."""
        if self.schema is None:
            raise ConfigurationError("Expected the schema of an additive model, got none.", kind="missing")
        numbers = sum(column.bounds is not None for column in self.schema.columns.values())
        knots = (len(self.arrays[KNOTS_ARRAY]) - 1 - 2 * (self.num_classes == 1)) // numbers
        return additive_rows(self.schema, knots)

    def _number(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        if KNOTS_ARRAY in self.arrays:
            return self.additive.unscaled(scores, self.arrays[KNOTS_ARRAY])
        if self.schema is None or self.schema.label.bounds is None:
            return scores
        low, high = self.schema.label.bounds
        return low + (np.clip(scores, -1.0, 1.0) + 1.0) / 2.0 * (high - low)


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
        found = table_file(Path(rows), schema)
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
        return TrainedModel.read(self.folder)

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


def load_model(folder: Path | str) -> FrozenEstimator:
    """Load a saved model as a frozen scikit-learn estimator: ``fit`` changes nothing, and ``clone`` keeps it.

    Parameters
    ----------
    folder : path
        As :meth:`murmurfl.app.RunResult.save` and ``murmurfl fit`` write it.

    Returns
    -------
    FrozenEstimator
        Around a :class:`TrainedClassifier` or :class:`TrainedRegressor`, with ``predict``, ``score``,
        ``n_features_in_`` and, if it predicts classes, ``predict_proba`` and ``classes_``. It takes rows as a file,
        DataFrame or list of mappings, by name, or as an array in the schema's order.

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
    model = TrainedModel.read(where)
    made = TrainedRegressor(where) if model.num_classes == 1 else TrainedClassifier(where)
    vars(made)["model"] = model  # where its cached property looks first
    return FrozenEstimator(made)
