"""The notebooks are executed, small and without an error; ``make test-frameworks`` executes them anew."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OF_A_CLIENT = re.compile(r"(?:^|[\s\"'(=])/(?:home|root|work|tmp|usr|Users)/|\.venv")


def texts(notebook):
    """What the notebook's outputs show as text."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    shown = [part for out in outputs for part in (out.get("text"), *out.get("data", {}).values()) if part is not None]
    return "\n".join("".join(part) for part in shown)


def problems(text):
    """What is wrong with a notebook that readers open with its outputs."""
    notebook = json.loads(text)
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    found = []
    if len(cells) > 12 or len(text) > 150_000:
        found.append("long")
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed from top to bottom")
    if any(output["output_type"] == "error" for cell in code for output in cell["outputs"]):
        found.append("error")
    if OF_A_CLIENT.search(texts(notebook)):
        found.append("path of a client")
    if not any("**Look at**" in "".join(cell["source"]) for cell in cells):
        found.append("nothing to look at")
    return found


def test_there_are_four():
    assert {path.stem for path in NOTEBOOKS} == {"table", "pytorch", "flower", "epsilon"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_executed_and_short(path):
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda cells: cells.extend([cells[0]] * 12), "long"),
        (lambda cells: cells[1].update(execution_count=None), "not executed from top to bottom"),
        (lambda cells: cells[1]["outputs"].append({"output_type": "error"}), "error"),
        (
            lambda cells: cells[1]["outputs"].append({"output_type": "stream", "text": ["/home/me/x"]}),
            "path of a client",
        ),
        (lambda cells: [cell.update(source=["x"]) for cell in cells], "nothing to look at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_notebook_would_be_noticed(change, found):
    notebook = json.loads(NOTEBOOKS[0].read_text())
    change(notebook["cells"])
    assert problems(json.dumps(notebook)) == [found]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_epsilon_in_a_notebook_has_its_sentence(path):
    shown = texts(json.loads(path.read_text()))
    assert "epsilon" in shown
    assert re.search(r"epsilon = \S+ at delta = \S+, for replacement of (one sample|all samples) of one client", shown)


@pytest.mark.frameworks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()  # raises where a cell does
