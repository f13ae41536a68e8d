"""scikit-learn estimators that train privately: :class:`PrivateClassifier` and :class:`PrivateRegressor`."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_y, check_is_fitted, validate_data

from ...clients.records.client_records import Frame, Rows, check_columns, table_rows
from ...clients.records.drafting import Draft, about_copies, draft_of_rows
from ...clients.records.schema import Column, Label, Schema
from ...privacy.errors import ConfigurationError
from ..data.table_task import ReadTable
from ..models.public_pipeline import linear_terms
from .fit_arguments import CLIENTS, EPSILON, FitArguments, own_keys
from .rehearsal import rehearsed_once
from .sealed import run_sealed

if TYPE_CHECKING:
    from ..models.trained_model import TrainedModel
    from .result import RunResult

_validated: Any = validate_data  # which has no types
_FEWEST_ROWS, _LARGEST, _TWO = 10, 1e150, 2
_SPENDS = (
    "Each fit of this estimator is REAL: it releases again, and spends from the ledger {ledger}. A search over "
    "parameters or a cross-validation books every fit, chooses by scores that are not released with noise, and is "
    "refused for other rows than those that the ledger was first used with. Search in rehearsals, without a ledger."
)
Samples = NDArray[Any] | Frame | Sequence[Sequence[object]]
"""Rows of features: an array of shape (rows, features), a DataFrame, or a list of lists."""


class _PrivateEstimator(BaseEstimator, ABC):
    """Parameters and rows of both estimators."""

    classes_: NDArray[Any]
    n_features_in_: int
    feature_names_in_: NDArray[Any]
    result_: RunResult
    model_: TrainedModel
    is_real_: bool

    def __init__(
        self,
        epsilon: float = EPSILON,
        *,
        delta: float = 1e-5,
        clients: int = CLIENTS,
        trust: str = "",
        model: str = "",
        schema: Schema | Path | str | None = None,
        ledger: Path | str | None = None,
        budget: float = 0.0,
        private_log: Path | str | None = None,
        validation_fraction: float = 0.1,
        settings: Mapping[str, object] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.clients = clients
        self.trust = trust
        self.model = model
        self.schema = schema
        self.ledger = ledger
        self.budget = budget
        self.private_log = private_log
        self.validation_fraction = validation_fraction
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Samples, y: ArrayLike, sites: ArrayLike | None = None) -> Self:
        """Train on rows, in a rehearsal or, with a reviewed schema and a ledger, for real.

        Parameters
        ----------
        X : array of shape (rows, features), DataFrame, or list of lists
            Rows of features. A missing value is NaN or None.
        y : array-like of shape (rows,)
            Classes, or numbers for a regressor.
        sites : array-like of shape (rows,), optional
            Name of the site that has each row, in a rehearsal: each site is a client. Default: rows are dealt evenly to
            ``clients`` clients.

        Returns
        -------
        self

        Raises
        ------
        ConfigurationError
            If parameters, schema or ledger cannot be, or rows do not suit them.
        SealedError
            If a real fit fails after a row was read: why is not said.
        """
        if self.ledger is None:
            self._rehearse(X, y, sites)
        else:
            self._fit_for_real(X, y, sites)
        return self

    def _rehearse(self, X: Samples, y: ArrayLike, sites: ArrayLike | None) -> None:
        if self.budget or self.private_log is not None:
            raise ConfigurationError(
                "Expected budget and private_log with a ledger only, got one: a rehearsal spends nothing.",
                kind="conflict",
                setting="ledger",
            )
        if not 0.0 < self.validation_fraction < 1.0:
            raise ConfigurationError(
                f"Expected 0 < validation_fraction < 1, got {self.validation_fraction!r}.",
                kind="out-of-range",
                setting="validation_fraction",
                got=self.validation_fraction,
            )
        named = Schema.read_file(Path(self.schema)) if isinstance(self.schema, str | Path) else self.schema
        checked = _validated(self, X, dtype=None, ensure_all_finite="allow-nan", ensure_min_samples=_FEWEST_ROWS)
        rows = X if _is_frame(X) else checked
        targets = self._checked_targets(y)
        whose = None if sites is None else _listed(sites, "sites")
        for name, found in (("y", targets), ("sites", whose)):
            _check_length(name, found, len(checked))
        columns = _named(rows, named, self.n_features_in_)
        label_name = _free_name(getattr(y, "name", None) or "target", columns) if named is None else named.label.column
        label, cells = self._drafted_label(label_name, targets) if named is None else (None, targets.tolist())
        site_name = "" if whose is None else _free_name("site", [*columns, label_name])
        table = _table(rows, columns, {label_name: cells, **({} if whose is None else {site_name: whose})})
        made = Draft(named) if named is not None else _draft(checked, table, label, apart=site_name)
        _check_schema(made.schema, table)
        found = ReadTable("table", table, made.schema, named is None, made.left_out, (), made.warnings)
        seed = int(check_random_state(self.random_state).randint(1, 2**31 - 1))
        own = own_keys(self._arguments(table, {"seed": seed}), made.schema, len(table))
        many = 0 if site_name else self.clients
        self.result_ = rehearsed_once(found, own, site_name, many, held_out_share=self.validation_fraction)
        self.model_, self.is_real_ = self.result_.model, False
        if named is not None:
            self._take_classes()

    def _fit_for_real(self, X: Samples, y: ArrayLike, sites: ArrayLike | None) -> None:
        """Train for real.

        Nothing here looks at a row: X and y are asked for their shapes and names, and rows are read under the seal.
        """
        from .fitting import real_result

        if self.schema is None:
            raise ConfigurationError(
                "Expected a reviewed schema with a ledger, got none: a draft shows something of the rows. Without a "
                "ledger the fit is a rehearsal.",
                kind="missing",
                setting="schema",
            )
        if sites is not None or self.trust:
            given = "trust" if sites is None else "sites"
            raise ConfigurationError(
                f"Expected no {given} in a real fit, in which this computer has all rows, got some: leave {given} out, "
                "or give each site a node (docs/deployment.md).",
                kind="conflict",
                setting=given,
            )
        schema = Schema.read_file(Path(self.schema)) if isinstance(self.schema, str | Path) else self.schema
        schema.check_for_real_nodes()
        if not _is_frame(X) and not (isinstance(X, np.ndarray) and X.ndim == _TWO):
            raise ConfigurationError(
                "Expected X as an array of shape (rows, features) or a DataFrame in a real fit, got "
                f"{type(X).__name__}.",
                kind="wrong-type",
                setting="X",
            )
        _validated(self, X, skip_check_array=True)
        cells = _listed(y, "y")
        columns = _named(X, schema, self.n_features_in_)
        table = _table(X if _is_frame(X) else np.asarray(X), columns, {schema.label.column: cells})
        _check_length("y", cells, len(table))
        _check_schema(schema, table)
        if not len(table):
            raise ConfigurationError("Expected rows in X, got none.", kind="out-of-range", setting="X")
        found = ReadTable("table", table, schema, False, {})
        own = own_keys(replace(self._arguments(table, {}), clients=1), schema, len(table))
        ledger = Path(self.ledger or "").expanduser()
        budget = 0.0 if ledger.exists() else self.budget
        self.result_ = run_sealed(
            lambda seal: real_result(found, own, ledger, budget, seal, None),
            None if self.private_log is None else Path(self.private_log),
        )
        self.model_, self.is_real_ = self.result_.model, True
        self._take_classes()

    def _arguments(self, table: Rows, seeded: Mapping[str, object]) -> FitArguments:
        """Return the arguments of :func:`murmurfl.fit` that these parameters are."""
        given = {"delta": self.delta, **({"model": self.model} if self.model else {}), **seeded}
        return FitArguments(
            table,
            label="",
            site="",
            clients=0,
            owner="",
            epsilon=self.epsilon,
            schema=None,
            trust=self.trust,
            evaluate="",
            scale="",
            header=True,
            settings={**given, **(self.settings or {})},
        )

    @abstractmethod
    def _checked_targets(self, y: ArrayLike) -> NDArray[Any]:
        """Return the targets of a rehearsal, checked."""

    @abstractmethod
    def _drafted_label(self, name: str, targets: NDArray[Any]) -> tuple[Label, list[Any]]:
        """Return the label that targets make, and its cells."""

    def _take_classes(self) -> None:
        """Note the classes of a given schema."""

    def _rows_of(self, X: Samples) -> Rows:
        """Return rows to predict, by the names that they have in the schema."""
        check_is_fitted(self)
        if self.is_real_:
            _validated(self, X, reset=False, skip_check_array=True)
            rows: Any = X if _is_frame(X) else np.asarray(X)
        else:
            checked = _validated(self, X, reset=False, dtype=None, ensure_all_finite="allow-nan")
            rows = X if _is_frame(X) else checked
        given = self.model_.schema if self.schema is not None else None
        return _table(rows, _named(rows, given, self.n_features_in_), {})

    @property
    def coef_(self) -> NDArray[np.float64]:
        """Coefficients of the expanded features :attr:`coef_names_`; of two classes those of the second one's log-odds.

        Shape (1, terms) for two classes, (classes, terms) for several, (terms,) for numbers.
        """
        found = self._terms().coefficients
        return found[0] if isinstance(self, RegressorMixin) else found

    @property
    def intercept_(self) -> NDArray[np.float64] | float:
        """Intercepts, shape (1,) or (classes,); a number for a regressor."""
        found = self._terms().intercepts
        return float(found[0]) if isinstance(self, RegressorMixin) else found

    @property
    def coef_names_(self) -> NDArray[Any]:
        """Names of the expanded features, such as ``age[40 to 52]``, ``age=missing`` and ``sex=f``."""
        return np.array(self._terms().names, dtype=object)

    def _terms(self) -> Any:
        try:
            return linear_terms(self.model_)
        except ConfigurationError as error:
            raise AttributeError(str(error)) from None

    def _is_real(self) -> bool:
        return bool(getattr(self, "is_real_", self.ledger is not None))

    @property
    def _heading(self) -> str:
        """Whether anybody is protected, which every picture of the estimator says first."""
        return "REAL" if self._is_real() else "REHEARSAL, nobody is protected"

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Return whether it is a rehearsal, and the parameters that are not the default."""
        return f"{self._heading}: {super().__repr__(N_CHAR_MAX)}"

    def _repr_html_inner(self) -> str:
        return f"<b>{self._heading}</b>{self._html_repr()}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        bundle = super()._repr_mimebundle_(**kwargs)
        if "text/html" in bundle:
            bundle["text/html"] = self._repr_html_inner()
        return bundle

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle keeps: the model, and no ``result_``, which has the rows of a rehearsal."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "result_"}

    def __sklearn_clone__(self) -> Self:
        """Return an unfitted copy; warn where each of its fits spends."""
        from sklearn.base import _clone_parametrized

        if self.ledger is not None:
            warnings.warn(_SPENDS.format(ledger=self.ledger), stacklevel=3)
        made: Any = _clone_parametrized(self)
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.non_deterministic = self.ledger is not None
        return tags


