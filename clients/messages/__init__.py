"""Flower's messages on a machine: requests read, replies written, helpers' answers."""
