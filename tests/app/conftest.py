"""Runs leave a picture that hardly a test looks at."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def pictures():
    """Asks for ``accuracy.png`` to be drawn all the same."""


@pytest.fixture(autouse=True)
def _undrawn_accuracy(request, monkeypatch):
    """Drawing it takes longer than most runs do."""
    if "pictures" in request.fixturenames:
        return
    real = Figure.savefig

    def savefig(figure, to, **how):
        if getattr(to, "name", "") == "accuracy.png":
            Path(to).write_bytes(b"")
        else:
            real(figure, to, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
