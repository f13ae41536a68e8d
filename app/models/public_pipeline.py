"""A saved model in scikit-learn's own terms: named coefficients, and a pipeline that needs no murmurfl to predict.

The pipeline has public transformers alone. It reads plain cells: numbers as numbers, categories by their names, NaN for
a missing value. What it reads otherwise than the schema does stands in :func:`pipeline_notes`.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import OTHER, Column, Schema, number_of, text_of
from ...privacy.errors import ConfigurationError, InvalidRecordError, check_installed
from ...privacy.queries.knots import KnotRows
from .model import CENTRE_ARRAY, KNOTS_ARRAY, TEMPERATURE_ARRAY, Model

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

PIPELINE = "pipeline.skops"
"""Name of the pipeline's file in a model's folder."""
_TOLERANCE = 1e-6
_TRIED, _MISSING_SHARE, _TWO = 64, 0.1, 2
_TRUTH = frozenset({"true", "false"})
_LINEAR = frozenset({"softmax", "logistic", "additive", "ridge"})


class TrainedOnTable(Protocol):
    """The part of a trained model that a pipeline is made from."""

    @property
    def kind(self) -> str: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def schema(self) -> Schema | None: ...

    @property
    def model(self) -> Model: ...

    @property
    def classes(self) -> NDArray[Any]: ...

    @property
    def additive(self) -> KnotRows: ...

    def predict(self, rows: Any, /) -> NDArray[Any]: ...

    def predict_proba(self, rows: Any, /) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class LinearTerms:
    """Coefficients of the expanded features of a linear or additive model.

    The score of a row is ``expanded @ coefficients.T + intercepts``: log-odds of the second of two classes, a score of
    each of several, or the predicted number.
    """

    names: list[str]
    coefficients: NDArray[np.float64]
    """Shape (1, terms) for two classes and for numbers, (classes, terms) for several."""
    intercepts: NDArray[np.float64]


@dataclass(frozen=True)
class _Term:
    """Terms that one column becomes, and what it adds to the intercept."""

    names: list[str]
    weights: list[NDArray[np.float64]]
    constant: NDArray[np.float64]


def linear_terms(model: TrainedOnTable) -> LinearTerms:
    """Return the coefficients of a linear or additive model by name.

    Parameters
    ----------
    model : TrainedOnTable
        A number has one term, ``age``, scaled from its bounds to [-1, 1]. In an additive model it has one for each pair
        of knots, ``age[40 to 52]``, which rises from 0 to 1 between them: its coefficient is what the score gains
        there; and ``age=missing``. Yes and no are ``smoker=no`` and ``smoker=yes``, a category has a term for each
        value, compared with ``other``.

    Raises
    ------
    ConfigurationError
        If the model is not linear in such terms, of kind "unsupported".
    """
    schema = model.schema
    reason = _not_linear(model)
    if reason or schema is None:
        raise ConfigurationError(
            f"Expected a linear or additive model of a table's columns, got {reason}.",
            kind="unsupported",
            setting="model",
        )
    weights, intercepts = _margins(model)
    knots = model.arrays.get(KNOTS_ARRAY)
    terms = list(_of_values(schema, weights, knots, model) if knots is not None else _of_scaled(schema, weights))
    names = [name for term in terms for name in term.names]
    coefficients = np.stack([one for term in terms for one in term.weights], axis=1)
    intercepts = intercepts + sum(term.constant for term in terms)
    if model.num_classes == 1:
        low, high = _range_of(model, schema)
        coefficients, intercepts = coefficients * (high - low) / 2.0, low + (intercepts + 1.0) / 2.0 * (high - low)
    return LinearTerms(names, coefficients, intercepts)


def _not_linear(model: TrainedOnTable) -> str:
    """Return why a model has no terms; "" if it has."""
    schema = model.schema
    if schema is None or not schema.columns:
        return "one of arrays"
    if model.kind not in _LINEAR:
        return f"model = {model.kind!r}"
    if CENTRE_ARRAY in model.arrays:
        return "one with centring, whose rows are scaled to one length"
    if schema.is_encoded:
        return "one of texts or images"
    if schema.norm is not None:
        return f"a schema with norm = {schema.norm:g}, to which longer rows are scaled down"
    return ""


def _margins(model: TrainedOnTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights (scores, features) and intercepts: of two classes one score, the difference."""
    arrays = [np.asarray(model.arrays[name], dtype=np.float64) for name in model.model.names]
    weights = np.atleast_2d(arrays[0])
    intercepts = arrays[1] if len(arrays) > 1 else np.zeros(len(weights))
    if model.num_classes == _TWO and len(weights) == _TWO:
        weights, intercepts = weights[1:] - weights[:1], intercepts[1:] - intercepts[:1]
    if model.num_classes == 1:  # its constant stands last
        weights, intercepts = weights[:, :-1], intercepts + weights[:, -1]
    temperature = float(model.arrays.get(TEMPERATURE_ARRAY, 1.0))
    return weights / temperature, intercepts / temperature


