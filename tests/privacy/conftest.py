"""Ledgers on a disk nobody waits for."""

import os

import pytest
from murmurfl.privacy import sqlite_ledger


@pytest.fixture
def quick_disk(request, monkeypatch):
    """Waiting for the disk takes long, and a killed process loses nothing it has written, waited for or not."""
    if "real_disk" not in request.fixturenames:
        real = sqlite_ledger.connect

        def connect(*arguments):
            connection = real(*arguments)
            connection.execute("PRAGMA synchronous = OFF")
            return connection

        monkeypatch.setattr(sqlite_ledger, "connect", connect)
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def real_disk():
    """Asks for the disk to be waited for all the same."""
