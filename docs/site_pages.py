"""Pages that are written into ``docs/generated`` while the site is built: reference, commands, examples, notebooks.

A file is written only if its text changes, so that a second build reads nothing anew.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import typer
from murmurfl.app.commands.main import cli
from sklearn.base import BaseEstimator

import murmurfl

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "generated"
PUBLIC: Mapping[str, Mapping[str, str]] = json.loads((ROOT / "docs" / "public.json").read_text("utf-8"))
"""The version since which each name of each public package is public; what does not stand here is not public."""
MODULES: Mapping[str, tuple[str, str]] = {
    "murmurfl.privacy.audit": ("", "lower bounds on mu and epsilon, measured"),
    "murmurfl.app.engines.start": ("run_cohort, run_in_process, run_on_ray", "engines that carry a simulated run"),
    "murmurfl.app.runs.training_run": ("Progress, run_experiment", "a run round after round"),
    "murmurfl.app.runs.experiment": ("Experiment, prepare", "what a run is made of"),
    "murmurfl.app.runs.run_guarantees": ("", "what a run guarantees"),
    "murmurfl.app.runs.outcome": ("Outcome, result_schema", "what a run leaves"),
    "murmurfl.app.reports.making": ("make_report", "a finished run as a page"),
    "murmurfl.app.reports.finding": ("", "finished runs in folders"),
    "murmurfl.app.reports.table": ("", "finished runs as a table"),
    "murmurfl.app.data.task": ("Dataset, Task, ImageTask, Images", "a task of your own"),
    "murmurfl.app.data.features": ("Features", "features of your own"),
    "murmurfl.app.data.partition": ("Partition", "a partition of your own"),
    "murmurfl.app.models.model": ("Model, ModelKind", "a model of your own"),
    "murmurfl.app.methods.method": ("Method", "a strategy of your own, as runs see it"),
    "murmurfl.app.methods.presets": ("ResolvedRun, Hyperparameters", "presets of a strategy"),
    "murmurfl.app.papers": ("", "a paper of your own"),
    "murmurfl.app.nodes.node_config": ("NodeConfig", "a real node's configuration"),
}
"""Modules with a page each, what of them is shown (empty: everything), and in words what they are for."""
FIRST = tuple(
    name
    for name in ("fit", "PrivateClassifier", "PrivateRegressor", "load_model", "personalise", "simulate")
    if hasattr(murmurfl, name)
)
"""What the package itself has, besides its four parts."""
CONSTANT_WIDTH = 200


def title(text: str) -> str:
    """Return the title of a page."""
    return f"{text}\n{'=' * len(text)}\n\n"


def is_shown(thing: object) -> bool:
    """Return True if a public name has a page: it is a class or a function."""
    return inspect.isclass(thing) or inspect.isroutine(thing)


def public_things() -> Iterator[tuple[str, str, Any]]:
    """Yield package, name and object of everything that is public."""
    yield from (("murmurfl", name, getattr(murmurfl, name)) for name in FIRST)
    for package, names in PUBLIC.items():
        module = importlib.import_module(package)
        yield from ((package, name, getattr(module, name)) for name in names)


def reference_page(package: str, name: str, thing: Any) -> str:
    """Return the page of one public class or function."""
    text = f":orphan:\n\n{title(name)}.. rst-class:: place\n\n:doc:`Public interface </api>` › ``{package}``\n\n"
    text += f".. code-block:: python\n\n   from {package} import {name}\n\n"
    if not inspect.isclass(thing):
        return text + f".. autofunction:: {package}.{name}\n"
    if issubclass(thing, BaseException):
        return text + f".. autoexception:: {package}.{name}\n   :members:\n   :show-inheritance:\n"
    members = "no-members" if name == "RunConfig" else "members"  # the page of keys has its fields
    text += f".. autoclass:: {package}.{name}\n   :{members}:\n   :show-inheritance:\n"
    if issubclass(thing, BaseEstimator):  # scikit-learn's own methods, whose texts lead to its own pages
        text += "   :exclude-members: set_fit_request, set_score_request, set_predict_request\n"
    first = "murmurfl" if name in FIRST else next(one for one, names in PUBLIC.items() if name in names)
    return text + ("   :no-index:\n" if package != first else "")


def module_page(name: str) -> str:
    """Return the page of a module that has one of its own."""
    members, words = MODULES[name]
    text = f":orphan:\n\n{title(name)}.. rst-class:: place\n\n:doc:`Public interface </api>` › {words}\n\n"
    if name.endswith("node_config"):
        return text + f".. autoclass:: {name}.{members}\n   :no-members:\n"
    imported = (
        ""
        if members
        else "   :imported-members:\n"
        if name in ("murmurfl.privacy.audit", "murmurfl.app.papers")
        else ""
    )
    return text + f".. automodule:: {name}\n   :members: {members}\n{imported}"


def commands() -> Mapping[str, click.Command]:
    """Return every command that does something, by its words after ``murmurfl``."""
    found: dict[str, click.Command] = {}

    def walk(command: click.Command, words: tuple[str, ...]) -> None:
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            for name, sub in command.commands.items():  # type: ignore[attr-defined]
                walk(sub, (*words, name))
        elif not command.hidden:
            found[" ".join(words)] = command

    walk(typer.main.get_command(cli), ())
    return found


def examples_of(words: str) -> list[tuple[str, str]]:
    """Return up to three calls of a command that stand on pages, whose tests parse them, and the pages."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```sh\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                call = " ".join(line.removeprefix(".venv/bin/").split())
                if re.match(rf"murmurfl {words}(?: |$)", call) and "--help" not in call:
                    found.setdefault(call, path.stem)
    return sorted(found.items(), key=lambda one: len(one[0]))[:3]


