"""Operators' files of real clients with apps of their own."""
