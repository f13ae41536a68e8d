"""reshef-levy-2024 and -2025: DP-mu^2-FL on MNIST with all clients in every round, and with some of them."""

from __future__ import annotations

from .accuracy import AccuracyTable
from .paper import JUDGED_AT_THE_END, Cell, Overrides, Paper, Settings, everybody

_MNIST: Settings = {"task": "mnist", "batch-size": 1, **JUDGED_AT_THE_END}
"""Settings of both papers: MNIST, a sample a release, judged at the end."""


class ReshefLevy2024(Paper):
    """The tables of both servers, side by side."""

    name = "reshef-levy-2024"
    sentence = "DP-mu^2-FL, all clients in every round, untrusted and trusted server: accuracy and loss on MNIST"
    seeds = 5
    table = AccuracyTable()
    everybody_is_asked = True

    def cells(self) -> list[Cell]:
        """Three mus with one, ten and a hundred clients."""
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
        names = "mu2", "trusted-mu2", "noisy-sgd"
        algorithms: dict[str, Overrides] = {name: {"strategy": name} for name in names}
        return [
            Cell(
                "paper's constants",
                {**_MNIST, "preset": "paper", "mu": float(mu), **everybody(clients)},
                algorithms,
                {
                    name: dict(zip(("loss", "accuracy"), figure, strict=True))
                    for name, figure in zip(("mu2", "trusted-mu2"), pair, strict=True)
                },
            )
            for (mu, clients), pair in figures.items()
        ]


_MU2: Overrides = {"strategy": "mu2", "mechanism": "cancelling"}
"""The paper's algorithm with the paper's noise, at our constants too."""


_MU2_AND_BASELINE: dict[str, Overrides] = {"mu2": _MU2, "noisy-sgd": {"strategy": "noisy-sgd"}}


_OTHER_BATCHES, _OTHER_PASSES = 8, 5
"""Minibatches a client deals its 600 samples into, and how often it goes through them, in ISRL-DP."""


def _other_work(mu: float, clients: int, asked: int) -> dict[str, Overrides]:
    """ISRL-DP on batches that are dealt: another algorithm than the paper's "other work" (docs/results.md).

    The paper's is that of Lowy and Razaviyayn 2023, which draws every batch anew. Appendix F of reshef-levy-2024 has
    its rounds R and a bound on its batch K; reshef-levy-2025 prints accuracy and time, and not which of them it used.

    Where samples are dealt, each is in P of R = 8 P M / m rounds. Noise that charges a sample with every round is
    sqrt(R / P) times as large, which is the noise of a smaller mu; the epsilon beside it is the true one of that mu.
    """
    batch = 60_000 // clients // _OTHER_BATCHES
    dealt: Settings = {"batch-size": batch, "passes": _OTHER_PASSES}
    charged = mu * (asked / (_OTHER_BATCHES * clients)) ** 0.5
    return {
        "isrl-dp": {"strategy": "isrl-dp", **dealt},
        "isrl-dp-accelerated": {"strategy": "isrl-dp-accelerated", **dealt},
        "isrl-dp, every round charged": {"strategy": "isrl-dp", **dealt, "mu": charged},
    }


_PRINTED = {
    (4, 50): (53.8, 45.1, 47.6),
    (8, 50): (63.7, 58.9, 63.3),
    (12, 50): (66.5, 63.7, 66.7),
    (8, 20): (60.8, 54.9, 59.7),
    (8, 80): (63.8, 57.0, 65.8),
}
"""The paper's accuracies by mu and m: its algorithm, noisy SGD, other work."""


def _papers_constants() -> list[Cell]:
    return [
        Cell(
            "paper's constants",
            {**_MNIST, "preset": "paper", "mu": float(mu), "num-clients": 100, "clients-per-round": m},
            {
                **_MU2_AND_BASELINE,
                **_other_work(mu, 100, m),
                **({"delayed-momentum": {"strategy": "delayed-momentum"}} if mu == 8 else {}),
            },
            {
                "mu2": {"accuracy": ours},
                "noisy-sgd": {"accuracy": sgd},
                "isrl-dp, every round charged": {"accuracy": other},
            },
        )
        for (mu, m), (ours, sgd, other) in _PRINTED.items()
    ]


_PRACTICAL: Settings = {**_MNIST, "preset": "practical", "num-clients": 100}
_EVERYBODY: Settings = {**_PRACTICAL, "clients-per-round": 100, "batch-size": 12}


def _practical() -> list[Cell]:
    # Samples that return: whole shards and a step chosen on held-out images, or small batches and the preset's step.
    returning: dict[float, dict[str, Overrides]] = {
        1.0: {
            "isrl-dp, 20 passes": {"strategy": "isrl-dp", "batch-size": 600, "passes": 20, "learning-rate": 1.7},
        },
        4.0: {"isrl-dp, 5 passes": {"strategy": "isrl-dp", "batch-size": 75, "passes": 5}},
    }
    features = {"features": "oriented-gradients"}
    return [
        *(
            Cell("practical", {**_PRACTICAL, "mu": mu, "clients-per-round": 50}, {**_MU2_AND_BASELINE, **more})
            for mu, more in returning.items()
        ),
        Cell("practical, all clients", {**_EVERYBODY, "mu": 1.0}, _MU2_AND_BASELINE),
        *(
            Cell("practical, oriented gradients", {**_EVERYBODY, **features, "mu": mu}, _MU2_AND_BASELINE)
            for mu in (0.25, 1.0)
        ),
    ]


def _lossy() -> Cell:
    rules = {"mu2": _MU2, "mu2, papers' release rule": {**_MU2, "strategy.release-rule": "paper"}}
    return Cell("20 % of replies lost", {**_EVERYBODY, "mu": 1.0, "lost-replies": 0.2}, rules)


class ReshefLevy2025(Paper):
    """The table of section 5, the same at our constants and features, and with replies lost."""

    name = "reshef-levy-2025"
    sentence = "DP-mu^2-FL, some clients in a round, against noisy SGD and ISRL-DP: accuracy on MNIST"
    seeds = 5
    table = AccuracyTable()

    def cells(self) -> list[Cell]:
        """Return the paper's five, and ours."""
        return [*_papers_constants(), *_practical(), _lossy()]
