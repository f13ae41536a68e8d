"""A common model adapted to one site's rows, inside that site: :func:`personalise`.

What it returns (the model, its predictions, figures and counts of rows) depends on the site's rows without noise. It is
for the site alone, and every view of it says so first.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...clients.personal_head import PersonalHead, held_out_scores
from ...clients.records.client_records import Rows, Table, check_columns, table_file, table_rows
from ...privacy.errors import ConfigurationError, InvalidRecordError
from ..models.model import KNOTS_ARRAY, area_under_curve
from ..models.trained_model import CARD, PERSONAL, PersonalModel, TrainedModel
from ..version import __version__
from .outcome import RESULT_NAME

FIRST_LINE = f"PERSONAL: {PERSONAL}. Everything here stays inside this site."
_TWO, _FEWEST_COMPARED = 2, 2


class Figures(NamedTuple):
    """Quality of the predictions of one model on held-out rows of the site."""

    right: float | None
    """Share of rows whose class is predicted correctly; None for numbers."""
    auc: float | None
    """Area under the ROC curve of two classes; None if there are not rows of both."""
    error: float | None
    """Root mean square error of predicted numbers, in the label's unit; None for classes."""


@dataclass(frozen=True)
class Comparison:
    """Common model, site alone and personalised model on rows of the site that the latter two were not fitted to.

    Parameters
    ----------
    rows : int
        Number of rows.
    common, alone, personal : Figures
        ``alone`` is the best of several penalised linear models of this site's rows, on the common model's features.
    standard_error : float or None
        Standard error of the difference between ``personal`` and ``common`` in ``right``; None for numbers.
    """

    rows: int
    common: Figures
    alone: Figures
    personal: Figures
    standard_error: float | None

    def lines(self) -> list[str]:
        """Return the comparison for people, a line for each model."""
        named = {"common model": self.common, "this site alone": self.alone, "personalised": self.personal}
        lines = [f"{name:<16} {_shown(found)}" for name, found in named.items()]
        if self.standard_error is not None:
            lines.append(
                f"of {self.rows:,} held-out rows; standard error of personalised less common "
                f"{100 * self.standard_error:.1f} points"
            )
        else:
            lines.append(f"of {self.rows:,} held-out rows")
        return lines


def _shown(found: Figures) -> str:
    if found.error is not None:
        return f"typical error {found.error:.4g}"
    area = "" if found.auc is None else f", AUC {found.auc:.3f}"
    return f"{100 * (found.right or 0.0):.1f} % right{area}"


