"""Secure aggregation: rosters, masks, and the rule by which helpers open sums."""
