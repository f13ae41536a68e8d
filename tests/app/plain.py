"""Runs from the keys' own defaults: ten like clients and mu2, small enough for a test."""

from murmurfl.app.runs.simulate import simulate as simulate_from_the_default_run
from murmurfl.app.settings.layers import DEFAULT_RUN
from murmurfl.app.settings.run_config import RunConfig, run_keys

PLAIN = {name: run_keys()[name].default for name in DEFAULT_RUN if name != "epsilon"} | {"mu": RunConfig().mu}
"""The keys' defaults in the place of the default run's settings."""
SET = [word for name, value in PLAIN.items() for word in ("--set", f"{name}={value}")]
"""The same on a command line; what comes later wins."""


def simulate(config=None, **settings):
    """Train as :func:`murmurfl.app.simulate` does, from the keys' defaults."""
    if config is None or isinstance(config, dict):
        given = config or {}
        plain = {name: value for name, value in PLAIN.items() if name != "mu" or "epsilon" not in {*given, *settings}}
        config = {**plain, **given}
    return simulate_from_the_default_run(config, **settings)
