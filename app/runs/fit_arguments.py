"""Arguments of :func:`~.fitting.fit` that a rehearsal and a real fit share, and the run-config keys they become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clients.records.encoders import N_GRAMS
from ...clients.records.schema import Column, Schema
from ...privacy.accounting.gdp import gdp_mu
from ...privacy.errors import ConfigurationError
from ...privacy.queries.mean_of_features import CENTRING_SHARE
from ...privacy.release.tables import POISSON, PRIVATE, SHUFFLED
from ...privacy.setting import Value, by_key
from ..data.table_task import ReadTable
from ..settings.layers import layered
from ..settings.registry import registry
from ..settings.run_config import run_keys
from .real_fit import evaluated_privately

if TYPE_CHECKING:
    from ...clients.records.client_records import Table

SCALING_SHARE = 0.1
"""Share of mu^2 for the statistics that columns are scaled by."""
EPSILON = 2.0
"""Default epsilon of a fit."""
CLIENTS = 5
"""Clients that rows are dealt to where no column says whose they are."""
DEALT = ("task", "num-clients", "clients-per-round")
"""Keys that the table and its clients decide."""
DECLARED = ("partition", "partition.alpha", "partition.classes")
"""Keys by which rows are dealt to clients in a rehearsal, where no column says whose they are."""
_SUMS_ALONE = ("trusted-server", "secure-aggregation")
_FULL_BATCH, _TRUSTED = "full-batch", "trusted-full-batch"
_LONGEST_NOISE = 0.7
"""Length of the noise on a mean of rows of length 1 from which rows are better left where they are."""


_PIXELS = "pixels"
"""Features of images for a network that reads them as they are."""


@dataclass(frozen=True)
class FitArguments:
    """Arguments of :func:`fit` that a rehearsal and a real fit share."""

    table: Table
    label: str = ""
    site: str = ""
    clients: int = 0
    owner: str = ""
    epsilon: float | None = None
    schema: Schema | Path | str | None = None
    trust: str = ""
    evaluate: str = ""
    scale: str = ""
    header: bool = True
    text: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict[str, object])

    def settled(self) -> tuple[ReadTable, dict[str, Value]]:
        """Read the table's header and its schema; the table, and the run-config keys, checked."""
        asked: dict[str, Any] = {"label": self.label, "site": self.site, "owner": self.owner, "header": self.header}
        rest = dict(self.settings)
        if isinstance(self.table, str | Path) and Path(self.table).expanduser().is_dir():
            model = by_key(rest, run_keys()).get("model", "")
            usual = _PIXELS if model and registry("model")[str(model)].reads_pixels else ""
            asked["features"] = str(rest.pop("features", usual))  # of images, which are encoded as they are read
            asked["mu"] = self.mu_of_sum()
        elif self.text:
            asked["mu"] = self.mu_of_sum()
        found = ReadTable.of(self.table, schema=self.schema, text=self.text, **asked)
        return found, own_keys(replace(self, settings=rest), found.schema, len(found.rows))

    def mu_of_sum(self) -> float:
        """Return the mu that a sum of all clients would have by the noise in it, for a choice among features."""
        given = by_key(self.settings, run_keys())
        epsilon = float(given.get("epsilon", 0.0)) or self.epsilon or EPSILON
        asked = given.get("mu") or gdp_mu(epsilon, float(given.get("delta", run_keys()["delta"].default)))
        clients = self.clients or CLIENTS
        return float(asked) / (1.0 if self.trust in _SUMS_ALONE else math.sqrt(clients))


def mean_is_noise(num_features: int, mu: float, samples: int, *, moved: float = 2.0) -> bool:
    """Return True if the noise on the mean of so many rows of length 1 would be longer than what it is for.

    ``mu`` is that of a sum of all clients, and ``moved`` how far one sample moves the sum. All of it is public.
    """
    noise = moved * math.sqrt(num_features / CENTRING_SHARE) / (mu * max(samples, 1))
    return noise > _LONGEST_NOISE


