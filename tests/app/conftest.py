"""Runs leave a picture that some tests need not wait for."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def undrawn_accuracy(monkeypatch):
    """Leave ``accuracy.png`` empty: drawing it takes longer than most runs do."""
    real = Figure.savefig

    def savefig(figure, to, **how):
        if getattr(to, "name", "") == "accuracy.png":
            Path(to).write_bytes(b"")
        else:
            real(figure, to, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
