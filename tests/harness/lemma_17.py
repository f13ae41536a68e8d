"""The momentum of tran-cutkosky-2022's lemma 17, straight from its formula."""

import numpy as np
from murmurfl.privacy.mechanisms.momentum_tree import compose


def reconstructed_momentum(anchored, moved, residual, *, epoch_length, alpha, gamma):
    r"""The momentum of the last step from three series of differences: lemma 17, without noise (algorithm 2).

    With t = q N + r, 0 <= r < N, and w_{qN} the anchor of step t, m_t = alpha (G_[1,t] + r_[1,t]) where G_[1,t] is made
    from the sums over [1, r] and [r + 1, r + N] and, for the epochs after, from (1 - gamma) Delta + gamma G: what
    changed from anchor to anchor is small, and would need little noise. The lemma's two sums have ranges of their own
    (algorithm 4 prints one). It is true only if every sample returns exactly N steps later.

    Row s of ``anchored`` is the gradient of step s's sample at the step's anchor, ``moved`` the same minus that at the
    anchor before (not used in the first epochs), ``residual`` its gradient at w_s minus that at the anchor.
    """
    n, t = epoch_length, len(anchored)
    decay = 1 - alpha

    def total(terms, first, last):
        sums = np.zeros(terms.shape[1])
        for y, z in compose(first, last):
            node = decay ** np.arange(z - y, -1, -1.0) @ terms[y - 1 : z]
            sums += decay ** (last - z) * node
        return sums

    q, r = divmod(t, n)
    gradient = decay ** (t - r) * total(anchored, 1, r)
    if q:
        second = sum(decay ** (n * i) * (1 - gamma) ** (q - 1 - i) for i in range(q))
        gradient += second * total(anchored, r + 1, r + n)
    for i in range(1, q):
        first, last = t - i * n + 1, t - (i - 1) * n
        weight = sum((1 - gamma) ** j * decay ** ((i - 1 - j) * n) for j in range(i))
        gradient += weight * ((1 - gamma) * total(moved, first, last) + gamma * total(anchored, first, last))
    return alpha * (gradient + total(residual, 1, t))
