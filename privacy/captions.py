"""What stands once beside a table or a figure with many epsilons: the terms of all of them."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ConfigurationError
from .guarantee import Guarantee
from .policy import PrivacyPolicy

WHATEVER_HAPPENS = "What holds whatever happens rests on nobody else's honesty: no server's, helper's or machine's."
"""Of a column with the figures that do."""


def caption(guarantees: Iterable[tuple[str, Guarantee]], *, in_columns: bool = False) -> str:
    """The terms of many epsilons, to stand once beside their table or figure.

    Parameters
    ----------
    guarantees : iterable of pairs
        The name of its row or column, and the guarantee; guarantees with the same terms are said once. What holds
        whatever happens, under secure aggregation, is said of each.
    in_columns : bool
        Whether the table has columns of its own for h, the honest machines of each sum, and for what holds whatever
        happens: then both are said in words, and once.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    # Labels in their order, by mechanism, by all other terms.
    groups: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    notes: dict[str, None] = {}
    local: dict[str, dict[str, None]] = {}
    for label, guarantee in guarantees:
        protects = guarantee.protected("h") if in_columns else guarantee.protects
        mechanisms = groups.setdefault((protects, guarantee.covers), {})
        mechanisms.setdefault(guarantee.mechanism, {})[label] = None
        if guarantee.whatever_happens:
            local.setdefault(guarantee.whatever_happens, {})[label] = None
        notes |= dict.fromkeys(guarantee.notes)
    if not groups:
        raise ConfigurationError("Expected the guarantees of a table's epsilons, got none.")
    sentences = []
    for (protects, covers), mechanisms in groups.items():
        labels = dict.fromkeys(label for named in mechanisms.values() for label in named)
        of = f" of {' / '.join(labels)}" if len(groups) > 1 else ""
        words = [f"{words} ({' / '.join(named)})" for words, named in mechanisms.items()]
        words = list(mechanisms) if len(words) == 1 else words
        sentences.append(f"Epsilon{of} is {protects}; {'; '.join(words)}; {covers}.")
    if local and in_columns:
        sentences.append(WHATEVER_HAPPENS)
    elif local:
        # Beside other groups or figures it must be told whose they are; the sentence itself says what they rest on.
        alone = len(local) == len(groups) == 1
        figures = [said if alone else f"{said} ({' / '.join(named)})" for said, named in local.items()]
        sentences.append(f"Without anybody's honesty: {'; '.join(figures)}.")
    return " ".join([*sentences, *notes])


def mechanism_words(policy: PrivacyPolicy) -> str:
    """A machine's mechanism and its options in words: :attr:`~murmurfl.privacy.PrivacyPolicy.words`."""
    return policy.words
