"""Clients of a simulation: asked together, with ledgers that end with the process."""
