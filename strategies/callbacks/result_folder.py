"""The folder that a training leaves, with its guarantee and its result."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ...privacy.accounting.guarantee import REHEARSED, stated_guarantee
from ...privacy.errors import MurmurflError
from ..rounds.replies import DirectReplies
from .callback import Callback, Training

logger = logging.getLogger("flwr")

_MOST_NAMED = 5


class ResultFolder(Callback):
    """Log of the guarantee, and a folder with the result for ``murmurfl report``, after the last round.

    Every training has one, unless its callbacks have another.

    Parameters
    ----------
    folder : Path or str, optional
        The folder, or a new one next to it if it holds anything; empty, the default, for a new one in ``runs``. None
        logs no guarantee and leaves nothing.

    Notes
    -----
    The guarantee is what clients stated before the first round: all releases that their caps allow in this training.
    What is asked of them besides, such as a private evaluation, has a statement of its own. The contents are those of
    :func:`~murmurfl.app.record_training`. A folder that cannot be written takes no model away.

    Examples
    --------
    >>> from murmurfl.strategies import NoisySGD
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=10, callbacks=[ResultFolder("out")])
    >>> strategy.callbacks[0].folder
    'out'
    """

    def __init__(self, folder: Path | str | None = "") -> None:
        self.folder = folder

    def on_end(self, training: Training, grid: Grid | DirectReplies, result: Result) -> None:
        if self.folder is None or not _log_guarantee(training) or isinstance(grid, DirectReplies):
            return
        try:
            statements = {**training.stated, **training.ask_privacy(grid)}
            # Found by name, because the app imports strategies and strategies import nothing of the app.
            write = import_module(f"{__name__.partition('.')[0]}.app.reports.own_training").leave_training
            left = write(self.folder, training, result, statements)
            logger.info("Its result is in %s: `murmurfl report` makes a page of it.", left)
        except Exception as error:  # whatever it is, the model is worth more than its report
            logger.warning("The training's result could not be written: %s", error)


def default_callbacks() -> list[Callback]:
    """Return the callbacks of a training whose own are of other classes."""
    return [ResultFolder()]


def _log_guarantee(training: Training) -> bool:
    """Log what clients guarantee by their own statements; return False if they guarantee nothing that can be said."""
    statements = training.stated
    try:
        trusting = [name for name, one in statements.items() if one.get("trust") == "trusted-server"]
        if len(trusting) == len(statements):
            return False
        if trusting:
            logger.warning(
                "%d of %d clients state that they trust the server, which adds no noise here, so that nothing is "
                "guaranteed: %s.",
                *(len(trusting), len(statements), ", ".join(map(repr, trusting[:_MOST_NAMED]))),
            )
        masked = training.secure_aggregation is not None
        promised = f"{REHEARSED} What real clients would guarantee" if training.simulated else "Guarantee"
        logger.info("%s: %s", promised, stated_guarantee(statements, training.num_clients, masked=masked))
    except (KeyError, TypeError, ValueError, MurmurflError) as error:
        logger.warning("What clients state makes no guarantee that could be said: %s", error)
        return False
    return True
