"""A table as a task: rows read one by one by a schema, a client a site, and rows held out for a figure."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.client_records import Records, Rows, check_columns, table_file, table_rows
from ...clients.records.drafting import Draft, draft, draft_of_rows
from ...clients.records.encoders import TEXT_DIMENSION
from ...clients.records.image_folders import CLASS, IMAGE, ImageFolder
from ...clients.records.schema import Column, Label, Schema, is_missing, text_of
from ...privacy.accounting.guarantee import added_words, rounded_up
from ...privacy.accounting.loss import Gaussian, Loss
from ...privacy.errors import ConfigurationError, InvalidRecordError
from ...privacy.noise import derived_seed
from ..settings.registry import registry
from ..settings.run_config import RunConfig, is_additive
from .task import Dataset, Task

_FEWEST_ROWS, _FEWEST_CLASSES = 10, 2
_INNER_FOLDERS = (
    "If the directories of classes are one level deeper, name the folder that holds them, or --site site if each outer "
    "directory is a site."
)


@dataclass(frozen=True)
class ReadTable:
    """A table, and the schema by which its rows are read; ``drafted`` from these very rows, or given."""

    name: str
    rows: Rows
    schema: Schema
    drafted: bool
    left_out: Mapping[str, list[str]]
    """Columns of the table that are no features, by the reason."""
    label_notes: Sequence[str] = ()
    """Notes for a person on the classes of the label."""
    to_check: Sequence[str] = ()
    """Points of a draft for a person to decide, and cells that are lost."""
    scaled: bool = False
    """Whether bounds of numbers are from private statistics."""

    @classmethod
    def of(
        cls,
        table: Any,
        *,
        label: str = "",
        site: str = "",
        owner: str = "",
        schema: Schema | Path | str | None = None,
        header: bool = True,
        text: Sequence[str] = (),
        features: str = "",
        mu: float = math.inf,
    ) -> ReadTable:
        """Open a file, a folder of images, a DataFrame or a list of mappings, with its schema or a draft of one.

        ``owner`` is the column that says which person a row belongs to; default the schema's. Without ``header`` the
        first line of a CSV file is a row. ``text`` are columns of texts for a draft, and ``features`` those that images
        of a folder are encoded by; without a name they follow from its size and from ``mu``, that of a sum of all
        clients, as the dimension of texts does. Raises ConfigurationError if there is no such table, or a column
        that is named is not in it.
        """
        found = Schema.read_file(Path(schema)) if isinstance(schema, str | Path) else schema
        if found is not None and label not in ("", found.label.column):
            raise ConfigurationError(
                f"Expected the label of the schema, {found.label.column!r}, got {label!r}: name one of them.",
                kind="mismatch",
                setting="label",
                got=label,
            )
        if found is not None and owner:
            found = _with_owner(found, owner)
        if found is not None and not header and not found.header:
            raise ConfigurationError(
                "Expected a schema with the names of the columns (header = [...]) for a file without a header, got "
                "none: `murmurfl schema FILE --no-header` drafts one.",
                kind="conflict",
                setting="header",
            )
        apart = [site] if site else []
        _check_encoded(found, text)
        if isinstance(table, str | Path) and Path(table).expanduser().is_dir():
            folder = ImageFolder(table, site)
            name, rows = folder.folder.name, folder
            if features:
                registered_images(features)
            made = Draft(folder_schema(folder, features, mu=mu) if found is None else found)
        elif isinstance(table, str | Path):
            path = Path(table).expanduser()
            asked: dict[str, Any] = {"label": label, "owner": owner, "apart": apart, "text": text, "mu": mu}
            made = draft(path, header=header, **asked) if found is None else Draft(found)
            name, rows = path.name, table_file(path, made.schema)
        else:
            name, rows = "table", table_rows(table)
            asked = {"label": label, "owner": owner, "apart": apart, "text": text, "mu": mu}
            made = Draft(found) if found else draft_of_rows(rows, "the table", **asked)
        used = made.schema
        check_columns(rows.columns, used)
        if site and (site not in rows.columns or site in (*used.columns, used.label.column, used.owner)):
            remedy = ""
            if site in used.columns:
                remedy = f" Remove [columns.{site}] from the schema, or draft one with `murmurfl schema --site {site}`."
            raise ConfigurationError(
                f"Expected a column of sites in the table that is neither the label nor the owner nor a column of the "
                f"schema, got {site!r}.{remedy}",
                kind="conflict",
                setting="site",
                got=site,
            )
        left_out = {**made.left_out, **_set_apart(rows.columns, used, site, drafted=found is None)}
        return cls(name, rows, used, found is None, left_out, made.label_notes, made.notes_on_used)

    def read(self, site: str = "") -> ReadRows:
        """Read the rows that fit as arrays, with the site and the owner of each."""
        records = Records(self.rows, self.schema, together=True)
        sites: list[str] = []
        fits = records.fits.copy()
        if site:
            for number in range(len(records)):
                sites.append(_site(self.rows, number, site) if fits[number] else "")
                fits[number] = bool(sites[-1])
            records.reasons["no site"] += int(records.fits.sum() - fits.sum())
        kept = np.flatnonzero(fits)
        if len(kept) < _FEWEST_ROWS:
            others = "".join(f"; {count:,} have {reason}" for reason, count in records.reasons.most_common(1) if count)
            inner = f" {_INNER_FOLDERS}" if isinstance(self.rows, ImageFolder) else ""
            raise ConfigurationError(
                f"Expected at least {_FEWEST_ROWS} rows of {self.name} that fit the schema, got {len(kept)} of "
                f"{len(records):,}{others}.{inner}",
                kind="out-of-range",
            )
        inputs, labels = records[:]
        names = tuple(sorted({sites[i] for i in kept})) if site else ()
        of = {name: number for number, name in enumerate(names)}
        client_of = np.array([of[sites[i]] for i in kept], dtype=np.int64) if site else None
        owner_of = None
        if self.schema.owner:
            whose = [self.schema.owner_of(self.rows[int(i)]) for i in kept]
            owner_of = np.unique(whose, return_inverse=True)[1].astype(np.int64).ravel()
        return ReadRows(
            np.asarray(inputs)[kept],
            labels[kept],
            names,
            client_of,
            Counter({reason: count for reason, count in records.reasons.items() if count}),
            owner_of,
        )

    def likely_owner(self) -> tuple[str, int]:
        """Return a column that looks like a person's number on several rows, and how many persons it names.

        It is for rehearsals, which see rows. The column has a name such as ``patient_nbr``, is neither label nor owner,
        and its values repeat, though not often. Returns an empty name if there is none.
        """
        if self.schema.owner:
            return "", 0
        apart = {self.schema.label.column, *(name for name, one in self.schema.columns.items() if one.kind == "flag")}
        named = [name for name in self.rows.columns if name not in apart and _PERSON.search(_words_of(name))]
        for name in sorted(named, key=lambda one: not _PERSONS.search(_words_of(one))):
            cells = [text for number in range(len(self.rows)) if (text := _site(self.rows, number, name))]
            persons = len(set(cells))
            if persons >= _FEWEST_PERSONS and _FEWEST_ROWS_EACH * persons <= len(cells) <= _MOST_ROWS_EACH * persons:
                return name, persons
        return "", 0


def folder_schema(folder: ImageFolder, encoder: str = "", *, mu: float = math.inf) -> Schema:
    """Return the schema of a folder of images, whose encoder follows from its size and ``mu`` if none is named.

    Notes
    -----
    **Formal guarantees.** It follows from the names of the folder's directories and from how many entries they have
    together, which are public.
    """
    if len(folder.classes) < _FEWEST_CLASSES:
        raise ConfigurationError(
            f"Expected a directory for each of at least two classes in {folder.folder.name}, got "
            f"{', '.join(folder.classes)}. {_INNER_FOLDERS}",
            kind="out-of-range",
            setting="path",
        )
    if not encoder:
        from .features.colour import usual_colours

        encoder = usual_colours(len(folder), len(folder.classes), mu)
    image = Column(kind="image", encoder=encoder, dimension=registered_images(encoder))
    return Schema(columns={IMAGE: image}, label=Label(column=CLASS, classes=folder.classes))


def registered_images(name: str) -> int:
    """Register features as an encoder of images; return how many values they have."""
    from .features import register_images

    return register_images(name)


def _check_encoded(schema: Schema | None, text: Sequence[str]) -> None:
    """Raise if a schema reads columns that are named as texts otherwise."""
    if schema is None:
        return
    for name in text:
        kind = schema.columns[name].kind if name in schema.columns else ""
        if kind != "text":
            raise ConfigurationError(
                f"The schema does not read {name!r} as a text ({kind or 'no column of it'}). Write [columns.{name}] "
                f'with kind = "text" and dimension = {TEXT_DIMENSION} into it, or leave --text out.',
                kind="mismatch",
                setting="text",
                got=name,
            )


def _set_apart(columns: Sequence[str], schema: Schema, site: str, *, drafted: bool) -> dict[str, list[str]]:
    """Return columns that are no features, by what they say, and those that a given schema does not name."""
    found = {}
    if site:
        found["the sites"] = [site]
    if schema.owner:
        found["whose a row is"] = [schema.owner]
    named = {*schema.columns, schema.label.column, schema.owner, site}
    if not drafted and (others := [name for name in columns if name not in named]):
        found["not in the schema"] = others
    return found


def _with_owner(schema: Schema, owner: str) -> Schema:
    """Return a schema that names an owner; raise ConfigurationError if it has another, or reads the column."""
    if schema.owner not in ("", owner):
        raise ConfigurationError(
            f"Expected the owner of the schema, {schema.owner!r}, got {owner!r}: name one of them.",
            kind="mismatch",
            setting="owner",
            got=owner,
        )
    if owner in (*schema.columns, schema.label.column):
        raise ConfigurationError(
            f"Expected a column of owners that is neither the label nor a column of the schema, got {owner!r}: remove "
            f"[columns.{owner}] from the schema.",
            kind="conflict",
            setting="owner",
            got=owner,
        )
    return schema.model_copy(update={"owner": owner})


def _words_of(name: str) -> str:
    """Return a column's name in lower case, with a space between its words."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).lower().strip()


