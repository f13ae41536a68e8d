"""The recorder of trainings: two recordings of one commit are equal, and one bit more or less is seen."""

import copy

import pytest

from tests import golden

CASE = "mu2, lost"


@pytest.fixture(scope="module")
def lines():
    (found,) = [one for one in golden.cases() if one[0] == CASE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "_seeded_randomness", lambda: None)
        return golden.recorded(*found[1:])


def test_recording_has_messages_ledgers_rounds_and_the_model(lines):
    kinds = [next(iter(line)) for line in lines]
    assert "error" not in kinds
    assert {"reply", "history", "result", "model", "state of node 1000"} <= set(kinds)
    (history,) = [line["history"] for line in lines if "history" in line]
    assert [report["lost"] for report in history] == [0, 2, 1, 0, 3, 0]


def test_names_of_cases_are_distinct():
    names = [name for name, *_ in golden.cases()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["reply", "history", "model", "state of node 1000"])
def test_one_changed_bit_is_a_difference(lines, kind):
    changed = copy.deepcopy(lines)
    place = max(i for i, line in enumerate(changed) if kind in line)
    assert not list(golden.differences(lines, changed))
    _change(changed[place][kind])
    assert len(list(golden.differences(lines, changed))) == 1


def test_renamed_key_is_no_difference_and_a_new_value_is():
    names = {"wait-for": "quorum"}
    old = golden._in_new_names({"config": {"wait-for": "0x1p-1"}}, names)
    assert not list(golden.differences(old, {"config": {"quorum": "0x1p-1"}}))
    assert list(golden.differences(old, {"config": {"quorum": "0x1p+0"}})) == ["/config/quorum: 0x1p-1 -> 0x1p+0"]


def _change(value):
    """Change one leaf of nested values."""
    while True:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        key, last = items[-1]
        if isinstance(last, dict | list) and last:
            value = last
            continue
        value[key] = "something else"
        return
