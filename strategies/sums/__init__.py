"""Adding up a round: plain releases, or masked ones that helpers open."""
