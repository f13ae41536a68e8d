"""Features of our own."""

import numpy as np


def profiles(images):
    """Return the mean of each row and of each column."""
    return np.concatenate([images.mean(axis=1), images.mean(axis=2)], axis=1)


profiles.norm_bound = 4.0  # sixteen means of 8 x 8 pixels, none above 1
