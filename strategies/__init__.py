"""What the server does: one file an algorithm, each a pure update rule in a Flower ``Strategy``."""

from .base import ReleaseStrategy
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .machines import SAMPLINGS, MachineDirectory, NodesUnavailableError, sample_machines
from .mu2 import Mu2, Mu2State, mu2_start, mu2_step
from .noisy_sgd import NoisySGD, NoisySGDState, noisy_sgd_step
from .online import OnlineFedSGD, OnlineState, online_step
from .replies import DirectMachines, Outcome, Refusal, Reply, RoundReport, RoundRequest
from .shuffled import (
    REGULARIZERS,
    VARIANTS,
    PublicEpochs,
    Regularizer,
    ShuffledAvg,
    ShuffledState,
    private_rounds,
    proximal,
)
from .trusted_mu2 import TrustedMu2

__all__ = [
    "REGULARIZERS",
    "SAMPLINGS",
    "VARIANTS",
    "CheckpointError",
    "DirectMachines",
    "MachineDirectory",
    "Mu2",
    "Mu2State",
    "NodesUnavailableError",
    "NoisySGD",
    "NoisySGDState",
    "OnlineFedSGD",
    "OnlineState",
    "Outcome",
    "PublicEpochs",
    "Refusal",
    "Regularizer",
    "ReleaseStrategy",
    "Reply",
    "RoundReport",
    "RoundRequest",
    "ShuffledAvg",
    "ShuffledState",
    "TrustedMu2",
    "load_checkpoint",
    "mu2_start",
    "mu2_step",
    "noisy_sgd_step",
    "online_step",
    "private_rounds",
    "proximal",
    "sample_machines",
    "save_checkpoint",
]
