"""``murmurfl search``: clips and steps that are tried on the machines' own budget, one of them chosen privately."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Annotated

import typer

from ..settings.run_config import RunConfig
from .run_options import AsJson, Assignments, ConfigFile, RayAddress, Workers, settings_of
from .terminal import fail, failing_clearly, say

Multiples = Annotated[str, typer.Option(help="Multiples of the preset's, separated by commas.")]


def search(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    clip_norm: Multiples = "1",
    learning_rate: Multiples = "0.5,1,2",
    share: Annotated[float, typer.Option(help="Of mu^2, for all trials together.")] = 0.3,
    counting: Annotated[float, typer.Option(help="Of a trial's part, for its count of correct predictions.")] = 0.1,
    public: Annotated[
        bool, typer.Option(help="Whether samples that runs are evaluated on are public, and choose without a count.")
    ] = False,
    workers: Workers = None,
    ray: RayAddress = "",
    as_json: AsJson = False,
) -> None:
    """Try multiples of the preset's clip and step in simulation, and train with the best: mu is that of everything."""
    import logging

    from ..planning.private_search import MULTIPLES, Trial
    from ..planning.private_search import search as run_search

    logging.getLogger("flwr").setLevel(logging.WARNING)
    with failing_clearly():
        tried = itertools.product(_numbers("clip-norm", clip_norm), _numbers("learning-rate", learning_rate))
        candidates = [dict(zip(MULTIPLES, multiples, strict=True)) for multiples in tried]
        candidates = [{name: one for name, one in each.items() if one != 1} for each in candidates]

        def show(trial: Trial) -> None:
            if not as_json:
                how = "on public samples" if public else "by a private count"
                say(f"clip {trial.clip_norm:.4g}, step {trial.learning_rate:.4g}: {trial.score:.1%} {how}")

        config = RunConfig.from_mapping(settings_of(config_file, assignments))
        where = {"workers": workers, "ray_address": ray, "say": partial(say, err=True)}
        found = run_search(config, candidates, share=share, counting=counting, public=public, on_trial=show, **where)
    values, accuracy = found.result.experiment.values, found.result.progress[-1].accuracy
    if as_json:
        trials = [vars(trial) for trial in found.trials]
        document = {
            "trials": trials,
            "chosen": found.chosen,
            "clip_norm": values.clip_norm,
            "learning_rate": values.learning_rate,
            "accuracy": accuracy,
            "privacy": found.guarantee.document(),
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    say(f"Chosen: clip {values.clip_norm:.4g}, step {values.learning_rate:.4g} for the last training.")
    if accuracy is not None:
        say(f"Test accuracy: {accuracy:.1%}")
    say(found.guarantee.sentence)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        fail(f"Expected --{name} to be numbers separated by commas, got {text!r}.")