def command_page(words: str, command: click.Command) -> str:
    """Return the page of one command: how it is called, what it does, its arguments and options."""
    context = click.Context(command, info_name=f"murmurfl {words}")
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = (
        f":orphan:\n\n{title(f'murmurfl {words}')}.. rst-class:: place\n\n:doc:`Commands </commands>` › ``{words}``\n\n"
    )
    text += f".. code-block:: text\n\n   {usage}\n\n{in_rst(inspect.cleandoc(command.help or ''))}\n\n"
    if calls := examples_of(words):
        lines = "".join(f"   {call}\n" for call, _ in calls)
        seen = ", ".join(f":doc:`/{page}`" for page in sorted({page for _, page in calls}))
        text += f"For example (see {seen}):\n\n.. code-block:: sh\n\n{lines}\n"
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False) and one.name != "help"]
    if shown:
        text += (
            ".. list-table::\n   :header-rows: 1\n   :widths: 30 70\n\n   * - option or argument\n     - what it is\n"
        )
    for one in shown:
        names = [*one.opts, *one.secondary_opts] if isinstance(one, click.Option) else [one.make_metavar(context)]
        flags = ", ".join(f"``{name}``" for name in names)
        kind = (
            ""
            if getattr(one, "is_flag", False) or not isinstance(one, click.Option)
            else f" {one.make_metavar(context)}"
        )
        about = in_rst(" ".join((getattr(one, "help", None) or "").split()))
        default = one.default
        if default not in (None, "", False, ()) and not callable(default) and str(default) not in about:
            about += f" Default: ``{default}``."
        if one.required:
            about += " Required."
        text += f"   * - {flags}{kind}\n     - {about or '(see above)'}\n"
    return text


def in_rst(text: str) -> str:
    """Return the help of a command with its code marks as reStructuredText has them."""
    text = text.replace(chr(8), "").replace("\\[", "[").replace("*", "\\*")
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
    parts = re.split(r"(``[^`]+``)", text)
    return "".join(
        re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"``\1``", part) if i % 2 == 0 else part for i, part in enumerate(parts)
    )


