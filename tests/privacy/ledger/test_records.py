"""What a ledger remembers."""

from dataclasses import replace

import numpy as np
from murmurfl.privacy.ledger.ledger_records import StreamRecord


def test_a_streams_next_state_is_the_record_with_those_fields_replaced():
    counts = np.arange(3)
    before = StreamRecord("f", 4, 2, b"n" * 16, {3: counts, 4: counts}, (counts,), "terms", (counts,))
    after = before.acknowledged(3, {4: counts})
    assert after == replace(before, ack=3, pending={4: counts})
    assert after.released(b"m" * 16, {5: counts}, ()) == replace(
        after, release=5, nonces=b"m" * 16, pending={5: counts}, noise_state=()
    )
    assert (before.ack, before.release, list(before.pending)) == (2, 4, [3, 4])
