"""Captions: what the epsilons in a reproduction's table are true of, in the words of the policies behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...privacy import SIMULATED, Guarantee, caption
from ..data.task import Dataset, Shard
from ..methods import METHODS, Problem
from ..methods.auto_method import AUTO
from ..methods.presets import constant_feature
from ..models.softmax import SoftmaxRegression
from ..settings.run_config import RunConfig, is_centred, without_unread

_NOMINAL = 1000
"""Batches of a machine where only words are wanted of a policy."""


def caption_guarantee(config: RunConfig, mu_local: float = math.inf) -> Guarantee:
    """The guarantee of a simulated run for a caption: without its data, and without what differs between runs.

    The words are those of the policy that the method makes for a problem of some size. The size does not show in them.

    Notes
    -----
    **Formal guarantees.** Mu is what the run configuration asks for, for replacement of one sample of one machine, and
    infinite for a run without noise: what real machines would guarantee, for keys of a simulation protect nobody's
    data.
    """
    if config.strategy == AUTO:  # the words are those of what was chosen
        from ..runs.experiment import prepare  # which imports everything that a run needs

        config = prepare(config).config
    method = METHODS[config.strategy]
    rounds = config.passes * _NOMINAL
    # As a run's: what has a constant among its features needs no bias.
    model = SoftmaxRegression(1, 2, bias=not (constant_feature(config) or is_centred(config)))
    values = method.settled(config, rounds, model, [config.batch_size * _NOMINAL]).overridden(config)
    nothing = np.zeros((config.batch_size * _NOMINAL, 1), np.float32), np.zeros(config.batch_size * _NOMINAL, np.int64)
    data = Dataset(*nothing, *nothing, num_classes=2)
    shards = [Shard(data, np.arange(len(data.train_labels)))]
    problem = Problem(replace(config, max_participations=0), data, shards, model, rounds, values)
    mu = config.mu if config.private else math.inf
    return method.guarantee(problem, mu, mu_local=mu_local, notes=(SIMULATED,), brief=True)


def table_caption(document: Mapping[str, Any], *, in_columns: bool = False) -> str:
    """The caption of a reproduction's table: what its epsilons are true of.

    Parameters
    ----------
    document : mapping
        Of a reproduction, with its ``cells``.
    in_columns : bool
        Whether the table has columns for what secure aggregation rests on (:func:`~murmurfl.privacy.caption`).
    """
    guarantees, noiseless = cell_guarantees(document)
    sentences = [caption(guarantees, in_columns=in_columns)] if guarantees else []
    if noiseless:
        sentences.append(f"Without noise, and not private: {' / '.join(noiseless)}.")
    return " ".join(sentences) or "No epsilon: nothing private was released."


def cell_guarantees(document: Mapping[str, Any]) -> tuple[list[tuple[str, Guarantee]], list[str]]:
    """The guarantee of each private line of a reproduction's cells, and the names of the lines without noise.

    Notes
    -----
    **Formal guarantees.** Each is what its line's own settings give, for replacement of one record of one machine, as
    :func:`caption_guarantee` has it; a line without noise is among the names, and has none.
    """
    guarantees, noiseless = [], dict[str, None]()
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            # Documents of the first version name the strategy in the label alone.
            given = entry.get("settings") or {"strategy": label.partition(",")[0]}
            # Those before version 0.2 may hold settings that some of a cell's algorithms do not read.
            config = RunConfig.from_mapping(without_unread({**cell["settings"], **given}))
            if not config.private:
                noiseless[label] = None
            elif entry["epsilon"]["mean"] != 0:
                local = entry.get("mu_local", {}).get("mean")
                guarantees.append((label, caption_guarantee(config, math.inf if local is None else local)))
    return guarantees, list(noiseless)
