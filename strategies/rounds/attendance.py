"""How many machines a training has, how many of them a round asks, and for how many it waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...privacy import ConfigurationError

_FEWEST = 2  # machines of a training that does not say how many there are, as for FedAvg
_ROUNDING = 1e-9  # 0.8 * 10 is 8 machines, whatever floating point makes of it


@dataclass(frozen=True)
class Attendance:
    """What a strategy was told of its machines; whatever is None it was not told.

    Parameters
    ----------
    num_clients : int, optional
        M; default all machines that are connected when the training begins.
    clients_per_round : int, optional
        m; default all of them, or ``fraction_train``.
    fraction_train : float, optional
        m / M, from above 0 to 1.
    min_train_nodes : int, optional
        m is no less, whatever the fraction; 2 by default, as for FedAvg, where there is a fraction.
    min_available_nodes : int, optional
        Without ``num_clients``: how many machines must be there before the training begins; 2 by default.
    wait_for : float
        The share of m whose answers end a round, above 0 and at most 1.
    ask : float
        How many times m are asked, >= 1, rounded up.

    Raises
    ------
    ConfigurationError
        If a number is impossible, by itself or beside the others.
    """

    num_clients: int | None = None
    clients_per_round: int | None = None
    fraction_train: float | None = None
    min_train_nodes: int | None = None
    min_available_nodes: int | None = None
    wait_for: float = 1.0
    ask: float = 1.0

    def __post_init__(self) -> None:
        self._check_end_of_rounds()
        for name in ("num_clients", "clients_per_round", "min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"Expected {name} to be an integer >= 1, got {value!r}.")
        fraction = self.fraction_train
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise ConfigurationError(f"Expected fraction_train to be a number, got {fraction!r}.")
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigurationError(f"Expected 0 < fraction_train <= 1, got {fraction!r}: a round asks some machine.")
        self._check_together()

    def _check_together(self) -> None:
        stated = [name for name in ("fraction_train", "min_train_nodes") if getattr(self, name) is not None]
        if self.clients_per_round is not None and stated:
            raise ConfigurationError(
                f"Expected clients_per_round or {stated[0]}, got both: they say the same thing in two ways."
            )
        most = math.inf if self.num_clients is None else self.num_clients
        if self.clients_per_round is not None and self.clients_per_round > most:
            raise ConfigurationError(
                f"Expected 1 <= clients_per_round <= num_clients, got {self.clients_per_round} of {self.num_clients}."
            )
        for name in ("min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigurationError(
                    f"Expected {name} of at most num_clients = {self.num_clients}, got {value}: there are no more "
                    "machines. Leave num_clients out to train with all that are connected."
                )

    def _check_end_of_rounds(self) -> None:
        for name, value in (("wait_for", self.wait_for), ("ask", self.ask)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(f"Expected {name} to be a finite number, got {value!r}.")
        if not 0 < self.wait_for <= 1:
            raise ConfigurationError(f"Expected 0 < wait_for <= 1, got {self.wait_for!r}: 1 waits for all.")
        if self.ask < 1:
            raise ConfigurationError(f"Expected ask >= 1, got {self.ask!r}: 1 asks clients_per_round machines.")

    @property
    def waits_for_all(self) -> bool:
        """Whether a round ends with the last answer, as it does unless anybody says otherwise."""
        return self.wait_for == 1 and self.ask == 1

    @property
    def fewest(self) -> int:
        """How many machines must be there before the training begins."""
        if self.num_clients is not None:
            return self.num_clients
        asked = math.ceil(self.ask * (self.clients_per_round or self.min_train_nodes or 1) - _ROUNDING)
        return max(asked, _FEWEST if self.min_available_nodes is None else self.min_available_nodes)

    def asked(self, machines: int) -> int:
        """How many of M machines a round asks: m, or as many times m as ``ask`` says.

        Raises
        ------
        ConfigurationError
            If there are not so many.
        """
        wanted = self.wanted(machines)
        asked = math.ceil(self.ask * wanted - _ROUNDING)
        if asked > machines:
            raise ConfigurationError(
                f"Expected ask x clients_per_round of at most {machines} machines, got {self.ask:g} x {wanted}: lower "
                "ask, or clients_per_round."
            )
        return asked

    def needed(self, machines: int, asked: int | None = None) -> int:
        """How many answers end a round of M machines that asked so many (default: as many as it can)."""
        most = self.asked(machines)
        share = self.wait_for * self.wanted(machines) / most
        return math.ceil(share * (most if asked is None else asked) - _ROUNDING)

    def wanted(self, machines: int) -> int:
        """m, for M machines."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        if self.fraction_train is None:
            return machines
        fewest = _FEWEST if self.min_train_nodes is None else self.min_train_nodes
        # As FedAvg counts; 0.29 * 100 is below 29 in floating point, which is nobody's wish.
        return min(max(int(machines * self.fraction_train + 1e-9), fewest, 1), machines)

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on, plain values."""
        if self.num_clients is not None:
            return {"num_clients": self.num_clients, "clients_per_round": self.asked(self.num_clients), **self._end}
        rest = {
            "fraction_train": self.fraction_train,
            "min_train_nodes": self.min_train_nodes,
            "min_available_nodes": self.min_available_nodes,
        }
        stated = {name: value for name, value in rest.items() if value is not None}
        return {"num_clients": None, "clients_per_round": self.clients_per_round, **stated, **self._end}

    @property
    def _end(self) -> dict[str, float]:
        """When rounds end, where they do not wait for all."""
        return {} if self.waits_for_all else {"wait_for": float(self.wait_for), "ask": float(self.ask)}

    def sentence(self) -> str:
        """In words, for a log."""
        if self.num_clients is not None:
            return f"{self.num_clients} in all, {self.asked(self.num_clients)} a round"
        share = "all" if self.fraction_train is None else f"{100 * self.fraction_train:g} %"
        asked = f"{share} of them" if self.clients_per_round is None else self.clients_per_round
        asked = asked if self.ask == 1 else f"{self.ask:g} x {asked}"
        return f"all that are connected, at least {self.fewest}; {asked} a round"
