"""Regret and gradient norms, which only a simulation can compute: from samples that no server has.

Neither is a release: where the samples are somebody's, they may not leave the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...privacy.mechanisms.optimal import cached
from ..data.task import Dataset, Shard
from ..models.model import Batch, Model


@runtime_checkable
class ComputableOptima(Protocol):
    """A convex model whose optima can be computed."""

    def loss_and_gradient(self, weight: NDArray[np.float64], samples: Batch) -> tuple[float, NDArray[np.float64]]:
        """The mean loss over some samples at ``weight``, shape (d,), and its gradient."""
        ...


class OnlineLosses:
    """Regret of online federated learning: the global models' losses on the samples their round is about to use.

    With f^{r,t}_i the loss on the t-th sample of machine i in round r, and sums over all of them (zhang-2025,
    section II),

        dynamic regret = sum (f(x^r) - min_x f^r(x)),    static regret = sum (f(x^r) - f(x*)),

    where f^r is the mean over round r and x* minimises the mean over all rounds. Models that give no loss with its
    gradient have a cumulative loss alone.

    Parameters
    ----------
    shards : sequence of Shard
        Every machine's samples, in the order it uses them.
    local_steps : int
        tau, samples of a machine and round.
    num_rounds : int
        R.
    data : str
        Names the data, their order and the model, for optima to be found in the cache on disk.
    """

    def __init__(self, model: Model, shards: Sequence[Shard], local_steps: int, num_rounds: int, data: str) -> None:
        self._data = data
        self._model = model
        self._shards = shards
        self._local_steps = local_steps
        self._num_rounds = num_rounds
        self.losses: dict[int, float] = {}
        """Mean loss of x^r over round r, by r from 0."""

    def record(self, server_round: int, parameters: Sequence[NDArray[Any]]) -> None:
        """Take note of the model after ``server_round``, which is the one round ``server_round`` (from 0) starts at."""
        if server_round < self._num_rounds:
            self.losses[server_round], _ = self._model.evaluate(parameters, self._round(server_round))

    def document(self, most_points: int = 200) -> dict[str, Any] | None:
        """Cumulative loss and regrets after every few rounds, as plain values; None if rounds are missing.

        Returns
        -------
        dict
            ``rounds`` and lists as long: ``cumulative-loss``, ``dynamic-regret`` and ``static-regret`` in sums of
            losses over samples divided by the number of machines, as the paper has them. The regrets are None where
            the optima are not known.
        """
        if len(self.losses) != self._num_rounds:
            return None
        losses = np.array([self.losses[r] for r in range(self._num_rounds)])
        dynamic = static = None
        if isinstance(self._model, ComputableOptima):
            optima = self._optima(self._model)
            dynamic, static = losses - optima["of each round"], losses - optima["fixed"]
        shown = np.unique(np.linspace(0, self._num_rounds - 1, min(most_points, self._num_rounds)).round().astype(int))

        def sums(values: NDArray[np.float64] | None) -> list[float] | None:
            return None if values is None else (self._local_steps * np.cumsum(values))[shown].tolist()

        return {
            "rounds": (shown + 1).tolist(),
            "cumulative-loss": sums(losses),
            "dynamic-regret": sums(dynamic),
            "static-regret": sums(static),
        }

    def _round(self, server_round: int) -> Batch:
        chosen = slice(server_round * self._local_steps, (server_round + 1) * self._local_steps)
        return Shard.stack([(shard, chosen) for shard in self._shards])

    def _optima(self, model: ComputableOptima) -> dict[str, NDArray[np.float64]]:
        """The loss of every round at its own optimum, and at that of all rounds."""
        start = np.zeros(self._model.num_parameters)

        def compute() -> dict[str, NDArray[np.float64]]:
            used = slice(0, self._num_rounds * self._local_steps)
            _, fixed = _minimum(model, Shard.stack([(shard, used) for shard in self._shards]), start)
            rounds = [self._round(r) for r in range(self._num_rounds)]
            return {
                "of each round": np.array([_minimum(model, samples, start)[0] for samples in rounds]),
                "fixed": np.array([model.loss_and_gradient(fixed, samples)[0] for samples in rounds]),
            }

        inputs: dict[str, int | float | str] = {"data": self._data, "rounds": self._num_rounds}
        inputs["local steps"] = self._local_steps
        shape = (self._num_rounds,)
        return cached(
            "optima of online learning, 2",
            inputs,
            compute,
            lambda found: all(found[name].shape == shape for name in ("of each round", "fixed")),
        )


def _minimum(model: ComputableOptima, samples: Batch, start: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The least mean loss over some samples and where; where it is not attained, to about 1e-4."""
    from scipy.optimize import minimize

    double = np.asarray(samples[0], dtype=np.float64), samples[1]  # once, and not at every step
    found = minimize(
        lambda weight: model.loss_and_gradient(weight, double),
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500, "ftol": 1e-9, "gtol": 1e-5},
    )
    return float(found.fun), found.x


class GradientNorms:
    """How near a run came to a stationary point: ||grad F(w_t)||, F the mean training loss (tran-cutkosky-2022).

    Parameters
    ----------
    dataset : Dataset
        Whose training samples are used; for a network the first 2,000 of them.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        count = model.most_samples
        self._model = model
        self._samples = dataset.train_features[:count], dataset.train_labels[:count]
        self._norms: dict[int, float] = {}

    def record(self, server_round: int, parameters: Sequence[NDArray[Any]]) -> None:
        """Take note of the model after a round."""
        self._norms[server_round] = float(np.linalg.norm(self._model.mean_gradient(parameters, self._samples)))

    def document(self) -> dict[str, Any]:
        """``rounds`` and ``values``, as plain values."""
        return {"rounds": list(self._norms), "values": list(self._norms.values())}
