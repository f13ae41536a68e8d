"""What a machine does: one file an algorithm, the release rule in common, and the bridge to Flower's Message API."""

from ..privacy import flower  # noqa: F401 - checks the installed version before Flower is imported
from .base import PrivateClient, Request
from .cohort import Cohort
from .context_ledger import ContextLedger
from .convex import ConvexSmoothGradients
from .delayed_momentum import DelayedMomentumClient
from .gradients import PerSampleGradients, Samples, TorchGradients
from .isrl_dp import IsrlDpClient
from .mu2 import Mu2Client
from .noise_mod import CorrelatedNoiseMod
from .noisy_sgd import NoisySGDClient
from .numpy_app import numpy_client_app
from .online import OnlineClient, local_updates
from .shuffled import ShuffledClient
from .simulation import simulated_machine
from .update_node import UpdateNode
from .update_policy import UpdatePolicy

__all__ = [
    "Cohort",
    "ContextLedger",
    "ConvexSmoothGradients",
    "CorrelatedNoiseMod",
    "DelayedMomentumClient",
    "IsrlDpClient",
    "Mu2Client",
    "NoisySGDClient",
    "OnlineClient",
    "PerSampleGradients",
    "PrivateClient",
    "Request",
    "Samples",
    "ShuffledClient",
    "TorchGradients",
    "UpdateNode",
    "UpdatePolicy",
    "local_updates",
    "numpy_client_app",
    "simulated_machine",
]
