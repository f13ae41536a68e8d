"""The examples of docs/private-client-app.md, each in a process of its own, as a reader has them, and trained."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "private-client-app.md").read_text()
BLOCK = re.compile(
    r"^(?P<from><!-- from: (?P<file>\S+) -->\n)?```python\n(?P<code>.*?)^```", flags=re.DOTALL | re.MULTILINE
)
SECTIONS = {
    name: list(BLOCK.finditer(text))
    for name, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}
NEEDED = {
    "scikit-learn": "sklearn",
    "Perceptrons of scikit-learn": "sklearn",
    "JAX and flax": "flax",
    "Hugging Face and LoRA": "peft",
    "Keras": "keras",
}
NEEDED |= {"PyTorch": "torch", "A NumPy function": "numpy", "Anything else: whole updates": "numpy"}
RESULTS = ("Result", "LogisticRegression", "MLPClassifier", "ArrayImpl", "Sequential")
TRAINED = """
import inspect
import re
from flwr.clientapp import ClientApp
from tests.harness.grid import NodesGrid
kept = list(globals().values())
(made,) = [one for one in kept if isinstance(one, ClientApp)]
functions = [one for one in kept if inspect.isfunction(one)]
(trains,) = [one for one in functions if list(inspect.signature(one).parameters) == ["grid", "context"]]
clients = int(re.search(r"num_clients=(\\d+)", open("example.py").read())[1])
print(type(trains(NodesGrid(made, clients), None)).__name__)
"""


def test_every_example_of_the_page_is_run_here():
    """Of the pages that test_docs.py leaves to another test this is "private-client-app.md"."""
    assert {name for name, found in SECTIONS.items() if found} == NEEDED.keys()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("section", NEEDED)
def test_an_example_trains_as_it_stands(section, tmp_path):
    if importlib.util.find_spec(NEEDED[section]) is None:  # without importing it: Keras chooses a backend then
        pytest.skip(f"needs {NEEDED[section]}")
    code = []
    for block in SECTIONS[section]:
        if block["file"]:
            source = ROOT / block["file"]
            assert block["code"].strip() in source.read_text()
            (tmp_path / source.name).write_text(source.read_text())
        else:
            code.append(block["code"])
    (tmp_path / "example.py").write_text("\n".join([*code, TRAINED]))
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": paths, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] in RESULTS