def command_table() -> str:
    """Return all commands with the first sentence of what each does."""
    lines = ["| command | what it does |", "|---|---|"]
    for words, command in commands().items():
        sentence = re.split(r"(?<=[.:;])\s", " ".join((command.help or "").split()), maxsplit=1)[0].rstrip(":;")
        sentence = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", sentence)
        lines.append(
            f"| [`murmurfl {words}`](generated/commands/{words.replace(' ', '-')}.rst) | {sentence} |".replace(
                "``", "`"
            )
        )
    return "\n".join(lines)


def name_table(package: str) -> str:
    """Return a table of a package's public names, since when they are, and what they say of themselves first."""
    module = importlib.import_module(package)
    lines = ["| name | since | what it is |", "|---|---|---|"]
    for name, since in PUBLIC[package].items():
        thing = getattr(module, name)
        cell = f"[`{name}`](generated/api/{package}.{name}.rst)" if is_shown(thing) else f"`{name}`"
        lines.append(f"| {cell} | {since} | {first_line(thing) if is_shown(thing) else constant(thing)} |")
    return "\n".join(lines)


def module_table() -> str:
    """Return a table of the modules that have a page each."""
    rows = (f"| [`{name}`](generated/api/{name}.rst) | {words} |" for name, (_, words) in MODULES.items())
    return "\n".join(["| module | what it is for |", "|---|---|", *rows])


def first_line(thing: Any) -> str:
    """Return the first line of a docstring as Markdown."""
    line = (inspect.getdoc(thing) or "").partition("\n")[0].replace("``", "`").replace("|", "\\|")
    return re.sub(r":[\w:]+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", line)


def constant(thing: Any) -> str:
    """Return the value of a constant as Markdown."""
    text = repr(sorted(thing) if isinstance(thing, Mapping) else thing)
    shown = text if len(text) <= CONSTANT_WIDTH else f"{text[:CONSTANT_WIDTH]} …"
    return f"`{shown}`".replace("|", "\\|").replace("typing.", "")


def example_pages() -> Iterator[tuple[str, str]]:
    """Yield names and texts of the gallery: the index of examples, and the README of each."""
    folder = ROOT / "examples"
    index = (folder / "README.md").read_text("utf-8")
    index = re.sub(r"\]\((?!notebooks/)([\w-]+)\)", r"](\1.markdown)", index)
    yield "examples/index.markdown", re.sub(r"\]\(notebooks/", "](../notebooks/", index)
    for path in sorted(folder.glob("*/README.md")):
        source = f"https://github.com/murmurfl/murmurfl/tree/main/examples/{path.parent.name}"
        place = f"[Examples](index.markdown) › [source]({source})"
        heading, _, rest = path.read_text("utf-8").partition("\n")
        yield f"examples/{path.parent.name}.markdown", f"---\norphan: true\n---\n\n{heading}\n\n{place}\n{rest}"


REPOSITORY = "https://github.com/murmurfl/murmurfl/blob/main"


def project_pages() -> Iterator[tuple[str, str]]:
    """Yield the pages that lie at the repository's root, with links as they are on the site."""
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        text = (ROOT / f"{name}.md").read_text("utf-8")
        text = re.sub(r"\]\(docs/([\w/-]+\.(?:md|rst)(?:#[\w-]+)?)\)", r"](../../\1)", text)
        text = re.sub(r"\]\((?!\.\./|https?:|#)([^)]+)\)", rf"]({REPOSITORY}/\1)", text)
        yield f"project/{name.lower()}.markdown", text


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and text of every generated page."""
    for package, name, thing in public_things():
        if is_shown(thing):
            yield f"api/{package}.{name}.rst", reference_page(package, name, thing)
    yield from ((f"api/{name}.rst", module_page(name)) for name in MODULES)
    for words, command in commands().items():
        yield f"commands/{words.replace(' ', '-')}.rst", command_page(words, command)
    yield from example_pages()
    yield from project_pages()
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        yield f"notebooks/{path.name}", path.read_text("utf-8").replace("](../../docs/", "](../../")


def write(folder: Path = GENERATED) -> None:
    """Write what changed, and remove pages that are no longer made."""
    made = dict(pages())
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / name
        if not path.is_file() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
