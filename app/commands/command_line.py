"""A Typer application whose help does not depend on which click is installed beside it.

Flower holds Typer below 0.21. With click 8.4 and later that Typer says the hint at a mistyped command twice, and with
click 8.5 it loses the help of every argument, because click's own ``Parameter`` has a ``help`` now and clears Typer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo, CommandFunctionType


class CommandLine(typer.Typer):
    """A :class:`typer.Typer` of commands with the help of their arguments, and with one hint at a mistyped one.

    Parameters
    ----------
    **options
        Those of :class:`typer.Typer`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": _Commands, "no_args_is_help": True, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """As Typer's own; the command shows the help of its arguments."""
        return super().command(name, **{"cls": _Command, **options})


class _Command(TyperCommand):
    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        if self.callback is None:
            return
        hints = get_type_hints(inspect.unwrap(self.callback), include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                declared = getattr(hints.get(parameter.name or ""), "__metadata__", ())
                parameter.help = next((info.help for info in declared if isinstance(info, ArgumentInfo)), None)


class _Commands(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if hasattr(click, "NoSuchCommand"):  # click gives the hint itself
            self.suggest_commands = False
