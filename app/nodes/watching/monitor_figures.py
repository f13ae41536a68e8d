"""The figures that a node, a helper and a server show to a monitor: a closed list, and none depends on data.

What is not in :data:`FIGURES` cannot be shown, and a label has no value but those that are listed: neither a message,
nor a run's name, nor an error's text ever becomes part of a metric.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....privacy import ConfigurationError, protocol
from ...version import __version__
from ..connections import causes

NODE, HELPER, SERVER = "node", "helper", "server"
OTHER = "other"
"""What a label says of everything that is not listed."""
REASONS = (*protocol.REFUSAL_NAMES.values(), OTHER)
"""Why a request was refused: the protocol's own names."""
CAUSES = (*(cause for cause in causes.CAUSES if cause != "reached"), OTHER)
"""Why a connection ended or could not be made."""

Value = float | Mapping[str, float] | None
"""Of a figure: a number; with a label a number for each of its values; None for what is not known."""


@dataclass(frozen=True)
class Figure:
    """One metric.

    Parameters
    ----------
    name : str
        As Prometheus has it.
    shown_by : tuple of str
        ``node``, ``helper``, ``server``.
    meaning : str
        One line.
    label : str
        Its only label, or empty.
    values : tuple of str
        All values that the label may have.
    """

    name: str
    shown_by: tuple[str, ...]
    meaning: str
    label: str = ""
    values: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it only ever grows, until the process is started anew."""
        return self.name.endswith("_total")


_NODES, _ALL = (NODE, HELPER), (NODE, HELPER, SERVER)

BUILD = "murmurfl_build_info"
BUILD_LABELS = ("kind", "version", "flower", "python")

FIGURES: tuple[Figure, ...] = (
    Figure("murmurfl_started_timestamp_seconds", _ALL, "When this process was started."),
    Figure("murmurfl_healthy", _ALL, "1 while the health address answers 200, otherwise 0."),
    Figure("murmurfl_last_contact_timestamp_seconds", _ALL, "When the other side was last heard: a request, a round."),
    Figure("murmurfl_rounds_total", _ALL, "Rounds: of a node those it was asked in, of a server those that ended."),
    Figure("murmurfl_round_seconds", _ALL, "Between the last two rounds, in whole seconds."),
    Figure("murmurfl_refusals_total", _ALL, "Requests that were refused, by reason.", "reason", REASONS),
    Figure("murmurfl_certificate_expiry_timestamp_seconds", _ALL, "When the first certificate in the file expires."),
    Figure("murmurfl_connected", _NODES, "1 while the SuperLink is reached, otherwise 0."),
    Figure("murmurfl_disconnections_total", _NODES, "Ends of the connection, by cause.", "cause", CAUSES),
    Figure("murmurfl_releases_total", (NODE, SERVER), "Releases: of a node those made, of a server those aggregated."),
    Figure("murmurfl_repeated_total", (NODE,), "Releases that were sent once more, because they were asked for again."),
    Figure("murmurfl_budget_mu", (NODE,), "The ledger's budget of all runs, as a Gaussian-DP mu."),
    Figure("murmurfl_budget_left_mu", (NODE,), "What new runs may still reserve of it."),
    Figure("murmurfl_budget_left_epsilon", (NODE,), "The same as an epsilon, at the ledger's delta."),
    Figure("murmurfl_budget_local_left_mu", (NODE,), "The same of what holds whatever other machines and helpers do."),
    Figure("murmurfl_sessions", (NODE,), "Sessions on the ledger: runs of training that reserved something."),
    Figure("murmurfl_ledger_readable", (NODE,), "1 if the ledger's high-water mark can be read and believed, else 0."),
    Figure("murmurfl_openings_total", (HELPER,), "Sums of releases that were opened."),
    Figure("murmurfl_superlink_running", (SERVER,), "1 while Flower's SuperLink runs, otherwise 0."),
    Figure("murmurfl_superlink_restarts_total", (SERVER,), "How often it ended and was started again."),
    Figure("murmurfl_round", (SERVER,), "The number of the round that ended last."),
    Figure("murmurfl_rounds_planned", (SERVER,), "How many rounds its run is to have."),
    Figure("murmurfl_asked_total", (SERVER,), "Requests for releases."),
    Figure("murmurfl_lost_total", (SERVER,), "Of them, those that were not answered in time."),
    Figure(
        "murmurfl_late_total", (SERVER,), "Answers that came too late to count; a later release has what is in them."
    ),
    Figure("murmurfl_malformed_total", (SERVER,), "Answers that could not be read."),
    Figure(
        "murmurfl_unopened_total",
        (SERVER,),
        "Answers in rounds that stayed closed; later releases have what is in them.",
    ),
    Figure("murmurfl_closed_rounds_total", (SERVER,), "Rounds of secure aggregation in which no sum was opened."),
)
"""All metrics but :data:`BUILD`, which says which software this is."""

_BY_NAME = {figure.name: figure for figure in FIGURES}


def figures_of(kind: str) -> list[Figure]:
    """What a node, a helper or a server shows.

    Parameters
    ----------
    kind : str
    """
    return [figure for figure in FIGURES if kind in figure.shown_by]


class Shown(Collector):
    """Figures for Prometheus' client library, asked for whenever somebody looks; a registry of its own has them.

    Parameters
    ----------
    kind : str
        ``node``, ``helper`` or ``server``.
    read : callable
        The figures by name.

    Notes
    -----
    What is shown are the figures of :data:`FIGURES` and nothing else, with labels from closed lists. None of them
    depends on a machine's data, as far as what ``read`` returns does not.
    """

    def __init__(self, kind: str, read: Callable[[], Mapping[str, Value]]) -> None:
        self._kind = kind
        self._read = read
        self._about = [kind, __version__, version("flwr"), platform.python_version()]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask for the figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The figures, as the client library has them."""
        about = GaugeMetricFamily(BUILD, "Which software this is.", labels=BUILD_LABELS)
        about.add_metric(self._about, 1)
        yield about
        values = self._read()
        allowed = {figure.name for figure in figures_of(self._kind)}
        if unknown := sorted(values.keys() - allowed):
            raise ConfigurationError(f"Expected figures of a {self._kind}, got {', '.join(unknown)}.")
        for name, value in values.items():
            if value is not None:
                yield _family(_BY_NAME[name], value)


def _family(figure: Figure, value: float | Mapping[str, float]) -> Metric:
    make = CounterMetricFamily if figure.counts else GaugeMetricFamily
    family = make(figure.name, figure.meaning, labels=[figure.label] if figure.label else [])
    if isinstance(value, Mapping):
        counted = dict.fromkeys(figure.values, 0.0)
        for key, number in value.items():
            counted[key if key in counted else OTHER] += number
        for key, number in counted.items():
            family.add_metric([key], number)
    else:
        family.add_metric([], value)
    return family
