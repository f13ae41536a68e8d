r"""What strategies of private momentum with a trusted server share (tran-cutkosky-2022; ALGORITHMS section 4).

Machines send clipped gradients without noise, all of them in every round, and go through their samples in the same
order in every epoch of N rounds. The server publishes w_{t+1} = w_t - eta m^_t / ||m^_t||, m^_t a private momentum.
"""

from __future__ import annotations

from typing import Any, ClassVar, Required, TypeVar, Unpack

import numpy as np

from ...privacy import ConfigurationError
from ..projected import check_step
from ..rounds.layout import Vector
from ..rounds.replies import Reply
from ..rounds.stragglers import LateAnswers
from .trusted_server import TrustedOptions, TrustedServer, could_be_honest

StateT = TypeVar("StateT")


class MomentumOptions(TrustedOptions, total=False):
    """Options of :class:`TrustedMomentum`, where they are described."""

    learning_rate: Required[float]
    alpha: Required[float]


def normalised_step(w: Vector, momentum: Vector, learning_rate: float) -> Vector:
    """A step of length eta against the momentum; if the momentum is zero there is no step."""
    length = float(np.linalg.norm(momentum))
    return w - (learning_rate / length) * momentum if length > 0 else w


class TrustedMomentum(TrustedServer[StateT]):
    """Private momentum, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`; a base class.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    **options
        See :class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`. Every machine is asked in every round:
        ``clients_per_round`` is ``num_clients``. The policy has ``release_rule="paper"`` and as many passes
        (``sample_participations``) of ``min_separation`` = N releases as samples are used.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, which sees contributions without noise, provided machines are honest, links
    are private, and nothing else computed from un-noised sums is published; the checkpoint holds them and must be kept
    like the data. It rests on every sample taking part in rounds c, c + N, c + 2 N, ... only: a reply counts only if
    its number is the round's, so a machine that misses a request is left out from then on (and every machine, if the
    server stops between its replies and its checkpoint), and replies that state a larger sensitivity or another grid
    than the policy's are dropped. A run that is interrupted and resumed has the same guarantee: noise that was drawn
    before is the same when it is needed again (:class:`~murmurfl.strategies.trusted.trusted_server.TrustedServer`).
    With mechanism ``none``, which is refused unless the keys are simulated, nothing is guaranteed. Proof:
    docs/proofs/sensitivities.md.
    """

    late_answers: ClassVar[LateAnswers] = "refused"  # a sample would not return after as many rounds

    def __init__(self, *, learning_rate: float, alpha: float, **options: Unpack[TrustedOptions]) -> None:
        super().__init__(**options)
        check_step(learning_rate)
        if not 0 < alpha <= 1:
            raise ConfigurationError(f"Expected 0 < alpha <= 1, got {alpha!r}.")
        if self.policy.release_rule != "paper":
            raise ConfigurationError(
                f"Expected a policy with release_rule 'paper', got {self.policy.release_rule!r}: a contribution that "
                "comes later has another weight."
            )
        self.learning_rate = float(learning_rate)
        self.alpha = float(alpha)
        returning = self.policy.sample_participations > 1
        self.epoch = self.policy.min_separation if returning else self.num_rounds

    def _settle(self, machines: int) -> None:
        super()._settle(machines)
        if self.clients_per_round != self.num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {self.num_clients} for private momentum, got "
                f"{self.clients_per_round}: samples must return in the same rounds of every epoch."
            )

    def settings(self) -> dict[str, Any]:
        own = {"learning_rate": self.learning_rate, "alpha": self.alpha, "epoch": self.epoch}
        return {**super().settings(), **own}

    def check_reply(self, reply: Reply) -> bool:
        return reply.release == len(self.history) + 1 and could_be_honest(self.policy, reply, most_releases=1)
