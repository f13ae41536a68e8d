"""A table fitted for real: one computer in the place of a trusted curator, with a machine that real nodes have.

Its key is the operating system's, its ledger lies beside the table and counts every call, rows are read one by one by a
reviewed schema, and the only figure of the model is released with noise. Everything that the other half of the training
is told of the rows is their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients import numpy_client_app
from ...clients.nodes.operators_file import covering_budget
from ...clients.records.machine_records import Records
from ...clients.records.schema import Schema
from ...clients.records.sources import Table
from ...privacy import EVALUATION_SHARE, ConfigurationError, PrivacyPolicy, SQLiteLedger, derived_seed, gdp_mu
from ...privacy.errors import MisfitError
from ...privacy.setting import Value
from ..data.table_task import ReadTable, TableTask, model_inputs, scaled_labels
from ..data.task import Dataset
from ..engines.inprocess import InProcessGrid
from ..settings.run_config import RunConfig
from .experiment import Experiment, prepare
from .progress import Progress
from .result import RunResult
from .side_releases import make_evaluation
from .training_run import run_experiment

LEDGER_ENDING = ".ledger"
_HELD_OUT, _BINS, _TWO = 0.1, 20, 2


def fit_for_real(
    found: ReadTable,
    settings: dict[str, Value],
    ledger: Path,
    budget: float,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Train on a table's rows with one machine that has all of them.

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

    Notes
    -----
    **Formal guarantees.** Everything that leaves the machine, the model and the private evaluation, is mu-GDP for
    replacement of one row of the table, for the mu that was asked for, and all calls with one ledger stay within its
    budget. It rests on this computer, which sees the rows, on the schema being public knowledge, and on the number of
    rows being public. Proof: docs/proofs/release-rule.md.
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
    experiment = prepare(RunConfig.from_mapping({**evaluated, **settings, **fixed}))
    config = experiment.config
    kept = _ledger(ledger, config, budget, found.name)
    policy = replace(experiment.policy(), budget_mu=covering_budget(config.mu, kept), noise_quality="exact")
    client = experiment.method.client(
        experiment.gradients,
        rows,
        policy,
        kept,
        kept.keys(),
        name=found.name,
        **{**experiment.method.client_options(experiment.trained, 0), **_evaluation(experiment, policy)},
    )
    client.machine.check_data()
    grid = InProcessGrid(numpy_client_app(lambda _: client), 1, {})

    def shown(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(_unmeasured(progress))

    result = run_experiment(grid, config, deployed=True, experiment=experiment, on_progress=shown)
    return replace(result, progress=[_unmeasured(one) for one in result.progress])


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
    made-up record stands in for one that does not fit, and ``fits`` says which; by itself it fails.
    """

    stands_in = True

    def __init__(self, rows: Table, schema: Schema) -> None:
        self._schema, count = schema, len(rows)
        order = np.random.Generator(np.random.Philox(key=derived_seed("rows dealt", count))).permutation(count)
        self._records = Records(_Ordered(rows, order), schema, count=count, together=True)
        self._records.log()
        self.fits = self._records.fits

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, chosen: slice, /) -> tuple[NDArray[np.float32], NDArray[Any]]:
        features, labels = self._records[chosen]
        if len(labels) == 1 and not self.fits[chosen][0]:
            raise MisfitError("a record that does not fit")
        return model_inputs(np.asarray(features, np.float32), self._schema), scaled_labels(labels, self._schema)

    @property
    def record_kind(self) -> str:
        """What a record is called."""
        return self._records.record_kind


@dataclass(frozen=True)
class _Ordered:
    rows: Table
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


def _evaluation(experiment: Experiment, policy: PrivacyPolicy) -> dict[str, Any]:
    config, side = experiment.config, experiment.evaluation
    if side is None:
        return {}
    held_out = side.machine_half(0).held_out
    options = {"mu": config.mu, "share": side.share, "bins": config.score_bins, "held_out": held_out}
    return {"evaluation": make_evaluation(policy, experiment.model, **options)}


def _ledger(path: Path, config: RunConfig, budget: float, data: str) -> SQLiteLedger:
    if not path.exists():
        whole = gdp_mu(budget, config.delta) if budget else config.mu
        return SQLiteLedger.create(path, budget_mu=whole, delta=config.delta, data=data)
    if budget:
        raise ConfigurationError(
            f"Expected no budget beside the ledger {path}, which has one, got {budget:g}: `murmurfl ledger show` says "
            "what is left."
        )
    return SQLiteLedger(path)
