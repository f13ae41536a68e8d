"""Benchmarks: timings as ratios measured in one run, and the pages that show them. None of them is a test."""
