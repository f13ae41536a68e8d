"""A table fitted for real: one computer in the place of a trusted curator, with a client that real nodes have.

Its key is the operating system's, its ledger lies next to the table and counts every call, rows are read one by one by
a reviewed schema, and the only figure of the model is released with noise. Everything that the other half of the
training is told of the rows is their number. Whatever can be wrong with files and settings is found before the first
row is read; from then on the process is sealed (:mod:`.sealed`).
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.one_shot_client import StatisticsClient
from ...clients.private_client import numpy_client_app
from ...clients.queries import check_beside, held_out_samples
from ...clients.records.client_records import OwnedSamples, OwnerGradients, Records, Rows
from ...clients.records.image_folders import ImageFolder
from ...clients.records.places import RecordPlaces, TableRows, statistics_columns
from ...clients.records.schema import Schema, number_of, text_of
from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.guarantee import PAID_ROW, rounded_down, rounded_up
from ...privacy.accounting.loss import NO_LOSS, Loss
from ...privacy.errors import ConfigurationError, InvalidRecordError, LedgerError
from ...privacy.ledger.ledger_history import ALL_ROWS, ROWS_DEALT
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.noise import derived_seed
from ...privacy.queries.evaluation import EVALUATION_SHARE, EvaluationResult, EvaluationRows
from ...privacy.queries.query import divided_mu
from ...privacy.queries.statistics import statistics_policy
from ...privacy.release.admission import ROUNDING
from ...privacy.release.known_samples import Owners
from ...privacy.release.ledgered_privatizer import LedgeredPrivatizer
from ...privacy.release.policy import PrivacyPolicy
from ...privacy.setting import Value, refusal
from ...strategies.queries import Statistics
from ..data.table_task import ReadTable, TableTask, model_inputs, of_nobody, read_for, scaled_labels
from ..data.task import Dataset
from ..engines.inprocess import InProcessGrid
from ..methods.queries import beside_queries
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .experiment import Experiment, prepare
from .progress import Progress
from .result import RunResult
from .sealed import ChangedRowsError, Seal
from .training_run import check_deployed, run_experiment

LEDGER_ENDING = ".ledger"
_HELD_OUT, _BINS, _TWO, _LONGEST_KNOWN = 0.1, 20, 2, 1 << 16


@dataclass(frozen=True)
class RealFit:
    """Outputs of a real fit: released, or public."""

    result: RunResult
    schema: Schema
    """The schema by which rows were read, with released bounds if there are any."""
    rows: int
    """Rows of the table, whose number is public; with owners the places for them."""
    spent: Loss
    """Loss of everything that calls with this ledger have released on these rows so far."""
    budget_mu: float


def fit_for_real(
    found: ReadTable,
    settings: dict[str, Value],
    ledger: Path,
    budget: float,
    seal: Seal,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    scaling_share: float = 0.0,
    owners: int = 0,
) -> RealFit:
    """Train on a table's rows with one client that has all of them.

    Parameters
    ----------
    settings : dict
        Run-config keys, without those of the data and clients.
    ledger : Path
        The ledger's file; made if it is not there.
    budget : float
        Budget of a new ledger: epsilon of everything that is ever released on these rows; 0 for what this call takes.
    seal : Seal
        Seal under which this is called.
    on_progress : callable, optional
        Called after every round.
    scaling_share : float
        Share of mu^2 for private statistics by which columns are scaled; 0 for none.
    owners : int
        N, places for owners, a public number, where the schema names an owner; otherwise 0.

    Raises
    ------
    ConfigurationError, LedgerError
        If settings, schema, header or ledger cannot be; no row was read, nothing was released, no ledger was made.
    ChangedRowsError
        If the rows are not those that the ledger was used with.

    Notes
    -----
    **Formal guarantees.** Everything that leaves the client, the statistics, the model and the private evaluation, is
    together mu-GDP for replacement of one row of the table, for the mu that was asked for, and all calls with one
    ledger stay within its budget. Bounds that columns are scaled by are made from the released statistics alone. It
    rests on this computer, which sees the rows, on a public schema that does not come from these rows, or of which this
    ledger has paid for what does (:mod:`.paid_schema`), and on the number of rows being public: of a CSV file the lines
    behind the header that end with a line break, whatever stands in them; of a folder of images the entries of its
    directories, which are put in a secret order, so that replacing one by any file in any directory replaces one row.
    With owners it is for replacement of all rows of one owner by others of that owner, and rests on N and on the set of
    owners' names being public in the place of the number of rows. Proofs: docs/proofs/release-rule.md,
    docs/proofs/records.md, docs/proofs/owners.md.
    """
    schema = found.schema
    schema.check_for_real_nodes()
    if any(name.startswith("partition") for name in settings):
        raise ConfigurationError(
            "A real fit has all rows in one place, so `partition` cannot say how clients differ. Leave it out, or "
            "rehearse without --real.",
            kind="conflict",
            setting="partition",
        )
    if not (count := found.rows.public_count):
        raise ConfigurationError(
            f"Expected rows in {found.name} that end with a line break, got none.", kind="malformed"
        )
    if schema.owner:  # from here on the number of rows, which an owner's rows change, is no public number
        count = owners
    read = read_for(schema, settings)
    inputs = read.num_features + (read is schema and schema.num_classes == 1)
    nobody = of_nobody(count, inputs, schema.num_classes)
    if schema.owner:
        nobody = replace(nobody, owner_of=np.arange(count))
    task = TableTask(read, nobody, is_tested=False)
    fixed: dict[str, Value] = {"task": task.name, "partition": "iid", "num-clients": 1, "clients-per-round": 1}
    usual = {} if settings.get("evaluation.share") == 0 else evaluated_privately(schema)
    if any(name.startswith("evaluation.") for name in settings):  # somebody asks for the accuracy, or for none
        settings = {**usual, **settings}
    mu = RunConfig.from_mapping({**settings, **fixed}).mu
    scaling_mu = mu * math.sqrt(scaling_share)
    rest: dict[str, Value] = {"mu": mu * math.sqrt(1.0 - scaling_share)} if scaling_share else {}
    trained = layered({**settings, **fixed}, rest)
    if not why_no_figure(RunConfig.from_mapping(trained), schema, count):
        trained = {**usual, **trained}
    experiment = prepare(RunConfig.from_mapping(trained))
    config = experiment.config
    check_deployed(config)
    if config.poisson_batches:
        if scaling_share:
            raise refusal(
                "scale", "empty with batch-selection = 'poisson': the statistics show every sample", "private"
            )
        mu = config.mu  # what the ledger counts: it holds even if the batches become known
    kept, policy = _opened(ledger, experiment, schema, mu, scaling_mu, budget, found.name)
    if isinstance(found.rows, ImageFolder):
        found = replace(found, rows=found.rows.in_secret_order(kept.secret_of_owners(kept.keys())))
    order = np.empty(0, np.int64) if schema.owner else order_on(kept, found.name, count)
    unit = f"{count:,} places for persons in" if schema.owner else f"{count:,} rows of"
    rounds = experiment.num_rounds
    seal.tell(
        f"Training for real on {unit} {found.name}, {rounds} round{'s' * (rounds != 1)}. Until it ends, nothing is "
        "shown that depends on a row."
    )
    if not config.private_evaluation and (why := why_no_figure(config, schema, count)):
        seal.tell(f"The accuracy is left out: {why}. {FIGURE_OPTION}.")
    elif forecast := figure_forecast(config, schema, count):
        seal.tell(forecast)

    sealed = bool(schema.seal) and kept.has_sealed(schema.sealed_text(), schema.seal)

    seal.begin_rows()
    rows: Dealt | OwnedSamples
    if schema.owner:
        rows = _owned(found.rows, read, policy, kept, count, seal)
    else:
        known = RowCells(found.rows, order) if knows_cells(kept) else None
        rows = Dealt(found.rows, schema, order, known, PAID_ROW if sealed else "")
        rows = rows if read is schema else rows.read_by(read)
        seal.note(rows.records.report())
    spent = NO_LOSS
    if scaling_share and isinstance(rows, Dealt):
        statistics = _statistics_client(schema, Places(rows), policy, scaling_mu, kept, found.name)
        bounds, spent = _bounds(statistics, schema), statistics.privatizer.plan.loss
        schema = schema.bounded(bounds)
        rows = rows.read_by(schema)
    client = _client(experiment, rows, policy, kept, found.name)
    check_unchanged(client.privatizer)
    present = [client]
    grid = InProcessGrid(numpy_client_app(lambda _: present[0]), 1, {}, simulated=False)

    def shown(progress: Progress) -> None:
        if on_progress is not None:
            seal.show(partial(on_progress, _unmeasured(progress)))

    result = run_experiment(grid, config, deployed=True, experiment=experiment, on_progress=shown)
    present.clear()  # the result knows the grid, and must not lead to rows and keys
    # How long rounds took depends on what stands in rows.
    result = replace(result, progress=[_unmeasured(one) for one in result.progress], seconds=None)
    with kept.exclusive() as page:
        all_calls = page.account().spent
    return RealFit(with_spent(result, spent), schema, count, all_calls, float(kept.budget_mu or mu))


def figure_forecast(config: RunConfig, schema: Schema, rows: int) -> str:
    """Return a sentence on a private evaluation that will be too uncertain to be of use; empty if it will not be.

    It follows from its arguments alone, which are public.

    Parameters
    ----------
    config : RunConfig
        Configuration of a real fit.
    schema : Schema
        Its schema, of which the declared majority counts.
    rows : int
        Number of rows, which is public; with owners the places for them, each of which is taken to have one.
    """
    width = _half_width(config, schema, rows)
    if not width > _USEFUL:
        return ""
    changes = {
        f"--set evaluation.held-out={_MORE_HELD:g}": replace(config, held_out=_MORE_HELD),
        f"--set evaluation.share={_MORE_SHARE:g}": replace(config, private_evaluation=_MORE_SHARE),
        f"--epsilon {rounded_up(4 * gdp_epsilon(config.mu, config.delta))}": replace(
            config, mu=gdp_mu(4 * gdp_epsilon(config.mu, config.delta), config.delta)
        ),
    }
    helpful = [
        f"{option} ({100 * other:.0f} points)"
        for option, changed in changes.items()
        if (other := _half_width(changed, schema, rows)) < _HELPFUL * width
    ]
    counted = _counted(config, rows)
    ways = " or ".join([*helpful, "no figure, which is the default here (a better model)"])
    return (
        f"Forecast of the figure, from public numbers: it will count {counted}, and its 95 % interval will be "
        f"about {100 * width:.0f} points to each side, too wide to be of use. What helps: {ways}."
    )


def _counted(config: RunConfig, rows: int) -> str:
    """Return what a private evaluation counts."""
    held = held_out_samples(rows, config.held_out)
    return f"the persons in {held:,} places" if config.samples_per_owner else f"{held:,} rows"


def why_no_figure(config: RunConfig, schema: Schema, rows: int) -> str:
    """Return why a real fit with a private evaluation by default would have a figure of no use; empty if of use.

    It follows from its arguments alone, which are public.

    Parameters
    ----------
    config : RunConfig
        Configuration of a real fit, whose own evaluation does not count.
    schema : Schema
        Its schema.
    rows : int
        Number of rows, which is public; with owners the places for them.
    """
    usual = evaluated_privately(schema)
    if not usual:
        return ""
    if config.secret_batches:
        return (
            f"it would show every row, and batch-selection = {config.batch_selection!r} hides in which rounds each is"
        )
    bins = int(usual.get("evaluation.score-bins", 0))
    asked = replace(config, private_evaluation=EVALUATION_SHARE, held_out=_HELD_OUT, score_bins=bins)
    width = _half_width(asked, schema, rows)
    if not width > _USEFUL:
        return ""
    return (
        f"{_counted(asked, rows)} that are held out would give a 95 % interval of about "
        f"{100 * width:.0f} points to each side, so the model has all rows and all of epsilon"
    )


FIGURE_OPTION = '--evaluate private (evaluate="private") releases it'
"""Option that asks for the accuracy of a real fit that leaves it out."""
_USEFUL, _HELPFUL, _MORE_SHARE, _MORE_HELD, _USUALLY_RIGHT = 0.1, 0.8, 0.3, 0.3, 0.8
"""Half a 95 % interval up to which a figure is of use; how much narrower a change makes it if it is named; larger
shares of mu^2 and of the rows; and an accuracy at which intervals are forecast."""


def _half_width(config: RunConfig, schema: Schema, rows: int) -> float:
    """Return half of the 95 % interval that the accuracy is likely to have; zero without an evaluation."""
    if not (config.private_evaluation and config.private and rows > 1):
        return 0.0
    count = held_out_samples(rows, config.held_out)
    noise = math.sqrt(2.0) / divided_mu(config.mu, config.private_evaluation)[0]
    right = max(schema.label.majority or 0.0, _USUALLY_RIGHT) * count
    query, owners = EvaluationRows(bins=config.score_bins), None
    std = query.right_std(noise)
    if config.samples_per_owner:
        std, owners = math.sqrt(2.0) * noise / query.right_weight, float(count)
    low, high = EvaluationResult(right, std, count, clients=1, held_out=True, owners=owners).interval
    return (high - low) / 2.0


def _owned(
    rows: Rows, schema: Schema, policy: PrivacyPolicy, ledger: SQLiteLedger, places: int, seal: Seal
) -> OwnedSamples:
    """Return a table's rows by owner, as the model takes them."""
    records = Records(rows, schema, together=True)
    seal.note(records.report())
    secret = ledger.secret_of_owners(ledger.keys())
    owned = records.by_owner(policy.samples_per_owner, places=places, secret=secret)
    features, labels = records[:]
    arrays = model_inputs(features, schema), scaled_labels(labels, schema)
    return OwnedSamples(arrays, owned.owners, records.fits, schema=schema, record_kind=records.record_kind)


