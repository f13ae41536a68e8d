r"""Masks: a client hides its release, so that only the sum over a whole cohort can be seen.

A client draws a fresh 32-byte seed for each helper and sends its int64 counts plus the seeds' keystreams, modulo 2^64,

    y = counts + sum over helpers of AES-256-CTR(seed)   (mod 2^64),

and each seed sealed for its helper (HPKE: X25519, HKDF-SHA-256, ChaCha20-Poly1305) with the release's public
:class:`Header` bound to it. An Ed25519 signature covers header and seals. Whoever lacks the seed of *one* helper sees
uniform words. A helper that is shown a cohort's headers and seals gives the sum of its keystreams over that cohort
(:mod:`.opening_rule`), and never a keystream by itself.

Proof: docs/proofs/secure-aggregation.md.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from numpy.typing import NDArray

from .. import protocol
from ..accounting.loss import MOST_SUMMED
from ..errors import ConfigurationError, MurmurflError
from ..release.ledgered_privatizer import Release
from ..release.policy import PrivacyPolicy, ReleaseMode, check_federation, read_mode, recorded_mode
from .roster import ClientKey, HelperKey, Roster, is_signed, name_proof

MASKING_VERSION = 1
"""The version of header, seal and mask."""

SEED_BYTES = 32
ID_BYTES = 16
NOTHING_OPENED = bytes(ID_BYTES)
"""The id that stands for no release: what a client's first releases are built on."""

SEAL_BYTES = 80
"""An encapsulated key, a seed and a tag."""

LONGEST_HEADER = 2**14
"""More than sixteen helpers with the longest names need, so that 2^11 of them fit into little memory."""
LARGEST_SIZE = 2**32

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_SEAL_LABEL = b"murmurfl mask seed 1\x00"
_SIGN_LABEL = b"murmurfl masked release 1\x00"
_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 17  # bytes of keystream at a time: they stay in the nearer caches
_ZEROS = bytes(_BLOCK)


class MaskedReleaseError(MurmurflError):
    """A masked release is not one: unreadable, unsigned, or sealed for another purpose.

    Examples
    --------
    >>> from murmurfl.privacy import Header
    >>> try:
    ...     Header.from_bytes(b"{}")
    ... except MaskedReleaseError as error:
    ...     error.kind
    'malformed'
    """

    kind = "mismatch"


