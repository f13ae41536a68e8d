"""Rehearsal: a run tried on made-up data of its public shape, with the noise that it would have.

Nothing of anybody's samples is looked at: clients, samples, features, classes, the bound on a record's norm, clip,
step, rounds and mu are public. The made-up data are Gaussian classes around an offset mean. How much of their variance
lies between classes, how quickly the spectrum falls and how far off the mean is differ from one to the next
(:data:`FAMILY`), for nobody knows it of data that were not looked at.

A rehearsal runs the method's own client, policy, noise and strategy, with one client in the place of those that a
round asks. The mean of m clients' releases of b samples has noise of 2 S / (mu b sqrt(m)); one client's release of
b' samples has as much at mu' = mu sqrt(m) b / b'. A trusted server's has 2 S / (mu b m), and sums that of
mu sqrt(h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError
from ...privacy.ledger.ledger_records import MemoryLedger
from ...privacy.noise import derived_seed
from ...privacy.setting import by_key
from ..data.partition import ByLabel, Parts
from ..data.task import Dataset, Shard
from ..engines.direct import DirectClients
from ..methods import METHODS, ResolvedRun
from ..methods.presets import Resolve, the_task, usual_squared_norm, wanted_mu
from ..models.fitted_linear import discriminant, ridge
from ..models.model import area_under_curve
from ..nodes.flower_internals import without_log
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys

MOST_SAMPLES = 2000
MOST_FEATURES = 256
"""Noise on a sample's scores depends on its norm and not on its number of features: fewer do as well."""
TEST_SAMPLES = 1000


class SyntheticProfile(NamedTuple):
    """Profile of a kind of synthetic data."""

    between: float  # share of the variance that is between classes
    falls: float  # how quickly the spectrum within them falls
    offset: float  # length of the mean beside the spread
    length: float  # of a long sample, beside the bound


USUAL = (SyntheticProfile(0.15, 0.5, 1.0, 1.0), SyntheticProfile(0.15, 1.2, 1.0, 0.8))
"""Neither hard nor easy to learn from."""
FAMILY = (
    SyntheticProfile(0.08, 0.0, 1.0, 1.0),
    SyntheticProfile(0.08, 0.5, 3.0, 0.5),
    *USUAL,
    SyntheticProfile(0.15, 1.2, 3.0, 0.5),
    SyntheticProfile(0.4, 0.5, 1.0, 1.0),
)
_TWO, _OF_TWO = 2, 0.25
"""Share of ``between`` left for two classes: those of people overlap, and a linear model tells 7 to 8 of 10."""


@dataclass(frozen=True)
class DryRunScore:
    """Score of a run on one kind of synthetic data, between its floor and its ceiling."""

    # Accuracy of the run, of always naming the most frequent class, and of central training without noise; with a
    # declared majority, which accuracy hardly sees beyond, the AUC, a mean over classes, and 1/2 for the floor; for a
    # regression R^2, and 0
    score: float
    floor: float
    ceiling: float

    @property
    def retained_utility(self) -> float:
        """The share of what central training learns beyond the floor; 0 where that is nothing."""
        learnt = self.ceiling - self.floor
        return (self.score - self.floor) / learnt if learnt else 0.0


