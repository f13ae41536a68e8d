"""Drafts of single columns: the kind, the reason, and the cells that are lost.

Drafts look at all rows, and reading does not. A column is counted once (:class:`Cells`) and judged by its different
cells, so that a draft of 100,000 rows takes seconds. The cells are read as a schema reads them.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, InvalidRecordError
from .schema import MISSING_WORDS, OTHER, Column, Label, Thousands, is_missing, number_in, text_of

FEWEST_OF_A_CATEGORY = 20
"""Records that a category must have to stand in a draft; rarer ones count as ``other``."""
MOST_CATEGORIES, MOST_CLASSES = 50, 20
_EXTREME = 0.005
"""Share of a column's values at each end that bounds may cut off: they are moved to the bound."""
_FAR, _TIMES = 0.02, 5.0
"""Share of a label's values at each end that bounds leave out where they would be so many times as wide with them."""
_FEWEST_NAMES = 500
"""Rows from which on whole numbers that are all different are taken for names of the rows."""
_FEWEST_IDS = 20
"""Rows from which on they are, in a column that is called an id."""
_MOST, _MAINLY, _NEARLY = 0.95, 0.5, 0.99
"""Shares of the cells of a column that are of one kind."""
_FREQUENT, _STRAY, _SOME_CODES, _FEWEST_CODES = 0.01, 0.001, 0.005, 3
_PARTS = 4
"""Least number of steps of a bound between the bounds."""
_FINE = 200
"""Least number of steps of a missing value between the bounds."""
_MOST_READ = 4
_YES_NO = ({"yes", "no"}, {"true", "false"}, {"y", "n"}, {"t", "f"}, {"0", "1"})
_NO_CODES: Mapping[float, int] = {}
_NOTHING = frozenset(
    {"not available", "not applicable", "not known", "not recorded", "missing", "n.a.", "#n/a", "refused"}
)
_GROUPED_BY = {
    ",": re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?"),
    ".": re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?"),
    " ": re.compile(r"[+-]?[1-9]\d{0,2}( \d{3})+([.,]\d+)?"),
    "'": re.compile(r"[+-]?[1-9]\d{0,2}('\d{3})+([.,]\d+)?"),
}
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([ T].*)?")
_WITH_UNIT = re.compile(
    r"[+-]?\s*(?P<before>[^\d\s+\-.,]{0,4}\.?)\s*[+-]?(?P<number>\d[\d.,' ]*\d|[.,]?\d+)"
    r"\s*(?P<after>[^\W\d_]\S*(?:\s\S+)?|[%‰°$€£¥₹]\S*)?"
)
_MONEY = frozenset({"rs", "rs.", "inr", "usd", "eur", "gbp", "chf", "jpy", "kr", "kr."})
_CODE = re.compile(r"[A-Za-z]{1,3}-?\d[\d.]*|\d+[A-Za-z]{1,2}\d*")
_ID = re.compile(
    r"(?:^|[^a-z])(?:p?id|ids|nr|nbr|no|number|index|key|guid|uuid|identifier|mrn|ssn|unnamed: 0)$|^$|^row-name$"
)
_NOMINAL = re.compile(r"(?:^|[^a-z])(?:id|code|zip|zipcode|postcode)$")
_PERSON = re.compile(r"patient|person|subject|customer|client|member|user|participant|employee|student|respondent|mrn")
_OF_A_PERSON = re.compile(
    r"(?:first|last|sur|fore|given|family|full|middle|patient)[ _-]?names?$|e-?mail|^phone|telephone"
)
_NAME = re.compile(r"(?:^|[^a-z])(?:name|names|address)$")


@dataclass(frozen=True)
class ColumnDraft:
    """Draft of a column, for a person to review."""

    name: str
    column: Column | None
    """None if the draft leaves it out."""
    reason: str
    """Reason for the kind, or for leaving the column out."""
    lost: str = ""
    """Cells that are not read as what they say."""
    warnings: tuple[str, ...] = ()
    num_lost: int = 0
    """Number of these cells that are read as missing or as other."""

    @property
    def kind(self) -> str:
        """The kind of the column, or ``left out``."""
        return "left out" if self.column is None else self.column.kind


