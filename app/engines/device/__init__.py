"""The arithmetic of simulated clients on a GPU, or on PyTorch's CPU backend: gradients, clipping, rounding and noise.

Who may release, what is recorded and acknowledged, and what a release consists of stays in :mod:`murmurfl.privacy`.
This room only computes the numbers of a block of clients on a PyTorch device, as integers on the same grid. It is for
simulations: real nodes have no such choice.
"""

from __future__ import annotations

__all__: list[str] = []
