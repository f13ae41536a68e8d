"""One declaration of a setting: its type, range, choices, sentence and who reads it.

A class of settings is a frozen pydantic dataclass that lists its settings, each with its :class:`Declaration`. Run
configurations and operators' files share declarations. Checks, help, completion, the JSON schema and the documentation
follow from them.

A choice is a union of kinds (:class:`Kind`), each a small model of the options that it reads:
``Banded(kind="banded", bands=8)``. Options have dotted keys, such as ``mechanism.bands``. In a TOML file they stand in
a table, ``[mechanism]`` with ``kind = "banded"`` and ``bands = 8``: ``mechanism.kind`` is the same key as
``mechanism``. Python programs may write ``mechanism="banded", bands=8`` as well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, TypeVar, Union, cast, dataclass_transform, get_args, get_type_hints

import pydantic
from pydantic_core import CoreSchema, core_schema

from .errors import ConfigurationError, ErrorKind

Value = bool | int | float | str
Choices = Iterable[str] | Callable[[], Iterable[str]]
SettingsT = TypeVar("SettingsT", bound=type[Any])

_STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
"""``true`` is no number, and 1.0 no integer."""
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    str: "a text",
    int: "an integer",
    float: "a finite number",
    tuple[str, ...]: "a list of texts",
    Mapping[str, Value]: "a table of numbers, texts and booleans",
}
_NUMBERS = (int, float)


def hyphenated(name: str) -> str:
    """Return the name of a field as it is typed."""
    return name.replace("_", "-")


class Kind(pydantic.BaseModel):
    """One kind of a choice: its name or names in ``kind``, a ``Literal``, and the options that it reads.

    A union of kinds is the type of a choice. A kind whose ``kind`` is a plain ``str`` stands for every other name.
    """

    model_config: ClassVar[pydantic.ConfigDict] = {
        **_STRICT,
        "frozen": True,
        "alias_generator": hyphenated,
        "populate_by_name": True,
        "json_schema_extra": {"required": ["kind"]},
    }

    @property
    def name(self) -> str:
        """The name of this kind."""
        return vars(self)["kind"]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the kind's names; none if it stands for every other name."""
        return get_args(cls.model_fields["kind"].annotation)

    def options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by the names of fields."""
        return {name: value for name, value in self.model_dump(exclude_defaults=True).items() if name != "kind"}


def kinds_of(choice: Any) -> tuple[type[Kind], ...]:
    """Return the kinds in a union of kinds; none for any other type."""
    kinds = get_args(choice)
    return kinds if kinds and all(isinstance(one, type) and issubclass(one, Kind) for one in kinds) else ()


@dataclass(frozen=True)
class Declaration:
    """Meaning of a setting, in the annotation of its field: ``mu: Annotated[float, Declaration(...)] = 4.0``.

    Parameters
    ----------
    sentence : str
        What it is; a full stop at its end.
    key : str
        As it is typed, such as ``mechanism.bands``; empty for the name of its field, with hyphens.
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

    sentence: str = ""
    _: KW_ONLY
    key: str = ""
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
    def known(self) -> tuple[str, ...]:
        """The names or texts it may be; empty for anything."""
        return tuple(self.choices() if callable(self.choices) else self.choices)

    def __get_pydantic_core_schema__(self, kind: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the type within the range, or of a text among the choices."""
        if kinds := kinds_of(kind):
            return handler(_discriminated(kinds))
        if kind in _NUMBERS:
            bounds = pydantic.Field(ge=self.at_least, gt=self.above, le=self.at_most, lt=self.below)
            return handler(Annotated[kind, bounds])
        if kind is not str or self.names or not self.choices:
            return handler(kind)  # who imports a thing refuses what cannot be imported
        return core_schema.no_info_after_validator_function(self._chosen, handler(kind))

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the type within the range, with choices and sentence."""
        choices = {"enum": list(self.known)} if self.choices and not (self.own or self.names) else {}
        return {**handler(schema), **choices, "description": self.sentence}

    def _chosen(self, value: str) -> str:
        if value in self.known or (self.own and ":" in value):
            return value
        raise ValueError("unknown name")


def _discriminated(kinds: tuple[type[Kind], ...]) -> Any:
    """Return the union of kinds that pydantic tells apart by their names."""
    tags = {name: one.__name__ for one in kinds for name in one.names()}
    other = next((one.__name__ for one in kinds if not one.names()), None)

    def tag_of(value: Any) -> str | None:
        name = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        return tags.get(cast("str", name), other)

    tagged = tuple(cast("Any", Annotated)[one, pydantic.Tag(one.__name__)] for one in kinds)
    return cast("Any", Annotated)[cast("Any", Union)[tagged], pydantic.Discriminator(tag_of)]


@dataclass(frozen=True, kw_only=True)
class Setting(Declaration):
    """One setting of a class of settings.

    Parameters
    ----------
    name : str
        As it is typed: its key, or the name of its field with hyphens.
    attribute : str
        The name of its field.
    kind : type
        The type of its values.
    default : bool, int, float, str, tuple or mapping
        Its value where nothing is said; it may lie out of range.
    choice : str
        The field that holds the chosen kind, of a choice and of its options; empty for any other setting.
    kinds : tuple of str
        The kinds that read an option, by name; empty for any other setting.
    union : type, optional
        Of a choice, the union of its kinds.
    """

    name: str
    attribute: str
    kind: Any
    default: Any
    choice: str = ""
    kinds: tuple[str, ...] = ()
    union: Any = None

    def of(self, values: Any) -> Any:
        """Return this setting's value in an object of settings; the default if the chosen kind does not read it."""
        if not self.choice:
            return getattr(values, self.attribute)
        chosen = getattr(values, self.choice)
        return getattr(chosen, self.attribute, self.default) if self.kinds else chosen.name

    @property
    def table(self) -> str:
        """The key of its choice, or its own."""
        return hyphenated(self.choice) or self.name

    def read_with(self, kind: str) -> bool:
        """Return True unless it is an option that a kind of the choice does not read."""
        return not self.kinds or kind in self.kinds

    @cached_property
    def reader(self) -> pydantic.TypeAdapter[Any]:
        """The validator of its type and range."""
        return pydantic.TypeAdapter(cast("Any", Annotated)[self.kind, self], config=_STRICT)

    def table_schema(self) -> dict[str, Any]:
        """Return the JSON schema of a choice as a table: one of its kinds, each with the options that it reads."""
        declared = cast("Any", Annotated)[self.union, self]
        return pydantic.TypeAdapter(declared).json_schema()

    @property
    def expected(self) -> str:
        """Description of the values that are allowed."""
        if self.kind not in _NUMBERS:
            known = ", ".join(repr(one) for one in self.known)
            return f"one of {known}" if known else _WORDS[self.kind]
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
            if bound is not None
        ]
        words = "an integer" if self.kind is int else "a number"
        return f"{words} {' and '.join(bounds)}{f' (0: {self.zero})' if self.zero else ''}".strip()

    def read(self, value: Any) -> Any:
        """Return a value as this setting's type.

        An error if it is of another type, out of range, or none of the choices.
        """
        if self.kind == tuple[str, ...] and isinstance(value, list):
            value = tuple(value)
        if value == self.default and type(value) is type(self.default):
            return value
        if self.kind not in (bool, *_NUMBERS) and not _is_unicode(value):
            raise refusal(self.name, f"{_WORDS[self.kind]} in Unicode", value, kind="malformed")
        try:
            return self.reader.validate_python(value)
        except pydantic.ValidationError as error:
            raise self.refused(value, error.errors(include_url=False)[0]["type"]) from None

    def refused(self, value: Any, fault: str) -> ConfigurationError:
        """Return the error for a value that pydantic found a fault with."""
        if fault == "value_error":
            return ConfigurationError(
                unknown_name(self.name, value, self.known), kind="unknown-name", setting=self.name, got=value
            )
        compared = fault.startswith(("greater_than", "less_than"))
        expected, kind = (self.expected, "out-of-range") if compared else (_WORDS[self.kind], "wrong-type")
        return refusal(self.name, expected, value, kind=kind)

    def parsed(self, text: str) -> Value:
        """Return a text from a command line as this setting's type; an error if it does not read as one."""
        if self.kind is bool and text in ("true", "false"):
            return text == "true"
        try:
            value = self.kind(text) if self.kind in _NUMBERS else text
        except ValueError:
            raise refusal(self.name, _WORDS[self.kind], text, kind="wrong-type") from None
        return self.read(value)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(kind: SettingsT) -> SettingsT:
    """Return a class decorator: a frozen class of settings, whose values are checked where it is made.

    A value that is its default is not checked: it says that nothing was set.
    """
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)(kind)
    validated = made.__init__

    def __init__(self: Any, **values: Any) -> None:  # noqa: N807 - that of the class
        known = {one.attribute: one for one in settings_of(type(self)).values()}
        read = {
            name: known[name].read(value) if name in known and not isinstance(value, Kind) else value
            for name, value in values.items()
        }
        by_field = _by_field(read, known)
        try:
            validated(self, **by_field)
        except pydantic.ValidationError as error:
            raise _as_refusal(error, known, by_field) from None

    made.__init__ = __init__
    return made


