"""Run-config keys: each is declared once, as a field of :class:`~murmurfl.app.settings.run_config.RunConfig`.

A declaration says the key's type (the field's), its default, its range or choices, what it is in one sentence, and who
reads it. Checks, the table of pyproject.toml, help, completion, the JSON schema and the page of the documentation are
made from it and from nothing else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ...privacy import ConfigurationError
from .registry import registry, unknown_name

Value = bool | int | float | str
Choices = Iterable[str] | Callable[[], Iterable[str]]

_METADATA = "key"
_TYPES = {"bool": bool, "int": int, "float": float, "str": str}
_WORDS = {"bool": "true or false", "str": "a text", "int": "an integer", "float": "a finite number"}


@dataclass(frozen=True)
class Key:
    """One run-config key.

    Parameters
    ----------
    name : str
        As it is typed, with hyphens.
    kind : {"bool", "int", "float", "str"}
    default : bool, int, float or str
    sentence : str
        What it is; a full stop at its end.
    at_least, above, at_most, below : float, optional
        The range of a number.
    zero : str
        What a zero or an empty text stands for, such as ``the preset's``.
    names : bool
        Whether it names something registered (:mod:`murmurfl.app.settings.registry`), or ``package.module:Thing`` of
        one's own.
    choices : tuple of str or callable
        What a text may be; empty for anything.
    own : bool
        Whether it may also be ``package.module:Thing``; every key that names something registered may.
    read_by : str
        The key that names who reads this one, such as ``strategy``. Whatever is chosen there must list this key among
        its ``keys``; otherwise this key must be left at its default. Empty for a key that every run reads.
    """

    name: str
    kind: str
    default: Value
    sentence: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    zero: str = ""
    names: bool = False
    choices: Choices = ()
    own: bool = False
    read_by: str = ""

    @property
    def attribute(self) -> str:
        """The name of its field."""
        return self.name.replace("-", "_")

    @property
    def known(self) -> tuple[str, ...]:
        """The names or texts it may be; empty for anything."""
        if self.names:
            return tuple(registry(self.name))
        return tuple(self.choices() if callable(self.choices) else self.choices)

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        if self.kind in ("bool", "str"):
            known = ", ".join(repr(one) for one in self.known)
            return f"one of {known}" if known else _WORDS[self.kind]
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
            if bound is not None
        ]
        words = "an integer" if self.kind == "int" else "a number"
        return f"{words} {' and '.join(bounds)}{f' (0: {self.zero})' if self.zero else ''}".strip()

    def read(self, value: Any) -> Value:
        """A value as this key's type.

        Raises
        ------
        ConfigurationError
            If it is of another type.
        """
        if self.kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif isinstance(value, _TYPES[self.kind]) and not (self.kind == "int" and isinstance(value, bool)):
            return value
        raise refusal(self.name, _WORDS[self.kind], value)

    def parsed(self, text: str) -> Value:
        """A text from a command line as this key's type.

        Raises
        ------
        ConfigurationError
            If it does not read as one.
        """
        if self.kind == "bool" and text in ("true", "false"):
            return text == "true"
        try:
            return self.read(int(text) if self.kind == "int" else float(text) if self.kind == "float" else text)
        except ValueError as error:
            if isinstance(error, ConfigurationError):
                raise
            raise refusal(self.name, _WORDS[self.kind], text) from None

    def check(self, value: Any) -> None:
        """Refuse a value of the right type that is out of its range or none of its choices."""
        if self.kind in ("bool", "str"):
            if self.names or not self.known or value in self.known or (self.own and ":" in value):
                return  # who imports it refuses what cannot be imported
            raise ConfigurationError(unknown_name(self.name, value, self.known))
        holds = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        if not holds:
            raise refusal(self.name, self.expected, value)


def key(default: Value, sentence: str, **declared: Any) -> Any:
    """A field that declares a run-config key; the parameters are those of :class:`Key`."""
    return field(default=default, metadata={_METADATA: {"sentence": sentence, **declared}})


def _declared(one: Field[Any]) -> Key:
    default: Any = one.default
    return Key(one.name.replace("_", "-"), str(one.type), default, **one.metadata[_METADATA])


def keys_of(kind: type[Any]) -> Mapping[str, Key]:
    """The keys a dataclass declares, by hyphenated name."""
    made = (_declared(one) for one in fields(kind) if _METADATA in one.metadata)
    return {one.name: one for one in made}


def refusal(name: str, expected: str, got: Any) -> ConfigurationError:
    """One line: which key, what was expected, what came."""
    return ConfigurationError(f"Expected {name.replace('_', '-')} to be {expected}, got {got!r}.")


def unknown_key(name: str, known: Iterable[str]) -> ConfigurationError:
    """The refusal of a run-config key that there is not: with the nearest one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
    return ConfigurationError(f"Expected a known run-config key, got {name!r}; {meant}")


def mu_and_epsilon(mu: Any, epsilon: Any) -> ConfigurationError:
    """The refusal of both: each says how private a run is to be."""
    return ConfigurationError(f"Expected mu or epsilon, got both: mu = {mu:g}, epsilon = {epsilon:g}.")


def typed_value(name: str, value: Any, kind: str) -> Any:
    """A value of a file as a type, for keys that are declared elsewhere.

    Raises
    ------
    ConfigurationError
        If it is of another type.
    """
    return Key(name, kind, 0, "").read(value)
