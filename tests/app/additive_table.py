"""A table whose runs have additive models, as a task that every process of a run can import."""

import numpy as np
from murmurfl.app.data.task import Dataset, Task
from murmurfl.clients import Column, Label, Schema

NAME = "tests.app.additive_table:Incomes"
SCHEMA = Schema(
    columns={
        "age": Column(kind="integer", bounds=(0, 120)),
        "income": Column(kind="number", bounds=(0, 1e7)),
        "smoker": Column(kind="yes/no"),
        "city": Column(kind="category", values=("a", "b")),
    },
    label=Label(column="ill", classes=("no", "yes")),
)


def made_up(count, seed=1):
    """Records whose label depends on the distance of an age from 55 and on the logarithm of an income."""
    random = np.random.Generator(np.random.Philox(key=seed))
    ages, incomes = random.integers(20, 90, count), random.lognormal(10.0, 1.0, count).round()
    smoker, city = random.random(count) < 0.3, random.integers(0, 3, count)
    margin = np.abs(ages - 55.0) / 10.0 - 1.7 + np.log(incomes / 22026.0) + smoker
    labels = (random.random(count) < 1.0 / (1.0 + np.exp(-2.0 * margin))).astype(np.int64)
    missing = random.random(count) < 0.1
    names = np.array(["a", "b", "c"])
    return [
        {
            "age": int(age),
            "income": "" if gone else float(income),
            "smoker": "yes" if smokes else "no",
            "city": str(names[where]),
            "ill": ("no", "yes")[label],
        }
        for age, income, gone, smokes, where, label in zip(ages, incomes, missing, smoker, city, labels, strict=True)
    ]


class Incomes(Task):
    """Made-up records, read by the schema for an additive model."""

    name = NAME
    sentence = "made-up incomes"
    schema = SCHEMA
    feature_bound = SCHEMA.norm_bound

    def load(self, config, root):
        """Read the records of a run's seed."""
        read = [SCHEMA.of_values().read(item) for item in made_up(460, config.seed)]
        features, labels = np.stack([one.inputs for one in read]), np.stack([one.label for one in read])
        return Dataset(features[:400], labels[:400], features[400:], labels[400:], 2)
