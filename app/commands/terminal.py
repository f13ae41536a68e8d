"""Output for people: lines and tables no wider than their terminal, help, and one clear line where a command fails.

In a file or a pipe, a line is as long as its text, and stays one line for tools. The environment variable COLUMNS sets
a width anywhere.

:class:`CommandLine` is a Typer application whose help does not depend on the installed click. Flower holds Typer below
0.21. With click 8.4 and later, that Typer repeats the hint at a mistyped command; with click 8.5 it loses the help of
every argument, because click's own ``Parameter`` has a ``help`` now and clears Typer's.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo, CommandFunctionType

FAILED = 1
MISUSED = 2
"""Click's code for missing or unknown options."""
CLAIM_REFUTED = 3
INTERRUPTED = 130
_PATIENCE_S = 2.0
"""Longest silence of a command on a terminal, in seconds."""


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Say why, and end the process."""
    say(f"murmurfl: {message}", err=True)
    sys.exit(code)


def system_error(error: OSError) -> str:
    """Return an error of the operating system in one line, with what to do about a full disk."""
    line = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        line += ". Make room on the disk of that file, or of the folder that this writes to (`df`), and try again."
    return line


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Turn an error of ours, of the operating system or of the keyboard into one line and an exit code.

    Any other error is a bug: its traceback is shown.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail("Interrupted.", INTERRUPTED)
    except Exception as error:
        from ...privacy.errors import MurmurflError  # takes longer than a command's help

        if isinstance(error, MurmurflError):
            fail(str(error))
        if isinstance(error, OSError):
            fail(system_error(error))
        raise


class CommandLine(typer.Typer):
    """A :class:`typer.Typer` whose commands show their arguments' help, with one hint at a mistyped command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": CommandsWithHint, "no_args_is_help": True, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Like Typer's; the command shows the help of its arguments."""
        return super().command(name, **{"cls": _Command, **options})


class _Command(TyperCommand):
    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        if self.callback is None:
            return
        self.params = [*getattr(self.callback, "__click_params__", ()), *self.params]
        hints = get_type_hints(inspect.unwrap(self.callback), include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                declared = getattr(hints.get(parameter.name or ""), "__metadata__", ())
                parameter.help = next((info.help for info in declared if isinstance(info, ArgumentInfo)), None)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and name the way out where a run-config key or a table stands in the place of an option."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            options = [name for option in self.params for name in option.opts]
            if setting := _as_setting(error.option_name.lstrip("-"), options):
                raise click.UsageError(f"{error.message}{setting}", ctx) from error
            raise
        except click.UsageError as error:
            from ..settings.registry import TABLES

            if table := next((one for one in given if one.lower().endswith(TABLES)), ""):
                way_out = f"`murmurfl fit {table} --label COLUMN` trains on a table."
                raise click.UsageError(f"{error.message}. {way_out}", ctx) from error
            raise


def _as_setting(name: str, options: list[str]) -> str:
    """Return the way out for an unknown option: the option or run-config key that it stands for; empty if neither."""
    from ...privacy.setting import meant_by
    from ..settings.run_config import run_keys

    key = meant_by(name)
    # Some options leave out what every number is: --clients for num-clients.
    if called := next((one for one in (f"--{key}", f"--{key.removeprefix('num-')}") if one in options), ""):
        return f" It is called {called}."
    return f" It is a run-config key: --set {key}=VALUE." if "--set" in options and key in run_keys() else ""


class CommandsWithHint(TyperGroup):
    """Commands with one hint at a mistyped one, whatever click is installed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if hasattr(click, "NoSuchCommand"):  # click gives the hint itself
            self.suggest_commands = False


_LEAST = 20
_MOST_NATURAL = 10_000
_BETWEEN, _AROUND = 3, 1  # a table's border and padding: " | " between columns, "| " and " |" around them
_BETWEEN_BARE = 2  # spaces between the columns of a table without a border
# A name and two or more spaces; the value behind them continues below itself.
_NAMED = re.compile(r"\s*\S+(?: \S+){0,2}? {2,}(?=\S)")
_COMMAND = re.compile(r"`[^`]+`")
_WIDEST_LABEL = 24


def width(*, err: bool = False) -> int | None:
    """Columns of the terminal, or of COLUMNS; None if there is neither. ``err``: of standard error."""
    if not os.environ.get("COLUMNS", "").isdigit() and not (sys.stderr if err else sys.stdout).isatty():
        return None
    return max(shutil.get_terminal_size().columns, _LEAST)


