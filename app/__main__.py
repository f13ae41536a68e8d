"""``python -m murmurfl.app``: the ``murmurfl`` command."""

from .commands.main import main

main()
