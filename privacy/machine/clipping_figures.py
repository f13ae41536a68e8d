"""What clipping did to the contributions of a simulation: how many were not finite, and how far beyond the clip.

A training whose gradients are NaN, or hundreds of times as long as the clip, learns nothing, and nobody is told: a row
that is not finite counts as zero, and a long row is scaled down. These figures would tell, but they are computed from
private data without noise. So nothing is counted unless somebody is :func:`observing`: a simulation, which marks the
figures as not private, or a real machine for its own log, which the figures never leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_PRIVATE = "simulation only: computed from private data without noise, not private"
FAR_BEYOND = 10.0
"""A median of so many clip norms is worth a warning: clipping leaves next to nothing of such contributions."""

_PREFIX = "simulated-training-"
_LARGEST_RATIO = 1e300


@dataclass(frozen=True)
class TrainingFigures:
    """Figures of rows that were clipped: per-sample gradients, local steps, or whole updates. Not private.

    Of ``rows`` in all, ``not_finite`` have a NaN or an infinity and count as zero, ``clipped`` are longer than the clip
    norm. Ratios are lengths over the clip norm: the median over releases of the median of a release's finite rows, and
    the largest.
    """

    rows: int = 0
    not_finite: int = 0
    clipped: int = 0
    median_ratio: float = 0.0
    largest_ratio: float = 0.0

    @property
    def worrying(self) -> bool:
        """Whether the figures are worth a warning to whoever started the run."""
        return self.not_finite > 0 or self.median_ratio > FAR_BEYOND

    @property
    def sentence(self) -> str:
        """The figures in words."""
        finite = max(self.rows - self.not_finite, 1)
        return (
            f"{self.not_finite:,} of {self.rows:,} contributions were not finite and count as zero, "
            f"{100 * self.clipped / finite:.0f} % of the others were clipped; they were {times(self.median_ratio)} "
            f"as long as the clip norm in the median, {times(self.largest_ratio)} at most."
        )

    def document(self) -> dict[str, Any]:
        """Plain values, marked as not private."""
        return {"note": NOT_PRIVATE, **self._values()}

    def entries(self) -> dict[str, int | float]:
        """The figures as entries of a simulated machine's reply."""
        return {f"{_PREFIX}{name.replace('_', '-')}": value for name, value in self._values().items()}

    def _values(self) -> dict[str, int | float]:
        return {f.name: getattr(self, f.name) for f in fields(TrainingFigures)}

    @classmethod
    def read(cls, entries: Mapping[str, Any]) -> TrainingFigures | None:
        """The figures among a reply's entries; None if one is missing."""
        values = {f.name: entries.get(f"{_PREFIX}{f.name.replace('_', '-')}") for f in fields(cls)}
        numbers = [v for v in values.values() if isinstance(v, int | float) and math.isfinite(v) and v >= 0]
        return cls(**values) if len(numbers) == len(values) else None  # type: ignore[arg-type]

    @classmethod
    def together(cls, figures: Iterable[TrainingFigures]) -> TrainingFigures:
        """The figures of several releases, or of several rounds, as one."""
        figures = list(figures)
        return cls(
            sum(one.rows for one in figures),
            sum(one.not_finite for one in figures),
            sum(one.clipped for one in figures),
            float(np.median([one.median_ratio for one in figures])) if figures else 0.0,
            max((one.largest_ratio for one in figures), default=0.0),
        )


@dataclass(frozen=True, eq=False)
class ObservedFigures(TrainingFigures):
    """Figures that several places can put together as one place would have them: with the median of each release."""

    medians: NDArray[np.float64] = field(default_factory=lambda: np.empty(0), repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingFigures) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().items()))

    @classmethod
    def united(cls, figures: Sequence[ObservedFigures]) -> ObservedFigures:
        """The figures of releases that were observed in several places, as one place would have them."""
        medians = np.concatenate([one.medians for one in figures]) if figures else np.empty(0)
        return cls(
            sum(one.rows for one in figures),
            sum(one.not_finite for one in figures),
            sum(one.clipped for one in figures),
            _median(medians),
            max((one.largest_ratio for one in figures), default=0.0),
            medians,
        )


