"""The documentation site: `make docs`."""

import hashlib
import re
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from docs import site_pages  # noqa: E402
from docs.reference import filled  # noqa: E402

project = "murmurfl"
author = project_copyright = "the murmurfl authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["results/*"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".markdown": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # the notebooks are executed already: tests/examples/test_notebooks.py
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
maximum_signature_line_length = 88  # longer ones have a line for each parameter

html_theme = "furo"
html_title = f"murmurfl {release}"
html_show_sourcelink = False
html_copy_source = False
mathjax_path = "mathjax/tex-chtml.js"
mathjax_options = {"defer": "defer"}
html_static_path = ["site.css"]
html_css_files = ["site.css"]


CHECKS = ROOT / "docs" / "proofs" / "checks.toml"
STEP = re.compile(r"^\*\*(\d+[a-z]?)\. .*?(?=^\*\*\d+[a-z]?\. |^## |\Z)", re.MULTILINE | re.DOTALL)


def put_tables(app, name, source):
    """Put tables in the place of links to them: their figures are typed nowhere."""
    for path in pages.DOCUMENTS.glob("*.json"):
        app.env.note_dependency(path)
    source[0] = filled(pages.built(source[0], pages.BLOCKS.get(f"docs/{name}.md", {})))


def follow_examples(_app, _name, source):
    """Lead links to notebooks and examples of the repository to their pages here."""
    source[0] = re.sub(r"\]\(\.\./examples/notebooks/([\w-]+\.ipynb)\)", r"](generated/notebooks/\1)", source[0])
    source[0] = source[0].replace("](../examples/README.md)", "](generated/examples/index.markdown)")
    source[0] = re.sub(
        r"\]\(\.\./examples/([\w-]+)(?:/README\.md|/)?\)", r"](generated/examples/\1.markdown)", source[0]
    )


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


MATHJAX = "0a6ded5abbce13331658dd239f34382abd06492c74b71b61e8caa8112ec55fa5"
"""SHA-256 of MathJax 3.2.2's own tex-chtml.js."""


def bundle_mathjax(app, error):
    """Copy MathJax and its fonts from an installed package: a page that is read needs no network."""
    if error is not None or app.builder.format != "html":
        return
    files = {str(path): path.locate() for path in metadata.files("sphinx-mathjax-offline") or ()}
    inside = "sphinx-mathjax-offline/static/mathjax/"
    script = files[f"{inside}tex-chtml.js"]
    if hashlib.sha256(script.read_bytes()).hexdigest() != MATHJAX:
        raise ValueError(f"Expected MathJax 3.2.2 in {script}, got another file.")
    folder = Path(app.outdir) / "_static" / "mathjax"
    for name, path in files.items():
        if name == f"{inside}tex-chtml.js" or name.startswith(f"{inside}output/chtml/fonts/"):
            target = folder / name.removeprefix(inside)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def setup(app):
    """Write the generated pages, and connect what fills pages in."""
    site_pages.write()
    app.connect("build-finished", bundle_mathjax)
    app.connect("source-read", put_tables)
    app.connect("source-read", follow_examples)
    app.connect("source-read", put_checks)
