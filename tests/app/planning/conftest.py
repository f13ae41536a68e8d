"""Rehearsals of a few made-up records, but where they are what is tested."""

import pytest
from murmurfl.app.planning import rehearsal


@pytest.fixture(scope="module", autouse=True)
def _small_rehearsals(request):
    """Which way is better shows in fewer made-up records of fewer features too, in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_rehearsal.py":
            for name, most in (("MOST_SAMPLES", 500), ("MOST_FEATURES", 48), ("TEST_SAMPLES", 300)):
                patch.setattr(rehearsal, name, most)
        yield
