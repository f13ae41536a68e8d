"""Every code block of README.md and docs/ holds: Python runs, commands are ones, configurations are read.

What a block says is checked by its language. Python blocks of a page run one after the other, as a reader would paste
them; a block that is part of an example is marked ``<!-- from: examples/... -->`` and must stand in that file, whose
own test runs it. Commands are parsed by the parsers of murmurfl and Flower, their run configurations too.
"""

import argparse
import configparser
import doctest
import importlib
import json
import re
import shlex
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer
from flwr.cli.app import app as flwr
from murmurfl.app.commands.main import cli
from murmurfl.app.fleet.deployment import demo_config
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.app.papers import PAPERS
from murmurfl.app.papers.reproduction import plan_runs
from murmurfl.app.settings.layers import parse_assignments
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import Schema, UpdateNode
from typer.testing import CliRunner

from tests.harness.imports import FOLDERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- from: (?P<source>\S+) -->\n *)?```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    flags=re.DOTALL | re.MULTILINE,
)
COMMANDS = ("sh", "console")
SITE = ("{toctree}", "{eval-rst}", "{literalinclude}")  # the site's own; `make docs` reads them
OUTPUT = "text"  # what is printed: tests/test_errors_page.py, tests/test_own_pages.py, and start.md's below

# Pages whose code another test runs and looks at; their commands are checked here too.
RUN_BY = {
    "own.md": "test_own_pages.py",
    "swap-in.md": "test_own_pages.py",
    "private-client-app.md": "test_frameworks_page.py",
}

# Programs of the operating system, which this project does not make.
ELSEWHERE = {
    "openssl",
    "printf",
    "kill",
    "ssh-keygen",
    "sqlite3",
    "systemctl",
    "journalctl",
    "chmod",
    "cp",
    "curl",
    "df",
    "rm",
    "sed",
    "cd",
    "export",
    "git",
}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    source: str | None


def blocks(page):
    return [
        Block(page.name, found["language"], textwrap.dedent(found["indent"] + found["text"]), found["source"])
        for found in BLOCK.finditer(page.read_text())
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def commands(block):
    """The commands of a block, one at a time, as words."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        words = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", "|", ";"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def parse_click(command, name, words):
    """Parse words as a command of typer or click would, down to its subcommand, without running it."""
    context = command.make_context(name, list(words))
    while hasattr(context.command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, sub, rest = context.command.resolve_command(context, rest)
        context = sub.make_context(name, list(rest), parent=context)
    return context.params


murmurfl, flower = cache(lambda: typer.main.get_command(cli)), cache(lambda: typer.main.get_command(flwr))


def check_command(words):
    while "=" in words[0] and not words[0].startswith((".", "/")):
        words = words[1:]  # VARIABLE=value command
    words = words[: words.index(">")] if ">" in words else words
    program, arguments = Path(words[0]).name, words[1:]
    if program in ELSEWHERE:
        return
    if program == "murmurfl":
        told = parse_click(murmurfl(), program, arguments)
        overrides = parse_assignments(list(told.get("assignments") or ()))
        if arguments[0] == "reproduce":
            paper = PAPERS[told["name"]]
            plan_runs(paper.cells_with(overrides), max(told["seeds"], 1), told["engine"], paper.table)
        elif arguments[0] == "deploy-demo":
            demo_config(overrides, Path(), "x")
        else:
            RunConfig.from_mapping(overrides)
    elif program == "flwr":
        told = parse_click(flower(), program, arguments)
        for override in told.get("run_config_overrides") or ():
            RunConfig.from_mapping(tomllib.loads("\n".join(shlex_pairs(override))))
    elif program == "flower-superlink":
        module = importlib.import_module("flwr.superlink.cli.flower_superlink")
        module._parse_args_run_superlink().parse_args(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert arguments[0] in targets
    elif program in ("python", "python3"):
        assert arguments[0] == "-m"
        if arguments[1] == "venv":  # of the standard library, which looks at what calls it
            return
        importlib.import_module(arguments[1])
    elif program == "pip":
        assert arguments[0] == "install"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"murmurfl\[(\w+)\]", " ".join(arguments)):
            assert extra in extras
    else:
        raise AssertionError(f"nobody checks {program!r}")


def shlex_pairs(text):
    """``key=value key="a text"`` one a line, quotes kept."""
    return re.findall(r"""[\w.-]+=(?:"[^"]*"|'[^']*'|\S+)""", text)


def test_blocks_are_found_and_of_a_language_that_is_checked():
    assert len(ALL) == sum(len(re.findall(r"^ *```\S", page.read_text(), flags=re.MULTILINE)) for page in PAGES)
    assert {block.language for block in ALL} <= {*COMMANDS, *SITE, OUTPUT, "python", "toml", "ini", "json"}
    assert {block.page for block in ALL if block.language == OUTPUT} <= {"errors.md", "index.md", "start.md", *RUN_BY}


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.name in RUN_BY])
def test_pages_left_to_another_test_are_run_there(page):
    assert f'"{page}"' in (ROOT / "tests" / RUN_BY[page]).read_text()


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name not in {*RUN_BY, "README.md"} and any(block.language == "python" for block in blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_python_runs(page, tmp_path, monkeypatch):
    """The README is run by a test of the first page, which also compares what it prints."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.source:
            assert textwrap.dedent(block.text).strip() in (ROOT / block.source).read_text()
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("block", [b for b in ALL if b.language in COMMANDS], ids=lambda b: f"{b.page}-{b.text[:30]!r}")
def test_commands_are_ones(block):
    for words in commands(block):
        try:
            check_command(words)
        except (SystemExit, Exception) as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "block",
    [block for block in ALL if block.language in ("toml", "ini", "json") and block.page not in RUN_BY],
    ids=lambda block: block.page,
)
def test_configurations_are_read(block, tmp_path):
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "ini":
        configparser.ConfigParser(strict=False).read_string(block.text)
    else:
        values = tomllib.loads(block.text)
        if "client" in values:
            path = tmp_path / "node.toml"
            path.write_text(block.text)
            path.chmod(0o600)
            (NodeConfig if "batch-size" in values else UpdateNode).read(path)
        elif block.text.startswith("# declared.toml"):
            path = tmp_path / "declared.toml"
            path.write_text(block.text)
            Schema.read_declared(path).check_for_real_nodes()
        elif "label" in values:
            Schema(**values).check_for_real_nodes()


def test_the_output_shown_to_beginners_is_what_they_get(tmp_path):
    (shown,) = (block.text for block in blocks(ROOT / "docs" / "start.md") if block.language == OUTPUT)
    result = CliRunner().invoke(cli, ["run", "--engine", "cohort", "--out", str(tmp_path), "--name", "x"])
    printed = result.stdout[result.stdout.index("round 8/8") :]

    def told(text):
        return re.sub(r"left \S+|files +\S+", "", " ".join(text.split()))

    assert told(shown) == told(printed)


def test_the_first_page_shows_what_the_readmes_example_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    (shown,) = (block.text for block in blocks(ROOT / "docs" / "index.md") if block.language == OUTPUT)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.split() == shown.split()


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "words",
    [
        ["murmurfl", "runn"],
        ["murmurfl", "run", "--sett", "mu=1"],
        ["murmurfl", "run", "--set", "nun-clients=1"],
        ["murmurfl", "plan", "--clients", "ten"],
        ["flwr", "ruin", "."],
        ["flwr", "run", ".", "-c", "nun-clients=1"],
        ["flower-superlink", "--ssl-certifile", "x"],
        ["make", "coffee"],
        ["pip", "install", "murmurfl[tensorbord]"],
        ["python", "-m", "benchmarks.nothing"],
        ["dd", "of=x"],
    ],
)
def test_a_wrong_command_would_be_noticed(words):
    with pytest.raises((Exception, SystemExit, argparse.ArgumentError)):
        check_command(words)


# Docstrings.


def doctested():
    """Modules whose docstrings show what something gives."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ">>> " in path.read_text()]
    return [".".join(("murmurfl", *path.relative_to(ROOT).with_suffix("").parts)) for path in sorted(files)]


@pytest.mark.parametrize("name", doctested())
def test_a_docstring_shows_what_comes(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    ran = doctest.testmod(module)
    assert not ran.failed
    assert ran.attempted == Path(str(module.__file__)).read_text().count(">>> "), "an example that nobody finds"