@dataclass(frozen=True)
class SyntheticData:
    """Synthetic data of a profile, always the same for the same fields."""

    profile: SyntheticProfile
    samples: int
    features: int
    classes: int  # 1 for a regression
    norm: float  # R, which no sample is longer than
    seed: int = 0
    majority: float = 0.0  # The first class's share; the others are equal. 0 if all are.

    @cached_property
    def dataset(self) -> Dataset:
        """The data, always the same."""
        return self._made[0]

    def rows_of(self, labels: NDArray[np.int64], *parts: object) -> NDArray[np.float32]:
        """Return further rows of the same classes, one for each label; the same for the same ``parts`` of a seed."""
        key = derived_seed("rows of rehearsal", *self.profile, self.seed, *parts)
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal((len(labels), self.features))
        _, centres, mean, factor = self._made
        rows = factor * (centres[labels] + drawn * self._scale + mean)
        return (rows * np.minimum(1.0, self.norm / np.linalg.norm(rows, axis=1))[:, None]).astype(np.float32)

    @cached_property
    def _made(self) -> tuple[Dataset, NDArray[np.float64], NDArray[np.float64], float]:
        """The data, the centres of their classes and the mean of all rows, both unscaled, and the scale."""
        generator = np.random.Generator(np.random.Philox(key=derived_seed("rehearsal", *self.profile, self.seed)))
        rows, labels, centres = self._rows(generator, self.samples + TEST_SAMPLES)
        spread = math.sqrt(float(np.square(rows).sum(axis=1).mean()))
        direction = generator.standard_normal(self.features)
        mean = self.profile.offset * spread * direction / np.linalg.norm(direction)
        rows += mean
        lengths = np.linalg.norm(rows, axis=1)
        factor = self.profile.length * self.norm / float(np.quantile(lengths, 0.9))
        rows *= factor
        rows *= np.minimum(1.0, self.norm / np.linalg.norm(rows, axis=1))[:, None]
        x, test = rows.astype(np.float32), slice(None, TEST_SAMPLES)
        train = slice(TEST_SAMPLES, None)
        return Dataset(x[train], labels[train], x[test], labels[test], self.classes), centres, mean, factor

    @cached_property
    def _scale(self) -> NDArray[np.float64]:
        """Standard deviations within a class, of which the squares add up to 1."""
        scale = np.arange(1, self.features + 1) ** (-self.profile.falls / 2)
        return scale / np.linalg.norm(scale)

    def _rows(
        self, generator: np.random.Generator, count: int
    ) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.float64]]:
        """Return samples around 0, their labels, and the centres of the classes, none of a regression."""
        scale = self._scale
        share = self.profile.between * (_OF_TWO if self.classes == _TWO else 1.0)
        if self.classes == 1:
            rows = generator.standard_normal((count, self.features)) * scale
            slope = generator.standard_normal(self.features)
            scores = rows @ slope
            noise = generator.standard_normal(count) * math.sqrt(1 / (4 * share) - 1) if share < 0.25 else 0.0
            labels = scores / scores.std() + noise
            return rows, labels / (4 * labels.std()), np.zeros((0, self.features))
        labels = generator.integers(0, self.classes, count)
        if self.majority:
            rest = (1 - self.majority) / (self.classes - 1)
            labels = generator.choice(self.classes, count, p=[self.majority, *[rest] * (self.classes - 1)])
        within = min(max(2 * (self.classes - 1), 1), self.features)  # the directions in which centres lie
        centres = np.zeros((self.classes, self.features))
        centres[:, :within] = generator.standard_normal((self.classes, within))
        centres -= centres.mean(axis=0)  # classes lie as far apart whatever their shares are
        centres *= math.sqrt(share / (1 - share) / np.square(centres).sum(axis=1).mean())
        return centres[labels] + generator.standard_normal((count, self.features)) * scale, labels, centres

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The floor and the ceiling of a score."""
        if self.classes == 1:
            return 0.0, self.learnt(self.samples)
        if self.majority:
            return 0.5, self.learnt(self.samples)
        counts = np.bincount(self.dataset.test_labels)
        return float(counts.max() / counts.sum()), self.learnt(self.samples)

    def learnt(self, samples: int) -> float:
        """Return the score of central training without noise on so many of the samples."""
        if samples not in self._learnt:
            self._learnt[samples] = self._trained_on(samples)
        return self._learnt[samples]

    @cached_property
    def _learnt(self) -> dict[int, float]:
        return {}

    def _trained_on(self, samples: int) -> float:
        data = self.dataset
        rows, labels = data.train_features[:samples], data.train_labels[:samples]
        if self.classes == 1:
            predictions = [ridge(rows, labels, strength).scores(data.test_features)[:, 0] for strength in _RIDGES]
            missed = min(float(np.square(one - data.test_labels).sum()) for one in predictions)
            return 1.0 - missed / float(np.square(data.test_labels - data.test_labels.mean()).sum())
        return self.alone(rows, labels)[0]

    def alone(self, rows: NDArray[Any], labels: NDArray[np.int64]) -> tuple[float, float]:
        """Return the scores of training on some rows alone, without noise: on the test set, and on the rows' own mix.

        The second is the accuracy on test rows in the proportions of ``labels``. An AUC does not depend on them.
        """
        test_rows, test_labels = self.dataset.test_features, self.dataset.test_labels
        if self.majority and len(np.unique(labels)) == 1:
            return 0.5, 0.5
        scores = discriminant(rows, labels, self.classes).scores(test_rows)
        if self.majority:
            return (found := mean_auc(scores, test_labels)), found
        right = scores.argmax(axis=1) == test_labels
        shares = np.bincount(labels, minlength=self.classes) / np.maximum(np.bincount(test_labels), 1)
        return float(right.mean()), float(np.average(right, weights=shares[test_labels]))


def mean_auc(scores: NDArray[np.floating], labels: NDArray[Any]) -> float:
    """Return the AUC of each class's probability against the rest, on average over classes.

    Of two classes the usual AUC.

    Parameters
    ----------
    scores : ndarray of shape (samples, classes)
        Logarithms of probabilities, up to a constant a sample.
    """
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    found = [area_under_curve(shares[:, one], labels == one) for one in range(scores.shape[1])]
    return float(np.nanmean(found))


_RIDGES = (0.001, 0.1, 1.0, 10.0, 100.0)
"""Ridge strengths to choose the best of: a client with hardly more rows than columns learns nothing with the first."""
synthetic_data = lru_cache(maxsize=32)(SyntheticData)


def mean_retained_utility(problem: ResolvedRun, resolve: Resolve) -> float:
    """Return what a run keeps of what can be learnt, on average over :data:`FAMILY`; 0 where it cannot be rehearsed."""
    scores = rehearse(problem, resolve)
    return fmean(one.retained_utility for one in scores) if scores else 0.0


class SiteMix(NamedTuple):
    """Way in which clients differ: a partition of made-up labels among them."""

    partition: str = "iid"
    amount: float = 0.0  # Concentration, or classes of a client, of partitions that have one

    @property
    def is_alike(self) -> bool:
        """Whether labels are dealt evenly."""
        return self.partition in _ALIKE

    @property
    def name(self) -> str:
        """The partition, with its concentration or its classes."""
        return f"{self.partition}{f' {self.amount:g}' if self.amount else ''}"

    @property
    def words(self) -> str:
        """Description for people, after the word sites."""
        return "are alike" if self.is_alike else f"differ in labels ({self.name})"

    def concentration(self, classes: int, clients: int) -> float:
        """Return the concentration of Dirichlet proportions that vary as the mean over so many clients does.

        0 if they do not vary.
        """
        key = _amount_key(self.partition)
        if self.is_alike or classes == 1 or not key:
            return 0.0
        alone = self.amount
        if key == _CLASSES:
            if self.amount >= classes:
                return 0.0
            alone = ((classes - 1) * self.amount / (classes - self.amount) - 1) / classes
        return max(clients * alone + (clients - 1) / classes, _LEAST)

    def configured(self, config: RunConfig) -> RunConfig:
        """Return a run configuration with this mix in the place of its own."""
        fields_of = {name: run_keys()[name].attribute for name in _AMOUNTS}
        values: dict[str, Any] = {attribute: run_keys()[name].default for name, attribute in fields_of.items()}
        if (key := _amount_key(self.partition)) and self.amount:
            values[fields_of[key]] = type(run_keys()[key].default)(self.amount)
        return replace(config, partition=self.partition, **values)


def _amount_key(partition: str) -> str:
    """Return the key that says how much a partition skews labels; empty without one."""
    return next((name for name in _AMOUNTS if name in registry("partition")[partition].keys), "")


_CLASSES = "partition.classes"
_AMOUNTS = ("partition.alpha", _CLASSES)
_LEAST = 1e-3
"""Least concentration that is dealt: 0 says that nothing is skewed."""
_ALIKE = ("iid", "unequal", "power-law")
ALIKE, SKEWED = SiteMix(), SiteMix("label-skew", 0.3)
"""Mixes that are rehearsed where nobody declares one: no difference, and that of the default run."""


class LocalBaseline(NamedTuple):
    """Shares that a federation and one client alone keep, on average over :data:`FAMILY`, more seeds and clients."""

    sites: SiteMix
    federation: float  # Share of what central training learns without noise beyond the floor
    alone: float  # The same of one client, on everybody's data
    own_lead: (
        float  # How much more accurate, or of greater AUC, one client is on its own mix of classes; in R^2 of numbers
    )

    @property
    def is_worth(self) -> bool:
        """Whether the federation keeps more than one client alone, on everybody's data."""
        return self.federation > self.alone


