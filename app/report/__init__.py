"""What finished runs left behind, as one page."""