def _client(experiment: Experiment, samples: Any, policy: PrivacyPolicy, ledger: SQLiteLedger, name: str) -> Any:
    """Return the one client of a real fit."""
    samples_held = len(experiment.data.train_labels)
    queries = [one.client_query(policy, samples_held) for one in experiment.queries]
    options = {**experiment.method.client_options(experiment.trained, 0), "queries": queries}
    gradients: Any = experiment.gradients
    if experiment.config.samples_per_owner:  # a model that fails on a row, or remembers others, costs its owner alone
        gradients = OwnerGradients(experiment.model, one_by_one=True)
    return experiment.method.client(gradients, samples, policy, ledger, ledger.keys(), name=name, **options)


def known_ledger(path: Path, budget: float) -> SQLiteLedger | None:
    """Return a table's ledger, None if there is none yet; raise if it is given another budget.

    Notes
    -----
    **Formal guarantees.** The budget of a ledger is never changed: everything that calls with it release stays within
    the one it was made with.
    """
    if not path.exists():
        return None
    if budget:
        raise ConfigurationError(
            f"Expected no budget for the ledger {path}, which has one, got {budget:g}: `murmurfl ledger show "
            f"{path}` says what is left.",
            kind="conflict",
            setting="budget",
            got=budget,
        )
    return SQLiteLedger(path)


