"""Strategies with a trusted server, which adds the noise for everybody."""
