"""The app of the hostile server: see attack.py."""
