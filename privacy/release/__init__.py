"""One client: its policy, what it admits, clips, releases and remembers of its data."""
