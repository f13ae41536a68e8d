"""The version of murmurfl, for all of it: pyproject.toml says the same, which a test holds."""

__version__ = "0.2.0"
