"""What clipping did to the releases of simulated machines, round by round, and warnings where it ruins a training."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING

from flwr.common.logger import log

from ...privacy.machine.clipping_figures import FAR_BEYOND, TrainingFigures, times

ALL_MACHINES = ""
"""In the place of a machine's name, for figures of all machines of a round together."""


class ClippingWatch:
    """Keeps what clipping did in every round, and warns of what makes a training useless.

    Notes
    -----
    The figures are not private. Only simulated machines tell them.
    """

    def __init__(self) -> None:
        self.rounds: dict[int, TrainingFigures] = {}
        """The figures of all machines of a round together, by round."""
        self._warned_of_not_finite = False
        self._warned_of_ratio = 0.0

    def take(self, server_round: int, figures: Mapping[str, TrainingFigures]) -> None:
        """Keep the figures of a round, by machine, and warn where they are bad."""
        if not figures:
            return
        of_round = TrainingFigures.together(figures.values())
        self.rounds[server_round] = of_round
        if of_round.not_finite and not self._warned_of_not_finite:
            self._warned_of_not_finite = True
            log(WARNING, "Round %d, in simulation: %s", server_round, of_round.sentence)
        # A warning each time the ratio has doubled: one is too few where a training diverges, one a round too many.
        if of_round.median_ratio > max(FAR_BEYOND, 2 * self._warned_of_ratio):
            self._warned_of_ratio = of_round.median_ratio
            name, worst = max(figures.items(), key=lambda item: item[1].largest_ratio)
            log(
                WARNING,
                "Round %d, in simulation: half of the contributions were over %s the clip norm%s: next to "
                "nothing is left of them. Scale the model or its inputs, train less at a time, or raise clip_norm.",
                *(server_round, times(of_round.median_ratio)),
                ""
                if name == ALL_MACHINES
                else f", the update of machine {name} was {times(worst.largest_ratio)} the clip",
            )