def _by_field(given: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of fields that differ from their defaults, with options in the choices that they belong to.

    Options replace those of a kind that is given as a whole, as in ``dataclasses.replace(config, bands=8)``.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        one = known.get(name)
        if one is None or not (one.choice or value == one.default):
            found[name] = value
    for name in dict.fromkeys(known[name].choice for name in given if name in known and known[name].choice):
        kind = given.get(name, known[name].default)
        options = kind.options() if isinstance(kind, Kind) else {}
        options |= {one: given[one] for one, option in known.items() if option.choice == name != one and one in given}
        chosen = {hyphenated(one): value for one, value in options.items() if value != known[one].default}
        found[name] = {"kind": kind.name if isinstance(kind, Kind) else kind, **chosen}
    return found


def _as_refusal(error: pydantic.ValidationError, known: Mapping[str, Setting], given: Mapping[str, Any]) -> Exception:
    """Return the error of ours that a class of settings refused with, or that says what pydantic did."""
    fault = error.errors(include_url=False)[0]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    name = str(fault["loc"][0]) if fault["loc"] else ""
    choice = known.get(name)
    if choice is not None and len(fault["loc"]) > 1:  # an option, behind its choice and the class of the kind
        options = {hyphenated(one.attribute): one.attribute for one in known.values() if one.choice == name}
        name = options.get(str(fault["loc"][-1]), "")
    if fault["type"] == "missing" and choice is not None and name != choice.attribute:
        expected = f"set, with {choice.name} = {given[choice.attribute]['kind']!r}"
        return refusal(known[name].name, expected, known[name].default, kind="missing")
    if fault["type"] == "missing":
        return ConfigurationError(
            f"Expected values for {known[name].name}, got none of that name.", kind="missing", setting=known[name].name
        )
    if fault["type"] == "extra_forbidden" and choice is not None and name in known:
        return not_read(known[name], fault["input"], choice.name, given[choice.attribute]["kind"], known[name].kinds)
    if name in known:
        return known[name].refused(fault["input"], fault["type"])
    return unknown_key(hyphenated(name), [one.name for one in known.values()])


@cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Return the settings of a class, by hyphenated name."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for one in fields(kind):
        kind_of, *marks = get_args(hints[one.name]) or (hints[one.name],)
        declaration = next((mark for mark in marks if isinstance(mark, Declaration)), None)
        if declaration is None:
            continue
        default: Any = one.default_factory() if one.default_factory is not MISSING else one.default
        name = declaration.key or hyphenated(one.name)
        if kinds_of(kind_of):
            found |= _of_choice(name, one.name, kind_of, declaration, default.name)
        else:
            found[name] = Setting(name=name, attribute=one.name, kind=kind_of, default=default, **vars(declaration))
    return found


def _of_choice(name: str, field: str, union: Any, declaration: Declaration, default: str) -> dict[str, Setting]:
    """Return the settings of a choice, by name: its own, and each option of its kinds with the kinds that read it."""
    kinds = kinds_of(union)
    names = tuple(known for kind in kinds for known in kind.names())
    words: dict[str, Any] = vars(declaration) | {"choices": declaration.choices or names}
    found = {name: Setting(name=name, attribute=field, kind=str, default=default, choice=field, union=union, **words)}
    for kind in kinds:
        for option, info in kind.model_fields.items():
            if option == "kind":
                continue
            [declared] = (mark for mark in info.metadata if isinstance(mark, Declaration))
            key = declared.key or f"{name}.{hyphenated(option)}"
            if key in found:
                found[key] = replace(found[key], kinds=(*found[key].kinds, *kind.names()))
                continue
            kind_of: Any = info.annotation
            one: dict[str, Any] = {"kind": kind_of, "choice": field, "kinds": kind.names()}
            one["default"] = kind_of() if info.is_required() else info.default
            found[key] = Setting(name=key, attribute=option, **one, **vars(declared))
    return found


_KIND = ".kind"


def flat(document: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a document's values by key, those of its tables by dotted keys; ``mechanism.kind`` is ``mechanism``."""
    found: dict[str, Any] = {}
    for name, value in _entries(document, known):
        key = key_of(name, known)
        if key in found:
            raise ConfigurationError(
                f"Expected {key} once, got it twice, by itself and in its table: leave one out.",
                kind="duplicate",
                setting=key,
            )
        found[key] = value
    return found


def key_of(name: str, known: Iterable[str]) -> str:
    """Return the key of a name: ``mechanism.kind`` is ``mechanism``; any other name is as it is."""
    return name.removesuffix(_KIND) if name.removesuffix(_KIND) in known else name


def _entries(document: Mapping[str, Any], known: Mapping[str, Setting], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value and not _is_one(key, value, known):
            yield from _entries(value, known, f"{key}.")
        else:
            yield key, value


def _is_one(key: str, value: Mapping[str, Any], known: Mapping[str, Setting]) -> bool:
    """Return True if a table is the value of one setting, and not of several."""
    if key not in known or any(one.startswith(f"{key}.") for one in known):
        return False
    return known[key].kind is not str or _KIND[1:] not in value


def spelled_out(values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return values by key with ``mechanism.kind`` for ``mechanism``, and so for every choice with options.

    A TOML document and Flower's run configuration hold either a value or a table under one name.
    """
    tables = {name.partition(".")[0] for name in known if "." in name}
    return {f"{name}{_KIND}" if name in tables else name: value for name, value in values.items()}


def by_key(values: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return values by key that are by the names of fields, such as a Python program's keywords."""
    keys = {one.attribute: name for name, one in known.items()}
    return flat({keys.get(name, hyphenated(name)): value for name, value in values.items()}, known)


def _is_unicode(value: Any) -> bool:
    """Return False for a text that has no UTF-8, or for a list or table with one in it: pydantic ends on them."""
    match value:
        case str():
            return not _SURROGATE.search(value)
        case list() | tuple():
            return all(map(_is_unicode, value))
        case Mapping():
            return all(_is_unicode(part) for pair in value.items() for part in pair)
        case _:
            return True


def refusal(name: str, expected: str, got: Any, *, kind: ErrorKind = "conflict") -> ConfigurationError:
    """Return the error that names a key, what was expected and what came."""
    name = hyphenated(name)
    return ConfigurationError(f"Expected {name} to be {expected}, got {got!r}.", kind=kind, setting=name, got=got)


def not_read(one: Setting, value: Any, by: str, named: str, readers: Iterable[str]) -> ConfigurationError:
    """Return the error for a setting that is set although what ``by`` names does not read it."""
    able = " or ".join(name for name in readers if name)
    if able and not named:
        return ConfigurationError(
            f"Expected {by} = {able} beside {one.name} = {value}, got no {by}: set it too, or leave {one.name} out.",
            kind="missing",
            setting=one.name,
            got=value,
        )
    read = f"; it is read by {by} = {able}" if able else ""
    return ConfigurationError(
        f"Expected {one.name} to be left at {one.default!r} with {by} = {named!r}, which does not read it, got "
        f"{value!r}{read}.",
        kind="conflict",
        setting=one.name,
        got=value,
    )


_OF_A_POLICY = {"sample_participations": "passes"}
"""Fields of a policy that settings have under another name."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates, by which Python represents bytes of a command line that are not UTF-8."""
_FIELD = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


@contextmanager
def named_by_key(known: Iterable[Setting]) -> Iterator[None]:
    """Name settings by their keys in errors of what is made from them, such as a policy, which checks its fields."""
    keys = {one.attribute: one.name for one in known}
    keys |= {field: key for field, key in _OF_A_POLICY.items() if key in keys}
    try:
        yield
    except ConfigurationError as error:
        reworded = error.reworded(_FIELD.sub(lambda found: keys.get(found[0], found[0]), str(error)))
        reworded.setting = keys.get(error.setting or "", error.setting)
        raise reworded from None


def unknown_name(key: str, name: object, known: Iterable[str]) -> str:
    """Return the sentence that refuses an unknown name: with the nearest known one, or all of them."""
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
"""Names of our keys in other programs."""
_RENAMED = {
    "wait-for": "quorum",
    "ask": "over-selection",
    "run-dry": "allow-exhaustion",
    "secret-order": "batch-selection",
    "diameter": "strategy.projection-radius",
    "alpha": "strategy.alpha",
    "culprits": "trust.max-byzantine",
    "most-skipped": "trust.max-failed-aggregations",
    "most-noise": "trust.max-noise",
    "synthetic-samples": "task.samples",
    "synthetic-features": "task.features",
    "synthetic-alpha": "task.alpha",
    "synthetic-beta": "task.beta",
    "dirichlet-alpha": "partition.alpha",
    "clip-stability": "clipping.stability",
    "centring-share": "centring.share",
    "centring-norm": "centring.norm",
    "centring-nonnegative": "centring.nonnegative",
    "private-evaluation": "evaluation.share",
    "rows": "num-records",
    "machine": "client",
    "largest-model": "max-model-size",
    "sessions-a-day": "max-sessions-per-day",
    "sets-a-day": "max-sums-per-day",
}
"""Keys by their names of before, but for those that only moved into a table of the same key."""
_ALTERED = {"strategy.projection-radius": ", half of what it was", "batch-selection": ", `shuffled` for true"}
"""Keys whose values mean something else than under their names of before."""


def renamed(name: str, known: Iterable[str]) -> str:
    """Return what is known now under the name of before, and how its value changed; empty for any other name."""
    names, before = list(known), hyphenated(name)
    moved = [one for one in names if one.endswith(f".{before}")]
    now = _RENAMED.get(before, moved[0] if len(moved) == 1 else before.rpartition(".")[2])
    return f"it is called {now!r}{_ALTERED.get(now, '')}" if now in names and now != before else ""


def meant_by(name: str) -> str:
    """Return our key for another program's name of it; any other name as it is."""
    return _ALIASES.get(name, name)


def unknown_key(name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown run-config key: with the nearest known one, or all of them."""
    names = list(known)
    if now := renamed(name, names):
        return ConfigurationError(
            f"Expected a known run-config key, got {name!r}; {now}.", kind="unknown-name", setting=name
        )
    near = [one for one in (meant_by(name),) if one in names]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=_LEAST_ALIKE)
    every = f"known: {', '.join(names)}." if len(names) <= _MOST_NAMED else "`murmurfl keys` lists all of them."
    meant = f"did you mean {near[0]!r}?" if near else every
    return ConfigurationError(
        f"Expected a known run-config key, got {name!r}; {meant}", kind="unknown-name", setting=name
    )


def mu_and_epsilon(mu: Any, epsilon: Any) -> ConfigurationError:
    """Return the error for a run that is given both mu and epsilon."""
    return ConfigurationError(
        f"Expected mu or epsilon, got both: mu = {mu:g}, epsilon = {epsilon:g}.", kind="conflict", setting="mu"
    )
