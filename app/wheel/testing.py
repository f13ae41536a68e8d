"""Tests of a Flower project's own: run it in this process, rehearse it with privacy, and require a useful model.

Nothing here protects anything: it is for simulated data, in the tests of a project.
"""

from typing import TYPE_CHECKING

from .privacy.lazy import lazy_exports

if TYPE_CHECKING:
    from .app.engines.inprocess import InProcessGrid as InProcessGrid
    from .app.projects.trial import Trial as Trial
    from .app.projects.trial import assert_useful as assert_useful
    from .app.projects.trial import try_project as try_project

__getattr__, __dir__, __all__ = lazy_exports("murmurfl", __file__)
