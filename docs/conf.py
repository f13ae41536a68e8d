"""The documentation site: `make docs`."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from reference import filled  # noqa: E402

from benchmarks import pages  # noqa: E402

project = "murmurfl"
author = project_copyright = "the murmurfl authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/*"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
# Attributes of several classes have one name, which the type of a parameter may contain: any of them will do.
suppress_warnings = ["ref.python"]
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"murmurfl {release}"
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


CHECKS = ROOT / "docs" / "proofs" / "checks.toml"
STEP = re.compile(r"^\*\*(\d+[a-z]?)\. .*?(?=^\*\*\d+[a-z]?\. |^## |\Z)", re.MULTILINE | re.DOTALL)


def put_tables(app, name, source):
    """Put tables in the place of links to them: their figures are typed nowhere."""
    for path in pages.DOCUMENTS.glob("*.json"):
        app.env.note_dependency(path)
    source[0] = filled(pages.built(source[0], pages.BLOCKS.get(f"docs/{name}.md", {})))


def put_checks(app, name, source):
    """Put below each step of a proof the tests that check it, folded."""
    folder, _, page = name.rpartition("/")
    if folder != "proofs":
        return
    app.env.note_dependency(CHECKS)
    checks = tomllib.loads(CHECKS.read_text())[page]

    def checked(step):
        tests = checks[step[1]]
        shown = "\n".join(f"* `{test}`" for test in tests)
        return f"{step[0].rstrip()}\n\n<details><summary>Tests ({len(tests)})</summary>\n\n{shown}\n\n</details>\n\n"

    source[0] = STEP.sub(checked, source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", put_tables)
    app.connect("source-read", put_checks)
