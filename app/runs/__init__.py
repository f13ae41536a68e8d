"""One run: from a configuration to clients and a strategy, the training, its result and its files."""
