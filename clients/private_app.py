"""Sample-level privacy in the lines a mod takes: a ClientApp from a model, a loss, samples and an epsilon.

Where :class:`~murmurfl.clients.CorrelatedNoiseMod` protects whole updates of somebody's training, here the machine
computes the gradients itself, one sample at a time, and clips each of them. Replacing a sample then moves a sum of N
gradients by 2 S, whatever N is, and the noise in their mean is N times smaller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from ..privacy import ConfigurationError, PrivacyPolicy, Trust, protocol
from ..privacy.gdp import gdp_mu
from ..privacy.masking import Masking
from .base import PrivateClient
from .foreign_machine import simulated_machine
from .foreign_sums import SimulatedSums
from .gradients import Samples
from .numpy_app import serve
from .private_model import MachineModel
from .requests import malformed
from .sample_methods import SampleMethod, sample_method
from .simulation import in_simulation

SamplesOf = Callable[[Context], Any]
"""A function of Flower's context that gives a machine its samples."""
_MOST_KEPT = 32
"""Machines whose samples a worker of a simulation keeps."""
_OTHER_ARRAYS = (
    "expected the arrays of what is trained: start the strategy with murmurfl.clients.trainable_arrays(module), "
    "not with a whole state_dict, and use the strategy of this machine's method"
)


