"""The server's state in one file, written after every round and replaced atomically, and a trusted server's beside it.

A checkpoint of a trusted server holds the un-noised momentum, which is private data: the file is readable by its owner
only, and belongs where the server's own data is. Beside it lie its noise key, and a high-water mark that notices a
rollback.

A training that went on from a checkpoint of a backup would publish the same sums under other noise, and whoever has
both versions sees them with less noise than was promised. So the file ``NAME.mark`` says how far the checkpoint
``NAME`` has come, and a checkpoint behind its mark is refused. The file ``NAME.key`` holds the server's key, because
noise that is drawn again after a restart (of old nodes of a tree) must be the same; its nonces are in the checkpoint.
All three have mode 600.

Order of writing
----------------
Before the first request: a mark of no checkpoint, the key, the first checkpoint, its mark. After every round: the
checkpoint, its mark, and only then may anybody see the new model. A crash is harmless wherever it comes:

* before the first checkpoint: nobody was asked; a mark of no checkpoint is no training, and mark and key are made anew;
* in a round, before its checkpoint: the noise of that round is forgotten, and nobody has seen the model made with it;
  the round is asked again and gets other noise, with a fresh nonce;
* between checkpoint and mark: the checkpoint is one ahead of its mark, which is no rollback; its model was not seen.
  The resume moves the mark first, and goes on from that model: noise was put on its sums once;
* after the mark: both agree, and the model is the only one of its round, whether it was seen or not.

Every resume saves the checkpoint again before anything else, and no server saves when somebody else has moved the mark.
So of two servers that go on from one checkpoint, the second to save stops before it publishes. The mark is never two
saves behind, unless it was itself copied back. Nobody can tell then what was published, so that is refused too.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...privacy.errors import MurmurflError
from ...privacy.files import check_private, create_private, not_written
from ...privacy.ledger.store import MarkFormat, mark_path
from ...privacy.noise import KEY_BYTES

_FORMAT = 1


class CheckpointError(MurmurflError):
    """A checkpoint cannot be read, or belongs to another training.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from murmurfl.strategies import load_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = (Path(folder) / "state").write_bytes(b"half a checkpoint")
    ...     try:
    ...         load_checkpoint(Path(folder) / "state", {"seed": 1})
    ...     except CheckpointError as error:
    ...         error.kind
    'unreadable'
    """

    kind = "damaged"


ANOTHER_FORMAT = (
    "Go on with the version of murmurfl that wrote it, or train under another run name on data that were never used "
    "before."
)
"""Remedy for a checkpoint of another format, for errors."""


def save_checkpoint(path: Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write arrays and plain values to ``path``, whole or not at all, for a training of these settings.

    Raises
    ------
    CheckpointError
        If it cannot be written, because the disk is full for example; the checkpoint before is left as it is.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from murmurfl.strategies import load_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(Path(folder) / "state", {"seed": 1}, {"model": np.zeros(2)})
    ...     load_checkpoint(Path(folder) / "state", {"seed": 1})["model"].tolist()
    [0.0, 0.0]
    """
    temporary = path.with_name(path.name + ".part")
    try:
        _write_checkpoint(path, temporary, settings, state)
    except OSError as reason:
        with suppress(OSError):  # half a checkpoint takes room too
            temporary.unlink()
        raise CheckpointError(
            f"{not_written('a checkpoint', path, reason)}, and start the training again under the same name: it goes "
            "on from the checkpoint before.",
            kind="failed",
        ) from reason


def _write_checkpoint(path: Path, temporary: Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in state.items() if name not in arrays}
    header = json.dumps({"format": _FORMAT, "settings": dict(settings), "plain": plain})
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # of one that was left behind by a crash, whoever made it
    with os.fdopen(descriptor, "wb") as file:
        entries: dict[str, Any] = {f"array {name}": value for name, value in arrays.items()}
        np.savez(file, **entries, header=np.array(header))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(path: Path, settings: Mapping[str, Any], expected: Iterable[str] = ()) -> dict[str, Any]:
    """Load the state that :func:`save_checkpoint` wrote.

    Raises
    ------
    CheckpointError
        If the file is damaged, of another format or of other settings, or lacks an ``expected`` name.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from murmurfl.strategies import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(Path(folder) / "state", {"seed": 1}, {"model": np.zeros(2)})
    ...     load_checkpoint(Path(folder) / "state", {"seed": 1})["model"].tolist()
    [0.0, 0.0]
    """
    header, state = _read(path, arrays=True)
    if (version := header.get("format")) != _FORMAT:
        raise CheckpointError(
            f"Expected a checkpoint of format {_FORMAT} at {path}, got one of format {version!r}; it was left alone. "
            f"{ANOTHER_FORMAT}",
            kind="other-format",
        )
    wanted = json.loads(json.dumps(dict(settings)))
    found = header["settings"]
    if found != wanted:
        different = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
        raise CheckpointError(
            f"Expected a checkpoint of the same training at {path}, got other "
            + ", ".join(f"{key} ({found.get(key)!r}, now {wanted.get(key)!r})" for key in different)
            + "; remove it to start anew.",
            kind="mismatch",
            setting=different[0],
        )
    state |= header["plain"]
    missing = sorted(set(expected) - set(state))
    if missing:
        raise CheckpointError(
            f"Expected a whole checkpoint at {path}, got one without {', '.join(missing)}; remove it to start anew."
        )
    return state