_PERSONS = re.compile(r"\b(person|patient|subject|participant|customer|client|member|user|employee|student|mrn)s?\b")
_PERSON = re.compile(rf"{_PERSONS.pattern}|\b(id|identifier|nbr|ssn|key)$")
"""Names of columns that may say which person a row belongs to."""
_FEWEST_PERSONS, _FEWEST_ROWS_EACH, _MOST_ROWS_EACH = 20, 1.02, 100
"""Values of such a column, and rows that each has on average."""


@dataclass(frozen=True)
class ReadRows:
    """Rows as a model takes them: float32, or float64 for values of columns (:meth:`Schema.of_values`)."""

    features: NDArray[np.floating]
    labels: NDArray[Any]
    sites: tuple[str, ...]
    client_of: NDArray[np.int64] | None
    invalid_records: Counter[str]
    """Number of rows that do not fit, by the reason."""
    owner_of: NDArray[np.int64] | None = None
    """Number of the person that each row belongs to; None without owners."""

    def usual_samples_per_owner(self) -> int:
        """Return the smallest usual cap under which nine tenths of the rows are used.

        It follows from the rows: a rehearsal may use it, and a real fit is given a number.
        """
        if self.owner_of is None:
            return 0
        counts = np.bincount(self.owner_of)
        used = [np.minimum(counts, cap).sum() for cap in _CAPS]
        return next(
            (cap for cap, rows in zip(_CAPS, used, strict=True) if rows >= _USED_SHARE * counts.sum()), _CAPS[-1]
        )


