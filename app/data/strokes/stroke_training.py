"""How a net learns random characters: a fixed number of steps, each on images that were never drawn before."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .random_characters import Alphabet, drawn, keyed
from .stroke_net import StrokeNet

logger = logging.getLogger(__name__)

_WARM_UP = 100
_LAST_RATE = 0.02
_DECAY = 1e-3
_SMOOTHING = 0.05
_SAID_EVERY = 500


@dataclass(frozen=True)
class Lesson:
    """What one net learns, and for how long: everything that settles its weights.

    Parameters
    ----------
    seed : int
        Settles alphabet, images and first weights.
    classes, steps, batch : int
    rate : float
        Of the first steps; it falls linearly.
    channels : tuple of int
    width : int
        Features of the net.
    exact : bool
        In float64 throughout; otherwise products in bfloat16, which is faster and differs from machine to machine.
    """

    seed: int
    classes: int = 3000
    steps: int = 15000
    batch: int = 128
    rate: float = 2e-3
    channels: tuple[int, ...] = (16, 32, 64)
    width: int = 256
    exact: bool = False


def taught(lesson: Lesson) -> list[NDArray[np.float64]]:
    """The frozen layers of a net that has learnt a lesson (:meth:`StrokeNet.frozen`)."""
    import torch

    torch.set_num_threads(1)
    dtype = torch.float64 if lesson.exact else torch.float32
    alphabet = Alphabet.random(lesson.classes, keyed("alphabet", lesson.seed))
    net = StrokeNet(lesson.channels, lesson.width, lesson.classes, dtype).start(keyed("weights", lesson.seed))
    optimizer = torch.optim.AdamW(net.learnt(), lesson.rate, weight_decay=_DECAY, fused=True)
    hand, right = keyed("images", lesson.seed), 0.0
    for step in range(lesson.steps):
        optimizer.param_groups[0]["lr"] = lesson.rate * _share(step, lesson.steps)
        classes = hand.integers(lesson.classes, size=lesson.batch)
        images = drawn(alphabet, classes, hand, np.float64 if lesson.exact else np.float32)
        labels = torch.from_numpy(classes)
        pixels = torch.from_numpy(images)[:, None].contiguous(memory_format=torch.channels_last)
        with nullcontext() if lesson.exact else torch.autocast("cpu", torch.bfloat16):
            scores = net(pixels, training=True)
        loss = torch.nn.functional.cross_entropy(scores.to(dtype), labels, label_smoothing=_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += float((scores.argmax(1) == labels).double().mean())
        if (step + 1) % _SAID_EVERY == 0:
            logger.info("step %d of %d: %.1f %% right", step + 1, lesson.steps, 100 * right / _SAID_EVERY)
            right = 0.0
    return net.frozen()


def _share(step: int, steps: int) -> float:
    """Of the rate, in a step."""
    return min(1, (step + 1) / _WARM_UP) * max(_LAST_RATE, 1 - step / steps)
