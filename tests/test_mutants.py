"""The mutants of tests/mutants.toml fit the code: `make mutants` then says which of them no test notices."""

import ast
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("mutants", Path(__file__).with_name("mutants.py"))
assert SPEC is not None
assert SPEC.loader is not None
mutants = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = mutants  # where dataclasses look
SPEC.loader.exec_module(mutants)

TOY = """
def admitted(ask, left, names):
    if left < 1 or ask.trusted:
        raise RefusedError(f"Expected more than {left + 1}.")
    ask.record(names, mu=2.5, strict=True)
    return min(left, 0.5 * ask.size) if names else None
"""
OF_TOY = """
if left <= 1 or ask.trusted: | if left < 2 or ask.trusted: | if left < 1 and ask.trusted: | if ((left < 1)):
if ((ask.trusted)): | if False: | pass | ask.record(names, strict=True) | ask.record(names, mu=1.25, strict=True)
return max(left, 0.5 * ask.size) if names else None | return min(left) if names else None
return min(0.5 * ask.size) if names else None | return min(left, 0.5 / ask.size) if names else None
return min(left, (0.5)) if names else None | return min(left, (ask.size)) if names else None
return min(left, 0.25 * ask.size) if names else None | return (min(left, 0.5 * ask.size)) | return (None)
"""


def toy(root, monkeypatch, **said):
    monkeypatch.setattr(mutants, "ROOT", root)
    (root / "tests").mkdir(exist_ok=True)
    (root / "toy.py").write_text(TOY)
    return mutants.Source("toy.py", ["test_toy.py"], **said)


def with_it(source, mutant):
    """The function that a mutant is in, or the file, with the mutant: what is beside it parses without it too."""
    start, stop = source.span(source.bodies[mutant.function]) if mutant.function else (0, len(source.text))
    start = source.text.rfind(b"\n", 0, start) + 1
    spoiled = source.text[start : mutant.start] + mutant.new.encode() + source.text[mutant.stop : stop]
    return b"if True:\n" + spoiled if spoiled.startswith(b" ") else spoiled


def test_all_mutants_fit_the_code_and_have_tests():
    sources = mutants.read()
    assert [line for source in sources for line in source.misplaced()] == []
    for test in {test for source in sources for test in source.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text()
    for source in sources:
        for mutant in [*source.mutants(), *source.generated()]:
            assert mutant.lines[0] != mutant.lines[1]
            ast.parse(with_it(source, mutant))
    written = [mutant.name for source in sources for mutant in source.mutants()]
    assert len(set(written)) == len(written) > 100
    assert sum(len(source.generated()) for source in sources) > 4 * mutants.SAMPLE


def test_generated_mutants_are_these(tmp_path, monkeypatch):
    made = toy(tmp_path, monkeypatch, functions=["admitted"]).generated()
    assert {mutant.lines[1] for mutant in made} == {one.strip() for one in OF_TOY.replace("\n", "|").split("|")} - {""}
    assert len(made) == len({mutant.lines[1] for mutant in made})


def test_equivalent_mutants_are_not_tried(tmp_path, monkeypatch):
    pair = ["ask.record(names, mu=2.5, strict=True)", "pass"]
    source = toy(tmp_path, monkeypatch, functions=["admitted"], equivalent=[[*pair, "nobody reads it"]])
    assert source.misplaced() == []
    assert tuple(pair) not in [mutant.lines for mutant in source.generated()]
    assert len(source.generated()) == len(source.all_generated) - 1


def test_a_sample_takes_one_of_each_function_first():
    every = [mutant for source in mutants.read() for mutant in source.generated()]
    functions = {(mutant.file, mutant.function) for mutant in every}
    first, again, other = (mutants.in_turns(every, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert {(mutant.file, mutant.function) for mutant in first[: len(functions)]} == functions
    assert sorted(first, key=repr) == sorted(every, key=repr)


def test_what_no_longer_fits_is_said_by_its_name(tmp_path, monkeypatch, capsys):
    written = [["no noise at all", "no such text", ""]]
    source = toy(tmp_path, monkeypatch, written=written, functions=["gone"], equivalent=[["a", "b", "why"]])
    monkeypatch.setattr(mutants, "read", lambda: [source])
    assert mutants.main([]) == 2
    said = capsys.readouterr().out
    assert "toy.py: expected once, got 0 times, the text of the mutant 'no noise at all': 'no such text'" in said
    assert "toy.py: expected a function 'gone'" in said
    assert "toy.py: nothing generates 'a' -> 'b'" in said
    assert "Give each the text the code has now" in said


def test_a_copy_of_the_tree_has_all_code_and_tests():
    for folder in ("app", "clients", "privacy", "strategies", "tests"):
        for place, folders, files in os.walk(ROOT / folder):
            assert mutants.not_copied(place, [*folders, *files]) <= {"__pycache__"}
    assert mutants.not_copied(str(ROOT), ["app", "runs", ".venv"]) == {"runs", ".venv"}


@pytest.mark.long
def test_a_mutant_that_survives_or_breaks_ends_the_command_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # from where the process of the tests loads the command
    kinds = {"harmless": "2", "noticed": "3", "no Python": "return"}
    written = [[name, "value = 1", f"value = {new}"] for name, new in kinds.items()]
    source = toy(tmp_path, monkeypatch, written=written, functions=["number"])
    (tmp_path / "toy.py").write_text("def number():\n    value = 1\n    return value\n")
    test = "import toy\n\n\ndef test_other():\n    assert toy\n\n\ndef test_it():\n    assert toy.number() < 3\n"
    (tmp_path / "tests" / "test_toy.py").write_text(test)
    monkeypatch.setattr(mutants, "read", lambda: [source])
    assert mutants.main([]) == 1
    _, *lines, total = capsys.readouterr().out.splitlines()
    said = {name: line for line in lines for name in (*kinds, "number: ") if name in line}
    assert [said[name].split()[0] for name in kinds] == ["SURVIVED", "killed", "BROKEN"]
    assert said["number: "].startswith("SURVIVED")
    assert "1 tests reach it" in said["harmless"]
    assert total.startswith("3 mutants that are written and 1 of 1 that are generated: 3 not killed")
    assert "value = 1" in (tmp_path / "toy.py").read_text(), "the tree itself is left alone"
