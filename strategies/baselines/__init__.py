"""Baselines of the papers: noisy SGD, ISRL-DP, delayed momentum."""