def _range_of(model: TrainedOnTable, schema: Schema) -> tuple[float, float]:
    """Return the numbers that scaled predictions of -1 and 1 stand for."""
    knots = model.arrays.get(KNOTS_ARRAY)
    if knots is not None:
        return float(knots[-2]), float(knots[-1])
    return schema.label.bounds or (-1.0, 1.0)


def _of_scaled(schema: Schema, weights: NDArray[np.float64]) -> Iterator[_Term]:
    """Yield the terms of a linear model's columns."""
    place = 0
    for name, column in schema.columns.items():
        own = weights[:, place : place + column.num_features]
        place += column.num_features
        if column.kind == "category":
            yield _category(name, column, own)
        elif column.kind == "yes/no":
            names, signs = [f"{name}=no", f"{name}=yes"], [-1.0, 1.0]
            if column.missing is not None:
                names, signs = [*names, *_missing_names(name)], [*signs, *[_sign(column)] * 2]
            yield _Term(names, [sign * own[:, 0] for sign in signs], np.zeros(len(own)))
        else:
            yield _Term([name], [own[:, 0]], np.zeros(len(own)))


def _category(name: str, column: Column, weights: NDArray[np.float64]) -> _Term:
    order = _encoded_order(column)
    other = weights[:, -1]
    names, places = [f"{name}={column.values[i]}" for i in order], list(order)
    instead = _instead(column)
    if instead is not None and not _are_numbers(column):
        names, places = [*names, *_missing_names(name)], [*places, *[column.values.index(instead)] * 2]
    return _Term(names, [weights[:, i] - other for i in places], other)


def _missing_names(name: str) -> list[str]:
    """Return the names of the terms of a missing value, None and NaN."""
    return [f"{name}=missing (None)", f"{name}=missing"]


def _sign(column: Column) -> float:
    """Return what yes or no in the place of a missing value becomes."""
    return column.encode(None)[0]


_IDS, _FILES = re.compile(r'("__id__": )(\d+)'), re.compile(r'("file": ")(\d+)(\.npy")')
_SKOPS_SCHEMA, _NO_DATE = "schema.json", (1980, 1, 1, 0, 0, 0)


def pipeline_file(pipeline: Pipeline) -> bytes:
    """Return a pipeline's file as skops writes it, without the time and the addresses of objects.

    The bytes follow from the pipeline alone. What skops writes has addresses in this process's memory, which may depend
    on anything that was read before, such as rows.
    """
    import skops.io  # pyright: ignore[reportMissingImports]  # of an extra

    with zipfile.ZipFile(io.BytesIO(skops.io.dumps(pipeline))) as dumped:
        content = {name: dumped.read(name) for name in dumped.namelist()}
    schema = content.pop(_SKOPS_SCHEMA).decode()
    numbers: dict[str, int] = {}
    for found in _IDS.finditer(schema):
        numbers.setdefault(found[2], len(numbers))

    def numbered(found: re.Match[str]) -> str:
        return f"{found[1]}{numbers[found[2]]}{found[3] if found.re is _FILES else ''}"

    named = {f"{numbers[name.removesuffix('.npy')]}.npy": data for name, data in content.items()}
    named[_SKOPS_SCHEMA] = _FILES.sub(numbered, _IDS.sub(numbered, schema)).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in sorted(named):
            file.writestr(zipfile.ZipInfo(name, _NO_DATE), named[name])
    return made.getvalue()


def _instead(column: Column) -> str | None:
    """Return the value of a category that a missing one counts as; None for every other value."""
    instead = None if column.missing is None else text_of(column.missing)
    return instead if instead in column.values else None


def _encoded_order(column: Column) -> list[int]:
    """Return the places of a category's values as an encoder has them: numbers ascending, words as they are."""
    places = list(range(len(column.values)))
    return sorted(places, key=lambda i: float(column.values[i])) if _are_numbers(column) else places


def _are_numbers(column: Column) -> bool:
    """Return True if all values of a category are called as numbers would be."""
    return all(map(_is_number, column.values))


