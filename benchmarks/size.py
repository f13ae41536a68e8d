"""How large the house is: ``python -m benchmarks.size [--json FILE]``.

A number is a symptom. It says whether a change made the house smaller by a missing concept, by deletion or by a
library; denser code would show as fewer lines and as many statements.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("app", "clients", "privacy", "strategies")
OTHERS = ("tests", "benchmarks", "examples")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources(*folders: str) -> dict[str, str]:
    """Return the Python files below these folders, by their path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def counts(texts: Mapping[str, str]) -> dict[str, float]:
    """Files, lines, statements and the share of lines that import.

    A docstring is no statement. A statement counts once, however many lines it has.
    """
    statements = imports = lines = 0
    for text in texts.values():
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt) and not _is_docstring(node):
                statements += 1
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
    share = round(100 * imports / lines, 2)
    return {"files": len(texts), "lines": lines, "statements": statements, "import lines, %": share}


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def declarations(texts: Mapping[str, str]) -> Counter[str]:
    """How often each name is declared with a type: fields of classes, and parameters of their constructors."""
    found: Counter[str] = Counter()
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                continue
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found[part.target.id] += 1
                elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    arguments = (*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs)
                    found.update(one.arg for one in arguments if one.annotation is not None)
    return found


def setting_declarations() -> dict[str, int]:
    """Return the same for the keys of a run's configuration, most often declared first."""
    from murmurfl.app.settings.run_config import RunConfig

    found = declarations(sources(*PRODUCT))
    keys = {name: found[name] for name in RunConfig.__dataclass_fields__}
    return dict(sorted(keys.items(), key=lambda item: (-item[1], item[0])))


def ancestors() -> dict[str, int]:
    """How many ancestors of our own each class has, most first; tables and options, which are declarations, aside."""
    found = {}
    for path in sources(*PRODUCT):
        if path.endswith("__main__.py"):  # runs when it is imported
            continue
        module = importlib.import_module(
            "murmurfl." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        for thing in vars(module).values():
            if isinstance(thing, type) and thing.__module__ == module.__name__:
                ours = [base for base in thing.__mro__[1:] if base.__module__.startswith("murmurfl.")]
                own = [base for base in ours if not (vars(base).get("_table") or base.__name__.endswith("Options"))]
                found[f"{thing.__module__}.{thing.__qualname__}"] = len(own)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def same_names() -> dict[str, int]:
    """Names that several files have, packages' own apart."""
    names = Counter(Path(path).name for path in sources(*PRODUCT))
    return {name: count for name, count in sorted(names.items()) if count > 1 and name != "__init__.py"}


@contextmanager
def called(seen: Callable[[str], None]) -> Iterator[None]:
    """Tell which file of ours each function that is called meanwhile, in this thread, stands in."""

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            name = Path(path).relative_to(ROOT).as_posix()
            if name.startswith(PRODUCT):
                seen(name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def release() -> dict[str, int]:
    """Return calls of functions of ours, and files and rooms they stand in, for one simulated release: the second."""
    from flwr.clientapp import ClientApp
    from murmurfl.app import simulate

    files: Counter[str] = Counter()
    answered: dict[Any, int] = defaultdict(int)
    call = ClientApp.__call__

    def watched(self: Any, message: Any, context: Any) -> Any:
        if message.metadata.message_type.startswith("train"):
            answered[message.metadata.dst_node_id] += 1
            if answered[message.metadata.dst_node_id] == 2 and not files:
                with called(lambda name: files.update([name])):
                    return call(self, message, context)
        return call(self, message, context)

    ClientApp.__call__ = watched
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            simulate({"num-clients": 2, "clients-per-round": 2, "num-rounds": 3}, engine="inprocess")
    finally:
        ClientApp.__call__ = call
    return {"calls": files.total(), "files": len(files), "rooms": len({str(Path(name).parent) for name in files})}


def preparation() -> dict[str, int]:
    """Return the same for what makes an experiment of a configuration."""
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.settings.run_config import RunConfig

    files: Counter[str] = Counter()
    prepare(RunConfig())  # reads the data
    config = RunConfig(seed=2)
    with called(lambda name: files.update([name])):
        prepare(config)
    return {"calls": files.total(), "files": len(files), "rooms": len({str(Path(name).parent) for name in files})}


def page_words() -> dict[str, int]:
    """Words of each page, as ``wc`` counts them."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in pages}


def measure() -> dict[str, Any]:
    """All figures."""
    settings, heirs = setting_declarations(), ancestors()
    return {
        **{folder: counts(sources(folder)) for folder in (*PRODUCT, *OTHERS)},
        "product": counts(sources(*PRODUCT)),
        "landing": {folder: len(list((ROOT / folder).glob("*.py"))) for folder in PRODUCT},
        "declarations of a setting": {"most": max(settings.values()), "mean": round(_mean(settings), 2)},
        "declared most often": dict(list(settings.items())[:8]),
        "ancestors": {"most": max(heirs.values()), "above 4": sum(count > 4 for count in heirs.values())},
        "files of one name": same_names(),
        "one release": release(),
        "one preparation": preparation(),
        "docs": {"pages": len(page_words()), "words": sum(page_words().values())},
    }


def _mean(values: Mapping[str, int]) -> float:
    return sum(values.values()) / len(values)


def table(measured: Mapping[str, Any]) -> str:
    """One line for each row of figures."""
    return "\n".join(
        f"{name:26} " + ", ".join(f"{value:g} {key}" for key, value in row.items()) for name, row in measured.items()
    )


def main() -> None:
    """Print the figures; keep them with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file to write them to")
    told = parser.parse_args()
    measured = measure()
    print(table(measured))
    if told.json is not None:
        told.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
