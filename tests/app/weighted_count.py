"""A query of somebody's own in one file: how much the records of one class weigh together, with its registry line.

A project registers it where its task is made, so that every process of a run knows it: ``weighted_count:task``.
"""

import math
from dataclasses import dataclass

import numpy as np
from murmurfl.app.methods.queries import RUN_QUERIES, RunQuery, fields_beside
from murmurfl.clients import RecordQuery
from murmurfl.privacy import Query, divided_mu

SHARE, COLUMN, LABEL, MOST = 0.1, 3, 1, 0.5
NAME = "weighted_count:task"


@dataclass(frozen=True)
class Weight:
    """The weight of all records of a class, and the standard deviation of its noise."""

    value: float
    std: float

    @property
    def document(self):
        return {"value": self.value, "std": self.std}


@dataclass(frozen=True)
class WeightedCount(Query[Weight]):
    """How much records of class ``label`` weigh: the value in a public column of each, from 0 to the public ``most``.

    A record's row is its weight, or 0 if it is of another class, minus most / 2: replacing one moves the sum by
    ``most``. An owner's weight is that of its records together, from 0 to ``most`` as well.
    """

    name = "weighted"
    what = "a weighted count"
    per_owner = True

    column: int = COLUMN
    label: int = LABEL
    most: float = MOST

    @property
    def width(self):
        return 1

    @property
    def bound(self):
        return self.most / 2, "sample"

    def rows(self, measured):
        features, labels = measured
        weights = np.clip(np.asarray(features, dtype=np.float64)[:, self.column], 0.0, self.most)
        return (weights * (np.asarray(labels) == self.label) - self.most / 2)[:, None]

    def rows_of_owners(self, rows, present):
        weights = ((rows[..., 0] + self.most / 2) * present).sum(axis=1)
        return (np.minimum(weights, self.most) - self.most / 2)[:, None]

    def read(self, found):
        return Weight(float(found.total[0]) + found.samples * self.most / 2, found.noise_std)


class WeightedCountOfRun(RunQuery[RecordQuery]):
    """A run on this file's task asks it after the training."""

    name = WeightedCount.name
    says = "a weighted count of records"

    @staticmethod
    def share_of(config):
        return SHARE if config.task == NAME else 0.0

    def client_query(self, policy, samples):
        query, mu = WeightedCount(), divided_mu(self.problem.config.mu, self.share)[0]
        return RecordQuery(query.policy(mu, **fields_beside(policy)), query)


RUN_QUERIES[WeightedCount.name] = WeightedCountOfRun  # the registry line


def task(config):
    """Made-up records of five features, from 0 to 1, in three classes."""
    draw = np.random.Generator(np.random.Philox(key=config.seed))
    features, labels = draw.random((460, 5)), draw.integers(0, 3, 460)
    return features[:400], labels[:400], features[400:], labels[400:]


def weight_of(features, labels, groups):
    """The weight of all records, without noise; those of one group count ``MOST`` at most."""
    weights = np.clip(features[:, COLUMN], 0.0, MOST) * (labels == LABEL)
    return math.fsum(min(math.fsum(weights[chosen]), MOST) for chosen in groups)
