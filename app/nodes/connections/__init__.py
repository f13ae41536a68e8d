"""How a node reaches its SuperLink, and why it does not."""
