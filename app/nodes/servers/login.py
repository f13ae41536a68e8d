"""Log in to a server as its owner: what `flwr` sends from then on carries the login."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import click
import httpx
from cryptography import x509
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import AuthnType
from flwr.supercore.address import parse_address
from flwr.supercore.credential_store import CredentialStore, get_credential_store

from ....privacy import ConfigurationError
from ....privacy.permits import LONGEST_LOGIN_S, OwnerKey
from ..connections.certificate import tls_context
from .gate import name_of
from .own_server import TIMEOUT_S, answer_to
from .server_health import is_loopback

_HOUR_S = 3600


def log_in(key: OwnerKey, connection: str | None, hours: float) -> tuple[str, int]:
    """Log in to the server of one of Flower's connections, and keep the login where `flwr` looks for it.

    Parameters
    ----------
    connection : str or None
        A name in Flower's ``config.toml``, as for ``flwr run``; None: the default one.
    hours : float
        How long the login lasts.

    Returns
    -------
    tuple of str and int
        The server's address, and when the login ends, in seconds since 1970.

    Raises
    ------
    ConfigurationError
        If there is no such connection, no server with a valid certificate answers, or it refuses this owner; no login
        is kept.

    Notes
    -----
    The login holds only for the server whose certificate was checked; the key stays here. Whoever reads Flower's
    credentials file has the login.
    """
    if not 0 < hours * _HOUR_S <= LONGEST_LOGIN_S:
        raise ConfigurationError(f"Expected hours > 0 and at most {LONGEST_LOGIN_S // _HOUR_S}, got {hours:g}.")
    address, root, insecure = _connection(connection)
    if insecure and not is_loopback((parse_address(address) or ("",))[0]):
        raise ConfigurationError(
            f"Expected TLS on the way to {address}, got insecure = true: whoever listens there would have the login."
        )
    until = int(time.time() + hours * _HOUR_S)
    try:
        context = False if insecure else tls_context(root)
        text = key.login(_server(address, context) if context else "", until=until)
        _try(address, context, text)
    except (OSError, ValueError, httpx.HTTPError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"Expected a server at {address} that shows a certificate for its name, got none ({error}): look at the "
            "connection in Flower's config.toml."
        ) from error
    keep_login(get_credential_store(), address, text)
    return address, until


def keep_login(store: CredentialStore, address: str, text: str) -> None:
    """Put a login into Flower's own store of credentials, where `flwr` looks for it."""
    # `flwr` asks for a refresh token when the first was refused; there is none.
    for name, value in ((ACCESS_TOKEN_STORE_KEY, text), (REFRESH_TOKEN_STORE_KEY, "none")):
        store.set(name % address, value.encode())
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())


def _connection(name: str | None) -> tuple[str, Path | None, bool]:
    """Address, root certificates, and whether TLS is off."""
    from flwr.cli.flower_config import read_superlink_connection

    try:
        found = read_superlink_connection(name)
    except click.ClickException as error:
        raise ConfigurationError(error.message) from error
    if not found.address:
        raise ConfigurationError(
            f"Expected a connection with an address, got {found.name!r} without: name one of Flower's config.toml."
        )
    return found.address, Path(found.root_certificates) if found.root_certificates else None, bool(found.insecure)


def _server(address: str, context: ssl.SSLContext) -> str:
    """The name of the server there, by its checked certificate."""
    parsed = parse_address(address)
    if parsed is None:
        raise ConfigurationError(f"Expected an address HOST:PORT, got {address!r}.")
    host, port, _ = parsed
    with (
        socket.create_connection((host, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return name_of(x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b""))


def _try(address: str, context: ssl.SSLContext | bool, text: str) -> None:
    """Ask for something that the server tells only its owners."""
    answer = answer_to("list-runs", address, context, text)
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise ConfigurationError(
            f"Expected {address} to take this owner's commands, got a refusal: have its operator put the public half "
            "of the key into the file that `murmurfl server --owners` names, and set both clocks."
        )
    if answer.status_code != httpx.codes.OK:
        raise ConfigurationError(f"Expected {address} to be a SuperLink, got HTTP {answer.status_code}.")