@dataclass(frozen=True, repr=False)
class Personalised:
    """A model that was adapted to one site, with what the site may see of it: it contains that site's records.

    Parameters
    ----------
    model : PersonalModel
    comparison : Comparison or None
        None if there are too few rows.
    rows : int
        Rows that were used.
    left_out : mapping of str to int
        Rows that do not fit the model's schema, by reason.
    unused : sequence of str
        Columns that the model does not use.
    """

    model: PersonalModel
    comparison: Comparison | None
    rows: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def guarantee(self) -> str:
        """Sentence that nothing is guaranteed but what the common model promises."""
        return self.model.guarantee

    def predict(self, rows: Table | NDArray[Any]) -> NDArray[Any]:
        """Return the class, or the number, that the model predicts for each row; for the site alone."""
        return self.model.predict(rows)

    def save(self, folder: Path | str) -> Path:
        """Write the model into a new folder that only its owner can read, with a card that says what it contains.

        Raises ConfigurationError if it is there, or would lie in a run's or another model's folder.
        """
        where = Path(folder).expanduser()
        files = (RESULT_NAME, CARD)
        if other := next(
            (one for one in where.resolve().parents if any((one / file).exists() for file in files)), None
        ):
            raise ConfigurationError(
                f"Expected a folder for a personalised model outside of {other}, which may be published, got {where}. "
                "Choose one next to the site's rows.",
                kind="conflict",
            )
        return self.model.write(where)

    def lines(self) -> list[str]:
        """Return what the site may see, the warning first."""
        reasons = "; ".join(f"{count:,} with {reason}" for reason, count in self.left_out.items())
        left_out = f", {sum(self.left_out.values()):,} left out ({reasons})" if reasons else ""
        compared = ["too few rows"] if self.comparison is None else self.comparison.lines()
        adapted = 100 * (1 - self.model.head.common)
        return [
            FIRST_LINE,
            f"rows      {self.rows:,} used{left_out}",
            *(f"{'compare' if not number else '':<9} {line}" for number, line in enumerate(compared)),
            f"adapted   {adapted:.0f} % of the mixture; the rest is the common model",
            f"privacy   {self.guarantee}",
        ]

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def personalise(
    model: Path | str | TrainedModel, rows: Table | NDArray[Any], labels: ArrayLike | None = None
) -> Personalised:
    """Adapt a private model to one site's own rows, for use inside that site alone.

    Class offsets, proximal fits from the common model's weights and models of the site alone are mixed with the common
    model by cross-validation on these rows (:class:`murmurfl.clients.PersonalHead`). A site with few rows gets the
    common model back, or nearly so.

    Parameters
    ----------
    model : path or TrainedModel
        Folder of a model that ``murmurfl fit``, a run or a node saved, of any kind. It is only read.
    rows : path, DataFrame, list of mappings, or array of shape (rows, features)
        Rows of the site with the model's columns and its label, in any order; an array for a model without a schema.
    labels : array of shape (rows,), optional
        Numbers of classes, or numbers, for an array.

    Returns
    -------
    Personalised
        With ``model``, ``predict``, ``save``, and a ``comparison`` on held-out rows.

    Raises
    ------
    ConfigurationError
        If the model is personalised already, a column is missing, or no row fits the model's schema with a label.

    Notes
    -----
    **Formal guarantees.** The common model keeps the guarantee on its card: adapting it is post-processing and reads no
    other site's rows. The result has none, because it depends on the site's rows without noise. This costs no privacy
    only while model, predictions and figures stay inside the site, under the assumption that nobody outside sees
    anything that depends on them. Nothing is sent, logged or written before :meth:`Personalised.save`.

    Examples
    --------
    >>> from murmurfl import fit, personalise
    >>> rows = [{"age": float(age % 80), "ill": "yes" if age % 80 > 50 else "no"} for age in range(800)]
    >>> common = fit(rows, label="ill", clients=4, epsilon=8).model
    >>> here = [{"age": float(age), "ill": "yes" if age > 30 else "no"} for age in range(80)]
    >>> made = personalise(common, here)
    >>> made.comparison.personal.right > made.comparison.common.right
    True
    >>> made.predict([{"age": 40.0}]).tolist(), common.predict([{"age": 40.0}]).tolist()
    (['yes'], ['no'])
    """
    from threadpoolctl import threadpool_limits

    common = model if isinstance(model, TrainedModel) else TrainedModel.read(model)
    if isinstance(common, PersonalModel):
        raise ConfigurationError(
            f"Expected a common model, got one that was personalised already, which {PERSONAL}.",
            kind="unsupported",
            setting="model",
        )
    if common.kind == "mean":
        raise ConfigurationError(
            "Expected a model that predicts, got a mean of features, which has nothing to adapt.",
            kind="unsupported",
            setting="model",
        )
    found = _array_rows(common, rows, labels) if common.schema is None else usable_rows(common, rows)
    if not len(found.labels):
        reasons = "".join(f" {count:,} have {reason}." for reason, count in found.left_out.items())
        raise ConfigurationError(
            f"Expected a row or more with a label that fits the model, got none.{reasons}",
            kind="missing",
            setting="rows",
        )
    scores = common.scores_of_inputs(found.inputs)
    features = np.asarray(found.inputs, dtype=np.float64)
    # Class weights raise a class's scores by their logarithms. A site's own model keeps that: rows count once in fits.
    weights = () if common.schema is None else common.schema.label.class_weights
    raised = np.log(np.array(weights or [1.0] * scores.shape[1]))
    with threadpool_limits(limits=1):
        head = PersonalHead.fit(scores - raised, found.labels, features, owners=found.owners)
        head = replace(head, offsets=head.offsets + (1.0 - head.share) * raised)
        compared = _compared(common, scores, raised, features, found)
    card = {
        "what": PERSONAL,
        "murmurfl": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "epsilon": None,
        "mu": None,
        "common_model": {name: value for name, value in common.card.items() if name not in ("model", "format")},
    }
    settings = {
        name: getattr(common, name) for name in ("kind", "num_features", "num_classes", "feature_bound", "constant")
    }
    made = PersonalModel(**settings, arrays=common.arrays, schema=common.schema, card=card, head=head)
    return Personalised(made, compared, len(found.labels), found.left_out, found.unused)


