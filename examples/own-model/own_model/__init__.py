"""Tumours told apart from tabular data, with a model, a loss, a strategy and a mechanism of one's own."""
