"""reshef-levy-2024: DP-mu^2-FL with all machines in every round on MNIST, untrusted and trusted server."""

from __future__ import annotations

from .accuracy import AccuracyTable
from .cell import Cell, Overrides
from .paper import Paper
from .reshef_levy_2025 import PAPER_MNIST


class ReshefLevy2024(Paper):
    """The tables of both servers, side by side."""

    name = "reshef-levy-2024"
    sentence = "DP-mu^2-FL, all machines in every round, untrusted and trusted server: accuracy and loss on MNIST"
    seeds = 5
    table = AccuracyTable()
    everybody_is_asked = True

    def cells(self) -> list[Cell]:
        """Three mus with one, ten and a hundred machines."""
        figures = {  # mu, M: untrusted loss and accuracy, trusted loss and accuracy
            (4, 1): ((2.256, 69.9), (2.256, 69.9)),
            (4, 10): ((2.267, 69.4), (2.256, 69.7)),
            (4, 100): ((2.285, 65.4), (2.258, 69.5)),
            (8, 1): ((2.253, 70.2), (2.253, 70.2)),
            (8, 10): ((2.259, 70.0), (2.253, 70.1)),
            (8, 100): ((2.274, 69.8), (2.257, 69.6)),
            (16, 1): ((2.252, 70.4), (2.252, 70.4)),
            (16, 10): ((2.255, 70.1), (2.252, 70.3)),
            (16, 100): ((2.264, 70.0), (2.256, 69.7)),
        }
        algorithms: dict[str, Overrides] = {
            "mu2": {"strategy": "mu2"},
            "trusted-mu2": {"strategy": "trusted-mu2"},
            "noisy-sgd": {"strategy": "noisy-sgd"},
        }
        return [
            Cell(
                "paper's constants",
                {
                    **PAPER_MNIST,
                    "preset": "paper",
                    "mu": float(mu),
                    "num-clients": machines,
                    "clients-per-round": machines,
                },
                algorithms,
                {
                    name: dict(zip(("loss", "accuracy"), figure, strict=True))
                    for name, figure in zip(("mu2", "trusted-mu2"), pair, strict=True)
                },
            )
            for (mu, machines), pair in figures.items()
        ]
