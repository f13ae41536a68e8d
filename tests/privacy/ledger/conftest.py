"""A ledger on disk for each test."""

import pytest
from murmurfl.privacy import (
    SQLiteLedger,
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "node" / "ledger.db"
    path.parent.mkdir()
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, data="ward 3")
    return path
