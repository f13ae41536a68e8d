"""Health and figures of a node, a helper or a server, shown at the addresses that its operator named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..connections.presented import first_expiry
from .endpoint import Address, Answer, Endpoint
from .health import NodeHealth, health_answer
from .journal import Journal

logger = logging.getLogger(__name__)

HEALTH_PATH, METRICS_PATH = "/health", "/metrics"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Addresses:
    """Where health and figures are shown, as the operator typed it; empty for nowhere. Both may be one address.

    Parameters
    ----------
    health, metrics : str
    """

    health: str = ""
    metrics: str = ""

    def __bool__(self) -> bool:
        return bool(self.health or self.metrics)


@contextmanager
def shown(
    addresses: Addresses, health: Callable[[], Answer], metrics: Callable[[], bytes]
) -> Iterator[Mapping[str, Address]]:
    """Answer at the addresses until the block ends.

    Parameters
    ----------
    addresses : Addresses
    health : callable
    metrics : callable
        All figures, in Prometheus' text format.

    Raises
    ------
    ConfigurationError
        If an address is none, or nobody can listen there.

    Notes
    -----
    An address that is typed without a host is this computer's own.
    """
    paths: dict[Address, dict[str, Callable[[], Answer]]] = {}
    if addresses.health:
        paths.setdefault(Address.read(addresses.health), {})[HEALTH_PATH] = health
    if addresses.metrics:
        own = paths.setdefault(Address.read(addresses.metrics), {})
        own[METRICS_PATH] = kept_a_while(lambda: Answer(metrics(), METRICS_TYPE))
    listening: dict[str, Address] = {}
    with ExitStack() as stack:
        for address, answers in paths.items():
            stack.enter_context(Endpoint(address, answers))
            for path in answers:
                listening[path] = address
                logger.info("Shown at http://%s%s.", address, path)
            if not address.is_local:
                logger.warning(
                    "Whoever reaches %s can read it: there is no password. Keep it within your own network.", address
                )
        yield listening


def kept_a_while(
    make: Callable[[], Answer], seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> Callable[[], Answer]:
    """The same answer for a while: whoever asks without end takes no time from the machine's own work.

    Parameters
    ----------
    make : callable
    seconds : float
        For so long.
    clock : callable
        Seconds that only ever grow.
    """
    kept: list[tuple[float, Answer]] = []

    def answer() -> Answer:
        now = clock()
        if not kept or now - kept[0][0] >= seconds:
            kept[:] = [(now, make())]
        return kept[0][1]

    return answer


@contextmanager
def watched(
    kind: str, journal: Journal, addresses: Addresses, ledger: Path | None = None, certificates: Path | None = None
) -> Iterator[None]:
    """Show a node or a helper until the block ends; does nothing where no address was named.

    Parameters
    ----------
    kind : {"node", "helper"}
    journal : Journal
        What happens to it.
    addresses : Addresses
    ledger : Path, optional
        A node's.
    certificates : Path, optional
        What the SuperLink's certificate is checked against.

    Raises
    ------
    ConfigurationError
        As for :func:`shown`.

    Notes
    -----
    What is shown are counts of answers and refusals, times of requests, what is left of budgets; nothing that depends
    on data.
    """
    if not addresses:
        yield
        return
    from .endpoint import Shown
    from .node_metrics import BudgetWatch, NodeFigures

    health = NodeHealth(journal)
    watch = None if ledger is None else BudgetWatch(ledger)
    budget = None if watch is None else lambda: watch.left(time.monotonic())
    figures = NodeFigures(kind, journal, health, budget, first_expiry(certificates))
    text = Shown(kind, figures.read).text
    with shown(addresses, lambda: health_answer(kind, health.problem), text):
        yield
