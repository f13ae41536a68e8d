"""The engines of a simulated run; each gives the same model for the same seed.

They are imported when they are first used: a node of this computer needs where processes are found, and no engine.
"""

from typing import TYPE_CHECKING

from ...privacy.lazy import lazy_exports

if TYPE_CHECKING:
    from .pool import WorkerError as WorkerError
    from .start import ENGINES as ENGINES
    from .start import run_cohort as run_cohort
    from .start import run_document as run_document
    from .start import run_in_process as run_in_process
    from .start import run_on_ray as run_on_ray

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
