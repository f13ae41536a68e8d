"""Which strategy a situation calls for, decided from public sizes alone, never from samples (``strategy = auto``)."""

from .deciding import Decision, decide, tried
from .noise_to_signal import noise_to_signal
from .option import Impossible, Option
from .situation import SAMPLE_USES, Situation, WorkedOut

__all__ = [
    "SAMPLE_USES",
    "Decision",
    "Impossible",
    "Option",
    "Situation",
    "WorkedOut",
    "decide",
    "noise_to_signal",
    "tried",
]
