"""Finished runs as one page, made from the files that they left."""