def checkpoint_header(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the settings and the plain values of a checkpoint, for people and commands: nothing is checked."""
    header, _ = _read(path, arrays=False)
    return header.get("settings", {}), header.get("plain", {})


def _read(path: Path, *, arrays: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of a checkpoint's file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header: dict[str, Any] = json.loads(str(file["header"]))
            names = [name for name in file.files if arrays and name.startswith("array ")]
            return header, {name.removeprefix("array "): file[name] for name in names}
    except Exception as error:  # NumPy and zipfile raise many kinds on damaged files; all mean the same
        raise CheckpointError(
            f"Expected a readable checkpoint at {path}, got {error}; remove it to start anew.", kind="unreadable"
        ) from error


@dataclass(frozen=True)
class CheckpointMark:
    """Mark of the newest checkpoint."""

    training: str  # its random name
    saves: int = 0  # checkpoints saved so far
    stamp: str = ""  # random name of the last one, in which two histories with as many saves differ
    server_round: int = 0  # the round it was saved after, for readers of the file

    def following(self, server_round: int) -> CheckpointMark:
        """Return the mark of the next checkpoint."""
        return CheckpointMark(self.training, self.saves + 1, secrets.token_hex(16), server_round)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> CheckpointMark:
        """Read a mark; TypeError if the document is none."""
        mark = cls(**document)
        kinds = (mark.training, str), (mark.saves, int), (mark.stamp, str), (mark.server_round, int)
        if not all(type(value) is kind for value, kind in kinds):
            raise TypeError("values of other types")
        return mark


class TrustedCheckpoint:
    """The files of a trusted server's training, with the noise key among them unless the caller brings one.

    Notes
    -----
    **Formal guarantees.** A training goes on only from the newest checkpoint it has saved, with the key it was begun
    with, as far as the disk keeps what it says it has written and mark and checkpoint were not both copied back: that
    cannot be noticed here.
    """

    def __init__(self, path: Path, *, keeps_key: bool) -> None:
        self.path = path
        self.mark_path = mark_path(path, "")
        self.key_path = path.with_name(path.name + ".key")
        self._keeps_key = keeps_key
        self._mark: CheckpointMark | None = None

    @property
    def begun(self) -> bool:
        """Whether a training, new or resumed, has taken these files."""
        return self._mark is not None

    def check_new(self) -> None:
        """Refuse to begin where another training was begun and its checkpoint is gone."""
        if self.mark_path.exists():
            mark = self.marks.load(self.mark_path)
            if mark.saves:
                raise CheckpointError(
                    f"Expected a checkpoint at {self.path}, got only its high-water mark {self.mark_path}, which knows "
                    f"of {mark.saves} saves, the last after round {mark.server_round}: a training has published "
                    f"models here. Put its newest checkpoint back. {self._anew}",
                    kind="not-found",
                )
        elif self._keeps_key and self.key_path.exists():
            raise CheckpointError(
                f"Expected no trace of an earlier training, got a noise key at {self.key_path} without its checkpoint "
                f"and high-water mark. Put both back. {self._anew}",
                kind="not-found",
            )

    def begin(self, secret_key: bytes) -> None:
        """Make mark and key of a new training, before anybody is asked."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            raise CheckpointError(
                f"Expected no checkpoint at {self.path}, got one that was made meanwhile.", kind="exists"
            )
        self.check_new()
        mark = CheckpointMark(secrets.token_hex(16))
        again = self.mark_path.exists()
        self.marks.save(self.mark_path, mark)
        if self._keeps_key:
            if again:  # the key of a start that was cut off before its first checkpoint
                self.key_path.unlink(missing_ok=True)
            create_private(self.key_path, "a server's noise key", secret_key, error=CheckpointError)
        self._mark = mark

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Take up a training by the mark in its checkpoint, if that is the newest, and move the mark up to it."""
        check_private(self.path, "a trusted server's checkpoint", missing="", error=CheckpointError)
        try:
            ours = CheckpointMark.from_document(saved or {})
        except TypeError as error:
            raise CheckpointError(
                f"Expected a checkpoint of a trusted server with real keys at {self.path}, got one without a mark of "
                f"its own, from a simulation. {self._anew}",
                kind="mismatch",
            ) from error
        mark = self.marks.load(self.mark_path)
        if mark.training != ours.training:
            raise CheckpointError(
                f"Expected the high-water mark of {self.path} at {self.mark_path}, got that of another training. Put "
                f"the right one back. {self._anew}",
                kind="mismatch",
            )
        if ours.saves < mark.saves or (ours.saves == mark.saves and ours != mark):
            beside = " of another history" if ours.saves == mark.saves else ""
            raise CheckpointError(
                f"Expected {self.path} at save {mark.saves} of its high-water mark (round {mark.server_round}), got "
                f"save {ours.saves}{beside} (round {ours.server_round}): it was copied back from a backup, and going "
                "on from it would publish the same sums under other noise. Put the newest checkpoint back. "
                f"{self._anew}",
                kind="rolled-back",
            )
        if ours.saves > mark.saves + 1:
            raise CheckpointError(
                f"Expected {self.mark_path} at most one save behind its checkpoint, got save {mark.saves} beside "
                f"{ours.saves}: the mark was copied back, and nobody can tell whether the checkpoint was too. Put the "
                f"newest mark back. {self._anew}",
                kind="mismatch",
            )
        if ours.saves > mark.saves:
            self.marks.save(self.mark_path, ours)
        self._mark = ours

    def key(self) -> bytes:
        """Read the noise key the training was begun with; refuse a file that is missing, damaged or open to others."""
        check_private(
            self.key_path,
            "the noise key of this training",
            missing="Without it the noise that was published cannot be made again. Put the key back, or pass "
            f"noise_keys if the training was begun with keys of its own. {self._anew}",
            error=CheckpointError,
        )
        key = self.key_path.read_bytes()
        if len(key) != KEY_BYTES:
            raise CheckpointError(
                f"Expected a noise key of {KEY_BYTES} bytes at {self.key_path}, got {len(key)}. Put the right one "
                f"back. {self._anew}"
            )
        return key

    def check_key(self, fits: bool) -> None:
        """Refuse another key than that of the training."""
        if not fits:
            where = f"at {self.key_path}" if self._keeps_key else "in noise_keys"
            raise CheckpointError(
                f"Expected the noise key that the training in {self.path} was begun with {where}, got another: noise "
                f"that was published would be drawn a second time. Put the right one back. {self._anew}",
                kind="mismatch",
            )

    def next_mark(self, server_round: int) -> CheckpointMark:
        """Return the mark for the next checkpoint; refuse if the one on disk is not as this server left it."""
        if self._mark is None:
            raise CheckpointError(
                "Expected a training that was begun or resumed before its checkpoint is saved.", kind="wrong-order"
            )
        if self.marks.load(self.mark_path) != self._mark:
            raise CheckpointError(
                f"Expected the high-water mark {self.mark_path} as this server left it, got another: a second server "
                f"goes on from {self.path}, or files were copied. Nothing of this round was published. Let only one "
                "server use it.",
                kind="mismatch",
            )
        return self._mark.following(server_round)

    def saved(self, mark: CheckpointMark) -> None:
        """Move the mark up to the saved checkpoint, whose model may be seen from then on."""
        self.marks.save(self.mark_path, mark)
        self._mark = mark

    @property
    def _anew(self) -> str:
        files = f"{self.path}, {self.mark_path.name}" + (f" and {self.key_path.name}" if self._keeps_key else "")
        return (
            f"Or start anew: remove {files}; that is a new training under a new session, which clients count against "
            "their budgets once more."
        )

    @cached_property
    def marks(self) -> MarkFormat[CheckpointMark]:
        """The way in which this training's mark is written, and what it is refused for."""
        return MarkFormat(
            what="the checkpoint's high-water mark",
            key="murmurfl-checkpoint-mark",
            done="nothing more was published",
            missing="Without it nobody can tell whether the checkpoint was copied back from a backup. Put the mark "
            f"back. {self._anew}",
            damaged=f"Put the mark back. {self._anew}",
            other_format=ANOTHER_FORMAT,
            error=CheckpointError,
            to_document=asdict,
            from_document=CheckpointMark.from_document,
        )
