"""What the bundle names as its client. `murmurfl node` executes no code of a bundle: it runs the installed client."""

from murmurfl.app.client_app import app

__all__ = ["app"]