def judged(alike: LocalBaseline, mix: LocalBaseline) -> LocalBaseline:
    """Return the figures by which a mix is judged: part of the way from it to sites that are alike.

    Operators may be wrong about how sites differ, and made-up classes lie farther apart than real ones, so that skew
    costs a client more there. Such a verdict is right more often (docs/tuning.md).
    """
    parts = (*[_TO_ALIKE] * 2, _OWN_TO_ALIKE)
    figures = (part * one + (1 - part) * other for part, one, other in zip(parts, alike[1:], mix[1:], strict=True))
    return LocalBaseline(mix.sites, *figures)


_TO_ALIKE, _OWN_TO_ALIKE = 0.25, 0.5
"""Weights of sites that are alike, on everybody's data and on a client's own."""


def declared_mix(config: RunConfig) -> SiteMix | None:
    """Return the mix that a configuration's partition declares; None where made-up labels cannot be dealt like that."""
    chosen = registry("partition")[config.partition]
    if not isinstance(chosen, ByLabel):
        return None
    key = _amount_key(config.partition)
    return SiteMix(config.partition, float(getattr(config, run_keys()[key].attribute)) if key else 0.0)


def local_baselines(problem: ResolvedRun, resolve: Resolve, mixes: Sequence[SiteMix]) -> list[LocalBaseline]:
    """Return what a run keeps next to one client alone without noise, for each of several mixes of sites.

    Only public sizes and made-up data are read. Empty where the run cannot be rehearsed. Of numbers there is one mix:
    they have no classes that clients could have more or fewer of.

    Notes
    -----
    Averaged over clients of one size, a model has on their own mixes of classes the accuracy that it has on everybody's
    data: the mixes' mean is everybody's. So one figure of the federation serves both comparisons.
    """
    made = [_made_up_for(problem, profile, seed) for profile in FAMILY for seed in _BASELINE_SEEDS]
    found = []
    for sites in mixes if problem.data.num_classes > 1 else mixes[:1]:
        runs = rehearse(problem, resolve, profiles=FAMILY, seeds=_BASELINE_SEEDS, sites=sites)
        if not runs:
            return []
        with _one_thread():
            singles = [_alone_in(one, problem, sites) for one in made]
        alone = [replace(run, score=everybody) for run, (everybody, _) in zip(runs, singles, strict=True)]
        leads = (own - run.score for run, (_, own) in zip(runs, singles, strict=True))
        federation, single = (fmean(one.retained_utility for one in each) for each in (runs, alone))
        found.append(LocalBaseline(sites, federation, single, fmean(leads)))
    return found