class PrivateClassifier(ClassifierMixin, _PrivateEstimator):
    """Classifier whose training is differentially private, for scikit-learn.

    It is a rehearsal, in which nobody is protected, unless both a reviewed ``schema`` and a ``ledger`` are given.

    Parameters
    ----------
    epsilon : float
        Epsilon of everything that a fit releases, at ``delta``.
    delta : float
    clients : int
        Clients that the rows of a rehearsal are dealt to, where ``fit`` is given no sites.
    trust : {"", "untrusted-server", "secure-aggregation", "trusted-server"}
        Trust model of a rehearsal, as in :func:`murmurfl.fit`. Default an untrusted server.
    model : {"", "additive", "softmax", "logistic"}
        Default: a curve for each column if one of them is a number, or else a linear model.
    schema : Schema or path, optional
        How rows are read. An array has the schema's columns in their order, a DataFrame has them by name. Default: a
        draft from the rows of ``fit``, which shows something of them.
    ledger : path, optional
        File of the ledger of a real fit, which counts what was ever released of these rows; made if it is not there.
        Every fit with a ledger is real and spends from it. One set of rows has one ledger.
    budget : float
        Epsilon of everything that is ever released of these rows, for a new ledger; default this fit's. A ledger that
        is there keeps the budget it has.
    private_log : path, optional
        New file, which nobody else can read, for what must not leave a real fit. Default nowhere.
    validation_fraction : float
        Share of the rows of a rehearsal that are set aside for the figures of ``result_``.
    settings : mapping, optional
        Further run-config keys of :func:`murmurfl.fit`, with underscores for hyphens, such as ``{"knots": 5}``.
        ``{"evaluation.share": 0.1}`` asks a real fit for its accuracy where rows are too few for a figure of use.
    random_state : int, RandomState or None
        Seed of a rehearsal. It never seeds the noise of a real fit, whose keys are the operating system's.

    Attributes
    ----------
    classes_ : ndarray of shape (classes,)
        Classes: those of y, ascending, or the schema's in their order.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of str
        Names of the columns of X, where it had some.
    coef_, intercept_, coef_names_ : ndarray
        Coefficients of the expanded features, and their names, of a linear or additive model.
    result_ : RunResult
        Guarantee and figures. It is not kept in a pickle, because that of a rehearsal has the rows.
    model_ : TrainedModel
        The trained model.

    Notes
    -----
    A rehearsal guarantees nothing. A real fit guarantees what :func:`murmurfl.fit` does with ``real=True``, for
    replacement of one row of X with its label, and rests on the number of rows being public. Rows are protected as they
    are handed over: what was computed from several of them before, such as the mean of a ``StandardScaler`` in the same
    pipeline, is not covered. Nor are scores and predictions on private rows after it.

    Examples
    --------
    >>> import numpy as np
    >>> ages = np.linspace(20, 80, 600)[:, None]
    >>> classifier = PrivateClassifier(epsilon=8, random_state=1).fit(ages, np.where(ages[:, 0] > 50, "ill", "well"))
    >>> classifier.predict([[30.0], [75.0]]).tolist()
    ['well', 'ill']
    >>> print(classifier)
    REHEARSAL, nobody is protected: PrivateClassifier(epsilon=8, random_state=1)
    """

    def predict(self, X: Samples) -> NDArray[Any]:
        """Return the most likely class of each row.

        Parameters
        ----------
        X : array of shape (rows, features), DataFrame, or list of lists
            Rows like those of ``fit``.

        Raises
        ------
        ConfigurationError
            If a row does not fit the schema.
        """
        rows = self._rows_of(X)
        return self.classes_[_fitting(self.model_.scores(rows)).argmax(axis=1)]

    def predict_proba(self, X: Samples) -> NDArray[np.float64]:
        """Return the probability of each class, shape (rows, classes), in the order of ``classes_``.

        Parameters
        ----------
        X : array of shape (rows, features), DataFrame, or list of lists
            Rows like those of ``fit``.

        Raises
        ------
        ConfigurationError
            If a row does not fit the schema.
        """
        rows = self._rows_of(X)
        return _fitting(self.model_.predict_proba(rows))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise on few rows
        return tags

    def _checked_targets(self, y: ArrayLike) -> NDArray[Any]:
        targets = column_or_1d(y, warn=True)
        check_classification_targets(targets)
        if self.schema is None:
            self.classes_ = np.unique(targets)
            if len(self.classes_) < _TWO:
                raise ConfigurationError(
                    f"Expected two classes or more in y, got one class, {self.classes_.tolist()[0]!r}.",
                    kind="out-of-range",
                    setting="y",
                )
        return targets

    def _drafted_label(self, name: str, targets: NDArray[Any]) -> tuple[Label, list[Any]]:
        places = np.searchsorted(self.classes_, targets).tolist()
        try:
            label = Label(column=name, classes=tuple(str(one) for one in self.classes_.tolist()))
        except ValueError:  # names that differ in blanks alone, for example
            label = Label(column=name, classes=len(self.classes_))
        return label, [label.names[place] for place in places]

    def _take_classes(self) -> None:
        classes = self.model_.classes
        is_truth = sorted(map(str, classes)) == ["False", "True"]
        self.classes_ = np.array([str(one) == "True" for one in classes]) if is_truth else classes


