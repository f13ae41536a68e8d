"""The card on a report's first screen: who is protected, from whom, how much, and on whose word.

It is made of the parts of a result and adds no claim to them. What several runs say alike stands once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import (
    AGAINST_OTHERS,
    CURATED,
    GIVEN_DECLARATIONS,
    GIVEN_SCHEMA,
    REHEARSED,
    UNIT_WORDS,
    caption,
    right_at_most,
    rounded_up,
)
from ...privacy.accounting.loss import Loss
from ..engines.start import ENGINES
from ..planning.noise_plans import loss_of_person
from ..runs.outcome import Outcome
from ..runs.run_summary import compared_lines, noise_note, plain_words
from .groups import Group

OF_THE_FOLDER = ("run-name", "out-dir")
"""Keys that say where a run lies, and nothing of what was set."""

REHEARSAL, REAL, STATED = "REHEARSAL", "REAL", "AS STATED"
_STATUS = {
    REHEARSAL: "Nobody was protected: clients were simulated, and whoever knows the seed can take their noise out. "
    "The epsilons are what real clients that keep to this configuration would guarantee.",
    REAL: "Real clients trained. Their records are protected as this card says.",
    STATED: "A program of somebody's own trained. Real clients' records are protected as this card says, simulated "
    "clients' are not: what was there, its files do not tell.",
}
_PEOPLE = (1, 5, 20)
"""Records of one person that figures are for; or clients with records, where a client's count as one."""
_WHOSE = {
    "sample": ("one record", "{} records of one person on one client"),
    "owner": ("one owner on one client", "one owner on {} clients"),
    "client": ("one client", "a person with records on {} clients"),
}
OF_ALL_CALLS = "for, by all calls with the ledger"
"""Heading of figures that include earlier calls on the same rows."""
_DIGITS = 16
_IN_SENTENCES = 2
"""Runs whose guarantees stand in whole sentences."""

Questions = dict[str, Callable[[Outcome], str]]
"""Questions, and what answers each for a run."""


def card(groups: Sequence[Group]) -> dict[str, Any]:
    """Make the card of one run, or of several together.

    Returns
    -------
    dict
        ``status`` (a word, a sentence, which runs), ``who`` and ``whence`` (questions with their answers), ``figures``
        (of a single run: a heading and rows of texts), and sentences, each with the runs that it is of.

    Notes
    -----
    The figures are the guarantee's, and for a person those of
    :func:`~murmurfl.app.planning.noise_plans.loss_of_person`: for that many records on one client, and where all
    records on a client are one unit, for that many clients.
    """
    who: Questions = {"Who is protected": _protected, "From whom": _against, "If honest": _honest, "Given": _given}
    whence: Questions = {"On whose word": _word}
    if (alone := groups[0].outcome if len(groups) == 1 else None) is not None:  # a table has them of several
        whence |= {"Made": made, "Configuration": lambda one: f"sha256 {digest(one.config)}"}
    return {
        "status": [(*pair, runs) for pair, runs in _alike(groups, status)],
        "warned": said(groups, _warned),
        "who": {question: found for question, answer in who.items() if (found := said(groups, answer))},
        "whence": {question: said(groups, answer) for question, answer in whence.items()},
        "figures": [] if alone is None else _figures(alone),
        "below": said(groups, _delta),
        "compared": said(groups, lambda one: " ".join(compared_lines(one))),
        "full": _in_full(groups),
        "plain": said(groups, plain_words) if len(groups) <= _IN_SENTENCES else [],
    }