def _opened(
    path: Path, experiment: Experiment, schema: Schema, mu: float, scaling_mu: float, budget: float, name: str
) -> tuple[SQLiteLedger, PrivacyPolicy]:
    """Return the ledger, made only if nothing is wrong with the settings, and the client's policy on its budget."""
    delta, count = experiment.config.delta, len(experiment.data.train_labels)
    kept = known_ledger(path, budget)
    whole = gdp_mu(budget, delta) if budget else mu
    if kept is not None:
        whole = float(kept.budget_mu or 0.0)
        check_room(kept, mu, whole, delta)
    elif mu > whole * (1 + ROUNDING):
        wanted, given = rounded_up(gdp_epsilon(mu, delta)), rounded_up(gdp_epsilon(whole, delta))
        raise ConfigurationError(
            f"Expected a budget that covers this call's epsilon = {wanted}, got {given}: raise it, or leave it out.",
            kind="out-of-range",
            setting="budget",
            got=given,
        )
    policy = replace(experiment.policy(), budget_mu=whole, noise_quality="exact")
    with tempfile.TemporaryDirectory() as scratch:  # where clients with nobody's rows find what is wrong
        at = delta if kept is None else float(kept.delta or delta)
        trial = SQLiteLedger.create(Path(scratch) / "trial.ledger", budget_mu=whole, delta=at)
        if scaling_mu:
            policy = beside_queries(policy, whole)
            _statistics_client(
                schema, np.full((count, len(statistics_columns(schema))), np.nan), policy, scaling_mu, trial, name
            )
        nobody: Any = _Nobody(experiment.data)
        if most := policy.samples_per_owner:
            places = Owners.of(range(count), most, secret=bytes(32), places=count)
            nobody = OwnedSamples((experiment.data.train_features, experiment.data.train_labels), places)
        _client(experiment, nobody, policy, trial, name)
    if kept is None:
        text = f"{name}{ALL_ROWS}" if policy.samples_per_owner else data_text(name, [count])
        kept = SQLiteLedger.create(path, budget_mu=whole, delta=delta, data=text)
    return kept, policy


