"""Losses of the margin <w, a> whose constants are known, with features no longer than R; float64, no bias."""

import math

import numpy as np
from murmurfl.privacy import clip_per_sample


class Margin:
    """A loss of the margin, from its derivative; ``smoothness`` is L and ``gradient_bound`` the longest gradient."""

    clips_contractively = True

    def __init__(self, size, bound):
        self.shapes, self.bound = [(size,)], bound

    def __call__(self, parameters, samples):
        features = self.bounded(samples[0])
        return self.slopes(features @ np.asarray(parameters[0], np.float64), samples[1])[:, None] * features

    def bounded(self, features):
        """Clipping rounds: what is short enough is left as it is."""
        features = np.asarray(features, np.float64)
        short = np.einsum("ij,ij->i", features, features).max(initial=0.0) <= self.bound**2
        return features if short else clip_per_sample(features, self.bound)

    def at_points(self, points, samples):
        features = self.bounded(samples[0])
        return self.slopes(np.einsum("ij,ij->i", features, points), samples[1])[:, None] * features


class Logistic(Margin):
    """Labels 0 and 1."""

    def __init__(self, size, bound):
        super().__init__(size, bound)
        self.smoothness, self.gradient_bound = bound**2 / 4, bound

    def slopes(self, margins, labels):
        return 0.5 * (1.0 + np.tanh(0.5 * margins)) - labels


class Ridge(Margin):
    """The squared distance of the margin to the label."""

    gradient_bound = math.inf

    def __init__(self, size, bound):
        super().__init__(size, bound)
        self.smoothness = 2.0 * bound**2

    def slopes(self, margins, labels):
        return 2.0 * (margins - labels)


class NonconvexLogistic(Logistic):
    """With the penalty lambda sum_j w_j^2 / (1 + w_j^2): smooth, of bounded gradient, and not convex."""

    convex = False
    clips_contractively = False
    strength = 0.01

    def __init__(self, size, bound):
        super().__init__(size, bound)
        self.smoothness += 2 * self.strength
        self.gradient_bound += self.strength * 3 * math.sqrt(3 * size) / 8

    def __call__(self, parameters, samples):
        return super().__call__(parameters, samples) + self._penalty(np.asarray(parameters[0], np.float64))

    def at_points(self, points, samples):
        return super().at_points(points, samples) + self._penalty(points)

    def _penalty(self, weight):
        return self.strength * 2 * weight / np.square(1 + np.square(weight))


class Undeclared:
    """A model that says nothing about its loss."""

    def __init__(self, size):
        self.shapes = [(size,)]

    def __call__(self, parameters, samples):
        return np.zeros((len(samples[1]), self.shapes[0][0]))


class Quadratic:
    """Half the squared distance to a sample, 1-smooth; or times a curvature that differs from sample to sample."""

    def __init__(self, size, curved=False):
        self.shapes, self.curved = [(size,)], curved

    def __call__(self, parameters, samples):
        rows = np.asarray(parameters[0], dtype=np.float64) - samples
        return rows * (1 + samples[:, :1] ** 2) if self.curved else rows


class Data:
    """The gradient of a sample is the sample, at every point: contributions are the data."""

    def __init__(self, shapes):
        self.shapes = shapes

    def __call__(self, parameters, samples):
        return samples