_CLIENTS_ALONE = 4
"""Clients that are tried alone on each kind of made-up data, from the smallest to the largest."""


def _alone_in(made: SyntheticData, problem: ResolvedRun, sites: SiteMix) -> tuple[float, float]:
    """Return the score of single clients, on average over a few: on everybody's data, and on their own mix."""
    if sites.is_alike or made.classes == 1:
        sizes = np.sort(np.asarray(problem.sizes))[_spread(len(problem.sizes))]
        score = fmean(made.learnt(max(min(int(size), made.samples), 1)) for size in sizes)
        return score, score
    dealt = _dealt_labels(sites, problem.config, sum(problem.sizes), made.classes, made.majority, made.seed)
    found = [made.alone(made.rows_of(labels, *sites, number), labels) for number, labels in enumerate(dealt)]
    return fmean(everybody for everybody, _ in found), fmean(own for _, own in found)


def _spread(clients: int) -> NDArray[np.int64]:
    """Return the numbers of a few of so many clients, spread evenly."""
    return np.linspace(0, clients - 1, min(clients, _CLIENTS_ALONE)).round().astype(np.int64)


@lru_cache(maxsize=64)
def _dealt_labels(
    sites: SiteMix, config: RunConfig, samples: int, classes: int, majority: float, seed: int
) -> list[NDArray[np.int64]]:
    """Return made-up labels of a few clients among which so many samples are dealt."""
    generator = np.random.Generator(np.random.Philox(key=derived_seed("labels of rehearsal", *sites, seed)))
    shares = [majority, *[(1 - majority) / (classes - 1)] * (classes - 1)] if majority else None
    labels = generator.choice(classes, samples, p=shares)
    parts = _dealt(sites, labels, config, generator)
    parts = sorted((part for part in parts if len(part)), key=len)
    return [labels[parts[one][:MOST_SAMPLES]] for one in _spread(len(parts))]


