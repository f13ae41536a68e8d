"""What happens on a node, a helper or a server, and who is told of it: log, health, metrics."""