_CAPS, _USED_SHARE = (1, 2, 3, 5, 8, 12, 20), 0.9


def _site(rows: Rows, number: int, column: str) -> str:
    try:
        cell = rows[number][column]
        return "" if is_missing(cell) else text_of(cell)
    except InvalidRecordError:
        return ""


SCALED = "It includes private statistics by which columns are scaled, a tenth of mu^2; other shares are of the rest."
SPENT = (
    "All calls with this ledger so far, this one included, have spent mu = {mu}, epsilon = {epsilon} at "
    "delta = {delta:g} on these rows, of a budget of epsilon = {budget}."
)


@dataclass(frozen=True)
class FittedTable:
    """Data a model was fitted to: the table, how its rows were read, and the score of guessing on the rows held out."""

    name: str
    schema: Schema
    drafted: bool
    rows: int
    """Rows of the table; of a real fit with an owner places for owners (:attr:`unit`)."""
    trained: int
    tested: int
    invalid_records: Mapping[str, int]
    """Number of rows that do not fit, by the reason."""
    site: str
    """The column of sites; empty where rows were dealt."""
    left_out: Mapping[str, list[str]]
    """Columns that are not used, by the reason."""
    majority: float
    """Accuracy of always naming the most frequent class, on the rows held out; 0 for numbers."""
    variance: float
    """Variance of the scaled labels held out, for R^2."""
    differing: int = 0
    """Rows held out of which either the model or the most frequent class is right, and not both."""
    label_notes: Sequence[str] = ()
    to_check: Sequence[str] = ()
    """Points of a draft for a person to decide, and cells that are lost."""
    scaled: bool = False
    owners: int = 0
    """Persons that are protected with all their rows; 0 where rows are protected, and in a real fit."""
    samples_per_owner: int = 0
    """Rows of a person that are used at most; 0 without owners."""
    unused: int = 0
    """Rows for training that are not used because their person has more."""
    likely_owner: str = ""
    """Sentence on a column that looks like a person's number, where rows are protected; of a rehearsal."""
    also: str = ""
    """Scores of other options that were rehearsed on the same rows, as the end of a sentence."""
    better: str = ""
    """The best of these options if it is better than the model."""
    spent_mu: float = 0.0
    """Mu that all calls with the ledger of a real fit have spent on these rows so far; 0 for a rehearsal."""
    budget_mu: float = 0.0
    """The ledger's budget; 0 for a rehearsal."""
    spent_delta: float = 0.0
    """Added delta of all calls with the ledger of a real fit."""

    @property
    def error_of_accuracy(self) -> float:
        """The standard error of the accuracy less :attr:`majority`."""
        return math.sqrt(self.differing) / max(self.tested, 1)

    @property
    def error_of_guessing(self) -> float:
        """The standard error of the AUC of a model of two classes that guesses, on the rows held out."""
        frequent = self.majority * self.tested
        pairs = frequent * (self.tested - frequent)
        return math.sqrt((self.tested + 1) / (12 * pairs)) if pairs else math.inf

    @property
    def all_calls(self) -> Loss:
        """Loss of all calls with a real fit's ledger on these rows so far; none for a rehearsal."""
        return Loss.of(self.spent_mu).with_added(self.spent_delta)

    def spent(self, delta: float) -> str:
        """Return what all calls with a real fit's ledger spent on these rows, as a sentence; "" for a rehearsal."""
        if not self.spent_mu:
            return ""
        spent = Gaussian(self.spent_mu, self.spent_delta)
        epsilon, budget = (rounded_up(one.epsilon(delta)) for one in (spent, Gaussian(self.budget_mu)))
        mu = f"{rounded_up(spent.mu)}{added_words(spent)}"
        return SPENT.format(mu=mu, epsilon=epsilon, delta=delta, budget=budget)

    def notes(self, delta: float) -> tuple[str, ...]:
        """Sentences on what a guarantee for the table includes, and what else was released on it."""
        return tuple(filter(None, [SCALED if self.scaled else "", self.spent(delta)]))

    @property
    def unit(self) -> str:
        """Name of what :attr:`rows` counts: with an owner, a real fit has places for owners and no number of rows."""
        return "places for owners" if self.schema.owner and not self.owners else "rows"

    def document(self) -> dict[str, Any]:
        """Return the entries for the model's card."""
        schema = "drafted from these rows" if self.drafted else "given"
        if self.scaled:
            schema += ", with bounds from private statistics"
        return {"table": self.name, self.unit: self.rows, "label": self.schema.label.column, "schema": schema}


