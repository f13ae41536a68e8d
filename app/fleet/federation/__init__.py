"""A federation set up without a key that travels: keys and cards, the coordinator, its members."""
