"""Tables of people with two classes; a model's worth there is its AUC.

Every value is scaled by public constants (a limit of 10,000 dollars, an age of 40), never by statistics of the samples,
so scaling costs no privacy. A constant 0.7 is appended, and every row is scaled to length 1 by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..settings.run_config import RunConfig
from .loading import data_file, table_rows
from .task import Dataset, Task, Tuned

_CONSTANT = 0.7
_TRAINING_SHARE = 0.8
_SPLIT = 1
"""Seed of the split, for NumPy's own generator, so that others can make the same one."""
_MONTHS = 6


class TabularTask(Task):
    """Rows of length 1 with a constant among their values; the test set is fixed, whatever the run's seed."""

    reads = frozenset()
    constant = True
    feature_bound = 1.0

    def load(self, config: RunConfig, root: str) -> Dataset:
        values, labels = self.rows(root)
        rows = unit_rows(values)
        order = np.random.Generator(np.random.PCG64(_SPLIT)).permutation(len(labels))
        # Whole hundreds, so that a hundred machines have equally many.
        train, test = np.split(order, [int(len(labels) * _TRAINING_SHARE) // 100 * 100])
        return Dataset(rows[train], labels[train], rows[test], labels[test], 2)

    @abstractmethod
    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Scaled values and classes of all people.

        Raises
        ------
        ConfigurationError
            If the file is not under the data root.
        """


class CreditDefault(TabularTask):
    """30,000 holders of credit cards in Taiwan (Yeh and Lien 2009), of whom 22 % do not pay next month."""

    name = "credit-default"
    sentence = "30,000 holders of credit cards and whether they pay next month, from data-root"
    tuned: ClassVar[Mapping[str, Tuned]] = {"pixels": Tuned(0.7, 400.0, 0.8, 0.7, 0.2, 1000.0, 60.0, 80.0)}

    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        table = np.array(table_rows(data_file(root, "uci/UCI_Credit_Card.csv.gz")), dtype=np.float64)
        limit, sex, education, marriage, age = table[:, 1:6].T
        states, bills, paid = (table[:, start : start + _MONTHS] for start in (6, 12, 18))
        people = [_logarithm(limit) * 2 - 1.6, (age - 40) / 40, sex - 1.5]
        groups = [education == 1, education == 2, education == 3, marriage == 1, marriage == 2]
        months = [np.maximum(states, 0) / 3, (states <= -1) / 2, states > 0, states > 1]
        amounts = [_logarithm(bills) / 2, _logarithm(paid) - 0.3]
        values = np.concatenate([np.stack([*people, *groups], axis=1), *months, *amounts], axis=1)
        return values, table[:, -1].astype(np.int64)


class Recidivism(TabularTask):
    """7,214 defendants in Broward County (ProPublica 2016), of whom 45 % are charged again; without their race."""

    name = "recidivism"
    sentence = "7,214 defendants and whether they are charged again within two years (COMPAS), from data-root"
    tuned: ClassVar[Mapping[str, Tuned]] = {"pixels": Tuned(0.35, 300.0, 0.8, 0.35, 0.2, 1000.0, 60.0, 80.0)}

    def rows(self, root: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        table = np.array(table_rows(data_file(root, "compas/compas-two-years.csv.gz")))
        age, felonies, misdemeanours, others, priors = table[:, [1, 4, 5, 6, 7]].astype(np.float64).T
        juvenile = [np.minimum(count, 3) / 3 for count in (felonies, misdemeanours, others)]
        groups = [age < 25, age > 45, (table[:, 0] == "Male") - 0.5, (table[:, 9] == "F") - 0.5]
        record = [np.log1p(priors) / 3 - 0.3, (priors > 0) - 0.5, priors > 4]
        values = np.stack([(age - 35) / 30, *groups, *record, *juvenile], axis=1)
        return values, table[:, -1].astype(np.int64)


def unit_rows(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rows with a constant appended, each scaled to length 1 by itself."""
    rows = np.concatenate([values, np.full((len(values), 1), _CONSTANT)], axis=1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _logarithm(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Signed amounts of money, mapped to about -1 to 1."""
    return np.sign(amounts) * np.log1p(np.abs(amounts)) / 14
