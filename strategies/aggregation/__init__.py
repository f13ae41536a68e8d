"""Aggregation: how the releases of a round become a sum; plain, masked, or with the noise of a trusted server."""
