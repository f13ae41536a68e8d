"""Participation: how many clients a training has, how many a round asks, and for how many it waits.

A step divides by ``clients_per_round``, whatever came: it is fixed for a session. How many answers a round waits for,
the quorum, may change from round to round.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...privacy import protocol
from ...privacy.accounting.gdp import check_count
from ...privacy.errors import ConfigurationError

Sampling = Literal["uniform", "balanced"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)

LateAnswers = Literal["counted", "dropped", "refused"]
"""Treatment of an answer that comes after its round; ``refused``: rounds wait for all that they ask."""

_FEWEST = 2  # clients of a training that does not say how many there are, as in FedAvg
_ROUNDING = 1e-9  # 0.8 * 10 is 8 clients, whatever floating point makes of it


@dataclass(frozen=True, kw_only=True)
class ParticipationConfig:
    """A strategy's options on participation, checked; None for those that were left out.

    :class:`~murmurfl.strategies.RoundOptions` describes them; M is ``num_clients`` and m ``clients_per_round``.
    """

    num_clients: int | None = None
    clients_per_round: int | None = None
    fraction_train: float | None = None
    min_train_nodes: int | None = None
    min_available_nodes: int | None = None
    quorum: float = 1.0
    over_selection: float = 1.0
    excluded: Collection[str] = ()
    seed: int | None = None
    sampling: Sampling = "uniform"

    def __post_init__(self) -> None:
        self._check_quorum()
        self._check_fraction()
        self._check_counts()
        if isinstance(self.excluded, str) or not all(isinstance(name, str) for name in self.excluded):
            raise ConfigurationError(
                f"Expected excluded to be names of clients, got {self.excluded!r}.",
                kind="wrong-type",
                setting="excluded",
            )
        if self.sampling not in SAMPLINGS:
            raise ConfigurationError(
                f"Expected sampling one of {SAMPLINGS}, got {self.sampling!r}.",
                kind="unknown-name",
                setting="sampling",
                got=self.sampling,
            )

    def _check_quorum(self) -> None:
        for name, value in (("quorum", self.quorum), ("over_selection", self.over_selection)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(
                    f"Expected {name} to be a finite number, got {value!r}.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )
        if not 0 < self.quorum <= 1:
            raise ConfigurationError(
                f"Expected 0 < quorum <= 1, got {self.quorum!r}: 1 waits for all.",
                kind="out-of-range",
                setting="quorum",
                got=self.quorum,
            )
        if not 1 <= self.over_selection <= protocol.LARGEST_ROUND:
            raise ConfigurationError(
                f"Expected over_selection >= 1 and <= {protocol.LARGEST_ROUND}, got {self.over_selection!r}: 1 asks "
                "clients_per_round clients.",
                kind="out-of-range",
                setting="over_selection",
                got=self.over_selection,
            )

    def _check_fraction(self) -> None:
        fraction = self.fraction_train
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise ConfigurationError(
                f"Expected fraction_train to be a number, got {fraction!r}.",
                kind="wrong-type",
                setting="fraction_train",
                got=fraction,
            )
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigurationError(
                f"Expected 0 < fraction_train <= 1, got {fraction!r}: a round asks some client.",
                kind="out-of-range",
                setting="fraction_train",
                got=fraction,
            )
        given = [name for name in ("fraction_train", "min_train_nodes") if getattr(self, name) is not None]
        if self.clients_per_round is not None and given:
            raise ConfigurationError(
                f"Expected clients_per_round or {given[0]}, got both: they say the same thing in two ways.",
                kind="conflict",
                setting="clients_per_round",
            )

    def _check_counts(self) -> None:
        for name in ("num_clients", "clients_per_round", "min_train_nodes", "min_available_nodes"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        most = math.inf if self.num_clients is None else self.num_clients
        if self.clients_per_round is not None and self.clients_per_round > most:
            raise ConfigurationError(
                f"Expected 1 <= clients_per_round <= num_clients, got {self.clients_per_round} of {self.num_clients}.",
                kind="out-of-range",
                setting="clients_per_round",
                got=self.clients_per_round,
            )
        for name in ("min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigurationError(
                    f"Expected {name} of at most num_clients = {self.num_clients}, got {value}: there are no more "
                    "clients. Leave num_clients out to train with all that are connected.",
                    kind="out-of-range",
                    setting=name,
                    got=value,
                )

    def fewest_left(self, clients: int) -> int:
        """Return the fewest connected clients, of M, with which a training that has begun goes on."""
        if self.min_available_nodes is not None:
            return self.min_available_nodes
        return min(-(-self.wanted(clients) // 2), self.needed(clients))

    @property
    def waits_for_all(self) -> bool:
        """Whether a round ends with the last answer."""
        return self.quorum == 1 and self.over_selection == 1

    @property
    def fewest(self) -> int:
        """Number of clients that must be there before the training begins."""
        if self.num_clients is not None:
            return self.num_clients
        asked = math.ceil(self.over_selection * (self.clients_per_round or self.min_train_nodes or 1) - _ROUNDING)
        return max(asked, _FEWEST if self.min_available_nodes is None else self.min_available_nodes)

    def asked(self, clients: int) -> int:
        """Return how many of M clients a round asks: ``over_selection`` times m."""
        wanted = self.wanted(clients)
        asked = math.ceil(self.over_selection * wanted - _ROUNDING)
        if asked > clients:
            raise ConfigurationError(
                f"Expected over_selection x clients_per_round of at most {clients} clients, got "
                f"{self.over_selection:g} x {wanted}: lower over_selection, or clients_per_round.",
                kind="out-of-range",
                setting="over_selection",
                got=self.over_selection,
            )
        return asked

    def needed(self, clients: int, asked: int | None = None) -> int:
        """Return how many answers end a round that asked ``asked`` of M clients (default as many as it may)."""
        most = self.asked(clients)
        share = self.quorum * self.wanted(clients) / most
        return math.ceil(share * (most if asked is None else asked) - _ROUNDING)

    def wanted(self, clients: int) -> int:
        """m, for M clients."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        if self.fraction_train is None:
            return clients
        fewest = _FEWEST if self.min_train_nodes is None else self.min_train_nodes
        # As FedAvg counts; 0.29 * 100 is below 29 in floating point, which is nobody's wish.
        return min(max(int(clients * self.fraction_train + _ROUNDING), fewest, 1), clients)

    @property
    def plain(self) -> dict[str, Any]:
        """The numbers of clients that a checkpoint must agree on, plain values: M, and by what a step divides.

        The quorum, the fewest that a round begins with, and who is excluded are not among them: a resumed training may
        have others.
        """
        if self.num_clients is not None:
            return {"num_clients": self.num_clients, "clients_per_round": self.asked(self.num_clients)}
        rest = {"fraction_train": self.fraction_train, "min_train_nodes": self.min_train_nodes}
        more = {} if self.over_selection == 1 else {"over_selection": float(self.over_selection)}
        given = {name: value for name, value in rest.items() if value is not None}
        return {"num_clients": None, "clients_per_round": self.clients_per_round, **given, **more}

    def sentence(self) -> str:
        """Return a description for a log."""
        if self.num_clients is not None:
            return f"{self.num_clients} in all, {self.asked(self.num_clients)} a round"
        share = "all" if self.fraction_train is None else f"{100 * self.fraction_train:g} %"
        asked = f"{share} of them" if self.clients_per_round is None else self.clients_per_round
        asked = asked if self.over_selection == 1 else f"{self.over_selection:g} x {asked}"
        return f"all that are connected, at least {self.fewest}; {asked} a round"
