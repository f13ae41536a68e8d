"""How scattering coefficients are whitened: by the covariance that they have over random characters.

The 81 x 49 coefficients are first projected onto the main directions of the maps and of the places, one after the
other, and the covariance of what is left is taken apart: a smaller file, and next to nothing is lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..features.scattering import scattering
from ..features.whitened import ROUGHNESS, balanced, projected
from .random_characters import Alphabet, drawn, keyed

CLASSES, IMAGES = 4000, 12000
MAP_DIRECTIONS, PLACE_DIRECTIONS, KEPT = 32, 24, 512
_AT_A_TIME = 500


def whitening(
    images: int = IMAGES, directions: tuple[int, int] = (MAP_DIRECTIONS, PLACE_DIRECTIONS), kept: int = KEPT
) -> dict[str, NDArray[np.float64]]:
    """What :class:`~murmurfl.app.data.features.whitened.Whitening` needs, in float64.

    Parameters
    ----------
    images : int
        Random characters whose covariance is taken.
    directions : tuple of int
        Of the maps and of the places.
    kept : int
        Features, those with the largest variance.
    """
    hand = keyed("whitening")
    alphabet, parts = Alphabet.random(CLASSES, hand), []
    for _ in range(0, images, _AT_A_TIME):
        classes = hand.integers(CLASSES, size=min(_AT_A_TIME, images))
        parts.append(scattering(drawn(alphabet, classes, hand, np.float64)))
    coefficients = np.concatenate(parts)
    size = np.sqrt((coefficients**2).mean(axis=(0, 2, 3)))
    gains = 1 / (size + ROUGHNESS * size.max())
    rows = balanced(coefficients, gains)
    centred = rows - rows.mean(axis=0)
    maps = _main(np.einsum("ncp,ndp->cd", centred, centred, optimize=True), directions[0])[1]
    places = _main(np.einsum("ncp,ncq->pq", centred, centred, optimize=True), directions[1])[1]
    inner = projected(rows, maps, places)
    centre = inner.mean(axis=0)
    variances, axes = _main((inner - centre).T @ (inner - centre) / len(inner), kept)
    return {
        "gains": gains,
        "maps": maps,
        "places": places,
        "axes": axes.T,
        "variances": variances,
        "centre": centre @ axes,
    }


def _main(covariance: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest eigenvalues, and their eigenvectors as columns, each with a positive largest entry."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    return values, vectors * np.sign(largest)
