"""Sample-level privacy in the lines a mod takes: a ClientApp from a model, a loss, samples and an epsilon.

Where :class:`~murmurfl.clients.CorrelatedNoiseMod` protects whole updates of somebody's training, here the machine
computes the gradients itself, one sample at a time, and clips each of them. Replacing a sample then moves a sum of N
gradients by 2 S, whatever N is, and the noise in their mean is N times smaller.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from ..privacy import ConfigurationError, PrivacyPolicy, Trust, protocol
from ..privacy.errors import OF_DATA, is_interrupt
from ..privacy.masking import Masking
from .answers import answer
from .base import PrivateClient
from .evaluation_share import EvaluationShare
from .foreign_machine import simulated_machine
from .foreign_sums import SimulatedSums
from .gradient_memory import GRADIENT_MEMORY_MIB
from .gradients import Samples
from .numpy_app import handled
from .operators_file import NODE_CONFIG_KEY, NODE_CONFIG_VARIABLE, operators_file
from .private_model import MachineModel
from .sample_methods import SampleMethod, sample_method
from .sample_node import SampleNode
from .sample_requests import read_request
from .simulation import in_simulation

logger = logging.getLogger(__name__)

SamplesOf = Callable[[Context], Any]
"""A function of Flower's context that gives a machine its samples."""
_KEPT_BYTES = 1 << 29
"""What a worker of a simulation keeps in memory of machines' samples: 512 MiB."""
_MOST_KEPT = 256
"""Machines whose samples it keeps at most."""


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
    evaluation : EvaluationShare, optional
        Of simulated machines, and on every machine which predictions are right.
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
        evaluation: EvaluationShare | None = None,
        mods: list[Mod] | None = None,
    ) -> None:
        super().__init__(mods=[self._as_participant, *(mods or [])])
        self.model = model
        self.method = method
        self.policy = policy
        self.evaluation = evaluation
        self._samples = samples
        self._seed = seed
        self._sums = SimulatedSums(helpers, seed) if policy.trust == "secure-aggregation" else None
        self._kept: OrderedDict[str, Samples] = OrderedDict()
        self._real: PrivateClient | None = None
        for register in (self.train, self.evaluate, self.query):
            register()(self._answer)
        # Flower hands an app's mods no message of a kind that the app has no function for, and helpers answer in one.
        self.query("open")(_not_a_helper)

    def samples_of(self, context: Context, *, in_memory: bool) -> Samples:
        """The samples of the machine that a context is of.

        Parameters
        ----------
        context : Context
        in_memory : bool
            Whether they may be read at once: in a simulation. Elsewhere nothing is refused because of what a sample is
            like, but for the machine's own log.

        Raises
        ------
        ConfigurationError
            If they are none, or in a simulation if the model cannot be tried on such.
        """
        found = self._samples(context) if _is_function(self._samples) else self._samples
        samples = self.model.read_samples(found, in_memory=in_memory)
        try:
            self.model.check_samples(samples)
        except BaseException as error:
            if in_memory or is_interrupt(error):
                raise
            # What the first sample is like decides it, and a server sees which machines are there.
            logger.exception(
                "This model cannot be tried on samples like this machine's first one. All that it fails on count as "
                "zero: look at what follows before this node takes part in a training.",
                extra=OF_DATA,
            )
        return samples

    def _as_participant(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """A mod: in a simulation of secure aggregation the last nodes are helpers, and machines see the others only."""
        if self._sums is None or not in_simulation():
            return call_next(message, context)
        return self._sums.answer(message, context, lambda own: call_next(message, own))

    def _answer(self, message: Message, context: Context) -> Message:
        return answer(message, lambda: self._content(message, context))

    def _content(self, message: Message, context: Context) -> RecordDict:
        layout = list(zip(self.model.names, self.model.gradients.shapes, strict=True))
        kind, content = read_request(message, self.method, layout)
        return handled(self._client, kind, content, context)

    def _client(self, context: Context) -> PrivateClient:
        if self._real is not None:
            return self._real
        if not in_simulation():
            return self._of_operators_file(context)
        samples = self._kept_samples(context)
        masking = None if self._sums is None else self._sums.masking(context, self.policy.min_cohort)
        made = simulated_machine(context, seed=self._seed)
        return self.machine(samples, self.policy, masking=masking, evaluation=self.evaluation, **made)

    def answer_as(self, client: PrivateClient) -> None:
        """Answer every message from now on with one real machine, whatever a context says.

        Notes
        -----
        **Formal guarantees.** Those of the machine.
        """
        self._real = client

    def _of_operators_file(self, context: Context) -> PrivateClient:
        """The real machine of a plain ``flower-supernode``, made once."""
        path = operators_file(context.node_config)
        if path is None:
            raise ConfigurationError(
                f"Expected an operator's file on a real node, got none: start it with `murmurfl node FILE`, or name "
                f"the file with the environment variable {NODE_CONFIG_VARIABLE} or --node-config "
                f"'{NODE_CONFIG_KEY}=\"...\"'. What the app says of privacy is for simulation only."
            )
        self.answer_as(SampleNode.read(path).client(self, context.node_config))
        return self._client(context)

    def machine(
        self,
        samples: Samples,
        policy: PrivacyPolicy,
        *,
        masking: Masking | None,
        evaluation: EvaluationShare | None,
        **made: Any,
    ) -> PrivateClient:
        """The machine with these samples and this policy, of which an evaluation has its share."""
        if evaluation is not None:
            right = None if self.evaluation is None else self.evaluation.right
            measure = None if self.model.measure is None else self.model.measure(right)
            made["evaluation"] = evaluation.evaluation(policy, measure, samples)
            policy = evaluation.training(policy)
        return self.method.client(self.model.gradients, samples, policy, masking=masking, **made)

    def _kept_samples(self, context: Context) -> Samples:
        """A simulated machine's samples; a worker keeps those it asked for last."""
        key = repr((sorted(context.node_config.items()), sorted(context.run_config.items())))
        if key not in self._kept:
            self._kept[key] = self.samples_of(context, in_memory=True)
            while len(self._kept) > 1 and (len(self._kept) > _MOST_KEPT or self._bytes_kept() > _KEPT_BYTES):
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _bytes_kept(self) -> int:
        return sum(getattr(samples, "nbytes", 0) for samples in self._kept.values())


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
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    example: Any = None,
    evaluation: float | EvaluationShare | None = None,
    mods: list[Mod] | None = None,
) -> PrivateClientApp:
    """A ClientApp that trains a model with differential privacy for every single sample.

    Parameters
    ----------
    model : torch.nn.Module, callable or LinearEstimator
        A module, or a function without arguments that makes one; what has ``requires_grad`` is trained. Or an estimator
        of scikit-learn's, in a :class:`~murmurfl.clients.LinearEstimator`.
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
        The most samples whose gradients are computed together; default 128.
    gradient_memory_mib : float
        What computing a module's gradients may take at a time, in MiB, in a simulation: as many samples are computed
        together as fit. A real machine computes one sample at a time.
    example : samples, optional
        Samples that are not private, or made up, of the shapes and types that machines have: the model is tried on them
        when the app is made. Without them, and with a function for ``samples``, it is tried at the first request.
    evaluation : float or EvaluationShare, optional
        Which share of mu^2 is for a private evaluation of the model, for
        :class:`~murmurfl.strategies.PrivateEvaluation`: how many samples it gets right, of those that are set aside for
        it. The training has the rest of mu^2.
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
    if policy is None:
        policy = chosen.policy(
            batch_size=batch_size,
            clip_norm=clip_norm,
            max_participations=_rounds(rounds),
            mu=0.0 if mu is None else mu,
            epsilon=epsilon,
            delta=delta,
            trust=trust,
            min_honest=min_honest,
            min_cohort=min_cohort,
        )
    else:
        stated = {"epsilon": epsilon, "mu": mu, "delta": delta, "clip_norm": clip_norm, "rounds": rounds}
        stated |= {"batch_size": batch_size, "trust": trust, "min_honest": min_honest, "min_cohort": min_cohort}
        _check_left_out(stated)
    share = EvaluationShare.of(evaluation)
    chosen.check(policy if share is None else share.training(policy))
    made = _machine_model(model, loss, seed=seed, chunk=chunk, gradient_memory_mib=gradient_memory_mib)
    app = PrivateClientApp(made, chosen, samples, policy, helpers=helpers, seed=seed, evaluation=share, mods=mods)
    if example is not None or not _is_function(samples):
        made.check_samples(made.read_samples(samples if example is None else example, in_memory=False))
    return app


def _machine_model(model: Any, loss: Callable[[Any, Any], Any] | None, **torch_only: Any) -> MachineModel:
    """A model of whatever library it is."""
    from .sklearn_model import estimator_model, is_estimator

    if is_estimator(model):
        return estimator_model(model, loss)
    from .torch_machine import torch_machine_model

    return torch_machine_model(model, loss, **torch_only)


def _check_left_out(stated: Mapping[str, Any]) -> None:
    """Refuse what a policy says already, unless it was left as it is."""
    usual = inspect.signature(private_client_app).parameters
    named = [name for name, value in stated.items() if value != usual[name].default]
    if named:
        raise ConfigurationError(f"Expected policy or {', '.join(named)}, got both: a PrivacyPolicy says everything.")


def _rounds(rounds: int | None) -> int:
    if rounds is None:
        raise ConfigurationError(
            "Expected rounds, the most releases of one training, got none: noise is made for so many."
        )
    return rounds


def _is_function(samples: Any) -> bool:
    return callable(samples) and not hasattr(samples, "__getitem__")


def _not_a_helper(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's interface
    return Message(Error(protocol.OPENING_REFUSED, "this node is no helper"), reply_to=message)
