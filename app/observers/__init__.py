"""What only a simulation can see of a run: nothing here may ever leave a machine."""
