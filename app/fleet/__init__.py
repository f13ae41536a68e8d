"""Operation of a fleet: a federation, the server behind its gate, health and metrics, checks, a demonstration."""
