from .app.runs.fitting import fit as fit
from .app.version import __version__ as __version__
