"""The certificate of a SuperLink: its names, its issuer, its validity, and the context that checks it."""

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

from ....privacy import ConfigurationError

_MOST_NAMES = 4
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Presented:
    """A certificate as it came, trusted or not."""

    names: tuple[str, ...]  # host names and addresses, cut if many or long
    issuer: str  # as the certificate claims
    # Validity, in seconds since 1970
    begins: float
    ends: float

    @classmethod
    def of(cls, der: bytes) -> Presented | None:
        """Parse a certificate; None if it cannot be read."""
        try:
            certificate = x509.load_der_x509_certificate(der)
            validity = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
            return cls(_names(certificate), printable(certificate.issuer.rfc4514_string()), *validity)
        except Exception:  # a parser may fail in any way on somebody else's bytes
            return None


def tls_context(root_certificates: Path | None) -> ssl.SSLContext:
    """The context that checks a SuperLink's certificate, made as Flower's SuperNode makes it.

    Raises
    ------
    ConfigurationError
        If the file holds no certificate.
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


def expiries(path: Path | None) -> list[float]:
    """When each certificate in a PEM file expires, in seconds since 1970; empty if there is none that can be read."""
    if path is None:
        return []
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return []  # whoever needs the file reports what is wrong with it
    return [certificate.not_valid_after_utc.timestamp() for certificate in found]


def presented_by(host: str, port: int, timeout_s: float) -> Presented | None:
    """The certificate that a host shows, unchecked; None if none comes.

    Parameters
    ----------
    timeout_s : float
        For connecting, and again for the TLS handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection((host, port), timeout_s)
        with context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False) as secured:
            # A server that sends a byte now and then never exceeds the socket's timeout.
            timer = threading.Timer(timeout_s, _hang_up, [secured])
            timer.start()
            try:
                secured.do_handshake()
                der = secured.getpeercert(binary_form=True)
            finally:
                timer.cancel()
    except (OSError, ValueError, AttributeError):  # AttributeError: the socket was shut down meanwhile
        return None
    return Presented.of(der) if der else None


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def printable(text: str) -> str:
    """Somebody else's text for an operator's log: one line, cut, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_NAME])


def utc(seconds: float) -> str:
    """A time for people to read."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(printable(str(name.value)) for name in list(extension.value)[:_MOST_NAMES])
