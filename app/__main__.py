"""``python -m murmurfl.app``: the ``murmurfl`` command."""

from .cli import main

main()
