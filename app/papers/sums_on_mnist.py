"""secure-aggregation: mu^2-SGD on MNIST by whom a machine trusts (docs/secure-aggregation.md)."""

from __future__ import annotations

from dataclasses import replace

from .cell import Cell, Overrides, Settings
from .paper import Paper
from .trust_table import TrustTable

_MNIST: Settings = {
    "task": "mnist",
    "preset": "practical",
    "num-clients": 100,
    "batch-size": 6,  # 600 samples a machine: 100 releases of each in one pass
    "sampling": "balanced",
    "noise-quality": "fast",
    "evaluate-every": 1_000_000,
    "checkpoint": False,
    "node-deadline-s": 600.0,
}
_MU2: Overrides = {"strategy": "mu2", "mechanism": "cancelling"}
_FEATURES = ("pixels", "oriented-gradients")
_MUS = (1.0, 0.25, 0.1)
_ASKED = (100, 50)
_LOST = 0.2

_HONEST = (0.5, 0.7, 0.9)
"""h, of the machines asked in a round."""
_LOSSY_COHORT = 0.7
"""Of those asked, how many must answer where replies are lost; h = 0.9 m has no room for that."""


def _kinds(asked: int, *, lossy: bool) -> dict[str, Overrides]:
    """Whom a machine trusts, from nobody to the server; h machines of a sum in between.

    Where every reply comes, all that are asked are in the sum, so that all of them but h may work with the server.
    Where some are lost fewer must do, so fewer may; h = 0.7 m is then for sums without a machine that does.
    """
    cohort = round(_LOSSY_COHORT * asked) if lossy else asked
    shares = {f"h = {share:g} m": round(share * asked) for share in _HONEST}
    return {
        "untrusted server": _MU2,
        **{
            label: {
                **_MU2,
                "trust": "secure-aggregation",
                "min-cohort": cohort,
                "colluders": cohort - honest,
            }
            for label, honest in shares.items()
            if honest <= cohort
        },
        "trusted server": {"strategy": "trusted-mu2"},
    }


def _cell(features: str, mu: float, asked: int, *, lossy: bool) -> Cell:
    settings = {**_MNIST, "features": features, "mu": mu, "clients-per-round": asked}
    table = features.replace("-", " ")
    if lossy:
        settings["lost-replies"] = _LOST
        table += f", {100 * _LOST:g} % of replies lost"
    return Cell(table, settings, _kinds(asked, lossy=lossy))


class SecureAggregation(Paper):
    """One pass over MNIST by 100 machines, all of them or half asked in a round, with and without lost replies."""

    name = "secure-aggregation"
    sentence = "DP-mu^2-FL by whom a machine trusts: nobody, that some of a sum are honest, the server"
    seeds = 5
    table = TrustTable()

    def cells(self) -> list[Cell]:
        """By loss, machines asked, features and mu."""
        return [
            _cell(features, mu, asked, lossy=lossy)
            for lossy in (False, True)
            for asked in _ASKED
            for features in _FEATURES
            for mu in _MUS
        ]

    def cells_with(self, overrides: Overrides) -> list[Cell]:
        """As every paper's; h and the size of a sum stay the same shares of the machines asked."""
        cells = super().cells_with(overrides)
        return [_fitting(cell, overrides) for cell in cells] if overrides else cells


def _fitting(cell: Cell, overrides: Overrides) -> Cell:
    asked = int(cell.settings["clients-per-round"])
    kinds = _kinds(asked, lossy=bool(cell.settings.get("lost-replies")))
    algorithms = {
        label: {**options, **kinds.get(label, {}), **{name: overrides[name] for name in options if name in overrides}}
        for label, options in cell.algorithms.items()
        if label in kinds or "min-cohort" not in options  # where replies are lost there are fewer
    }
    return replace(cell, algorithms=algorithms)
