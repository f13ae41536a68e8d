"""Models: per-sample gradients for the machines, loss and accuracy for the central evaluation."""