class PrivateRegressor(RegressorMixin, _PrivateEstimator):
    """Regressor whose training is differentially private, for scikit-learn.

    It is a rehearsal, in which nobody is protected, unless both a reviewed ``schema`` and a ``ledger`` are given.

    Parameters
    ----------
    epsilon : float
        Epsilon of everything that a fit releases, at ``delta``.
    delta : float
    clients : int
        Clients that the rows of a rehearsal are dealt to, where ``fit`` is given no sites.
    trust : {"", "untrusted-server", "secure-aggregation", "trusted-server"}
        Trust model of a rehearsal, as in :func:`murmurfl.fit`. Default an untrusted server.
    model : {"", "additive", "ridge"}
        Default: a curve for each column if one of them is a number, or else a linear model.
    schema : Schema or path, optional
        How rows are read. An array has the schema's columns in their order, a DataFrame has them by name. Default: a
        draft from the rows of ``fit``, which shows something of them.
    ledger : path, optional
        File of the ledger of a real fit, which counts what was ever released of these rows; made if it is not there.
        Every fit with a ledger is real and spends from it. One set of rows has one ledger.
    budget : float
        Epsilon of everything that is ever released of these rows, for a new ledger; default this fit's. A ledger that
        is there keeps the budget it has.
    private_log : path, optional
        New file, which nobody else can read, for what must not leave a real fit. Default nowhere.
    validation_fraction : float
        Share of the rows of a rehearsal that are set aside for the figures of ``result_``.
    settings : mapping, optional
        Further run-config keys of :func:`murmurfl.fit`, with underscores for hyphens, such as ``{"knots": 5}``.
    random_state : int, RandomState or None
        Seed of a rehearsal. It never seeds the noise of a real fit, whose keys are the operating system's.

    Attributes
    ----------
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of str
        Names of the columns of X, where it had some.
    coef_, intercept_, coef_names_ : ndarray
        Coefficients of the expanded features in units of y, and their names. Predictions are cut to the range of y.
    result_ : RunResult
        Guarantee and figures. It is not kept in a pickle, because that of a rehearsal has the rows.
    model_ : TrainedModel
        The trained model.

    Notes
    -----
    What is guaranteed is as for :class:`PrivateClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> ages = np.linspace(20, 80, 600)[:, None]
    >>> regressor = PrivateRegressor(epsilon=8, random_state=1).fit(ages, 2.0 * ages[:, 0])
    >>> bool(abs(regressor.predict([[50.0]])[0] - 100.0) < 15.0)
    True
    """

    def predict(self, X: Samples) -> NDArray[np.float64]:
        """Return the predicted number of each row.

        Parameters
        ----------
        X : array of shape (rows, features), DataFrame, or list of lists
            Rows like those of ``fit``.

        Raises
        ------
        ConfigurationError
            If a row does not fit the schema.
        """
        rows = self._rows_of(X)
        return _fitting(self.model_.predict(rows))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # noise on few rows
        return tags

    def _checked_targets(self, y: ArrayLike) -> NDArray[Any]:
        return _check_y(y, y_numeric=True, estimator=self)

    def _drafted_label(self, name: str, targets: NDArray[Any]) -> tuple[Label, list[Any]]:
        numbers = targets.astype(np.float64)
        return Label(column=name, bounds=_bounds_of(numbers)), numbers.tolist()


