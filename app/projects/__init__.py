"""Somebody's Flower project, run as it is in this process and tried with privacy; for ``murmurfl try``."""
