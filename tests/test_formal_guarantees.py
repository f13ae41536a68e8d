"""What touches privacy says what it guarantees, and nothing else does: the notes **Formal guarantees** of the product.

A public class or function of a module *touches privacy* if one of four things is true of it:

* it is one of :data:`PARTS`, or inherits from one: a guarantee is put together from these, and fails with each;
* it is a function that hands one out: its return annotation names it, so it decides what the part promises;
* it is a function of the library that states a figure: its name has one of :data:`FIGURES`, and it returns
  :data:`NUMBERS`;
* it is a function of one of :data:`DOORS`: modules that bound rows, draw noise, alter a ledger or let messages out.
  Their signatures have plain arrays, paths and ``None``, which the three rules above cannot see. One that returns
  words, or a yes or no, lets nothing out.

It has a note of its own, or its module has one. A method is spoken for by its class. It may add a note where its class
touches privacy, or it does by the second or the third rule. A note is a statement: one that begins with "None", or with
whose guarantees to look up, is none. Files are parsed and not imported.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.harness.imports import parsed

ROOT = Path(__file__).parents[1]
FOLDERS = ("privacy", "clients", "strategies", "app")
PARTS = {
    # What makes what leaves.
    *(
        "LedgeredPrivatizer",
        "PrivatizerBlock",
        "PrivateClient",
        "PrivateClientApp",
        "CorrelatedNoiseMod",
        "Noisy",
        "Stream",
    ),
    *(
        "ClientQuery",
        "QueryPart",
        "Query",
        "TrustedMu2",
        "TrustedFullBatch",
        "TrustedMomentum",
        "Masking",
        "Opener",
        "LocalExecutor",
    ),
    *("Release", "MaskedRelease", "Opening", "PaidSchema"),
    # What it may be, and by what rule.
    *("PrivacyPolicy", "UpdatePolicy", "NoisePlan", "Guarantee", "Loss", "Curve", "Amplification"),
    *("AdmissionRule", "ReleaseRule"),
    *("EvaluationShare", "SampleNode", "UpdateNode", "NodeConfig", "HelperConfig"),
    # What hides it.
    *("Mechanism", "NoiseStream", "NoiseKeys", "ClientKey", "HelperKey"),
    # What remembers it.
    *("Store", "Ledger", "OpeningRecord", "TrustedCheckpoint"),
    # How much one record can move.
    *("Schema", "Records", "Owners", "OwnedSamples", "PerSampleGradients", "CarefulGradients", "CountedGradients"),
    *("LinearGradients", "ModuleGradients", "OwnerGradients", "RowBound", "Moments", "CountedRows"),
    *("Program", "TorchProgram", "ReplayProcess", "TorchGradients", "ModuleMeasure", "SummedBatch", "SummedGradients"),
    *("RecordPlaces", "TableRows", "Encoder", "ImageFile", "ImageFolder"),
    # What was measured against a claim.
    *("AuditResult", "OneRunResult"),
    # What computes a record with models of other frameworks.
    *("Captured", "FunctionGradients", "FunctionProgram", "JaxGradients", "JaxMeasure", "JaxModel", "JaxProgram"),
    *("MLPEstimator", "MLPGradients"),
}
FIGURES = {"mu", "epsilon", "delta", "deltas", "gdp", "sensitivity", "shift", "stds"}
NUMBERS = {"float", "NDArray", "Sensitivity"}
DOORS = {
    "privacy/release/clipping.py",
    "privacy/ledger/repair.py",
    "privacy/noise.py",
    "privacy/release/known_samples.py",
    "app/nodes/supernode.py",
    "app/runs/paid_schema.py",
    "app/runs/personal.py",
    "app/runs/real_fit.py",
    "app/runs/sealed.py",
}
NOTE = re.compile(r"\*\*Formal guarantees\.\*\*|^Formal guarantees\n-+$", flags=re.MULTILINE)
NO_STATEMENT = re.compile(r"(None|Those|That of|As (for|of)|Adds none|In simulation, those)\b")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def note(node):
    """What a docstring says under Formal guarantees; None if it has no such note."""
    _, *after = NOTE.split(ast.get_docstring(node) or "")
    return " ".join(after[0].split()) if after else None


def is_statement(text):
    """Whether a note says something itself."""
    return text is not None and bool(text) and not NO_STATEMENT.match(text)


@functools.cache
def words(node):
    """Every name in an expression; annotations within quotes are read too."""
    return set(re.findall(r"\w+", ast.unparse(node))) if node else set()


def plain(base):
    """The name of a base class, without its module and its arguments."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def known(tree):
    """Names that a file imports or defines as classes: an alias with a part's name is no part."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found


def public(body):
    """Public classes and functions; of a function with overloads the one that has the docstring."""
    found = {node.name: node for node in body if isinstance(node, Definition) and not node.name.startswith("_")}
    return list(found.values())


class Product:
    """The files of the product, and which of their names touch privacy."""

    def __init__(self, root):
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        self.trees = {path.relative_to(root).as_posix(): parsed(path.read_text()) for path in paths}
        self.known = {place: known(tree) for place, tree in self.trees.items()}
        classes = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.parts = set(PARTS)
        heirs = self.parts
        while heirs:
            heirs = {one.name for one in classes if self.parts & {plain(base) for base in one.bases}} - self.parts
            self.parts |= heirs

    def touches(self, place, node):
        """Whether a class or function touches privacy, by the rules of this file; a method is judged as a function."""
        seen = self.parts & self.known[place]
        if isinstance(node, ast.ClassDef):
            return node.name in seen
        returned = words(node.returns)
        if returned & {"Callable", "TypeGuard"}:  # names a part, and hands none out
            return False
        figure = not place.startswith("app/") and FIGURES & set(node.name.split("_")) and NUMBERS & returned
        door = place in DOORS and not returned & {"str", "bool"}
        return bool(seen & returned or figure or door)

    def faults(self):
        """``file:name``: what is wrong with its note, for every name with a note too few, too many or empty."""
        for place, tree in self.trees.items():
            of_module = note(tree)
            if of_module is not None and not is_statement(of_module):
                yield f"{place}: its note says nothing"
            for node in public(tree.body):
                touches = self.touches(place, node)
                text = note(node)
                if touches and not is_statement(text if text is not None else of_module):
                    yield f"{place}:{node.name} touches privacy and says nothing of it"
                elif not touches and text is not None:
                    yield f"{place}:{node.name} does not touch privacy and has a note"
                yield from self.below(place, node, touches, node.name)

    def below(self, place, node, touches, name):
        """Faults of what stands within a class or a function."""
        for child in node.body:
            if isinstance(child, Definition):
                text, of_class = note(child), isinstance(node, ast.ClassDef) and not child.name.startswith("_")
                if text is not None and not (of_class and (touches or self.touches(place, child))):
                    yield f"{place}:{name}.{child.name} does not touch privacy and has a note"
                elif text is not None and not is_statement(text):
                    yield f"{place}:{name}.{child.name}: its note says nothing"
                yield from self.below(place, child, touches, f"{name}.{child.name}")


@pytest.fixture(scope="module")
def product():
    return Product(ROOT)


def test_whoever_touches_privacy_says_what_is_guaranteed_and_nobody_else_does(product):
    assert list(product.faults()) == []


def test_every_part_and_every_door_exists(product):
    defined = {node.name for tree in product.trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    assert defined >= PARTS
    assert product.trees.keys() >= DOORS


GOOD = '''
class Ledger:
    """Remembers.

    Notes
    -----
    **Formal guarantees.** What was committed is what is read next.
    """


class Other(Ledger):
    """Remembers on disk.

    **Formal guarantees.** What was committed survives the process.
    """

    def size(self) -> int:
        """How large it is."""


def open_ledger(path) -> Other:
    """Open it.

    **Formal guarantees.** Whoever else has it open has to wait.
    """


def asked_mu(epsilon) -> float:
    """The largest mu.

    **Formal guarantees.** What is mu-GDP is epsilon-DP, for the same neighbours.
    """


def name(path) -> str:
    """Its name."""
'''
PLANTED = {
    "a part without a note": ("What was committed is what is read next.", "", "Ledger"),
    "None": ("What was committed survives the process.", "None of its own.", "Other"),
    "a pointer": ("What was committed survives the process.", "Those of :class:`Ledger`.", "Other"),
    "a maker without a note": ("**Formal guarantees.** Whoever else has it open has to wait.", "", "open_ledger"),
    "a figure that points elsewhere": ("What is mu-GDP is", "As for :func:`gdp_mu`: what is", "asked_mu"),
    "a note that is not asked for": ("Its name.", "Its name.\n\n    **Formal guarantees.** It has one.", "name"),
    "a method's note that says nothing": (
        "How large it is.",
        "**Formal guarantees.** Those of the class.",
        "Other.size",
    ),
}


def faults_of(text, root):
    for folder in FOLDERS:
        (root / folder).mkdir()
    (root / "privacy" / "new.py").write_text(text)
    return list(Product(root).faults())


def test_a_file_in_order_has_no_faults(tmp_path):
    assert faults_of(GOOD, tmp_path) == []


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("old", "new", "name"), PLANTED.values(), ids=PLANTED)
def test_a_note_too_few_too_many_or_empty_is_noticed(old, new, name, tmp_path):
    assert GOOD.count(old) == 1
    (fault,) = faults_of(GOOD.replace(old, new), tmp_path)
    assert fault.startswith(f"privacy/new.py:{name}")
