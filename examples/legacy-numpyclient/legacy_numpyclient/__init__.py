"""Softmax regression on handwritten digits, in NumPy, on Flower's legacy client interface."""
