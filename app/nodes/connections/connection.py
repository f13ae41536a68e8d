"""How a node reaches its SuperLink: a command's options, or the table ``[connection]`` of its operator's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....clients.nodes.operators_file import CONNECTION_TABLE, named_values, operators_values
from ....privacy import ConfigurationError
from ....privacy.setting import Setting


@dataclass(frozen=True)
class Connection:
    """How a node reaches its SuperLink."""

    superlink: str  # host and port
    # PEM file that the SuperLink's certificate is checked against; default the public authorities that Python's
    # ``certifi`` knows, or those that the environment variable SSL_CERT_FILE names
    root_certificates: Path | None = None
    # The node's own key (``ssh-keygen -t ecdsa -b 384``), registered with the SuperLink
    private_key: Path | None = None
    insecure: bool = False  # plain HTTP: for tests on one machine

    def __post_init__(self) -> None:
        host, colon, port = self.superlink.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(f"Expected the SuperLink as HOST:PORT, got {self.superlink!r}.")
        if self.insecure and (self.root_certificates or self.private_key):
            raise ConfigurationError("Expected no certificates and no key with --insecure: both need TLS.")
        for name, path in (("root certificates", self.root_certificates), ("a private key", self.private_key)):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigurationError(f"Expected {name} at {path}, got no file that can be read.")

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
    def table(cls, path: Path) -> dict[str, Any]:
        """The table ``[connection]`` of an operator's file, by field name; empty if there is none.

        Raises
        ------
        ConfigurationError
            If it is no table, or a key or a value is impossible.
        """
        values = operators_values(path.expanduser().absolute()).get(CONNECTION_TABLE, {})
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"Expected a table [connection] in {path}, got {values!r}.")
        try:
            named = named_values(cls, {"superlink": "", **values})  # a command may say it instead
            read = {
                name: Setting(name.replace("_", "-"), _TYPES[name], None).read(value) for name, value in named.items()
            }
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: [connection]: {error}") from error
        folder = path.expanduser().resolve().parent
        files = {name: folder / Path(read[name]).expanduser() for name in _FILES if read.get(name)}
        return {**read, **files}


@dataclass(frozen=True)
class Given:
    """What a command's options say of the connection; the operator's file says the rest."""

    superlink: str = ""
    root_certificates: Path | None = None
    private_key: Path | None = None
    insecure: bool = False

    def connection(self, path: Path) -> Connection | None:
        """The connection by these options and an operator's file; None if neither names a SuperLink.

        Relative paths in the file are taken from its folder.

        Raises
        ------
        ConfigurationError
            If a value is impossible.
        """
        values = Connection.table(path) | {name: value for name, value in vars(self).items() if value}
        return Connection(**values) if values.get("superlink") else None

    def needed_connection(self, path: Path) -> Connection:
        """Like :meth:`connection`, but raise if neither names a SuperLink."""
        found = self.connection(path)
        if found is None:
            raise ConfigurationError(
                f"Expected the SuperLink as --superlink HOST:PORT, or as superlink in [connection] of {path}, got "
                "neither."
            )
        return found


_FILES = ("root_certificates", "private_key")
_TYPES = {"superlink": "str", "root_certificates": "str", "private_key": "str", "insecure": "bool"}
