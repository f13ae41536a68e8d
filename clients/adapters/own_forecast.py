"""What a machine's noise by itself leaves of its own updates, for the machine's own log."""

from __future__ import annotations

from logging import DEBUG, INFO

from flwr.common.logger import log

from ...privacy import Forecast, LedgeredMachine, StatedNoise, forecast_of, stated_noise
from ...privacy.accounting.noise_forecast import rounded_count, shortest


def log_own_forecast(name: str, machine: LedgeredMachine, *, unit: str = "") -> None:
    """Say it in the log of the machine, with its first release.

    Parameters
    ----------
    name : str
        The machine's.
    machine, unit
        As for :func:`own_forecast`.
    """
    if foreseen := own_forecast(machine, unit=unit):
        # A simulation has many machines, and its server says it of all of them.
        log(DEBUG if machine.simulated else INFO, "Machine %s: %s", name, foreseen)


def own_forecast(machine: LedgeredMachine, *, unit: str = "") -> str:
    """A sentence: how long this machine's noise is beside its longest update, and how many machines like it are needed.

    Parameters
    ----------
    machine : LedgeredMachine
    unit : {"sample", "owner", "machine"}, optional
        What is protected as a whole; default what the policy says.

    Returns
    -------
    str
        Empty where the machine adds no noise.

    Notes
    -----
    Arithmetic on the machine's policy, whatever a server says, and the public number of samples. How many machines are
    needed is an estimate.
    """
    plan, policy = machine.plan, machine.policy
    entries = stated_noise(policy, plan, machine.num_samples)
    stated = {
        **entries,
        "max-participations": plan.mechanism.num_releases,
        "mu-guaranteed": plan.mu,
        "delta": policy.delta,
        "mechanism": policy.mechanism,
        "unit": unit or policy.unit,
    }
    read = StatedNoise.read(stated)
    # By itself, with the noise it adds: what others add under secure aggregation is not in it.
    alone = None if read is None else _by_itself(read, machine.num_parameters)
    if alone is None:
        return ""
    return (
        f"By itself, over all its releases, its noise is {shortest(alone.ratio)} times as long as its longest update; "
        f"an average over {rounded_count(alone.machines_needed)} machines like it is likely to be useful, an estimate."
    )


def _by_itself(stated: StatedNoise, num_parameters: int) -> Forecast | None:
    return forecast_of([stated], num_parameters=num_parameters, machines=1, per_round=1, rounds=stated.releases)
