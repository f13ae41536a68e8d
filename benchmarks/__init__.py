"""Timings, as ratios measured in one run; never tests."""
