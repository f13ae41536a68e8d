"""What an operator's file says of a private evaluation, and what follows from it for the machine's mu."""

from __future__ import annotations

from ...clients import Centring, Evaluation
from ...privacy import PrivacyPolicy
from ..models.model import Model
from ..runs.evaluation_settings import HELD_OUT, make_evaluation
from .centred_node import CentredNode


class EvaluatedNode(CentredNode):
    """The part of an operator's file that a private evaluation is in; its fields are the file's."""

    held_out: float
    score_bins: int

    def check_evaluation(self) -> None:
        """Refuse an evaluation that the strategy cannot have, and keys of it that nothing reads."""
        able = self.method.evaluates and not self.secret_order
        self._check("private_evaluation", able or not self.private_evaluation, "0 here")
        left = 1.0 - self.mean_share
        self._check("private_evaluation", 0 <= self.private_evaluation < left, f"a number >= 0 and < {left:g}")
        self._check("held_out", 0 <= self.held_out < 1, "a number >= 0 and < 1")
        self._check("score_bins", self.score_bins >= 0, "an integer >= 0")
        if not self.private_evaluation:
            self._check("held_out", self.held_out == HELD_OUT, "unset without private-evaluation")
            self._check("score_bins", not self.score_bins, "unset without private-evaluation")

    def evaluation_beside(self, policy: PrivacyPolicy, model: Model, held_out: int) -> Evaluation:
        """The machine's evaluation, beside a policy of everything else."""
        self._check("score_bins", not self.score_bins or model.num_classes == 2, "unset unless there are two classes")
        return make_evaluation(
            policy, model, mu=self.mu, share=self.private_evaluation, bins=self.score_bins, held_out=held_out
        )

    def parts_beside(
        self, policy: PrivacyPolicy, model: Model, num_features: int, *, held_out: int
    ) -> dict[str, Centring | Evaluation]:
        """What the machine releases beside its training, by the names of a client's options."""
        parts: dict[str, Centring | Evaluation] = {}
        if self.centred:
            parts["centring"] = self.centring_beside(policy, num_features)
        if self.private_evaluation:
            parts["evaluation"] = self.evaluation_beside(policy, model, held_out)
        return parts
