"""A common model's scores adapted to the rows of one site, for use inside that site alone.

A site that takes part in a private training may differ from the others: other classes are frequent there, a column
means something else, or a device has another scale. The site adapts the common model (the global model of papers) to
its own rows by a linear head,

    s_own(x) = share s(x) + W f(x) + c,

where s(x) are the common model's scores, one for each class or the predicted number, and f(x) are features: those of a
linear model, those below the last layer of a network, or none. Candidates for (share, W, c) are

* the common model itself, (1, 0, 0);
* the common model with scores as large as the site's rows say, (a, 0, 0), which changes no predicted class;
* that model with an offset for each class, (a, 0, c);
* proximal fits, (a, W, c), with a squared penalty on the distance from that model, for several penalties (FedProx's
  term, Li et al. 2020, arXiv:1812.06127, minimised to convergence inside the site);
* models of the site alone, (0, W, c), with the same penalties.

Cross-validation inside the site decides how they are mixed: the mixture has the least loss on rows that its parts were
not fitted to, among all weights >= 0 whose sum is one. Whatever leaves the common model has to gain :data:`PRICE` nats
there over all rows, so that a site with few rows gets the common model back, or nearly so. A mixture of linear heads is
one linear head again (the mixture of global and local models in Mansour et al. 2020, arXiv:2002.10619, and Deng et al.
2020, arXiv:2003.13461, with weights from the site's own rows).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from ..privacy.errors import ConfigurationError

FEWEST_OWNERS, FEWEST_OF_ONE_CLASS = 6, 10
"""Rows below which a site gets the common model back, and those of a site with a single class; owners count once."""
PRICE = 2.0
"""Nats of loss that all of the mixture but the common model has to gain on held-out rows; with owners, on owners."""
STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse penalties for columns of variance one (scikit-learn's C)."""
OFFSET_STRENGTH = 10.0
"""Inverse penalty on the offsets of classes."""
FOLDS = 5
MOST_TRIED = 2_000
"""Rows on which candidates are compared; the chosen ones are fitted to all rows afterwards."""
COMPARED_IN_FULL = 500
"""Rows up to which a comparison predicts each row, and beyond which it predicts one fold."""

_SMALLEST_SCALE = 0.1
"""Least scale of a column, in root mean squares of all scales: a column that hardly varies says little."""
_CONSTANT = 1e-9
_LEAST_WEIGHT, _LEAST_ERROR = 1e-3, 1e-12

_LARGEST_EXPONENT = 3.0
_COMMON, _SCALED, _OFFSETS, _NEAR, _ALONE = "common", "scaled", "offsets", "near", "alone"


class _Candidate(NamedTuple):
    kind: str
    strength: float = 1.0


_CANDIDATES = (
    _Candidate(_COMMON),
    _Candidate(_SCALED),
    _Candidate(_OFFSETS),
    *(_Candidate(kind, strength) for kind in (_NEAR, _ALONE) for strength in STRENGTHS),
)
_SITE_ALONE = tuple(number for number, one in enumerate(_CANDIDATES) if one.kind == _ALONE)


