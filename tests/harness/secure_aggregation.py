"""Secure aggregation for tests: masks of simulated machines, and what an open sum would show of one release."""

import numpy as np
from murmurfl.privacy import protocol
from murmurfl.privacy.sums.masking import Masking, Sealed, add_mask, checked_header, opened_seal
from murmurfl.privacy.sums.roster import HelperKey, MachineKey, Roster

HELPERS = ("helper-0", "helper-1")


def roster_of(machines, helpers=HELPERS, seed=0):
    """The roster of simulated keys."""
    return Roster.simulated(seed, tuple(machines), tuple(helpers))


def masking_of(name, roster, seed=0):
    """A machine's masks, with its simulated key."""
    return Masking(name, MachineKey.simulated(seed, name), roster)


def sealed_of(entries):
    """What helpers are shown of a reply, from its entries."""
    return Sealed(entries[protocol.HEADER], tuple(entries[protocol.SEALS]), entries[protocol.SIGNATURE])


def unmasked(arrays, entries, roster, seed=0):
    """The counts of one release, by all helpers' keys together: what they must never do, and tests may."""
    assert all(values.dtype == np.uint64 for values in arrays)
    counts = np.concatenate([np.asarray(values).ravel() for values in arrays])
    sealed = sealed_of(entries)
    header = checked_header(sealed, roster)
    for name in roster.helper_names:
        add_mask(counts, opened_seal(sealed, header, name, HelperKey.simulated(seed, name)), subtract=True)
    return counts.astype(np.int64), header
