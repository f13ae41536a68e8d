"""Methods: one object for each ``strategy`` that a run configuration can name."""

from ...clients.algorithms import ALGORITHMS
from ..settings.registry import Registry
from . import full_batch_method, gradient_methods, mu2_methods  # noqa: F401 - makes the methods of algorithms
from .method import AutoMethod, Method
from .presets import Hyperparameters, ResolvedRun

METHODS: Registry[Method] = Registry(
    "strategy",
    Method,
    (*(Method.built_in[name]() for name in ALGORITHMS if name in Method.built_in), AutoMethod()),
)
"""Methods in the order of the registry of algorithms, of which some are for apps alone."""

__all__ = ["METHODS", "Hyperparameters", "Method", "ResolvedRun"]
