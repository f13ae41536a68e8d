"""Keyed Gaussian noise on a grid: a row is a pure function of a secret key and a nonce."""