def _in_full(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return the guarantees as sentences; for many runs terms and notes, each once, since the figures are a table."""
    terms = [(str(number), group.outcome.terms) for number, group in enumerate(groups, 1)]
    known = [(number, one) for number, one in terms if one is not None]
    if len(groups) <= _IN_SENTENCES or len(known) < len(terms):
        return said(groups, lambda one: one.guarantee)
    notes: dict[str, list[int]] = {}
    for number, group in enumerate(groups, 1):
        for note in group.outcome.privacy.notes if group.outcome.privacy is not None else ():
            notes.setdefault(note, []).append(number)
    return [(caption(known), ""), *((note, _runs(numbers, len(groups))) for note, numbers in notes.items())]


def status(outcome: Outcome) -> tuple[str, str]:
    """Whether anybody was protected, in a word and in a sentence."""
    rehearsed = outcome.engine in ENGINES or (outcome.privacy is not None and REHEARSED in outcome.privacy.notes)
    word = REHEARSAL if rehearsed else REAL if outcome.engine else STATED
    return word, _STATUS[word]


def digest(config: Mapping[str, Any]) -> str:
    """Return the beginning of a run configuration's SHA-256, the same wherever its files lie."""
    kept = {key: value for key, value in config.items() if key not in OF_THE_FOLDER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def said(groups: Sequence[Group], of: Callable[[Outcome], str]) -> list[tuple[str, str]]:
    """Group what runs say: each text once, with the runs that say it; without names where all say the same."""
    return [(text, runs) for text, runs in _alike(groups, of) if text]


def _alike(groups: Sequence[Group], of: Callable[[Outcome], Any]) -> list[tuple[Any, str]]:
    """Group what runs say, with the numbers of those that say it; without numbers where all do."""
    found: dict[Any, list[int]] = {}
    for number, group in enumerate(groups, 1):
        found.setdefault(of(group.outcome), []).append(number)
    return [(one, _runs(numbers, len(groups))) for one, numbers in found.items()]


def _runs(numbers: Sequence[int], every: int) -> str:
    """Return the numbers of the runs in words; empty for all."""
    return f"Run {_listed(numbers)}" if len(numbers) < every else ""


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers, with three and more in a row as the first and the last."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{one[0]} to {one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in parts)


def persons(outcome: Outcome) -> list[tuple[int, Loss]]:
    """Return the loss of a person by how many records on one client, or units on as many clients; or nothing.

    Notes
    -----
    **Formal guarantees.** Each loss bounds what anybody against whom the guarantee holds can tell of one person whose
    records or samples are all replaced, if the releases are made as the guarantee says
    (:func:`~murmurfl.privacy.person_loss`). Of a real fit all calls with its ledger count.
    """
    if (terms := outcome.terms) is None or not math.isfinite(terms.mu):
        return []
    statements = [*(outcome.clients or {}).values(), *(one.statement for one in outcome.client_groups or ())]
    added = 0.0
    if outcome.all_calls is not None:
        terms, added = replace(terms, loss=Loss.of(outcome.all_calls.mu)), outcome.all_calls.added_delta
    releases = max((int(one.get("max-participations", 0)) for one in statements), default=0) or outcome.rounds
    values = max(outcome.num_parameters * releases, 1)
    if added:  # nothing is known of several records
        return [(1, loss_of_person(terms, values).with_added(added))]
    if terms.unit == "sample":
        return [(count, loss_of_person(terms, values, samples=count)) for count in _PEOPLE]
    return [(count, loss_of_person(terms, values, clients=count)) for count in _PEOPLE if count <= outcome.num_clients]


def _figures(outcome: Outcome) -> list[list[str]]:
    """Return a row for each number of a person's records, under a heading; nothing where nothing is guaranteed."""
    would = " would be" if status(outcome)[0] == REHEARSAL else ""
    of = "for" if outcome.all_calls is None else OF_ALL_CALLS
    rows = []
    for count, loss in persons(outcome):
        one, several = _WHOSE["sample" if outcome.terms is None else outcome.terms.unit]
        row = {
            of: several.format(count) if count > 1 else one,
            "ε" + would: rounded_up(loss.assumed.epsilon(outcome.delta)),
            "best guess right at most": right_at_most(loss.mu, loss.added_delta),
        }
        if loss.conditional:
            worst = loss.worst_case.mu
            row |= {
                f"ε{would} in the worst case": rounded_up(gdp_epsilon(worst, outcome.delta)),
                "best guess then": right_at_most(worst),
            }
        rows.append(row)
    return [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []


def _records(outcome: Outcome) -> tuple[int, str]:
    """Return the number of units, and their name; 0 where it is not known."""
    if getattr(outcome.privacy, "unit", "") == "client":
        return outcome.num_clients, "clients"
    if getattr(outcome.privacy, "unit", "") != "sample":
        return 0, ""
    used = sum(int(one.get("samples-used", 0)) for one in (outcome.clients or {}).values())
    used += sum(one.clients * int(one.statement.get("samples-used", 0)) for one in outcome.client_groups or ())
    return used, "records used"


def _delta(outcome: Outcome) -> str:
    """Delta beside 1/n."""
    count, words = _records(outcome)
    at = f"All at δ = {outcome.delta:g}"
    return f"{at}; 1/n = {1 / count:.2g} (n = {count:,} {words})." if count else f"{at}."


def _warned(outcome: Outcome) -> str:
    """Return the warning that nobody who decides may miss."""
    if outcome.mu is None:
        return "There was no noise: nothing is guaranteed."
    count, words = _records(outcome)
    fast = "Fast noise is for research and protects nobody." if noise_note(_quality(outcome)) else ""
    above = f"δ is not below 1/n of {count:,} {words}: take a smaller delta." if outcome.delta * count >= 1 else ""
    return f"{fast} {above}".strip()


def _quality(outcome: Outcome) -> str:
    return str(outcome.config.get("noise-quality", "exact"))


def _protected(outcome: Outcome) -> str:
    if (terms := outcome.terms) is None or outcome.mu is None:
        return "nobody" if outcome.mu is None else "as the guarantee in full says"
    other = "others of that owner" if terms.unit == "owner" else "any other"
    return f"{UNIT_WORDS[terms.unit]}: that it was there, and not {other} in its place"


def _against(outcome: Outcome) -> str:
    terms = outcome.terms
    if terms is None:
        return "as the guarantee in full says"
    return (AGAINST_OTHERS if _is_curated(outcome) else terms.against).removeprefix("against ")


def _is_curated(outcome: Outcome) -> bool:
    return outcome.privacy is not None and CURATED in outcome.privacy.notes


def _honest(outcome: Outcome) -> str:
    if (terms := outcome.terms) is None:
        return "as the guarantee in full says"
    if terms.trust == "trusted-server":
        return "the server, which sees everything but publishes with noise; and the record's own client"
    if _is_curated(outcome):
        return "the computer that trained, which sees every row"
    own = "the record's own client; nobody else need be"
    if terms.min_honest is None:
        return own
    clients = f"{terms.min_honest} client{'s' * (terms.min_honest != 1)} of each sum"
    return f"one helper and {clients}; if not, the worst case that is stated"


def _given(outcome: Outcome) -> str:
    """Return the condition on the schema by which records were read; empty where records were not read by one."""
    notes = " ".join(outcome.privacy.notes) if outcome.privacy is not None else ""
    if GIVEN_DECLARATIONS in notes:
        return GIVEN_DECLARATIONS
    known = (GIVEN_SCHEMA.format(records=records) for records in ("rows", "items"))
    return next((f"{one}; a reviewed draft shows something of them" for one in known if one in notes), "")


def _word(outcome: Outcome) -> str:
    """Return on whose word privacy and accuracy stand."""
    if outcome.engine in ENGINES:
        by = "rows held out, which are private" if outcome.of_table else "its test set"
        return f"a simulation's: epsilon by its policy, accuracy by {by}"
    if _is_curated(outcome):
        return "that of the computer that trained: epsilon by its ledger, accuracy by rows it set aside, with noise"
    if getattr(outcome.privacy, "trust", "") == "trusted-server":
        privacy = "the server's, which adds the noise"
    else:
        reported = len(outcome.clients or {}) + sum(one.clients for one in outcome.client_groups or ())
        privacy = f"that of {reported:,} of {outcome.num_clients:,} clients, by their ledgers; a server cannot check it"
    counted = outcome.private_evaluation is not None and outcome.accuracy is None
    return f"epsilon: {privacy}. Accuracy: {'the clients, with noise' if counted else 'the server, by its test set'}"


def made(outcome: Outcome) -> str:
    """Return when the run was made, and with which murmurfl."""
    at = datetime.fromisoformat(outcome.date)
    return f"{at:%Y-%m-%d %H:%M} UTC, murmurfl {outcome.versions.get('murmurfl', 'of an unknown version')}"