def wrapped(line: str, columns: int | None) -> str:
    """Return a line as several if it must be: a value continues below itself.

    Words, such as paths, and commands in backticks stay whole.
    """
    if columns is None or len(line) <= columns:
        return line
    named = _NAMED.match(line)
    indent = named.end() if named else len(line) - len(line.lstrip())
    if named and max(map(len, line[indent:].split())) > columns - indent:
        indent = min(indent, 4)  # a path has more room on a line of its own
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), line)
    room = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    parts = textwrap.wrap(whole, columns, **room)  # type: ignore[arg-type]
    return "\n".join(part.rstrip().replace("\0", " ") for part in parts)


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people, wrapped to the terminal; ``err``: to standard error."""
    columns = width(err=err)
    for line in text.split("\n"):
        typer.echo(wrapped(line, columns), err=err)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that a command works and for how long, from two seconds on until the block ends.

    The line stands on standard error, also while a real fit has closed that for everything else, and nothing does where
    it is no terminal. It depends on the clock and on what the block's value is called with.
    """
    at: list[str] = []
    if not sys.stderr.isatty():
        yield at.append
        return
    over, begun = threading.Event(), time.monotonic()
    screen: TextIO = sys.stderr
    with suppress(OSError, ValueError):  # of one that has no descriptor
        screen = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
    own = screen is not sys.stderr

    def show() -> None:
        if over.wait(_PATIENCE_S):
            return
        while True:
            passed = int(time.monotonic() - begun)
            screen.write(f"\r{what} {passed // 60}:{passed % 60:02}{''.join(at[-1:])}\x1b[K")
            screen.flush()
            if over.wait(1.0):
                break
        screen.write("\r\x1b[K")
        screen.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield at.append
    finally:
        over.set()
        thread.join()
        if own:
            screen.close()


def say_command(text: str) -> None:
    """Print a command, perhaps indented, so that it can be copied: a long one continues behind a backslash."""
    columns = width()
    if columns is None or len(text) <= columns:
        typer.echo(text)
        return
    words = re.split(r" (?=--)", text.strip())
    indent = " " * (len(text) - len(text.lstrip()))
    lines = [indent + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len("  \\") <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}  {word}")
    typer.echo(" \\\n".join(lines))


def aligned(rows: Sequence[Mapping[str, str]], columns: Sequence[str], right: Sequence[str]) -> list[str]:
    """Columns under their headings, two spaces apart, those of numbers flush right: narrower than a table."""
    table = [dict(zip(columns, columns, strict=True)), *rows]
    wide = {name: max(len(row[name]) for row in table) for name in columns}
    lines = [
        "  ".join(row[name].rjust(wide[name]) if name in right else row[name].ljust(wide[name]) for name in columns)
        for row in table
    ]
    return [line.rstrip() for line in lines]


def say_table(title: str, rows: Sequence[Mapping[str, str]], labels: Sequence[str]) -> None:
    """Print a table of texts without its empty columns.

    One wider than the terminal has folded headings; if that does not do, no lines between its columns; if that does not
    do either, it comes in parts, each with the columns (``labels``) that name its rows on the left, folded.
    """
    columns = [name for name in rows[0] if name in labels or any(row[name] for row in rows)]
    available = width()
    wide = {name: max(_longest_word(name), *(len(row[name]) for row in rows)) for name in columns}
    natural = {name: max(len(name), wide[name]) for name in columns}
    if available is None or sum(natural.values()) + _BETWEEN * len(columns) + _AROUND <= available:
        _print(title, rows, columns, labels, {}, available or _MOST_NATURAL)
        return
    folded, parts = _in_parts(rows, columns, labels, wide, available)
    if len(parts) > 1 and sum(wide.values()) + _BETWEEN_BARE * (len(columns) - 1) <= available:
        _print(title, rows, columns, labels, wide, available, bare=True)
        return
    for number, part in enumerate(parts, 1):
        place = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
        _print(title + place, rows, part, labels, folded, available)


def _in_parts(
    rows: Sequence[Mapping[str, str]],
    columns: Sequence[str],
    labels: Sequence[str],
    wide: Mapping[str, int],
    available: int,
) -> tuple[dict[str, int], list[list[str]]]:
    """Return the widths of columns that are folded, and the columns of each part of a table."""
    own = [name for name in columns if name in labels]
    share = max((available - _AROUND) // (2 * max(len(own), 1)) - _BETWEEN, 6)
    whole = {name: max(_longest_word(text) for text in (name, *(row[name] for row in rows))) for name in own}
    folded = {name: min(wide[name], max(share, whole[name]), _WIDEST_LABEL) for name in own}
    room = available - sum(folded.values()) - _BETWEEN * len(own) - _AROUND
    folded |= {name: min(wide[name], room - _BETWEEN) for name in columns if name not in own}
    parts = _parts([name for name in columns if name not in own], folded, room)
    return folded, [[*own, *part] for part in parts]


def _parts(columns: Sequence[str], wide: Mapping[str, int], room: int) -> list[list[str]]:
    """Divide columns into parts of which each has room on a line."""
    parts: list[list[str]] = []
    left = 0
    for name in columns:
        needed = wide[name] + _BETWEEN
        if not parts or needed > left:
            parts.append([])
            left = room
        parts[-1].append(name)
        left -= needed
    return parts


def _print(
    title: str,
    rows: Sequence[Mapping[str, str]],
    columns: Sequence[str],
    labels: Sequence[str],
    folded: Mapping[str, int],
    available: int,
    *,
    bare: bool = False,
) -> None:
    from rich.console import Console
    from rich.table import Table

    without = {"box": None, "padding": (0, _BETWEEN_BARE, 0, 0), "pad_edge": False}
    table = Table(title=title, **(without if bare else {}))
    for name in columns:
        side = "left" if name in labels else "right"
        table.add_column(name, justify=side, overflow="fold", width=folded.get(name))
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    Console(width=available).print(table)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
