"""A small network on a table of 30,000 customers of 20 banks: as it was, and with privacy for every single customer."""