def _fitting(found: NDArray[Any]) -> NDArray[np.float64]:
    """Return predictions; raise if there is none for a row."""
    invalid = int(np.isnan(found).reshape(len(found), -1).any(axis=1).sum())
    if invalid:
        raise ConfigurationError(
            f"Expected rows that fit the schema, got {invalid:,} of {len(found):,} that do not: leave them out, or "
            "give their columns a value for missing cells (missing).",
            kind="malformed",
            setting="X",
        )
    return found


def _is_frame(X: object) -> bool:
    return hasattr(X, "iloc") and hasattr(X, "columns")


def _listed(cells: Any, name: str) -> list[Any]:
    """Return one value a row; raise if there are several a row."""
    if len(getattr(cells, "shape", (0,))) != 1 or isinstance(cells, str) or not hasattr(cells, "__len__"):
        raise ConfigurationError(
            f"Expected {name} with one value for each row, got {type(cells).__name__} of shape "
            f"{getattr(cells, 'shape', ())}.",
            kind="wrong-shape",
            setting=name,
        )
    return cells.tolist() if hasattr(cells, "tolist") else list(cells)


def _check_length(name: str, cells: Any, rows: int) -> None:
    if cells is not None and len(cells) != rows:
        raise ConfigurationError(
            f"Expected a value of {name} for each of {rows:,} rows of X, got {len(cells):,}.",
            kind="wrong-shape",
            setting=name,
            got=len(cells),
        )


