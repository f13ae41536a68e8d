"""What carries a simulated run's messages: each engine gives the same model for the same seed."""
