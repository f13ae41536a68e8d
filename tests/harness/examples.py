"""What tests of examples read: their folder, and the last line of their logs."""

from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def accuracy(lines: Sequence[str]) -> float:
    """The test accuracy that a run's log ends with."""
    (line,) = [line for line in lines if "Test accuracy" in line]
    return float(line.split()[-1])
