"""Side releases, the server's half."""
