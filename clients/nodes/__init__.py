"""Operators' files of real machines with apps of their own."""