def _named(X: Any, schema: Schema | None, width: int) -> list[str]:
    """Return the names of the columns of X: its own, the schema's in their order, or x0, x1, ..."""
    if _is_frame(X):
        return [str(name) for name in X.columns]
    if schema is None:
        return [f"x{place}" for place in range(width)]
    if width != len(schema.columns):
        raise ConfigurationError(
            f"Expected the {len(schema.columns)} columns of the schema in X, got {width}: give them in its order, or a "
            "DataFrame with their names.",
            kind="wrong-shape",
            setting="X",
            got=width,
        )
    return list(schema.columns)


def _free_name(wanted: object, taken: Sequence[str]) -> str:
    name = str(wanted)
    while name in taken:
        name += "_"
    return name


def _table(X: Any, columns: Sequence[str], more: Mapping[str, Sequence[Any]]) -> Rows:
    """Return rows of X with more columns, each read when it is asked for."""
    of_frame = table_rows(X) if _is_frame(X) else None

    def row(number: int) -> Mapping[str, Any]:
        cells = of_frame[number] if of_frame is not None else dict(zip(columns, X[number].tolist(), strict=True))
        return {**cells, **{name: values[number] for name, values in more.items()}}

    return Rows(len(X), row, [*columns, *more])


def _check_schema(schema: Schema, table: Rows) -> None:
    check_columns(table.columns, schema)
    if schema.owner:
        raise ConfigurationError(
            f"Expected a schema without an owner, got owner = {schema.owner!r}: murmurfl.fit protects all rows of a "
            "person.",
            kind="unsupported",
            setting="owner",
            got=schema.owner,
        )


