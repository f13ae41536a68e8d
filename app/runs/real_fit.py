"""A table fitted for real: one computer in the place of a trusted curator, with a machine that real nodes have.

Its key is the operating system's, its ledger lies beside the table and counts every call, rows are read one by one by a
reviewed schema, and the only figure of the model is released with noise. Everything that the other half of the training
is told of the rows is their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import StatisticsClient, TableRows, numpy_client_app, statistics_columns
from ...clients.nodes.operators_file import covering_budget
from ...clients.records.machine_records import Records, Rows
from ...clients.records.schema import Schema
from ...clients.side.side_parts import check_beside
from ...clients.side.statistics_client import RecordPlaces
from ...privacy import (
    EVALUATION_SHARE,
    ConfigurationError,
    PrivacyPolicy,
    SQLiteLedger,
    derived_seed,
    gdp_epsilon,
    gdp_mu,
    rounded_up,
    statistics_policy,
)
from ...privacy.errors import MisfitError
from ...privacy.machine.admission import ROUNDING
from ...privacy.setting import Value
from ...strategies import Statistics
from ..data.table_task import ReadTable, TableTask, model_inputs, scaled_labels
from ..data.task import Dataset
from ..engines.inprocess import InProcessGrid
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .experiment import Experiment, prepare
from .progress import Progress
from .result import RunResult
from .side_releases import beside_sides, features_bound, make_centring, make_evaluation
from .training_run import run_experiment

LEDGER_ENDING = ".ledger"
_HELD_OUT, _BINS, _TWO = 0.1, 20, 2


def fit_for_real(
    found: ReadTable,
    settings: dict[str, Value],
    ledger: Path,
    budget: float,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    scaling_share: float = 0.0,
) -> tuple[RunResult, ReadTable]:
    """Train on a table's rows with one machine that has all of them; the result, and the table as it was read.

    Parameters
    ----------
    settings : dict
        Run-config keys, without those of the data and machines.
    ledger : Path
        The ledger's file; made if it is not there.
    budget : float
        Of a new ledger: epsilon of everything that is ever released of these rows; 0 for what this call takes.
    on_progress : callable, optional
        Called after every round.
    scaling_share : float
        Of mu^2, for private statistics by which columns are scaled; 0 for none.

    Notes
    -----
    **Formal guarantees.** Everything that leaves the machine, the statistics, the model and the private evaluation, is
    together mu-GDP for replacement of one row of the table, for the mu that was asked for, and all calls with one
    ledger stay within its budget. Bounds that columns are scaled by are made from the released statistics alone. It
    rests on this computer, which sees the rows, on the schema being public knowledge, and on the number of rows being
    public. Proof: docs/proofs/release-rule.md.
    """
    schema = found.schema
    schema.check_for_real_nodes()
    if schema.owner:
        raise ConfigurationError(
            "Expected a schema without an owner for a real fit, got one: nodes protect owners (samples-per-owner)."
        )
    rows = Dealt(found.rows, schema)
    evaluated = evaluated_privately(schema)
    task = TableTask(schema, _of_nobody(len(rows), schema))
    fixed: dict[str, Value] = {"task": task.name, "partition": "iid", "num-clients": 1, "clients-per-round": 1}
    whole = RunConfig.from_mapping({**evaluated, **settings, **fixed})
    mu, scaling_mu = whole.mu, whole.mu * math.sqrt(scaling_share)
    rest: dict[str, Value] = {"mu": mu * math.sqrt(1.0 - scaling_share)} if scaling_share else {}
    experiment = prepare(RunConfig.from_mapping(layered({**evaluated, **settings, **fixed}, rest)))
    config = experiment.config
    kept = _ledger(ledger, mu, config.delta, budget, found.name)
    policy = replace(experiment.policy(), budget_mu=covering_budget(mu, kept), noise_quality="exact")
    _check_room(kept, mu, float(policy.budget_mu or mu), config.delta)
    spent = 0.0
    if scaling_share:
        policy = beside_sides(policy, float(policy.budget_mu or mu))
        bounds, spent = _bounds(rows, policy, scaling_mu, kept, found.name)
        schema = schema.bounded(bounds)
        found, rows = replace(found, schema=schema, scaled=True), rows.read_by(schema)
    client = experiment.method.client(
        experiment.gradients,
        rows,
        policy,
        kept,
        kept.keys(),
        name=found.name,
        **{**experiment.method.client_options(experiment.trained, 0), **_sides(experiment, policy)},
    )
    client.machine.check_data()
    grid = InProcessGrid(numpy_client_app(lambda _: client), 1, {})

    def shown(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(_unmeasured(progress))

    result = run_experiment(grid, config, deployed=True, experiment=experiment, on_progress=shown)
    return with_spent(replace(result, progress=[_unmeasured(one) for one in result.progress]), spent), found


def _check_room(ledger: SQLiteLedger, mu: float, budget: float, delta: float) -> None:
    """Raise if a ledger has no room for everything that a call releases, before it releases anything."""
    with ledger.exclusive() as page:
        before = page.account().reserved_mu
    if math.hypot(before, mu) <= budget * (1 + ROUNDING):
        return
    wanted, spent, whole = (rounded_up(gdp_epsilon(one, delta)) for one in (mu, before, budget))
    raise ConfigurationError(
        f"Expected a budget with room for epsilon = {wanted}, got {spent} spent of {whole} in the ledger {ledger.path} "
        "and released nothing. Ask for less: what all calls may spend is fixed by the first one (--budget)."
    )


def with_spent(result: RunResult, mu: float, mu_local: float | None = None) -> RunResult:
    """A result whose figures cover a release of ``mu`` before it, on the same machines and under the same trust.

    Notes
    -----
    **Formal guarantees.** The figures are those of both together, by composition of Gaussian DP.
    """
    both = math.hypot(result.mu, mu)
    local = None if result.mu_local is None else math.hypot(result.mu_local, mu_local or 0.0)
    return replace(result, figures=replace(result.figures, mu=both, mu_local=local))


def _bounds(
    rows: Dealt, policy: PrivacyPolicy, mu: float, ledger: SQLiteLedger, name: str
) -> tuple[dict[str, tuple[float, float]], float]:
    """Bounds of the columns from statistics of the rows, and the mu that these cost; ``policy`` is the training's.

    Notes
    -----
    **Formal guarantees.** The bounds are mu-GDP for replacement of one row.
    """
    own = statistics_policy(
        mu, delta=policy.delta, budget_mu=policy.budget_mu, budget_local_mu=policy.budget_local_mu, trust=policy.trust
    )
    check_beside(own, policy, beside="scale = 'private'", release="the statistics of the columns")
    client = StatisticsClient(TableRows(rows.schema), Places(rows), own, ledger, ledger.keys(), name=name)
    client.machine.together = True  # each row is read and placed by itself, and none fails
    grid = InProcessGrid(numpy_client_app(lambda _: client), 1, {})
    said = Statistics(columns=statistics_columns(rows.schema), num_clients=1).collect(grid)
    return said.bounds, client.machine.plan.mu


def _unmeasured(progress: Progress) -> Progress:
    """A round without figures: the test set is nobody's rows."""
    return replace(progress, loss=None, accuracy=None, auc=None)


