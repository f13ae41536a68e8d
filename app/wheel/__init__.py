"""Private federated learning whose noise cancels itself: a Flower app and library.

The package ``murmurfl`` of a wheel and of an editable install; in a checkout and in Flower's bundle it is murmurfl.py.
"""

from typing import TYPE_CHECKING

from .privacy.lazy import lazy_exports

if TYPE_CHECKING:
    from .app.models.trained_model import load_model as load_model
    from .app.runs.estimators import PrivateClassifier as PrivateClassifier
    from .app.runs.estimators import PrivateRegressor as PrivateRegressor
    from .app.runs.fitting import fit as fit
    from .app.runs.personal import personalise as personalise
    from .app.runs.simulate import simulate as simulate
    from .app.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
