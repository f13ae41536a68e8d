"""A convolutional network on MNIST over 100 machines: as it was, and with privacy for every single image."""
