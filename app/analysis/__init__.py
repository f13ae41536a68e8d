"""What a policy would mean, and what a run's machines leak: before and after the fact."""
