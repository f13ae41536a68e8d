"""When the certificates in a file expire."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509


def first_expiry(path: Path | None) -> float | None:
    """When the first of the certificates in a PEM file expires, in seconds since 1970; None where there are none.

    Parameters
    ----------
    path : Path or None
    """
    if path is None:
        return None
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return None  # who needs the file says what is wrong with it
    return min((certificate.not_valid_after_utc.timestamp() for certificate in found), default=None)
