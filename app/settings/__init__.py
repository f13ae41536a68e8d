"""Every setting of a run, declared once: keys, what goes together, files and command lines they come from."""
