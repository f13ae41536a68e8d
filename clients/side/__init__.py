"""Side releases, the machine's half."""
