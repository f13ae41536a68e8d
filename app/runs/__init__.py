"""One run: from a configuration to machines and a strategy, the training, its result and its files."""
