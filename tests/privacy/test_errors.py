"""What programs read of an error: its kind, and the setting at fault."""

import ast
import pickle
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.app.runs.sealed import ChangedRowsError, Ending, SealedError
from murmurfl.privacy import ConfigurationError, LedgerError, OpeningRefusedError, RefusedError, protocol
from murmurfl.privacy.errors import ErrorKind, InvalidRecordError, UnsupportedFlowerError, check_installed

from tests.harness.errors import raises

ROOT = Path(__file__).parents[2]
KINDS = set(get_args(ErrorKind))
ROOMS = ("privacy", "strategies", "clients", "app")


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("Expected clip > 0, got 0.", kind="out-of-range", setting="clip", got=0.0),
        RefusedError(protocol.BUDGET_EXHAUSTED, "no"),
        OpeningRefusedError("no"),
        UnsupportedFlowerError("Expected another Flower.", setting="flwr", got="1.0"),
        LaunchError("The run failed.", "its log"),
        SealedError(Ending.FAILED),
        ChangedRowsError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_worker_arrives_with_its_fields(error):
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
    assert arrived.kind == error.kind


def test_a_class_has_a_kind_that_a_raise_may_replace():
    assert LedgerError("no").kind == "damaged"
    assert LedgerError("no", kind="exists").kind == "exists"
    assert LedgerError("no").kind == "damaged"


@pytest.mark.parametrize(
    "rows", [np.ones(3), [1.0], {"age": 41}, b"rows", object()], ids=lambda rows: type(rows).__name__
)
def test_an_error_keeps_no_value_that_may_hold_rows(rows):
    assert ConfigurationError("no", setting="task", got=rows).got is None


def test_an_error_on_a_record_has_a_fixed_text_alone():
    with pytest.raises(TypeError):
        InvalidRecordError("a value out of range", got=41)


def test_a_reworded_error_keeps_class_kind_and_setting():
    first = UnsupportedFlowerError("one", kind="mismatch", setting="flwr", got="1.0")
    second = first.reworded("two")
    assert (type(second), str(second), vars(second)) == (UnsupportedFlowerError, "two", vars(first))


def test_a_missing_package_is_named_as_the_setting():
    with raises(ConfigurationError, "not-installed", "no_such_package"):
        check_installed("no_such_package", "torch", "a test")


def test_every_kind_is_used():
    used = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="kind", value=ast.Constant(value=kind)):
                    used |= {kind} & KINDS
                case ast.ClassDef(name=name, body=body) if name.endswith("Error"):
                    used |= {ast.unparse(one.value).strip("'") for one in body if ast.unparse(one).startswith("kind")}
    assert used == KINDS