def evaluated_privately(schema: Schema) -> dict[str, Value]:
    """Settings of a private evaluation on rows that machines set aside; none of numbers, of which nothing is right."""
    if schema.num_classes == 1:
        return {}
    bins: dict[str, Value] = {"score-bins": _BINS} if schema.num_classes == _TWO else {}
    return {"private-evaluation": EVALUATION_SHARE, "held-out": _HELD_OUT, **bins}


class Dealt:
    """A table's rows as a machine's samples, in an order that depends on their number alone.

    Those that are set aside for the evaluation are the last ones, and a file may be sorted. In a batch of several a
    made-up record stands in for one that does not fit, and ``fits`` says which; by itself it fails. The ledger knows
    them as the reviewed schema reads them (``first_read``), whatever bounds were released since.
    """

    stands_in = True

    def __init__(self, rows: Rows, schema: Schema, first_read: Dealt | None = None) -> None:
        self.schema, self._rows, count = schema, rows, len(rows)
        order = np.random.Generator(np.random.Philox(key=derived_seed("rows dealt", count))).permutation(count)
        self.records = Records(_Ordered(rows, order), schema, count=count, together=True)
        self.first_read = self if first_read is None else first_read
        if first_read is None:
            self.records.log()
        self.fits = self.records.fits

    def read_by(self, schema: Schema) -> Dealt:
        """The same rows, read by the schema with other bounds."""
        return Dealt(self._rows, schema, self.first_read)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, chosen: slice, /) -> tuple[NDArray[np.float32], NDArray[Any]]:
        features, labels = self.records[chosen]
        if len(labels) == 1 and not self.fits[chosen][0]:
            raise MisfitError("a record that does not fit")
        return model_inputs(np.asarray(features, np.float32), self.schema), scaled_labels(labels, self.schema)

    @property
    def record_kind(self) -> str:
        """What a record is called."""
        return self.records.record_kind


