"""Plan a run before it starts: which strategy its situation calls for, what its noise would do, a paid search."""

from .deciding import SAMPLE_USES, Candidate, PlanRequest, PlanResult, decide, noise_to_signal

__all__ = ["SAMPLE_USES", "Candidate", "PlanRequest", "PlanResult", "decide", "noise_to_signal"]