class TableTask(Task):
    """A table in this process: a rehearsal on one computer.

    Of a regression labels are scaled from the schema's bounds to [-1, 1], and features have a constant. For an additive
    model the schema's inputs are values, and labels stay as they are. Without ``is_tested`` the data set is nobody's,
    and nothing is measured on it.
    """

    reads = frozenset()
    sentence = "a table of your own"

    def __init__(self, schema: Schema, dataset: Dataset, *, is_tested: bool = True) -> None:
        digest = hashlib.sha256(schema.digest.encode())
        for array in (dataset.train_features, dataset.train_labels, dataset.test_features, dataset.client_of):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        self.name = f"table:{digest.hexdigest()[:12]}"
        self.schema, self.class_weights = schema if schema.inputs_are == "values" else None, schema.label.class_weights
        self.constant = schema.num_classes == 1 and self.schema is None
        self.feature_bound = float(np.hypot(schema.norm_bound, 1.0)) if self.constant else schema.norm_bound
        self._dataset, self.is_tested = dataset, is_tested
        registry("task").give(self.name, self)

    def load(self, config: RunConfig, root: str) -> Dataset:
        return self._dataset


class SchemaTask(Task):
    """Records that a schema describes and that only real clients have: what a server knows of a table.

    Its data set has the schema's shape and no record. Real clients train on their own records, and nothing is
    measured but what they release.

    Parameters
    ----------
    schema : Schema
        What a record is.
    name : str
        The path of the schema's file; empty for a name in this process.
    """

    reads = frozenset({"num_clients", "training_samples", "model"})
    has_records = False
    sentence = "records of a schema, on real clients alone"

    def __init__(self, schema: Schema, name: str = "") -> None:
        self.name = name or f"schema:{schema.digest}"
        self.schema = self._records = schema
        self.feature_bound = schema.norm_bound if math.isfinite(schema.norm_bound) else 0.0
        self.majority, self.class_weights = schema.label.majority or 0.0, schema.label.class_weights
        if not name:
            registry("task").give(self.name, self)

    @classmethod
    def of_file(cls, name: str) -> SchemaTask:
        """Return the task of a schema's file; raise ConfigurationError if there is none."""
        return cls(Schema.read_file(Path(name)), name)

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.schema and config.schema != self._records.digest:
            raise ConfigurationError(
                f"Expected the schema with digest {config.schema} at {self.name} (run key schema), got one with digest "
                f"{self._records.digest}: the file was changed. Put it back, or make a new federation with it.",
                kind="mismatch",
                setting="schema",
            )

    def load(self, config: RunConfig, root: str) -> Dataset:
        if config.training_samples < config.num_clients:
            raise ConfigurationError(
                f"Expected training-samples, how many records all clients have together, with task = {self.name!r}, "
                f"got {config.training_samples}: steps and noise depend on it.",
                kind="missing",
                setting="training-samples",
                got=config.training_samples,
            )
        read = self._records.of_values() if is_additive(config) else self._records
        return of_nobody(config.training_samples, read.num_features, read.num_classes)