class Places:
    """A table's rows as their places in the columns that are counted, in the order of :class:`Dealt`."""

    def __init__(self, rows: Dealt) -> None:
        self.first_read, self._places = rows.first_read, RecordPlaces(rows.schema)

    def __len__(self) -> int:
        return len(self.first_read)

    def __getitem__(self, chosen: slice, /) -> NDArray[np.float64]:
        return self._places.batch(self.first_read.records, chosen)

    @property
    def record_kind(self) -> str:
        """What a record is called."""
        return self.first_read.record_kind


@dataclass(frozen=True)
class _Ordered:
    rows: Rows
    order: NDArray[np.int64]
    record_kind: str = "row"

    @property
    def columns(self) -> list[str]:
        return self.rows.columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> Any:
        return self.rows[int(self.order[number])]


def _of_nobody(count: int, schema: Schema) -> Dataset:
    """A data set of the table's shape, in which nothing is a row's."""
    width, classes = schema.num_features + (schema.num_classes == 1), schema.num_classes
    test: NDArray[Any] = np.arange(max(classes, _TWO)) % classes
    train: NDArray[Any] = np.zeros(count, np.int64)
    if classes == 1:
        train, test = train.astype(np.float32), test.astype(np.float32)
    features = np.zeros((count, width), np.float32)
    return Dataset(features, train, features[: len(test)], test, classes)


def _sides(experiment: Experiment, policy: PrivacyPolicy) -> dict[str, Any]:
    """The machine's halves of what it releases beside its training, under this ``policy``."""
    config, made = experiment.config, {}
    if experiment.mean is not None:
        width = experiment.mean.width
        bound = features_bound(config.task, config.features, width, config.feature_bound)
        made["centring"] = make_centring(policy, bound, width, mu=config.mu, share=experiment.mean.share)
    if experiment.evaluation is not None:
        held_out, share = experiment.evaluation.machine_half(0).held_out, experiment.evaluation.share
        options = {"mu": config.mu, "share": share, "bins": config.score_bins, "held_out": held_out}
        made["evaluation"] = make_evaluation(policy, experiment.model, **options)
    return made


def _ledger(path: Path, mu: float, delta: float, budget: float, data: str) -> SQLiteLedger:
    if not path.exists():
        whole = gdp_mu(budget, delta) if budget else mu
        return SQLiteLedger.create(path, budget_mu=whole, delta=delta, data=data)
    if budget:
        raise ConfigurationError(
            f"Expected no budget beside the ledger {path}, which has one, got {budget:g}: `murmurfl ledger show "
            f"{path}` says what is left."
        )
    return SQLiteLedger(path)
