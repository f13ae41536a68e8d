"""What a training request is for: gradients, the mean of the features, or an evaluation of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import RefusedError, protocol
from .requests import ReleaseOf, malformed

if TYPE_CHECKING:
    from ..side.centring_client import Centring
    from ..side.evaluation_client import Evaluation

_TAKES_NO_CENTRE = "this machine is not configured for centring: it releases no mean and takes no centre"
_NEEDS_CENTRE = "this machine is configured for centring: a request for gradients must bring a centre"
_DOES_NOT_EVALUATE = "this machine is not configured for private evaluation: it releases no count"

_RELEASES: dict[str | None, ReleaseOf] = {
    None: "gradients",
    protocol.OF_MEAN: "mean",
    protocol.OF_EVALUATION: "evaluation",
}


def read_release_of(
    config: Mapping[str, Any], centring: Centring | None, evaluation: Evaluation | None = None
) -> tuple[ReleaseOf, NDArray[np.float32] | None]:
    """What a training request is for, and the centre it brings; refused where the machine is configured otherwise.

    Parameters
    ----------
    config : mapping
        The request's entries.
    centring : Centring or None
        The machine's.
    evaluation : Evaluation or None
        The machine's.

    Raises
    ------
    RefusedError
        With a fixed text.

    Notes
    -----
    An answer or a refusal that depends on the request and on what is public of the machine.
    """
    said, content = config.get(protocol.RELEASE_OF), config.get(protocol.CENTRE)
    if said is not None and (not isinstance(said, str) or said not in _RELEASES):
        raise malformed(f"{protocol.RELEASE_OF} is something this machine does not release")
    of = _RELEASES[said]
    if of == "evaluation" and evaluation is None:
        raise RefusedError(protocol.NOT_CONFIGURED, _DOES_NOT_EVALUATE)
    if centring is None:
        if of == "mean" or content is not None:
            raise RefusedError(protocol.NOT_CONFIGURED, _TAKES_NO_CENTRE)
        return of, None
    if of == "mean":
        if content is not None:
            raise malformed("a request for the mean brings no centre")
        return of, None
    if content is None:
        raise RefusedError(protocol.NOT_CONFIGURED, _NEEDS_CENTRE)
    return of, _read_centre(content, centring.num_features)


def _read_centre(content: Any, num_features: int) -> NDArray[np.float32]:
    if not isinstance(content, bytes) or len(content) != 4 * num_features:
        raise malformed(f"expected {protocol.CENTRE} to be {num_features} float32 values, little endian")
    centre = np.frombuffer(content, dtype="<f4").astype(np.float32)
    if not np.isfinite(centre).all():
        raise malformed(f"expected {protocol.CENTRE} to be finite")
    return centre
