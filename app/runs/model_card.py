"""The card of a model: what it was made from, and what was promised to whom."""

from __future__ import annotations

import hashlib
import html
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .outcome import Outcome

REHEARSAL = "a rehearsal: its keys are seeded, nobody was protected, and there is no guarantee: do not publish"
NOT_PRIVATE = "no noise: there is no guarantee: do not publish"
REAL = "real: the guarantee holds of what was released"
_WIDTH = 100


def card(outcome: Outcome, *, deployed: bool, data: Mapping[str, Any], warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the card of a run's model, which was trained on ``data``, on real clients if it was ``deployed``.

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
        "would_have": would_have,
        "private_evaluation": None if evaluation is None else evaluation.sentence,
        "warnings": list(warnings),
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
        rows.append(("privacy", str(entries["sentence"])))
    if entries["private_evaluation"]:
        rows.append(("measured", str(entries["private_evaluation"])))
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
