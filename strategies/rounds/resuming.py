"""The checkpoint of a training: what is saved after every round, and how a training goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from logging import INFO
from typing import Any, TypeVar

from flwr.common.logger import log
from flwr.serverapp.strategy import Result

from ...privacy import protocol
from .carried_permit import check_permitted
from .checkpoint import load_checkpoint, save_checkpoint
from .known_machines import plain_names, restored_names
from .replies import RoundReport, RoundRequest, plain
from .training_rounds import Rounds

StateT = TypeVar("StateT")


class ResumableRounds(Rounds[StateT]):
    """Rounds that are saved in a checkpoint, and can be resumed from it; a base class.

    Parameters are those of :class:`~murmurfl.strategies.ReleaseStrategy`.
    """

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        request = super()._plan_round(server_round, reachable)
        said = self.machines.entries
        if not said:
            return request
        check_permitted(said[protocol.PERMIT], request.session)  # of a training that was begun under another one
        return replace(request, entries={**request.entries, **said})

    def _save(self) -> None:
        if self.checkpoint is None or self.state is None:
            return
        state = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(self.state)}  # type: ignore[arg-type]
        save_checkpoint(self.checkpoint, self._identity(), state | self._kept())

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint holds beside the update rule's state, plain values; :meth:`_restore` takes it back."""
        return {
            "server_round": self.history[-1].server_round if self.history else 0,
            "acks": self.acks,
            "machines": plain_names(self.machines.names),
            "seed": self.seed,
            "session": self.session,
            "history": [plain(report) for report in self.history],
            **({} if self._secure is None else self._secure.kept()),
        }

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on: the settings, the model's layout and where it started."""
        layout = [[name, list(shape), str(dtype)] for name, shape, dtype in self._layout]
        return {**self.settings(), "layout": layout, "start": self._start}

    def _resume(self, result: Result) -> int:
        """Load the checkpoint if there is one; the number of rounds done."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0
        names = [f.name for f in fields(self.state_type)]
        expected = {f"state.{name}" for name in names} | set(self._kept())
        saved = load_checkpoint(self.checkpoint, self._identity(), expected)
        self._check_saved(saved)
        self.state = self.state_type(**{name: saved[f"state.{name}"] for name in names})
        self._restore(saved)
        for report in self.history:
            result.train_metrics_clientapp[report.server_round] = report.metrics
        result.arrays = self._record(self._published())
        log(INFO, "Resuming after round %d from %s.", saved["server_round"], self.checkpoint)
        return int(saved["server_round"])

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that can be read but must not be resumed from; for subclasses."""

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Take back what :meth:`_kept` gave."""
        self.acks = {str(name): int(ack) for name, ack in saved["acks"].items()}
        self.machines.restore(restored_names(saved["machines"]))
        if self.machines.names:  # else it was saved before any machine was met
            self._settle(len(self.machines.names))
        self.seed, self.session = int(saved["seed"]), str(saved["session"])
        self.history = [RoundReport(**report) for report in saved["history"]]
        if self._secure is not None:
            self._secure.restore(saved)
