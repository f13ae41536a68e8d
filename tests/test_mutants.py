"""The mutants of tests/mutants.py fit the code: `make mutants` then says which of them no test notices."""

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


def test_the_text_of_every_mutant_is_in_the_code_exactly_once():
    assert mutants.misplaced(mutants.MUTANTS) == []


def test_every_mutant_is_another_bug_with_a_name_and_tests_that_exist():
    assert len(mutants.MUTANTS) >= 20
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert sum(mutant.file.startswith("privacy/") for mutant in mutants.MUTANTS) >= 20
    for mutant in mutants.MUTANTS:
        assert mutant.new != mutant.old
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text()


def test_a_copy_of_the_tree_has_all_code_and_tests():
    for folder in ("app", "clients", "privacy", "strategies", "tests"):
        for place, folders, files in os.walk(ROOT / folder):
            assert mutants.not_copied(place, [*folders, *files]) <= {"__pycache__"}
    assert mutants.not_copied(str(ROOT), ["app", "runs", ".venv"]) == {"runs", ".venv"}


def test_a_text_that_is_not_there_is_said_by_its_mutants_name(tmp_path, capsys, monkeypatch):
    lost = mutants.Mutant("no noise at all", "privacy/machine/prefix_sums.py", "no such text", "", ())
    (said,) = mutants.misplaced([lost])
    assert said == (
        "privacy/machine/prefix_sums.py: expected once, got 0 times, the text of the mutant 'no noise at all': "
        "'no such text'"
    )
    monkeypatch.setattr(mutants, "MUTANTS", (lost,))
    assert mutants.main([]) == 2
    assert "Give each the text the code has now" in capsys.readouterr().out


@pytest.mark.long
def test_a_mutant_that_survives_or_breaks_ends_the_command_with_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "mutated.py").write_text("VALUE = 1\n")
    (tmp_path / "test_it.py").write_text("from mutated import VALUE\n\n\ndef test_it():\n    assert VALUE < 3\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    kinds = {"harmless": "2", "noticed": "3", "no Python": "return"}
    made = [mutants.Mutant(name, "mutated.py", "1", new, ("test_it.py",)) for name, new in kinds.items()]
    monkeypatch.setattr(mutants, "MUTANTS", made)
    assert mutants.main([]) == 1
    _, *lines, total = capsys.readouterr().out.splitlines()
    said = [line.split()[0] for line in lines if any(name in line for name in kinds)]
    assert said == ["SURVIVED", "killed", "BROKEN"]
    assert total.startswith("3 mutants, 2 not killed")
    assert (tmp_path / "mutated.py").read_text() == "VALUE = 1\n", "the tree itself is left alone"
