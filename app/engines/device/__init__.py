"""The arithmetic of simulated machines on a GPU, or on PyTorch's CPU backend: gradients, clipping, rounding and noise.

The rule of a release stays where it is, in :mod:`murmurfl.privacy`: who may release, what is recorded, what is
acknowledged and what a release is made of. Here is only how the numbers of a whole block of machines are computed on a
device that PyTorch knows, integers on the same grid. For simulations alone: real nodes have no such choice.
"""

from __future__ import annotations

__all__: list[str] = []