def _of_values(
    schema: Schema, weights: NDArray[np.float64], public: NDArray[Any], model: TrainedOnTable
) -> Iterator[_Term]:
    """Yield the terms of an additive model's columns, as :meth:`KnotRows.features` makes them."""
    count, share = model.additive.knots, float(public[0])
    place = number = 0
    for name, column in schema.columns.items():
        if column.bounds is None:
            values = 2 if column.kind == "yes/no" else len(column.values) + 1
            own = weights[:, place : place + values]
            place += values
            constant = -own.mean(axis=1)
            if column.kind == "category":
                term = _category(name, column, own)
                yield _Term(term.names, term.weights, term.constant + constant)
                continue
            missing = np.zeros(len(own))
            names = [f"{name}=no", f"{name}=yes", *_missing_names(name)]
            yield _Term(names, [own[:, 0], own[:, 1], missing, missing], constant)
            continue
        own = weights[:, place : place + count + 2]
        place += count + 2
        knots = _knots(public, number, count)
        number += 1
        steps = len(knots) - 1
        means = np.array([0.5, *[1.0] * (steps - 1), 0.5]) / steps
        hats = own[:, : len(knots)] * math.sqrt(1.0 - share)
        constant = -hats @ means
        hats = hats + own[:, [count]] * (2.0 * np.arange(len(knots)) / steps - 1.0) * math.sqrt(share)
        missing = own[:, count + 1] - constant - hats[:, 0]
        names = [f"{name}[{low:.6g} to {high:.6g}]" for low, high in pairwise(knots)]
        codes = [f"{name}={code:g}" for code in _number_codes(column)]
        gains = [*np.diff(hats, axis=1).T, *[missing] * (1 + len(codes))]
        yield _Term([*names, f"{name}=missing", *codes], gains, constant + hats[:, 0])


def _knots(public: NDArray[Any], number: int, count: int) -> NDArray[np.float64]:
    return np.unique(np.asarray(public[1 + number * count : 1 + (number + 1) * count], dtype=np.float64))


@dataclass(frozen=True)
class SavedPipeline:
    """The pipeline of a saved model, and what its card says of it."""

    made: Pipeline | None
    notes: list[str]
    """Cells that the pipeline reads otherwise than murmurfl, or why there is none."""

    def document(self) -> dict[str, Any]:
        """Return the entry of the card."""
        return {"file": None if self.made is None else PIPELINE, "notes": self.notes}


def saved_pipeline(model: TrainedOnTable) -> SavedPipeline:
    """Return the pipeline to save next to a model, if skops is installed and the model can be expressed as one.

    Parameters
    ----------
    model : TrainedOnTable
        Any trained model.
    """
    try:
        check_installed("skops", "skops", PIPELINE)
        made = public_pipeline(model)
    except ConfigurationError as error:
        return SavedPipeline(None, [str(error)])
    return SavedPipeline(made, pipeline_notes(model.schema) if model.schema is not None else [])


def public_pipeline(model: TrainedOnTable) -> Pipeline:
    """Return a model as a fitted scikit-learn ``Pipeline`` of public transformers and a linear estimator.

    Parameters
    ----------
    model : TrainedOnTable
        Linear or additive.

    Returns
    -------
    Pipeline
        It takes a DataFrame with the schema's columns, or an array of them in the schema's order.

    Raises
    ------
    ConfigurationError
        If the model cannot be expressed exactly, of kind "unsupported".
    """
    from sklearn.pipeline import Pipeline

    terms = linear_terms(model)
    schema = model.schema
    if schema is None:
        raise ConfigurationError("Expected a model with a schema, got one without.", kind="missing", setting="schema")
    made = Pipeline([("columns", _transformer(model, schema)), ("model", _estimator(model, schema, terms))])
    _check_equal(model, schema, made)
    return made


def _transformer(model: TrainedOnTable, schema: Schema) -> Any:
    """Return a fitted ColumnTransformer whose columns are the terms."""
    from sklearn.compose import ColumnTransformer
    from sklearn.frozen import FrozenEstimator

    parts: list[tuple[str, Any, list[int]]] = []
    example = np.empty((1, len(schema.columns)), dtype=object)
    public, number = model.arrays.get(KNOTS_ARRAY), 0
    for place, (name, column) in enumerate(schema.columns.items()):
        if column.kind == "category":
            made, cell = _category_parts(name, column)
        elif column.kind == "yes/no":
            made, cell = _words_part(["no", "yes"], missing=public is not None or column.missing is not None), "no"
        elif public is None:
            made, cell = _scaled_part(name, column), column.bounds[0] if column.bounds else 0.0
        else:
            knots = _knots(public, number, model.additive.knots)
            made, cell, number = _ramps_part(column, knots), knots[0], number + 1
        example[:, place] = cell
        parts.append((name, FrozenEstimator(made), [place]))
    transformer: Any = ColumnTransformer(parts, sparse_threshold=0.0).fit(example)
    transformer.transformers = [(name, frozen.estimator, at) for name, frozen, at in transformer.transformers]
    transformer.transformers_ = [(name, frozen.estimator, at) for name, frozen, at in transformer.transformers_]
    names = np.array(list(schema.columns), dtype=object)  # for tables in any order
    transformer.feature_names_in_ = names
    for _, made, place in transformer.transformers_:
        first = made[0] if hasattr(made, "__getitem__") else made
        first.feature_names_in_ = names[place]
    return transformer