class PrivateClientApp(ClientApp):
    """A ClientApp whose machines answer with private sums of per-sample gradients; :func:`private_client_app` makes it.

    Parameters
    ----------
    model : MachineModel
    method : SampleMethod
    samples : Any
        A function of the context, or the samples themselves.
    policy : PrivacyPolicy
        Of simulated machines.
    helpers, seed : int
        Of simulations.
    mods : list of Mod, optional

    Notes
    -----
    **Formal guarantees.** Those of :func:`private_client_app`.
    """

    def __init__(
        self,
        model: MachineModel,
        method: SampleMethod,
        samples: Any,
        policy: PrivacyPolicy,
        *,
        helpers: int,
        seed: int,
        mods: list[Mod] | None = None,
    ) -> None:
        super().__init__(mods=[self._as_participant, *(mods or []), self._as_requests])
        self.model = model
        self.method = method
        self.policy = policy
        self._samples = samples
        self._seed = seed
        self._sums = SimulatedSums(helpers, seed) if policy.trust == "secure-aggregation" else None
        self._kept: OrderedDict[str, Samples] = OrderedDict()
        serve(self, self._client)
        # Flower hands an app's mods no message of a kind that the app has no function for, and helpers answer in one.
        self.query("open")(_not_a_helper)

    def samples_of(self, context: Context, *, in_memory: bool) -> Samples:
        """The samples of the machine that a context is of.

        Parameters
        ----------
        context : Context
        in_memory : bool
            Whether they may be read at once: in a simulation.

        Raises
        ------
        ConfigurationError
            If they are none.
        """
        found = self._samples(context) if _is_function(self._samples) else self._samples
        samples = self.model.read_samples(found, in_memory=in_memory)
        self.model.check_samples(samples)
        return samples

    def _as_participant(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """A mod: in a simulation of secure aggregation the last nodes are helpers, and machines see the others only."""
        if self._sums is None or not in_simulation():
            return call_next(message, context)
        return self._sums.answer(message, context, lambda own: call_next(message, own))

    def _as_requests(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """A mod: requests under the record keys of the protocol, and other arrays than the model's refused."""
        try:
            message.content = self._request(message.content)
        except Exception as refusal:
            return _refused(message, refusal)
        return call_next(message, context)

    def _request(self, content: RecordDict) -> RecordDict:
        records = content.array_records
        expected = [
            (name, tuple(shape)) for name, shape in zip(self.model.names, self.model.gradients.shapes, strict=True)
        ]
        for record in records.values():
            shapes = [(name, tuple(array.shape)) for name, array in record.items()]
            numbered = [(str(i), shape) for i, (_, shape) in enumerate(expected)]
            if shapes not in (expected, numbered):
                raise malformed(_OTHER_ARRAYS)
        return content

    def _client(self, context: Context) -> PrivateClient:
        if not in_simulation():
            raise ConfigurationError("Expected a simulation.")
        samples = self._kept_samples(context)
        masking = None if self._sums is None else self._sums.masking(context, self.policy.min_cohort)
        return self.machine(samples, self.policy, masking=masking, **simulated_machine(context, seed=self._seed))

    def machine(
        self, samples: Samples, policy: PrivacyPolicy, *, masking: Masking | None, **made: Any
    ) -> PrivateClient:
        """The machine with these samples and this policy."""
        return self.method.client(self.model.gradients, samples, policy, masking=masking, **made)

    def _kept_samples(self, context: Context) -> Samples:
        """A simulated machine's samples; a worker keeps those it asked for last."""
        key = repr((sorted(context.node_config.items()), sorted(context.run_config.items())))
        if key not in self._kept:
            self._kept[key] = self.samples_of(context, in_memory=True)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def private_client_app(
    model: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    samples: Any = None,
    *,
    policy: PrivacyPolicy | None = None,
    method: str = "full-batch",
    epsilon: float | None = None,
    mu: float | None = None,
    delta: float = 1e-5,
    clip_norm: float = 1.0,
    rounds: int | None = None,
    batch_size: int | None = None,
    trust: Trust = "untrusted-server",
    min_honest: int = 1,
    min_cohort: int = 1,
    helpers: int = 2,
    seed: int = 0,
    chunk: int | None = None,
    mods: list[Mod] | None = None,
) -> PrivateClientApp:
    """A ClientApp that trains a model with differential privacy for every single sample.

    Parameters
    ----------
    model : torch.nn.Module or callable
        A module, or a function without arguments that makes one. What has ``requires_grad`` is trained.
    loss : callable, optional
        ``loss(output, target) -> scalar``, as PyTorch's criteria; default the cross-entropy.
    samples : callable, or samples
        ``samples(context)`` gives a machine's own: (inputs, targets), a data set of such pairs, or a ``DataLoader``,
        whose data set is taken. Without a function, what every machine has.
    policy : PrivacyPolicy, optional
        Says everything that follows up to ``min_cohort``, which are then left out.
    method : {"full-batch", "mu2", "noisy-sgd", "fedavg"}
        Which strategy the server has: ``FullBatch``, ``Mu2``, ``NoisySGD`` or ``CorrelatedFedAvg``.
    epsilon, mu : float
        Of all releases of one training together; exactly one of them. Epsilon is at ``delta``.
    delta : float
    clip_norm : float
        S, the L2 bound on one sample's gradient.
    rounds : int
        K, the most releases of one training.
    batch_size : int, optional
        b, samples in a release, each used once; left out where every release is a sum over all samples
        (``full-batch``, and ``fedavg`` by default).
    trust : {"untrusted-server", "secure-aggregation"}
    min_honest, min_cohort : int
        Under ``secure-aggregation`` (:class:`~murmurfl.privacy.PrivacyPolicy`).
    helpers : int
        How many of a simulation's nodes, the last ones, are helpers, under ``secure-aggregation``.
    seed : int
        Of the simulated machines' keys: the same run gives the same model.
    chunk : int, optional
        Samples whose gradients are computed together; default as many as memory is set aside for.
    mods : list of Mod, optional
        Flower mods of your own.

    Returns
    -------
    ClientApp

    Raises
    ------
    ConfigurationError
        If a value is impossible or contradicts another, or the model mixes samples.

    Notes
    -----
    The policy, or what stands for it, is that of *simulated* machines.

    **Formal guarantees.** Those of :class:`~murmurfl.clients.PrivateClient`: everything a machine returns is mu-GDP for
    replacement of *one sample*, against a server that chooses models, rounds, acknowledgements and stopping adaptively;
    under ``secure-aggregation`` if one helper and min_honest machines of each sum are honest, and the plan's mu_local
    whatever happens. Simulated keys protect nobody's data.
    """
    chosen = sample_method(method)
    if samples is None:
        raise ConfigurationError(
            "Expected samples, got none: pass a function of Flower's context that gives (inputs, targets)."
        )
    stated = {
        "epsilon": epsilon,
        "mu": mu,
        "rounds": rounds,
        "batch_size": batch_size,
    }
    if policy is None:
        policy = chosen.policy(
            batch_size=batch_size,
            clip_norm=clip_norm,
            max_participations=_rounds(rounds),
            mu=_mu(epsilon, mu, delta),
            delta=delta,
            trust=trust,
            min_honest=min_honest,
            min_cohort=min_cohort,
        )
    elif any(value is not None for value in stated.values()):
        named = ", ".join(name for name, value in stated.items() if value is not None)
        raise ConfigurationError(f"Expected policy or {named}, got both: a PrivacyPolicy says everything.")
    chosen.client.check_policy(policy)
    made = _machine_model(model, loss, seed=seed, chunk=chunk)
    return PrivateClientApp(made, chosen, samples, policy, helpers=helpers, seed=seed, mods=mods)


def _machine_model(model: Any, loss: Callable[[Any, Any], Any] | None, *, seed: int, chunk: int | None) -> MachineModel:
    """A model of whatever library it is."""
    from .torch_machine import torch_machine_model

    return torch_machine_model(model, loss, seed=seed, chunk=chunk)


def _rounds(rounds: int | None) -> int:
    if rounds is None:
        raise ConfigurationError(
            "Expected rounds, the most releases of one training, got none: noise is made for so many."
        )
    return rounds


def _mu(epsilon: float | None, mu: float | None, delta: float) -> float:
    if (epsilon is None) == (mu is None):
        raise ConfigurationError(f"Expected exactly one of epsilon and mu, got {epsilon!r} and {mu!r}.")
    return gdp_mu(epsilon, delta) if epsilon is not None else float(mu or 0.0)


def _is_function(samples: Any) -> bool:
    return callable(samples) and not hasattr(samples, "__getitem__")


def _refused(message: Message, refusal: Exception) -> Message:
    from .answers import answer

    def again() -> RecordDict:
        raise refusal

    return answer(message, again)


def _not_a_helper(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's interface
    return Message(Error(protocol.OPENING_REFUSED, "this node is no helper"), reply_to=message)
