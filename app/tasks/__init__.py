"""Tasks: data sets, their features, and how they are split among machines."""
