"""Images as records: what files hold, and how little a strange one changes."""

import os
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records.client_records import Records
from murmurfl.clients.records.encoders import register_encoder
from murmurfl.clients.records.image_files import LONGEST_SIDE, decoded, pixels_of
from murmurfl.clients.records.image_folders import ImageFolder
from murmurfl.privacy.errors import ConfigurationError, InvalidRecordError

from tests.harness.errors import raises

Image = pytest.importorskip("PIL.Image")

register_encoder("image", "means", lambda image: image.mean(axis=(0, 1)) / 500, 3)
SCHEMA = Schema(
    columns={"image": Column(kind="image", encoder="means", dimension=3)},
    label=Label(column="class", classes=("cat", "dog")),
)
GRADIENT = np.arange(16 * 20 * 3, dtype=np.uint32).reshape(16, 20, 3).astype(np.uint8)


def packed(image, kind="PNG", **options):
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


PLAIN = packed(Image.fromarray(GRADIENT))


def bomb(width, height):
    """A large PNG in few bytes."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def tall():
    """An image of one column, which decodes, though row by row."""
    return packed(Image.fromarray(np.zeros((40_000, 1, 3), np.uint8)))


def many_scans():
    return (
        packed(Image.fromarray(GRADIENT), "JPEG", progressive=True)[:-2]
        + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" * 500
    )


STRANGE = {
    "empty": b"",
    "a text": b"no image",
    "truncated": PLAIN[: len(PLAIN) // 2],
    "a bomb": bomb(60_000, 60_000),
    "an image that Pillow warns of": bomb(10_000, 10_000),
    "a tall image": tall(),
    "very many chunks": PLAIN[:33]
    + (struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))) * 30_000
    + PLAIN[33:],
    "very many scans": many_scans(),
    "very many segments": b"\xff\xd8" + b"\xff\xfe\x00\x02" * 5_000 + b"\xff\xd9",
    "a long fill": b"\xff\xd8" + b"\xff" * 100_000,
    "another format": packed(Image.fromarray(GRADIENT), "BMP"),
    "a TIFF": packed(Image.fromarray(GRADIENT), "TIFF"),
    "values without a range": packed(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
}


def folder_with(root, name, content, where="cat/0007.png"):
    """Twelve images, of which one holds something else."""
    folder = root / name
    for kind, colour in (("cat", 60), ("dog", 200)):
        (folder / kind).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((16, 16, 3), colour + number, np.uint8)
            (folder / kind / f"{number:04}.png").write_bytes(packed(Image.fromarray(pixels)))
    if content is not None:
        (folder / where).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", STRANGE)
def test_strange_file_counts_as_zero_and_changes_no_other_record(tmp_path, name, recwarn):
    ordinary = Records(ImageFolder(folder_with(tmp_path, "ordinary", PLAIN)), SCHEMA, together=True)
    strange = Records(ImageFolder(folder_with(tmp_path, "strange", STRANGE[name])), SCHEMA, together=True)
    others = np.arange(len(ordinary)) != 6
    assert len(strange) == len(ordinary) == 13
    assert ordinary.fits.all()
    assert strange.fits.tolist() == others.tolist()
    assert np.array_equal(strange[:][0][others], ordinary[:][0][others])
    assert not recwarn.list  # a warning would be seen outside


def test_links_pipes_and_directories_are_records_that_do_not_fit(tmp_path):
    folder = folder_with(tmp_path, "photos", None)
    (folder / "cat" / "link.png").symlink_to(folder / "dog" / "0001.png")
    os.mkfifo(folder / "cat" / "pipe.png")
    (folder / "cat" / "inner").mkdir()
    (folder / "cat" / ".hidden.png").write_bytes(PLAIN)
    (folder / ".hidden").mkdir()
    (folder / "README.txt").write_text("of the folder itself")
    rows = ImageFolder(folder)
    records = Records(rows, SCHEMA, together=True)
    names = [str(rows[number]["image"]) for number in range(len(rows))]
    assert rows.public_count == len(rows) == 16
    assert rows.classes == ("cat", "dog")
    others = {name for name, fits in zip(names, records.fits, strict=True) if not fits}
    assert others == {"cat/link.png", "cat/pipe.png", "cat/inner"}  # a hidden image is one


def test_replaced_file_leaves_the_others_in_their_secret_order(tmp_path):
    """Paths order a folder, so a file in another directory would move those between; a keyed order moves none."""
    here = folder_with(tmp_path, "here", PLAIN, "cat/a.png")
    there = folder_with(tmp_path, "there", PLAIN, "dog/z.png")

    def others(folder, secret=None):
        rows = ImageFolder(folder)
        rows = rows if secret is None else rows.in_secret_order(secret)
        names = [str(rows[number]["image"]) for number in range(len(rows))]
        return [name for name in names if name not in ("cat/a.png", "dog/z.png")], names

    assert others(here, bytes(32))[0] == others(there, bytes(32))[0]
    assert others(here, bytes(32))[0] != others(here)[0]
    places = {others(here, bytes([key]) * 32)[1].index("cat/a.png") for key in range(64)}
    assert len(places) > 9  # of 13: fewer in one of 10^4 cases, if every place is equally likely


def test_one_directory_per_site_gives_a_column_of_sites(tmp_path):
    for site in ("north", "south"):
        folder_with(tmp_path, site, None)
    rows = ImageFolder(tmp_path, site="site")
    assert len(rows) == 24
    assert rows.columns == ["site", "image", "class"]
    assert {(row["site"], row["class"]) for row in map(rows.__getitem__, range(24))} == {
        (site, kind) for site in ("north", "south") for kind in ("cat", "dog")
    }


def test_empty_folder_and_no_folder_are_refused(tmp_path):
    with raises(ConfigurationError, "missing", "path"):
        ImageFolder(tmp_path)
    with raises(ConfigurationError, "unreadable", "path"):
        ImageFolder(tmp_path / "nowhere")


def test_every_mode_becomes_three_bytes_a_pixel():
    colours = Image.fromarray(GRADIENT)
    alpha = colours.convert("RGBA")
    alpha.putalpha(0)
    deep = Image.fromarray(np.full((16, 20), 0x80FF, np.uint16))
    assert np.array_equal(decoded(PLAIN), GRADIENT)
    assert np.abs(decoded(packed(colours.quantize(256))).astype(int) - GRADIENT).mean() < 20
    assert (decoded(packed(alpha)) == 255).all()  # nothing of what is transparent is seen
    assert (decoded(packed(deep)) == 0x80).all()
    assert decoded(packed(colours.convert("1"))).shape == (16, 20, 3)
    assert decoded(packed(colours.convert("LA"))).shape == (16, 20, 3)
    assert decoded(packed(colours.convert("CMYK"), "JPEG")).shape == (16, 20, 3)
    assert np.array_equal(decoded(packed(colours, "WEBP", lossless=True)), GRADIENT)
    for form in ("PNG", "WEBP"):  # of an animation the first picture counts
        moving = packed(colours, form, lossless=True, save_all=True, append_images=[Image.new("RGB", (20, 16), "red")])
        assert np.array_equal(decoded(moving), GRADIENT)


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_turn_that_a_camera_noted_is_undone(turn):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turn
    content = packed(Image.fromarray(GRADIENT), exif=exif)
    with Image.open(BytesIO(content)) as opened:
        assert np.array_equal(decoded(content), np.asarray(ImageOps.exif_transpose(opened)))


def test_large_image_is_reduced_and_keeps_its_shape():
    wide = np.zeros((300, 900, 3), np.uint8)
    for kind in ("PNG", "JPEG"):
        assert decoded(packed(Image.fromarray(wide), kind)).shape == (75, LONGEST_SIDE, 3)


def test_cells_are_files_bytes_or_arrays_and_never_paths(tmp_path):
    (tmp_path / "a.png").write_bytes(PLAIN)
    grey = GRADIENT[:, :, 0]
    assert np.array_equal(pixels_of(PLAIN), GRADIENT)
    assert np.array_equal(pixels_of({"bytes": PLAIN, "path": "a.png"}), GRADIENT)
    assert np.array_equal(pixels_of(grey), np.stack([grey] * 3, axis=2))
    for other in (
        str(tmp_path / "a.png"),
        None,
        3.0,
        np.full((4, 4), 256),
        np.zeros((0, 4), np.uint8),
        np.ones(4, int),
    ):
        with pytest.raises(InvalidRecordError):
            pixels_of(other)
