"""Private models from tables: :func:`fit`, a rehearsal on one computer in which each site is a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ...clients.records.schema import Schema
from ...privacy.errors import ConfigurationError
from ...privacy.setting import Value
from ..data.table_task import FittedTable, ReadTable
from .fit_arguments import SCALING_SHARE, FitArguments
from .progress import Progress
from .real_fit import LEDGER_ENDING, fit_for_real
from .rehearsal import fitted, rehearsed
from .result import RunResult
from .sealed import Seal, run_sealed
from .simulate import bar_of_rounds

if TYPE_CHECKING:
    from ...clients.records.client_records import Table
    from ..settings.keyword_arguments import FitSettings


def fit(
    table: Table,
    *,
    label: str = "",
    site: str = "",
    clients: int = 0,
    owner: str = "",
    owners: int = 0,
    epsilon: float | None = None,
    schema: Schema | Path | str | None = None,
    seeds: int = 1,
    trust: str = "",
    evaluate: str = "",
    scale: str = "",
    real: bool = False,
    budget: float = 0.0,
    ledger: Path | str | None = None,
    private_log: Path | str | None = None,
    header: bool = True,
    text: Sequence[str] | str = (),
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Unpack[FitSettings],
) -> RunResult:
    """Train a private model of a table in this process, as its sites would together: a rehearsal.

    Parameters
    ----------
    table : path, DataFrame, or list of mappings
        ``.csv``, ``.csv.gz`` or ``.parquet``; a row is a record. Or a folder of images with a directory for each class,
        of PNG, JPEG or WebP files; with ``site="site"`` with a directory for each site, and in it one for each class.
        ``features`` among the settings says how images become numbers, by default ``colour``.
    label : str
        The column that is to be predicted; default the schema's, or else the last one.
    site : str
        The column that says whose a row is: each site is a client, and the column is no feature.
    clients : int
        Without ``site``, over how many clients the rows are dealt.
    owner : str
        The column that says which person a row belongs to; default the schema's, if it names one. All rows of a person
        are protected together, as ``samples_per_owner`` says, and are either trained on or held out. The column is no
        feature.
    owners : int
        With ``real`` and an owner: how many places there are for persons, a public number, with room for those who are
        to come.
    epsilon : float
        Of everything that the run releases, at ``delta`` (1e-5); default 2, or ``mu`` among the settings.
    schema : Schema or path, optional
        How rows are read; default a draft from these very rows, which shows something of them.
    seeds : int
        How many rehearsals are made that differ in their seed alone, with other rows held out and other noise: the
        summary then has the mean of their figures and its standard error.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
    evaluate : {"", "private"}
        ``private``: clients also release with noise, out of the same epsilon, how often the model is right on rows
        that they set aside. A real fit of classes does so by default if the number of rows, mu and the schema allow a
        figure of use; otherwise it says that the figure is left out.
    scale : {"", "private"}
        ``private``: clients release statistics of the columns first, for a tenth of mu^2, and numbers are scaled by
        these instead of the schema's bounds. It helps where bounds are far too wide, and costs a little where not.
    real : bool
        Whether the model may be used: this computer takes the place of a trusted curator, and only what is released
        with noise is shown. It needs a file and a reviewed schema; ``site``, ``clients`` and ``trust`` stay out. Its
        rehearsal is a fit with ``trust="trusted-server"``.
    budget : float
        With ``real``: epsilon of everything that is ever released of these rows, for a new ledger; default this call's.
    ledger : path, optional
        With ``real``: the ledger's file; default the table's with ``.ledger`` behind it.
    private_log : path, optional
        With ``real``: new file, which nobody else can read, for everything that must not leave: log records, warnings,
        what is printed, and why the fit failed. Default nowhere.
    header : bool
        Whether the first line of a CSV file names its columns. Without it they are ``column-1``, ``column-2``, ...
    text : str or sequence of str
        Columns of free text, which become hashed n-grams of words and characters, whose number is public. Other columns
        of the table are features as ever.
    on_progress : callable, optional
        Called after every round; default a bar, in a notebook or on a terminal.
    **settings
        Further run-config keys with underscores for hyphens.

    Returns
    -------
    RunResult
        With ``table``, ``predict`` and ``save``, and in ``outcome`` models without privacy and one site alone.

    Raises
    ------
    MurmurflError
        If there is no such table, column or setting, or nothing can be learnt; one line. With ``real``, a failure after
        a row was read has one fixed text and no cause (:class:`~.sealed.SealedError`).

    Notes
    -----
    A rehearsal guarantees nothing: keys are seeded and a drafted schema was made from the rows,
    so nobody is protected; :attr:`RunResult.guarantee` says what the same run would guarantee on real clients with a
    reviewed schema that does not come from their rows. With ``real`` model and figure have the guarantee of
    :func:`~.real_fit.fit_for_real`, and while it runs nothing that this process prints, logs or warns of leaves it
    (:func:`~.sealed.run_sealed`).

    Examples
    --------
    >>> import numpy as np
    >>> ages = np.linspace(20, 80, 600)
    >>> rows = [{"age": float(age), "ill": "yes" if age > 50 else "no"} for age in ages]
    >>> result = fit(rows, label="ill", clients=4, epsilon=8)
    >>> result.predict([{"age": 30.0}, {"age": 75.0}]).tolist()
    ['no', 'yes']
    """
    texts = (text,) if isinstance(text, str) and text else tuple(text)
    asked = FitArguments(
        table, label, site, clients, owner, epsilon, schema, trust, evaluate, scale, header, texts, settings
    )
    if not real:
        if owners:
            raise ConfigurationError(
                f"Expected owners with real=True (--real) only, got {owners}: a rehearsal counts them.",
                kind="conflict",
                setting="owners",
                got=owners,
            )
        if budget or ledger or private_log:
            raise ConfigurationError(
                "Expected budget, ledger and private_log with real=True (--real) only: a rehearsal spends nothing.",
                kind="conflict",
                setting="real",
            )
        return rehearsed(asked, on_progress, seeds=seeds)
    if seeds != 1:
        raise ConfigurationError(
            f"Expected one seed in a real fit, got seeds = {seeds}: each training spends. Rehearse several.",
            kind="conflict",
            setting="seeds",
            got=seeds,
        )
    report = on_progress or bar_of_rounds()
    return run_sealed(
        lambda seal: _for_real(asked, owners, ledger, budget, seal, report),
        None if private_log is None else Path(private_log),
    )


def _for_real(
    asked: FitArguments,
    owners: int,
    ledger: Path | str | None,
    budget: float,
    seal: Seal,
    on_progress: Callable[[Progress], None] | None,
) -> RunResult:
    for option in ("site", "clients", "trust"):
        if got := getattr(asked, option):
            raise ConfigurationError(
                f"Expected no {option} (--{option}) in a real fit, in which this computer has all rows, got {got!r}: "
                "leave it out, or give each site a node (docs/deployment.md).",
                kind="conflict",
                setting=option,
                got=got,
            )
    if asked.schema is None or not isinstance(asked.table, str | Path):
        raise ConfigurationError(
            "Expected a file and a reviewed schema for a real fit, got a drafted one or no file: a draft shows "
            "something of the rows. `murmurfl schema FILE --out SCHEMA.toml` makes a draft to review.",
            kind="conflict",
            setting="schema",
        )
    found, own = replace(asked, clients=1).settled()
    _check_places(found.schema, own, owners)
    share = SCALING_SHARE if asked.scale else 0.0
    where = ledger_of(Path(asked.table).expanduser(), ledger)
    return real_result(found, own, where, budget, seal, on_progress, scaling_share=share, owners=owners)


def real_result(
    found: ReadTable,
    own: dict[str, Value],
    ledger: Path,
    budget: float,
    seal: Seal,
    on_progress: Callable[[Progress], None] | None,
    *,
    scaling_share: float = 0.0,
    owners: int = 0,
) -> RunResult:
    """Return the result of :func:`~.real_fit.fit_for_real`, with what is public of the table."""
    made = fit_for_real(found, own, ledger, budget, seal, on_progress, scaling_share=scaling_share, owners=owners)
    # What else is of the rows was not released.
    unknown: dict[str, Any] = {"tested": 0, "invalid_records": {}, "majority": 0.0, "variance": 0.0}
    known: dict[str, Any] = {
        "drafted": False,
        "rows": made.rows,
        "trained": made.rows,
        "site": "",
        "scaled": scaling_share > 0,
        "left_out": found.left_out,  # names of the header, by the schema
    }
    if found.schema.owner:
        known["samples_per_owner"] = made.result.experiment.config.samples_per_owner
    spent: dict[str, Any] = {"spent_mu": made.spent.mu, "spent_delta": made.spent.added_delta}
    spent["budget_mu"] = made.budget_mu
    return fitted(made.result, FittedTable(found.name, made.schema, **known, **unknown, **spent))


def _check_places(schema: Schema, own: Mapping[str, Value], owners: int) -> None:
    """Raise unless both public numbers of a real fit with owners are there, or neither without."""
    if schema.owner and not (owners > 0 and own.get("samples-per-owner")):
        raise ConfigurationError(
            "Expected two public numbers in a real fit with an owner, --owners (owners), places for persons with room "
            "for those to come, and --set samples-per-owner (samples_per_owner), the rows of a person that are used, "
            f"got {owners} and {own.get('samples-per-owner', 0)}. A rehearsal proposes them.",
            kind="missing",
            setting="owners" if not owners > 0 else "samples-per-owner",
            got=owners,
        )
    if owners and not schema.owner:
        raise ConfigurationError(
            f"Expected a column of owners with owners = {owners}, got none: name it with --owner, or in the schema.",
            kind="missing",
            setting="owner",
        )


def ledger_of(table: Path, ledger: Path | str | None) -> Path:
    """Return the ledger of a real fit: the table's own if it has one, whatever name the table is called by."""
    own = Path(f"{table.resolve()}{LEDGER_ENDING}")
    where = Path(ledger).expanduser() if ledger else own
    if own.exists() and where.resolve() != own.resolve():
        raise ConfigurationError(
            f"Expected the ledger {own}, which counts what was released on this table, got {where}: leave out "
            "--ledger.",
            kind="mismatch",
            setting="ledger",
        )
    return where
