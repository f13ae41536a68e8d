"""``strategy = auto``: what ``murmurfl plan`` would choose."""

from __future__ import annotations

from ...clients import Mu2Client
from ...privacy import ConfigurationError
from ...privacy.setting import refusal
from ...strategies import Mu2
from ..settings.run_config import SECURE, RunConfig
from .method import Method

AUTO = "auto"


class AutoMethod(Method):
    """Stands for the method that is chosen where a run is worked out (:mod:`murmurfl.app.planning`).

    Nothing is ever run with it: :func:`~murmurfl.app.runs.experiment.prepare` puts the chosen one in its place.
    """

    name = AUTO
    sentence = "What `murmurfl plan` would choose, from machines, samples, mu and how often a sample may be used."
    keys = frozenset({"sample-uses", "stream"})
    mechanisms = ()
    uses_public = False
    client_type = Mu2Client
    strategy_type = Mu2
    trusts = ("untrusted-server", SECURE, "trusted-server")  # type: ignore[assignment]

    def check(self, config: RunConfig) -> None:
        super().check(config)
        for name, value, usual in (("passes", config.passes, 1), ("max_participations", config.max_participations, 0)):
            if value != usual:
                expected = f"{usual} with strategy = {AUTO!r}, which settles it by sample-uses and num-rounds"
                raise refusal(name, expected, value)


def refuse_unsettled() -> ConfigurationError:
    """Refuse ``auto`` where operators' files fix the strategy."""
    return ConfigurationError(
        "Expected a strategy on real nodes, got strategy = 'auto': operators' files name the strategy that they serve. "
        "Decide first, with `murmurfl plan --machines M --samples N --epsilon E`, and set what it prints in the run "
        "configuration and in the operators' files."
    )