def own_keys(asked: FitArguments, schema: Schema, samples: int) -> dict[str, Value]:
    """Return the run-config keys that are asked for, checked; ``samples`` is the number of rows of all clients."""
    epsilon, trust, evaluate, scale = asked.epsilon, asked.trust, asked.evaluate, asked.scale
    of_numbers = schema.num_classes == 1
    given_keys = by_key(asked.settings, run_keys())
    additive = chosen_additive(schema, given_keys) and ("model" in given_keys or not asked.scale)
    own = {**_usual_keys(schema, trust, additive=additive), **given_keys}
    secret = own.get("batch-selection") in (SHUFFLED, POISSON)  # a mean shows every sample
    strategies = registry("strategy")
    able = str(own["strategy"]) not in strategies or strategies[str(own["strategy"])].centres
    usual = "centring" in own and not any(name.startswith("centring") for name in given_keys)
    noisy = own.get("mechanism") != "none"
    if usual and (secret or not able or (noisy and mean_is_noise(schema.num_features, asked.mu_of_sum(), samples))):
        own.pop("centring", None)
    if not schema.owner and own.get("samples-per-owner"):
        raise ConfigurationError(
            f"Expected a column of owners with samples-per-owner = {own['samples-per-owner']}, got none: name it with "
            "--owner, or in the schema.",
            kind="missing",
            setting="owner",
        )
    if schema.owner and scale:
        raise ConfigurationError(
            f"Expected scale to be empty with an owner, got {scale!r}: it counts rows, of which a person has several. "
            "Leave it out.",
            kind="conflict",
            setting="scale",
            got=scale,
        )
    decided = (*DEALT, *DECLARED) if asked.site or asked.owner or schema.owner else DEALT
    if dealt := next((name for name in decided if name in own), ""):
        raise ConfigurationError(
            f"Expected site or clients in the place of {dealt}, got {own[dealt]!r}: these say where a row is.",
            kind="conflict",
        )
    if epsilon is not None and not epsilon > 0:
        raise ConfigurationError(
            f"Expected epsilon > 0, got {epsilon!r}: to train without noise set mechanism = none.",
            kind="out-of-range",
            setting="epsilon",
            got=epsilon,
        )
    epsilon = EPSILON if epsilon is None and "mu" not in own else epsilon
    if evaluate not in ("", PRIVATE) or (evaluate and of_numbers):
        raise ConfigurationError(
            f"Expected evaluate to be empty or, of classes, 'private', got {evaluate!r}: numbers are never quite "
            "right.",
            kind="unknown-name",
            setting="evaluate",
            got=evaluate,
        )
    if evaluate:
        own = {**evaluated_privately(schema), **own}
    given = {"epsilon": epsilon, "trust": trust}
    own = layered(own, {name: value for name, value in given.items() if value})
    if scale and registry("model")[str(own["model"])].takes_knots:
        raise ConfigurationError(
            f"Expected no scale with model = {own['model']!r}, whose knots are private quantiles, got {scale!r}: leave "
            "one of them out.",
            kind="conflict",
            setting="scale",
            got=scale,
        )
    if scale not in ("", PRIVATE):
        raise ConfigurationError(
            f"Expected scale to be empty or 'private', got {scale!r}.", kind="unknown-name", setting="scale", got=scale
        )
    return own


def chosen_additive(schema: Schema, given: Mapping[str, Value]) -> bool:
    """Return True if a table's model is additive: as settings say, or else if schema and settings allow it.

    What is public decides, and no row.
    """
    if "model" in given:
        return registry("model")[str(given["model"])].takes_knots
    numbers = any(column.bounds is not None for column in schema.columns.values())
    strategy = str(given.get("strategy", _FULL_BATCH))
    other = given.get("centring") == PRIVATE or given.get("batch-selection") in (SHUFFLED, POISSON)
    return (
        numbers and not schema.is_encoded and schema.norm is None and strategy in (_FULL_BATCH, _TRUSTED) and not other
    )


def _usual_keys(schema: Schema, trust: str, *, additive: bool) -> dict[str, Value]:
    """Return the strategy and the model of a fit for which none is set."""
    of_numbers, trusted = schema.num_classes == 1, trust == "trusted-server"
    if additive or schema.owner or schema.label.class_weights:  # `auto` compares single rows, and linear models
        strategy = _TRUSTED if trusted else _FULL_BATCH
    else:  # made-up data of numbers have classes: there is nothing to rehearse
        strategy = "auto" if trusted or not of_numbers else _FULL_BATCH
    own: dict[str, Value] = {"strategy": strategy}
    own["model"] = "additive" if additive else "ridge" if of_numbers else "softmax"
    if not (of_numbers or schema.owner) and all(map(_want_centring, schema.columns.values())):
        own["centring"] = PRIVATE
    return own


def _want_centring(column: Column) -> bool:
    """Return True if a column's texts or images are encoded by features whose mean had better be removed."""
    features = registry("features")
    if column.kind == "text":
        return column.encoder in ("", N_GRAMS)
    return column.kind == "image" and column.encoder in features and features[column.encoder].centring == PRIVATE