class UsableRows(NamedTuple):
    """Rows that can be used, and how many cannot."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    owners: NDArray[Any] | None
    left_out: Mapping[str, int]
    unused: tuple[str, ...]


def _array_rows(common: TrainedModel, rows: Any, labels: ArrayLike | None) -> UsableRows:
    if labels is None:
        raise ConfigurationError(
            "Expected labels with rows for a model without a schema, got none.", kind="missing", setting="labels"
        )
    inputs, given = common.inputs(rows), np.asarray(labels)
    if given.shape != (len(inputs),):
        raise ConfigurationError(
            f"Expected {len(inputs)} labels, one for each row, got an array of shape {given.shape}.",
            kind="wrong-shape",
            setting="labels",
        )
    fits = np.isfinite(inputs).all(axis=1)
    unfit = int((~fits).sum())
    return UsableRows(inputs[fits], given[fits], None, {"a value that is not finite": unfit} if unfit else {}, ())


def usable_rows(common: TrainedModel, rows: Any) -> UsableRows:
    """Return the rows of a site's table that fit a model's schema, as the model takes them, in the unit of its scores.

    Notes
    -----
    **Formal guarantees.** It guarantees nothing: what it returns depends on every row, and is for the site alone.
    """
    schema = common.schema
    if schema is None or not schema.columns:
        raise ConfigurationError(
            "Expected a model of a table's columns, or one without a schema, got one of arrays with a schema.",
            kind="unsupported",
            setting="model",
        )
    of_file = isinstance(rows, str | os.PathLike)
    table: Rows = table_file(Path(rows), schema) if of_file else table_rows(rows)
    check_columns(table.columns, schema)
    inputs = common.inputs(table)
    labels, owners = np.zeros(len(table)), np.empty(len(table), dtype=object)
    fits = np.array([np.isfinite(row).all() for row in inputs], dtype=np.bool_)
    reasons = Counter[str]()
    for number in range(len(table)):
        try:
            row = table[number]
            labels[number] = float(schema.label.encode(schema.cells(row)[-1]))
            owners[number] = schema.owner_of(row)
        except InvalidRecordError as error:
            reasons[str(error)] += 1
            fits[number] = False
        else:
            reasons["a cell that the schema does not read"] += not fits[number]
    chosen = labels[fits]
    if common.num_classes > 1:
        chosen = chosen.astype(np.int64)
    elif KNOTS_ARRAY in common.arrays:
        chosen = common.additive.scaled(chosen, common.arrays[KNOTS_ARRAY])
    elif schema.label.bounds is not None:
        low, high = schema.label.bounds
        chosen = 2.0 * (chosen - low) / (high - low) - 1.0
    unused = tuple(one for one in table.columns if one not in {*schema.columns, schema.label.column, schema.owner})
    named = owners[fits].astype(str) if schema.owner else None
    return UsableRows(inputs[fits], chosen, named, {why: count for why, count in reasons.items() if count}, unused)


def _compared(
    common: TrainedModel,
    scores: NDArray[np.float64],
    raised: NDArray[np.float64],
    features: NDArray[np.float64],
    found: UsableRows,
) -> Comparison | None:
    """Return how three models predict rows that the latter two were not fitted to; None with too few of them."""
    held = held_out_scores(scores - raised, found.labels, features, owners=found.owners)
    if len(held.rows) < _FEWEST_COMPARED:
        return None
    labels, every = found.labels[held.rows], (scores[held.rows], held.alone + raised, held.personal + raised)
    if common.num_classes == 1:
        numbers = common.numbers(labels)
        first, second, third = (
            Figures(None, None, math.sqrt(float(np.square(common.numbers(one[:, 0]) - numbers).mean())))
            for one in every
        )
        return Comparison(len(labels), first, second, third, None)
    right = [one.argmax(axis=1) == labels for one in every]
    two = common.num_classes == _TWO
    areas = [area_under_curve(one[:, 1] - one[:, 0], labels) if two else math.nan for one in every]
    first, second, third = (
        Figures(float(one.mean()), area if math.isfinite(area) else None, None)
        for one, area in zip(right, areas, strict=True)
    )
    differences = right[2].astype(np.float64) - right[0]
    return Comparison(len(labels), first, second, third, float(differences.std(ddof=1)) / math.sqrt(len(labels)))
