"""Callbacks: what a training calls between its rounds, and no guarantee depends on."""