@dataclass(frozen=True, repr=False)
class PersonalHead:
    """A linear head on a common model's scores, fitted to the rows of one site.

    Parameters
    ----------
    share : float
        Weight of the common model's scores, >= 0.
    weights : ndarray of shape (classes, features)
        W; one row where a number is predicted.
    offsets : ndarray of shape (classes,)
        c.
    common : float
        Weight of the common model in the mixture, from 0 to 1: with 1 nothing was adapted but the size of scores.

    Notes
    -----
    A head **contains this site's records**: it was fitted to them without noise and has no epsilon. The common model
    keeps its own guarantee, because post-processing costs nothing: this holds as long as the head, what it predicts and
    what is measured of it stay inside the site.

    Examples
    --------
    >>> import numpy as np
    >>> random = np.random.default_rng(1)
    >>> features = random.normal(size=(200, 2))
    >>> scores = np.stack([-features[:, 0], features[:, 0]], axis=1)  # a common model that looks at one feature
    >>> labels = (features[:, 0] + features[:, 1] > 0).astype(int)  # here both of them count
    >>> head = PersonalHead.fit(scores, labels, features)
    >>> own = head.scores(scores, features).argmax(axis=1)
    >>> bool((own == labels).mean() > 0.95 > (scores.argmax(axis=1) == labels).mean())
    True
    """

    share: float
    weights: NDArray[np.float64]
    offsets: NDArray[np.float64]
    common: float = 1.0

    def __repr__(self) -> str:
        return f"PersonalHead (contains this site's records, do not publish; {1 - self.common:.0%} adapted)"

    @classmethod
    def fit(
        cls, scores: ArrayLike, labels: ArrayLike, features: ArrayLike | None = None, *, owners: ArrayLike | None = None
    ) -> Self:
        """Fit a head to the rows of a site.

        Parameters
        ----------
        scores : array of shape (rows, classes)
            What the common model gives for each row: logits, or logarithms of probabilities. Shape (rows, 1) for
            predicted numbers.
        labels : array of shape (rows,)
            Numbers of classes from 0, or the numbers that are to be predicted, in the unit of the scores.
        features : array of shape (rows, features), optional
            Features that the head may use; without them it has offsets alone.
        owners : array of shape (rows,), optional
            Name of the owner of each row. All rows of an owner are in one fold.

        Returns
        -------
        PersonalHead
            The same one for any order of the rows.

        Raises
        ------
        ConfigurationError
            If there are no rows, or arrays do not fit each other.
        """
        made = site_heads(scores, labels, features, owners=owners).personal
        return cls(made.share, made.weights, made.offsets, made.common)

    def scores(self, scores: ArrayLike, features: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return adapted scores, shape (rows, classes).

        Parameters
        ----------
        scores, features : array
            As for :meth:`fit`, of any rows.
        """
        made = self.share * np.asarray(scores, dtype=np.float64) + self.offsets
        if not self.weights.size:
            return made
        if features is None:
            raise ConfigurationError(
                f"Expected the {self.weights.shape[1]} features that this head was fitted with, got none.",
                kind="missing",
                setting="features",
            )
        return made + np.asarray(features, dtype=np.float64) @ self.weights.T


class SiteHeads(NamedTuple):
    """The heads that a site's rows give."""

    personal: PersonalHead
    """The mixture of all candidates."""
    alone: PersonalHead
    """The best model of the site alone, by cross-validation."""


def site_heads(
    scores: ArrayLike, labels: ArrayLike, features: ArrayLike | None = None, *, owners: ArrayLike | None = None
) -> SiteHeads:
    """Fit a personal head to a site's rows, and the model of the site alone that it is compared with.

    Parameters
    ----------
    scores, labels, features, owners : array
        As for :meth:`PersonalHead.fit`.
    """
    return _fitted(_Site.read(scores, labels, features, owners))


class HeldOut(NamedTuple):
    """Scores of a site's rows by models that were not fitted to them."""

    rows: NDArray[np.intp]
    """Places of these rows among those that were handed over."""
    alone: NDArray[np.float64]
    """Scores by the best model of the site alone, shape (rows, classes)."""
    personal: NDArray[np.float64]
    """Scores by the adapted model."""


def held_out_scores(
    scores: ArrayLike, labels: ArrayLike, features: ArrayLike | None = None, *, owners: ArrayLike | None = None
) -> HeldOut:
    """Return what heads that are fitted to a part of a site's rows predict for its other rows.

    Parameters
    ----------
    scores, labels, features, owners : array
        As for :meth:`PersonalHead.fit`. Of more than :data:`COMPARED_IN_FULL` rows one fold in :data:`FOLDS` is
        predicted, otherwise each row.

    Returns
    -------
    HeldOut
        Without rows if there are less than two owners.
    """
    rows = _Site.read(scores, labels, features, owners)
    folds = rows.folds()
    number = folds.max(initial=0) + 1
    places, alone, personal = [np.empty(0, np.intp)], [rows.scores[:0]], [rows.scores[:0]]
    for fold in range(1 if len(rows.labels) > COMPARED_IN_FULL else number if number > 1 else 0):
        own, site_alone = _fitted(rows.chosen(folds != fold))
        held = rows.chosen(folds == fold)
        places.append(rows.places[folds == fold])
        personal.append(own.scores(held.scores, held.features))
        alone.append(site_alone.scores(held.scores, held.features))
    return HeldOut(np.concatenate(places), np.concatenate(alone), np.concatenate(personal))


class _Site(NamedTuple):
    """The rows of a site, in an order that does not depend on how they were handed over."""

    scores: NDArray[np.float64]
    features: NDArray[np.float64]
    labels: NDArray[Any]
    owners: NDArray[Any]
    places: NDArray[np.intp]

    @classmethod
    def read(cls, scores: ArrayLike, labels: ArrayLike, features: ArrayLike | None, owners: ArrayLike | None) -> _Site:
        """Check arrays and sort their rows."""
        scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
        features = np.zeros((len(labels), 0)) if features is None else np.asarray(features, dtype=np.float64)
        named = np.arange(len(labels)) if owners is None else np.asarray(owners).astype(str)
        if scores.ndim != 2 or features.ndim != 2 or labels.ndim != 1 or named.ndim != 1:
            raise ConfigurationError(
                "Expected scores and features of shape (rows, columns), labels and owners of shape (rows,), got "
                f"{scores.shape}, {features.shape}, {labels.shape} and {named.shape}.",
                kind="wrong-shape",
                setting="scores",
            )
        if not len(labels) == len(scores) == len(features) == len(named) or not scores.size:
            raise ConfigurationError(
                f"Expected one row or more with scores, features, label and owner each, got {len(scores)}, "
                f"{len(features)}, {len(labels)} and {len(named)} of them.",
                kind="wrong-shape" if len(labels) else "missing",
                setting="labels",
            )
        if scores.shape[1] > 1:
            if labels.dtype.kind not in "iub" or labels.min() < 0 or labels.max() >= scores.shape[1]:
                raise ConfigurationError(
                    f"Expected labels that are whole numbers from 0 to {scores.shape[1] - 1}, one for each column of "
                    "the scores, got others.",
                    kind="out-of-range",
                    setting="labels",
                )
            labels = labels.astype(np.int64)
        else:
            labels = labels.astype(np.float64)
        if not (np.isfinite(scores).all() and np.isfinite(features).all() and np.isfinite(labels).all()):
            raise ConfigurationError(
                "Expected finite scores, features and labels, got some that are not: leave these rows out.",
                kind="out-of-range",
                setting="features",
            )
        keys = [(labels[i], features[i].tobytes(), scores[i].tobytes(), str(named[i])) for i in range(len(labels))]
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp)
        named = np.arange(len(order)) if owners is None else named[order]
        return cls(scores[order], features[order], labels[order], named, order)

    def chosen(self, which: NDArray[Any]) -> _Site:
        """Return some of the rows."""
        return _Site(
            self.scores[which], self.features[which], self.labels[which], self.owners[which], self.places[which]
        )

    @property
    def num_owners(self) -> int:
        """Number of owners; without owners, of rows."""
        return len(np.unique(self.owners))

    @property
    def are_too_few(self) -> bool:
        """Whether these rows say too little to leave the common model."""
        one_class = self.scores.shape[1] > 1 and len(np.unique(self.labels)) == 1
        return self.num_owners < (FEWEST_OF_ONE_CLASS if one_class else FEWEST_OWNERS)

    def folds(self) -> NDArray[np.intp]:
        """Return the fold of each row; all rows of an owner are in one.

        Rows follow each other by label and features, so that each fold has its part of every class. Owners follow each
        other by a digest of their names, which may be in the order of anything.
        """
        names, owner_of = np.unique(self.owners, return_inverse=True)
        if names.dtype.kind == "i":
            return (np.arange(len(names)) % FOLDS)[owner_of]
        digests = [hashlib.sha256(str(name).encode()).digest() for name in names]
        ranks = np.empty(len(names), np.intp)
        ranks[sorted(range(len(names)), key=digests.__getitem__)] = np.arange(len(names))
        return (ranks % FOLDS)[owner_of]


