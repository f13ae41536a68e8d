"""Tumours told apart from tabular data, with a model and a loss of one's own."""
