"""Flower's internals that the application uses outside of its engines and nodes: run, mods, grid, bundle, login."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.credential_store import CredentialStore
    from flwr.superlink.grid import InMemoryGrid

__all__ = ["ClientAppCallable", "bundle_of", "keep_login", "simulation_grid", "without_log"]


def simulation_grid(grid: Grid) -> InMemoryGrid | None:
    """``grid`` if it is that of Flower's simulation, else None."""
    module: Any = sys.modules.get(
        "flwr.superlink.grid"
    )  # half a second to import: whoever made such a grid has done so
    return cast("InMemoryGrid", grid) if module is not None and isinstance(grid, module.InMemoryGrid) else None


def bundle_of(folder: Path) -> bytes:
    """Return the bundle that ``flwr run`` makes of a project."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(folder)


def keep_login(store: CredentialStore, address: str, text: str) -> None:
    """Put a login into Flower's own store of credentials, where `flwr` looks for it."""
    # Here, because the store takes half a second to import, and most processes keep no login.
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType

    # `flwr` asks for a refresh token when the first was refused; there is none.
    for name, value in ((ACCESS_TOKEN_STORE_KEY, text), (REFRESH_TOKEN_STORE_KEY, "none")):
        store.set(name % address, value.encode())
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())


@contextmanager
def without_log() -> Iterator[None]:
    """Log nothing until the block ends."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
