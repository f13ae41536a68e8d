"""A small model of breast tumours on many clients, trained by Flower."""