class _Columns(NamedTuple):
    """Rows as candidates are fitted to them: columns of mean 0 and variance 1, or as few as there are rows."""

    scores: NDArray[np.float64]
    columns: NDArray[np.float64]
    labels: NDArray[Any]

    def chosen(self, which: NDArray[Any]) -> _Columns:
        """Return some of the rows."""
        return _Columns(self.scores[which], self.columns[which], self.labels[which])


def _fitted(site: _Site) -> SiteHeads:
    """Return the adapted head, and the best one of the site alone."""
    middle, scale = site.features.mean(axis=0), site.features.std(axis=0)
    usual = float(np.sqrt(np.square(scale).mean())) if scale.size else 0.0
    varies = scale > _CONSTANT * (1.0 + np.abs(middle))
    scale = np.where(varies, np.maximum(scale, _SMALLEST_SCALE * usual), np.inf)
    columns, basis = (site.features - middle) / scale, None
    if columns.shape[1] > len(columns):  # penalised weights lie in the span of the rows
        basis = np.linalg.svd(columns, full_matrices=False)[2]
        columns = columns @ basis.T
    rows = _Columns(site.scores, columns, site.labels)
    mixture, best_alone = _choice(site, rows)
    needed = {*np.flatnonzero(mixture).tolist(), best_alone}
    fitted = {number: one for number, one in enumerate(_fits(rows, needed)) if one is not None}

    def head(mixed: NDArray[np.float64]) -> PersonalHead:
        used = [(mixed[number], fitted[number]) for number in np.flatnonzero(mixed).tolist()]
        total = sum((part * one.values for part, one in used), np.zeros_like(fitted[best_alone].values))
        weights = total[:-1].T if basis is None else total[:-1].T @ basis
        weights = weights / scale
        share = sum(part * one.share for part, one in used)
        return PersonalHead(float(share), weights, total[-1] - weights @ middle, float(mixed[:2].sum()))

    return SiteHeads(head(mixture), head(np.eye(len(_CANDIDATES))[best_alone]))


