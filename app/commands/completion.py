"""Completions for a shell when its user presses Tab: keys, their values, and names."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ...privacy.setting import Setting

_LONGEST_HELP = 60
"""Characters; Typer wraps longer help at 80 columns, and shells take the second line for another completion."""

Completion = tuple[str, str]
"""A text and its help, for shells that show it."""


def _completion(text: str, sentence: str) -> Completion:
    return text, textwrap.shorten(sentence, _LONGEST_HELP, placeholder=" ...")


def complete_assignment(incomplete: str) -> Iterator[Completion]:
    """Completions of ``--set``: keys, and behind the ``=`` of a key its values."""
    from ..settings.run_config import run_keys

    name, equals, typed = incomplete.partition("=")
    if not equals:
        yield from ((f"{key}=", sentence) for key, sentence in complete_key(name))
    elif name in run_keys():
        for choice, sentence in choices(run_keys()[name]):
            if choice.startswith(typed):
                yield _completion(f"{name}={choice}", sentence)


def complete_key(incomplete: str) -> Iterator[Completion]:
    """Keys that begin with ``incomplete``."""
    from ..settings.run_config import run_keys

    for one in run_keys().values():
        if one.name.startswith(incomplete):
            yield _completion(one.name, one.sentence)


def complete_paper(incomplete: str) -> Iterator[Completion]:
    """Papers that begin with ``incomplete``."""
    from ..settings.catalogue import CATALOGUE

    papers = CATALOGUE["paper"]
    return (_completion(name, papers.sentence(name)) for name in papers.names() if name.startswith(incomplete))


def choices(one: Setting) -> list[Completion]:
    """The names or texts that a key may be, each with its sentence if it has one."""
    from ..settings.catalogue import CATALOGUE

    if one.kind == "bool":
        return [("true", ""), ("false", "")]
    shelf = CATALOGUE.get(one.name)
    return [(name, shelf.sentence(name) if shelf else "") for name in one.known if name]


def in_any_shell(command: Callable[[], None]) -> None:
    """Run a command, which a shell may have started to ask for completions.

    Bash ends a word at ``=``: it hands over ``--set strategy=mu`` as three words, and expects only what follows the
    ``=``. Here the three are joined for Typer, and the beginning is removed again.
    """
    if os.environ.get("_MURMURFL_COMPLETE") != "complete_bash":
        command()
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    words, rest = words[: int(os.environ.get("COMP_CWORD", "0")) + 1], ""
    if "=" in words[-2:]:
        start = len(words) - 1 - words[::-1].index("=")
        rest = f"{words[start - 1]}="
        words = [*words[: start - 1], f"{rest}{''.join(words[start + 1 :])}"]
        os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            command()
    finally:
        typer.echo("\n".join(line.removeprefix(rest) for line in said.getvalue().splitlines()))
