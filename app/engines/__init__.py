"""The engines of a simulated run; each gives the same model for the same seed."""

from .pool import WorkerError
from .start import ENGINES, run_cohort, run_document, run_in_process, run_on_ray

__all__ = ["ENGINES", "WorkerError", "run_cohort", "run_document", "run_in_process", "run_on_ray"]
