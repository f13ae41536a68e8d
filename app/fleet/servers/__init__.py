"""The server's process: Flower's SuperLink, watched and started again."""
