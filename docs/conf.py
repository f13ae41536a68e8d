"""The documentation site: `make docs`."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from reference import filled  # noqa: E402

project = "murmurfl"
author = "the murmurfl authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/*"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"murmurfl {release}"
html_show_sourcelink = False


def setup(app):
    """Have the generated tables made when a page is read."""
    app.connect("source-read", lambda *told: told[-1].__setitem__(0, filled(told[-1][0])))
