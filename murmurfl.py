"""The import root of a checkout and of the bundle Flower ships: this folder, as the package ``murmurfl``."""

from pathlib import Path

__path__ = [str(Path(__file__).parent)]