@dataclass(frozen=True)
class Numbers:
    """The cells of a column that are numbers, and how they are written."""

    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    words: Counter[str]
    """Cells that are none."""
    unit: str = ""
    thousands: Thousands = ""

    @property
    def total(self) -> int:
        """Number of cells that are numbers."""
        return int(self.counts.sum())

    @property
    def whole(self) -> bool:
        """Whether all numbers are whole."""
        return bool((self.values == np.floor(self.values)).all())

    @cached_property
    def distinct(self) -> NDArray[np.float64]:
        """The different numbers, in order."""
        return np.unique(self.values)

    @property
    def all_values(self) -> NDArray[np.float64]:
        """Every number as often as it occurs."""
        return np.repeat(self.values, self.counts)

    def count_of(self, value: float) -> int:
        """Return how often a number occurs."""
        return int(self.counts[self.values == value].sum())

    def without(self, codes: Collection[float]) -> Numbers:
        """Return the numbers that are none of the codes."""
        kept = ~np.isin(self.values, list(codes))
        return replace(self, values=self.values[kept], counts=self.counts[kept])


class Cells:
    """The different cells of a column and how often each occurs.

    Parameters
    ----------
    name : str
    cells : sequence
        Every row's cell, as the file or the DataFrame has it.
    """

    def __init__(self, name: str, cells: Sequence[Any]) -> None:
        self.name, self.total = name, len(cells)
        self.counts = _counted(cells)
        self.present = [(cell, count) for cell, count in self.counts if not is_missing(cell)]
        self.num_present = sum(count for _, count in self.present)
        self._numbers: dict[str, Numbers] = {}

    def share(self, kind: re.Pattern[str]) -> float:
        """Return the share of cells with a value whose text is of a kind."""
        found = sum(count for cell, count in self.present if kind.fullmatch(str(cell).strip()))
        return found / max(self.num_present, 1)

    def texts(self, *, with_words: bool) -> Counter[str]:
        """Return how often each text occurs; ``with_words`` such as ``none``, which may be a name."""
        found: Counter[str] = Counter()
        for cell, count in self.counts if with_words else self.present:
            if not is_missing(cell) or _is_name(cell):
                found[text_of(cell)] += count
        return found

    def numbers(self, decimal: str) -> Numbers:
        """Return the cells that are numbers, written plainly or with a unit or signs of thousands."""
        if decimal not in self._numbers:
            self._numbers[decimal] = self._read_numbers(decimal)
        return self._numbers[decimal]

    def _read_numbers(self, decimal: str) -> Numbers:
        plain = _numbers(self.present, Numbers(_NONE, _NONE.astype(np.int64), Counter()), decimal)
        if plain.total >= _MOST * self.num_present:
            return plain
        written = self._writing()
        if not (written.unit or written.thousands):
            return plain
        found = _numbers(self.present, written, decimal)
        return found if found.total > plain.total else plain

    def _writing(self) -> Numbers:
        """Return the most frequent unit and the sign of thousands of cells that are no plain numbers."""
        units: Counter[str] = Counter()
        spelt: dict[str, Counter[str]] = {}
        grouped: Counter[str] = Counter()
        for cell, count in self.present:
            found = _WITH_UNIT.fullmatch(cell.strip()) if isinstance(cell, str) and len(cell) < 60 else None
            if found is None:
                continue
            before, after = found["before"], (found["after"] or "").strip()
            if before and not (before.casefold() in _MONEY or any(unicodedata.category(one) == "Sc" for one in before)):
                continue
            unit = before or after
            units["".join(unit.split()).casefold()] += count
            spelt.setdefault("".join(unit.split()).casefold(), Counter())[unit] += count
            for sign, kind in _GROUPED_BY.items():
                grouped[sign] += count * bool(kind.fullmatch(found["number"]))
        united = Counter({unit: count for unit, count in units.items() if unit})
        unit = ""
        if united:
            most, count = united.most_common(1)[0]
            fewest = min(FEWEST_OF_A_CATEGORY, max(self.num_present // 10, 1))
            if count >= fewest and count >= 0.8 * united.total():
                unit = spelt[most].most_common(1)[0][0]
        sign, count = grouped.most_common(1)[0] if grouped else ("", 0)
        thousands = sign if count >= _FREQUENT * self.num_present and count else ""
        return Numbers(_NONE, _NONE.astype(np.int64), Counter(), unit, thousands)  # type: ignore[arg-type]


_NONE: NDArray[np.float64] = np.zeros(0)


def _counted(cells: Sequence[Any]) -> list[tuple[Any, int]]:
    """Count cells, of which those of different types are different."""
    try:
        if len(set(map(type, cells))) <= 1:
            return list(Counter(cells).items())
        return [(cell, count) for (_, cell), count in Counter(zip(map(type, cells), cells, strict=True)).items()]
    except TypeError:  # lists have no hash
        return [(cell, 1) for cell in cells]


def _numbers(present: Sequence[tuple[Any, int]], written: Numbers, decimal: str) -> Numbers:
    """Return the cells that are numbers and those that are none, read as a schema reads them."""
    cells = [cell for cell, _ in present]
    fast = _plain_numbers(cells, decimal) if not (written.unit or written.thousands) else None
    if fast is not None:
        return replace(written, values=fast, counts=np.array([count for _, count in present], np.int64))
    values, counts, words = [], [], Counter[str]()
    for cell, count in present:
        try:
            values.append(number_in(cell, written, decimal=decimal))
            counts.append(count)
        except InvalidRecordError:
            words[str(cell).strip()[:40]] += count
    return replace(written, values=np.array(values, np.float64), counts=np.array(counts, np.int64), words=words)


def _plain_numbers(cells: Sequence[Any], decimal: str) -> NDArray[np.float64] | None:
    """Return texts that are all finite numbers as such; None if one of them may be none."""
    if not all(type(cell) is str for cell in cells):
        return None
    texts = [cell.replace(",", ".") for cell in cells] if decimal == "," else cells
    try:
        found = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return None
    usual = np.isfinite(found).all() and "_" not in "".join(texts) and max(map(len, texts), default=0) <= 400
    return found if usual else None


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and cell.strip().lower() in MISSING_WORDS


def drafted_column(cells: Cells, decimal: str, known: Mapping[float, int] = _NO_CODES) -> ColumnDraft:
    """Judge a column; ``known`` are codes for missing values, each with the number of columns that have it."""
    numbers = cells.numbers(decimal)
    codes = missing_codes(numbers, known)
    judged = numbers.without(codes)
    if _is_of_numbers(judged, cells):
        found = _number_column(cells, judged, codes)
        return replace(found, warnings=(*found.warnings, *_about_zero(judged, codes)))
    return _category_column(cells, numbers)


def _is_of_numbers(numbers: Numbers, cells: Cells) -> bool:
    """Return True if nearly all cells are numbers, or most are and they are many."""
    words = numbers.words.total()
    if not numbers.total:
        return False
    codes = {word: count for word, count in numbers.words.items() if _CODE.fullmatch(word)}
    if len(codes) >= _FEWEST_CODES and sum(codes.values()) >= _SOME_CODES * cells.num_present:
        return False  # as V45 and E812 among 250 and 276
    if words <= (1 - _MOST) * cells.num_present:
        return True
    return len(numbers.distinct) > MOST_CLASSES and words < _MAINLY * cells.num_present


def _plain_name(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).strip().lower()


def _number_column(cells: Cells, numbers: Numbers, codes: Sequence[float]) -> ColumnDraft:
    """Return a column of numbers, or the reason why nothing can be learnt from them."""
    distinct, name = numbers.distinct, _plain_name(cells.name)
    if len(distinct) < 2:
        return ColumnDraft(cells.name, None, "a single value")
    written = bool(numbers.unit or numbers.thousands)
    if reason := _why_an_id(cells, name, len(distinct), numbers.total) if numbers.whole and not written else "":
        return _left_out_as(reason, cells)
    keys: dict[str, Any] = {"missing_codes": tuple(codes), "unit": numbers.unit, "thousands": numbers.thousands}
    warnings = _about_codes(codes)
    if set(distinct.tolist()) == {0.0, 1.0} and not written:
        usual = "yes" if numbers.count_of(1.0) > numbers.total / 2 else "no"
        column = Column(kind="yes/no", missing=usual, missing_codes=tuple(codes))
        lost, num_lost = _lost(cells, numbers, codes)
        return ColumnDraft(cells.name, column, "0 and 1", lost, warnings, num_lost)
    if _are_codes(cells, name, len(distinct)):
        return _category_column(cells, numbers)
    bounds = bounds_of(numbers.all_values)
    if bounds is None:
        return ColumnDraft(cells.name, None, "a single value but for few rows")
    missing = _nearest(float(np.median(numbers.all_values)), bounds)
    if numbers.whole:
        missing = round(missing)
    column = Column(kind="integer" if numbers.whole else "number", bounds=bounds, missing=missing, **keys)
    lost, num_lost = _lost(cells, numbers, codes, bounds)
    return ColumnDraft(cells.name, column, _why_a_number(numbers), lost, warnings, num_lost)


def _why_a_number(numbers: Numbers) -> str:
    what = "whole numbers" if numbers.whole else "numbers"
    unit = f" with the unit {numbers.unit}" if numbers.unit else ""
    thousands = f" with {numbers.thousands!r} between thousands" if numbers.thousands else ""
    return f"{what}{unit}{thousands}"


def _are_codes(cells: Cells, name: str, distinct: int) -> bool:
    """Return True if whole numbers are names: written with leading zeros and one length, or few in a column of ids."""
    if distinct <= MOST_CATEGORIES and _NOMINAL.search(name):
        return True
    texts = [(str(cell).strip(), count) for cell, count in cells.present]
    zeros = sum(count for text, count in texts if len(text) > 1 and text[0] == "0" and text.isdigit())
    return zeros >= _FREQUENT * cells.num_present and len({len(text) for text, _ in texts}) == 1


def _why_an_id(cells: Cells, name: str, distinct: int, total: int) -> str:
    """Return why whole numbers, or texts, name rows or persons; "" if they do not seem to."""
    if distinct == total == cells.total >= _FEWEST_NAMES:
        return "a number of its own in each row"
    if total < _FEWEST_IDS:
        return ""
    called = bool(_ID.search(name))
    if distinct >= _NEARLY * total:
        sizes = {len(str(cell).strip()) for cell, _ in cells.present[:1000]}
        if called or (total >= _FEWEST_NAMES and len(sizes) == 1 and min(sizes) > 5):
            return "an id"
    elif (called or _PERSON.search(name)) and distinct > MOST_CATEGORIES and total <= MOST_CATEGORIES * distinct:
        return "an id"
    return ""


def _left_out_as(reason: str, cells: Cells) -> ColumnDraft:
    """Leave a column of ids out; propose to protect persons where an id stands in several rows."""
    several = reason == "an id" and len(cells.present) < _NEARLY * cells.num_present
    many = f"{len(cells.present):,} values in {cells.num_present:,} rows"
    proposal = f"{many}. If it says whose a row is, protect persons and not rows: --owner {cells.name}."
    return ColumnDraft(cells.name, None, reason, many, (proposal,) if several else ())


def missing_codes(numbers: Numbers, known: Mapping[float, int] = _NO_CODES) -> list[float]:
    """Return frequent constants far outside of the other numbers, which seem to stand for a missing value.

    Zero is never one of them, because many columns have mostly zeros. A code that several columns have (``known``)
    need not be frequent in this one.
    """
    found: list[float] = []
    rest = numbers
    for _ in range(3):
        ends = [*_ends(rest, low=True), *_ends(rest, low=False)]
        code = next((end for end in ends if _are_missing_codes(end, rest, known)), None)
        if code is None:
            break
        found += code
        rest = rest.without(code)
    return sorted(found)


def _ends(numbers: Numbers, *, low: bool) -> Iterator[list[float]]:
    """Yield the lowest number, the two and the three lowest ones; or the highest."""
    values = numbers.distinct if low else numbers.distinct[::-1]
    for count in (1, 2, 3):
        if len(values) >= count + 2:
            yield [float(one) for one in values[:count]]


def _are_missing_codes(ends: Sequence[float], numbers: Numbers, known: Mapping[float, int]) -> bool:
    """Return True if numbers at one end of a column seem to be codes for a missing value."""
    counts = [numbers.count_of(one) for one in ends]
    often = max(_FREQUENT * numbers.total, 3)
    shared = len(ends) == 1 and known.get(ends[0], 0) > 1
    if 0.0 in ends or (not shared and (sum(counts) < often or min(counts) < 3)):
        return False
    if len(ends) > 1 and not all(map(_is_usual_code, ends)):
        return False
    others = numbers.without(ends)
    low, high = (float(one) for one in np.quantile(others.all_values, [_EXTREME, 1.0 - _EXTREME]))
    wide = max(high - low, 1e-12)
    gap = low - max(ends) if max(ends) < low else min(ends) - high
    beside = int(others.counts[abs(others.values - ends[-1]) < gap / 4].sum())
    if gap <= 0 or beside > max(_STRAY * others.total, 1):
        return False
    many = len(others.distinct) >= 10
    if all(map(_is_usual_code, ends)) and gap >= wide / (2 if abs(ends[0]) < 10 else 4) and gap >= 2:
        return True
    if len(ends) > 1:
        return False
    if ends[0] in known and gap >= wide / 10:
        return True
    if many and ends[0] < 0 and ends[0] == math.floor(ends[0]) and others.values.min() >= 0:
        return True
    return many and gap >= wide


def _is_usual_code(value: float) -> bool:
    """Return True for 9, 99, -999, 88, 777 and their like, which questionnaires use."""
    text = f"{abs(value):.0f}"
    return value == math.floor(value) and len(set(text)) == 1 and (text[0] == "9" or (text[0] in "78" and value > 0))


def _about_codes(codes: Sequence[float]) -> tuple[str, ...]:
    if not codes:
        return ()
    named = ", ".join(f"{code:g}" for code in codes)
    return (
        f"{named} {'is' if len(codes) == 1 else 'are'} read as missing (missing_codes), because the other numbers are "
        "far away. Remove what is a value.",
    )


def _about_zero(numbers: Numbers, codes: Sequence[float]) -> tuple[str, ...]:
    """Return a note on zeros far below all other numbers, which may stand for missing values."""
    zeros = numbers.count_of(0.0)
    others = numbers.without([0.0])
    if zeros < max(_FREQUENT * numbers.total, 3) or len(others.distinct) < 10 or others.values.min() <= 0:
        return ()
    low, high = (float(one) for one in np.quantile(others.all_values, [_EXTREME, 1.0 - _EXTREME]))
    if low < (high - low) / 4:
        return ()
    named = ", ".join(f"{code:g}" for code in (*codes, 0.0))
    return (f"0 stands in {zeros:,} rows, far below the others. If it means missing, set missing_codes = [{named}].",)


def _lost(
    cells: Cells, numbers: Numbers, codes: Sequence[float], bounds: tuple[float, float] | None = None
) -> tuple[str, int]:
    """Return what is lost of a column of numbers, and how many cells are read as missing."""
    words = numbers.words.total()
    coded = max(cells.num_present - numbers.total - words, 0)
    outside = 0
    if bounds is not None:
        outside = int(numbers.counts[(numbers.values < bounds[0]) | (numbers.values > bounds[1])].sum())
    codes_named = " or ".join(f"{code:g}" for code in codes)
    missing = [f"{coded:,} with {codes_named}"] if coded else []
    missing += [f"{words:,} that are no such numbers"] if words else []
    found = [f"read as missing: {', '.join(missing)}"] if missing else []
    if outside and bounds is not None:
        found.append(f"clipped: {outside:,} outside {bounds[0]:g} to {bounds[1]:g}")
    return "; ".join(found), coded + words


def words_named(words: Counter[str]) -> str:
    """Return the most frequent of some texts with how often they occur, for the person who has the rows."""
    return ", ".join(f"{word!r} ({count:,})" for word, count in words.most_common(_MOST_READ))


def _category_column(cells: Cells, numbers: Numbers) -> ColumnDraft:
    """Return a column of categories, or the reason why nothing can be learnt from the cells."""
    name = cells.name
    try:
        named = cells.texts(with_words=True)
    except InvalidRecordError:
        return ColumnDraft(name, None, "free text")
    folded = {text.lower() for text in named}
    if len(folded) < 2:
        return ColumnDraft(name, None, "a single value" if folded else "no value")
    if any(folded <= words for words in _YES_NO):
        yes = sum(count for text, count in named.items() if text.lower() in ("yes", "true", "y", "t", "1"))
        column = Column(kind="yes/no", missing="yes" if yes > named.total() / 2 else "no")
        return ColumnDraft(name, column, " and ".join(sorted(folded, reverse=True)))
    return _categories(cells, named, numbers)


def _categories(cells: Cells, named: Counter[str], numbers: Numbers) -> ColumnDraft:
    name, plain = cells.name, _plain_name(cells.name)
    if len(named) > MOST_CATEGORIES and cells.share(_DATE) >= _MOST:
        return ColumnDraft(name, None, "dates: write them as numbers")
    if _OF_A_PERSON.search(plain) or (len(named) > MOST_CATEGORIES and _NAME.search(plain)):
        return ColumnDraft(name, None, "names: of persons, it seems")
    reason = _why_an_id(cells, plain, len(named), named.total()) if _ID.search(plain) else ""
    if reason:
        return _left_out_as(reason, cells)
    frequent = [one for one, count in named.items() if count >= FEWEST_OF_A_CATEGORY and one != OTHER]
    frequent = sorted(sorted(frequent, key=lambda one: -named[one])[:MOST_CATEGORIES])
    if not frequent:
        return ColumnDraft(name, None, "free text" if len(named) < named.total() else "a name of its own in each row")
    rare = Counter({one: count for one, count in named.items() if one not in frequent})
    lost = f"{len(rare):,} rare values ({rare.total():,} rows) count as other" if rare else ""
    warnings = []
    if rare.total() > _MAINLY * named.total():
        warnings.append("most rows count as other. Group the values, or leave the column out.")
    for word in frequent:
        if word.casefold() in _NOTHING | {"unknown"}:
            warnings.append(f"{word!r} is a category of its own. If it means missing, move it to missing_codes.")
    why = "codes" if numbers.total else f"{len(named):,} different texts"
    column = Column(kind="category", values=tuple(frequent))
    return ColumnDraft(name, column, why, lost, tuple(warnings), rare.total())


_AFTER = "If it is known only after the label, leave it out."
_COPY = "a copy of the label, perhaps under other names. Leave it out: a model would learn nothing else."
_DETERMINES = f"each value has one label. {_AFTER}"
_BY_PRESENCE = f"only rows of one label have a value. {_AFTER}"
_SEPARATES = f"its numbers separate the classes without an error. {_AFTER}"
_LINEAR = "the label in another unit, it seems. If so, leave it out."
ABOUT_LABEL = frozenset({_COPY, _DETERMINES, _BY_PRESENCE, _SEPARATES, _LINEAR})
"""Warnings of columns that tell the label."""
_FEWEST_TOLD, _FEWEST_OTHERS, _FEWEST_EACH, _TRIED_TOLD = 30, 10, 5, 200
"""Rows, rows that are not of the most frequent label, and rows of each value from which on a column may tell the label;
and rows that are tried first."""
_ALL_LINEAR = 1.0 - 1e-9


def about_label(cells: Sequence[Any], labels: Sequence[Any]) -> tuple[str, ...]:
    """Return a warning if a column tells the label of every row; nothing otherwise.

    It is a copy, determines the label by values that repeat or by having one at all, separates classes as a number, or
    is a linear function of a number.
    """
    step = max(len(cells) // _TRIED_TOLD, 1)
    if not _may_tell(_labelled(cells[::step], labels[::step])):
        return ()
    rows = _labelled(cells, labels)
    present = [(cell, label) for cell, label in rows if cell is not None]
    counts = Counter(label for _, label in rows)
    if counts.total() - max(counts.values(), default=0) < _FEWEST_OTHERS or len(rows) < _FEWEST_TOLD:
        return ()
    found = _told_by_presence(rows) if len({label for _, label in present}) < 2 else _told(present)
    return (found,) if found else ()


_SITE = re.compile(r"(?:site|hospital|centre|center|clinic)s?(?:[ _-]?(?:id|name|nr|no|number|code))?")


def about_site(name: str) -> tuple[str, ...]:
    """Return a note on a column that seems to say on which site a row is, by its name."""
    if not _SITE.fullmatch(_plain_name(name)):
        return ()
    return (f"if it says on which site a row is, use --site {name}: then each site is a client, and it is no feature.",)


def _labelled(cells: Sequence[Any], labels: Sequence[Any]) -> list[tuple[str | None, str]]:
    """Return the text of each cell, None for a missing one, and of the label, in rows with a label."""
    return [
        (None if is_missing(cell) else str(cell).strip(), str(label).strip().casefold())
        for cell, label in zip(cells, labels, strict=True)
        if not is_missing(label)
    ]


def _may_tell(rows: Sequence[tuple[str | None, str]]) -> bool:
    """Return True if no value but a missing one stands next to two labels."""
    by_value: dict[str, str] = {}
    return all(cell is None or by_value.setdefault(cell, label) == label for cell, label in rows)


def _told_by_presence(rows: Sequence[tuple[str | None, str]]) -> str:
    """Return whether rows with a value have one label and all others another one."""
    by_presence = {
        is_present: {label for cell, label in rows if (cell is not None) == is_present} for is_present in (True, False)
    }
    alone = all(len(labels) == 1 for labels in by_presence.values())
    return _BY_PRESENCE if alone and by_presence[True] != by_presence[False] else ""


def _told(present: Sequence[tuple[str | None, str]]) -> str:
    """Return how a column tells the label in rows in which it has a value; empty if it does not."""
    rows = [(cell, label) for cell, label in present if cell is not None]
    if len(rows) < _FEWEST_TOLD or not _may_tell(rows):
        return ""
    pairs, labels = {(cell.casefold(), label) for cell, label in rows}, {label for _, label in rows}
    repeated = len(rows) >= _FEWEST_EACH * len(pairs)
    if all(cell == label for cell, label in pairs) or (repeated and len(pairs) == len(labels)):
        return _COPY
    return _DETERMINES if repeated else _told_by_number(rows, len(labels))


def _told_by_number(rows: Sequence[tuple[str, str]], num_classes: int) -> str:
    """Return how numbers that hardly repeat tell the label; empty if they do not."""
    try:
        values = np.array([float(cell) for cell, _ in rows])
    except ValueError:
        return ""
    order = np.argsort(values, kind="stable")
    labels = [label for _, label in rows]
    changes = sum(labels[a] != labels[b] for a, b in pairwise(order))
    if changes == num_classes - 1 and num_classes <= MOST_CLASSES:
        return _SEPARATES
    try:
        numbers = np.array([float(label) for label in labels])
    except ValueError:
        return ""
    if num_classes <= MOST_CLASSES or not (np.isfinite(values).all() and np.isfinite(numbers).all()):
        return ""
    with np.errstate(all="ignore"):
        return _LINEAR if abs(np.corrcoef(values, numbers)[0, 1]) > _ALL_LINEAR else ""


def drafted_label(cells: Cells, decimal: str, known: Mapping[float, int] = _NO_CODES) -> tuple[Label, list[str]]:
    """Infer the label, and what a person must know of its classes or of rows without a label."""
    numbers = cells.numbers(decimal)
    codes = missing_codes(numbers, known)
    judged, name = numbers.without(codes), cells.name
    notes = [f"{code:g} ({numbers.count_of(code):,}) is read as missing" for code in codes]
    many = len(judged.distinct) > MOST_CLASSES or not judged.whole
    if many and judged.total > _MAINLY * (judged.total + judged.words.total()):
        if judged.words:
            notes.append(f"no such numbers, so these rows are dropped: {words_named(judged.words)}")
        written: dict[str, Any] = {"unit": judged.unit, "thousands": judged.thousands, "missing_codes": tuple(codes)}
        return Label(column=name, bounds=bounds_of_label(judged.all_values), **written), notes
    of_words = numbers.words.total() > (1 - _MOST) * cells.num_present or not numbers.total
    spelt = cells.texts(with_words=of_words)
    nothing = [one for one in spelt if one.casefold() in _NOTHING or (codes and _is_one_of(one, codes))]
    if len(spelt) - len(nothing) < 2:
        nothing, notes = [], []
    notes = [f"{one!r} ({spelt[one]:,}) is read as missing" for one in nothing]
    kept = Counter({one: count for one, count in spelt.items() if one not in nothing})
    named = by_usual_spelling(kept)
    fewest = min(FEWEST_OF_A_CATEGORY, max(kept.total() // 10, 1))
    frequent = [one for one, count in named.items() if count >= fewest]
    if not 2 <= len(frequent) <= MOST_CLASSES:
        raise _no_label(name, named, frequent, numbers)
    try:
        order = sorted(frequent, key=float)
    except ValueError:
        order = sorted(frequent)
    label = Label(column=name, classes=tuple(order), missing_codes=tuple(nothing))
    return label, [*notes, *_notes_on_classes(order, kept, named)]


def _is_one_of(text: str, codes: Collection[float]) -> bool:
    try:
        return float(text) in codes
    except ValueError:
        return False


def _no_label(name: str, named: Counter[str], frequent: Sequence[str], numbers: Numbers) -> ConfigurationError:
    """Return the refusal of a column that is neither classes nor numbers."""
    got = f"{len(named):,} values, of which {len(frequent):,} are frequent"
    if len(named) <= 1:
        got = "".join(f"{one!r} alone" for one in named) or "no value"
    elif numbers.total:
        got += f" and {numbers.total:,} of {numbers.total + numbers.words.total():,} cells are numbers"
    return ConfigurationError(
        f"Expected a label of 2 to {MOST_CLASSES} frequent classes or mostly of numbers in the column {name!r}, got "
        f"{got}. Name another column with --label, or group its values.",
        kind="wrong-type",
        setting="label",
    )


def by_usual_spelling(spelt: Counter[str]) -> Counter[str]:
    """Return how often each value occurs, by its most common spelling."""
    names = _usual_spellings(spelt)
    named: Counter[str] = Counter()
    for one, count in spelt.items():
        named[names[one.casefold()]] += count
    return named


def _usual_spellings(spelt: Counter[str]) -> dict[str, str]:
    """Return the most common spelling of each value, by the value without regard to case."""
    names: dict[str, str] = {}
    for one, _ in spelt.most_common():
        names.setdefault(one.casefold(), one)
    return names


def _notes_on_classes(classes: Sequence[str], spelt: Counter[str], named: Counter[str]) -> list[str]:
    """Return what a person must know: other spellings of the classes, and values too rare to be one."""
    names = _usual_spellings(spelt)
    others = sorted(one for one in spelt if one not in classes and names[one.casefold()] in classes)
    notes = [f"{', '.join(others[:_MOST_READ])} are read as these"] if others else []
    rare = [f"{one!r} ({count:,})" for one, count in named.most_common() if one not in classes]
    return notes + ([f"too rare to be a class: {', '.join(rare[:_MOST_READ])}"] if rare else [])


def bounds_of_label(values: NDArray[np.float64]) -> tuple[float, float]:
    """Bounds of a number to be predicted: narrower, where a few extreme ones would make all others one."""
    wide = bounds_of(values) or _rounded_bounds(float(values.min()), float(values.max()))
    narrow = bounds_of(values, _FAR) or wide
    return narrow if wide[1] - wide[0] > _TIMES * (narrow[1] - narrow[0]) else wide


def bounds_of(values: NDArray[np.float64], extreme: float = _EXTREME) -> tuple[float, float] | None:
    """Bounds of all but the most extreme values; None where nearly all are one value and too few are others."""
    low, high = (float(one) for one in np.quantile(values, [extreme, 1.0 - extreme]))
    if low == high:
        others = values[values != low]
        if len(others) < FEWEST_OF_A_CATEGORY:
            return None
        ends = np.quantile(others, [extreme, 1.0 - extreme])
        low, high = min(low, float(ends[0])), max(high, float(ends[1]))
    return _rounded_bounds(low, high)


def _rounded_bounds(low: float, high: float) -> tuple[float, float]:
    """Round outwards to a step of 1, 2 or 5 times a power of ten, at least a quarter of the range."""
    step = _step(max((high - low) / _PARTS, abs(high) * 1e-9, 1e-300), up=True)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _clean(first * step), _clean(max(last, first + 1) * step)


def _step(size: float, *, up: bool) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten, upwards or downwards."""
    power = 10.0 ** math.floor(math.log10(size))
    steps = (1.0, 2.0, 5.0, 10.0)
    if up:
        return next(one for one in steps if one * power >= size * (1.0 - 1e-9)) * power
    return max(one for one in steps if one * power <= size * (1.0 + 1e-9)) * power


def _clean(value: float, digits: int = 12) -> float:
    return 0.0 if value == 0 else round(value, digits - 1 - math.floor(math.log10(abs(value))))


def _nearest(value: float, bounds: tuple[float, float]) -> float:
    """Return a value rounded to a step that is small against the bounds, and between them."""
    step = _step((bounds[1] - bounds[0]) / _FINE, up=False)
    return min(max(_clean(round(value / step) * step), bounds[0]), bounds[1])
