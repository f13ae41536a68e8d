"""A small CNN on handwritten digits, trained by Flower."""