def check_room(ledger: SQLiteLedger, mu: float, budget: float, delta: float, added_delta: float = 0.0) -> None:
    """Raise if a ledger has no room for everything that a call releases, before it releases anything.

    Notes
    -----
    **Formal guarantees.** Nothing is released. What has room keeps the ledger's epsilon at ``delta`` within that of its
    budget.
    """
    with ledger.exclusive() as page:
        before = page.account().spent
    whole_loss, asked = Loss.of(budget), Loss.of(mu).with_added(added_delta)
    after = before.compose(asked)
    if after.mu <= whole_loss.less_added(after.added_delta, delta).mu * (1 + ROUNDING):
        return
    wanted, spent, whole = (rounded_up(one.assumed.epsilon(delta)) for one in (asked, before, whole_loss))
    left = whole_loss.left_of(before.compose(NO_LOSS.with_added(added_delta)), delta).with_added(added_delta)
    raise ConfigurationError(
        f"Expected a budget with room for epsilon = {wanted}, got {spent} spent of {whole} in the ledger {ledger.path} "
        f"and released nothing. {left_words(left, delta)} What all calls may spend is fixed by the first one "
        "(--budget).",
        kind="exhausted",
        setting="budget",
        got=spent,
    )


def left_words(left: Loss, delta: float) -> str:
    """Return a sentence on the largest epsilon that a ledger has room for."""
    epsilon = left.assumed.epsilon(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        return "Nothing is left."
    return f"epsilon = {rounded_down(epsilon)} is left: epsilons do not subtract."


def check_unchanged(privatizer: LedgeredPrivatizer) -> None:
    """Raise, in a fixed text, if the rows are not those that the ledger was used with.

    Notes
    -----
    **Formal guarantees.** Nothing is released. Of the rows the refusal says that they differ, and nothing else.
    """
    try:
        privatizer.check_data()
    except LedgerError:
        raise ChangedRowsError from None


def data_text(name: str, counts: Sequence[int]) -> str:
    """Return what a ledger calls a table.

    Its name, and how many rows it had at each call that found more than before.
    """
    return f"{name}{ROWS_DEALT}{' '.join(map(str, counts))}"


def _counts_of(text: str) -> list[int]:
    """Return the numbers of rows in a ledger's text; none if it has no such text."""
    found = re.search(re.escape(ROWS_DEALT) + r"(\d+(?: \d+)*)$", text)
    return [] if found is None else [int(one) for one in found.group(1).split()]


def order_on(ledger: SQLiteLedger, name: str, count: int) -> NDArray[np.int64]:
    """Return the order of ``count`` rows in which those that a ledger was used with keep their places.

    Notes
    -----
    **Formal guarantees.** It follows from numbers of rows alone, which are public: those of earlier calls, which the
    ledger has, and this one.
    """
    with ledger.exclusive() as page:
        used = page.account().samples_used
    known = _counts_of(ledger.data)
    counts = [end for start, end in zip([0, *known], known, strict=False) if start < used]
    fewest = max(used, *counts, 0)
    if count < fewest:
        raise LedgerError(
            f"Expected at least the {fewest} rows that the ledger {ledger.path} was used with, got {count}. Put the "
            "table back as it was: new rows may be added at its end. Nothing was released.",
            kind="mismatch",
        )
    if not counts or counts[-1] < count:
        counts.append(count)
    if counts != known:
        ledger.call_data(data_text(name, counts))
    return dealt_order(counts)


def dealt_order(counts: Sequence[int]) -> NDArray[np.int64]:
    """Rows in a public order, from how many there were at each call that found more.

    Parameters
    ----------
    counts : sequence of int
        Ascending numbers of rows, the last one that of now.

    Returns
    -------
    ndarray of int64
        A permutation. That of fewer counts is its beginning, so a row keeps its place when others are added at the end.
        Rows that one call added are mixed among themselves, for a file may be sorted.

    Notes
    -----
    **Formal guarantees.** The order depends on numbers of rows alone, which are public.

    Examples
    --------
    >>> bool((dealt_order([4, 7])[:4] == dealt_order([4])).all()), sorted(dealt_order([4, 7]).tolist())
    (True, [0, 1, 2, 3, 4, 5, 6])
    """
    parts = []
    for start, end in zip([0, *counts], counts, strict=False):
        seed = derived_seed("rows dealt", *([start] if start else []), end)
        parts.append(start + np.random.Generator(np.random.Philox(key=seed)).permutation(end - start))
    return np.concatenate(parts)


def with_spent(result: RunResult, spent: Loss) -> RunResult:
    """Return a result whose figures cover a release before it, on the same clients and under the same trust.

    Notes
    -----
    **Formal guarantees.** The figures are those of both together, by composition of Gaussian DP.
    """
    return replace(result, figures=replace(result.figures, loss=result.figures.loss.compose(spent)))


def _statistics_client(
    schema: Schema, places: Any, policy: PrivacyPolicy, mu: float, ledger: SQLiteLedger, name: str
) -> StatisticsClient:
    """Return the client that releases statistics of the columns, next to a training under this ``policy``."""
    own = statistics_policy(
        mu, delta=policy.delta, budget_mu=policy.budget_mu, budget_local_mu=policy.budget_local_mu, trust=policy.trust
    )
    check_beside(own, policy, beside="scale = 'private'", release="the statistics of the columns")
    client = StatisticsClient(TableRows(schema), places, own, ledger, ledger.keys(), name=name)
    client.privatizer.together = True  # each row is read and placed by itself, and none fails
    return client


def _bounds(client: StatisticsClient, schema: Schema) -> dict[str, tuple[float, float]]:
    """Bounds of the columns, from statistics of the rows.

    Notes
    -----
    **Formal guarantees.** The bounds are mu-GDP for replacement of one row, for the mu of the client's plan.
    """
    check_unchanged(client.privatizer)
    grid = InProcessGrid(numpy_client_app(lambda _: client), 1, {}, simulated=False)
    return Statistics(columns=statistics_columns(schema), num_clients=1).collect(grid).bounds


def _unmeasured(progress: Progress) -> Progress:
    """Return a round without times, which depend on what stands in rows; it has no figures."""
    return replace(progress, seconds_left=None)


def evaluated_privately(schema: Schema) -> dict[str, Value]:
    """Return settings of a private evaluation on rows that clients set aside.

    None of numbers, of which nothing is right.
    """
    if schema.num_classes == 1:
        return {}
    bins: dict[str, Value] = {"evaluation.score-bins": _BINS} if schema.num_classes == _TWO else {}
    return {"evaluation.share": EVALUATION_SHARE, "evaluation.held-out": _HELD_OUT, **bins}


class Dealt:
    """A table's rows as a client's samples, in a public order (:func:`dealt_order`).

    Those that are set aside for the evaluation are the last ones. In a batch of several a made-up record stands in for
    one that does not fit, and ``fits`` says which; by itself it fails. The ledger knows them as the reviewed schema
    reads them (``first_read``), whatever bounds were released since.
    """

    stands_in = True

    def __init__(
        self,
        rows: Rows,
        schema: Schema,
        order: NDArray[np.int64],
        first_read: Dealt | RowCells | None = None,
        record_kind: str = "",
    ) -> None:
        self.schema, self._rows, self._order = schema, rows, order
        self._record_kind = record_kind or rows.record_kind
        self.records = Records(_Ordered(rows, order, rows.record_kind), schema, count=len(order), together=True)
        self.first_read: Dealt | RowCells = self if first_read is None else first_read
        self.fits = self.records.fits

    def read_by(self, schema: Schema) -> Dealt:
        """Return the same rows, read by the schema with other bounds."""
        return Dealt(self._rows, schema, self._order, self.first_read, self._record_kind)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, chosen: slice, /) -> tuple[NDArray[np.float32], NDArray[Any]]:
        features, labels = self.records[chosen]
        if len(labels) == 1 and not self.fits[chosen][0]:
            raise InvalidRecordError("a record that does not fit")
        return model_inputs(features, self.schema), scaled_labels(labels, self.schema)

    @property
    def record_kind(self) -> str:
        """Name of a record."""
        return self._record_kind