def _draft(X: NDArray[Any], table: Rows, label: Label | None, *, apart: str) -> Draft:
    """Return a draft of a schema from all rows: their bounds if all columns are numbers, otherwise as for a file."""
    if label is None:
        raise ConfigurationError("Expected a label, got none.", kind="missing", setting="y")
    if X.dtype.kind in "biuf":
        columns = dict(zip(table.columns, map(_drafted_number, X.T.astype(np.float64)), strict=False))
        rows = zip(
            (row.tobytes() for row in np.ascontiguousarray(X)),
            (table[number][label.column] for number in range(len(X))),
            strict=True,
        )
        return Draft(Schema(columns=columns, label=label), warnings=about_copies(rows))
    made = draft_of_rows(table, "X", label=label.column, apart=[apart] if apart else [])
    return Draft(made.schema.model_copy(update={"label": label}), made.columns, (), made.warnings)


def _drafted_number(values: NDArray[np.float64]) -> Column:
    known = values[np.isfinite(values)]
    known = known if len(known) else np.zeros(1)
    low, high = _bounds_of(known)
    return Column(kind="number", bounds=(low, high), missing=min(max(float(np.median(known)), low), high))


def _bounds_of(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Return the lowest and the highest of some numbers, a little apart where all are equal."""
    low, high = (float(np.clip(one, -_LARGEST, _LARGEST)) for one in (numbers.min(), numbers.max()))
    return (low, high) if low < high else (low, low + max(1.0, abs(low)))
