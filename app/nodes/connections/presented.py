"""A SuperLink's certificate: what it is for, until when it holds, and why it was not believed."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from ....privacy import ConfigurationError

_MOST_NAMES = 4
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Presented:
    """A certificate as it came, believed or not.

    Parameters
    ----------
    names : tuple of str
        What it is for: host names and addresses, cut where somebody put many or long ones.
    issuer : str
        Who signed it, by its own word.
    begins, ends : float
        Its validity, in seconds since 1970.
    """

    names: tuple[str, ...]
    issuer: str
    begins: float
    ends: float

    @classmethod
    def of(cls, der: bytes) -> Presented | None:
        """What a certificate says of itself; None where it cannot be read."""
        try:
            certificate = x509.load_der_x509_certificate(der)
            validity = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
            return cls(_names(certificate), printable(certificate.issuer.rfc4514_string()), *validity)
        except Exception:  # somebody else's bytes, whatever a parser makes of them
            return None


def tls_context(root_certificates: Path | None) -> ssl.SSLContext:
    """What a SuperLink's certificate is checked against, just as Flower's SuperNode does it.

    Parameters
    ----------
    root_certificates : Path, optional
        Of the connection.

    Raises
    ------
    ConfigurationError
        If there is no certificate in the file.
    """
    if root_certificates is None:
        return httpx.create_ssl_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=root_certificates.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:  # an SSLError is an OSError, what is not ASCII a ValueError
        raise ConfigurationError(
            f"Expected certificates in PEM form at {root_certificates}, got none that can be read: ask the server's "
            "operator for the certificate of its authority."
        ) from error
    return context


def authority_ends(root_certificates: Path | None) -> float | None:
    """When the last of the operator's root certificates ends, in seconds since 1970; None without a file of one's own.

    Parameters
    ----------
    root_certificates : Path, optional
        Of the connection.
    """
    if root_certificates is None:
        return None
    try:
        roots = x509.load_pem_x509_certificates(root_certificates.read_bytes())
    except (OSError, ValueError):
        return None
    return max(root.not_valid_after_utc.timestamp() for root in roots)


def presented_by(host: str, port: int, timeout_s: float) -> Presented | None:
    """The certificate that whoever listens there shows, believed by nobody; None where none comes.

    Parameters
    ----------
    host : str
    port : int
    timeout_s : float
        For the connection, and again for all of TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection((host, port), timeout_s)
        with context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False) as secured:
            # For a server that says a byte now and then: no single one of them comes too late.
            timer = threading.Timer(timeout_s, _hang_up, [secured])
            timer.start()
            try:
                secured.do_handshake()
                der = secured.getpeercert(binary_form=True)
            finally:
                timer.cancel()
    except (OSError, ValueError, AttributeError):  # the last of a socket that was shut down meanwhile
        return None
    return Presented.of(der) if der else None


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def printable(text: str) -> str:
    """A text of somebody else's for an operator's log: one line, nothing that a terminal obeys, cut."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_NAME])


def utc(seconds: float) -> str:
    """A time as an operator reads it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    except x509.ExtensionNotFound:
        return ()
    values = (
        [str(name.value) for name in extension.value]
        if isinstance(extension.value, x509.SubjectAlternativeName)
        else []
    )
    return tuple(printable(value) for value in values[:_MOST_NAMES])


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
