"""A small model of breast tumours on many machines, trained by Flower."""