def _floats() -> Any:
    """Return a fitted transformer that reads a column as floating-point numbers and changes none."""
    from sklearn.preprocessing import StandardScaler

    return StandardScaler(with_mean=False, with_std=False).fit([[0.0]])


def _filled(value: float, codes: Sequence[float] = ()) -> list[Any]:
    """Return fitted transformers that put a value in the place of NaN, and of codes for a missing value.

    SimpleImputer would do as well, but skops does not trust the type that it stores.
    """
    from sklearn.impute import KNNImputer

    return [KNNImputer(missing_values=code).fit([[value]]) for code in (math.nan, *codes)]


def _number_codes(column: Column) -> list[float]:
    """Return the codes for missing values that are numbers."""
    found = []
    for code in column.missing_codes:
        with suppress(InvalidRecordError):
            found.append(number_of(code))
    return sorted(set(found))


def _scaled_part(name: str, column: Column) -> Any:
    """Return a number scaled from its bounds to [-1, 1]."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    low, high = column.bounds or (0.0, 1.0)
    codes, fill = _number_codes(column), []
    if column.missing is not None:
        fill = _filled(number_of(column.missing), codes)
    if codes and (column.missing is None or number_of(column.missing) in codes):
        raise ConfigurationError(
            f"Expected a value for missing cells of column {name!r} next to missing_codes, got none but a code.",
            kind="unsupported",
            setting="missing",
        )
    return make_pipeline(_floats(), *fill, MinMaxScaler(feature_range=(-1, 1), clip=True).fit([[low], [high]]))


def _ramps_part(column: Column, knots: NDArray[np.float64]) -> Any:
    """Return ramps between the knots of a number, and whether it is missing: a missing one is below all ramps."""
    from sklearn.impute import MissingIndicator
    from sklearn.pipeline import FeatureUnion, make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    codes = _number_codes(column)
    below = min([knots[0], *codes]) - 1.0 - abs(knots[0])
    ramps: list[Any] = [MinMaxScaler(clip=True).fit([[low], [high]]) for low, high in pairwise(knots)]
    union = FeatureUnion([(f"{number}", ramp) for number, ramp in enumerate(ramps)])
    indicators: list[Any] = [MissingIndicator(features="all").fit([[0.0]])]
    for code in codes:
        found = MissingIndicator(missing_values=code, features="all").fit([[0.0]])
        indicators.append(make_pipeline(*_filled(below), found))
    curve = make_pipeline(*_filled(below, codes), union)
    every = FeatureUnion([("curve", curve), *((f"missing {number}", one) for number, one in enumerate(indicators))])
    return make_pipeline(_floats(), every)


def _words_part(words: Sequence[str], *, missing: bool, others: bool = False) -> Any:
    """Return indicators of words and of ``missing`` values; other words have none, or are refused."""
    from sklearn.preprocessing import OneHotEncoder

    categories = np.array([*words, *([None, math.nan] if missing else [])], dtype=object)
    handled = "ignore" if others else "error"
    kinds: Any = [categories]
    encoder = OneHotEncoder(categories=kinds, handle_unknown=handled, sparse_output=False)
    return encoder.fit(np.array([[words[0]]], dtype=object))


def _category_parts(name: str, column: Column) -> tuple[Any, Any]:
    """Return indicators of a category's values, none of them set for another value, and one value."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    instead = _instead(column)
    if instead is not None and column.missing_codes:
        raise ConfigurationError(
            f"Expected column {name!r} without missing_codes, or with missing values as {OTHER!r}, got codes that "
            f"count as {instead!r}.",
            kind="unsupported",
            setting="missing_codes",
        )
    if not _are_numbers(column) and any(map(_is_number, column.values)):
        raise ConfigurationError(
            f"Expected the values of column {name!r} to be all numbers or all words, got some of each: an encoder of "
            "scikit-learn would take a number for another value.",
            kind="unsupported",
            setting="values",
        )
    if any(value.casefold() in _TRUTH for value in column.values):
        raise ConfigurationError(
            f"Expected no truth values in column {name!r}, got some: use kind = 'yes/no'.",
            kind="unsupported",
            setting="values",
        )
    if not _are_numbers(column):
        return _words_part(column.values, missing=instead is not None, others=True), column.values[0]
    values = np.array([float(column.values[i]) for i in _encoded_order(column)])
    categories: Any = [values]
    encoder = OneHotEncoder(categories=categories, handle_unknown="ignore", sparse_output=False)
    fill = [] if instead is None else _filled(float(instead))
    return make_pipeline(_floats(), *fill, encoder.fit(values[:1, None])), values[0]