def _median(medians: NDArray[np.float64]) -> float:
    if not len(medians):
        return 0.0
    ordered, half = np.sort(medians), len(medians) // 2  # in a tenth of numpy.median's time, for a few of them
    middle = ordered[half] if len(medians) % 2 else (ordered[half - 1] + ordered[half]) / 2.0
    return min(float(middle), _LARGEST_RATIO)


def times(ratio: float) -> str:
    """A ratio for people, such as ``0.71 times`` or ``4,646 times``."""
    return f"{ratio:.3g} times" if ratio < 1000 or ratio >= 1e9 else f"{ratio:,.0f} times"


class TrainingObserver:
    """Collects the lengths of rows over their clip norm while :func:`observing`."""

    def __init__(self) -> None:
        self.machines: dict[str, TrainingFigures] = {}
        """The norms that machines of this process hand over."""
        self._ratios: list[NDArray[np.float64]] = []

    def add(self, norms: NDArray[np.float64], clip_norm: float) -> None:
        """Take note of the norms of rows that are clipped together; NaN for a row that is not finite."""
        self._ratios.append(norms / clip_norm)

    def add_each(self, norms: NDArray[np.float64], clip_norm: float) -> None:
        """Take note of the norms of each of several releases, shape (releases, rows)."""
        self._ratios.extend(norms / clip_norm)

    def figures(self) -> ObservedFigures | None:
        """The figures since the last call; None if nothing was observed."""
        ratios, self._ratios = self._ratios, []
        if not ratios:
            return None
        if len(ratios) == 1 and len(ratios[0]) == 1:  # a machine's message with one row in it
            return _of_one_row(float(ratios[0][0]))
        rows = np.concatenate(ratios)
        finite = rows[~np.isnan(rows)]
        if len(finite) == len(rows) and len({len(one) for one in ratios}) == 1:
            medians = np.median(rows.reshape(len(ratios), -1), axis=1) if len(rows) > len(ratios) else rows
        else:
            known = [one[~np.isnan(one)] for one in ratios]
            medians = np.array([np.median(one) for one in known if len(one)])
        return ObservedFigures(
            len(rows),
            len(rows) - len(finite),
            int((finite > 1.0).sum()),
            _median(medians),
            min(float(finite.max(initial=0.0)), _LARGEST_RATIO),
            medians,
        )


def _of_one_row(ratio: float) -> ObservedFigures:
    """The figures of a single row, in a hundredth of the arrays' time."""
    if math.isnan(ratio):
        return ObservedFigures(1, 1)
    shown = min(ratio, _LARGEST_RATIO)
    return ObservedFigures(1, 0, int(ratio > 1.0), shown, max(shown, 0.0), np.array([ratio]))


_observer: ContextVar[TrainingObserver | None] = ContextVar("murmurfl_training_observer", default=None)


@contextmanager
def observing() -> Iterator[TrainingObserver]:
    """Count what is clipped inside; the figures are not private and must not leave a real machine."""
    before, observer = _observer.get(), TrainingObserver()
    _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.set(before)


def observer_around() -> TrainingObserver | None:
    """The observer in this process; None if nobody is :func:`observing`."""
    return _observer.get()


def observe(norms: NDArray[np.float64], clip_norm: float) -> None:
    """Hand the norms of rows that are clipped, shape (rows,), to the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer.add(norms, clip_norm)


def observe_releases(norms: NDArray[np.float64], clip_norm: float) -> None:
    """Hand the norms of several releases, shape (releases, rows), to the observer, if there is one."""
    observer = _observer.get()
    if observer is not None and len(norms):
        observer.add_each(norms, clip_norm)