class RowCells:
    """A table's rows as a ledger knows them that has paid for a schema: by their cells, whatever schema reads them.

    So a row is the same before and after the schema was completed, and a schema that was paid for may be edited.

    Parameters
    ----------
    rows : Rows
        The table's.
    order : ndarray of int64
        The rows' public order (:func:`dealt_order`).
    """

    def __init__(self, rows: Rows, order: NDArray[np.int64]) -> None:
        self._rows = _Ordered(rows, order, rows.record_kind)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: slice, /) -> list[list[str]]:
        items = [self.item(number) for number in range(*chosen.indices(len(self)))]
        return [list(map(_known_as, item.values() if isinstance(item, Mapping) else item)) for item in items]

    def item(self, number: int) -> Any:
        """Return a row as it was handed over."""
        return self._rows[number]


def _known_as(cell: Any) -> str:
    """Return a text by which a cell is known: that of its number, if it is one, or its own."""
    for read in (lambda: repr(number_of(cell)), lambda: text_of(cell)):
        with suppress(InvalidRecordError):
            return read()
    return repr(cell)[:_LONGEST_KNOWN]


SCHEMA_SESSION = "schema: "
"""Beginning of the names of sessions that pay for a schema."""


def knows_cells(ledger: SQLiteLedger, *, new: bool = False) -> bool:
    """Return True if a ledger knows rows by their cells: its first session has paid for a schema.

    Of a ledger without sessions, ``new`` is returned.
    """
    with ledger.exclusive() as page:
        first = next(iter(page.account().reserved), None)
    return new if first is None else first.startswith(SCHEMA_SESSION)


class Places:
    """A table's rows as their places in the columns that are counted, in the order of :class:`Dealt`."""

    def __init__(self, rows: Dealt, places: RecordPlaces | None = None) -> None:
        self.first_read, self._rows = rows.first_read, rows
        self._places = RecordPlaces(rows.schema) if places is None else places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: slice, /) -> NDArray[np.float64]:
        return self._places.batch(self._rows.records, chosen)

    @property
    def record_kind(self) -> str:
        """Name of a record."""
        return self._rows.record_kind


@dataclass(frozen=True)
class _Ordered:
    rows: Rows
    order: NDArray[np.int64]
    record_kind: str

    @property
    def columns(self) -> list[str]:
        return self.rows.columns

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int, /) -> Any:
        return self.rows[int(self.order[number])]


@dataclass(frozen=True)
class _Nobody:
    """Samples of a table's shape, in which nothing is a row's."""

    data: Dataset

    def __len__(self) -> int:
        return len(self.data.train_labels)

    def __getitem__(self, chosen: slice, /) -> tuple[NDArray[np.float32], NDArray[Any]]:
        return self.data.train_features[chosen], self.data.train_labels[chosen]
