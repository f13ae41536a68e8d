"""Connection of a node to its SuperLink: options or ``[connection]``, its certificate, and why a call fails."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ...clients.nodes.operators_file import CONNECTION_TABLE, named_values, operators_values
from ...privacy.errors import ConfigurationError
from ...privacy.setting import Setting


@dataclass(frozen=True)
class Connection:
    """Connection of a node to its SuperLink."""

    superlink: str  # host and port
    # PEM file that the SuperLink's certificate is checked against; default the public authorities that Python's
    # ``certifi`` knows, or those that the environment variable SSL_CERT_FILE names
    root_certificates: Path | None = None
    # The node's own key (``ssh-keygen -t ecdsa -b 384``), registered with the SuperLink
    private_key: Path | None = None
    insecure: bool = False  # plain HTTP: for tests on one client

    def __post_init__(self) -> None:
        host, colon, port = self.superlink.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"Expected the SuperLink as HOST:PORT, got {self.superlink!r}.",
                kind="malformed",
                setting="superlink",
                got=self.superlink,
            )
        if self.insecure and (self.root_certificates or self.private_key):
            raise ConfigurationError(
                "Expected no certificates and no key with --insecure: both need TLS.",
                kind="conflict",
                setting="insecure",
            )
        for name, path in (("root certificates", self.root_certificates), ("a private key", self.private_key)):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigurationError(f"Expected {name} at {path}, got no file that can be read.", kind="unreadable")

    def arguments(self) -> list[str]:
        """Options of ``flower-supernode``."""
        arguments = ["--superlink", self.superlink]
        if self.insecure:
            arguments.append("--insecure")
        if self.root_certificates is not None:
            arguments += ["--root-certificates", str(self.root_certificates)]
        if self.private_key is not None:
            arguments += ["--auth-supernode-private-key", str(self.private_key)]
        return arguments

    @classmethod
    def of(cls, path: Path, given: Mapping[str, Any]) -> Connection | None:
        """Return the connection by a command's options.

        And where they say nothing by ``[connection]`` of an operator's file.

        None if neither names a SuperLink. Options are given by field name; paths in the file are taken from its folder.
        """
        values = cls._table(path) | {name: value for name, value in given.items() if value}
        return cls(**values) if values.get("superlink") else None

    @classmethod
    def needed(cls, path: Path, given: Mapping[str, Any]) -> Connection:
        """Like :meth:`of`, but raise if neither names a SuperLink."""
        found = cls.of(path, given)
        if found is None:
            raise ConfigurationError(
                f"Expected the SuperLink as --superlink HOST:PORT, or as superlink in [connection] of {path}, got "
                "neither.",
                kind="missing",
                setting="superlink",
            )
        return found

    @classmethod
    def _table(cls, path: Path) -> dict[str, Any]:
        values = operators_values(path.expanduser().absolute()).get(CONNECTION_TABLE, {})
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"Expected a table [connection] in {path}, got {values!r}.", kind="malformed")
        folder, kinds = path.expanduser().resolve().parent, {one.name: str(one.type) for one in fields(cls)}
        read: dict[str, Any] = {}
        try:
            named = named_values(cls, {"superlink": "", **values})  # a command may say it instead
            for name, value in named.items():
                kind = bool if kinds[name] == "bool" else str
                read[name] = Setting(name=name.replace("_", "-"), attribute=name, kind=kind, default=None).read(value)
                if kinds[name].startswith("Path") and read[name]:
                    read[name] = folder / Path(read[name]).expanduser()
        except ConfigurationError as error:
            raise error.reworded(f"{path}: [connection]: {error}") from error
        return read


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
    """Return the context that checks a SuperLink's certificate, made as Flower's SuperNode makes it."""
    if root_certificates is None:
        return httpx.create_ssl_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=root_certificates.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:  # an SSLError is an OSError, what is not ASCII a ValueError
        raise ConfigurationError(
            f"Expected certificates in PEM form at {root_certificates}, got none that can be read: ask the server's "
            "operator for the certificate of its authority.",
            kind="unreadable",
        ) from error
    return context


def expiries(path: Path | None) -> list[float]:
    """Return the expiry of each certificate in a PEM file, in seconds since 1970; empty if none can be read."""
    if path is None:
        return []
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return []  # whoever needs the file reports what is wrong with it
    return [certificate.not_valid_after_utc.timestamp() for certificate in found]


def server_name(certificate: Path | None) -> str:
    """Return the name of a server in a login: SHA-256 of its certificate's public key; empty without TLS."""
    if certificate is None:
        return ""
    try:
        return name_of(x509.load_pem_x509_certificates(certificate.read_bytes())[0])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Expected a certificate at {certificate}, got none that can be read.", kind="unreadable"
        ) from error


def name_of(certificate: x509.Certificate) -> str:
    """Return the name in 64 hexadecimal digits; a certificate renewed with its key keeps it."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


def presented_by(host: str, port: int, timeout_s: float) -> Presented | None:
    """Return the certificate that a host shows, unchecked.

    None if none comes in time, for connecting and for TLS each.
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
    """Return a time for people to read."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(printable(str(name.value)) for name in list(extension.value)[:_MOST_NAMES])


NO_SERVER_BEHIND = (502, 503, 504)
NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64  # OpenSSL's X509_V_ERR
CERTIFICATE_CAUSES = {
    NOT_YET_VALID: "certificate-not-yet-valid",
    _EXPIRED: "certificate-expired",
    _OTHER_NAME: "certificate-name",
    _OTHER_ADDRESS: "certificate-name",
}


def cause_of(error: BaseException) -> str:
    """Cause of a failed call, one of few fixed words; empty if the SuperLink, or something in its place, answered."""
    if isinstance(error, httpx.HTTPStatusError):
        return "unreachable" if error.response.status_code in NO_SERVER_BEHIND else ""
    if not isinstance(error, httpx.TransportError):
        return ""
    for inner in reversed(causes_of(error)):
        if isinstance(inner, ssl.SSLCertVerificationError):
            return CERTIFICATE_CAUSES.get(inner.verify_code, "certificate-unknown")
        if isinstance(inner, ssl.SSLError):
            return "no-tls"
        if isinstance(inner, socket.gaierror):
            return "name-not-found"
        if isinstance(inner, ConnectionRefusedError):
            return "refused"
        if isinstance(inner, httpx.TimeoutException | TimeoutError):
            return "timed-out"
    return "unreachable"


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and what it was raised from, the outermost first."""
    found: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in found:
        found.append(inner)
        inner = inner.__cause__ or inner.__context__
    return found
