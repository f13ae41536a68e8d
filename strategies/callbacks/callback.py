"""Hooks between the rounds of a training that no guarantee depends on."""

from __future__ import annotations


class Callback:
    """Base class of what a training calls between its rounds."""
