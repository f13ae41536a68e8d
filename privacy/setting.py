"""One declaration of a setting: its type, range, choices, sentence and who reads it.

A *table* is a frozen dataclass of settings that belong together, such as ``[evaluation]``. Run configurations and
operators' files are made of tables and share declarations. Checks, help, completion, the JSON schema and the
documentation follow from them; pydantic compares types and ranges.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic

from .errors import ConfigurationError

Value = bool | int | float | str
Choices = Iterable[str] | Callable[[], Iterable[str]]
TableT = TypeVar("TableT", bound=type[Any])

_METADATA = "setting"
_TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "tuple[str, ...]": list[str],
    "Mapping[str, Value]": dict[str, Value],
}
_WORDS = {
    "bool": "true or false",
    "str": "a text",
    "int": "an integer",
    "float": "a finite number",
    "tuple[str, ...]": "a list of texts",
    "Mapping[str, Value]": "a table of numbers, texts and booleans",
}


@cache
def _reader(kind: str, *bounds: float | None) -> pydantic.TypeAdapter[Any]:
    """The validator of a type, within bounds if there are any: ``true`` is no number, and 1.0 no integer."""
    wanted: Any = _TYPES[kind]
    if any(bound is not None for bound in bounds):
        ge, gt, le, lt = bounds
        wanted = Annotated[wanted, pydantic.Field(ge=ge, gt=gt, le=le, lt=lt)]
    return pydantic.TypeAdapter(wanted, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))


@dataclass(frozen=True)
class Setting:
    """One setting.

    Parameters
    ----------
    name : str
        As it is typed, with hyphens.
    kind : str
        The type of its field.
    default : bool, int, float, str, tuple or mapping
        Its value where nothing is said; it may lie out of range.
    sentence : str
        What it is; a full stop at its end.
    table : str
        The table of a file in which it may stand; empty for none.
    at_least, above, at_most, below : float, optional
        The range of a number.
    zero : str
        What a zero or an empty text stands for, such as ``the preset's``.
    names : bool
        Whether it names something registered, or ``package.module:Thing`` of one's own; ``choices`` are the names.
    choices : tuple of str or callable
        What a text may be; empty for anything.
    own : bool
        Whether it may also be ``package.module:Thing``; every setting that names something registered may.
    read_by : str
        The setting, such as ``strategy``, whose choice must list this one among its ``keys``; otherwise this one stays
        at its default. Empty for one that every run reads.
    file : bool
        Whether it is the path of a file, or of several; a relative one is taken from an operator's file's folder.
    """

    name: str
    kind: str
    default: Any
    sentence: str = ""
    table: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    zero: str = ""
    names: bool = False
    choices: Choices = ()
    own: bool = False
    read_by: str = ""
    file: bool = False

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def known(self) -> tuple[str, ...]:
        """The names or texts it may be; empty for anything."""
        return tuple(self.choices() if callable(self.choices) else self.choices)

    @property
    def reader(self) -> pydantic.TypeAdapter[Any]:
        """The validator of its type and range."""
        return _reader(self.kind, self.at_least, self.above, self.at_most, self.below)

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        if self.kind not in ("int", "float"):
            known = ", ".join(repr(one) for one in self.known)
            return f"one of {known}" if known else _WORDS[self.kind]
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
            if bound is not None
        ]
        words = "an integer" if self.kind == "int" else "a number"
        return f"{words} {' and '.join(bounds)}{f' (0: {self.zero})' if self.zero else ''}".strip()

    def read(self, value: Any) -> Any:
        """A value as this setting's type; an error if it is of another."""
        try:
            return _reader(self.kind).validate_python(value)
        except pydantic.ValidationError:
            raise refusal(self.name, _WORDS[self.kind], value) from None

    def parsed(self, text: str) -> Value:
        """A text from a command line as this setting's type; an error if it does not read as one."""
        if self.kind == "bool" and text in ("true", "false"):
            return text == "true"
        try:
            value = int(text) if self.kind == "int" else float(text) if self.kind == "float" else text
        except ValueError:
            raise refusal(self.name, _WORDS[self.kind], text) from None
        return self.read(value)

    def check(self, value: Any) -> None:
        """Raise if a value of the right type is out of range or none of the choices, and not the default."""
        if value == self.default:
            return
        if self.kind not in ("int", "float"):
            if self.names or not self.known or value in self.known or (self.own and ":" in value):
                return  # who imports it refuses what cannot be imported
            raise ConfigurationError(unknown_name(self.name, value, self.known))
        try:
            self.reader.validate_python(value, strict=False)
        except pydantic.ValidationError:
            raise refusal(self.name, self.expected, value) from None


