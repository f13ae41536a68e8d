"""Mutants: small bugs put into the code one by one, each of which a test must notice.

``make mutants`` (or ``python tests/mutants.py``) tries all that are written in ``mutants.toml`` and a sample of those
that are generated there from functions that carry privacy: a comparison off by one, a check that is skipped, a minimum
for a maximum, a factor, an operand or an argument dropped. ``ARGS="--seed 7"`` takes another sample, ``ARGS=--all``
tries all of them, ``ARGS="budget"`` those with the word in their names. A mutant that survives is a promise nobody
tests: write the test, or say in the file why nothing can notice it.

The generator is our own, because the tools that generate mutants run all tests in a new process for each: hours here.
This one notes in a first run which test reaches which function, starts with the quickest of them, and forks a process
that has loaded other people's packages already.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import itertools
import json
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = {".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache", "build", "dist", "runs"}
"""Folders of the root alone: app/runs is code."""
LOADED = ["pytest", "hypothesis", "numpy.testing", "scipy.optimize", "scipy.signal", "scipy.stats", "torch"]
WORKERS, PARTS = 2, 10
"""Of the first run, whose files take long or not."""
SAMPLE = 200
"""How many of the generated mutants are tried: those of a function take turns with those of others."""
SHORTEST_S, LONGER = 30.0, 5.0
"""A mutant never ends if its tests take this long and so many times as long as without it."""
PASSED, FAILED = 0, 1

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
COMPARISONS |= {"is not": "is", "not in": "in"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "**": "*", "&": "|", "|": "&", "and": "or", "or": "and"}
NAMES = {"min": "max", "any": "all", "floor": "ceil", "minimum": "maximum", "fmin": "fmax"}
NAMES |= {new: old for old, new in NAMES.items()}
WRAPPERS = {"sqrt", "abs", "ceil", "floor", "cumsum"}
NO_BUGS = {"dtype", "strict", "stacklevel", "extra", "encoding", "out", "copy"}
"""Arguments that say nothing of what is computed."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One bug.

    Parameters
    ----------
    file : str
        Where, from the root.
    start, stop : int
        Of the bytes that it replaces.
    new : str
        What stands in their place.
    function : str
        The function they are in; "" is the module.
    name : str
        What is wrong with it; empty for a generated one, which is called by its lines.
    """

    file: str
    start: int
    stop: int
    new: str
    function: str = ""
    name: str = ""

    @cached_property
    def lines(self) -> tuple[str, str]:
        """The lines without and with it."""
        text = (ROOT / self.file).read_bytes()
        first, last = text.rfind(b"\n", 0, self.start) + 1, text.find(b"\n", self.stop)
        parts = text[first : self.start], text[self.start : self.stop], text[self.stop : last]
        before, old, behind = (part.decode() for part in parts)
        return " ".join(f"{before}{old}{behind}".split()), " ".join(f"{before}{self.new}{behind}".split())

    @property
    def called(self) -> str:
        """What the command calls it."""
        return self.name or "{}: {} -> {}".format(self.function, *self.lines)


@dataclass
class Source:
    """A file of the product, what is to be made of it, and which tests should notice.

    Parameters
    ----------
    file : str
        From the root.
    tests : list of str
        From the folder of the tests.
    functions : list of str
        Those for which mutants are generated.
    written : list of list of str
        Name, text and what replaces it, of mutants that no generator makes; the text is there once.
    equivalent : list of list of str
        The line, the line with the mutant, and the reason why nothing can notice it.
    """

    file: str
    tests: list[str]
    functions: list[str] = field(default_factory=list)
    written: list[list[str]] = field(default_factory=list)
    equivalent: list[list[str]] = field(default_factory=list)

    @cached_property
    def text(self) -> bytes:
        return (ROOT / self.file).read_bytes()

    @cached_property
    def bodies(self) -> dict[str, ast.FunctionDef]:
        """All functions and methods by their names."""
        found: dict[str, ast.FunctionDef] = {}

        def look(node: ast.AST, place: str) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    look(child, f"{place}{child.name}.")
                elif isinstance(child, ast.FunctionDef):
                    found[place + child.name] = child

        look(ast.parse(self.text), "")
        return found

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each line."""
        return [0, *(match.end() for match in re.finditer(rb"\n", self.text))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node."""
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return self.starts[place[0] - 1] + place[1], self.starts[place[2] - 1] + place[3]

    def function_at(self, offset: int) -> str:
        """The function that an offset is in, or ""."""
        spans = {name: self.span(node) for name, node in self.bodies.items()}
        return next((name for name, (start, stop) in spans.items() if start <= offset < stop), "")

    def misplaced(self) -> list[str]:
        """What no longer fits the file, a line each."""
        counts = ((name, old, self.text.count(old.encode())) for name, old, _ in self.written)
        lost = [
            f"{self.file}: expected once, got {count} times, the text of the mutant {name!r}: {old!r}"
            for name, old, count in counts
            if count != 1
        ]
        lost += [f"{self.file}: expected a function {name!r}" for name in self.functions if name not in self.bodies]
        known = [] if lost else [mutant.lines for mutant in self.all_generated]
        wrong = [pair for *pair, _ in self.equivalent if tuple(pair) not in known]
        return lost + [f"{self.file}: nothing generates {old!r} -> {new!r}" for old, new in wrong]

    def mutants(self) -> list[Mutant]:
        """Those that are written."""
        found = ((self.text.index(old.encode()), old, new, name) for name, old, new in self.written)
        return [
            Mutant(self.file, start, start + len(old.encode()), new, self.function_at(start), name)
            for start, old, new, name in found
        ]

    @cached_property
    def all_generated(self) -> list[Mutant]:
        """Those of its functions, with those that nothing can notice."""
        return [
            Mutant(self.file, *change, function)
            for function in self.functions
            for node in _mutable(self.bodies[function])
            for change in self._changes(node)
        ]

    def generated(self) -> list[Mutant]:
        """Those of its functions."""
        known = {(old, new) for old, new, _ in self.equivalent}
        return [mutant for mutant in self.all_generated if mutant.lines not in known]

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """What is replaced at a node: start, stop, new text."""

        def text(one: ast.AST) -> str:
            start, stop = self.span(one)
            return f"({self.text[start:stop].decode()})"

        def between(left: ast.AST, right: ast.AST, others: dict[str, str]) -> Iterator[tuple[int, int, str]]:
            start, stop = self.span(left)[1], self.span(right)[0]
            gap = self.text[start:stop].decode()
            word = " ".join(gap.strip("() \n").split())
            if word in others:
                yield start, stop, gap.replace(word, others[word])

        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right in itertools.pairwise(sides):
                    yield from between(left, right, COMPARISONS)
                if len(sides) == 3:
                    yield self.span(node)[0], self.span(sides[1])[0], ""
                    yield self.span(sides[1])[1], self.span(node)[1], ""
            case ast.BinOp(left=left, right=right) if not {type(left), type(right)} & {ast.JoinedStr, ast.List}:
                yield from between(left, right, OPERATORS)
                if isinstance(node.op, ast.Mult | ast.Add | ast.Sub | ast.Div):
                    yield *self.span(node), text(left)
                if isinstance(node.op, ast.Mult):
                    yield *self.span(node), text(right)
            case ast.BoolOp(values=values):
                if len(values) == 2:
                    yield from between(*values, OPERATORS)
                for value in values:
                    word = " and " if isinstance(node.op, ast.And) else " or "
                    yield *self.span(node), f"({word.join(text(other) for other in values if other is not value)})"
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield *self.span(node), text(node.operand)
            case ast.Constant(value=bool(value)):
                yield *self.span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield *self.span(node), str(value + 1)
            case ast.Constant(value=float(value)):
                yield *self.span(node), str(value / 2.0 or 1.0)
            case ast.If():
                yield *self.span(node.test), "False"
                if not isinstance(node.body[-1], ast.Raise):
                    yield *self.span(node.test), "True"
            case ast.IfExp():
                yield *self.span(node), text(node.body)
                yield *self.span(node), text(node.orelse)
            case ast.comprehension(ifs=[only]):
                yield *self.span(only), "True"
            case ast.AugAssign():
                yield *self.span(node), "pass"
            case ast.Expr(value=ast.YieldFrom()):
                yield *self.span(node), "pass"
            case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).startswith(("logger", "warn")):
                yield *self.span(node), "pass"
            case ast.Call(func=function) if "errstate" not in ast.unparse(function):
                name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
                if name in NAMES:
                    stop = self.span(function)[1]
                    yield stop - len(name), stop, NAMES[name]
                if name in WRAPPERS and len(node.args) == 1:
                    yield *self.span(node), text(node.args[0])
                if name in {"hypot", *NAMES} and len(node.args) > 1:
                    for argument in node.args:
                        less = copy.copy(node)
                        less.args = [other for other in node.args if other is not argument]
                        yield *self.span(node), ast.unparse(less)
                for keyword in node.keywords:
                    if keyword.arg and keyword.arg not in NO_BUGS:
                        less = copy.copy(node)
                        less.keywords = [other for other in node.keywords if other is not keyword]
                        yield *self.span(node), ast.unparse(less)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """What may be mutated in a function: no signature, nothing said of an error, no argument of ``NO_BUGS``."""
    for child in ast.iter_child_nodes(node):
        in_signature = isinstance(node, ast.FunctionDef) and not isinstance(child, ast.stmt)
        if in_signature or isinstance(child, ast.Raise | ast.JoinedStr) or child is getattr(node, "annotation", None):
            continue
        if isinstance(child, ast.keyword) and child.arg in NO_BUGS:
            continue
        yield child
        yield from _mutable(child)


def read() -> list[Source]:
    """What ``mutants.toml`` says."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Source(file, **said) for file, said in table.items()]


def in_turns(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """Generated mutants in the order in which they are drawn: one of each function, then another of each."""
    drawn = sorted((random.Random(f"{seed} {one.file} {one.called}").random(), one) for one in mutants)
    turns: Counter[tuple[str, str]] = Counter()
    order: list[tuple[int, float, Mutant]] = []
    for rank, mutant in drawn:
        turns[mutant.file, mutant.function] += 1
        order.append((turns[mutant.file, mutant.function], rank, mutant))
    return [mutant for _, _, mutant in sorted(order)]


class Reached:
    """A pytest plugin: which functions each test reaches and how long it takes, or the order of the tests by that."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = seconds
        self.by_test: dict[str, tuple[list[str], float]] = {}

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.seconds is not None:
            items.sort(key=lambda item: self.seconds.get(item.nodeid, float("inf")))

    def pytest_runtest_logreport(self, report) -> None:
        reached, seconds = self.by_test.get(report.nodeid, ([], 0.0))
        new, builtins.reached = getattr(builtins, "reached", set()), set()  # type: ignore[attr-defined]
        self.by_test[report.nodeid] = [*reached, *new], seconds + report.duration


def _run(root: Path, tests: Sequence[str], plugin: Reached, log: Path) -> None:
    """Run tests in a copy of the tree, in a process of their own."""
    os.setsid()
    os.chdir(root)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(root))
    # Compiled files of the first run serve all others: a mutated file's time says that it is another.
    sys.dont_write_bytecode = plugin.seconds is not None
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "MURMURFL_CACHE": str(log.parent / "cache")}
    import pytest

    builtins.reached = set()  # type: ignore[attr-defined]
    every_case = "not (deployment or examples or docs or long or base or frameworks)"
    arguments = ["-x", "-q", "-m", every_case, "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    code = pytest.main(arguments, plugins=[plugin])
    log.with_suffix(".json").write_text(json.dumps(plugin.by_test))
    sys.stdout.flush()
    os._exit(int(code))


def tested(root: Path, tests: Sequence[str], plugin: Reached, log: Path, longest_s: float) -> tuple[int, str]:
    """Run tests in a copy; pytest's exit code, and the test that failed or the last lines."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=_run, args=(root, tests, plugin, log))
    process.start()
    process.join(longest_s)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
        return FAILED, "it never ended"
    said = log.read_text(encoding="utf-8") if log.exists() else ""
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(.*?)( - .*)?$", said, flags=re.MULTILINE)
    return process.exitcode, failed[1] if failed else "\n".join(said.splitlines()[-15:])


def not_copied(folder: str, names: Sequence[str]) -> set[str]:
    """Names in a folder of the tree that a copy does without."""
    return {name for name in names if name == "__pycache__" or (Path(folder) == ROOT and name in NOT_COPIED)}


def each(jobs: Sequence[Callable[[Path], str]], folder: Path) -> Iterable[str]:
    """What every job returns for a copy of the tree that is its own while it runs, in their order."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(WORKERS):
        one = folder / str(number)
        if not one.exists():
            shutil.copytree(ROOT, one, ignore=not_copied, symlinks=True)
        copies.put(one)

    def run(job: Callable[[Path], str]) -> str:
        one = copies.get()
        try:
            return job(one)
        finally:
            copies.put(one)

    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(run, jobs)


@dataclass
class Trial:
    """The first run and what it told.

    Parameters
    ----------
    sources : list of Source
        All that mutants are put into.
    folder : Path
        Where the copies are.
    """

    sources: list[Source]
    folder: Path
    by_test: dict[str, tuple[list[str], float]] = field(default_factory=dict)

    def without(self, tests: Sequence[str]) -> Callable[[Path], str]:
        """The job of running tests without a mutant, but with marks where functions begin."""

        def run(root: Path) -> str:
            log = self.folder / f"first-{root.name}.log"
            for source in self.sources:
                path, lines = root / source.file, source.text.decode().split("\n")
                for name, node in sorted(source.bodies.items(), key=lambda one: -one[1].lineno):
                    first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                    if lines[first.lineno - 1][: first.col_offset].strip():
                        continue  # a function of one line
                    mark = f"__import__('builtins').__dict__.get('reached', set()).add('{source.file}:{name}')"
                    lines.insert(first.lineno - 1, " " * first.col_offset + mark)
                path.write_text("\n".join(lines), encoding="utf-8")
            code, said = tested(root, tests, Reached(), log, 3600.0)
            for source in self.sources:
                shutil.copy2(ROOT / source.file, root / source.file)
                py_compile.compile(str(root / source.file))
            self.by_test |= json.loads(log.with_suffix(".json").read_text()) if code == PASSED else {}
            return "" if code == PASSED else f"Without a mutant `pytest {' '.join(tests)}` ends with {code}: {said}"

        return run

    def of(self, mutant: Mutant) -> Callable[[Path], str]:
        """The job of running the tests that should notice a mutant."""
        source = next(one for one in self.sources if one.file == mutant.file)
        place = f"{mutant.file}:{mutant.function}"
        all_s = sum(seconds for name, (_, seconds) in self.by_test.items() if name.split("::")[0][6:] in source.tests)
        reaching = {name: seconds for name, (reached, seconds) in self.by_test.items() if place in reached}

        def run(root: Path) -> str:
            since, path, log = time.monotonic(), root / mutant.file, self.folder / f"mutant-{root.name}.log"
            path.write_bytes(source.text[: mutant.start] + mutant.new.encode() + source.text[mutant.stop :])
            os.utime(path, (1.0, 1.0))
            tests = [f"tests/{test}" for test in source.tests]
            code, said = tested(root, tests, Reached(reaching), log, SHORTEST_S + LONGER * all_s)
            shutil.copy2(ROOT / mutant.file, path)
            word = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"BROKEN ({code})")
            said = f"{len(reaching)} tests reach it" if code == PASSED else said
            return f"{word:<9} {time.monotonic() - since:5.1f} s  {mutant.called} ({mutant.file}): {said}"

        return run


def main(arguments: Sequence[str]) -> int:
    """Try mutants; the exit code, not 0 if one survived."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=", description="Put in mutants, which tests must notice.")
    parser.add_argument("words", nargs="*", help="try those with these words in their names, sampled or not")
    parser.add_argument("--seed", type=int, default=0, help="of the sample of generated mutants (0)")
    parser.add_argument("--all", action="store_true", help="try all generated mutants")
    asked = parser.parse_args(arguments)
    sources = read()
    if lost := [line for source in sources for line in source.misplaced()]:
        print(*lost, "Give each the text the code has now, such that it is still the bug it is called.", sep="\n")
        return 2
    made = in_turns((mutant for source in sources for mutant in source.generated()), asked.seed)
    words = " ".join(asked.words)
    chosen = [mutant for source in sources for mutant in source.mutants()]
    chosen += made if asked.all or words else made[:SAMPLE]
    chosen = [mutant for mutant in chosen if words in f"{mutant.called} {mutant.file}"]
    started, survivors = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="murmurfl-mutants-") as name:
        reached = [source for source in sources if source.file in {mutant.file for mutant in chosen}]
        trial = Trial(reached, Path(name))
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "murmurfl"
        if cache.is_dir():  # a copy, because a mutant may write to it
            shutil.copytree(cache, Path(name) / "cache")
        tests = sorted({f"tests/{test}" for source in reached for test in source.tests})
        parts = [part for number in range(PARTS) if (part := tests[number::PARTS])]
        if broken := [said for said in each([trial.without(part) for part in parts], Path(name)) if said]:
            print(*broken, sep="\n")
            return 2
        print(f"All tests pass without a mutant ({time.monotonic() - started:.0f} s).", flush=True)
        for line in each([trial.of(mutant) for mutant in chosen], Path(name)):
            survivors += not line.startswith("killed")
            print(line, flush=True)
    count = sum(bool(mutant.name) for mutant in chosen)
    print(
        f"{count} mutants that are written and {len(chosen) - count} of {len(made)} that are generated: "
        f"{survivors} not killed, {time.monotonic() - started:.0f} s."
    )
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