@dataclass(frozen=True)
class Header:
    """The description of a masked release: public, signed, bound to its seals, and independent of data.

    Examples
    --------
    >>> header = Header(
    ...     session="session", client="a", release_mode="cumulative", release=2, release_id="1" * 32, ack_id="2" * 32,
    ...     size=650, spacing=2.0**-20, min_cohort=40, roster="3" * 64, helpers=("left", "right"), terms="4" * 64,
    ... )
    >>> Header.from_bytes(header.to_bytes()) == header
    True
    """

    session: str
    client: str
    """The client's name in the roster."""
    release_mode: ReleaseMode
    """Whether the release carries on from the client's last opened one, or stands alone with noise of its own."""
    release: int
    """k."""
    release_id: str
    """A random name of this release, 32 hexadecimal digits: a client whose ledger was rolled back makes k again, and
    not this."""
    ack_id: str
    """The name of the release it was built on; zeros for none."""
    size: int
    """d."""
    spacing: float
    """The spacing of the grid that all counts of the session are on."""
    min_cohort: int
    """The fewest releases the client lets its own be summed with, itself among them."""
    roster: str
    """The roster's digest."""
    helpers: tuple[str, ...]
    """The helpers it sealed seeds for, in order."""
    terms: str
    """Digest of what the noise depends on (:meth:`~murmurfl.privacy.PrivacyPolicy.shared_terms`): clients whose noise
    differs cannot share a sum."""
    version: int = MASKING_VERSION

    def to_bytes(self) -> bytes:
        """Encode this header; there is one encoding."""
        return json.dumps(recorded_mode(vars(self)), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Header:
        """Read what :meth:`to_bytes` wrote; refuse other spellings: two ways to write a header would be two headers."""
        try:
            if len(content) > LONGEST_HEADER:
                raise ValueError("too long for a header")
            values = json.loads(content)
            if set(values) != _RECORDED_FIELDS:
                raise ValueError("other fields")
            header = cls(**{**read_mode(values), "helpers": tuple(values["helpers"])})
            header._check()
            if header.to_bytes() != content:
                raise ValueError("written in another way")
        except (ValueError, TypeError, RecursionError) as error:
            raise MaskedReleaseError(
                "Expected the header of a masked release, got something else.", kind="malformed"
            ) from error
        return header

    def _check(self) -> None:
        texts = (self.session, self.client, self.release_id, self.ack_id, self.roster, self.terms, *self.helpers)
        numbers = (self.version, self.release, self.size, self.min_cohort)
        right = (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
            and isinstance(self.spacing, float)
            and self.version == MASKING_VERSION
            and 0 < len(self.session) <= protocol.LONGEST_SESSION_NAME
            and 0 < len(self.client) <= protocol.LONGEST_CLIENT_NAME
            and 1 <= self.release <= protocol.LARGEST_ROUND
            and 1 <= self.size <= LARGEST_SIZE
            and 1 <= self.min_cohort <= MOST_SUMMED
            and bool(_ID.fullmatch(self.release_id) and _ID.fullmatch(self.ack_id))
            and self.release_id not in (self.ack_id, NOTHING_OPENED.hex())
            and (self.release_mode == "cumulative" or self.ack_id == NOTHING_OPENED.hex())
            and bool(_DIGEST.fullmatch(self.roster) and _DIGEST.fullmatch(self.terms))
            and math.isfinite(self.spacing)
            and self.spacing > 0
        )
        if not right:
            raise ValueError("impossible values")


_RECORDED_FIELDS = {field.name for field in fields(Header)} - {"release_mode"} | {"builds_on"}


@dataclass(frozen=True)
class Sealed:
    """A masked release without its counts: what helpers are shown.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import ClientKey, Header, Masking, MemoryLedger
    >>> from murmurfl.privacy import PrivacyPolicy, Privatizer, Roster, SimulatedKeys, SumAssumption
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, trust="secure-aggregation",
    ...     sums=SumAssumption(min_honest=2, min_cohort=3),
    ... )
    >>> privatizer = Privatizer(policy, 4, 100, MemoryLedger(), SimulatedKeys(1, "a"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 4)))
    >>> sealed = Masking("a", ClientKey.simulated(1, "a"), roster).mask(release, "session", policy).sealed
    >>> Header.from_bytes(sealed.header).client, len(sealed.seals), len(sealed.signature)
    ('a', 2, 64)
    """

    header: bytes
    """:meth:`Header.to_bytes`."""
    seals: tuple[bytes, ...]
    """One for each helper, in the header's order."""
    signature: bytes
    """The client's, on header and seals."""

    @property
    def signed(self) -> bytes:
        """The bytes that the signature covers: header and seals, each with its length, in order."""
        parts = (self.header, *self.seals)
        return _SIGN_LABEL + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


@dataclass(frozen=True)
class MaskedRelease:
    """A release as it leaves a client under secure aggregation: its counts under their masks, and the sealed seeds.

    Notes
    -----
    **Formal guarantees.** Tells nothing about the release's counts to anybody without the seeds of all helpers: one
    whose key stays secret is enough. All else in it is independent of data.
    Proof: docs/proofs/secure-aggregation.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import ClientKey, Masking, MemoryLedger, PrivacyPolicy
    >>> from murmurfl.privacy import Privatizer, Roster, SimulatedKeys, SumAssumption
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, trust="secure-aggregation",
    ...     sums=SumAssumption(min_honest=2, min_cohort=3),
    ... )
    >>> privatizer = Privatizer(policy, 4, 100, MemoryLedger(), SimulatedKeys(1, "a"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 4)))
    >>> masked = Masking("a", ClientKey.simulated(1, "a"), roster).mask(release, "session", policy)
    >>> bool((masked.counts == release.counts.astype(np.uint64)).any())  # nothing of the release is to be seen
    False
    """

    counts: NDArray[np.uint64]
    sealed: Sealed


class Masking:
    """A client's masks: its name and key in the roster that its operator pinned.

    Notes
    -----
    **Formal guarantees.** With one helper whose key is secret, a masked release tells nothing about its counts, to
    anybody who has not been given that helper's sum over a cohort with it. Seeds are the operating system's, fresh for
    every call, and are not kept: the release of a repeated request has other masks. A helper opens a release only under
    the rule of :class:`~murmurfl.privacy.Opener`, by what the header says; it is bound to the seeds.
    Proof: docs/proofs/secure-aggregation.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import ClientKey, MemoryLedger, PrivacyPolicy
    >>> from murmurfl.privacy import Privatizer, Roster, SimulatedKeys, SumAssumption
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, trust="secure-aggregation",
    ...     sums=SumAssumption(min_honest=2, min_cohort=3),
    ... )
    >>> privatizer = Privatizer(policy, 4, 100, MemoryLedger(), SimulatedKeys(1, "a"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 4)))
    >>> masked = Masking("a", ClientKey.simulated(1, "a"), roster).mask(release, "session", policy)
    >>> masked.counts.dtype, len(masked.sealed.seals)
    (dtype('uint64'), 2)
    """

    def __init__(self, name: str, key: ClientKey, roster: Roster) -> None:
        known = roster.clients.get(name)
        if known is None:
            raise ConfigurationError(
                f"Expected client {name!r} in the roster, got one without it: send its operator's card to whoever "
                "keeps the roster, and take the new roster.",
                kind="missing",
                setting="roster",
            )
        if known != key.public:
            raise ConfigurationError(
                f"Expected the key of client {name!r} to be the one in the roster, got another: use the key whose "
                "card is in the roster, or have the roster made with this one's.",
                kind="mismatch",
                setting="key",
            )
        self.name = name
        self.roster = roster
        self._key = key
        self._sealing = [X25519PublicKey.from_public_bytes(one.sealing) for one in roster.helpers]

    def check_policy(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy that this roster cannot serve."""
        if policy.trust != "secure-aggregation":
            raise ConfigurationError(
                f"Expected a policy with trust 'secure-aggregation' for masks, got {policy.trust!r}.",
                kind="conflict",
                setting="trust",
                got=policy.trust,
            )
        if policy.sums.min_cohort > len(self.roster.clients):
            raise ConfigurationError(
                f"Expected min_cohort of at most the roster's {len(self.roster.clients)} clients, got "
                f"{policy.sums.min_cohort}: no sum could ever be opened.",
                kind="out-of-range",
                setting="min_cohort",
                got=policy.sums.min_cohort,
            )
        check_federation(policy, len(self.roster.clients))

    def prove_name(self, nonce: Any) -> bytes:
        """Sign a server's nonce (:func:`~.roster.name_proof`); return empty bytes for what is no nonce."""
        proof = name_proof(self.name, self.roster.digest, nonce)
        return b"" if proof is None else self._key.sign(proof)

    def mask(self, release: Release, session: str, policy: PrivacyPolicy) -> MaskedRelease:
        """Hide a release that the ledger has recorded, made in this session by this policy."""
        self.check_policy(policy)
        if release.counts.dtype != np.int64 or {len(release.release_id), len(release.ack_id)} != {ID_BYTES}:
            raise ConfigurationError(
                "Expected a release of int64 counts with ids, as a Privatizer makes it under trust "
                "'secure-aggregation', got another.",
                kind="wrong-type",
                setting="release",
            )
        header = Header(
            session=session,
            client=self.name,
            release_mode=policy.release_mode,
            release=release.release,
            release_id=release.release_id.hex(),
            ack_id=(release.ack_id if policy.release_mode == "cumulative" else NOTHING_OPENED).hex(),
            size=release.counts.size,
            spacing=release.spacing,
            min_cohort=policy.sums.min_cohort,
            roster=self.roster.digest,
            helpers=self.roster.helper_names,
            terms=policy.shared_terms(release.counts.size),
        ).to_bytes()
        counts = release.counts.astype(np.uint64).ravel()  # modulo 2^64, and a copy: the ledger may hold the release
        seals = []
        for helper, public in zip(self.roster.helpers, self._sealing, strict=True):
            seed = secrets.token_bytes(SEED_BYTES)
            add_mask(counts, seed)
            seals.append(_SUITE.encrypt(seed, public, info=_seal_info(helper.name, header)))
        unsigned = Sealed(header, tuple(seals), b"")
        return MaskedRelease(counts, Sealed(header, unsigned.seals, self._key.sign(unsigned.signed)))


def add_mask(total: NDArray[np.uint64], seed: bytes, *, subtract: bool = False) -> None:
    """Add a seed's keystream to uint64 counts in place, modulo 2^64, or subtract it; a seed serves one mask only.

    Examples
    --------
    >>> import numpy as np
    >>> counts, seed = np.array([3, 4], dtype=np.uint64), bytes(16)
    >>> add_mask(counts, seed)
    >>> add_mask(counts, seed, subtract=True)
    >>> counts.tolist()
    [3, 4]
    """
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    step = _BLOCK // 8
    for start in range(0, len(total), step):
        part = total[start : start + step]
        keystream = np.frombuffer(encryptor.update(_ZEROS[: 8 * len(part)]), "<u8")
        if subtract:
            part -= keystream
        else:
            part += keystream


def checked_header(sealed: Sealed, roster: Roster) -> Header:
    """Return the header of a masked release if the client that it names signed it, in this roster, for its helpers.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import ClientKey, Masking, MemoryLedger, PrivacyPolicy
    >>> from murmurfl.privacy import Privatizer, Roster, SimulatedKeys, SumAssumption
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, trust="secure-aggregation",
    ...     sums=SumAssumption(min_honest=2, min_cohort=3),
    ... )
    >>> privatizer = Privatizer(policy, 4, 100, MemoryLedger(), SimulatedKeys(1, "a"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 4)))
    >>> sealed = Masking("a", ClientKey.simulated(1, "a"), roster).mask(release, "session", policy).sealed
    >>> header = checked_header(sealed, roster)
    >>> header.client, header.release, header.size, header.min_cohort
    ('a', 1, 4, 3)
    """
    header = Header.from_bytes(sealed.header)
    if any(not isinstance(seal, bytes) or len(seal) != SEAL_BYTES for seal in sealed.seals):
        raise MaskedReleaseError(
            f"Expected seals of {SEAL_BYTES} bytes, got another length or kind.", kind="wrong-shape"
        )
    public = roster.clients.get(header.client)
    if public is None or not is_signed(public, sealed.signature, sealed.signed):
        raise MaskedReleaseError("Expected a masked release signed by a client of the roster, got another.")
    if header.roster != roster.digest or header.helpers != roster.helper_names:
        raise MaskedReleaseError("Expected a masked release for this roster and its helpers, got one for another.")
    if len(sealed.seals) != len(header.helpers):
        raise MaskedReleaseError("Expected one seal for each helper, got another number of them.")
    return header


def opened_seal(sealed: Sealed, header: Header, helper: str, key: HelperKey) -> bytes:
    """Open the seed that a client sealed for this helper and this release.

    It must not leave the helper: with all helpers' seeds a release is seen by itself.
    """
    try:
        seal = sealed.seals[header.helpers.index(helper)]
        seed = _SUITE.decrypt(seal, key.sealing, info=_seal_info(helper, sealed.header))
    except (InvalidTag, ValueError, IndexError) as error:
        raise MaskedReleaseError("Expected a seal for this helper and this release, got another.") from error
    if len(seed) != SEED_BYTES:
        raise MaskedReleaseError(
            f"Expected a seed of {SEED_BYTES} bytes in a seal, got another length.", kind="wrong-shape"
        )
    return seed


def _seal_info(helper: str, header: bytes) -> bytes:
    name = helper.encode()
    return _SEAL_LABEL + len(name).to_bytes(8, "big") + name + header