def _choice(site: _Site, rows: _Columns) -> tuple[NDArray[np.float64], int]:
    """Return the weights of the candidates, and which model of the site alone is the best, by cross-validation."""
    common = np.eye(len(_CANDIDATES))[0]
    if site.num_owners == 1:
        return common, _SITE_ALONE[0]
    count = len(site.labels)
    tried = np.arange(min(count, MOST_TRIED)) * count // min(count, MOST_TRIED)
    site, rows = site.chosen(tried), rows.chosen(tried)
    folds = site.folds()
    predicted = np.empty((len(_CANDIDATES), *rows.scores.shape))
    for fold in np.unique(folds):
        held = folds == fold
        for number, one in enumerate(_fits(rows.chosen(~held), range(len(_CANDIDATES)))):
            if one is not None:
                predicted[number, held] = one.applied(rows.chosen(held))
    totals = [float(_losses(np.atleast_2d(predicted[place]), rows.labels).sum()) for place in range(len(predicted))]
    best_alone = min(_SITE_ALONE, key=totals.__getitem__)
    if site.are_too_few:
        return common, best_alone
    return _mixture(predicted, rows.labels, PRICE * len(tried) / site.num_owners), best_alone


def _losses(scores: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Return the logistic loss of each row, or half the squared error."""
    if scores.shape[1] == 1:
        return np.square(scores[:, 0] - labels) / 2.0
    return -log_softmax(scores, axis=1)[np.arange(len(labels)), labels]


def _misses(scores: NDArray[np.float64], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Return the derivative of each row's loss in its scores."""
    if scores.shape[1] == 1:
        return scores - labels[:, None]
    made = np.exp(log_softmax(scores, axis=1))
    made[np.arange(len(labels)), labels] -= 1.0
    return made


class _Fit(NamedTuple):
    """A fitted candidate: share, and W with c in the last row, shape (columns + 1, classes)."""

    share: float
    values: NDArray[np.float64]

    def applied(self, rows: _Columns) -> NDArray[np.float64]:
        """Return its scores."""
        return self.share * rows.scores + rows.columns @ self.values[:-1] + self.values[-1]


def _fits(rows: _Columns, needed: Collection[int]) -> list[_Fit | None]:
    """Fit the candidates of these numbers to rows."""
    made = list[_Fit | None]()
    nothing = np.zeros((rows.columns.shape[1] + 1, rows.scores.shape[1]))
    start, kind, (shifted, offsets) = nothing, "", _size(rows, offset=True)
    for number, one in enumerate(_CANDIDATES):
        if number not in needed:
            made.append(None)
        elif one.kind in (_COMMON, _SCALED):
            made.append(_Fit(_size(rows, offset=False)[0] if one.kind == _SCALED else 1.0, nothing))
        elif one.kind == _OFFSETS:
            made.append(_Fit(shifted, np.concatenate([nothing[:-1], offsets[None]])))
        else:
            share = 0.0 if one.kind == _ALONE else shifted
            start = _weights(rows, one, share, start if one.kind == kind else nothing)
            kind = one.kind
            made.append(_Fit(share, start))
    return made


def _size(rows: _Columns, *, offset: bool) -> tuple[float, NDArray[np.float64]]:
    """Return how much larger the common model's scores of classes should be, and the offsets that go with that.

    A factor of e costs half a nat. Predicted numbers keep their scale.
    """
    count, classes = rows.scores.shape
    if classes == 1:
        error = max(float(np.square(rows.labels - rows.scores[:, 0]).mean()), _LEAST_ERROR)
        total = float((rows.labels - rows.scores[:, 0]).sum())
        return 1.0, np.array([total / (count + error / OFFSET_STRENGTH) if offset else 0.0])

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        share, offsets = math.exp(values[0]), values[1:] * offset
        scores = share * rows.scores + offsets
        misses = _misses(scores, rows.labels)
        penalty = 0.5 * (values[0] ** 2 + float(np.square(offsets).sum()) / OFFSET_STRENGTH)
        slope = share * float((misses * rows.scores).sum()) + values[0]
        moved = (misses.sum(axis=0) + offsets / OFFSET_STRENGTH) * offset
        return float(_losses(scores, rows.labels).sum()) + penalty, np.concatenate([[slope], moved])

    bounds = [(-_LARGEST_EXPONENT, _LARGEST_EXPONENT), *[(None, None)] * classes]
    found = minimize(loss, np.zeros(1 + classes), jac=True, method="L-BFGS-B", bounds=bounds).x
    return math.exp(found[0]), found[1:] * offset


def _weights(rows: _Columns, one: _Candidate, share: float, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return W and, in the last row, c of a candidate whose share is known, shape (columns + 1, classes)."""
    base = share * rows.scores
    design = np.concatenate([rows.columns, np.ones((len(base), 1))], axis=1)
    inverse = np.full((design.shape[1], 1), 1.0 / one.strength)
    inverse[-1] = 1.0 / OFFSET_STRENGTH
    if base.shape[1] == 1:
        error = max(float(np.square(rows.labels[:, None] - base).mean()), _LEAST_ERROR)
        curvature = design.T @ design + error * np.diag(inverse[:, 0])
        return np.asarray(np.linalg.solve(curvature, design.T @ (rows.labels[:, None] - base)), dtype=np.float64)

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = values.reshape(start.shape)
        scores = base + design @ weights
        penalty = 0.5 * float((inverse * np.square(weights)).sum())
        gradient = design.T @ _misses(scores, rows.labels) + inverse * weights
        return float(_losses(scores, rows.labels).sum()) + penalty, gradient.ravel()

    options = {"maxiter": 200, "gtol": 1e-3 * max(1.0, len(base) / 100.0), "maxls": 50}
    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options).x
    return np.asarray(found).reshape(start.shape)


def _mixture(predicted: NDArray[np.float64], labels: NDArray[Any], price: float) -> NDArray[np.float64]:
    """Return weights >= 0 of candidates with sum 1 and the least loss plus price; the first one's is free of the price.

    ``predicted`` has the scores of held-out rows by each candidate, shape (candidates, rows, classes). An error of
    numbers counts in units of the best candidate's.
    """
    number = len(predicted)
    best = min(float(_losses(np.atleast_2d(predicted[place]), labels).mean()) for place in range(number))
    unit = max(2.0 * best, _LEAST_ERROR) if predicted.shape[2] == 1 else 1.0

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        scores = np.tensordot(weights, predicted, axes=1)
        gradient = np.tensordot(predicted, _misses(scores, labels), axes=2) / unit
        gradient[1:] += price
        return float(_losses(scores, labels).sum()) / unit + price * float(weights[1:].sum()), gradient

    start = np.full(number, 0.5 / (number - 1))
    start[0] = 0.5
    sum_of_one = {"type": "eq", "fun": lambda found: found.sum() - 1.0, "jac": np.ones_like}
    options = {"maxiter": 200, "ftol": 1e-9 * len(labels)}
    found = minimize(
        loss, start, jac=True, method="SLSQP", bounds=[(0.0, 1.0)] * number, constraints=sum_of_one, options=options
    ).x
    found = np.where(found < _LEAST_WEIGHT, 0.0, found)
    found = found / found.sum()
    return found if loss(found)[0] <= loss(np.eye(number)[0])[0] else np.eye(number)[0]
