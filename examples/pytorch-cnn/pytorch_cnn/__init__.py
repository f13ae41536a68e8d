"""A convolutional network on MNIST over 100 clients: as it was, and with privacy for every single image."""
