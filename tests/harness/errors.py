"""Errors that a test expects, by what programs read of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from murmurfl.privacy import MurmurflError, RefusedError
from murmurfl.privacy.errors import ErrorKind


@contextmanager
def raises(
    expected: type[MurmurflError],
    kind: ErrorKind,
    setting: str | None = None,
    *,
    got: str | float | None = None,
    code: int | None = None,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Fail unless the block raises an error of this class, of exactly this kind, about exactly this setting.

    ``got`` is the value received for the setting and ``code`` a refusal's, where they matter; ``match`` is for a
    figure, a name or a line to write that the message promises.
    """
    with pytest.raises(expected, match=match) as caught:
        yield caught
    assert (caught.value.kind, caught.value.setting) == (kind, setting), caught.value
    assert got is None or caught.value.got == got, caught.value
    assert (code is None) or (isinstance(caught.value, RefusedError) and caught.value.code == code), caught.value
