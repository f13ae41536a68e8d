"""Private federated learning whose noise cancels itself: a Flower app and library.

The import root of a checkout and of the bundle that Flower ships: the folder this file lies in, as the package
``murmurfl``. In a wheel and an editable install app/wheel stands in its place.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__path__ = [str(Path(__file__).parent), str(Path(__file__).parent / "app" / "wheel")]  # the latter has testing.py

if TYPE_CHECKING:
    from .app.models.trained_model import load_model as load_model
    from .app.runs.estimators import PrivateClassifier as PrivateClassifier
    from .app.runs.estimators import PrivateRegressor as PrivateRegressor
    from .app.runs.fitting import fit as fit
    from .app.runs.personal import personalise as personalise
    from .app.runs.simulate import simulate as simulate
    from .app.version import __version__ as __version__

# A file beside no __init__.py has no relative imports of its own.
__getattr__, __dir__, __all__ = import_module(".privacy.lazy", __name__).lazy_exports(__name__, __file__)
