"""Reads whether a training request is for gradients or for a side release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import RefusedError, protocol
from ..side import SIDE_RELEASES, Centring
from ..side.centring_client import Centred
from ..side.side_parts import Parts
from .requests import GRADIENTS, malformed

_NEEDS_CENTRE = "this machine is configured for centring: a request for gradients must bring a centre"
_KINDS = {kind.of: kind for kind in SIDE_RELEASES}


def read_release_of(config: Mapping[str, Any], parts: Parts) -> tuple[str, NDArray[np.float32] | None]:
    """Read what a training request is for and the centre it brings; refuse what the machine is not configured for.

    Answer and refusal depend on the request and on what is public of the machine; the texts are fixed.
    """
    said, content = config.get(protocol.RELEASE_OF), config.get(protocol.CENTRE)
    if said is not None and (not isinstance(said, str) or said not in _KINDS):
        raise malformed(f"{protocol.RELEASE_OF} is something this machine does not release")
    if said is not None and parts.of(said) is None:
        raise RefusedError(protocol.NOT_CONFIGURED, _KINDS[said].not_configured)
    of, centred = said or GRADIENTS, parts.of(Centring.of)
    if not isinstance(centred, Centred):
        if content is not None:
            raise RefusedError(protocol.NOT_CONFIGURED, Centring.not_configured)
        return of, None
    if of == Centring.of:
        if content is not None:
            raise malformed("a request for the mean brings no centre")
        return of, None
    if content is None:
        raise RefusedError(protocol.NOT_CONFIGURED, _NEEDS_CENTRE)
    return of, _read_centre(content, centred.centring.num_features)


def _read_centre(content: Any, num_features: int) -> NDArray[np.float32]:
    if not isinstance(content, bytes) or len(content) != 4 * num_features:
        raise malformed(f"expected {protocol.CENTRE} to be {num_features} float32 values, little endian")
    centre = np.frombuffer(content, dtype="<f4").astype(np.float32)
    if not np.isfinite(centre).all():
        raise malformed(f"expected {protocol.CENTRE} to be finite")
    return centre
