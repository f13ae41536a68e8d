"""How many rounds a simulation's machines can take part in, known before the first one.

A machine makes as many releases as its samples and its cap allow. Whom a round asks is a function of the seed and the
round, and a request spends samples whether or not its reply is lost, so that nothing has to be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..strategies.machines import rounds_possible, sample_machines
from .config import MOMENTUM, RunConfig


@dataclass(frozen=True)
class Shortage:
    """The machine that first runs out of what it is asked for, and when.

    Parameters
    ----------
    machine, server_round : int
        It is asked once too often in that round.
    releases : int
        How many releases it can make.
    reason : str
        What limits it.
    """

    machine: int
    server_round: int
    releases: int
    reason: str


def releases_of(config: RunConfig, samples: int, shortest: int) -> tuple[float, str]:
    """How many releases a machine can make, and what limits it.

    Parameters
    ----------
    config : RunConfig
    samples : int
        The machine's.
    shortest : int
        Samples of the machine with the fewest: under private momentum all have one epoch.
    """
    cap = config.max_participations
    if config.strategy == "shuffled":  # an epoch takes all samples, and they return
        return cap or float("inf"), f"max-participations = {cap}"
    samples = shortest if config.strategy in MOMENTUM else samples
    releases = config.passes * (samples // config.batch_size)
    if cap:
        return cap, f"max-participations = {cap}"
    often = f", each of them {config.passes} times" if config.passes > 1 else ""
    return releases, f"{samples} samples in batches of {config.batch_size}{often}"


def shortage(config: RunConfig, samples: Sequence[int], rounds: range, sampling: str) -> Shortage | None:
    """Which machine runs out first, if one does.

    Parameters
    ----------
    config : RunConfig
    samples : sequence of int
        Of each machine.
    rounds : range
        The rounds in which machines are asked.
    sampling : str
        How they are drawn.
    """
    limits = {size: releases_of(config, size, min(samples)) for size in set(samples)}
    names = [str(machine) for machine in range(len(samples))]
    # A machine that can answer every round need not be counted.
    counted = {
        name: limits[size][0] for name, size in zip(names, samples, strict=True) if limits[size][0] < len(rounds)
    }

    def asked(server_round: int) -> list[str]:
        count = config.clients_per_round
        return sample_machines(names, count, config.seed, server_round, sampling)  # type: ignore[arg-type]

    server_round, name = rounds_possible(asked, rounds, counted)
    if server_round is None or name is None:
        return None
    releases, reason = limits[samples[int(name)]]
    return Shortage(int(name), server_round, int(releases), reason)
