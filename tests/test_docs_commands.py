"""Every command of docs/ is run, in the page's order, as a reader would type it.

Here: what one client does by itself. ``flwr run .`` by test_readme.py; nodes, certificates and ``flwr run . ours`` by
tests/deployment/test_walkthrough.py; ``make`` targets by CI and by themselves. What :func:`is_left` names is parsed by
test_docs.py and no more: no network, no GPU and no systemd in a test, and whole reproductions take from minutes to
hours (what they gave is in docs/results). CI leaves runs on Flower's own processes (:func:`starts_flower`), and the
pages over real nodes but the federation's, to ``make test-long``.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from PIL import Image
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
# In the order of reading; the later ones begin with what the first has left.
HERE = (
    "start.md",
    "tables.md",
    "images.md",
    "accuracy.md",
    "ledger.md",
    "running.md",
    "errors.md",
    "tuning.md",
    "secure-aggregation.md",
    "owners.md",
    "which.md",
    "sites-that-differ.md",
    "swap-in.md",
    "private-client-app.md",
    "schema.md",
    "threat-model.md",
    "sharp-edges.md",
    "glossary.md",
    "comparison.md",
    "privacy.md",
    "keys.md",
)
# Pages whose commands another test runs, and how to tell that it does.
ELSEWHERE = {
    "index.md": (".ci/run", "make run"),
    "house.md": (".ci/run", "make install"),
    "performance.md": ("tests/test_benchmarks.py", "benchmarks.main()"),
    "deployment.md": ("tests/deployment/test_walkthrough.py", "deployment.md"),
    "operations.md": ("tests/deployment/test_operations.py", "docs/operations.md followed over real nodes"),
    "own.md": ("tests/app/test_own_things.py", "RUN, REPORT, PLAN, AUDIT = "),
}
# What runs the rest, and how to tell that it does.
BY_OTHERS = {
    "make run": (".ci/run", "make run"),
    "make deploy-demo": ("tests/deployment/test_walkthrough.py", '"deploy-demo", "--out"'),
    "flwr run . ours": ("tests/deployment/test_walkthrough.py", '"flwr run . ours" in block'),
    "murmurfl federation": ("tests/deployment/test_federation_page.py", "## The short way"),
    "python -m benchmarks.images": ("tests/test_benchmarks.py", "images.measured("),
    "python -m benchmarks.rivals": ("tests/test_rivals.py", "rivals.main()"),
    "flwr run . --stream": ("tests/test_readme.py", "FLWR_RUN"),
}


def commands(page):
    """The commands of a page as words, comments and continuations resolved."""
    found = []
    text = (ROOT / "docs" / page).read_text()
    for language, block in re.findall(r"^ *```(sh|console)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            prompt, _, typed = line.partition("$ ") if language == "console" else ("", "", line)
            words = [] if prompt else shlex.split(typed, comments=True)
            if words:
                found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


def write_files(page, folder):
    """The TOML files that a page shows under their names, as a reader copies them."""
    text = (ROOT / "docs" / page).read_text()
    for name, content in re.findall(r"^```toml\n# (\S+\.toml)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        (folder / name).write_text(content)


def starts(words, beginnings):
    return any(shlex.join(words).replace("'", "").startswith(beginning) for beginning in beginnings)


def is_left(words):
    """Whether a command is only parsed."""
    whole = words[:2] == ["murmurfl", "reproduce"] and "--set" not in words
    # Nets are taught for half an hour: a tiny one is in the tests of features.
    pretrain = words[:3] == ["python", "-m", "murmurfl.app.papers.strokes"]
    # Features of 70,000 images take a minute and more; `reproduce best-accuracy` has them.
    pretrain = pretrain or "features=scattering+strokes" in words
    no_gpu = any(word.startswith("cuda") for word in words)
    no_cluster = "--ray" in words
    return (
        whole
        or pretrain
        or no_gpu
        or no_cluster
        or words[0] in ("git", "cd", "pip", "systemctl", "journalctl", "export", "kill")
    )


def starts_flower(words):
    """Return True if a command runs on Flower's own processes, which take half a minute to start.

    CI leaves it to ``make test-long``: it has ``make run``, which does the same.
    """
    return words[1] == "run" and "ray" in words


def run_here(page):
    """The commands of a page that this file runs."""
    return [words for words in commands(page) if words[0] == "murmurfl" and not is_left(words)]


def run(words, folder):
    """One command in a reader's folder, with the system's folders in it."""
    words = [re.sub(r"(^|=)/(var/lib|etc|data)\b", rf"\1{folder}/\2", word) for word in words]
    result = CliRunner().invoke(cli, words[1:])
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.output[-2000:]}"
    return result.stdout


# Each takes seconds, some of them many: `make test-docs`.
docs = pytest.mark.docs


@pytest.fixture(scope="module")
def read_before(tmp_path_factory):
    """A folder in which start.md was followed, and the part of deployment.md that is a client's own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "var/lib/murmurfl").mkdir(parents=True)
    wards, ends = ("surgery", "internal"), ("no", "yes")
    rows = [f"{20 + i % 70},${100 + i},{wards[i % 2]},{ends[i % 3 == 0]},H{i % 7}" for i in range(200)]
    visits = [f"{i // 2},{row}" for i, row in enumerate(rows)]  # two of a person each
    for name in ("patients.csv", "new.csv", "north.csv"):
        (folder / name).write_text("\n".join(["age,bill,ward,readmitted,hospital", *rows]) + "\n")
    for name, person in (("visits.csv", "patient_id"), ("stays.csv", "patient_nbr")):
        (folder / name).write_text("\n".join([f"{person},age,bill,ward,readmitted,hospital", *visits]) + "\n")
    people = [f"{20 + i % 70},{wards[i % 2]},{'abc'[i % 3]},{ends[i % 4 == 0]}" for i in range(1500)]
    (folder / "people.csv").write_text("\n".join(["age,ward,diagnosis,readmitted", *people]) + "\n")
    notes = [f"{('fever and cough', 'feels well')[i % 2]} on day {i},{ends[i % 2]}" for i in range(120)]
    (folder / "notes.csv").write_text("\n".join(["note,ill", *notes]) + "\n")
    for number in range(24):
        kind = folder / "photos" / ("cat", "dog")[number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        pixels = np.full((24, 24, 3), 5 * number, np.uint8)
        Image.fromarray(pixels).save(kind / f"{number}.png")
    write_files("schema.md", folder)  # what an operator has, for the pages that audit a node
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        said = "".join(run(words, folder) for words in commands("start.md") if words[0] == "murmurfl")
        # The first is a client's; one with two budgets comes with secure aggregation, in a part of its own.
        made = (words for words in commands("deployment.md") if words[:3] == ["murmurfl", "ledger", "create"])
        created = next(made)
        run(created, folder)
    return folder, said


def test_every_page_with_commands_is_followed_somewhere():
    with_commands = {page.name for page in (ROOT / "docs").glob("*.md") if commands(page.name)}
    assert with_commands == {*HERE, *ELSEWHERE}
    for page, (file, told_by) in ELSEWHERE.items():
        assert told_by in (ROOT / file).read_text(), page


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("page", HERE)
def test_what_is_not_run_here_is_run_elsewhere(page):
    for words in commands(page):
        if words[0] != "murmurfl" and not is_left(words):
            assert starts(words, BY_OTHERS), f"nobody runs {shlex.join(words)}"


def leaves(tree, before=""):
    """The keys of nested tables, with points between them."""
    for key, value in tree.items():
        yield from leaves(value, f"{before}{key}.") if isinstance(value, dict) else [before + key]


def test_runs_on_flower_name_keys_of_the_app():
    """Flower refuses a run with another key; the runs themselves are in ``make test-long``."""
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    named = {}
    for page in sorted({*HERE, *ELSEWHERE}):
        for words in commands(page):
            if words[:2] == ["flwr", "run"] and (words[2] == "." or "/path/to/murmurfl" in words[2]):
                given = " ".join(value for option, value in pairwise(words) if option == "-c")
                named |= dict.fromkeys(re.findall(r"(?:^|\s)([a-z][a-z0-9.-]*)=", given), page)
    assert len(named) > 5
    assert {key: page for key, page in named.items() if key not in set(leaves(app))} == {}


@pytest.mark.parametrize(("file", "told_by"), BY_OTHERS.values(), ids=BY_OTHERS)
def test_the_others_run_what_they_are_said_to(file, told_by):
    assert told_by in (ROOT / file).read_text()


def test_release_runs_what_ci_leaves_out():
    """Reads what ``make test-long`` would start: the rest of the pages, and all processes of Flower's other version."""
    started = subprocess.run(
        ["make", "--dry-run", "test-long"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    assert re.search(r"PYTHONPATH=\S+ .* tests/app/engines/test_ray.py tests/deployment *;", started)
    (typed,) = [line for line in started.splitlines() if '-m "docs and long"' in line]
    files = {file for file, _ in (*ELSEWHERE.values(), *BY_OTHERS.values())}
    over_nodes = {file for file in files if "pytest.mark.docs" in (ROOT / file).read_text()}
    assert {"tests/test_docs_commands.py", *over_nodes} <= set(typed.split())
    assert 'test-docs PAGES="docs and not long"' in (ROOT / ".ci/run").read_text()


@docs
def test_the_first_page(read_before):
    folder, said = read_before
    for what in ("accuracy", "Take full-batch", "The claim stands"):
        assert what in said
    assert "<svg" in (folder / "runs" / "compared" / "index.html").read_text()


def pages():
    """Each page without its runs on Flower's processes, and those that have some once more, whole and ``long``."""
    for page in HERE[1:]:
        yield pytest.param(page, False, id=page)
        if any(map(starts_flower, run_here(page))):
            yield pytest.param(page, True, id=f"{page}, whole", marks=pytest.mark.long)


@docs
@pytest.mark.parametrize(("page", "whole"), list(pages()))
def test_its_commands_run(page, whole, read_before, tmp_path, monkeypatch):
    shutil.copytree(read_before[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if os.environ.get("MURMURFL_DATA"):
        (tmp_path / "data").symlink_to(os.environ["MURMURFL_DATA"])
    write_files(page, tmp_path)
    ran = []
    for words in run_here(page):
        if starts_flower(words) and not whole:
            continue
        if not os.environ.get("MURMURFL_DATA") and ("reproduce" in words or any("data-root" in word for word in words)):
            continue  # no MNIST
        if any("track=" in word for word in words) and not importlib.util.find_spec("tensorboard"):
            words = [word for word in words if word not in ("--set", "track=tensorboard")]  # test_progress.py has it
        run(words, tmp_path)
        ran.append(words)
    assert ran or not os.environ.get("MURMURFL_DATA")


@docs
def test_a_command_that_fails_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="num-cliemts"):
        run(["murmurfl", "run", "--engine", "cohort", "--set", "num-cliemts=3"], tmp_path)
