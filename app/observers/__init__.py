"""What only a simulation can see of a run. On real machines none of it may ever leave a machine."""