def _estimator(model: TrainedOnTable, schema: Schema, terms: LinearTerms) -> Any:
    """Return a fitted linear estimator with these coefficients."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.preprocessing import QuantileTransformer

    width = len(terms.names)
    if model.num_classes > 1:
        made: Any = LogisticRegression()
        made.classes_, made.n_iter_, made.n_features_in_ = model.classes, np.zeros(1, np.int32), width
        made.coef_, made.intercept_ = terms.coefficients, terms.intercepts
        return made
    low, high = _range_of(model, schema)
    if KNOTS_ARRAY in model.arrays:
        low, high = (
            float(one) for one in model.additive.unscaled(np.array([-np.inf, np.inf]), model.arrays[KNOTS_ARRAY])
        )
    linear: Any = LinearRegression()
    linear.coef_ = terms.coefficients[0] / (high - low)
    linear.intercept_ = float(terms.intercepts[0] - low) / (high - low)
    linear.n_features_in_ = width
    clipping = QuantileTransformer(n_quantiles=2).fit([[low], [high]])  # whose inverse is clipped to both
    made = TransformedTargetRegressor(regressor=linear, transformer=clipping)
    made.regressor_, made.transformer_, made._training_dim = linear, clipping, 1
    return made


def _check_equal(model: TrainedOnTable, schema: Schema, pipeline: Pipeline) -> None:
    """Raise if a pipeline predicts otherwise than its model on made-up rows, with missing values among them."""
    random = np.random.Generator(np.random.Philox(key=_TRIED))
    rows = [*schema.made_up(_TRIED, random), *schema.outliers()]
    for row in rows:
        for name, column in schema.columns.items():
            is_number = column.kind == "category" and _are_numbers(column)
            if random.random() < _MISSING_SHARE and _can_be_missing(model, column):
                row[name] = random.choice([math.nan, *(_number_codes(column) if column.bounds else [])])
            elif is_number and row[name] == OTHER:
                row[name] = 1.0 + max(float(value) for value in column.values)
            elif is_number:
                row[name] = float(row[name])
    cells = np.array([[row[name] for name in schema.columns] for row in rows], dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model.num_classes > 1:
            far = np.abs(pipeline.predict_proba(cells) - model.predict_proba(rows)).max()
        else:
            low, high = _range_of(model, schema)
            far = np.abs(pipeline.predict(cells) - model.predict(rows)).max() / (high - low)
    if not far <= _TOLERANCE:
        raise ConfigurationError(
            f"Expected equal predictions of a pipeline on made-up rows, got some that are {far:.2g} apart.",
            kind="unsupported",
            setting="model",
        )


def _can_be_missing(model: TrainedOnTable, column: Column) -> bool:
    return column.missing is not None or column.kind == "category" or KNOTS_ARRAY in model.arrays


def _is_number(value: str) -> bool:
    """Return True if a category is called as a number would be."""
    try:
        return text_of(number_of(value)) == value
    except InvalidRecordError:
        return False


def pipeline_notes(schema: Schema) -> list[str]:
    """Return what the pipeline of a schema's model reads otherwise than murmurfl does, for the model's card.

    Parameters
    ----------
    schema : Schema
        Schema by which murmurfl reads rows.
    """
    columns = schema.columns.items()
    named = {
        "texts of numbers, with units, signs of thousands or a decimal comma": [
            name for name, one in columns if one.unit or one.thousands or (one.bounds and schema.decimal == ",")
        ],
        "codes for missing values that are no numbers": [
            name for name, one in columns if one.bounds and len(_number_codes(one)) < len(one.missing_codes)
        ],
        "whether a number is whole": [name for name, one in columns if one.kind == "integer"],
        "other words than yes and no": [name for name, one in columns if one.kind == "yes/no"],
    }
    read = "cells are numbers, yes and no, names of categories as the schema has them, and NaN where one is missing"
    return [read, *(f"not read or checked: {what} ({', '.join(names)})" for what, names in named.items() if names)]
