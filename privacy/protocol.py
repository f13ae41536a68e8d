"""Protocol between a server and a client: record keys, codes of refusals, and arrays as they travel.

Both sides import this module, and nothing else of each other. A request names the round, the query points, the session
and the last release of that client which the server has aggregated (``ack``); a reply carries P_k - P_ack, k and ack.
None of a reply's fields but the release itself depends on data.


Flower stores an array as the bytes of ``numpy.save`` beside its dtype and shape. For the plain case (little-endian, C
order) those two say to the byte which header ``numpy.save`` writes. Bytes that begin with that very header, and have
the length it asks for, are read where they are; anything else is left to NumPy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

PROTOCOL_VERSION = 1

# Records of a message.
ARRAYS = "arrays"
PREVIOUS_ARRAYS = "previous-arrays"
CONFIG = "config"
METRICS = "metrics"

# Entries of a request's ConfigRecord.
VERSION = "protocol-version"
SERVER_ROUND = "server-round"
WEIGHED_AS = "weighed-as"  # the round by whose weights gradients are combined, where it is not the server's
SESSION = "session"
CLIENT = "client"
ACK = "ack"
SKIPPED = "skipped"  # 1 if the sum with the acknowledged release was wrong, and was not used
ASK = "ask"
ASK_HELLO = "hello"
NONCE = "nonce"  # of a hello: whoever is in a roster signs it, to show that the name is its own
ASK_PRIVACY = "privacy"
ASK_SEAL = "seal"  # in a message of training, a client: to seal its last release once more, which it sent already
ASK_OPEN = "open"
ASK_WHETHER = "whether"  # a helper: whether it would open a set, and whose releases it would not
ASK_LOCK = "lock"  # a helper: to promise that it opens a set
ASK_VOID = "void"  # a helper: to record that it never opens a set, which another helper has signed to have opened
ASKS_OF_SETS = (ASK_WHETHER, ASK_LOCK, ASK_VOID)
PERMIT = "permit"  # of the session's owner (:mod:`.permits`), for clients and helpers that take no other runs

# What a training request is for, where it is not for the strategy's own releases
# (:mod:`~murmurfl.privacy.queries.evaluation`), and the mean of the features that a client is to see its samples
# from (:mod:`~murmurfl.privacy.queries.mean_of_features`): k float32 values, little endian. Likewise the knots of an
# additive model (:mod:`~murmurfl.privacy.queries.knots`), float64.
RELEASE_OF = "of"
OF_MEAN = "mean"
OF_KNOTS = "knots"
OF_EVALUATION = "evaluation"
OF_STATISTICS = "statistics"
CENTRE = "centre"
KNOTS = "knots"

# What a client's noise mod tells its own ClientApp, beside the request's entries.
PART = "part"

# Entries of a reply's MetricRecord, beside ACK and VERSION.
RELEASE = "release"
NUM_EXAMPLES = "num-examples"
SENSITIVITY = "sensitivity"
SAMPLING_RATE = "sampling-rate"  # q of Poisson batches; only with these
MU_GUARANTEED = "mu-guaranteed"
DELTA = "delta"
MU_LOCAL = "mu-local"  # this and the next two only under secure aggregation
MIN_HONEST = "min-honest"
MIN_COHORT = "min-cohort"
RECOVERED = "recovered"  # 1 if a release also takes out the noise of those whose sums were skipped
CLIENT_LEVEL = "client-level"
NOISE_STD = "noise-std"  # of an evaluation or statistics; the next three only of an evaluation
HELD_OUT = "held-out"
SCORES_SHARE = "scores-share"
OF_OWNERS = "of-owners"  # 1 if a row is the mean over an owner's samples

# Of a masked release (:mod:`~murmurfl.privacy.sums.masking`), in the ConfigRecord of its reply beside CLIENT; its
# ArrayRecord has the model's shapes in uint64.
HEADER = "header"
SEALS = "seals"
SIGNATURE = "signature"

# Of a helper: what it answers to a hello (a name, or in a simulation several), and to QUERY_OPEN.
HELPERS = "helpers"
ROSTER = "roster"
QUERY_OPEN = "query.open"
OPENING = "opening"  # names a request to open: the server's, one for each set of releases
HELPER = "helper"
SET_DIGEST = "set-digest"
WOULD_OPEN = "would-open"  # one of VIEWS; the next has the clients for whose sake a helper would not
DISPUTED = "disputed"
VIEW_OPENED, VIEW_LOCKED, VIEW_VOID, VIEW_YES, VIEW_NO = VIEWS = ("opened", "locked", "void", "yes", "no")
OPENED_BY = "opened-by"  # with ASK_VOID: the helper that opened it, the digest of its sum, and its signature
OPENED_TOTAL = "opened-total"
OPENED_SIGNATURE = "opened-signature"

# Of a reply with results of an evaluation, which no noise protects.
NOT_PRIVATE = "not-private"

# Entries of a query for what a client has spent, and of its reply.
NUM_PARAMETERS = "num-parameters"
CLIENTS = "clients"
RELEASES_LEFT = "releases-left"
RECORD = "record"  # "row" of a file that was read by itself, or "item" that was handed over
SCHEMA = "schema"  # the digest of what a client takes for a record
LONGEST_RELEASE = "longest-release"  # this and the next two: what a forecast is made from (noise_forecast)
NOISE_IN_ALL = "noise-in-all"
CLIP_UNIT = "clip-unit"
RECORDS = "records"  # this and the next three: of simulated clients alone
INVALID_RECORDS = "invalid-records"
INVALID_REASON = "invalid-reason"  # of most of them
CHANGING = "changing"  # 1 if records are others when they are read again

LONGEST_NONCE = 64
LONGEST_SESSION_NAME = 64
LONGEST_CLIENT_NAME = 64
LARGEST_ROUND = 2**31 - 1

# Codes of error replies, above those Flower uses itself.
MALFORMED_REQUEST = 1001
PROTOCOL_MISMATCH = 1002
BAD_ACKNOWLEDGEMENT = 1003
CAP_REACHED = 1004
SAMPLES_USED_UP = 1005
BUDGET_EXHAUSTED = 1006
POLICY_CHANGED = 1007
NOT_CONFIGURED = 1008
INTERNAL_ERROR = 1009
EVALUATION_BLOCKED = 1010
LEDGER_UNUSABLE = 1011
OPENING_REFUSED = 1012
LEGACY_CLIENT_APP = 1013
RUN_NOT_ALLOWED = 1014
MALFORMED_REPLY = 1015  # of no client: the server's own, for a reply that it could not read

REFUSAL_NAMES: dict[int, str] = {
    MALFORMED_REQUEST: "malformed-request",
    PROTOCOL_MISMATCH: "protocol-mismatch",
    BAD_ACKNOWLEDGEMENT: "bad-acknowledgement",
    CAP_REACHED: "cap-reached",
    SAMPLES_USED_UP: "samples-used-up",
    BUDGET_EXHAUSTED: "budget-exhausted",
    POLICY_CHANGED: "policy-changed",
    NOT_CONFIGURED: "not-configured",
    INTERNAL_ERROR: "internal-error",
    EVALUATION_BLOCKED: "evaluation-blocked",
    LEDGER_UNUSABLE: "ledger-unusable",
    OPENING_REFUSED: "opening-refused",
    LEGACY_CLIENT_APP: "legacy-client-app",
    RUN_NOT_ALLOWED: "run-not-allowed",
    MALFORMED_REPLY: "malformed-reply",
}


_MAGIC = b"\x93NUMPY"
_PLAIN = {"float64": "<f8", "float32": "<f4", "int64": "<i8", "uint64": "<u8"}
_NAMES = {descriptor: name for name, descriptor in _PLAIN.items()}
_MOST_DIMENSIONS = 8
_LARGEST_DIMENSION = 2**48


def read_array(dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    """Return the array that ``numpy.save`` serialised into ``data``; read-only where it is read quickly.

    A sender states ``dtype`` and ``shape``, and may lie. Bytes that are no array, or would need unpickling, are a
    ValueError.
    """
    expected = _expected(dtype, shape)
    if expected is not None and type(data) is bytes:
        header, size, read_as = expected
        if len(data) == len(header) + size and data.startswith(header):
            return np.frombuffer(data, read_as, offset=len(header)).reshape(shape)
    return _read_carefully(data)


def write_array(values: NDArray[Any]) -> bytes:
    """Return the bytes that ``numpy.save`` makes of an array of numbers."""
    expected = _expected(_NAMES.get(values.dtype.str, ""), values.shape)
    if expected is not None and values.flags.c_contiguous:
        return b"".join((expected[0], values.data))
    buffer = BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def dtype_name(values: NDArray[Any]) -> str:
    """Return the name Flower has for an array's dtype: ``str(values.dtype)``, which takes NumPy longer."""
    return _NAMES.get(values.dtype.str) or str(values.dtype)


def _read_carefully(data: bytes) -> NDArray[Any]:
    if data[:6] != _MAGIC:  # NumPy would also open an archive, which is no array
        raise ValueError("the bytes are no array")
    try:
        return np.load(BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds on bytes that are no array; all mean the same.
        raise ValueError("the bytes are no array") from error


def _expected(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any]] | None:
    """Return the header of a plain array, the number of bytes behind it, and their dtype; None for any other array.

    What a sender states decides what is looked for, never what is believed; only small headers are remembered.
    """
    descriptor = _PLAIN.get(dtype)
    # A shape of anything but plain integers may be equal to one and yet print differently: True is 1.
    if descriptor is None or type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size < _LARGEST_DIMENSION:
            return None
    return _header(descriptor, shape)


@lru_cache(maxsize=256)
def _header(descriptor: str, shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any]]:
    buffer, dtype = BytesIO(), np.dtype(descriptor)
    numpy_format.write_array_header_1_0(buffer, {"descr": descriptor, "fortran_order": False, "shape": shape})
    return buffer.getvalue(), math.prod(shape) * dtype.itemsize, dtype