def setting(default: Any = MISSING, sentence: str = "", *, kw_only: bool = True, **declared: Any) -> Any:
    """A dataclass field that declares a setting, required if it has no default; the rest is as for :class:`Setting`."""
    made = {"default_factory": dict} if isinstance(default, dict) else {"default": default}
    return field(kw_only=kw_only, metadata={_METADATA: {"sentence": sentence, **declared}}, **made)  # type: ignore[call-overload]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def table(name: str = "", **defaults: Any) -> Callable[[TableT], TableT]:
    """A class decorator: a frozen class of settings that may stand in the table ``name`` of a file (empty: in none).

    ``defaults`` are other defaults here for fields of its bases.
    """

    def made(kind: TableT) -> TableT:
        kind._table = name
        inherited = {one.name: one for base in reversed(kind.__mro__[1:]) for one in _fields(base)}
        for attribute, default in defaults.items():
            one = inherited[attribute]
            kind.__annotations__[attribute] = one.type
            setattr(kind, attribute, field(default=default, kw_only=True, metadata=one.metadata))
        return dataclass(frozen=True)(kind)

    return made


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind) if "__dataclass_fields__" in vars(kind) else ()


@cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """The settings of a class, by hyphenated name."""
    tables: dict[str, str] = {}
    for base in kind.__mro__:
        for attribute in vars(base).get("__annotations__", ()):
            tables[attribute] = vars(base).get("_table", "")  # that which declares it first comes last
    made = [
        Setting(
            one.name.replace("_", "-"),
            str(one.type),
            one.default_factory() if one.default_factory is not MISSING else one.default,
            table=tables[one.name],
            **one.metadata[_METADATA],
        )
        for one in fields(kind)
        if _METADATA in one.metadata
    ]
    return {one.name: one for one in made}


def flat(document: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a document's values; a setting stands by itself or in its table, but not in both."""
    tables = {one.table for one in known.values() if one.table}
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name not in tables or not isinstance(value, Mapping):
            found[name] = value
            continue
        for inner in value:
            if inner not in known or known[inner].table != name:
                own = ", ".join(one.name for one in known.values() if one.table == name)
                raise ConfigurationError(f"Expected keys of the table [{name}], {own}, got {inner!r} in it.")
            if inner in document:
                raise ConfigurationError(f"Expected {inner} once, got it both in [{name}] and outside: leave one out.")
        found |= value
    return found


def refusal(name: str, expected: str, got: Any) -> ConfigurationError:
    """The error that names a key, what was expected and what came."""
    return ConfigurationError(f"Expected {name.replace('_', '-')} to be {expected}, got {got!r}.")


def unknown_name(key: str, name: object, known: Iterable[str]) -> str:
    """The sentence that refuses an unknown name: with the nearest known one, or all of them."""
    names = [one for one in known if one]
    near = difflib.get_close_matches(str(name), names, n=1)
    meant = f"did you mean {near[0]!r}? Known:" if near else "known:"
    return f"Expected {key} to be a known name, got {name!r}; {meant} {', '.join(names)}."


_MOST_NAMED, _LEAST_ALIKE = 20, 0.65
_ALIASES = {
    **dict.fromkeys(("eps", "target-epsilon"), "epsilon"),
    **dict.fromkeys(("lr", "step", "step-size"), "learning-rate"),
    **dict.fromkeys(("clients", "machines", "sites", "num-machines"), "num-clients"),
    **dict.fromkeys(("rounds", "epochs", "num-epochs"), "num-rounds"),
    **dict.fromkeys(("clip", "max-grad-norm"), "clip-norm"),
    **dict.fromkeys(("data", "dataset"), "task"),
}
"""What other programs call a key of ours."""
_RENAMED = {"wait-for": "quorum", "ask": "over-selection", "run-dry": "allow-exhaustion"}
"""Keys under their names of before."""


def meant_by(name: str) -> str:
    """Return our key for another program's name of it; any other name as it is."""
    return _ALIASES.get(name, name)


def unknown_key(name: str, known: Iterable[str]) -> ConfigurationError:
    """The error for an unknown run-config key: with the nearest known one, or all of them."""
    names = list(known)
    if (renamed := _RENAMED.get(name.replace("_", "-"))) in names:
        return ConfigurationError(f"Expected a known run-config key, got {name!r}; it is called {renamed!r}.")
    near = [one for one in (meant_by(name),) if one in names]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=_LEAST_ALIKE)
    every = f"known: {', '.join(names)}." if len(names) <= _MOST_NAMED else "`murmurfl keys` lists all of them."
    meant = f"did you mean {near[0]!r}?" if near else every
    return ConfigurationError(f"Expected a known run-config key, got {name!r}; {meant}")


def mu_and_epsilon(mu: Any, epsilon: Any) -> ConfigurationError:
    """The error for a run that is given both mu and epsilon."""
    return ConfigurationError(f"Expected mu or epsilon, got both: mu = {mu:g}, epsilon = {epsilon:g}.")
