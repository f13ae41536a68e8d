"""Side releases: what may be released beside a training, each with a share of mu^2."""
