"""Records and how they are read: the schema, sources of items, and a client's records."""