def of_nobody(count: int, width: int, classes: int) -> Dataset:
    """Return a data set of ``count`` rows of ``width`` values, all zero, in which nothing is of a record."""
    train: NDArray[Any] = np.broadcast_to(np.zeros(1, np.int64), (count,))
    test: NDArray[Any] = np.arange(max(classes, _FEWEST_CLASSES)) % classes
    if classes == 1:
        train, test = train.astype(np.float32), test.astype(np.float32)
    features = np.broadcast_to(np.zeros((1, 1), np.float32), (count, width))
    return Dataset(features, train, np.zeros((len(test), width), np.float32), test, classes)


def held_out(rows: ReadRows, schema: Schema, share: float, seed: int) -> Dataset:
    """Rows as a data set, of which a share drawn at random by the seed is for the test.

    All rows of an owner are on one side.
    """
    features, labels = model_inputs(rows.features, schema), scaled_labels(rows.labels, schema)
    train, test = split_rows(rows, share, seed)
    client_of = None if rows.client_of is None else rows.client_of[train]
    owner_of = None if rows.owner_of is None else rows.owner_of[train]
    parts = (features[train], labels[train], features[test], labels[test])
    return Dataset(*parts, schema.num_classes, client_of=client_of, owner_of=owner_of)


def split_rows(rows: ReadRows, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the rows to train on and of those held out, ascending.

    A share of the rows is drawn at random, or of the owners where rows have some: none has rows on both sides.
    """
    generator = np.random.Generator(np.random.Philox(key=derived_seed("rows held out", seed)))
    unit_of = np.arange(len(rows.labels)) if rows.owner_of is None else rows.owner_of
    units = int(unit_of.max()) + 1
    order = generator.permutation(units)
    held = np.zeros(units, bool)
    held[order[: max(round(share * units), 1)]] = True
    if rows.client_of is not None:
        trained = np.bincount(rows.client_of[~held[unit_of]], minlength=int(rows.client_of.max()) + 1)
        held[unit_of[trained[rows.client_of] == 0]] = False  # whose sites would have nothing left to train on
    test = held[unit_of]
    if test.all() or not test.any():
        unit = "row" if rows.owner_of is None else "person"
        raise ConfigurationError(
            f"Expected several {unit}s of each site, got too few to hold some out: name fewer sites."
            if rows.client_of is not None
            else f"Expected several {unit}s, got too few to hold some out.",
            kind="out-of-range",
            setting="site" if rows.client_of is not None else "owner",
        )
    return np.flatnonzero(~test), np.flatnonzero(test)


def read_for(schema: Schema, settings: Mapping[str, object]) -> Schema:
    """Return the schema by which rows are read for the model of run-config settings (:meth:`Schema.of_values`).

    Notes
    -----
    **Formal guarantees.** A row is read by itself, by either schema.
    """
    model = registry("model")[str(settings.get("model", RunConfig.model))]
    return schema.of_values() if model.takes_knots else schema


def model_inputs(features: NDArray[np.floating], schema: Schema) -> NDArray[Any]:
    """Features as the model takes them: of a regression with a constant; values of columns as they are."""
    if schema.num_classes > 1 or schema.inputs_are == "values":
        return features
    return np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1)


def with_gaps(features: NDArray[np.floating], schema: Schema) -> NDArray[np.float64]:
    """Return values of columns with NaN where a cell is missing, for models that know missing values.

    Parameters
    ----------
    features : ndarray of shape (rows, :attr:`Schema.num_features` of :meth:`Schema.of_values`)
        Values of columns, as an additive model takes them.
    schema : Schema

    Returns
    -------
    ndarray of shape (rows, columns)
        For a number its value, for yes and no 1 and 0, each followed by 1 where it is missing and else 0; for a
        category a column for each value.
    """
    made: list[NDArray[Any]] = []
    place = 0
    for column in schema.columns.values():
        cells = features[:, place : place + column.num_values].astype(np.float64)
        place += column.num_values
        if column.kind == "category":
            made.append(cells)
            continue
        if column.kind == "yes/no":
            values, missing = cells[:, 1], cells.sum(axis=1) == 0.0
        else:
            values, missing = cells[:, 0], cells[:, 1] == 1.0
        made.append(np.stack([np.where(missing, np.nan, values), missing], axis=1))
    return np.concatenate(made, axis=1)


def scaled_labels(labels: NDArray[Any], schema: Schema) -> NDArray[Any]:
    """Class numbers as they are; a regression's numbers from the schema's bounds to [-1, 1], unless for knots."""
    if schema.num_classes > 1 or schema.inputs_are == "values":
        return labels
    if schema.label.bounds is None:
        raise ConfigurationError(
            "Expected a schema with classes or bounds of the label, got neither.", kind="missing", setting="schema"
        )
    low, high = schema.label.bounds
    return (2.0 * (labels.astype(np.float64) - low) / (high - low) - 1.0).astype(np.float32)
