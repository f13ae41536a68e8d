"""The card of a model: what it was made from, and what was promised to whom."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...privacy.accounting.noise_forecast import StatedNoise
from ...strategies.aggregation.noisy import Noisy
from ...strategies.full_batch import FullBatch
from ...strategies.rounds.replies import vector_size
from ...strategies.rounds.rule import Turn
from ...strategies.rounds.strategy import ReleaseStrategy
from .client_statements import statement_groups
from .outcome import Outcome

REHEARSAL = "a rehearsal: its keys are seeded, nobody was protected, and there is no guarantee: do not publish"
NOT_PRIVATE = "no noise: there is no guarantee: do not publish"
REAL = "real: the guarantee holds of what was released"
_WIDTH = 100


def noise_in_model(
    strategy: ReleaseStrategy[Any], statements: Mapping[str, Mapping[str, Any]], shares: str = ""
) -> float | None:
    """Return the standard deviation of the noise in each value of a model of full batches, if gradients do not follow.

    The update rule is run on the noise of every round alone, as strong as clients state it, or the trusted server has
    it. It is an upper bound of the noise's part where the loss is curved (:mod:`murmurfl.app.models.curves`).

    Parameters
    ----------
    strategy : ReleaseStrategy
        Strategy after its last round.
    statements : mapping
        What each client says of itself, by name.
    shares : str
        How clients share mu^2 among their releases.

    Returns
    -------
    float or None
        None for other strategies, a clip that follows gradients, and clients whose releases differ in their noise.
    """
    if not isinstance(strategy, FullBatch) or strategy.full_batch.quantile:
        return None
    rounds = [one for one in strategy.history if one.aggregated and one.samples]
    size = vector_size(strategy.release_layout)
    if isinstance(strategy.aggregator, Noisy):
        stds = [strategy.aggregator.stream.noise_std(size, one.server_round) for one in rounds]
    else:
        groups = statement_groups(statements)
        known = [StatedNoise.read(group.statement) for group in groups]
        if shares not in ("", "uniform") or not known or any(one is None or not one.alone for one in known):
            return None
        variance = np.average(
            [one.after(1) ** 2 for one in known if one is not None], weights=[group.count for group in groups]
        )
        stds = [math.sqrt(one.aggregated * variance) for one in rounds]
    rule = strategy.full_batch
    state = rule.init(np.zeros(len(rounds)), [])  # one value for the noise of each round
    for place, one in enumerate(rounds):
        noise = np.zeros(len(rounds))
        noise[place] = stds[place]
        state = rule.update(state, noise, Turn(one.server_round, one.asked, one.aggregated, one.samples))
    return float(np.linalg.norm(rule.model(state)))


PROBABILITIES = (
    "scores are divided by {temperature:g} before they become probabilities. This temperature follows from how the "
    "model was trained and from no row; how well probabilities fit these rows was not released."
)


WEIGHTED = (
    "Probabilities are those among rows in which classes count by the schema's class_weights, and not among rows as "
    "they are."
)


def card(
    outcome: Outcome,
    *,
    deployed: bool,
    data: Mapping[str, Any],
    warnings: Sequence[str] = (),
    noise_std: float | None = None,
    temperature: float = 1.0,
    weighted: bool = False,
    all_calls: str = "",
) -> dict[str, Any]:
    """Return the card of a run's model, which was trained on ``data``, on real clients if it was ``deployed``.

    ``all_calls`` says what all calls with the ledger of a real fit have spent; it stands first where that is more.

    Notes
    -----
    A rehearsal has no epsilon of its own: what the same run would have with real keys and a reviewed schema stands
    under ``would_have``. Of figures it has only what was released with noise.
    """
    promised: dict[str, Any] = {"epsilon": None, "mu": None, "sentence": None}
    would_have = None
    if outcome.mu is not None:
        figures = {
            "epsilon": outcome.epsilon,
            "mu": outcome.mu,
            "delta": outcome.delta,
            **{name: getattr(outcome.privacy, name) for name in ("unit", "relation", "trust")},
            "sentence": outcome.guarantee,
        }
        promised, would_have = (figures, None) if deployed else (promised, figures)
    words = [PROBABILITIES.format(temperature=temperature)] if temperature != 1.0 else []
    words += [WEIGHTED] if weighted else []
    kind = REAL if deployed else NOT_PRIVATE if outcome.mu is None else REHEARSAL
    evaluation = outcome.private_evaluation if deployed else None
    configuration = json.dumps(outcome.config, sort_keys=True, default=str)
    return {
        "what": kind,
        "murmurfl": outcome.versions.get("murmurfl"),
        "date": outcome.date,
        "data": dict(data),
        "clients": outcome.num_clients,
        "strategy": outcome.config["strategy"],
        **promised,
        "all_calls": all_calls if outcome.all_calls is not None else None,
        "would_have": would_have,
        "private_evaluation": None if evaluation is None else evaluation.sentence,
        "warnings": list(warnings),
        "noise_std": noise_std,
        "probabilities": " ".join(words) or None,
        "configuration": hashlib.sha256(configuration.encode()).hexdigest()[:16],
    }


def card_text(entries: Mapping[str, Any]) -> str:
    """Return a card for people, in Markdown."""
    data = entries["data"]
    rows = [("what it is", entries["what"])]
    if (would := entries["would_have"]) is not None:
        condition = "with secret keys and a reviewed schema that does not come from the rows it would have"
        rows.append(("for real", f"{condition}: {would['sentence']}"))
    if entries["epsilon"] is not None:
        sentence = str(entries["sentence"])
        if all_calls := entries.get("all_calls"):
            rows.append(("privacy", str(all_calls)))
            rows.append(("this call", sentence.removesuffix(all_calls).rstrip()))
        else:
            rows.append(("privacy", sentence))
    if entries["private_evaluation"]:
        rows.append(("measured", str(entries["private_evaluation"])))
    if entries.get("probabilities"):
        rows.append(("probabilities", str(entries["probabilities"])))
    rows += [("warning", words) for words in entries.get("warnings", ())]
    rows += [
        ("data", ", ".join(f"{name} {value}" for name, value in data.items() if value not in ("", None))),
        ("clients", str(entries["clients"])),
        ("method", str(entries["strategy"])),
        ("made", f"{entries['date']} by murmurfl {entries['murmurfl']}, configuration {entries['configuration']}"),
    ]
    if (pipeline := entries.get("pipeline")) is not None:
        what = f"{pipeline['file']}, without murmurfl" if pipeline["file"] else "none"
        rows.append(("pipeline", f"{what}: {'; '.join(pipeline['notes'])}"))
    lines = ["# Model card", ""]
    for name, value in rows:
        lines += textwrap.wrap(f"* **{name}**: {_plain(value)}", _WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return a text as Markdown shows it letter by letter: names of files, columns and classes are somebody's own."""
    printable = "".join(character if character.isprintable() else " " for character in html.escape(text, quote=False))
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", printable)
