"""The papers' tables and figures: what is run, what the paper prints, and how both are shown."""