def _dealt(
    sites: SiteMix, labels: NDArray[np.int64], config: RunConfig, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return which of some samples each client has."""
    chosen = registry("partition")[sites.partition]
    if not isinstance(chosen, ByLabel):
        raise ConfigurationError(f"Expected a partition by labels, got {sites.partition!r}.", kind="unsupported")
    parts = chosen.split(labels, generator.permutation(len(labels)), sites.configured(config), generator)
    return list(Parts.together(parts).shuffled(generator))


def foretold(problem: ResolvedRun, resolve: Resolve) -> tuple[float, float] | None:
    """Between which shares of what can be learnt a run keeps; None where it cannot be rehearsed.

    An estimate: around what it keeps of :data:`USUAL` made-up data, as wide as four of five situations need
    (docs/tuning.md).
    """
    scores = rehearse(problem, resolve, profiles=USUAL, seeds=_SEEDS)
    if not scores:
        return None
    middle = min(max(fmean(one.retained_utility for one in scores), 0.0), 1.0)
    return max(middle - _AROUND, 0.0), min(middle + _AROUND, 1.0)


def _one_thread() -> AbstractContextManager[object]:
    """Return a context in which matrices are multiplied by one thread: they are so small that several would wait."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1)


_MOST_ROUNDS = 200
_MOST_UPDATES = 5_000_000
"""Parameters times rounds."""
_AROUND = 0.3
_SEEDS, _BASELINE_SEEDS = (1, 2), (1, 2, 3)


def rehearse(
    problem: ResolvedRun,
    resolve: Resolve,
    *,
    profiles: Sequence[SyntheticProfile] = FAMILY,
    seeds: Sequence[int] = (1,),
    sites: SiteMix = ALIKE,
) -> list[DryRunScore]:
    """Try a run on made-up data; empty where its model cannot learn from them, or that would take minutes."""
    if problem.num_rounds > _MOST_ROUNDS or problem.model.num_parameters * problem.num_rounds > _MOST_UPDATES:
        return []
    try:
        with _one_thread():
            return [_dry_run(problem, resolve, profile, seed, sites) for profile in profiles for seed in seeds]
    except Exception:  # a model of the user's own may do anything with rows that are not its records
        return []


def _made_up_for(problem: ResolvedRun, profile: SyntheticProfile, seed: int) -> SyntheticData:
    """Made-up data of a run's shape, with the samples of the clients that stand for those of a round."""
    config, model = problem.trained.config, problem.model
    norm = math.sqrt(usual_squared_norm(config, model) - ("bias" in model.names))
    profile = profile._replace(offset=0.0) if problem.is_centred else profile
    width = problem.model.num_features if problem.trains_on_values else problem.data.num_features
    features = min(width, MOST_FEATURES)
    samples = _own_samples(problem) * _groups(problem)
    return synthetic_data(profile, samples, features, problem.data.num_classes, norm, seed, the_task(config).majority)


def _groups(problem: ResolvedRun) -> int:
    """Clients of a rehearsal: one for those of a round."""
    return max(round(len(problem.sizes) / problem.config.asked_per_round), 1)


def _own_samples(problem: ResolvedRun) -> int:
    """Return samples of the client that stands for a round's."""
    samples = sum(problem.sizes) / len(problem.sizes) * problem.config.asked_per_round
    return max(round(min(samples, MOST_SAMPLES / _groups(problem))), 2)


def _dry_run(
    problem: ResolvedRun, resolve: Resolve, profile: SyntheticProfile, seed: int, sites: SiteMix
) -> DryRunScore:
    config, method = problem.trained.config, METHODS[problem.config.strategy]
    asked, groups, own = config.asked_per_round, _groups(problem), _own_samples(problem)
    samples = sum(problem.sizes) / len(problem.sizes)
    batch = min(max(round(config.batch_size * own / samples), 1), own)
    less = own / samples if method.sums_samples else batch / config.batch_size
    data = _made_up_for(problem, profile, seed)
    known = config.to_mapping()
    shared = {name: known[name] for name in (*_OF_ANY, *method.keys) if name in known}
    if problem.trains_on_values:  # of which a client makes features: made-up rows are features
        shared["model"] = "softmax" if problem.data.num_classes > 1 else "ridge"
    settled_values = {field.name: getattr(problem.values, field.name) for field in fields(problem.values)}
    values = by_key({**settled_values, "projection_radius": problem.values.diameter / 2}, run_keys())
    settled = {name: value for name, value in values.items() if name in known and name not in _LEFT and value}
    if not method.is_iterative:
        settled.pop("learning-rate")
    own_settings: dict[str, Any] = {
        "num-clients": groups,
        "clients-per-round": 1,
        "num-rounds": problem.num_rounds,
        "centring": "none",
        "noise-quality": "fast",
        "allow-exhaustion": True,
        "seed": seed,
    }
    if config.private:
        own_settings["mu"] = wanted_mu(config) * (asked if method.trusted else math.sqrt(asked)) / less
    if "batch-size" in shared:
        shared["batch-size"] = batch
    finite = {name: value for name, value in settled.items() if value != math.inf}
    made = RunConfig.from_mapping({**shared, **finite, **own_settings})
    # The clients of a round differ from those of another by less than two single clients do.
    alpha = sites.concentration(data.classes, asked) if groups > 1 else 0.0
    return DryRunScore(_score(made, data, groups, alpha, resolve), *data.bounds)


_LEFT = ("mechanism.schedule", "sampling")
_OF_ANY = ("strategy", "task", "features", "model", "mechanism", "delta", "preset", "model.gradient-memory-mib")


def direct_clients(run: Any) -> DirectClients:
    """Return the clients of an experiment, which a strategy asks without messages."""
    shapes = [values.shape for values in run.model.initial_parameters(run.config.seed)]
    return DirectClients(run.config.num_clients, lambda name: run.client(int(name), MemoryLedger()), shapes)


@lru_cache(maxsize=1024)
def _score(config: RunConfig, made: SyntheticData, groups: int, alpha: float, resolve: Resolve) -> float:
    """Accuracy on the test set, AUC or R^2, of a run trained to the end; with ``alpha``, on groups of skewed labels."""
    data = made.dataset
    parts = np.split(np.arange(len(data.train_labels)), groups)
    if alpha:
        generator = np.random.Generator(np.random.Philox(key=derived_seed("groups of rehearsal", made.seed)))
        parts = _dealt(SiteMix(SKEWED.partition, alpha), data.train_labels, config, generator)
    run: Any = resolve(config, data, [Shard(data, part) for part in parts])
    with without_log():
        result = run.strategy().start(direct_clients(run), run.initial_arrays(), num_rounds=run.num_rounds)
    parameters, samples = result.arrays.to_numpy_ndarrays(), (data.test_features, data.test_labels)
    if made.majority:
        return mean_auc(np.asarray(run.model.logits(parameters, data.test_features), np.float64), data.test_labels)
    if data.num_classes > 1:
        return float(run.model.evaluate(parameters, samples)[1])
    predictions = np.asarray(run.model.logits(parameters, data.test_features), np.float64)[:, 0]
    return float(1 - np.square(predictions - data.test_labels).mean() / np.var(data.test_labels))
