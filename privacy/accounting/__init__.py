"""Privacy accounting: Gaussian DP, guarantees and their sentences, amplification, and the noise a policy asks for."""
