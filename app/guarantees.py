"""What the epsilons of runs and of tables are true of: their :class:`~murmurfl.privacy.Guarantee`.

The standard sentence comes from :mod:`murmurfl.privacy.guarantee`; here stands what only a run configuration knows:
whose noise it is, what it covers, and what the figure rests on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..privacy import FAST_NOISE, SIMULATED, Guarantee, Trust, caption, mechanism_words
from ..privacy.guarantee import BEYOND_RANGE
from .config import BASELINES, NO_NOISE, TRUSTED, RunConfig
from .experiment import Experiment, RunResult, guaranteed_mu, prepare

_ACCOUNTS = {"amplified": "amplification by iteration", "composed": "plain composition"}
NO_NOISE_WORDS = "no noise was added anywhere"
_ROUNDS = "over all models it publishes"
NOT_PRIVATE = "Not private: for comparison only."
EXPECTED = "Real machines: what the run configuration expects of them; their own figure comes at the end."


def run_guarantee(
    experiment: Experiment,
    mu: float,
    *,
    deployed: bool = False,
    statements: Mapping[str, Mapping[str, Any]] | None = None,
) -> Guarantee:
    """What a run guarantees.

    Parameters
    ----------
    experiment : Experiment
    mu : float
        Of everything the run may release; infinite without noise, 0 if nobody is asked.
    deployed : bool
        Whether the machines are real ones.
    statements : mapping, optional
        What real machines say of themselves, once they were asked.

    Notes
    -----
    **Formal guarantees.** Those of :func:`~murmurfl.app.experiment.guaranteed_mu`. Of real machines it is what they
    say, or before they were asked what the run configuration expects; the notes say which.
    """
    config = experiment.config
    words, covers = "", "over all releases its cap allows"
    if mu == 0.0:
        words = "nobody was asked"
    elif not config.private:
        words = NO_NOISE_WORDS
    elif config.strategy in TRUSTED:
        words, covers = f"{_server_noise(config)} in each of {experiment.num_rounds} rounds", _ROUNDS
    elif config.strategy == "shuffled":
        policy = experiment.shuffled_policy(max(len(shard) for shard in experiment.shards))
        epochs = policy.max_participations
        words = _epochs(f"{epochs} epochs of each silo that use private samples", policy.accounting_used)
    else:
        words = (_stated_words(statements) if deployed else "") or mechanism_words(experiment.policy())
    notes = [FAST_NOISE] if config.noise_quality != "exact" else []
    if not config.private:
        notes = [NOT_PRIVATE]
    elif math.isinf(mu) and not deployed:
        notes.append(BEYOND_RANGE.format(mu=config.mu, delta=config.delta))
    if mu == 0.0:
        notes = ["No private sample was used: nothing is spent."]
    notes.append(_basis(config, deployed, statements))
    return Guarantee(mu, config.delta, words, trust=_trust(config), covers=covers, notes=tuple(notes))


def result_guarantee(result: RunResult) -> Guarantee:
    """What a finished run guarantees: of real machines, by what they say of themselves."""
    return run_guarantee(result.experiment, result.mu, deployed=result.deployed, statements=result.statements)


def expected_guarantee(config: RunConfig, *, deployed: bool = False) -> Guarantee:
    """What a run will guarantee, before its first round.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible.
    """
    experiment = prepare(config)
    if not deployed:
        experiment.check_rounds()
    return run_guarantee(experiment, guaranteed_mu(experiment), deployed=deployed)


def settings_guarantee(config: RunConfig) -> Guarantee:
    """The terms of a run's epsilon as its configuration alone tells them, without its data; for captions."""
    notes = (SIMULATED, *([FAST_NOISE] if config.noise_quality != "exact" else ()))
    covers = "over all releases its cap allows"
    if config.strategy == "shuffled":
        epochs = config.variant == "interleaved" and config.private_share < 1
        account = config.accounting if epochs else "composed"
        words = _epochs("the epochs of each silo that use private samples", account)
    elif config.strategy in TRUSTED:
        words, covers = f"{_server_noise(config)} in each round", _ROUNDS
    else:
        alone = "independent" if config.strategy in BASELINES else "cancelling"
        options = (config.schedule, *config.mechanism_options.values())
        named = ", ".join(str(value) for value in options if value)
        words = f"{config.mechanism or alone}{f' ({named})' if named else ''} noise on each machine"
        if config.strategy == "online":
            words += f", {config.clip_unit or 'update'} sensitivity"
        if config.passes > 1:
            words += f", every sample in up to {config.passes} releases"
    if not config.private:
        return Guarantee(math.inf, config.delta, NO_NOISE_WORDS, covers=covers, notes=(NOT_PRIVATE, SIMULATED))
    return Guarantee(config.mu, config.delta, words, trust=_trust(config), covers=covers, notes=notes)


def table_caption(document: Mapping[str, Any]) -> str:
    """What the epsilons in the table of a reproduction are true of.

    Parameters
    ----------
    document : mapping
        Of a reproduction, with its ``cells``.

    Raises
    ------
    ConfigurationError
        If it does not say which strategy an algorithm is.
    """
    guarantees, noiseless = [], dict[str, None]()
    for cell in document["cells"]:
        for label, entry in cell["algorithms"].items():
            # Documents of the first version name the strategy in the label alone.
            given = entry.get("settings") or {"strategy": label.partition(",")[0]}
            settings = {**cell["settings"], **given}
            if settings.get("mechanism") == NO_NOISE:
                noiseless[label] = None
            elif entry["epsilon"]["mean"] != 0:
                guarantees.append((label, settings_guarantee(RunConfig.from_mapping(settings))))
    sentences = [caption(guarantees)] if guarantees else []
    if noiseless:
        sentences.append(f"Without noise, and not private: {' / '.join(noiseless)}.")
    return " ".join(sentences) or "No epsilon: nothing private was released."


def _trust(config: RunConfig) -> Trust:
    # Without noise nothing holds, against anybody.
    return "trusted-server" if config.strategy in TRUSTED and config.private else "untrusted-server"


def _server_noise(config: RunConfig) -> str:
    if config.strategy == "correlated-momentum":
        return f"{config.mechanism or 'blt'} noise of the server"
    return f"{'fresh' if config.strategy in ('trusted-mu2', 'trusted-sgd') else 'tree'} noise of the server"


def _epochs(which: str, account: str) -> str:
    return f"noise on every step of {which}, {_ACCOUNTS[account]}, only their ends released"


def _stated_words(statements: Mapping[str, Mapping[str, Any]] | None) -> str:
    """What real machines say their mechanisms are, where it is not the configuration's business."""
    names = sorted({str(statement.get("mechanism", "")) for statement in (statements or {}).values()} - {""})
    return f"{' or '.join(names)} noise on each machine, by its own account" if names else ""


def _basis(config: RunConfig, deployed: bool, statements: Mapping[str, Mapping[str, Any]] | None) -> str:
    if not deployed:
        return SIMULATED
    if config.strategy in TRUSTED:
        return "Real machines; the server's noise key is the operating system's."
    if statements is None:
        return EXPECTED
    answered = f"{len(statements)} of {config.num_clients} machines"
    return f"Real machines: the figure is what {answered} say of themselves, which a server cannot check."
