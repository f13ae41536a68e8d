"""The ``murmurfl`` command."""
