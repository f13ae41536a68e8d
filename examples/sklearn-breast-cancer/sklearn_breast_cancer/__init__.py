"""Breast tumours told apart by scikit-learn, over ten clients."""
