"""How many rounds a simulation's machines can take part in, known before the first one.

A machine makes as many releases as its samples and its cap allow. Seed and round settle which machines a round asks,
and a request spends samples whether or not its reply is lost. So the answer is computed, and nothing has to be tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..privacy import ConfigurationError
from ..strategies.machines import rounds_possible, sample_machines
from .methods import Method, Problem


@dataclass(frozen=True)
class Shortage:
    """The machine that first runs out of what it is asked for, and when.

    Parameters
    ----------
    machine, server_round : int
        The machine, and the round that asks it once too often.
    releases : int
        How many releases it can make.
    reason : str
        What limits it.
    """

    machine: int
    server_round: int
    releases: int
    reason: str


def shortage(method: Method, problem: Problem, num_rounds: int) -> Shortage | None:
    """Which machine runs out first in so many rounds, if one does."""
    config, sizes = problem.config, problem.sizes
    rounds = method.asked_rounds(config, num_rounds)
    limits = {size: method.releases_of(config, size, min(sizes)) for size in set(sizes)}
    names = [str(machine) for machine in range(len(sizes))]
    # A machine that can answer every round need not be counted.
    counted = {name: limits[size][0] for name, size in zip(names, sizes, strict=True) if limits[size][0] < len(rounds)}

    def asked(server_round: int) -> list[str]:
        sampling = problem.values.sampling
        return sample_machines(names, config.clients_per_round, config.seed, server_round, sampling)  # type: ignore[arg-type]

    server_round, name = rounds_possible(asked, rounds, counted)
    if server_round is None or name is None:
        return None
    releases, reason = limits[sizes[int(name)]]
    return Shortage(int(name), server_round, int(releases), reason)


def refuse_shortage(method: Method, problem: Problem, found: Shortage) -> ConfigurationError:
    """The refusal of a run that asks a machine for more than it can give; it says how many rounds are possible."""
    config, num_rounds = problem.config, problem.num_rounds
    # Which rounds ask machines may depend on how many there are; where all of them do, the answer is known at once.
    fixed = len(method.asked_rounds(config, num_rounds)) == num_rounds
    possible = found.server_round - 1 if fixed else num_rounds - 1
    while shortage(method, problem, possible):
        possible -= 1
    ways = ["fewer rounds", "a larger cap" if config.max_participations else "more data, smaller batches, more passes"]
    if config.clients_per_round < config.num_clients and problem.values.sampling != "balanced":
        ways.append("sampling = balanced, which asks all machines equally often")
    if method.may_lose:
        ways.append("run-dry = true: machines that have nothing left then refuse, and the others go on")
    return ConfigurationError(
        f"Expected num-rounds <= {possible}, got {num_rounds}: machine {found.machine} can make {found.releases} "
        f"releases ({found.reason}), and round {found.server_round} asks it for one more. Use {', or '.join(ways)}."
    )
