"""What commands print, compared with snapshots that a person reviews: one file for each command."""

import re
from functools import partial

import pytest

# Times, keys and digests are of each run: only their form is compared, so that tables keep their widths.
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?"), re.compile(r"\d"), "0"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,128}\b"), re.compile(r"."), "f"),
    (re.compile(r"\b([0-9a-f]{4} ){3,}[0-9a-f]{4}\b"), re.compile(r"[0-9a-f]"), "f"),
    (re.compile(r"[ \t]+$", re.MULTILINE), re.compile(r"."), ""),
)


def _filled(character, filler, match):
    return character.sub(filler, match[0])


@pytest.fixture
def check_output(snapshot, tmp_path, monkeypatch):
    """Compare what commands printed, without times, keys and folders, with its snapshot.

    ``pytest --snapshot-update`` writes it; what it changes is to be read like a page of the manual.
    """
    monkeypatch.setenv("COLUMNS", "1000")  # folders of tests are long and wrap at each width elsewhere

    def check(text, name=None):
        text = text.replace(str(tmp_path), "<folder>")
        for found, character, filler in _VARYING:
            text = found.sub(partial(_filled, character, filler), text)
        assert text == (snapshot if name is None else snapshot(name=name))

    return check
