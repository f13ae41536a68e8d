"""What two Gaussian messages tell, exactly, where the second's shift was chosen by what the first one was."""

import numpy as np
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm


def hockey_stick(shift, epsilon):
    """Sup over events of P(E) - e^epsilon Q(E) for N(shift, 1) and N(0, 1), any real epsilon."""
    safe = np.maximum(np.abs(shift), 1e-9)
    beyond = np.exp(epsilon + log_ndtr(-epsilon / safe - safe / 2))
    return np.where(safe > 1e-9, ndtr(-epsilon / safe + safe / 2) - beyond, np.maximum(1 - np.exp(epsilon), 0.0))


def delta_of_two(first, second, epsilon):
    """Exact delta of two Gaussian messages, the second's shift a function of the first message: quadrature."""
    y = np.linspace(-12.0, 14.0, 20_001)
    loss = first * y - first**2 / 2
    values = norm.pdf(y - first) * hockey_stick(second(y), epsilon - loss)
    return float(np.sum(values) * (y[1] - y[0]))
