"""What the bundle names as its client. `murmurfl node` and `murmurfl helper` execute no code of a bundle."""

from murmurfl.app.client_app import app

__all__ = ["app"]
