"""One image as a record: a file, its bytes, or an array, decoded by itself.

Files need the extra ``images`` (Pillow): PNG, JPEG and WebP, whose decoders do no work that grows without bound with
what a file claims. Whatever else stands in a file, it is a record that does not fit, and costs no other record
anything, nor much time.
"""

from __future__ import annotations

import os
import stat
import struct
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import InvalidRecordError

IMAGE_ENCODER = "colour"
"""Encoder of a column of images that names none."""
LONGEST_SIDE = 224
"""Pixels of an image's longer side, to which a larger file is reduced."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_MOST_BYTES, _MOST_PIXELS, _MOST_JPEG_PIXELS = 1 << 25, 1 << 25, 1 << 27
_MOST_SIDE = 1 << 15  # of a taller image each row costs a call
_MOST_CHUNKS, _MOST_SEGMENTS, _MOST_SCANS = 20_000, 1_000, 100
_PNG, _JPEG, _SCAN, _FILL = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", 0xDA, 0xFF
_ORIENTATION, _WHITE, _SIXTEEN_BITS = 0x0112, 255, 65535
_COLOURS, _MAP_DIMS, _MAPS_DIMS = 3, 2, 3


@dataclass(frozen=True)
class ImageFile:
    """A file that is read when its record is; its text is the path within its folder.

    Notes
    -----
    **Formal guarantees.** No link is followed: one to another record's file would make this record depend on that one.
    Neither a pipe nor a device is waited for.
    """

    folder: Path
    name: str

    def __str__(self) -> str:
        return self.name.encode("utf-8", "replace").decode()

    def content(self) -> bytes:
        """Return the file's bytes; raise InvalidRecordError unless it is a plain file of at most 32 MiB."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            opened = os.open(self.folder / self.name, flags)
        except (OSError, ValueError):
            raise InvalidRecordError("a file that cannot be opened, or a link") from None
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            os.close(opened)
            raise InvalidRecordError("no plain file, or one of more than 32 MiB")
        with os.fdopen(opened, "rb") as file:
            try:
                content = file.read(_MOST_BYTES + 1)
            except OSError:
                raise InvalidRecordError("a file that cannot be read") from None
        if len(content) > _MOST_BYTES:
            raise InvalidRecordError("no plain file, or one of more than 32 MiB")
        return content


def pixels_of(cell: Any) -> NDArray[np.uint8]:
    """Return the image in a cell, shape (height, width, 3), uint8; raise InvalidRecordError if it is none.

    Parameters
    ----------
    cell : ImageFile, bytes, mapping with ``bytes``, or array
        An array is grey, of shape (height, width), or has 1, 3 or 4 values a pixel, integers from 0 to 255. A text is
        no image: no cell names a file that is then opened.
    """
    if isinstance(cell, Mapping):
        cell = cell.get("bytes")
    if isinstance(cell, ImageFile):
        cell = cell.content()
    if isinstance(cell, bytes | bytearray | memoryview):
        return decoded(bytes(cell))
    if not isinstance(cell, np.ndarray) or cell.dtype.kind not in "iu":
        raise InvalidRecordError("no image")
    if not cell.size or cell.min() < 0 or cell.max() > _WHITE:
        raise InvalidRecordError("an image without pixels, or with values that are no bytes")
    values = cell.astype(np.uint8)
    values = values[:, :, None] if values.ndim == _MAP_DIMS else values
    if values.ndim != _MAPS_DIMS or values.shape[2] not in (1, _COLOURS, _COLOURS + 1):
        raise InvalidRecordError("an image of another shape")
    if values.shape[2] == _COLOURS + 1:
        alpha = values[:, :, 3:].astype(np.float32) / _WHITE
        values = np.rint(values[:, :, :3] * alpha + _WHITE * (1 - alpha)).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], _COLOURS)))


def decoded(content: bytes) -> NDArray[np.uint8]:
    """Decode the bytes of a PNG, JPEG or WebP to an array of shape (height, width, 3).

    A camera's turn is undone, transparent parts are white, 16 bits become 8, of several pictures the first counts, and
    a longer side of more than 224 pixels is reduced to that. Raises InvalidRecordError if it cannot be decoded, or has
    more than 2^25 pixels (a JPEG 2^27), a side of more than 2^15, or more parts than any usual file has.
    """
    if not _is_usual(content):
        raise InvalidRecordError("no PNG, JPEG or WebP, or one of very many parts")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would say depends on the file
            return _decoded(content)
    except InvalidRecordError:
        raise
    except Exception:  # decoders raise what they like
        raise InvalidRecordError("an image that cannot be decoded") from None


def _decoded(content: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(BytesIO(content), formats=_FORMATS) as opened:
        width, height = opened.size
        most = _MOST_JPEG_PIXELS if content.startswith(_JPEG) else _MOST_PIXELS
        if not 0 < width * height <= most or max(width, height) > _MOST_SIDE:
            raise InvalidRecordError("an image of too many pixels")
        opened.draft(None, (2 * LONGEST_SIDE, 2 * LONGEST_SIDE))  # a JPEG is decoded at a fraction of its size
        turn = 1
        with suppress(Exception):  # a damaged block says nothing of the picture
            turn = int(opened.getexif().get(_ORIENTATION, 1))
        opened.load()
        image = _plain(opened)
    longer = max(image.size)
    if longer > LONGEST_SIDE:
        width, height = (max(round(side * LONGEST_SIDE / longer), 1) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BOX)
    values = np.asarray(image, dtype=np.uint8)
    return np.ascontiguousarray(_turned(values, turn))


def _plain(image: Any) -> Any:
    """Return an image of any mode in three bytes a pixel, with white behind what is transparent."""
    from PIL import Image

    mode = image.mode
    if mode == "F":
        raise InvalidRecordError("an image whose values have no known range")
    if mode.startswith("I"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, _SIXTEEN_BITS) >> 8
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _turned(values: NDArray[np.uint8], turn: int) -> NDArray[np.uint8]:
    """Undo the turn that a camera notes: 1 to 8, as in EXIF."""
    values = values.swapaxes(0, 1) if turn in (5, 6, 7, 8) else values
    values = values[::-1] if turn in (3, 4, 7, 8) else values
    return values[:, ::-1] if turn in (2, 3, 6, 7) else values


def _is_usual(content: bytes) -> bool:
    """Return True for a PNG, JPEG or WebP without so many parts that reading their headers alone would take long."""
    if content.startswith(_PNG):
        return _few_chunks(content)
    if content.startswith(_JPEG):
        return content.count(bytes([_FILL, _SCAN])) <= _MOST_SCANS and _few_segments(content)
    return content.startswith(b"RIFF") and content[8:12] == b"WEBP"


def _few_chunks(content: bytes) -> bool:
    place = len(_PNG)
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(content):
            return True
        place += 12 + struct.unpack_from(">I", content, place)[0]
    return False


def _few_segments(content: bytes) -> bool:
    """Return True if a JPEG has few segments, and no long fill between them, before its first scan."""
    place = 2
    for _ in range(_MOST_SEGMENTS):
        if place + 4 > len(content):
            return True
        if content[place] != _FILL or content[place + 1] == _FILL:
            return False
        if content[place + 1] == _SCAN:
            return True
        place += 2 + struct.unpack_from(">H", content, place + 2)[0]
    return False
